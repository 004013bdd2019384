"""The rows that a parallel drafter trains.

Other ones in every epoch, and the same ones in the same epoch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from make_heads import VOCAB, make_batch, make_ids
from torch import Tensor

from redraft.heads.draft import Batch, label_rows
from redraft.heads.nn.masks import choose_rows

PHI = (1 + 5**0.5) / 2


def choose(batch: Batch, count: int, salt: int) -> Tensor:
    """The chosen rows, ascending, [B, N]."""
    return choose_rows(replace(batch, salt=salt), label_rows(batch, 1), count).sort(dim=1).values


def test_each_salt_takes_rows_from_another_point_of_the_circle() -> None:
    # All tokens are 1. 2654435761 is 2^32 / phi, so row t is at (2 (t + 1) + salt) / phi on a
    # circle of length 1.
    batch = make_batch([[[1] * 22]])
    for salt in range(10):
        place = {t: ((2 * (t + 1) + salt) / PHI) % 1 for t in range(20)}
        last = sorted(sorted(place, key=place.__getitem__)[-5:])
        assert choose(batch, 5, salt).tolist() == [last]


def test_ten_epochs_begin_a_block_at_nearly_every_row() -> None:
    batch = make_batch([[make_ids(22, seed=row)] for row in range(8)])
    chosen = [choose(batch, 5, epoch) for epoch in range(10)]
    rows = [set(torch.cat(chosen, dim=1)[b].tolist()) for b in range(8)]
    assert all(found <= set(range(20)) for found in rows), (
        "rows 20 and 21 have no label two tokens on"
    )
    assert sum(map(len, rows)) >= 0.9 * 8 * 20
    first = [set(chosen[0][b].tolist()) for b in range(8)]
    assert [len(found) for found in first] == [5] * 8


def test_the_choice_of_a_salt_can_be_repeated() -> None:
    batch = make_batch([[make_ids(40)], [make_ids(40, seed=2)]])
    assert torch.equal(choose(batch, 9, 7), choose(batch, 9, 7))
    assert not torch.equal(choose(batch, 9, 7), choose(batch, 9, 8))


@pytest.mark.parametrize("salt", [1, 5, 2**31 - 1, 2**40])
def test_rows_with_a_label_come_first_whatever_the_salt(salt: int) -> None:
    batch = make_batch([[make_ids(30)], [make_ids(9), make_ids(9, seed=4)]], loss_from=6)
    has_label_BT = label_rows(batch, 1)
    rows_BN = choose_rows(replace(batch, salt=salt), has_label_BT, 12)
    assert rows_BN.sort(dim=1).values.diff(dim=1).all(), "no row is taken twice"
    assert has_label_BT.gather(1, rows_BN).sum(1).tolist() == [12, int(has_label_BT[1].sum())]


def test_a_salt_needs_no_values() -> None:
    """`redraft plan` runs the step on tensors without any."""
    shape = torch.empty(2, VOCAB, dtype=torch.int64, device="meta")
    batch = Batch(
        input_ids_BT=shape,
        loss_mask_BT=shape.bool(),
        document_BT=shape,
        position_ids_BT=shape,
        salt=3,
    )
    rows_BN = choose_rows(batch, label_rows(batch, 1), 5)
    assert (rows_BN.shape, rows_BN.device.type) == ((2, 5), "meta")
