"""Train one head against the clock, in a separate process.

    rows of answers ─► the target's states ─► a trainer's step ─► the clock ─► at each mark: the head
    the same for all   computed here           its own code        stops        as a folder

A course opens the target and the data as `redraft train` does, and gives every trainer the same
packed rows, in the order of its seed. Its minutes are minutes of training, i.e. creating the head,
the target's passes and the steps. They do not include opening the data, measuring the speed and
writing heads.
"""

from __future__ import annotations

import copy
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from redraft.distill.run.start import start
from redraft.distill.run.training_run import Run
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.run_config import HeadConfig
from redraft.distill.train.step import Distillation
from redraft.engine.process import LIBC, PR_SET_PDEATHSIG
from redraft.files.artifact import write_whole
from redraft.files.progress import Progress
from redraft.heads.catalog import find_family
from redraft.heads.draft import Batch
from redraft.recipes import train
from redraft.recipes.cli.run import parse_recipe
from redraft.recipes.decide.candidates import with_flags

COURSE = "course.json"
TIMED_STEPS = 3  # Steps to measure the speed by, after one that also warms up.


@dataclass(frozen=True, kw_only=True)
class Course:
    """The settings of one training run, passed to its process."""

    trainer: str
    """`redraft`, or the name of a peer."""
    family: str
    target: str
    data: str
    held_out: float
    minutes: float
    """Length of the training run, in minutes. The number of steps is planned from the speed of the
    first steps.
    """
    every_minutes: float
    """Minutes between two marks."""
    seed: int
    sequence_length: int
    rows: int | None = None
    """Rows per step; None uses the trainer's default."""
    threads: int
    flags: tuple[str, ...] = ()
    """Flags of `redraft train`. For a peer, they only choose how the data is opened."""
    peers: str | None = None
    """Folder with packages of peers."""
    settings: tuple[str, ...] = ()
    """Settings of a peer's trainer as NAME=VALUE, in place of its defaults."""
    tokens: str
    """Folder of the tokenised data, which all courses share."""
    output: str
    """Folder for the heads, and for `course.json`, which is written last."""

    @property
    def result(self) -> Path:
        return Path(self.output) / COURSE


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A head exported during training."""

    minutes: float
    cpu_minutes: float
    steps: int
    tokens: int
    labels: int
    """Answer tokens read so far, once for each pass over the data."""
    head: str
    """Folder of the head, relative to the course's folder."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The content of `course.json`."""

    course: Course
    settings: dict[str, Any]
    """Version and settings of the trainer."""
    planned_steps: int
    marks: list[Mark]


class Clock:
    """Wall-clock seconds, and CPU seconds of all threads of this process."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0
        self._begun = (0.0, 0.0)

    def start(self) -> None:
        self._begun = (time.perf_counter(), time.process_time())

    def stop(self) -> None:
        self.wall_s += time.perf_counter() - self._begun[0]
        self.cpu_s += time.process_time() - self._begun[1]


class Training:
    """The opened target and rows of a course, its clock and its marks."""

    def __init__(self, course: Course) -> None:
        self.course, self.clock = course, Clock()
        self.run = Run(find_family(course.family), make_settings(course))
        self.settings: dict[str, Any] = {}
        self.marks: list[Mark] = []
        self.planned = self.steps = self.tokens = self.labels = 0

    def batch(self, index: int, rows: int) -> Batch:
        """Return the rows of step `index`."""
        return self.run.data.train.batch(index, batch_size=rows)

    def states(self, layers: Sequence[int]) -> InProcessTarget:
        """Return the target's states after `layers`."""
        return InProcessTarget(self.run.target.model, layers)

    def plan(self, take_step: Callable[[int], object], per: int = 1) -> None:
        """Take a few steps with a copy, and plan the number of steps that fill the minutes.

        A call of the copy takes `per` steps.
        """
        take_step(0)
        seconds = []
        for index in range(1, 1 + TIMED_STEPS):
            started = time.perf_counter()
            take_step(index)
            seconds.append(time.perf_counter() - started)
        left_s = 60 * self.course.minutes - self.clock.wall_s
        self.planned = max(1, round(per * left_s / statistics.median(seconds)))

    @contextmanager
    def marking(self, export: Callable[[Path], object]) -> Iterator[Callable[..., None]]:
        """Run the clock over the planned steps.

        Yields a function that each step calls with its batches; it stops the clock to `export` a
        head at a mark.
        """
        bar = Progress(total=self.planned, desc=self.course.trainer, unit="step")
        self._mark(export)

        def done(*batches: Batch) -> None:
            self.clock.stop()
            self.steps += 1
            self.tokens += sum(int((batch.document_BT >= 0).sum()) for batch in batches)
            self.labels += sum(int(batch.loss_mask_BT.sum()) for batch in batches)
            bar.update()
            every_s = 60 * self.course.every_minutes
            is_due = self.clock.wall_s // every_s > 60 * self.marks[-1].minutes // every_s
            if is_due or self.steps == self.planned:
                self._mark(export)
            self.clock.start()

        self.clock.start()
        yield done
        bar.close()

    def _mark(self, export: Callable[[Path], object]) -> None:
        name = f"head-{len(self.marks):02}"
        export(Path(self.course.output) / name)
        self.marks.append(
            Mark(
                minutes=self.clock.wall_s / 60,
                cpu_minutes=self.clock.cpu_s / 60,
                steps=self.steps,
                tokens=self.tokens,
                labels=self.labels,
                head=name,
            )
        )

    def finish(self) -> None:
        finished = Finished(
            course=self.course,
            settings=self.settings,
            planned_steps=self.planned,
            marks=self.marks,
        )
        write_whole(self.course.result, json.dumps(asdict(finished), indent=1, default=str) + "\n")


