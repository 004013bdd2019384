from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.distill.data.packing import PackedDataset, pack
from redraft.distill.data.samples import Sample
from redraft.heads.draft import Batch


def make_samples(lengths: list[int]) -> list[Sample]:
    """Sample i is made of the token 100 + i; the second half of each is labelled."""
    return [
        Sample(
            input_ids=np.full(length, 100 + i, np.int32),
            loss_mask=np.arange(length) >= length // 2,
            conversation=str(i),
            domain="all",
        )
        for i, length in enumerate(lengths)
    ]


def tokens(batch: Batch) -> set[int]:
    return set(batch.input_ids_BT[batch.document_BT >= 0].tolist())


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=60), seed=st.integers(0, 3))
def test_packing_keeps_every_sample_whole_and_once(lengths: list[int], seed: int) -> None:
    rows = pack(lengths, 16, seed)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    used = [sum(lengths[i] for i in row) for row in rows]
    assert max(used) <= 16
    # Best fit never leaves two rows that would fit into one: each opened because no earlier one had
    # room.
    assert sum(total <= 8 for total in used) <= 1


def test_packing_wastes_little_and_repeats_itself() -> None:
    lengths = np.random.default_rng(0).integers(5, 100, 2000).tolist()
    rows = pack(lengths, 256, seed=1)
    assert sum(lengths) / (256 * len(rows)) > 0.98
    assert rows == pack(lengths, 256, seed=1) != pack(lengths, 256, seed=2)


def test_a_sample_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"17.*16"):
        pack([3, 17], 16, 0)


def test_a_row_holds_its_documents_end_to_end_then_padding() -> None:
    data = PackedDataset(make_samples([3, 2]), sequence_length=7)
    batch = data.batch(0, batch_size=1)
    first, second = (3, 2) if batch.input_ids_BT[0, 0] == 100 else (2, 3)
    assert batch.document_BT.tolist() == [[0] * first + [1] * second + [-1, -1]]
    assert batch.position_ids_BT.tolist() == [[*range(first), *range(second), 0, 0]]
    assert batch.input_ids_BT[0, 5:].tolist() == [0, 0]
    assert (
        batch.loss_mask_BT.tolist()[0][:3] == [False, True, True]
        if first == 3
        else [False, True, False]
    )
    assert not batch.loss_mask_BT[0, 5:].any()
    assert (
        batch.input_ids_BT.dtype
        == batch.document_BT.dtype
        == batch.position_ids_BT.dtype
        == torch.int64
    )


def test_an_epoch_gives_every_row_once_across_ranks_and_the_next_in_another_order() -> None:
    data = PackedDataset(make_samples([8] * 24), sequence_length=8, seed=5)
    assert data.num_batches(2, num_ranks=3) == 4
    epochs = [
        [
            data.batch(i, batch_size=2, rank=r, num_ranks=3)
            for i in range(4 * e, 4 * e + 4)
            for r in range(3)
        ]
        for e in range(2)
    ]
    orders = [[row[0].item() for batch in epoch for row in batch.input_ids_BT] for epoch in epochs]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(100, 124))
    assert orders[0] != orders[1]


def test_a_batch_is_a_function_of_seed_and_index() -> None:
    samples = make_samples([8] * 24)
    straight = PackedDataset(samples, sequence_length=8, seed=5)
    for index in range(9):
        straight.batch(index, batch_size=4)
    resumed = PackedDataset(samples, sequence_length=8, seed=5)
    assert torch.equal(
        straight.batch(9, batch_size=4).input_ids_BT, resumed.batch(9, batch_size=4).input_ids_BT
    )
    # 24 rows are 6 batches of 4, so batch 9 is of the second epoch
    assert straight.batch(9, batch_size=4).salt == resumed.batch(9, batch_size=4).salt == 1
    other = PackedDataset(samples, sequence_length=8, seed=6)
    assert not torch.equal(
        straight.batch(9, batch_size=4).input_ids_BT, other.batch(9, batch_size=4).input_ids_BT
    )


def test_the_salt_is_the_epoch_on_every_rank_and_evaluation_has_none() -> None:
    data = PackedDataset(make_samples([8] * 24), sequence_length=8, seed=5)
    salts = [
        {data.batch(i, batch_size=2, rank=r, num_ranks=3).salt for r in range(3)} for i in range(10)
    ]
    assert salts == [{0}] * 4 + [{1}] * 4 + [{2}] * 2
    assert {batch.salt for batch in data.in_order(2)} == {0}


def test_too_few_rows_for_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3.*8.*2.*2"):
        PackedDataset(make_samples([8] * 3), sequence_length=8).num_batches(2, num_ranks=2)


@pytest.mark.parametrize(("num_rows", "num_ranks"), [(7, 1), (7, 2), (9, 2), (1, 3)])
def test_evaluation_sees_every_row_once_in_equal_shapes_on_all_ranks(
    num_rows: int, num_ranks: int
) -> None:
    data = PackedDataset(make_samples([8] * num_rows), sequence_length=8)
    by_rank = [list(data.in_order(2, rank=r, num_ranks=num_ranks)) for r in range(num_ranks)]
    shapes = [[batch.input_ids_BT.shape for batch in batches] for batches in by_rank]
    assert all(other == shapes[0] for other in shapes)
    seen = [token for batches in by_rank for batch in batches for token in tokens(batch)]
    assert sorted(seen) == list(range(100, 100 + num_rows))
