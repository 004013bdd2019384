"""Measure how long a draft takes to train: tau over minutes of training, next to other trainers.

$ python -m benchmarks.time_to_tau                       # EAGLE-3 for SmolLM2, eight hours on two cores
$ python -m benchmarks.time_to_tau --family dflash
$ pip install --no-deps --target peers nvidia-modelopt==0.47.0 omegaconf antlr4-python3-runtime==4.9.3 pulp nvidia-ml-py
$ python -m benchmarks.time_to_tau --peers peers --trainers redraft best modelopt --output outputs/modelopt
$ python -m benchmarks.time_to_tau --minutes 2 --every-minutes 1 --seeds 1 --num-questions 8 \
--max-tokens 32 --rows 1                                  # a short form, to see it run

    seed 0: redraft, best, speculators, ... one after the other ─► heads at every mark ┐
    seed 1: ...                                                                         ├─► forecast, vLLM
    seed 2: ...                                                                         ┘   ─► curves, ratios

Every trainer gets the same rows of answers in the same order, all threads, and runs alone. Its
heads are judged afterwards by redraft's forecast on questions that no trainer has seen, and the
last head is also measured in vLLM. After a kill, the same command continues: finished training runs
and judgements are kept, and the interrupted training run begins again.

report.json is written after every training run:

| key | content |
|---|---|
| `time_to_tau` | `ratio_PEER`: minutes until redraft's defaults reach the peer's last tau, over the peer's |
| `equal_time` | `PEER`: gain in tau over the peer, in the last minute that both have |
| `equal_labels` | `PEER`: gain in tau over the peer, after the same number of answer tokens |
| `trainers` | by name: settings, runs, `curve` over minutes, and the last tau as `forecast` |

The best recipe is compared in the same way under `best_ratio_PEER` and `best_PEER`. Each figure has
`value`, `low` and `high` (95%, over questions and seeds). A ratio with `reached` false is a lower
bound: with at least one seed, the head never reached the peer's tau.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import tyro

from benchmarks.results import write_results
from benchmarks.svg import to_svg
from benchmarks.time_to_tau.charts import WIDTH, draw_curves
from benchmarks.time_to_tau.course import Course, Finished, Mark, make_settings
from benchmarks.time_to_tau.curves import (
    Curve,
    estimate,
    gain_at_equal_labels,
    gain_at_equal_time,
    last_tau,
    minutes_to_reach,
    ratio,
    reaches,
)
from benchmarks.time_to_tau.judge import Counts, Judge
from benchmarks.time_to_tau.peers import PEERS
from redraft.eval.intervals import Estimate
from redraft.files.artifact import write_whole
from redraft.files.setting_error import require_least
from redraft.recipes.demo.parts import ANSWERS, make_target

OURS = "redraft"
HELD_OUT = 0.05


@dataclass(frozen=True, kw_only=True)
class Side:
    """A trainer with its settings."""

    title: str
    trainer: str = OURS
    rows: int | None = None
    """Number of rows per step; None uses the trainer's default."""
    flags: tuple[str, ...] = ()


BEST: Mapping[str, tuple[str, ...]] = {
    "eagle3": (
        *("--head.num-steps", "3", "--draft-vocab-size", "8192", "--optim.momentum", "0.8"),
        *("--mixed-precision", "bf16"),
    ),
    "dflash": (
        *("--head.block-size", "8", "--head.num-anchors", "64", "--draft-vocab-size", "8192"),
        *("--optim.momentum", "0.8", "--mixed-precision", "bf16"),
    ),
}
"""Flags of our best recipe for half an hour on two cores."""

SMALL: Mapping[str, tuple[str, ...]] = {
    "eagle3": (),
    "dflash": ("max_anchors=64", "block_size=8"),
}
"""Settings of speculators for small steps. Its default for DFlash has 8,192 slots in every step."""

