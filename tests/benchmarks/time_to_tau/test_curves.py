"""Statistics of learning curves, with values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.time_to_tau.curves import (
    Curve,
    estimate,
    gain_at_equal_labels,
    gain_at_equal_time,
    minutes_to_reach,
    ratio,
    reaches,
)


def make_curve(taus: list[float], *, labels_a_minute: float = 100.0, questions: int = 4) -> Curve:
    """A curve with a mark every five minutes, and the same tau on every question."""
    minutes_M = np.arange(len(taus), dtype=np.float64) * 5
    drafts_MQ = np.full((len(taus), questions), 10.0)
    accepted_MQ = (np.array(taus)[:, None] - 1) * drafts_MQ
    return Curve(minutes_M, labels_a_minute * minutes_M, accepted_MQ, drafts_MQ)


def test_the_ratio_is_the_share_of_the_peers_minutes_that_we_need() -> None:
    ours, theirs = make_curve([1.2, 1.6, 1.8, 1.9]), make_curve([1.0, 1.2, 1.4, 1.7])
    # 1.7 lies halfway between the marks of minutes 5 and 10
    assert minutes_to_reach(ours, theirs) == pytest.approx(7.5)
    assert ratio(ours, theirs) == pytest.approx(7.5 / 15)


def test_a_curve_that_never_reaches_the_peers_tau_gives_a_lower_bound() -> None:
    ours, theirs = make_curve([1.0, 1.1, 1.2]), make_curve([1.0, 1.4, 1.5])
    assert not reaches(ours, theirs)
    assert ratio(ours, theirs) == 1.0


def test_a_start_above_the_peers_tau_takes_the_minutes_of_the_start() -> None:
    ours, theirs = make_curve([1.5, 1.6]), make_curve([1.0, 1.3])
    assert ratio(ours, theirs) == 0.0


def test_tau_at_equal_labels_is_not_tau_at_equal_time() -> None:
    # The peer learns as much from each label, and reads half as many a minute.
    ours = make_curve([1.0, 1.2, 1.4])
    theirs = make_curve([1.0, 1.1, 1.2], labels_a_minute=50.0)
    assert gain_at_equal_time(ours, theirs) == pytest.approx(0.2)
    assert gain_at_equal_labels(ours, theirs) == pytest.approx(0.0)


def test_the_error_joins_questions_and_seeds() -> None:
    seeds = [make_curve([1.0, 1.4]), make_curve([1.0, 1.6])]
    found = estimate(lambda curve: curve.at_minute(5.0), seeds)
    assert found.value == pytest.approx(1.5)
    # No spread over questions; over two seeds 0.2 / sqrt(2) / sqrt(2).
    assert found.error == pytest.approx(0.1)
    assert found.freedom == pytest.approx(1.0)


def test_the_error_over_questions_is_the_jackknife_of_a_ratio() -> None:
    accepted_MQ, drafts_MQ = np.array([[3.0, 9.0, 2.0]]), np.array([[10.0, 12.0, 8.0]])
    curve = Curve(np.zeros(1), np.zeros(1), accepted_MQ, drafts_MQ)
    found = estimate(lambda curve: float(curve.taus[0]), [curve])
    left_out = np.array([1 + 11 / 20, 1 + 5 / 18, 1 + 12 / 22])
    squares = np.square(left_out - (1 + 14 / 30)).sum()
    assert found.error == pytest.approx(math.sqrt(2 / 3 * squares))


def test_a_question_that_is_hard_for_both_sides_cancels_out() -> None:
    rng = np.random.default_rng(0)
    hard_Q = rng.uniform(0, 9, 12)
    drafts_MQ = np.full((1, 12), 10.0)
    ours, theirs = (
        Curve(np.ones(1), np.ones(1), hard_Q[None] + extra, drafts_MQ) for extra in (1.0, 0.0)
    )
    paired = estimate(gain_at_equal_time, [ours], [theirs])
    alone = estimate(lambda curve: float(curve.taus[0]), [ours])
    assert paired.value == pytest.approx(0.1)
    assert paired.error == pytest.approx(0.0, abs=1e-9)
    assert alone.error > 0.05


def test_sides_of_other_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="seeds"):
        estimate(gain_at_equal_time, [make_curve([1.0])], [make_curve([1.0])] * 2)
