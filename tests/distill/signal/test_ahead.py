"""A slow teacher beside a slow step.

Together they take the time of the slower one, and nothing else changes.
"""

from __future__ import annotations

import datetime
import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from make_heads import VOCAB, make_signal, make_target
from train_on_ranks import make_standalone
from waiting import PATIENCE_S

from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import Sample, SampleStats
from redraft.distill.loss.choice import Divergence
from redraft.distill.signal.ahead import OneAhead
from redraft.distill.train.loop import LoadedData, train
from redraft.distill.train.optim import Optim
from redraft.distill.train.run_config import Loop
from redraft.distill.train.run_folder import RunFolder
from redraft.distill.train.step import Distillation
from redraft.heads.draft import Batch, TargetSignal

CPU = torch.device("cpu")


class Teacher:
    """A real target in this process, that takes `pause_s` longer and remembers its batches."""

    def __init__(self, pause_s: float = 0.0, fails_at: int | None = None) -> None:
        self.target, self.pause_s, self.fails_at = make_target(), pause_s, fails_at
        self.asked: list[tuple[list[int], str]] = []
        self._busy = threading.Lock()

    def __call__(self, batch: Batch) -> TargetSignal:
        assert self._busy.acquire(blocking=False), "two threads at once"
        try:
            self.asked.append(
                (batch.input_ids_BT.flatten().tolist(), threading.current_thread().name)
            )
            if len(self.asked) == self.fails_at:
                raise ConnectionError("http://t1 did not answer")
            time.sleep(self.pause_s)
            return make_signal(self.target, batch)
        finally:
            self._busy.release()


def make_data(num: int = 16) -> PackedDataset:
    draw = np.random.default_rng(0)
    samples = [
        Sample(
            input_ids=draw.integers(3, VOCAB, 12, dtype=np.int32),
            loss_mask=np.arange(12) >= 4,
            conversation=str(i),
            domain="all",
        )
        for i in range(num)
    ]
    return PackedDataset(samples, sequence_length=12)


def run_training(
    folder: Path, teacher: Teacher, *, ahead: bool, steps: int, **loop: int
) -> RunFolder:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    target = OneAhead(teacher, CPU) if ahead else teacher
    optim = Optim(lr=1e-2, accumulation=2, schedule="constant")
    distillation = Distillation(
        make_standalone(teacher.target), target, Divergence(), optim, 6, accelerator
    )
    run = RunFolder.open(folder, {}, accelerator, overwrite=False)
    data = LoadedData(
        train=make_data(),
        held_out=make_data(2),
        prompts=[],
        stats=SampleStats(),
        hash="",
        end_ids=(),
        date=datetime.date(2024, 2, 29),
    )
    options = {
        "eval_every": 2,
        "save_every": 2,
        "log_every": 1,
        "batch_size": 1,
        "eval_batches": 1,
        **loop,
    }
    train(distillation, data, run, Loop(steps=steps, sequence_length=12, **options), 2)
    distillation.close()
    return run


def numbers(run: RunFolder) -> list[dict[str, object]]:
    return [{k: v for k, v in entry.items() if k != "tokens_per_s"} for entry in run.metrics]


def test_training_ahead_is_the_same_training_also_when_it_is_resumed(tmp_path: Path) -> None:
    plain = run_training(tmp_path / "plain", Teacher(), ahead=False, steps=6)
    teacher = Teacher()
    whole = run_training(tmp_path / "ahead", teacher, ahead=True, steps=6)
    assert numbers(whole) == numbers(plain)
    names = [name for _, name in teacher.asked]
    assert names.count("one batch ahead") == 11  # all of 6 x 2 micro-batches but the first
    assert len(names) == 12 + 3  # and three evaluations

    run_training(tmp_path / "killed", Teacher(), ahead=True, steps=4)
    resumed = run_training(tmp_path / "killed", Teacher(), ahead=True, steps=6)
    assert numbers(resumed) == numbers(plain)


def test_an_evaluation_between_does_not_lose_the_batch_that_is_under_way() -> None:
    teacher = Teacher()
    source, data = OneAhead(teacher, CPU), make_data()
    first, other = (data.batch(i, batch_size=1) for i in range(2))
    source.start(first)
    assert torch.equal(
        source(other).distribution.hidden_BTD,
        make_signal(teacher.target, other).distribution.hidden_BTD,
    )
    assert torch.equal(
        source(first).distribution.hidden_BTD,
        make_signal(teacher.target, first).distribution.hidden_BTD,
    )
    assert [ids for ids, _ in teacher.asked] == [
        b.input_ids_BT.flatten().tolist() for b in (first, other)
    ]


def test_what_a_server_says_is_raised_by_the_step_that_needs_it() -> None:
    source, batch = OneAhead(Teacher(fails_at=1), CPU), make_data().batch(0, batch_size=1)
    source.start(batch)
    with pytest.raises(ConnectionError, match=r"\bt1\b"):
        source(batch)
    assert source(batch).distribution.hidden_BTD.shape[1] == 12  # asked again


def test_the_teacher_works_on_the_next_batch_while_a_step_trains() -> None:
    """Each waits for the other in the middle of its work.

    One after the other, neither would end.
    """
    both_work = threading.Barrier(2, timeout=PATIENCE_S)
    signal, data = Teacher()(make_data().batch(0, batch_size=1)), make_data()
    batches = [data.batch(i, batch_size=1) for i in range(4)]

    def teach(batch: Batch) -> TargetSignal:
        if batch is not batches[0]:  # before the first batch, nothing is trained
            both_work.wait()
        return signal

    source = OneAhead(teach, CPU)
    source.start(batches[0])
    for batch, following in itertools.pairwise(batches):
        source(batch)
        source.start(following)
        both_work.wait()
    assert source(batches[-1]) is signal
