"""What a launch is told of its machine, and the text that a run is evaluated on."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from make_heads import make_ids, make_signal, make_target
from train_on_ranks import make_standalone

from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import Sample, SampleStats
from redraft.distill.loss.choice import Divergence
from redraft.distill.run.config import Loop
from redraft.distill.run.folder import RunFolder
from redraft.distill.train import loop
from redraft.distill.train.loop import LoadedData
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation


@pytest.mark.parametrize(
    ("given", "launched", "computes", "taken"),
    [
        ("bf16", None, False, "no"),
        (None, "bf16", False, "no"),
        ("bf16", None, True, "bf16"),
        (None, "bf16", True, None),
        ("no", "bf16", False, "no"),
        (None, None, False, None),
    ],
)
def test_a_cpu_without_instructions_for_bfloat16_computes_in_float32_and_says_so(
    given: str | None,
    launched: str | None,
    computes: bool,
    taken: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = []

    def accelerator(**of: Any) -> SimpleNamespace:
        asked.append(of["mixed_precision"])
        return SimpleNamespace(is_main_process=True)

    if launched:  # by `accelerate launch --mixed_precision`
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    else:
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(loop, "Accelerator", accelerator)
    monkeypatch.setattr(loop, "computes_bfloat16", lambda: computes)
    loop.make_accelerator(1, given, None)
    assert asked == [taken]
    is_replaced = not computes and given != "no" and "bf16" in (given, launched)
    assert ("no instructions" in capsys.readouterr().out) == is_replaced


def test_no_more_held_out_batches_are_made_than_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = np.arange(4, dtype=np.int32), np.ones(4, dtype=bool)
    samples = [Sample(input_ids=ids, loss_mask=mask, conversation=str(i), domain="all") for i in range(5)]
    held_out, made = PackedDataset(samples, sequence_length=4, seed=0), []
    collate = held_out._collate
    monkeypatch.setattr(held_out, "_collate", lambda rows: made.append(len(rows)) or collate(rows))
    accelerator: Any = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"))
    for wanted, num in ((2, 2), (9, 5)):
        made.clear()
        batches = loop._take_held_out(held_out, Loop(batch_size=1, eval_batches=wanted), accelerator)
        assert len(batches) == len(made) == num


def make_text() -> PackedDataset:
    """Four rows of 8 tokens."""
    samples = [
        Sample(
            input_ids=np.array(make_ids(8, seed), np.int32),
            loss_mask=np.ones(8, dtype=bool),
            conversation=str(seed),
            domain="all",
        )
        for seed in range(4)
    ]
    return PackedDataset(samples, sequence_length=8)


def test_epochs_are_passes_over_the_data_and_the_schedule_is_as_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, target, optim = make_text(), make_target(), Optim(lr=1e-2, accumulation=2)
    accelerator = loop.make_accelerator(2, None, None)
    signal = functools.partial(make_signal, target)
    distillation = Distillation(make_standalone(target), signal, Divergence(), optim, 2000, accelerator)
    data = LoadedData(train=text, held_out=text, prompts=[], stats=SampleStats(), hash="", end_ids=())
    cfg = Loop(epochs=3, eval_every=0, save_every=0, batch_size=1, sequence_length=8)
    loop.train(distillation, data, RunFolder(tmp_path, accelerator), cfg, 2)
    # Four rows, two a step: two steps a pass.
    assert distillation.step_index == distillation.num_steps == 6
    told = "6 steps of 2 rows of 8 tokens: up to 96 tokens, 3 passes over the 4 rows of the data"
    assert told in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"--loop.epochs.*--loop.minutes"):
        Loop(epochs=1, minutes=1)


def test_a_step_is_read_if_it_is_logged_and_the_line_is_of_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, target, optim = make_text(), make_target(), Optim(lr=1e-2)

    def distillation() -> Distillation:
        draft = make_standalone(target)
        signal = functools.partial(make_signal, target)
        return Distillation(draft, signal, Divergence(), optim, 7, loop.make_accelerator(1, None, None))

    one = distillation()
    wanted = [one.step([text.batch(step, batch_size=2)]) for step in range(7)]
    two, read = distillation(), []
    monkeypatch.setattr(two, "read", lambda unread: read.append(two.step_index) or Distillation.read(two, unread))
    data = LoadedData(train=text, held_out=text, prompts=[], stats=SampleStats(), hash="", end_ids=())
    cfg = Loop(steps=7, log_every=3, eval_every=0, save_every=0, batch_size=2, sequence_length=8)
    run = RunFolder(tmp_path, two.accelerator)
    loop.train(two, data, run, cfg, 2)
    assert read == [entry["step"] for entry in run.metrics] == [3, 6, 7]
    for entry in run.metrics:
        assert {name: entry[name] for name in loop._describe(wanted[0])} == loop._describe(wanted[entry["step"] - 1])
