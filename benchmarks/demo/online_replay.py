"""The learner's training replayed offline on the captured records.

The training is repeated with several seeds, and a fair ceiling is measured as well.

    learned   the records in order of arrival with replayed ones, but without gate and rollout
    ceiling   as many steps of as many records, all of the new domain and drawn at random from everything captured

Both begin at the first version and are judged by the forecast on test prompts. A seed changes which
records are replayed or drawn, and their order within a step.

S = seeds, N = prompts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.demo.online_report import estimate_share
from redraft.distill.signal.sources import InProcessTarget
from redraft.engine.prompts import Prompt
from redraft.eval.forecast.greedy import forecast, greedy_continuations
from redraft.files.progress import Progress
from redraft.files.target_folder import TargetFolder
from redraft.heads.families.standalone import StandaloneDraft
from redraft.online.daemon.config import LearnerConfig
from redraft.online.fleet.registry import Registry
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.candidate import DRAFT, Candidate
from redraft.online.learning.config import Replay
from redraft.online.records.record import Record

FIRST = "v000001"


class Replayer:
    """Trains from the first version on the records in a learner's buffer.

    The learner must have stopped.
    """

    def __init__(
        self,
        cfg: LearnerConfig,
        target: Any,
        prompts: Sequence[Prompt],
        num_speculative_tokens: int,
        max_tokens: int,
    ) -> None:
        self.cfg, self.target, self.num_speculative_tokens = cfg, target, num_speculative_tokens
        opened = TargetFolder.open(cfg.target)
        self.fingerprint = opened.fingerprint
        self.first = Registry(cfg.registry).path(FIRST)
        self.candidate = Candidate(cfg.training, cfg.draft.family, cfg.target)
        self.continuations = greedy_continuations(
            target,
            prompts,
            max_tokens=max_tokens,
            num_speculative_tokens=num_speculative_tokens,
            end_ids=opened.end_ids,
        )

    def run(
        self, num_records: int, domain: str, seeds: Sequence[int], ceiling: Path
    ) -> dict[str, Any]:
        """Return the share of the gap that training on the first `num_records` closes.

        The first ceiling is written to `ceiling`.
        """
        steps = -(-num_records // self.cfg.training.fresh_per_step)
        before_N2 = self._judge(self.first)
        runs: dict[str, list[NDArray[np.float64]]] = {"learned": [], "ceiling": []}
        with Buffer(self.cfg.buffer_config, self.fingerprint) as buffer:
            stored = buffer.fresh(0, 1_000_000)
            of_domain = [one.record for one in stored if one.record.domain == domain]
            for seed in seeds:
                own = self.cfg.training.fresh_per_step, self.cfg.training.replay_per_step
                in_order = list_steps(buffer, self.cfg.replay, *own, steps, seed)
                for name, batches in (
                    ("learned", ([*fresh, *replayed] for fresh, replayed in in_order)),
                    ("ceiling", self._at_random(of_domain, steps, seed)),
                ):
                    title = f"replay offline, {name}, seed {seed}"
                    with tempfile.TemporaryDirectory() as folder:
                        draft = train_from(
                            self.candidate, self.first, batches, steps, Path(folder), title, seed
                        )
                        runs[name].append(self._judge(draft))
                        # The engine measures the ceiling of the first seed only.
                        if name == "ceiling" and not ceiling.exists():
                            draft.rename(ceiling)
        share = estimate_share(before_N2, np.stack(runs["learned"]), np.stack(runs["ceiling"]))
        return {
            **share,
            "seeds": list(seeds),
            "steps": steps,
            "num_prompts": len(before_N2),
            "records": len(of_domain),
        }

    def _at_random(
        self, records: Sequence[Record], steps: int, seed: int
    ) -> Iterator[list[Record]]:
        """Yield random records for every step, the same number as in the learner's step."""
        rng = np.random.default_rng(seed)
        count = min(
            len(records), self.cfg.training.fresh_per_step + self.cfg.training.replay_per_step
        )
        for _ in range(steps):
            yield [records[i] for i in rng.choice(len(records), count, replace=False)]

    @torch.no_grad()
    def _judge(self, folder: Path) -> NDArray[np.float64]:
        """Return the forecast's accepted draft tokens and drafts of every test prompt, [N, 2]."""
        draft = StandaloneDraft.load(folder, dtype=torch.float32).eval()
        found = forecast(
            draft, InProcessTarget(self.target), self.continuations, self.num_speculative_tokens
        )
        return np.array(
            [(prompt.counts.num_accepted, prompt.counts.num_drafts) for prompt in found.per_prompt],
            float,
        )


def train_from(
    candidate: Candidate,
    first: Path,
    batches: Iterable[Sequence[Record]],
    steps: int,
    folder: Path,
    title: str,
    seed: int = 0,
) -> Path:
    """Train from the version `first`, write the draft into `folder`, and return its path.

    Each of the `batches` has the records of one step; there are at most `steps`.
    """
    candidate.begin(first)
    for step, records in enumerate(Progress(batches, total=steps, desc=title, unit="step")):
        # This has the same form as the learner's seeds (`Trainer.step`). No run has a million
        # steps, so no two seeds are equal.
        candidate.step(records, seed * 1_000_003 + step)
    candidate.write(folder)
    return folder / DRAFT


def list_steps(
    buffer: Buffer, policy: Replay, num_new: int, num_replayed: int, steps: int, seed: int
) -> Iterator[tuple[list[Record], list[Record]]]:
    """Yield the new and the replayed records of every step, as `Trainer.step` chooses them.

    The iterator ends early if no new records are left.
    """
    through = 0
    for _ in range(steps):
        fresh = buffer.fresh(through, num_new)
        if not fresh:
            return
        replayed = buffer.replay(
            num_replayed,
            through=through,
            now_s=fresh[-1].record.time_s,
            seed=seed * 1_000_003 + through,
            policy=policy,
        )
        yield [one.record for one in fresh], replayed
        through = fresh[-1].seq
