"""The verdict about a live number of draft tokens, from tokens/s by mode."""

from __future__ import annotations

import pytest

from benchmarks.pace import judge


def test_the_best_fixed_number_may_be_none():
    rates = {"0": [10.0] * 6, "auto": [9.9] * 6, "1": [8.0] * 6, "2": [5.0] * 6}
    verdict = judge(rates)
    assert (verdict["best"], verdict["of_best"]) == ("0", pytest.approx(0.99))
    assert verdict["line"].endswith("PASS")


@pytest.mark.parametrize(("auto", "ends"), [(14.4, "PASS"), (14.1, "BELOW TARGET")])
def test_auto_is_compared_with_the_best_fixed_number_round_by_round(auto, ends):
    """The machine's speed halves in every second round, which says nothing about a mode."""
    speeds = {"0": 10.0, "auto": auto, "1": 15.0, "2": 12.0}
    rates = {mode: [speed, speed / 2] * 3 for mode, speed in speeds.items()}
    verdict = judge(rates)
    assert verdict["best"] == "1"
    assert verdict["of_best"] == pytest.approx(auto / 15)
    assert verdict["speeds"]["2"] == (pytest.approx(1.2), pytest.approx((1.2, 1.2)))
    assert verdict["line"].endswith(ends)


@pytest.mark.parametrize(("auto", "ends"), [(9.8, "PASS"), (9.6, "BELOW TARGET")])
def test_a_useless_draft_may_cost_next_to_nothing(auto, ends):
    rates = {"0": [10.0] * 6, "auto": [auto] * 6}
    verdict = judge(rates)
    assert verdict["best"] == "0"
    assert verdict["line"].endswith(ends)