def make_settings(course: Course) -> HeadConfig[Any]:
    """Return the settings of `redraft train` for a course.

    Raises:
        ValueError: a flag is wrong.
    """
    command = [
        *(course.family.replace("_", "-"), "--target", course.target, "--prove.no-engine"),
        *("--data.source", course.data, "--data.held-out", str(course.held_out)),
        *("--data.cache", course.tokens, "--loop.seed", str(course.seed)),
        *("--loop.sequence-length", str(course.sequence_length)),
        *("--output", str(Path(course.output) / "run")),
    ]
    if course.rows is not None:
        command += ["--loop.batch-size", str(course.rows)]
    recipe, rest = train.choose_recipe(with_flags(command, course.flags), "redraft train")
    settings: HeadConfig[Any] = parse_recipe(recipe, rest)
    return settings


def train_redraft(training: Training) -> None:
    """Train as `redraft train` does, without its checkpoints and evaluations."""
    run = training.run
    cfg = run.cfg
    assert isinstance(cfg, HeadConfig), "a head"
    training.settings = {"flags": training.course.flags, "loop": asdict(cfg.loop)}
    training.clock.start()
    draft = start(run)
    training.clock.stop()

    def distil(head: Any, steps: int) -> Distillation:
        states = training.states(head.aux_layer_ids)
        made = Distillation(head, states, cfg.divergence, cfg.optim, steps, run.accelerator)
        if cfg.loop.compile:
            made.compile_layers()
        return made

    def batches(step: int) -> list[Batch]:
        first = step * cfg.optim.accumulation
        numbers = range(first, first + cfg.optim.accumulation)
        return [training.batch(number, cfg.loop.batch_size) for number in numbers]

    trial = distil(copy.deepcopy(draft), cfg.loop.steps)
    training.plan(lambda step: trial.step(batches(step)))
    trial.close()
    distillation = distil(draft, training.planned)

    def export(folder: Path) -> None:
        head: Any = distillation.draft
        head.export(folder, torch.bfloat16, weights=distillation.weights())

    with training.marking(export) as done:
        for step in range(training.planned):
            rows = batches(step)
            distillation.take_step(rows)
            done(*rows)


def main(text: str) -> None:
    course = msgspec.json.decode(text, type=Course)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if the benchmark is killed, its training is too
    torch.set_num_threads(course.threads)
    if course.peers is not None:
        sys.path.append(course.peers)
    training = Training(course)
    if course.trainer == "redraft":
        train_redraft(training)
    else:
        from benchmarks.time_to_tau.peers import PEERS

        PEERS[course.trainer].train(training)
    training.finish()


if __name__ == "__main__":
    main(sys.argv[1])
