"""The reduced vocabulary of a draft head: the ids that its data asks for most. V = target vocabulary, W = draft's."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from distill.samples import Sample


def require_smaller(size: int, vocab_size: int) -> None:
    """Return where a draft vocabulary of `size` ids fits the target's; 0 stands for all of it.

    Raises: ValueError.
    """
    if not 0 <= size <= vocab_size:
        raise ValueError(f"a draft vocabulary of {size:,} ids: the target's has {vocab_size:,}, ask for fewer")


def frequent_ids(samples: Iterable[Sample], size: int, vocab_size: int) -> Tensor | None:
    """The `size` ids that are labels most often, ascending, int64 [W]; None where that is the whole vocabulary.

    Raises: ValueError where the target has fewer.
    """
    require_smaller(size, vocab_size)
    if size in (0, vocab_size):
        return None
    counts_V = np.zeros(vocab_size, np.int64)
    for sample in samples:
        np.add.at(counts_V, sample.input_ids[sample.loss_mask], 1)
    kept_W = np.sort(np.argsort(-counts_V, kind="stable")[:size])
    print(
        f"draft vocabulary: {size:,} of {vocab_size:,} ids, {counts_V[kept_W].sum() / counts_V.sum():.2%} of the labels"
    )
    return torch.from_numpy(kept_W)
