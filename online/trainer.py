"""Continual training: which records a step takes, how far training came, and what survives a kill.

    buffer.fresh(through) ─┐
    buffer.replay ─────────┼─► Candidate.step ─► ... ─► checkpoint published ─► commit(checkpoint, through)
    anchors ───────────────┘

A checkpoint counts from the moment the buffer has committed it together with the sequence number it has come to. So
after a kill every record is trained as new exactly once: in the checkpoint that is taken up, or behind it.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from distill.train import StepStats
from heads.artifact import PROVENANCE, publish, verify
from online.buffer import Buffer, Replay
from online.candidate import Candidate, Ranks
from online.config import Training
from online.records import Record
from online.registry import Registry

KEPT_CHECKPOINTS = 2

SERVED = "served"
"""In the place of a checkpoint's name: training began anew from the version that is served."""


@dataclass(kw_only=True)
class Progress:
    through: int = 0
    """Every training record up to this sequence number was trained as new, or passed over."""
    records: int = 0
    """Trained as new, since this draft's training began."""
    skipped: int = 0
    """Passed over because training was slower than traffic."""


class Trainer:
    """Blocking, and all of it on one thread; `asyncio` waits for it elsewhere."""

    def __init__(
        self, cfg: Training, replay: Replay, buffer: Buffer, registry: Registry, candidate: Candidate, folder: Path,
        anchors: Sequence[Record] = (),
    ) -> None:  # fmt: skip
        self.cfg, self.replay, self.buffer, self.registry, self.anchors = cfg, replay, buffer, registry, anchors
        self.candidate, self.ranks, self.folder = candidate, Ranks(candidate), folder
        self.progress = Progress()
        self.num_steps = self.num_not_finite = 0
        """Since the last checkpoint or discard."""

    def start(self) -> str:
        """Take up training where the newest intact checkpoint left it, or at the served version; says which."""
        self.folder.mkdir(parents=True, exist_ok=True)
        commits = self.buffer.trained()
        for commit in commits:
            folder = self.folder / commit.checkpoint_id
            if commit.checkpoint_id == SERVED:
                self.progress = Progress(through=commit.through)
                break
            if _is_intact(folder):
                self.ranks.do("resume", self._served(), folder)
                self.progress = Progress(**json.loads((folder / PROVENANCE).read_text())["progress"])
                # A later commit may have given the same checkpoint a later position.
                self.progress.through = max(commit.through, self.progress.through)
                return commit.checkpoint_id
        else:
            self.progress = Progress(through=commits[0].through if commits else 0)
        self.ranks.do("begin", self._served())
        return SERVED

    def lag(self) -> int:
        """Training records that arrived and were not trained yet."""
        return self.buffer.bound_lag(self.progress.through, 0)[1]

    def step(self) -> StepStats | None:
        """One optimizer step on the next fresh records and replayed ones; None where too few wait."""
        through, num_skipped = self.buffer.bound_lag(self.progress.through, self.cfg.max_lag_records)
        self.progress.through, self.progress.skipped = through, self.progress.skipped + num_skipped
        fresh = self.buffer.fresh(through, self.cfg.fresh_per_step)
        if len(fresh) < self.cfg.fresh_per_step:
            return None
        # A function of the position, so that a step that is done again after a kill is the same step.
        seed = self.cfg.seed * 1_000_003 + through
        replayed = self.buffer.replay(
            self.cfg.replay_per_step, self.anchors, through=through, now_s=time.time(), seed=seed, policy=self.replay
        )
        stats: StepStats = self.ranks.do("step", [*(stored.record for stored in fresh), *replayed], seed)
        self.progress.through = fresh[-1].seq
        self.progress.records += len(fresh)
        self.num_steps += 1
        self.num_not_finite += stats.skipped
        return stats

    @property
    def has_diverged(self) -> bool:
        """More steps were not finite than a candidate may have."""
        share = self.num_not_finite / max(1, self.cfg.records_per_candidate // self.cfg.fresh_per_step)
        return share > self.cfg.max_skipped_share or self.candidate.is_hopeless

    def checkpoint(self) -> str:
        """The name of a new checkpoint that counts.

        Raises: NotFiniteError; OSError where a disk is full. Nothing counts then that did not before.
        """
        name = f"checkpoint-{self._next_number():06d}"
        publish(
            self.folder / name,
            lambda partial: self.ranks.do("write", partial),
            {"progress": vars(self.progress), "began_from": self.candidate.version.name},
        )
        self.buffer.commit_trained(name, self.progress.through)
        self.num_steps = self.num_not_finite = 0
        for old in self._checkpoints()[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old)
        return name

    def discard(self) -> None:
        """Back to what the last checkpoint held. The records since are not new any more: they may be to blame."""
        newest = next(iter(self.buffer.trained()), None)
        through, name = self.progress.through, newest.checkpoint_id if newest else SERVED
        if name != SERVED and _is_intact(self.folder / name):
            self.ranks.do("resume", self._served(), self.folder / name)
            self.buffer.commit_trained(name, through)
        else:
            self.begin_again()
        self.num_steps = self.num_not_finite = 0

    def begin_again(self) -> None:
        """Training from the served version, behind the same records."""
        self.ranks.do("begin", self._served())
        self.buffer.commit_trained(SERVED, self.progress.through)
        self.num_steps = self.num_not_finite = 0

    def _served(self) -> Path:
        current = self.registry.current()
        assert current is not None, "the learner begins with a version"
        return self.registry.path(current)

    def _checkpoints(self) -> list[Path]:
        return sorted(self.folder.glob("checkpoint-*"))

    def _next_number(self) -> int:
        names = [path.name for path in self._checkpoints()]
        names += [commit.checkpoint_id for commit in self.buffer.trained() if commit.checkpoint_id != SERVED]
        return 1 + max((int(name.removeprefix("checkpoint-")) for name in names), default=0)


def _is_intact(checkpoint: Path) -> bool:
    try:
        verify(checkpoint)
    except (ValueError, OSError):
        return False
    return True
