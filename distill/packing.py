"""Samples packed into rows of one length, and batches of them that are functions of (seed, index) alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from distill.samples import Sample
from heads.draft import Batch


def pack(lengths: Sequence[int], capacity: int, seed: int) -> list[list[int]]:
    """Indices by row: each goes whole into the fullest row that has room for it, in an order drawn from `seed`."""
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, row) of the rows that are not full, ascending
    for index in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"a sample of {length} tokens does not fit into rows of {capacity}")
        at = bisect_left(rooms, (length, -1))
        if at == len(rooms):
            rows.append([])
            room, row = capacity, len(rows) - 1
        else:
            room, row = rooms.pop(at)
        rows[row].append(index)
        if room > length:
            insort(rooms, (room - length, row))
    return rows


def collate(rows: Sequence[Sequence[Sample]], width: int, pad_id: int) -> Batch:
    """The samples of each row laid end to end and padded to `width` tokens."""
    ids_BT = torch.full((len(rows), width), pad_id)
    mask_BT = torch.zeros((len(rows), width), dtype=torch.bool)
    document_BT = torch.full((len(rows), width), -1)
    position_BT = torch.zeros((len(rows), width), dtype=torch.long)
    for b, row in enumerate(rows):
        end = 0
        for document, sample in enumerate(row):
            start, end = end, end + len(sample.input_ids)
            ids_BT[b, start:end] = torch.from_numpy(sample.input_ids)
            mask_BT[b, start:end] = torch.from_numpy(sample.loss_mask)
            document_BT[b, start:end] = document
            position_BT[b, start:end] = torch.arange(end - start)
    return Batch(input_ids_BT=ids_BT, loss_mask_BT=mask_BT, document_BT=document_BT, position_ids_BT=position_BT)


class PackedDataset:
    """Rows of `sequence_length` tokens. The data position of a run is one integer, the index of its next batch."""

    def __init__(self, samples: Sequence[Sample], *, sequence_length: int, pad_id: int = 0, seed: int = 0) -> None:
        self.samples, self.sequence_length, self.pad_id, self.seed = samples, sequence_length, pad_id, seed
        self.rows = pack([len(sample.input_ids) for sample in samples], sequence_length, seed)

    def num_batches(self, batch_size: int, num_ranks: int = 1) -> int:
        """Batches that each rank takes in one epoch; what does not fill a last one waits for another epoch's order.

        Raises: ValueError where the rows do not fill one batch.
        """
        batches = len(self.rows) // (batch_size * num_ranks)
        if batches == 0:
            raise ValueError(
                f"{len(self.rows)} rows of {self.sequence_length} tokens do not fill one batch of {batch_size} on "
                f"{num_ranks} process{'es' * (num_ranks > 1)}: give more data, a smaller batch or shorter rows"
            )
        return batches

    def batch(self, index: int, *, batch_size: int, rank: int = 0, num_ranks: int = 1) -> Batch:
        """Batch `index` of this rank, counted from the run's start through all epochs."""
        epoch, index_in_epoch = divmod(index, self.num_batches(batch_size, num_ranks))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        first = (index_in_epoch * num_ranks + rank) * batch_size
        return self._collate([self.rows[row] for row in order[first : first + batch_size]])

    def in_order(self, batch_size: int, *, rank: int = 0, num_ranks: int = 1) -> Iterator[Batch]:
        """Every row once, for evaluation; all ranks get as many batches of the same shapes, filled with padding."""
        for start in range(0, len(self.rows), batch_size * num_ranks):
            share = self.rows[start : start + batch_size * num_ranks][rank::num_ranks]
            width = min(batch_size, -(-(len(self.rows) - start) // num_ranks))
            yield self._collate([*share, *[[]] * (width - len(share))])

    def _collate(self, rows: Sequence[Sequence[int]]) -> Batch:
        return collate([[self.samples[i] for i in row] for row in rows], self.sequence_length, self.pad_id)
