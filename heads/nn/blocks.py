"""Attention of a block drafter.

Every block attends to the context before its anchor and to itself, bidirectionally or causally.

B = batch, H = query heads, G = key heads, T = tokens of the context, A = blocks, S = slots of a
block, N = A * S, E = head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from redraft.files.windows import FULL, View
from redraft.heads.nn.precision import product_dtype
from redraft.heads.nn.prefix import Prefixes, attend


@dataclass(frozen=True)
class BlockMask:
    """The keys that the blocks' rows attend to: a range of the context and their own block."""

    prefixes: Prefixes
    num_slots: int
    is_causal: bool = False
    """Whether a slot attends only to itself and earlier slots."""

    @staticmethod
    def make(
        rows_BA: Tensor,
        document_BT: Tensor,
        num_slots: int,
        view: View = FULL,
        *,
        first_ahead: int = 1,
    ) -> BlockMask:
        """Create the mask for blocks that read the context up to row `rows_BA`, ascending.

        The context is limited to that row's document and to the window of `view`. The first slot is
        `first_ahead` positions after the row.
        """
        # `rows_BA` is the row before the anchor, i.e. the last row that the target has computed, so
        # this row is included. Other blocks are excluded, because a later block's anchor is a token
        # that this block must predict.
        rows_BN = rows_BA.repeat_interleave(num_slots, dim=1)
        prefixes = Prefixes.of(document_BT).rows(rows_BN, ascending=True)
        # As in an engine, the window moves with the slot's position, so the last slot attends to
        # the fewest rows of the context.
        slots_S = torch.arange(first_ahead, first_ahead + num_slots, device=rows_BA.device)
        prefixes = prefixes.within(view.window, slots_S.repeat(rows_BA.shape[1]))
        return BlockMask(prefixes, num_slots, view.is_causal)


def attend_blocks(
    q_BHNE: Tensor,
    context: tuple[Tensor, Tensor],
    block: tuple[Tensor, Tensor],
    mask: BlockMask,
    scale: float,
) -> Tensor:
    """Compute softmax(scale * q k) v for every block's rows, [B, H, N, E].

    The blocks' queries are concatenated. `context` has keys and values, each [B, G, T, E], and
    `block` has the blocks' own, each [B, G, N, E]. `mask` has the keys that each query attends to.
    """
    # Under autocast, projections return bfloat16, but norms and rotation may return float32. The
    # kernel accepts a single dtype.
    dtype = product_dtype(block[1])
    context, block = ((keys.to(dtype), values.to(dtype)) for keys, values in (context, block))
    return attend(
        q_BHNE.to(dtype),
        context,
        mask.prefixes,
        scale,
        [block],
        mask.num_slots,
        is_causal=mask.is_causal,
    )
