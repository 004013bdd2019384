"""Attention of a recurrent head: exact for all draft steps at once, without a [steps * T]^2 mask.

Step 0 is a pass over the target's features, causal within each document. At step k, row t stands at position t + k of a
continuation that starts at row t. It sees the step-0 rows up to t, and the keys of row t at steps 1..k: the diagonal of
each step. Serving does the same with a KV cache: first the prefix, then one token after another.

B = batch, H = query heads, G = key heads, T = tokens, E = head size, J = steps after step 0.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.heads.draft import Batch, attention_mask
from redraft.heads.nn.precision import product_dtype


class Memory(Protocol):
    """The keys and values so far. Every call first adds new ones."""

    def attend(self, q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, scale: float) -> Tensor:
        """softmax(scale * q k) v over the keys visible to each query, [B, H, T, size of v]."""
        ...


class StepMemory:
    """For training: the j-th call, from 0, is draft step j of every row of the batch.

    With `rows_BN`, distinct rows of the batch, the calls after the first may have fewer rows: a call with n of them
    continues the first n of `rows_BN`. No call may have more rows than the one before.
    """

    def __init__(self, batch: Batch, rows_BN: Tensor | None = None) -> None:
        self._batch, self._rows_BN = batch, rows_BN
        self._mask_B1TT: Tensor | None = None
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def attend(self, q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, scale: float) -> Tensor:
        q, k, v = _prepare(q_BHTE, k_BGTE, v_BGTE)
        if not self._keys:
            # with one document per row no mask is needed, and kernels skip the upper half; this test syncs with the GPU
            one_document = bool((self._batch.document_BT.diff(dim=1) <= 0).all())
            self._mask_B1TT = None if one_document else additive(attention_mask(self._batch), q.dtype)
        self._keys.append(k)
        self._values.append(v)
        keys, values, mask = self._keys, self._values, self._mask_B1TT
        if self._rows_BN is not None and len(keys) > 1:
            rows_Bn = self._rows_BN[:, : q.shape[2]]
            mask = additive(_rows_mask(self._batch, rows_Bn), q.dtype)
            keys, values = ([x[0], *(y[:, :, : q.shape[2]] for y in x[1:])] for x in (keys, values))
        attend = _attend_fused if q.device.type == "cpu" else _attend_masked
        return attend(q, keys, values, mask, scale)[..., : v_BGTE.shape[-1]]


class KeyCache:
    """For decoding: the rows of each call follow those of the call before."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def attend(self, q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, scale: float) -> Tensor:
        q, k, v = _prepare(q_BHTE, k_BGTE, v_BGTE)
        self._keys = k if self._keys is None else torch.cat([self._keys, k], dim=2)
        self._values = v if self._values is None else torch.cat([self._values, v], dim=2)
        num_queries, num_keys = q.shape[2], self._keys.shape[2]
        # the queries are the last rows: the first of them sees every key before it, and its own
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
        out: Tensor = F.scaled_dot_product_attention(q, self._keys, self._values, attn_mask=seen, scale=scale)
        return out[..., : v_BGTE.shape[-1]]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask as an additive one in `dtype`: True becomes 0, False becomes -inf."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _prepare(q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in one dtype, with key heads repeated to match query heads, and v padded with zeros to k's size."""
    dtype = product_dtype(v_BGTE)
    groups = q_BHTE.shape[1] // k_BGTE.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k_BGTE, v_BGTE))
    # DeepSeek's values are narrower than its keys, and the kernels take one size
    v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
    return q_BHTE.to(dtype), k.to(dtype), v.to(dtype)


def _rows_mask(batch: Batch, rows_Bn: Tensor) -> Tensor:
    """`attention_mask` of some rows only, bool [B, 1, n, T], without the mask of all."""
    at_T = torch.arange(batch.document_BT.shape[1], device=rows_Bn.device)
    own_Bn1 = batch.document_BT.gather(1, rows_Bn)[..., None]
    return ((batch.document_BT[:, None] == own_Bn1) & (at_T <= rows_Bn[..., None]))[:, None]