SIDES: Mapping[str, Side] = {
    OURS: Side(title="redraft, default"),
    "best": Side(title="redraft, best recipe", rows=1),
    "speculators": Side(title="speculators, default", trainer="speculators"),
    "speculators_small": Side(title="speculators, small steps", trainer="speculators", rows=1),
    "modelopt": Side(title="ModelOpt", trainer="modelopt"),
}
"""Settings by name. `best` and `speculators_small` use small steps, because more of them fit into
half an hour on a CPU.
"""

USUAL = (OURS, "best", "speculators", "speculators_small")
"""Trainers that need no additional package."""


@dataclass(frozen=True, kw_only=True)
class Config:
    family: Literal["eagle3", "dflash"] = "eagle3"
    """Family of the heads."""
    trainers: tuple[str, ...] = USUAL
    """Trainers to compare: redraft, best, speculators, speculators_small, modelopt."""
    peers: Path | None = None
    """Folder with the packages of other trainers (`pip install --no-deps --target`), unless they
    are installed.
    """
    minutes: float = 30.0
    """Length of each training run, in minutes."""
    every_minutes: float = 5.0
    """Minutes of training between two heads that are judged."""
    seeds: int = 3
    """Number of training runs per trainer, each with a new seed."""
    rows: int | None = None
    """Number of rows per step for every trainer, for a short form; by default, each trainer uses
    its own default.
    """
    sequence_length: int = 2048
    """Length of a row in tokens, the same for all trainers."""
    num_questions: int = 64
    """Number of held-out questions on which the heads are judged."""
    max_tokens: int = 128
    """Maximum length of an answer, in tokens."""
    num_speculative_tokens: int = 3
    """Number of draft tokens per step, in forecast and engine."""
    engine: bool = True
    """Also measure the last head of every training run in vLLM."""
    threads: int = 2
    """Number of threads per training run."""
    target: str | None = None
    """Folder of the target; by default SmolLM2-135M-Instruct, made in --parts."""
    data: str = str(ANSWERS)
    """File with answers of the target."""
    parts: Path = Path("outputs/parts")
    """Folder of the default target."""
    flags: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Argument to append to every redraft training command; repeat the flag for each word."""
    output: Path | None = None
    """Folder for report.json, curves.svg and the training runs; by default
    outputs/time-to-tau/FAMILY.
    """

    def __post_init__(self) -> None:
        require_least(self, seeds=1, num_questions=2, max_tokens=2, threads=1)
        if not 0 < self.every_minutes <= self.minutes:
            raise ValueError("--every-minutes must be above 0, and at most --minutes")
        if unknown := set(self.trainers) - set(SIDES):
            raise ValueError(f"there is no trainer {min(unknown)}: choose from {', '.join(SIDES)}")

    @property
    def folder(self) -> Path:
        return self.output or Path("outputs/time-to-tau") / self.family


def main(cfg: Config) -> None:
    """Train, judge and report.

    Raises:
        ValueError: a package is missing, a flag is wrong, or --output contains a different
            comparison.
    """
    # 1. Refuse settings that cannot work.
    for name in cfg.trainers:
        if (peer := PEERS.get(SIDES[name].trainer)) is not None:
            peer.require(cfg.family, cfg.peers)
    target = cfg.target or str(make_target(cfg.parts))
    courses = {
        (seed, name): make_course(cfg, target, name, seed)
        for seed in range(cfg.seeds)
        for name in cfg.trainers
    }
    for course in courses.values():
        make_settings(course)
        require_same(course)

    # 2. Train one run after another, and judge their heads.
    judge = Judge(
        target=target,
        data=cfg.data,
        held_out=HELD_OUT,
        num_questions=cfg.num_questions,
        max_tokens=cfg.max_tokens,
        tokens=cfg.num_speculative_tokens,
        folder=cfg.folder / "judged",
    )
    judged: dict[str, list[Judged]] = {name: [] for name in cfg.trainers}
    for number, ((seed, name), course) in enumerate(courses.items(), 1):
        print(f"\n{number} of {len(courses)}: {SIDES[name].title}, seed {seed}", flush=True)
        finished = run_course(course)
        judged[name].append(judge_course(judge, finished, engine=cfg.engine))
        report(cfg, target, judged)


# ------------------------------------------------------------------------------------------------------
# courses


def make_course(cfg: Config, target: str, name: str, seed: int) -> Course:
    side = SIDES[name]
    own = BEST[cfg.family] if name == "best" else side.flags
    return Course(
        trainer=side.trainer,
        family=cfg.family,
        target=target,
        data=cfg.data,
        held_out=HELD_OUT,
        minutes=cfg.minutes,
        every_minutes=cfg.every_minutes,
        seed=seed,
        sequence_length=cfg.sequence_length,
        rows=cfg.rows or side.rows,
        threads=cfg.threads,
        flags=(*own, *cfg.flags),
        settings=SMALL[cfg.family] if name == "speculators_small" else (),
        peers=str(cfg.peers.absolute()) if cfg.peers else None,
        tokens=str(cfg.folder / "tokens"),
        output=str(cfg.folder / f"{name}-{seed}"),
    )


def require_same(course: Course) -> None:
    """Raise ValueError if the folder contains a finished course with different settings."""
    if course.result.is_file() and read_course(course).course != course:
        raise ValueError(
            f"{course.output} contains a training run with different settings: pass a different "
            f"--output"
        )


def read_course(course: Course) -> Finished:
    return msgspec.json.decode(course.result.read_bytes(), type=Finished)


def run_course(course: Course) -> Finished:
    """Return a course's marks. Unless it is finished, run it in a separate process first.

    Raises:
        ValueError: the course failed, after it printed the reason.
    """
    if course.result.is_file():
        print(f"{course.output} is already done")
        return read_course(course)
    shutil.rmtree(course.output, ignore_errors=True)  # of an interrupted course
    command = [sys.executable, "-m", "benchmarks.time_to_tau.course"]
    env = {**os.environ, "OMP_NUM_THREADS": str(course.threads)}
    done = subprocess.run([*command, msgspec.json.encode(course).decode()], env=env)
    if done.returncode:
        raise ValueError(
            f"{course.output} failed for the reason above: fix the problem and run the same "
            f"command again"
        )
    return read_course(course)


@dataclass(frozen=True)
class Judged:
    """A course with the counts of its heads."""

    finished: Finished
    counts: list[Counts]
    """Counts of the forecast, by mark."""
    engine: Counts | None
    """Counts of the last head in the engine."""

    @property
    def marks(self) -> list[Mark]:
        return self.finished.marks

    @property
    def curve(self) -> Curve:
        accepted_MQ, drafts_MQ = np.stack(self.counts).transpose(2, 0, 1)
        return Curve(
            np.array([mark.minutes for mark in self.marks]),
            np.array([mark.labels for mark in self.marks], np.float64),
            accepted_MQ,
            drafts_MQ,
        )


def judge_course(judge: Judge, finished: Finished, *, engine: bool) -> Judged:
    heads = [Path(finished.course.output) / mark.head for mark in finished.marks]
    counts = judge.forecast(heads)
    served = judge.serve(heads[-1]) if engine else None
    return Judged(finished, counts, served)


# ------------------------------------------------------------------------------------------------------
# the report


def report(cfg: Config, target: str, judged: Mapping[str, Sequence[Judged]]) -> None:
    curves = {name: [run.curve for run in runs] for name, runs in judged.items() if runs}
    compared = compare(curves)
    trainers: dict[str, Any] = {
        name: {
            "title": SIDES[name].title,
            "settings": judged[name][0].finished.settings,
            "runs": [describe_run(run) for run in judged[name]],
            "curve": over_minutes(curves[name], cfg.every_minutes),
            "forecast": describe(estimate(last_tau, curves[name])),
        }
        for name in curves
    }
    content = {
        "family": cfg.family,
        "target": target,
        "command": shlex.join(sys.argv),
        "settings": {**asdict(cfg), "peers": cfg.peers and cfg.peers.name},
        **compared,
        "trainers": trainers,
    }
    write_results(cfg.folder / "report.json", content)
    points = [
        {"series": entry["title"], "x": point["minutes"], **point}
        for entry in trainers.values()
        for point in entry["curve"]
    ]
    names = [SIDES[name].title for name in trainers]
    write_whole(cfg.folder / "curves.svg", to_svg(draw_curves(points, names), WIDTH))
    print(*describe_table(trainers, compared), sep="\n", flush=True)


def compare(curves: Mapping[str, Sequence[Curve]]) -> dict[str, dict[str, Any]]:
    """Compare redraft's sides with the peers', on the seeds that both have."""
    found: dict[str, dict[str, Any]] = {"time_to_tau": {}, "equal_time": {}, "equal_labels": {}}
    for peer, theirs in curves.items():
        for own, prefix in ((OURS, ""), ("best", "best_")):
            if SIDES[peer].trainer == OURS or own not in curves:
                continue
            both = min(len(curves[own]), len(theirs))
            pair = curves[own][:both], theirs[:both]
            found["time_to_tau"][f"{prefix}ratio_{peer}"] = {
                **describe(estimate(ratio, *pair)),
                "minutes": estimate(minutes_to_reach, *pair).value,
                "reached": all(reaches(*one) for one in zip(*pair, strict=True)),
            }
            found["equal_time"][f"{prefix}{peer}"] = describe(estimate(gain_at_equal_time, *pair))
            found["equal_labels"][f"{prefix}{peer}"] = describe(
                estimate(gain_at_equal_labels, *pair)
            )
    return found


def describe(found: Estimate) -> dict[str, float | None]:
    low, high = found.interval()
    is_finite = np.isfinite([low, high]).all()
    return {
        "value": found.value,
        "low": float(low) if is_finite else None,
        "high": float(high) if is_finite else None,
    }


def over_minutes(curves: Sequence[Curve], every_minutes: float) -> list[dict[str, Any]]:
    """Return tau at the start, every few minutes, and at the end."""
    first = float(np.mean([curve.minutes_M[0] for curve in curves]))
    last = min(curve.last_minute for curve in curves)
    between = np.arange(every_minutes, last, every_minutes).tolist()
    minutes = [first, *(minute for minute in between if minute > first), last]
    return [
        {"minutes": minute, **describe(estimate(lambda curve: curve.at_minute(minute), curves))}  # noqa: B023
        for minute in minutes
    ]


def describe_run(run: Judged) -> dict[str, Any]:
    taus = run.curve.taus.tolist()
    engine = None
    if run.engine is not None:
        accepted, drafts = run.engine.sum(0).tolist()
        engine = 1 + accepted / drafts
    return {
        "seed": run.finished.course.seed,
        "planned_steps": run.finished.planned_steps,
        "marks": [{**asdict(mark), "tau": tau} for mark, tau in zip(run.marks, taus, strict=True)],
        "engine": engine,
    }


def describe_table(
    trainers: Mapping[str, Any], compared: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    lines = [f"{'trainer':24} {'minutes':>8} {'answer tokens':>14} {'tau':>20} {'in vLLM':>8}"]
    for entry in trainers.values():
        last, engine = entry["runs"][-1]["marks"][-1], entry["runs"][-1]["engine"]
        lines.append(
            f"{entry['title']:24} {last['minutes']:8.1f} {last['labels']:14,} "
            f"{spell(entry['forecast']):>20} {'-' if engine is None else format(engine, '.2f'):>8}"
        )
    for name, found in compared["time_to_tau"].items():
        bound = "" if found["reached"] else "at least "
        lines.append(f"{name}: {bound}{spell(found)}")
    return lines


def spell(found: Mapping[str, Any]) -> str:
    if found["low"] is None:
        return f"{found['value']:.2f}"
    return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"
