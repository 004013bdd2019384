"""The draft's confidence beside live acceptance, under adaptive verification."""

import numpy as np
import pytest

from redraft.online.engine.calibration import NUM_BINS, Calibration


def test_a_token_counts_if_all_earlier_ones_were_accepted():
    calibration = Calibration()
    calibration.add(np.array([0.95, 0.55, 0.15], np.float32), 1)
    calibration.add(np.array([1.0], np.float32), 1)
    calibration.add(np.array([], np.float32), 0)
    first, second = calibration.status()
    assert first == [{"tokens": 2, "predicted": pytest.approx(0.975), "accepted": 1.0}]
    assert second == [{"tokens": 1, "predicted": pytest.approx(0.55), "accepted": 0.0}]


@pytest.mark.parametrize("load", [1, 16])
def test_bins_of_adaptive_verification_show_a_true_confidence_as_true_whatever_was_left_out(load):
    """The budget takes the tokens with the highest survival of all requests."""
    luck, calibration, num_drafts = np.random.default_rng(0), Calibration(), 4
    noisy = Calibration()
    for _ in range(8000 // load):
        odds_RJ = luck.normal(0.4, 1.5, (load, num_drafts))
        chance_RJ = 1 / (1 + np.exp(-odds_RJ))
        guess_RJ = 1 / (1 + np.exp(-odds_RJ - luck.normal(0, 1, odds_RJ.shape)))
        hits_RJ = np.cumprod(luck.random(odds_RJ.shape) < chance_RJ, axis=1)
        for kept, shown_RJ in ((calibration, chance_RJ), (noisy, guess_RJ)):
            survival_RJ = np.cumprod(shown_RJ, axis=1)
            least = np.sort(survival_RJ.ravel())[-2 * load]  # two tokens per request
            admitted_R = (survival_RJ >= least).sum(1)
            for shown_J, hits_J, admitted in zip(shown_RJ, hits_RJ, admitted_R, strict=True):
                kept.add(shown_J[:admitted].astype(np.float32), min(int(hits_J.sum()), admitted))
    for bins in calibration.status():
        for one in bins:
            error = (one["predicted"] * (1 - one["predicted"]) / one["tokens"]) ** 0.5
            assert one["accepted"] == pytest.approx(one["predicted"], abs=5 * error + 0.002)
    top = noisy.status()[0][-1]
    assert top["predicted"] > 1 - 1 / NUM_BINS
    assert top["accepted"] < top["predicted"] - 0.02, "a noisy confidence is too high at the top"
