"""How often the decisions are wrong, by short simulations.

`python -m benchmarks.decisions` runs the long ones.
"""

import json

import numpy as np
import pytest

from benchmarks.decisions import (
    DOMAIN_GAP,
    MIXES,
    PACES,
    Config,
    _simulate_polls,
    main,
    simulate_baseline,
    simulate_campaigns,
    simulate_canary,
    simulate_first_verdict,
    simulate_gate,
    simulate_intervals,
    simulate_paces,
)
from redraft.online.learning.gate import Policy

TRIALS = 100
"""Short runs: a rate of 2% is known to within 2.8% (two standard errors)."""

SLACK = 0.03


@pytest.mark.slow
def test_an_equal_draft_stays_and_a_worse_one_does_not_also_with_unlike_traffic():
    canary = simulate_canary(TRIALS)
    assert {case["traffic"] for case in canary["cases"]} == set(MIXES)
    for traffic in MIXES:
        assert canary[traffic]["equal_rolled_back"] <= 0.02 + SLACK
        assert canary[traffic]["worse_passed"] <= 0.02 + SLACK
    short = [
        case
        for case in canary["cases"]
        if case["drafts_per_request"] == 28 and case["running_requests"] == 8
    ]
    for case in short:
        assert case["equal_inconclusive"] == case["worse_inconclusive"] == 0, (
            "with enough requests it tells"
        )


def test_servers_that_draft_different_numbers_of_tokens_are_compared_like_others():
    paces = simulate_paces(TRIALS // 2)
    assert paces["equal_rolled_back"] <= 0.02 + SLACK
    assert paces["worse_passed"] <= 0.02 + SLACK
    many = [
        case
        for case in paces["cases"]
        if case["drafts_per_request"] == 28 and case["running_requests"] == 8
    ]
    for case in many:
        assert case["equal_inconclusive"] == case["worse_inconclusive"] == 0, (
            "with enough requests it tells"
        )


def test_the_simulated_paces_move_tau():
    """A comparison of accepted tokens over drafts would be wrong here.

    The first token is accepted as often as before.
    """
    rng = np.random.default_rng(0)
    groups = [
        _simulate_polls(rng, 200, 60, 2.0, 0.5, 28, 8, pace).sum((0, 1, 2))
        for pace in PACES["shifted"]
    ]
    slow, fast = (counts_K2[:, 1].sum() / counts_K2[0, 0] for counts_K2 in groups)
    one_token = [counts_K2[0, 1] / counts_K2[0, 0] for counts_K2 in groups]
    assert one_token[0] == pytest.approx(one_token[1], abs=0.005)
    assert fast - slow == pytest.approx(0.6 * (1.0 - one_token[0]), abs=0.04)


def test_the_simulated_mix_moves_tau_as_it_says():
    """40% of the easier domain instead of 60% costs a fifth of the difference between the domains."""
    rng = np.random.default_rng(0)
    low_TPK2, high_TPK2 = (
        _simulate_polls(rng, 200, 60, 2.0, share, 28, 8).sum(1) for share in (0.4, 0.6)
    )
    rates = [
        polls_TPK2[..., 1].sum() / polls_TPK2[:, :, 0, 0].sum()
        for polls_TPK2 in (low_TPK2, high_TPK2)
    ]
    assert rates[1] - rates[0] == pytest.approx(0.2 * DOMAIN_GAP, abs=0.012)


@pytest.mark.slow
def test_candidates_at_the_bar_are_seldom_promoted_in_ten_looks():
    gate = simulate_gate(40)
    assert gate["at_bar_promoted"] <= 0.05 + 2 * SLACK
    assert gate["100_requests"]["equal_promoted"] <= SLACK
    assert gate["100_requests"]["gain_0.1_promoted"] > 0.9, "the price in power is small"
    for rates in gate["domain"].values():  # of a domain whose traffic has ended
        assert rates["equal_promoted"] >= 0.9, "it does not block a gain elsewhere"
        assert rates["twice_promoted"] <= SLACK


def test_by_default_the_gate_gives_its_first_verdict_within_200_requests_and_sees_a_gain():
    policy = Policy()
    assert simulate_first_verdict(40, 0, policy)["p99"] <= 200
    assert policy.min_requests == 24
    _, at_first_look = simulate_campaigns(40, 0, policy, 0.2, 24)
    assert at_first_look > 0.9


def test_equal_drafts_pass_the_comparison_with_a_baseline_and_worse_ones_do_not():
    baseline = simulate_baseline(TRIALS)
    assert baseline["equal_failed"] <= 0.02 + SLACK
    assert baseline["loss_0.1_failed"] > 0.9


def test_intervals_hold_the_truth_as_often_as_they_say():
    for coverage in simulate_intervals(TRIALS)["coverage"].values():
        assert 0.93 - SLACK / 2 <= coverage["lowest"] <= coverage["highest"] <= 0.97 + SLACK / 2


@pytest.mark.slow
def test_the_report_is_written_and_keeps_the_limits(tmp_path):
    main(Config(output=tmp_path, engine=False))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["canary"]["equal_rolled_back"] <= 0.02
    assert report["canary"]["worse_passed"] <= 0.02
    assert report["paces"]["equal_rolled_back"] <= 0.02
    assert report["paces"]["worse_passed"] <= 0.02
    assert report["gate"]["at_bar_promoted"] <= 0.05
    assert report["baseline"]["equal_failed"] <= 0.02
    for coverage in report["intervals"]["coverage"].values():
        assert 0.93 <= coverage["lowest"] <= coverage["highest"] <= 0.97
