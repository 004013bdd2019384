"""The reduced vocabulary of a draft head: the most frequent labels of the data.

V = target vocabulary, W = draft vocabulary."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redraft.distill.data.samples import Sample
from redraft.distill.data.tokens import MappedSamples

# Number of samples counted at once, because each one alone would need an array of the vocabulary's
# size.
CHUNK = 1024


def choose_size(asked: int | None, usual: int | None, vocab_size: int) -> int:
    """Return the size of the draft's vocabulary. 0 means the target's whole vocabulary.

    The size is `asked`, the value of --draft-vocab-size. If `asked` is None, the size is the
    family's `usual` size, or 0 if the target's vocabulary is not larger.

    Raises:
        ValueError: `asked` is not between 0 and `vocab_size`.
    """
    if asked is None:
        return usual if usual is not None and usual < vocab_size else 0
    if not 0 <= asked <= vocab_size:
        raise ValueError(
            f"--draft-vocab-size {asked}: the target's vocabulary has {vocab_size} ids: choose "
            f"at most that number, or 0 for all ids"
        )
    return asked


def frequent_ids(samples: Iterable[Sample], size: int, vocab_size: int) -> Tensor | None:
    """Return the ids of the `size` most frequent labels in ascending order, int64 [W].

    Return None for the whole vocabulary, which means that `size` is 0 or `vocab_size`.
    """
    assert 0 <= size <= vocab_size
    if size in (0, vocab_size):
        return None
    counts_V = _count_labels(samples, vocab_size)
    # The sort is stable, so of equal counts, the lower id is kept. The ids ascend, because the loss
    # searches in them.
    kept_W = np.sort(np.argsort(-counts_V, kind="stable")[:size])
    print(
        f"draft vocabulary: {size:,} of {vocab_size:,} ids, "
        f"{counts_V[kept_W].sum() / counts_V.sum():.2%} of the labels"
    )
    return torch.from_numpy(kept_W)


def measure_coverage(
    train: Iterable[Sample], judged: Iterable[Sample], sizes: Sequence[int], vocab_size: int
) -> dict[int, float]:
    """Return, by size, the fraction of `judged` labels among the most frequent of `train`."""
    frequent_first_V = np.argsort(-_count_labels(train, vocab_size), kind="stable")
    judged_V = _count_labels(judged, vocab_size)
    covered_V = judged_V[frequent_first_V].cumsum()
    return {size: float(covered_V[size - 1] / judged_V.sum()) for size in sizes}


def _count_labels(samples: Iterable[Sample], vocab_size: int) -> NDArray[np.int64]:
    """Count how often each id is a label, [V]."""
    counts_V = np.zeros(vocab_size, np.int64)
    for labels in (
        samples.labels() if isinstance(samples, MappedSamples) else _label_blocks(samples)
    ):
        counts_V += np.bincount(labels, minlength=vocab_size)
    return counts_V


def _label_blocks(samples: Iterable[Sample]) -> Iterator[NDArray[np.int32]]:
    remaining = iter(samples)
    while some := list(islice(remaining, CHUNK)):
        yield np.concatenate([sample.input_ids[sample.loss_mask] for sample in some])
