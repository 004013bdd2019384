"""The interval of a gain that was measured on the same prompts."""

import numpy as np
import pytest
from scipy.stats import bootstrap

from eval.bootstrap import paired_interval


def make_prompts(num_prompts, seed=0):
    """Sums of two drafts over prompts of unequal length, the first better by 0.05 a row."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(20, 200, num_prompts)
    theirs = rng.beta(4, 6, num_prompts) * rows
    return theirs + (0.05 + 0.1 * rng.standard_normal(num_prompts)) * rows, theirs, rows


def test_the_interval_is_scipys():
    ours, theirs, rows = make_prompts(64)
    expected = bootstrap(
        (ours - theirs, rows),
        lambda gain, rows, axis: gain.sum(axis) / rows.sum(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=20_000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert paired_interval(ours, theirs, rows) == pytest.approx((expected.low, expected.high), abs=2e-3)


def test_it_holds_the_truth_about_as_often_as_it_says():
    intervals = [paired_interval(*make_prompts(64, seed), seed=seed) for seed in range(60)]
    covered = np.mean([low <= 0.05 <= high for low, high in intervals])
    assert covered >= 0.86  # 95% of 60, three standard errors


def test_prompts_that_do_not_pair_up_are_refused():
    with pytest.raises(ValueError, match="pair up, got 1, 2 and 2"):
        paired_interval([1.0], [1.0, 2.0], [3, 4])
