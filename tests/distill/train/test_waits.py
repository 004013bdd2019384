"""How often a GPU would be waited for in a training step: each read of a value, or of a size that depends on values."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from make_heads import make_batch, make_ids, make_signal, make_target
from torch.utils._python_dispatch import TorchDispatchMode
from train_on_ranks import FAMILIES, make_family_target

from redraft.distill.loss.choice import Divergence
from redraft.distill.train.loop import make_accelerator
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation
from redraft.heads import catalog
from redraft.heads.families import eagle3
from redraft.heads.target import Target

WAITS = ("_local_scalar_dense", "nonzero", "_unique2", "tolist", "tensor")
"""The last one is `torch.tensor` with a device: on a GPU a copy of pageable memory, for which the host waits."""

STEP = {"tolist": 2}
"""The sizes of the loss, and the norm."""

OWN = {
    # The largest number of labels of a row of the batch, of which later steps train a part. It is a size of tensors:
    # without the read, these steps would compute rows that nothing is learned from.
    "peagle": {"_local_scalar_dense": 1},
}
"""Reads of a family beside those of `STEP`."""


class Waits(TorchDispatchMode):
    """Counts the reads within it. Those of attention are left out: a kernel for CPUs reads the bounds of documents."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.in_attention = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.seen[name] += 1
        self.in_attention = name.startswith("redraft::prefix_attention")
        made = func(*args, **(kwargs or {}))
        self.in_attention = False
        return made


def make_eagle3(target: Any, num_steps: int) -> Any:
    return eagle3.Eagle3(eagle3.Config(aux_layer_ids=(1, 2, 4), num_steps=num_steps), Target.from_model(target))


def count_waits(
    draft: Any, target: Any, monkeypatch: pytest.MonkeyPatch, *, accumulation: int = 1, is_logged: bool = False
) -> dict[str, int]:
    """Of the second step of a draft, with the target's signal at hand."""
    batch = make_batch([[make_ids(20), make_ids(11)], [make_ids(26, 3)]])
    signal = make_signal(target, batch, draft.aux_layer_ids)
    optim = Optim(lr=1e-3, accumulation=accumulation)
    accelerator = make_accelerator(accumulation, None, None)
    distillation = Distillation(draft, lambda _: signal, Divergence(), optim, 4, accelerator)
    distillation.step([batch] * accumulation)
    waits, tolist, tensor = Waits(), torch.Tensor.tolist, torch.tensor

    def counted(x: torch.Tensor) -> Any:
        waits.seen["tolist"] += not waits.in_attention  # on a CPU it is no operation
        return tolist(x)

    def copied(*args: Any, **options: Any) -> torch.Tensor:
        waits.seen["tensor"] += options.get("device") is not None
        return tensor(*args, **options)

    with monkeypatch.context() as patched, waits:
        patched.setattr(torch.Tensor, "tolist", counted)
        patched.setattr(torch, "tensor", copied)
        patched.setattr(torch, "as_tensor", copied)
        unread = distillation.take_step([batch] * accumulation)
        if is_logged:
            distillation.read(unread)
    distillation.close()
    return {name: waits.seen[name] for name in WAITS if waits.seen[name]}


@pytest.mark.parametrize("family", [row.name for row in catalog.FAMILIES if not row.is_lookup])
def test_a_step_of_every_family_waits_as_often(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two reads, three of P-EAGLE. In the loss: how many rows each draft step and the target have in each chunk, which
    are sizes of tensors. After the backward pass: the norm of the gradient, with whether each loss is finite, which
    decide on the optimizer's step, and the numbers of tokens and labels.
    """
    target = make_family_target(family)
    found = count_waits(FAMILIES[family](target), target, monkeypatch)
    assert found == {**STEP, **OWN.get(family, {})}
    assert sum(found.values()) <= 3


@pytest.mark.parametrize("num_steps", [1, 7])
def test_a_step_waits_as_often_for_seven_draft_steps_as_for_one(
    num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target()
    assert count_waits(make_eagle3(target, num_steps), target, monkeypatch) == STEP


def test_a_micro_batch_is_waited_for_in_its_loss_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One read, of the sizes of the loss."""
    target = make_target()
    one, two = (
        count_waits(make_eagle3(target, 2), target, monkeypatch, accumulation=accumulation) for accumulation in (1, 2)
    )
    assert {name: two.get(name, 0) - one.get(name, 0) for name in WAITS} == {
        "_local_scalar_dense": 0,
        "nonzero": 0,
        "_unique2": 0,
        "tolist": 1,
        "tensor": 0,
    }


def test_the_results_of_a_step_are_one_more_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and acceptance, read for a step that is logged."""
    target = make_target()
    silent, logged = (
        count_waits(make_eagle3(target, 2), target, monkeypatch, is_logged=is_logged) for is_logged in (False, True)
    )
    assert logged == {**silent, "tolist": silent["tolist"] + 1}