def _attend_masked(
    q_BHTE: Tensor, keys: list[Tensor], values: list[Tensor], mask_B1TT: Tensor | None, scale: float
) -> Tensor:
    """For any device: the keys of all steps side by side, under one mask."""
    if len(keys) == 1:
        return F.scaled_dot_product_attention(
            q_BHTE, keys[0], values[0], attn_mask=mask_B1TT, is_causal=mask_B1TT is None, scale=scale
        )
    eye_TT = torch.eye(q_BHTE.shape[2], dtype=torch.bool, device=q_BHTE.device)
    if mask_B1TT is None:
        mask_B1TT = additive(torch.ones_like(eye_TT).tril(), q_BHTE.dtype)[None, None]
    # of each later step a row sees its own key alone
    diagonal = additive(eye_TT, q_BHTE.dtype).expand(*mask_B1TT.shape[:-1], -1)
    mask = torch.cat([mask_B1TT, *[diagonal] * (len(keys) - 1)], dim=-1)
    return F.scaled_dot_product_attention(q_BHTE, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask, scale=scale)


def _attend_fused(
    q_BHTE: Tensor, keys: list[Tensor], values: list[Tensor], mask_B1TT: Tensor | None, scale: float
) -> Tensor:
    """For a CPU: the flash kernel over step 0; the diagonals are added by log-sum-exp."""
    out: Tensor = _StepAttention.apply(q_BHTE, mask_B1TT, scale, *keys, *values)  # type: ignore[no-untyped-call]
    return out


class _StepAttention(torch.autograd.Function):
    """One softmax over the step-0 keys and the diagonal keys of each row, with O(T) memory per head and step.

    Backward: with p = exp(score - total) and delta = sum(grad * out) of the *joint* softmax, the gradient of each score
    is p * (grad v - delta). So the kernel's backward is exact for step 0 if it is given the joint `out` and `total`.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, mask: Tensor | None, scale: float, *keys_values: Tensor) -> Tensor:
        keys, values = keys_values[: len(keys_values) // 2], keys_values[len(keys_values) // 2 :]
        out, total_BHT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, keys[0], values[0], is_causal=mask is None, attn_mask=mask, scale=scale
        )
        if len(keys) > 1:
            first_BHT = total_BHT
            wide_q = q.to(first_BHT.dtype)
            scores = [(wide_q * k).sum(-1) * scale for k in keys[1:]]
            # one softmax over all keys: the output of step 0 shrinks to its share of the total
            total_BHT = torch.stack([first_BHT, *scores]).logsumexp(0)
            out = out * (first_BHT - total_BHT).exp()[..., None]
            for score, v in zip(scores, values[1:], strict=True):
                out = out + (score - total_BHT).exp()[..., None] * v
        out = out.to(q.dtype)
        ctx.save_for_backward(q, out, total_BHT, mask, *keys_values)
        ctx.scale = scale
        return cast(Tensor, out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, out, total_BHT, mask, *keys_values = ctx.saved_tensors
        keys, values = keys_values[: len(keys_values) // 2], keys_values[len(keys_values) // 2 :]
        grad = grads[0]
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, keys[0], values[0], out, total_BHT, 0.0, mask is None, attn_mask=mask, scale=ctx.scale
        )
        grad_keys, grad_values = [grad_k], [grad_v]
        wide_q, wide_grad = q.to(total_BHT.dtype), grad.to(total_BHT.dtype)
        delta_BHT = (wide_grad * out).sum(-1)
        for k, v in zip(keys[1:], values[1:], strict=True):
            p_BHT = ((wide_q * k).sum(-1) * ctx.scale - total_BHT).exp()
            grad_score = (p_BHT * ((wide_grad * v).sum(-1) - delta_BHT) * ctx.scale)[..., None]
            grad_q = grad_q + grad_score * k
            grad_keys.append((grad_score * wide_q).to(k.dtype))
            grad_values.append((p_BHT[..., None] * wide_grad).to(v.dtype))
        return (grad_q.to(q.dtype), None, None, *grad_keys, *grad_values)
