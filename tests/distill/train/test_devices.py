"""A step makes its tensors on the batch's device and not on the default one.

A GPU refuses to join the two.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from make_heads import make_signal
from torch import nn
from train_on_ranks import FAMILIES, make_family_target, micro_batches

from redraft.distill.loss.choice import Divergence
from redraft.distill.run import training_run
from redraft.distill.run.training_run import Run
from redraft.distill.train import loop
from redraft.distill.train.loop import make_accelerator
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation
from redraft.engine.hardware import Machine


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"tied"}))
def test_no_tensor_of_a_step_is_made_on_the_default_device(name: str) -> None:
    """With `meta` as the default, and all else on the CPU.

    PyTorch refuses to join these two as well.
    """
    target = make_family_target(name)
    torch.manual_seed(1)
    draft: Any = FAMILIES[name](target)
    (batch,) = micro_batches(0, 0, 1, 1)
    signal = make_signal(target, batch, getattr(draft, "aux_layer_ids", ()))
    distillation = Distillation(
        draft, lambda _: signal, Divergence(), Optim(lr=1e-2), 8, make_accelerator(1, None, None)
    )
    with torch.device("meta"):
        stats = distillation.step([batch])
    distillation.close()
    assert stats.loss > 0
    assert not stats.skipped


def test_a_run_on_the_cpu_of_a_machine_with_a_gpu_stays_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With ACCELERATE_USE_CPU, the draft is forecast where the target is."""
    run, signal, draft = object.__new__(Run), object(), nn.Linear(2, 2)
    run.accelerator = SimpleNamespace(device=torch.device("cpu"))
    run.family = SimpleNamespace(is_head=True)
    run.cfg = SimpleNamespace(prove=SimpleNamespace(num_speculative_tokens=3))
    run.target, run.answers = SimpleNamespace(model=nn.Linear(2, 2)), []
    monkeypatch.setattr(run, "_in_engine", lambda draft: (draft, signal))
    monkeypatch.setattr(training_run, "forecast", lambda *args: args)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    copied, *rest = run.forecast(draft)
    assert copied.weight.device.type == "cpu"
    assert rest == [signal, [], 3, torch.device("cpu")]


def test_a_trained_draft_leaves_the_gpu_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, borrowed = nn.Linear(2, 2), SimpleNamespace(embed_VD=None, head_VD=None)
    run = object.__new__(Run)
    run.accelerator = SimpleNamespace(is_main_process=True, distributed_type=DistributedType.NO)
    run.family, run.target = SimpleNamespace(is_head=False), SimpleNamespace(borrowed=borrowed)
    run.folder, run.data = SimpleNamespace(folder=None), None
    run.cfg = SimpleNamespace(
        gradient_checkpointing=False,
        signal=None,
        divergence=None,
        optim=None,
        loop=SimpleNamespace(steps=1),
        prove=SimpleNamespace(num_speculative_tokens=3),
    )
    trained = SimpleNamespace(weights=draft.state_dict, close=lambda: None)
    for name, made in (("target_signal", None), ("Distillation", trained), ("train", "cost")):
        monkeypatch.setattr(training_run, name, lambda *_, made=made: made)
    on_gpu = [parameter.data for parameter in draft.parameters()]
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # as from a GPU
    assert run.train(draft)[1] == "cost"
    for before, parameter in zip(on_gpu, draft.parameters(), strict=True):
        assert before.data_ptr() != parameter.data_ptr()


def test_ranks_on_the_cpus_of_machines_with_gpus_join_as_on_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    joined: list[bool] = []
    monkeypatch.setattr(loop, "join_on_cpu", lambda: joined.append(True))
    monkeypatch.setattr(loop, "Accelerator", lambda **_: SimpleNamespace(is_main_process=False))
    gpu = Machine(gpu="NVIDIA H100", gpu_has_bfloat16=True)
    for has_gpu, machine, joins in (
        (True, gpu, False),
        (True, gpu.without_gpu, True),
        (False, gpu, True),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        joined.clear()
        make_accelerator(1, None, None, machine)
        assert bool(joined) == joins
