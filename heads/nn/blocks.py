"""Attention of a block drafter: every block reads the context before its anchor, and itself in both directions.

B = batch, H = query heads, G = key heads, T = tokens of the context, A = blocks, S = slots of a block, N = A * S,
E = head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.heads.nn.attention import additive
from redraft.heads.nn.precision import product_dtype


@dataclass(frozen=True)
class BlockMask:
    """Keys of the context that the blocks' rows see. Of the blocks' keys each row sees those of its own block."""

    seen_B1NT: Tensor
    """bool"""
    num_slots: int

    @staticmethod
    def make(rows_BA: Tensor, document_BT: Tensor, num_slots: int) -> BlockMask:
        """Blocks that read the context up to row `rows_BA`, within the document of that row."""
        at_T = torch.arange(document_BT.shape[1], device=document_BT.device)
        document_BA = document_BT.gather(1, rows_BA)
        # `rows_BA` is the row before the anchor, the last one that the target has computed, so it is seen too
        context_BAT = (at_T <= rows_BA[..., None]) & (document_BT[:, None] == document_BA[..., None])
        return BlockMask(context_BAT.repeat_interleave(num_slots, dim=1)[:, None], num_slots)


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
        mask: The keys of the context seen by each query.
        scale: Factor of the scores.
    """
    dtype = product_dtype(block[1])
    q_BHNE, *keys_values = (x.to(dtype) for x in (q_BHNE, *context, *block))
    ck, cv, bk, bv = keys_values
    attend = _attend_joint if q_BHNE.device.type == "cpu" else _attend_masked
    return attend(q_BHNE, ck, cv, bk, bv, mask, scale)


def _attend_masked(
    q_BHNE: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, mask: BlockMask, scale: float
) -> Tensor:
    """For any device: the keys of context and blocks side by side, under one mask."""
    groups = q_BHNE.shape[1] // bk.shape[1]
    joined = (torch.cat(pair, dim=2) for pair in ((ck, bk), (cv, bv)))
    k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in joined)
    block_N = torch.arange(q_BHNE.shape[2], device=q_BHNE.device) // mask.num_slots
    # no other block: the anchor of a later one is a token that this block must predict
    own_NN = block_N[:, None] == block_N
    seen = torch.cat([mask.seen_B1NT, own_NN.expand(len(q_BHNE), 1, -1, -1)], dim=-1)
    return F.scaled_dot_product_attention(q_BHNE, k, v, attn_mask=seen, scale=scale)


def _attend_joint(
    q_BHNE: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, mask: BlockMask, scale: float
) -> Tensor:
    """For a CPU: the flash kernel over the context, which is neither copied nor repeated. The keys of a row's own block
    are added by log-sum-exp."""
    seen = additive(mask.seen_B1NT, q_BHNE.dtype)
    out: Tensor = _BlockAttention.apply(q_BHNE, ck, cv, bk, bv, seen, scale, mask.num_slots)  # type: ignore[no-untyped-call]
    return out


class _BlockAttention(torch.autograd.Function):
    """One softmax over the context's keys and those of a row's own block.

    Backward: as in `heads.nn.attention`, the kernel's backward is exact for the context if it is given the output and
    the log-sum-exp of the *joint* softmax. R = query heads of a key head, A = blocks, S = slots.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, seen: Tensor, scale: float, num_slots: int
    ) -> Tensor:
        q_BGRNE = torch.unflatten(q, 1, (ck.shape[1], -1))
        parts = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, ck, cv, attn_mask=seen, scale=scale)
            for x in q_BGRNE.unbind(2)
        ]
        context = torch.stack([out for out, _ in parts], dim=2)
        first_BGRN = torch.stack([total for _, total in parts], dim=2)
        scores = _own_scores(q_BGRNE, bk, scale, num_slots, first_BGRN.dtype)
        first = torch.unflatten(first_BGRN, 3, (-1, num_slots))
        total = torch.logaddexp(first, scores.logsumexp(-1))
        own = (scores - total[..., None]).exp() @ _by_block(bv, num_slots).to(scores.dtype)
        share = (first - total).exp().flatten(3)[..., None]  # of the context, which was alone in the kernel's softmax
        out = (context * share + own.flatten(3, 4)).to(q.dtype)
        ctx.save_for_backward(q, ck, cv, bk, bv, seen, out, total.flatten(3))
        ctx.scale, ctx.num_slots = scale, num_slots
        return out.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, ck, cv, bk, bv, seen, out, total_BGRN = ctx.saved_tensors
        scale, num_slots = ctx.scale, ctx.num_slots
        q_BGRNE, grad = (torch.unflatten(x, 1, (ck.shape[1], -1)) for x in (q, grads[0]))
        parts = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, r].contiguous(), q_BGRNE[:, :, r], ck, cv, out[:, :, r], total_BGRN[:, :, r].contiguous(),
                0.0, False, attn_mask=seen, scale=scale,
            )
            for r in range(q_BGRNE.shape[2])
        ]  # fmt: skip
        grads_q, grads_ck, grads_cv = map(torch.stack, zip(*parts, strict=True))
        wide = total_BGRN.dtype
        scores = _own_scores(q_BGRNE, bk, scale, num_slots, wide)
        p = (scores - torch.unflatten(total_BGRN, 3, (-1, num_slots))[..., None]).exp()
        grad_wide = torch.unflatten(grad.to(wide), 3, (-1, num_slots))
        delta = (grad_wide * torch.unflatten(out, 3, (-1, num_slots))).sum(-1, keepdim=True)
        grad_score = p * (grad_wide @ _by_block(bv, num_slots).to(wide).mT - delta) * scale
        grad_q = grads_q.movedim(0, 2) + (grad_score @ _by_block(bk, num_slots).to(wide)).flatten(3, 4)
        wide_q = torch.unflatten(q_BGRNE.to(wide), 3, (-1, num_slots))
        grad_bk, grad_bv = ((x.mT @ y).sum(2).flatten(2, 3) for x, y in ((grad_score, wide_q), (p, grad_wide)))
        found = (grad_q.flatten(1, 2), grads_ck.sum(0), grads_cv.sum(0), grad_bk, grad_bv)
        return (*(gradient.to(q.dtype) for gradient in found), None, None, None)


def _by_block(x_BGNE: Tensor, num_slots: int) -> Tensor:
    """[B, G, 1, A, S, E]"""
    return torch.unflatten(x_BGNE, 2, (-1, num_slots))[:, :, None]


def _own_scores(q_BGRNE: Tensor, bk: Tensor, scale: float, num_slots: int, dtype: torch.dtype) -> Tensor:
    """The scores of every row with the keys of its own block, [B, G, R, A, S, S]."""
    return scale * (torch.unflatten(q_BGRNE, 3, (-1, num_slots)).to(dtype) @ _by_block(bk, num_slots).to(dtype).mT)
