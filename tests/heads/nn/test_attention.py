"""Attention over draft steps against a reference that writes every row's sequence out, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from redraft.heads.draft import Batch, attention_mask
from redraft.heads.nn.attention import StepMemory, _attend_fused, _attend_masked, additive

B, H, T, E, STEPS = 2, 4, 7, 8, 4
ONE_DOCUMENT = [[0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, -1, -1]]
PACKED = [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 2, 2, -1, -1]]


def make_batch(document: list[list[int]]) -> Batch:
    document_BT = torch.tensor(document)
    zeros = torch.zeros_like(document_BT)
    return Batch(input_ids_BT=zeros, loss_mask_BT=document_BT >= 0, document_BT=document_BT, position_ids_BT=zeros)


def make_qkv(key_heads: int, value_size: int, dtype: torch.dtype = torch.float64) -> list[list[Tensor]]:
    """For each step q, k and v."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, T, E), (B, key_heads, T, E), (B, key_heads, T, value_size)]
    return [
        [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
        for _ in range(STEPS)
    ]


def row_by_row(qkv: list[list[Tensor]], step: int, document: list[list[int]], scale: float) -> Tensor:
    """softmax over the row's own continuation: step-0 keys of its document up to it, then its own of steps 1..step."""
    q, groups = qkv[step][0], H // qkv[0][1].shape[1]
    rows = []
    for b in range(B):
        for h in range(H):
            for t in range(T):
                seen = [(0, s) for s in range(t + 1) if document[b][s] == document[b][t]]
                seen += [(j, t) for j in range(1, step + 1)]
                keys = torch.stack([qkv[j][1][b, h // groups, s] for j, s in seen])
                values = torch.stack([qkv[j][2][b, h // groups, s] for j, s in seen])
                rows.append((keys @ q[b, h, t] * scale).softmax(0) @ values)
    return torch.stack(rows).view(B, H, T, -1)


@pytest.mark.parametrize("document", [ONE_DOCUMENT, PACKED], ids=["one document", "packed"])
@pytest.mark.parametrize(("key_heads", "value_size"), [(4, 8), (2, 8), (2, 5)])
def test_step_attention_equals_the_written_out_reference(
    document: list[list[int]], key_heads: int, value_size: int
) -> None:
    qkv = make_qkv(key_heads, value_size)
    memory = StepMemory(make_batch(document))
    real_rows = torch.tensor(document) >= 0
    outs, wanted = [], []
    for step, (q, k, v) in enumerate(qkv):
        mask = real_rows[:, None, :, None]
        outs.append(memory.attend(q, k, v, 0.3) * mask)
        wanted.append(row_by_row(qkv, step, document, 0.3) * mask)
    torch.testing.assert_close(torch.stack(outs), torch.stack(wanted), atol=1e-12, rtol=1e-12)
    leaves = [x for step in qkv for x in step]
    weights = torch.randn(len(outs), B, H, T, value_size, dtype=torch.float64)
    grads = torch.autograd.grad((torch.stack(outs) * weights).sum(), leaves)
    wanted_grads = torch.autograd.grad((torch.stack(wanted) * weights).sum(), leaves)
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad, wanted_grad, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("document", [ONE_DOCUMENT, PACKED], ids=["one document", "packed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fused_and_masked_attention_agree(document: list[list[int]], dtype: torch.dtype) -> None:
    qkv = make_qkv(H, E, dtype)
    is_packed = document == PACKED
    mask = additive(attention_mask(make_batch(document)), dtype) if is_packed else None
    q, keys, values = qkv[-1][0], [k for _, k, _ in qkv], [v for _, _, v in qkv]
    tolerance = 1e-12 if dtype == torch.float64 else 3e-2
    leaves = [q, *keys, *values]
    fused, masked = _attend_fused(q, keys, values, mask, 0.3), _attend_masked(q, keys, values, mask, 0.3)
    torch.testing.assert_close(fused, masked, atol=tolerance, rtol=tolerance)
    for grad, wanted in zip(
        torch.autograd.grad(fused.sum(), leaves), torch.autograd.grad(masked.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(grad, wanted, atol=tolerance, rtol=tolerance)


def test_under_autocast_attention_computes_in_the_autocast_type() -> None:
    q, k, v = make_qkv(H, E, torch.float32)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert StepMemory(make_batch(ONE_DOCUMENT)).attend(q, k, v, 0.3).dtype == torch.bfloat16
