"""The rows that each rank trains on, and the ranks that share them.

6 ranks, --loop.context-parallel 2     ranks 0 1 | 2 3 | 4 5      each pair has its own batches
                                             └─ each has a share of every row (`heads.nn.shares`)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh

from redraft.distill.signal.transfer import to_device
from redraft.distill.train.run_config import Loop, Signal
from redraft.heads.draft import Batch
from redraft.heads.family import Family
from redraft.heads.nn.shares import require_even, share_rows

NO_SHARES = ("peagle", "standalone")
"""Families that cannot share rows, because they choose rows of a batch, or draft over several of
its rows.
"""


@dataclass(frozen=True, kw_only=True)
class RowRanks:
    """The rows of one rank."""

    data_rank: int
    data_ranks: int
    """Number of groups of ranks with their own batches. This rank is in group `data_rank`."""
    share: int = 0
    """Index of this rank's share of each row."""
    shares: int = 1
    ahead: int = 0
    """Maximum distance from a row to a token that it reads or learns."""
    group: Any = None
    """The process group of the ranks that share rows, or None."""

    @staticmethod
    def of(accelerator: Accelerator, loop: Loop, draft: Any) -> RowRanks:
        """Return this rank's rows. All ranks must call this."""
        rank, ranks, size = (
            accelerator.process_index,
            accelerator.num_processes,
            loop.context_parallel,
        )
        if size == 1:
            return RowRanks(data_rank=rank, data_ranks=ranks)
        shape = (ranks // size, size)
        mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=("data", "context"))
        return RowRanks(
            data_rank=rank // size,
            data_ranks=shape[0],
            share=rank % size,
            shares=size,
            ahead=draft.config.num_tokens + 1,
            group=mesh["context"].get_group(),
        )

    def place(self, batch: Batch, device: torch.device) -> Batch:
        """Return this rank's share of a batch, on its device."""
        batch = to_device(batch, device)
        if self.shares == 1:
            return batch
        return share_rows(batch, self.share, self.shares, self.ahead, self.group)


def require_shares(family: Family, loop: Loop, signal: Signal, num_processes: int) -> None:
    """Raise ValueError if the processes cannot share rows as --loop.context-parallel asks."""
    size = loop.context_parallel
    if size == 1:
        return
    asked = f"--loop.context-parallel {size}"
    if num_processes % size:
        raise ValueError(
            f"{asked} does not divide {num_processes} process{'es' * (num_processes > 1)}: start a "
            f"multiple of {size} processes"
        )
    require_even(loop.sequence_length, size)
    if family.name in NO_SHARES:
        raise ValueError(f"{asked} does not fit {family.title}: each process needs whole rows")
    if signal.kind == "endpoint":
        raise ValueError(
            f"{asked} cannot read states from servers during training: write them to disk first "
            "(--signal.kind cache)"
        )
    if loop.compile:
        raise ValueError(f"{asked} and --loop.compile cannot be combined: remove one of them")
