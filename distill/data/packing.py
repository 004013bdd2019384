"""Pack samples into rows of equal length.

Batches of these rows depend only on (seed, index).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from redraft.distill.data.samples import Sample
from redraft.distill.data.tokens import MappedSamples
from redraft.heads.draft import Batch


def pack(lengths: Sequence[int], capacity: int, seed: int) -> list[list[int]]:
    """Return the sample indices for each row, assigned by best fit.

    In a random order drawn from `seed`, each sample goes into the fullest row that has room for it.

    Raises:
        ValueError: a sample exceeds `capacity`.
    """
    rows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, row) for all rows with free tokens, ascending
    for index in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        length = lengths[index]
        if length > capacity:
            raise ValueError(f"a sample of {length} tokens does not fit into rows of {capacity}")
        # -1 sorts before every row, so this finds the smallest remaining space of at least
        # `length`: the fullest row that fits.
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


def collate(rows: Sequence[Sequence[Sample]], width: int) -> Batch:
    """Concatenate the samples of each row, padded to `width` tokens."""
    documents = [[(sample.input_ids, sample.loss_mask) for sample in row] for row in rows]
    return Batch.packed(documents, width=width)


class PackedDataset:
    """Rows of `sequence_length` tokens.

    A run's position in the data is a single integer, the index of the next batch.
    """

    def __init__(self, samples: Sequence[Sample], *, sequence_length: int, seed: int = 0) -> None:
        self.samples, self.sequence_length, self.seed = samples, sequence_length, seed
        lengths = (
            samples.lengths
            if isinstance(samples, MappedSamples)
            else [len(s.input_ids) for s in samples]
        )
        self.rows = pack(lengths, sequence_length, seed)
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def num_batches(self, batch_size: int, num_ranks: int = 1) -> int:
        """Return the number of batches per rank in one epoch.

        Raises:
            ValueError: the rows do not fill one batch.
        """
        batches = len(self.rows) // (batch_size * num_ranks)
        if batches == 0:
            raise ValueError(
                f"{len(self.rows)} rows of {self.sequence_length} tokens do not fill one batch of "
                f"{batch_size} on "
                f"{num_ranks} process{'es' * (num_ranks > 1)}: give more data, or a smaller "
                "--loop.batch-size or --loop.sequence-length"
            )
        return batches

    def batch(self, index: int, *, batch_size: int, rank: int = 0, num_ranks: int = 1) -> Batch:
        """Return batch `index` of this rank, counted across epochs from the start of the run.

        The salt of the batch is the epoch.
        """
        epoch, index_in_epoch = divmod(index, self.num_batches(batch_size, num_ranks))
        # The batches of all ranks are next to each other: with 2 ranks and 4 rows each, rank 1
        # starts at row 4, then at row 12.
        first = (index_in_epoch * num_ranks + rank) * batch_size
        batch = self._collate(
            [self.rows[row] for row in self._order_of(epoch)[first : first + batch_size]]
        )
        return replace(batch, salt=epoch)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        """Return the order of the rows, which is computed from the seed.

        A resumed run and all other ranks compute the same order. The last order is cached, because
        a permutation of 500,000 rows takes 60 ms.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            # A list instead of a sum, so that seed 1 in epoch 2 and seed 2 in epoch 1 have
            # different orders.
            self._order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        return self._order

    def in_order(
        self, batch_size: int, *, rank: int = 0, num_ranks: int = 1, first: int = 0
    ) -> Iterator[Batch]:
        """Yield each row from `first` on once, in batches.

        All ranks get the same number of batches with the same shapes. Padding fills the gaps.
        """
        for start in range(first, len(self.rows), batch_size * num_ranks):
            share = self.rows[start : start + batch_size * num_ranks][rank::num_ranks]
            # E.g. with 5 rows, 2 ranks and batches of 4, both ranks get 3 rows, and the last row of
            # rank 1 is padding.
            width = min(batch_size, -(-(len(self.rows) - start) // num_ranks))
            yield self._collate([*share, *[[]] * (width - len(share))])

    def _collate(self, rows: Sequence[Sequence[int]]) -> Batch:
        return collate([[self.samples[i] for i in row] for row in rows], self.sequence_length)
