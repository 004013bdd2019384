"""Attention of blocks against plain softmaxes row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from redraft.heads.nn.blocks import BlockMask, attend_blocks

SLOTS, SIZE = 3, 8
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, -1], [0, 0, 1, 1, 1, 2, 2, 2, 2, 2]])
ROWS = torch.tensor([[0, 2, 4, 6], [1, 3, 6, 9]])


def make_inputs(dtype: torch.dtype, key_heads: int) -> list[Tensor]:
    torch.manual_seed(0)
    tokens, rows = DOCUMENTS.shape[1], ROWS.shape[1] * SLOTS
    shapes = [
        (4, rows),
        (key_heads, tokens),
        (key_heads, tokens),
        (key_heads, rows),
        (key_heads, rows),
    ]
    return [
        torch.randn(2, heads, count, SIZE, dtype=torch.float64).to(dtype).requires_grad_()
        for heads, count in shapes
    ]


def attend_by_hand(
    q: Tensor, ck: Tensor, cv: Tensor, bk: Tensor, bv: Tensor, scale: float
) -> Tensor:
    """Row by row, with the keys of a row picked one after the other."""
    batches = []
    for b in range(2):
        heads = []
        for h in range(q.shape[1]):
            g = h * ck.shape[1] // q.shape[1]
            rows = []
            for n in range(q.shape[2]):
                last = int(ROWS[b, n // SLOTS])
                seen = [t for t in range(last + 1) if DOCUMENTS[b, t] == DOCUMENTS[b, last]]
                own = slice(n // SLOTS * SLOTS, (n // SLOTS + 1) * SLOTS)
                keys = torch.cat([ck[b, g, seen], bk[b, g, own]])
                values = torch.cat([cv[b, g, seen], bv[b, g, own]])
                rows.append((scale * keys @ q[b, h, n]).softmax(0) @ values)
            heads.append(torch.stack(rows))
        batches.append(torch.stack(heads))
    return torch.stack(batches)


def attend_pairs(inputs: list[Tensor], mask: BlockMask) -> Tensor:
    q, ck, cv, bk, bv = inputs
    return attend_blocks(q, (ck, cv), (bk, bv), mask, 0.3)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_every_row_sees_the_context_before_its_anchor_and_its_own_block(key_heads: int) -> None:
    mask = BlockMask.make(ROWS, DOCUMENTS, SLOTS)
    found, wanted = make_inputs(torch.float64, key_heads), make_inputs(torch.float64, key_heads)
    out, by_hand = attend_pairs(found, mask), attend_by_hand(*wanted, 0.3)
    torch.testing.assert_close(out, by_hand)
    weights = torch.randn_like(out)
    (out * weights).sum().backward()
    (by_hand * weights).sum().backward()
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_in_bfloat16_it_rounds_once() -> None:
    mask = BlockMask.make(ROWS, DOCUMENTS, SLOTS)
    narrow, wide = (
        make_inputs(torch.bfloat16, 2),
        [x.detach().double() for x in make_inputs(torch.bfloat16, 2)],
    )
    out = attend_pairs(narrow, mask)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), attend_by_hand(*wide, 0.3), atol=0.02, rtol=0.02)
    out.float().sum().backward()
    assert all(
        x.grad is not None and x.grad.dtype == torch.bfloat16 and x.grad.isfinite().all()
        for x in narrow
    )


def test_under_autocast_bfloat16_is_computed_as_without() -> None:
    """The forward pass runs under autocast and the backward pass does not.

    Both must compute the same scores.
    """
    mask, results = BlockMask.make(ROWS, DOCUMENTS, SLOTS), []
    for is_enabled in (False, True):
        inputs = [(2 * x.detach()).requires_grad_() for x in make_inputs(torch.bfloat16, 2)]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_enabled):
            out = attend_pairs(inputs, mask)
        out.float().square().sum().backward()
        results.append([out, *(x.grad for x in inputs)])
    for without, under in zip(*results, strict=True):
        assert torch.equal(without, under)
