"""What a launch is told of its machine, and the text that a run is evaluated on."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from make_heads import make_ids, make_signal, make_target
from train_on_ranks import make_standalone

from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import Sample, SampleStats
from redraft.distill.loss.choice import Divergence
from redraft.distill.train import loop
from redraft.distill.train.loop import LoadedData, choose_precision
from redraft.distill.train.optim import Optim
from redraft.distill.train.row_ranks import RowRanks
from redraft.distill.train.run_config import Loop
from redraft.distill.train.run_folder import RunFolder
from redraft.distill.train.step import Distillation
from redraft.engine.hardware import Machine, launch_machine
from redraft.heads.draft import Batch, ExactTarget, TargetSignal
from redraft.online.learning.config import Training

H100 = Machine(gpu="NVIDIA H100", gpu_has_bfloat16=True)
V100 = Machine(gpu="Tesla V100", cpu_has_bfloat16=True)
FAST_CPU, SLOW_CPU = Machine(cpu_has_bfloat16=True), Machine()


@pytest.mark.parametrize(
    ("machine", "asked", "launched", "taken", "named"),
    [
        (H100, None, None, "bf16", "bfloat16"),
        (H100, None, "no", "bf16", "bfloat16"),  # by `accelerate launch` without a config
        (H100, None, "fp16", "bf16", "bfloat16"),
        (FAST_CPU, None, "fp16", "no", "float32"),
        (H100, "no", "bf16", "no", "float32"),
        (V100, None, None, "no", "warning"),
        (V100, None, "bf16", "no", "warning"),
        (V100, "bf16", None, "no", "warning"),
        (V100, None, "fp16", "no", "warning"),
        (FAST_CPU, None, None, "no", "float32"),
        (FAST_CPU, None, "bf16", "bf16", "bfloat16"),
        (FAST_CPU, "bf16", "no", "bf16", "bfloat16"),
        (SLOW_CPU, None, None, "no", "float32"),
        (SLOW_CPU, "bf16", None, "no", "warning"),
        (SLOW_CPU, None, "bf16", "no", "warning"),
        (SLOW_CPU, "no", "bf16", "no", "float32"),
    ],
)
def test_a_gpu_trains_in_bfloat16_and_a_machine_that_cannot_says_so(
    machine: Machine, asked: str | None, launched: str | None, taken: str, named: str
) -> None:
    precision, line = choose_precision(asked, launched, machine)
    assert precision == taken
    assert named in line
    assert (machine.gpu or "the CPU") in line
    assert line.startswith("warning") == (named == "warning")


def test_the_default_precision_reaches_autocast_and_is_named_at_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    AcceleratorState._reset_state()
    try:
        made = loop.make_accelerator(1, Training().mixed_precision, None, H100)
        assert made.mixed_precision == "bf16"
        assert "bfloat16" in capsys.readouterr().out
        AcceleratorState._reset_state()
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
        made = loop.make_accelerator(1, None, None, V100)
        assert (made.mixed_precision, made.scaler) == ("no", None)
        assert "float32" in capsys.readouterr().out
        AcceleratorState._reset_state()
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
        monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
        assert loop.make_accelerator(1, None, None, launch_machine(H100)).mixed_precision == "no"
        assert "the CPU" in capsys.readouterr().out
    finally:
        AcceleratorState._reset_state()


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match=r"^8 processes .*\b4 GPUs: .*--num_processes"):
        loop.make_accelerator(1, None, None, H100)


def test_no_more_held_out_batches_are_made_than_are_evaluated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids, mask = np.arange(4, dtype=np.int32), np.ones(4, dtype=bool)
    samples = [
        Sample(input_ids=ids, loss_mask=mask, conversation=str(i), domain="all") for i in range(5)
    ]
    held_out, made = PackedDataset(samples, sequence_length=4, seed=0), []
    collate = held_out._collate
    monkeypatch.setattr(held_out, "_collate", lambda rows: made.append(len(rows)) or collate(rows))
    ranks, cpu = RowRanks(data_rank=0, data_ranks=1), torch.device("cpu")
    for wanted, num in ((2, 2), (9, 5)):
        made.clear()
        batches = loop._take_held_out(held_out, Loop(batch_size=1, eval_batches=wanted), ranks, cpu)
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
    distillation = Distillation(
        make_standalone(target), signal, Divergence(), optim, 2000, accelerator
    )
    stats = SampleStats(labels=75, labels_beyond=25)
    data = LoadedData(train=text, held_out=text, prompts=[], stats=stats, hash="", end_ids=())
    cfg = Loop(epochs=3, eval_every=0, save_every=0, batch_size=1, sequence_length=8)
    loop.train(distillation, data, RunFolder(tmp_path, accelerator), cfg, 2)
    # Four rows, two a step: two steps a pass.
    assert distillation.step_index == distillation.num_steps == 6
    told = "6 steps of 2 rows of 8 tokens: up to 96 tokens, 3 passes over the 4 rows of the data"
    beyond = ", without the 25.0% of the labels that lie beyond a row"
    assert told + beyond in capsys.readouterr().out
    for name, wrong in (
        ("epochs", math.inf),
        ("minutes", math.inf),
        ("save_every", -1),
        ("eval_every", -1),
    ):
        with pytest.raises(ValueError, match=rf"\b{name}\b.*{wrong}"):
            Loop(**{name: wrong})
    with pytest.raises(ValueError, match=r"--loop.epochs.*--loop.minutes"):
        Loop(epochs=1, minutes=1)


def test_a_step_is_read_if_it_is_logged_and_the_line_is_of_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, target, optim = make_text(), make_target(), Optim(lr=1e-2)

    def distillation() -> Distillation:
        draft = make_standalone(target)
        signal = functools.partial(make_signal, target)
        return Distillation(
            draft, signal, Divergence(), optim, 7, loop.make_accelerator(1, None, None)
        )

    one = distillation()
    wanted = [one.step([text.batch(step, batch_size=2)]) for step in range(7)]
    two, read = distillation(), []
    monkeypatch.setattr(
        two, "read", lambda unread: read.append(two.step_index) or Distillation.read(two, unread)
    )
    data = LoadedData(
        train=text, held_out=text, prompts=[], stats=SampleStats(), hash="", end_ids=()
    )
    cfg = Loop(steps=7, log_every=3, eval_every=0, save_every=0, batch_size=2, sequence_length=8)
    run = RunFolder(tmp_path, two.accelerator)
    loop.train(two, data, run, cfg, 2)
    assert read == [entry["step"] for entry in run.metrics] == [3, 6, 7]
    for entry in run.metrics:
        stats = wanted[entry["step"] - 1]
        for name in ("loss", "alpha", "alpha_greedy", "grad_norm", "lr"):
            assert entry[name] == getattr(stats, name)


def test_a_skipped_step_is_logged_without_numbers_that_the_report_would_refuse(
    tmp_path: Path,
) -> None:
    text, target = make_text(), make_target()
    bad = text.batch(1, batch_size=1).input_ids_BT[0]

    def signal(batch: Batch) -> TargetSignal:
        known = make_signal(target, batch)
        assert isinstance(known.distribution, ExactTarget)
        is_bad_B11 = (batch.input_ids_BT == bad).all(1)[:, None, None]
        hidden_BTD = known.distribution.hidden_BTD.masked_fill(is_bad_B11, math.nan)
        return replace(known, distribution=replace(known.distribution, hidden_BTD=hidden_BTD))

    accelerator = loop.make_accelerator(1, None, None)
    distillation = Distillation(
        make_standalone(target), signal, Divergence(), Optim(lr=1e-2), 3, accelerator
    )
    data = LoadedData(
        train=text, held_out=text, prompts=[], stats=SampleStats(), hash="", end_ids=()
    )
    cfg = Loop(steps=3, log_every=1, eval_every=3, save_every=0, batch_size=1, sequence_length=8)
    run = RunFolder(tmp_path, accelerator)
    cost = loop.train(distillation, data, run, cfg, 2)
    assert cost.skipped_steps == 1
    json.dumps(run.metrics, allow_nan=False)
    assert [
        sorted({"loss", "grad_norm", "alpha", "held_out_tau"} & {*entry}) for entry in run.metrics
    ] == [
        ["alpha", "grad_norm", "loss"],
        [],
        ["held_out_tau"],
        ["alpha", "grad_norm", "loss"],
    ]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == run.metrics


def test_a_dynamo_config_of_accelerate_is_not_used(
    fresh_accelerator: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would rename every tensor of a checkpoint."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    accelerator = loop.make_accelerator(1, None, None)
    module = torch.nn.Linear(2, 2)
    assert accelerator.prepare(module) is module
    assert "--loop.compile" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("project", "found"), [("drafts", (None, "drafts")), ("team/drafts", ("team", "drafts"))]
)
def test_wandb_logs_to_a_project_of_an_entity(
    project: str,
    found: tuple[str | None, str],
    fresh_accelerator: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    started: list[tuple[str | None, str]] = []
    init = wandb.init

    def note(*, project: str, entity: str | None = None, **options: Any) -> Any:
        started.append((entity, project))
        return init(project=project, entity=entity, **options)

    monkeypatch.setattr(wandb, "init", note)
    loop.make_accelerator(1, None, project).end_training()
    assert started == [found]
