"""Batches on their way to a device."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from make_heads import make_batch, make_ids, make_signal, make_target
from torch import Tensor

from redraft.distill.signal.transfer import to_device
from redraft.heads.draft import ExactTarget
from redraft.online.learning.replay import RecordedBatch


def make_recorded() -> RecordedBatch:
    batch = make_batch([[make_ids(9)], [make_ids(5)]])
    return RecordedBatch(
        **{**vars(batch), "salt": 7}, signal=make_signal(make_target(), batch, (1, 2))
    )


def test_on_a_cpu_nothing_is_copied() -> None:
    batch = make_recorded()
    moved = to_device(batch, torch.device("cpu"))
    assert type(moved) is RecordedBatch
    assert all(
        getattr(moved, one.name) is getattr(batch, one.name)
        for one in fields(batch)
        if one.name != "signal"
    )
    assert moved.signal.aux_BTLD is batch.signal.aux_BTLD


def test_a_gpu_copies_every_tensor_from_pinned_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With stand-ins for the two functions of CUDA."""
    pinned: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    def copy(tensor: Tensor, device: torch.device, **options: Any) -> Tensor:
        assert (device, options) == (torch.device("cuda", 1), {"non_blocking": True})
        assert any(tensor is one for one in pinned)
        return tensor

    batch = make_recorded()
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", copy)
    moved = to_device(batch, torch.device("cuda", 1))
    assert len(pinned) == 7, "four of the batch, three of the signal"
    assert moved.salt == 7
    assert torch.equal(moved.input_ids_BT, batch.input_ids_BT)
    found, expected = moved.signal.distribution, batch.signal.distribution
    assert isinstance(found, ExactTarget)
    assert isinstance(expected, ExactTarget)
    assert torch.equal(found.hidden_BTD, expected.hidden_BTD)
    assert moved.input_ids_BT is not batch.input_ids_BT
