"""Attention of a block drafter: every block reads the context before its anchor, and itself in both directions.

B = batch, H = query heads, G = key heads, T = tokens of the context, A = blocks, S = slots of a block, N = A * S,
E = head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.heads.nn.precision import product_dtype


@dataclass(frozen=True)
class BlockMask:
    """Keys visible to the blocks' rows: those of the context, then those of all blocks."""

    seen_B1NK: Tensor
    """bool, K = T + N."""

    @staticmethod
    def make(rows_BA: Tensor, document_BT: Tensor, num_slots: int) -> BlockMask:
        """Blocks that read the context up to row `rows_BA`, within the document of that row."""
        at_T = torch.arange(document_BT.shape[1], device=document_BT.device)
        document_BA = document_BT.gather(1, rows_BA)
        # `rows_BA` is the row before the anchor, the last one that the target has computed, so it is seen too
        context_BAT = (at_T <= rows_BA[..., None]) & (document_BT[:, None] == document_BA[..., None])
        block_N = torch.arange(rows_BA.shape[1], device=rows_BA.device).repeat_interleave(num_slots)
        # no other block: the anchor of a later one is a token that this block must predict
        own_BNN = (block_N[:, None] == block_N).expand(len(rows_BA), -1, -1)
        return BlockMask(torch.cat([context_BAT.repeat_interleave(num_slots, dim=1), own_BNN], dim=-1)[:, None])


def attend_blocks(
    q_BHNE: Tensor,
    context: tuple[Tensor, Tensor],
    block: tuple[Tensor, Tensor],
    mask: BlockMask,
    scale: float,
) -> Tensor:
    """softmax(scale * q k) v of every block's rows, [B, H, N, E].

    Args:
        q_BHNE: Queries of the blocks, laid end to end.
        context: Keys and values of the context, [B, G, T, E] each.
        block: Keys and values of the blocks, [B, G, N, E] each.
        mask: The keys seen by each query.
        scale: Factor of the scores.
    """
    groups = q_BHNE.shape[1] // block[0].shape[1]
    dtype = product_dtype(block[1])
    joined = (torch.cat(pair, dim=2).to(dtype) for pair in zip(context, block, strict=True))
    k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in joined)
    return F.scaled_dot_product_attention(q_BHNE.to(dtype), k, v, attn_mask=mask.seen_B1NK, scale=scale)
