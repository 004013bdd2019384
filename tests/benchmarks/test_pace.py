"""The policy that chooses the number of draft tokens: what it loses to a useless draft and gains from a good one."""

import math

import numpy as np
import pytest

from benchmarks.studies.pace import MOST, simulate
from benchmarks.studies.pace_policy import Acceptance, Policy, StepTimes


@pytest.mark.parametrize("clients", ["1", "8"])
def test_a_useless_draft_costs_less_than_the_search_may(clients):
    result = simulate("cpu", 0.25, "useless", clients, seed=0)
    assert result.speed > 0.985
    assert result.explored < 0.01


@pytest.mark.parametrize(("machine", "clients", "speed"), [("cpu", "1", 2.0), ("gpu", "8", 2.5)])
def test_a_good_draft_is_used(machine, clients, speed):
    result = simulate(machine, 0.25, "good", clients, seed=0)
    assert result.speed > speed
    assert result.learned > 0.95


def test_acceptance_counts_a_position_only_when_it_was_tried():
    acceptance = Acceptance(3)
    for _ in range(2000):
        acceptance.add(2, 1)
    rates = acceptance.rates
    np.testing.assert_allclose(rates[:2], [1.0, 0.0], atol=0.01)
    log_tau, covariance = acceptance.log_tau(range(4))
    np.testing.assert_allclose(log_tau[:2], [0.0, math.log(2)], atol=0.01)
    assert covariance[0, 0] == 0  # without a draft, every step yields one token


def test_step_times_find_the_cost_of_an_arm():
    times = StepTimes(range(MOST + 1))
    for _ in range(50):
        times.update(0, 0, [0.0] * 6)
        times.update(0, 3, [math.log(1.3)] * 6)
    log_x, _ = times.log_x(0)
    assert log_x[0] == 0
    assert log_x[3] == pytest.approx(math.log(1.3), abs=0.02)


def test_a_swap_makes_the_policy_less_sure():
    policy = Policy(MOST)
    for _ in range(500):
        policy.accept(3, 3)
    before = policy.judge(1)[3]
    policy.swapped()
    after = policy.judge(1)[3]
    # The policy estimates log speed.
    assert after.high / after.low > before.high / before.low
