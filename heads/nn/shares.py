"""Ranks share the rows of a batch (context parallelism).

    rows of the whole batch    | 0 | 1 | 2 | 3 |      2 equal pieces per rank, here for 2 ranks
    rank 0 computes            | 0 |+| 3 |+|          causal attention costs each rank the same
    rank 1 computes            | 1 |+| 2 |+|          +: the rows after a piece, which contain its labels

Every rank has the token ids of all rows, and computes states for its own rows. Only attention reads
states of other ranks: it gathers their keys and values, and the backward pass sums the gradients
(all-gather and reduce-scatter). The rows after a piece belong to another rank, which trains them.
PyTorch's `context_parallel` replaces SDPA, for one document without windows; the attention here is
not SDPA.

B = batch, T = rows of the whole batch, t = rows here, n = rows of a piece, h = rows after it,
R = ranks, H = heads, E = head size.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from redraft.heads.draft import Batch, SharedRows
from redraft.heads.nn.prefix import Prefixes

PIECES = 2
"""Number of pieces per rank: rank r gets piece r from the front and piece r from the back."""


def require_even(num_rows: int, num_ranks: int) -> None:
    """Raise ValueError unless the ranks can share rows of this length."""
    if num_rows % (PIECES * num_ranks):
        raise ValueError(
            f"{num_ranks} processes cannot share rows of {num_rows:,} tokens evenly: give "
            f"--loop.sequence-length a multiple of {PIECES * num_ranks}"
        )


def share_rows(batch: Batch, rank: int, ranks: int, ahead: int, group: Any = None) -> Batch:
    """Return one rank's part of a batch that the ranks of a process group share.

    `ahead` is the maximum distance from a row to a token that it reads or learns. Without a group,
    the keys of other ranks cannot be gathered.

    Raises:
        ValueError: the ranks cannot share the rows evenly.
    """
    num_rows = batch.input_ids_BT.shape[1]
    require_even(num_rows, ranks)
    n = num_rows // (PIECES * ranks)
    starts = (n * rank, n * (PIECES * ranks - 1 - rank))
    rows_t = (torch.tensor(starts)[:, None] + torch.arange(n + ahead)).flatten()
    is_own_t = (torch.arange(n + ahead) < n).repeat(PIECES)
    is_row_t = rows_t < num_rows
    device = batch.input_ids_BT.device
    rows_t, is_own_t, is_row_t = (
        x.to(device) for x in (rows_t.clamp(max=num_rows - 1), is_own_t, is_row_t)
    )
    return replace(
        batch,
        input_ids_BT=batch.input_ids_BT[:, rows_t],
        # After the last row, there is nothing to learn.
        loss_mask_BT=batch.loss_mask_BT[:, rows_t] & is_row_t,
        document_BT=torch.where(is_row_t, batch.document_BT[:, rows_t], -1),
        position_ids_BT=batch.position_ids_BT[:, rows_t],
        shared=SharedRows(
            whole=batch,
            group=group,
            num_ranks=ranks,
            starts=starts,
            rows_t=rows_t,
            is_own_t=is_own_t,
        ),
    )


def parts_here(batch: Batch, first: int, count: int) -> Iterator[tuple[slice, slice]]:
    """Yield the parts of a document that this rank has: (flat rows here, rows of the document).

    The document begins at flat row `first` of the whole batch, and has `count` rows.
    """
    shared = batch.shared
    if shared is None:
        yield slice(first, first + count), slice(0, count)
        return
    row, start = divmod(first, shared.whole.input_ids_BT.shape[1])
    width = len(shared.rows_t) // PIECES
    for piece, low in enumerate(shared.starts):
        begin, end = max(start, low), min(start + count, low + width)
        if begin < end:
            here = row * len(shared.rows_t) + piece * width + begin - low
            yield slice(here, here + end - begin), slice(begin - start, end - start)


def most_of_ranks(shared: SharedRows, mask_BT: Tensor) -> int:
    """Return the largest number of marked rows that any rank has in one row of the whole batch.

    This waits for the device.
    """
    count_BP = mask_BT.reshape(len(mask_BT), PIECES * shared.num_ranks, -1).sum(-1)
    front_BR, back_BR = count_BP.chunk(2, dim=1)
    return int((front_BR + back_BR.flip(1)).max())


def prefixes_of(batch: Batch) -> Prefixes:
    """Return the keys, on all ranks, that each row of this rank's batch attends to."""
    shared = batch.shared
    if shared is None:
        return Prefixes.of(batch.document_BT)
    rows_Bt = shared.rows_t.expand(len(batch.document_BT), -1)
    return Prefixes.of(shared.whole.document_BT).rows(rows_Bt, ascending=True)


def in_whole(batch: Batch, rows_BA: Tensor) -> tuple[Tensor, Tensor]:
    """Return (these rows as rows of the whole batch, the documents of the whole batch)."""
    shared = batch.shared
    if shared is None:
        return rows_BA, batch.document_BT
    return shared.rows_t[rows_BA], shared.whole.document_BT


def gather_keys(shared: SharedRows | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Gather the whole batch's keys or values, [B, H, T, E], from each rank's rows.

    All ranks that share the batch must call this. Their gradients are summed.
    """
    if shared is None:
        return tensors
    return tuple(_Gathered.apply(tensor, shared) for tensor in tensors)  # type: ignore[no-untyped-call]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BHtE: Tensor, shared: SharedRows) -> Tensor:
        ctx.shared, ctx.rows = shared, x_BHtE.shape[2]
        # [P, B, H, n, E] from each rank.
        B, H, _, E = x_BHtE.shape
        pieces = x_BHtE.reshape(B, H, PIECES, -1, E).movedim(2, 0)[:, :, :, : _piece(shared)]
        found = pieces.new_empty(shared.num_ranks * PIECES, *pieces.shape[1:])
        dist.all_gather_single(found, pieces.contiguous(), group=shared.group)
        found = found.reshape(-1, PIECES, *found.shape[1:])
        # With two ranks, rank 0 has pieces 0 and 3, and rank 1 has pieces 1 and 2: join the first
        # pieces in order, then the second ones in reverse.
        ordered = torch.cat([found[:, 0], found[:, 1].flip(0)])
        return ordered.movedim(0, 2).flatten(2, 3)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_BHTE: Tensor) -> tuple[Tensor, None]:
        shared: SharedRows = ctx.shared
        # Sum over ranks in float32 or wider, as for blocks of rows.
        wide = grad_BHTE.to(torch.promote_types(grad_BHTE.dtype, torch.float32))
        B, H, _, E = wide.shape
        pieces = wide.reshape(B, H, PIECES * shared.num_ranks, -1, E)
        front, back = pieces.movedim(2, 0).chunk(2)
        sent = torch.stack([front, back.flip(0)], dim=1).flatten(0, 1)
        own = torch.empty_like(sent[:PIECES])
        dist.reduce_scatter_single(own, sent, group=shared.group)
        # The rows after a piece are keys of another rank.
        behind = ctx.rows // PIECES - _piece(shared)
        own = torch.nn.functional.pad(own, (0, 0, 0, behind)).movedim(0, 2).flatten(2, 3)
        return own.to(grad_BHTE.dtype), None


def _piece(shared: SharedRows) -> int:
    return shared.whole.input_ids_BT.shape[1] // (PIECES * shared.num_ranks)
