"""Confidence intervals over prompts: rows of one prompt depend on each other, so prompts are what is drawn again.

N = prompts, R = resamples, M = quantities.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NUM_RESAMPLES = 4_000
CONFIDENCE = 0.95


def paired_interval(
    ours: Sequence[float],
    theirs: Sequence[float],
    rows: Sequence[int],
    *,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile interval (Efron 1979) of (sum(ours) - sum(theirs)) / sum(rows), prompts drawn with replacement.

    `ours`, `theirs` and `rows` [N] hold the two drafts' sums over the same prompt's rows, and how many rows it has.

    Raises: ValueError where the sequences differ in length or are empty.
    """
    if not 0 < len(rows) == len(ours) == len(theirs):
        raise ValueError(f"the prompts must pair up, got {len(ours)}, {len(theirs)} and {len(rows)}")
    gain_N1 = np.subtract(ours, theirs)[:, None].astype(np.float64)
    gain_R1 = resampled_ratios(gain_N1, np.asarray(rows, np.float64)[:, None], seed=seed)
    return interval(gain_R1, confidence)


def resampled_ratios(over_NM: Array, under_NM: Array, *, seed: int = 0, num_resamples: int = NUM_RESAMPLES) -> Array:
    """sum(over) / sum(under) of M quantities at once over prompts drawn with replacement, [R, M].

    Equal seeds and numbers of prompts draw the same prompts, so that the difference of two results is paired. A
    quantity that no drawn prompt has anything of is 0.

    Raises: ValueError where the arrays differ in shape or are empty.
    """
    if not len(over_NM) or over_NM.shape != under_NM.shape:
        raise ValueError(f"the sums must pair up, got {over_NM.shape} and {under_NM.shape}")
    blocks = []
    for drawn_RN in _draws(len(over_NM), seed, num_resamples):
        times_RN = drawn_RN.astype(np.float64)
        over_RM, under_RM = times_RN @ over_NM, times_RN @ under_NM
        blocks.append(np.divide(over_RM, under_RM, out=np.zeros_like(over_RM), where=under_RM > 0))
    return np.concatenate(blocks)


def interval(values_R: Array, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The percentile interval of resampled values."""
    low, high = np.quantile(values_R, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


@functools.lru_cache(maxsize=4)  # a report asks for the same prompts hundreds of times
def _draws(num_prompts: int, seed: int, num_resamples: int) -> list[NDArray[np.int16]]:
    """How often each prompt is drawn: [R, N] in blocks that take at most 32 MB as float64."""
    rng, uniform = np.random.default_rng(seed), np.full(num_prompts, 1 / num_prompts)
    block = max(1, 2**22 // num_prompts)
    sizes = [min(block, num_resamples - first) for first in range(0, num_resamples, block)]
    return [rng.multinomial(num_prompts, uniform, size=size).astype(np.int16) for size in sizes]
