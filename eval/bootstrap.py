"""Confidence intervals over prompts: rows of one prompt depend on each other, so prompts are what is drawn again.

N = prompts, R = resamples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NUM_RESAMPLES = 4_000


def paired_interval(
    ours: Sequence[float], theirs: Sequence[float], rows: Sequence[int], *, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval (Efron 1979) of (sum(ours) - sum(theirs)) / sum(rows), prompts drawn with replacement.

    `ours`, `theirs` and `rows` [N] hold the two drafts' sums over the same prompt's rows, and how many rows it has.

    Raises: ValueError where the sequences differ in length or are empty.
    """
    if not 0 < len(rows) == len(ours) == len(theirs):
        raise ValueError(f"the prompts must pair up, got {len(ours)}, {len(theirs)} and {len(rows)}")
    gain_N, rows_N = np.subtract(ours, theirs), np.asarray(rows)
    draws = np.random.default_rng(seed).multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=NUM_RESAMPLES)
    gain_R = (draws @ gain_N) / (draws @ rows_N)
    low, high = np.quantile(gain_R, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
