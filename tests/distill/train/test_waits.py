"""How often a GPU would be waited for in a training step.

Each read of a value, or of a size that depends on values.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from make_heads import make_batch, make_ids, make_target
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from train_on_ranks import FAMILIES, make_family_target

from redraft.distill.loss.choice import Divergence
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.loop import make_accelerator
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation
from redraft.heads import catalog
from redraft.heads.families import eagle3
from redraft.heads.target import Target

WAITS = ("_local_scalar_dense", "nonzero", "_unique2", "tolist", "pageable")
"""The last one is a tensor made from the host's numbers: its way to a GPU is a copy of pageable
memory.
"""

FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
WITHOUT_DEVICE = (
    torch.arange,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.empty,
    torch.eye,
    torch.linspace,
)
"""They make a tensor on the host unless they are given a device."""

STEP = {"tolist": 2}
"""The sizes of the loss, and the norm."""

OWN = {
    # The largest number of labels of a row of the batch, of which later steps train a part. It is a
    # size of tensors: without the read, these steps would compute rows that nothing is learned
    # from.
    "peagle": {"_local_scalar_dense": 1},
}
"""Reads of a family beside those of `STEP`."""


class Waits(TorchDispatchMode):
    """Counts the reads within it.

    Those of attention are left out: a kernel for CPUs reads the bounds of documents.
    """

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


class HostWaits(TorchFunctionMode):
    """Counts `tolist`, no operation on a CPU, and tensors made on the host.

    `to(device)` is none there.
    """

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        is_host = func in FROM_NUMBERS or (func in WITHOUT_DEVICE and options.get("device") is None)
        # A list as an index becomes a tensor.
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            is_host = any(isinstance(part, list | np.ndarray) for part in index)
        if not self.waits.in_attention:
            self.waits.seen["pageable"] += is_host
            self.waits.seen["tolist"] += func is torch.Tensor.tolist
        return func(*args, **options)


def make_eagle3(target: Any, num_steps: int) -> Any:
    return eagle3.Eagle3(
        eagle3.Config(aux_layer_ids=(1, 2, 4), num_steps=num_steps), Target.from_model(target)
    )


def count_waits(
    draft: Any, target: Any, *, accumulation: int = 1, is_logged: bool = False
) -> dict[str, int]:
    """Of the second step of a draft, the target's pass in this process included."""
    batch = make_batch([[make_ids(20), make_ids(11)], [make_ids(26, 3)]])
    source = InProcessTarget(target, draft.aux_layer_ids)
    optim = Optim(lr=1e-3, accumulation=accumulation)
    accelerator = make_accelerator(accumulation, None, None)
    distillation = Distillation(draft, source, Divergence(), optim, 4, accelerator)
    distillation.step([batch] * accumulation)
    waits = Waits()
    with waits, HostWaits(waits):
        unread = distillation.take_step([batch] * accumulation)
        if is_logged:
            distillation.read(unread)
    distillation.close()
    return {name: waits.seen[name] for name in WAITS if waits.seen[name]}


@pytest.mark.parametrize("family", [row.name for row in catalog.FAMILIES if not row.is_lookup])
def test_a_step_of_every_family_waits_as_often(family: str) -> None:
    """Two reads, three of P-EAGLE.

    In the loss: how many rows each draft step and the target have in each chunk, which are sizes of
    tensors. After the backward pass: the norm of the gradient, with whether each loss is finite,
    which decide on the optimizer's step, and the numbers of tokens and labels.
    """
    target = make_family_target(family)
    found = count_waits(FAMILIES[family](target), target)
    assert found == {**STEP, **OWN.get(family, {})}
    assert sum(found.values()) <= 3


@pytest.mark.parametrize("num_steps", [1, 7])
def test_a_step_waits_as_often_for_seven_draft_steps_as_for_one(num_steps: int) -> None:
    target = make_target()
    assert count_waits(make_eagle3(target, num_steps), target) == STEP


def test_a_micro_batch_is_waited_for_in_its_loss_alone() -> None:
    """One read, of the sizes of the loss."""
    target = make_target()
    one, two = (
        count_waits(make_eagle3(target, 2), target, accumulation=accumulation)
        for accumulation in (1, 2)
    )
    assert {name: two.get(name, 0) - one.get(name, 0) for name in WAITS} == {
        "_local_scalar_dense": 0,
        "nonzero": 0,
        "_unique2": 0,
        "tolist": 1,
        "pageable": 0,
    }


def test_the_results_of_a_step_are_one_more_wait() -> None:
    """Loss and acceptance, read for a step that is logged."""
    target = make_target()
    silent, logged = (
        count_waits(make_eagle3(target, 2), target, is_logged=is_logged)
        for is_logged in (False, True)
    )
    assert logged == {**silent, "tolist": silent["tolist"] + 1}


def test_every_way_of_numbers_to_a_device_is_counted() -> None:
    x, waits = torch.arange(4.0), Waits()
    with HostWaits(waits):
        torch.tensor([1, 2], device=x.device)
        torch.as_tensor([1]).to(x.device)
        torch.asarray(np.ones(1)).to(x.device)
        torch.arange(3).to(x.device)
        x[[0, 1]]
        assert (waits.seen["pageable"], waits.seen["tolist"]) == (5, 0)
        torch.arange(3, device=x.device)
        x[1:], x[x > 1]
        x.tolist()
    assert (waits.seen["pageable"], waits.seen["tolist"]) == (5, 1)
