"""A plugin of vLLM: two exchanges between replicas with shared experts that its CPU build lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def register() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def all_gatherv(
    self: Any, input_: Tensor | list[Tensor], dim: int = 0, sizes: object = None
) -> Tensor | list[Tensor]:
    """The rows of all replicas, of each tensor; the replicas may have different numbers of rows."""
    if isinstance(input_, list):
        return [_gather(self, tensor) for tensor in input_]
    return _gather(self, input_)


def _gather(communicator: Any, tensor: Tensor) -> Tensor:
    parts: list[Any] = [None] * communicator.world_size
    dist.all_gather_object(parts, tensor, group=communicator.cpu_group)
    return torch.cat(parts)


def reduce_scatterv(
    self: Any, input_: Tensor, dim: int = -1, sizes: Sequence[int] | None = None
) -> Tensor:
    """This replica's rows of the sum."""
    total = input_.clone()
    dist.all_reduce(total, group=self.cpu_group)
    shares = total.split(list(sizes)) if sizes is not None else total.chunk(self.world_size)
    return shares[self.rank_in_group]
