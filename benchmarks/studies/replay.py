"""Measure which share of the records in an online training step should be replayed.

$ python -m benchmarks.studies.replay outputs/demo-up/up                  # after `make demo-up`, an hour
$ python -m benchmarks.studies.replay outputs/demo-online --steps 16      # two domains, forgetting included

    buffer of a learner that has stopped ─► new records in order of arrival ─┐
                                        └─► records drawn again ─────────────┴─► steps ─► held-out requests

Every setting starts from the first version and takes the same number of steps with the same number
of records, so all settings cost the same; with fewer replayed records, a step has more new ones.
The head is judged on the learner's held-out requests, by domain: the purpose of replay is to retain
what the head learned from earlier traffic. The gain in tau over the learner's own setting has a 95%
interval over requests and seeds. After a kill, the same command continues the study.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from benchmarks.demo.online_replay import list_steps, train_from
from benchmarks.results import write_results
from benchmarks.time_to_tau.bench import describe, spell
from benchmarks.time_to_tau.curves import Curve, estimate, gain_in_tau, last_tau
from redraft.files.kept import compute_once
from redraft.files.setting_error import require_least
from redraft.online.daemon.config import LearnerConfig, load_config
from redraft.online.daemon.judging import Judge
from redraft.online.daemon.opening import opened
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.candidate import Candidate
from redraft.online.learning.scoring import Request, RequestScore
from redraft.online.records.record import Record

SHARES = (0.0, 0.25, 0.5, 0.75)
"""Shares of replayed records in a step."""

ALL = "all"
"""Name of all domains together."""


@dataclass(frozen=True, kw_only=True)
class Config:
    folder: Annotated[Path, tyro.conf.Positional]
    """Folder with the learner.toml and the buffer of a stopped learner."""
    steps: int = 32
    """Number of steps per training run."""
    seeds: int = 3
    """Number of training runs for each setting, each with a new seed."""
    output: Path = Path("outputs/replay")
    """Folder for table.json."""

    def __post_init__(self) -> None:
        require_least(self, steps=1, seeds=1)


@dataclass(frozen=True)
class Setting:
    """The numbers of new and replayed records in a step."""

    new: int
    replayed: int

    def __str__(self) -> str:
        return f"{self.new} new, {self.replayed} replayed"


Scores = Mapping[Request, RequestScore]


def main(cfg: Config) -> None:
    """Train, judge, and write the table after each seed.

    Raises:
        ValueError: the buffer has too few records for the steps.
        AlreadyOwnedError: the learner is running.
    """
    learner = load_config(cfg.folder / "learner.toml")
    settings = repr((learner.training, learner.replay, learner.judging))
    scores: dict[Setting, list[Scores]] = {setting: [] for setting in list_settings(learner)}
    with opened(learner) as (_, registry, buffer):
        candidate = Candidate(learner.training, learner.draft.family, learner.target)
        judge = Judge(learner, registry, buffer, candidate)
        first, seqs = registry.path(registry.promoted()[0]), judge.select_requests()
        for seed in range(cfg.seeds):
            for setting, found in scores.items():
                name = f"{setting}, seed {seed}"
                batches = take_steps(buffer, learner, setting, cfg.steps, seed)
                scored = compute_once(
                    cfg.output,
                    name,
                    [cfg.steps, settings, seqs],
                    list[tuple[Request, RequestScore]],
                    partial(train, judge, first, batches, cfg.steps, seqs, name, seed),
                )
                found.append(dict(scored))
            rows = make_table(scores, own_setting(learner))
            write_results(cfg.output / "table.json", {"steps": cfg.steps, "rows": rows})
    for row in rows:
        print(describe_row(row))


def own_setting(learner: LearnerConfig) -> Setting:
    return Setting(learner.training.fresh_per_step, learner.training.replay_per_step)


def list_settings(learner: LearnerConfig) -> list[Setting]:
    """List the learner's setting, and settings that replay other shares of equally many records."""
    own = own_setting(learner)
    total = own.new + own.replayed
    others = [Setting(total - round(share * total), round(share * total)) for share in SHARES]
    return list(dict.fromkeys([own, *others]))


def take_steps(
    buffer: Buffer, learner: LearnerConfig, setting: Setting, steps: int, seed: int
) -> Iterator[list[Record]]:
    """Yield the records of every step.

    Raises:
        ValueError: the buffer has too few records.
    """
    taken = list_steps(buffer, learner.replay, setting.new, setting.replayed, steps, seed)
    for step in range(steps):
        fresh, replayed = next(taken, ([], []))
        if len(fresh) < setting.new:
            raise ValueError(
                f"the buffer has records for {step} steps with {setting.new} new records each: "
                f"pass --steps {step}"
            )
        yield [*fresh, *replayed]


def train(
    judge: Judge,
    first: Path,
    batches: Iterator[list[Record]],
    steps: int,
    seqs: Sequence[int],
    title: str,
    seed: int,
) -> list[tuple[Request, RequestScore]]:
    """Train from the first version, and return the scores on the held-out requests."""
    with tempfile.TemporaryDirectory() as folder:
        draft = train_from(judge.candidate, first, batches, steps, Path(folder), title, seed)
        return list(judge.score(draft, seqs).items())


# ------------------------------------------------------------------------------------------------------
# the table


def make_table(scores: Mapping[Setting, Sequence[Scores]], own: Setting) -> list[dict[str, Any]]:
    """Return tau of each setting, and its gain over the learner's own, by domain."""
    domains = [ALL, *dict.fromkeys(score.domain for score in scores[own][0].values())]
    rows = []
    for setting, found in scores.items():
        row: dict[str, Any] = {"setting": str(setting), "tau": {}, "gain": {}}
        for domain in domains:
            ours, theirs = (
                [make_curve(one, domain) for one in runs] for runs in (found, scores[own])
            )
            row["tau"][domain] = describe(estimate(last_tau, ours))
            if setting != own:
                row["gain"][domain] = describe(estimate(gain_in_tau, ours, theirs))
        rows.append(row)
    return rows


def make_curve(scores: Scores, domain: str) -> Curve:
    """Return a curve with one mark and a question for each request of the domain."""
    chosen = [score.counts for score in scores.values() if domain in (ALL, score.domain)]
    counts = [[counts.num_accepted, counts.num_drafts] for counts in chosen]
    accepted_Q, drafts_Q = np.array(counts, float).T
    return Curve(np.zeros(1), np.zeros(1), accepted_Q[None], drafts_Q[None])


def describe_row(row: Mapping[str, Any]) -> str:
    parts = []
    for domain, tau in row["tau"].items():
        gain = f", gain {spell(row['gain'][domain])}" if row["gain"] else ""
        parts.append(f"{domain} {spell(tau)}{gain}")
    return f"{row['setting']:24} {'; '.join(parts)}"


if __name__ == "__main__":
    from redraft.recipes.cli.run import run_recipe

    run_recipe(main, Config, __doc__)
