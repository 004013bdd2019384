"""Intervals of ratios over prompts.

Against hand-computed values, against scipy, and by their coverage.
"""

import math

import numpy as np
import pytest
from scipy import stats

from redraft.eval.intervals import (
    estimate_gain,
    estimate_ratio,
    student_t_quantile,
    subtract_independent,
)


def make_prompts(num_prompts, seed=0):
    """Sums of two drafts over prompts of unequal length, the first better by 0.05 per row."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(20, 200, num_prompts)
    theirs = rng.beta(4, 6, num_prompts) * rows
    return theirs + (0.05 + 0.1 * rng.standard_normal(num_prompts)) * rows, theirs, rows


def test_the_error_is_the_jackknifes():
    """Worked by hand: ratio 12/6 = 2; without each prompt in turn 11/5, 8/4 and 5/3."""
    estimate = estimate_ratio(np.array([1.0, 4.0, 7.0]), np.array([1.0, 2.0, 3.0]))
    squares = (11 / 5 - 2) ** 2 + (8 / 4 - 2) ** 2 + (5 / 3 - 2) ** 2
    assert estimate.value == 2
    assert estimate.error == pytest.approx(math.sqrt(2 / 3 * squares))
    assert estimate.freedom == pytest.approx(36 / 14 - 1)  # 2.57 prompts by their weight


def test_with_equal_prompts_it_is_the_textbooks_t_interval():
    over = np.array([3.0, 5.0, 4.0, 8.0, 1.0])
    mean, error = over.mean(), over.std(ddof=1) / math.sqrt(5)
    expected = stats.t.interval(0.95, 4, mean, error)
    assert estimate_ratio(over, np.ones(5)).interval() == pytest.approx(expected, rel=1e-5)


def test_many_prompts_agree_with_scipys_bootstrap():
    ours, theirs, rows = make_prompts(512)
    expected = stats.bootstrap(
        (ours - theirs, rows),
        lambda gain, rows, axis: gain.sum(axis) / rows.sum(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=20_000,
        batch=1000,
        rng=np.random.default_rng(1),
    ).confidence_interval
    interval = estimate_ratio(ours - theirs, rows.astype(float)).interval()
    assert interval == pytest.approx((expected.low, expected.high), abs=5e-4)


def test_a_gain_over_the_same_prompts_is_the_ratio_of_the_differences():
    ours, theirs, rows = (np.asarray(column, float) for column in make_prompts(30))
    gain = estimate_gain(np.column_stack([ours, theirs]), np.column_stack([rows, rows]))
    assert gain.value == pytest.approx((ours - theirs).sum() / rows.sum())
    assert gain.error == pytest.approx(estimate_ratio(ours - theirs, rows).error)


def test_independent_samples_follow_welch():
    rng = np.random.default_rng(3)
    one, other = rng.normal(1, 1, 12), rng.normal(0, 3, 30)
    difference = subtract_independent(
        *(estimate_ratio(sample, np.ones(len(sample))) for sample in (one, other))
    )
    expected = stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
    assert difference.interval() == pytest.approx((expected.low, expected.high), rel=1e-5)


@pytest.mark.parametrize("freedom", [1, 2, 2.2, 3, 3.7, 10, 49, 500])
@pytest.mark.parametrize("probability", [0.9, 0.975, 0.999, 0.99995])
def test_the_quantile_of_students_t_is_scipys(freedom, probability):
    assert student_t_quantile(probability, freedom) == pytest.approx(
        stats.t.ppf(probability, freedom), rel=2e-4
    )


def test_one_prompt_shows_no_spread_so_anything_is_possible():
    estimate = estimate_ratio(np.array([30.0, 0.0]), np.array([20.0, 0.0]))
    assert estimate.interval(bounds=(0, 3)) == (0, 3)
    assert subtract_independent(estimate, estimate).interval(bounds=(-3, 3)) == (-3, 3)
    assert estimate_ratio(np.zeros(2), np.zeros(2)).interval() == (0, 0)
