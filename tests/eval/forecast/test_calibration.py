"""The calibration of estimates: against engines drawn at random, a search over all corrections, and sums by hand."""

from __future__ import annotations

import numpy as np
import pytest

from redraft.eval.forecast.calibration import AS_IS, Correction, Outcomes, calibrate, calibration_error, fit_correction


def make_outcomes(logit_N, accepted_N, weight_N=None, position_N=None) -> Outcomes:
    count = len(logit_N)
    return Outcomes(
        logit_N=np.asarray(logit_N, float),
        accepted_N=np.asarray(accepted_N, float),
        weight_N=np.ones(count) if weight_N is None else np.asarray(weight_N, float),
        position_N=np.zeros(count, int) if position_N is None else np.asarray(position_N),
    )


def test_the_error_is_that_by_hand() -> None:
    """Two tokens in the bin of 0.1 to 0.2, one of weight 3 in the last bin, and one that no engine reaches."""
    outcomes = make_outcomes(np.zeros(4), [1, 0, 0.5, 0], [1, 1, 3, 0])
    estimates = np.array([0.1, 0.15, 1.0, 0.5])
    by_hand = (2 * abs(0.125 - 0.5) + 3 * abs(1.0 - 0.5)) / 5
    assert calibration_error(estimates, outcomes) == pytest.approx(by_hand)
    assert calibration_error(estimates[:0], make_outcomes([], [])) == 0


def test_a_token_weighs_as_often_as_an_engine_reaches_it() -> None:
    """Blocks are drawn one after the other, as an engine verifies them."""
    rng = np.random.default_rng(0)
    accept_TK = rng.uniform(0.2, 0.9, (7, 3))
    logit_TK = rng.normal(size=(7, 3))
    outcomes = Outcomes.from_blocks(logit_TK, accept_TK)
    reached, rounds = np.zeros((7, 3)), 20_000
    for _ in range(rounds):
        row = 0
        while row < 7:
            accepted = rng.random(3) < accept_TK[row]
            number = 3 if accepted.all() else int(accepted.argmin())
            reached[row, : number + 1] += 1
            row += number + 1
    np.testing.assert_allclose(outcomes.weight_N.reshape(7, 3), reached / rounds, atol=0.02)
    np.testing.assert_array_equal(outcomes.logit_N.reshape(7, 3), logit_TK)
    np.testing.assert_array_equal(outcomes.at(2).accepted_N, accept_TK[:, 2])


def test_the_fit_is_the_most_likely_correction() -> None:
    """A search over all scales and shifts finds no better one."""
    rng = np.random.default_rng(1)
    logit_N, weight_N = rng.normal(1, 2, 60), rng.uniform(0, 2, 60)
    accepted_N = (rng.random(60) < 0.4).astype(float)
    outcomes = make_outcomes(logit_N, accepted_N, weight_N)
    scales, shifts = np.meshgrid(np.linspace(-1, 2, 301), np.linspace(-3, 3, 601), indexing="ij")
    cost = 0.5 * ((scales - 1) ** 2 + shifts**2)
    for z, y, w in zip(logit_N, accepted_N, weight_N, strict=True):
        estimate = 1 / (1 + np.exp(-(scales * z + shifts)))
        cost -= w * (y * np.log(estimate) + (1 - y) * np.log(1 - estimate))
    best = np.unravel_index(cost.argmin(), cost.shape)
    found = fit_correction(outcomes)
    assert (found.scale, found.shift) == pytest.approx((scales[best], shifts[best]), abs=0.011)


def test_a_known_distortion_is_undone() -> None:
    rng = np.random.default_rng(2)
    logit_N = rng.normal(0, 2, 400)
    truth = Correction(0.4, -0.7)
    outcomes = make_outcomes(logit_N, truth.estimate(logit_N), np.full(400, 1e4))
    found = fit_correction(outcomes)
    assert (found.scale, found.shift) == pytest.approx((0.4, -0.7), abs=1e-3)
    assert (
        calibration_error(found.estimate(logit_N), outcomes)
        < 1e-3
        < calibration_error(AS_IS.estimate(logit_N), outcomes)
    )


@pytest.mark.parametrize("accepted", [0.0, 1.0])
def test_estimates_stay_finite_if_everything_is_accepted_or_nothing(accepted: float) -> None:
    found = fit_correction(make_outcomes([-800.0, 3.0, 900.0], [accepted] * 3, [50.0] * 3))
    assert np.isfinite([found.scale, found.shift]).all()
    assert np.isfinite(found.estimate(np.array([-1e6, 1e6]))).all()


def test_the_error_falls_on_texts_that_took_no_part_in_the_fit() -> None:
    """A draft that is far too sure at all positions, and surer of later ones."""
    rng = np.random.default_rng(3)
    texts = []
    for _ in range(40):
        truth_TK = rng.normal(0.3, 1, (50, 3)) - [0, 0.3, 0.6]
        accept_TK = (rng.random((50, 3)) < 1 / (1 + np.exp(-truth_TK))).astype(float)
        texts.append(Outcomes.from_blocks(2.5 * truth_TK + 1.5, accept_TK))
    found = calibrate(texts)
    assert found is not None
    told = found.to_json()
    assert told["error_before"] > 0.15 > 0.03 > told["error_after"]
    assert found.correction.scale == pytest.approx(0.4, abs=0.06)
    assert [at["error_after"] < at["error_before"] for at in told["by_position"]] == [True] * 3
    measured = Outcomes.join(texts[1::2])
    assert (
        told["num_tokens"]
        == pytest.approx(measured.weight_N.sum())
        == sum(at["num_tokens"] for at in told["by_position"])
    )
    assert told["by_position"][0]["acceptance"] > told["by_position"][2]["acceptance"]


def test_without_texts_or_with_a_number_that_is_not_finite_there_is_no_correction() -> None:
    good, empty = make_outcomes([1.0], [1.0]), make_outcomes([], [])
    assert calibrate([good, good]) is not None
    for texts in (
        [],
        [good],
        [good, empty],
        [good, make_outcomes([np.nan], [1])],
        [make_outcomes([1], [np.nan]), good],
    ):
        assert calibrate(texts) is None
