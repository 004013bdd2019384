"""Rollouts over real sockets: whatever the servers do, the fleet ends on one version."""

import asyncio
import json
import random
import re
import time
from collections import defaultdict
from dataclasses import replace
from itertools import cycle, repeat

import httpx
import numpy as np
import pytest
from fake_fleet import TOKEN, FakeServer, Traffic, running
from waiting import in_event_loop, until

from redraft.engine.counts import AcceptanceCounts
from redraft.eval.intervals import Estimate, estimate_gain
from redraft.online.fleet.rollout import (
    MIN_POLLS,
    Finding,
    RolloutPolicy,
    decide,
    estimate_loss,
    estimate_loss_by_domain,
    measure_alone,
    roll_waves,
    try_canary,
)
from redraft.online.fleet.server import (
    AT_LOAD,
    Drafting,
    FleetServer,
    NonsenseError,
    RefusedError,
    UnreachableError,
    Window,
    ask_drafting,
    converge,
    is_alarming,
    require_address,
)
from redraft.online.fleet.watch import JournaledServer
from redraft.online.journal import Journal

OLD, NEW = "v000001", "v000002"

QUICK = RolloutPolicy(
    warm_up_s=0.01,
    poll_s=0.01,
    watch_s=0.01,
    window_timeout_s=60,
    swap_timeout_s=30,
    rollback_timeout_s=30,
)
"""Long timeouts, because a busy machine takes its time. Tests that wait for a timeout use
IMPATIENT.
"""

TRUSTED = {"Authorization": f"Bearer {TOKEN}"}

IMPATIENT = replace(QUICK, window_timeout_s=0.3, swap_timeout_s=0.3, rollback_timeout_s=0.3)


async def roll_out(servers, candidate, policy=QUICK, incumbent=OLD):
    outcome = await try_canary(servers, candidate, incumbent, policy)
    return await roll_waves(servers, candidate, incumbent, policy) if outcome.passed else outcome


def read_taus(outcome):
    """tau of the canary and of what it was compared with."""
    (taus,) = re.findall(r"tau ([\d.]+) \(\d+ drafts\) against ([\d.]+) \(", outcome.reason)
    return tuple(map(float, taus))


@in_event_loop
async def test_a_better_draft_reaches_every_server_after_its_canary():
    fakes = [FakeServer(Traffic()) for _ in range(8)]
    async with running(*fakes) as servers:
        canary = await try_canary(servers, NEW, OLD, QUICK)
        assert canary.passed
        assert read_taus(canary) == (2.5, 2.0)
        assert [fake.version for fake in fakes] == [NEW] + [OLD] * 7
        rolled = await roll_waves(servers, NEW, OLD, QUICK)
        assert (rolled.passed, rolled.version) == (True, NEW)
        assert {fake.version for fake in fakes} == {NEW}
        assert all(fake.swaps == [NEW] for fake in fakes), "one swap each, the canary included"


@in_event_loop
async def test_a_canary_worse_than_the_control_group_is_taken_back():
    fakes = [FakeServer(Traffic()) for _ in range(4)]
    async with running(*fakes) as servers:
        outcome = await try_canary(servers, "worse", OLD, QUICK)
        assert (outcome.passed, outcome.version) == (False, OLD)
        assert re.search(r"\b0\.200\b.*\b0\.1\b.*tau 1\.800", outcome.reason)
        assert fakes[0].swaps == ["worse", OLD]
        assert all(fake.swaps == [] for fake in fakes[1:])


@in_event_loop
async def test_a_lone_server_is_measured_until_a_domain_can_be_compared():
    """Its counts before the swap do not grow afterwards.

    With too few in each domain, no look would decide.
    """
    policy = replace(QUICK, min_drafts=100, max_loss=0.5)
    async with running(FakeServer(Traffic(drafts_per_reading=12), easy_share=0.5)) as servers:
        outcome = await try_canary(servers, NEW, OLD, policy)
    assert outcome.passed, outcome.reason


@in_event_loop
async def test_a_lone_server_measured_before_its_canary_swaps_at_once():
    fake = FakeServer(Traffic())
    async with running(fake) as servers:
        measured = asyncio.ensure_future(measure_alone(servers[0], OLD, QUICK))
        await measured
        fake.asked.clear()
        outcome = await try_canary(servers, NEW, OLD, QUICK, measured)
        assert outcome.passed, outcome.reason
        assert read_taus(outcome) == (2.5, 2.0)
    first_swap = fake.asked.index("/redraft/swap")
    assert fake.asked[:first_swap].count("/redraft/status") < MIN_POLLS


@in_event_loop
async def test_a_measurement_of_another_server_is_not_used():
    fakes = [FakeServer(Traffic()), FakeServer(Traffic())]
    async with running(*fakes) as servers:
        measured = asyncio.ensure_future(measure_alone(servers[1], OLD, QUICK))
        await measured
        fakes[0].asked.clear()
        outcome = await try_canary(servers[:1], NEW, OLD, QUICK, measured)
        assert outcome.passed, outcome.reason
    first_swap = fakes[0].asked.index("/redraft/swap")
    assert fakes[0].asked[:first_swap].count("/redraft/status") >= MIN_POLLS


@in_event_loop
async def test_a_lone_server_that_restarted_while_it_was_measured_is_measured_again():
    fake = FakeServer(Traffic())
    async with running(fake) as servers:
        measured = asyncio.ensure_future(
            measure_alone(servers[0], OLD, replace(QUICK, poll_s=0.2, min_drafts=10**9))
        )
        await until(lambda: fake.asked)
        await fake.restart()
        outcome = await try_canary(servers, NEW, OLD, QUICK, measured)
        assert outcome.passed, outcome.reason
        elsewhere = asyncio.ensure_future(measure_alone(servers[0], OLD, QUICK))
        assert await elsewhere == (Finding.FAILED, f"it does not serve {OLD}")


@in_event_loop
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("line", ["pace auto: 0 tokens at 1; 0.1% explored", "pace 0", "pace 2"])
async def test_where_a_pace_keeps_drafting_off_a_candidate_passes_without_a_comparison(count, line):
    """16 polls have 192 drafts, too few to compare.

    Drafts of a pace that a person chose are compared once there are more.
    """
    traffic, pace = Traffic(drafts_per_reading=12), {"pace": {"line": line}}
    fakes = [FakeServer(traffic, easy_share=0.5, drafting=pace) for _ in range(count)]
    async with running(*fakes) as servers:
        outcome = await try_canary(servers, "worse", OLD, replace(QUICK, min_drafts=100))
    is_own = line != "pace 2"
    assert (outcome.passed, fakes[0].version) == ((True, "worse") if is_own else (False, OLD)), (
        outcome.reason
    )
    assert not outcome.is_inconclusive


@in_event_loop
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("line", ["pace auto: 2 tokens at 1; 0.1% explored", "pace 2"])
async def test_servers_with_little_traffic_that_pace_themselves_take_the_candidate(count, line):
    """Too few drafts for a comparison; the gate has proven the gain."""
    traffic, pace = Traffic(drafts_per_reading=30), {"pace": {"line": line}}
    fakes = [FakeServer(traffic, drafting=pace) for _ in range(count)]
    async with running(*fakes) as servers:
        outcome = await try_canary(
            servers, NEW, OLD, replace(QUICK, min_drafts=10**6, window_timeout_s=0.5)
        )
    is_auto = line.startswith("pace auto")
    assert (outcome.passed, fakes[0].version) == ((True, NEW) if is_auto else (False, OLD)), (
        outcome.reason
    )
    assert outcome.is_inconclusive is not is_auto


@in_event_loop
@pytest.mark.parametrize("count", [1, 2])
async def test_a_candidate_passes_while_someone_sets_the_pace_again_and_again(count):
    """As a benchmark does that compares paces: most readings are of another pace than the own."""
    pace = {"pace": {"line": "pace auto"}}
    fakes = [FakeServer(Traffic(drafts_per_reading=30), drafting=dict(pace)) for _ in range(count)]
    policy = replace(QUICK, min_drafts=10**6, window_timeout_s=1)
    async with running(*fakes) as servers, httpx.AsyncClient(headers=TRUSTED) as http:
        rollout = asyncio.ensure_future(try_canary(servers, NEW, OLD, policy))
        for setting in cycle(("3", "0", "2", "auto")):
            if rollout.done():
                break
            for fake in fakes:
                await http.post(f"{fake.url}/redraft/pace", json={"pace": setting})
        outcome = await rollout
    assert outcome.passed, outcome.reason
    assert fakes[0].version == NEW


@in_event_loop
async def test_traffic_that_gets_harder_at_the_swap_is_not_held_against_the_canary():
    """Compared before and after, the good candidate would look 0.5 worse.

    Over the same window it is 0.5 better.
    """
    traffic = Traffic()
    fakes = [FakeServer(traffic) for _ in range(4)]
    async with running(*fakes) as servers:
        policy = replace(QUICK, warm_up_s=0.2)
        rollout = asyncio.ensure_future(try_canary(servers, NEW, OLD, policy))
        await until(lambda: fakes[0].version == NEW)
        traffic.harder = 0.9
        outcome = await rollout
        assert outcome.passed
        assert read_taus(outcome) == pytest.approx((1.6, 1.1))


@in_event_loop
async def test_the_warm_up_is_not_counted():
    """Right after the swap the canary is bad.

    Running requests hold keys and values of the previous draft.
    """
    traffic = Traffic()
    fakes = [FakeServer(traffic) for _ in range(3)]
    async with running(*fakes) as servers:
        policy = replace(QUICK, warm_up_s=0.3)
        traffic.tau[NEW] = 1.2
        rollout = asyncio.ensure_future(try_canary(servers, NEW, OLD, policy))
        await until(lambda: fakes[0].version == NEW)
        fakes[0].count()  # 500 drafts at 1.2, within the warm-up
        traffic.tau[NEW] = 2.5
        outcome = await rollout
        assert read_taus(outcome)[0] == 2.5


@in_event_loop
async def test_a_draft_that_is_hardly_accepted_is_stopped_before_the_window_is_full():
    fakes = [FakeServer(Traffic()) for _ in range(3)]
    async with running(*fakes) as servers:
        policy = replace(QUICK, min_drafts=10**9, window_timeout_s=600)
        outcome = await asyncio.wait_for(try_canary(servers, "bad", OLD, policy), 120)
        assert not outcome.passed
        assert "hardly" in outcome.reason
        assert {fake.version for fake in fakes} == {OLD}


@in_event_loop
async def test_too_little_traffic_is_no_proof():
    fakes = [FakeServer(Traffic(drafts_per_reading=1)) for _ in range(3)]
    async with running(*fakes) as servers:
        outcome = await try_canary(servers, NEW, OLD, IMPATIENT)
        assert not outcome.passed
        assert outcome.is_inconclusive
        assert "5000 drafts" in outcome.reason
        assert {fake.version for fake in fakes} == {OLD}


@in_event_loop
async def test_a_candidate_may_stay_on_the_canary_until_traffic_tells():
    traffic = Traffic(drafts_per_reading=1)
    fakes = [FakeServer(traffic) for _ in range(3)]
    async with running(*fakes) as servers:
        # The first poll comes after the timeout already.
        policy = replace(QUICK, window_timeout_s=0, keep_inconclusive=True)
        rollout = asyncio.ensure_future(try_canary(servers, NEW, OLD, policy))
        await until(lambda: fakes[0].version == NEW, rollout)
        num_asked = len(fakes[0].asked)
        await until(lambda: len(fakes[0].asked) > num_asked + 20, rollout)
        assert fakes[0].version == NEW
        traffic.drafts_per_reading = 5000
        assert (await asyncio.wait_for(rollout, 300)).passed


@in_event_loop
async def test_a_canary_that_may_stay_ends_where_no_server_is_left_to_compare_with():
    policy = replace(IMPATIENT, keep_inconclusive=True)
    fakes = [FakeServer(Traffic(drafts_per_reading=1)) for _ in range(2)]
    async with running(*fakes) as servers:
        rollout = asyncio.ensure_future(try_canary(servers, NEW, OLD, policy))
        await asyncio.sleep(3 * IMPATIENT.window_timeout_s)
        assert not rollout.done()
        await fakes[1].restart()
        outcome = await asyncio.wait_for(rollout, 30)
        assert outcome.is_inconclusive, outcome
        assert {fake.version for fake in fakes} == {OLD}


def test_the_finding_on_a_loss_follows_its_interval():
    policy = RolloutPolicy(
        max_loss=0.1, confidence=0.95
    )  # at this many degrees of freedom, 1.96 errors each way
    findings = {
        (0.0, 0.05): Finding.PASSED,  # -0.098 to 0.098
        (0.0, 0.06): Finding.INCONCLUSIVE,  # -0.118 to 0.118
        (0.2, 0.05): Finding.WORSE,  # 0.102 to 0.298
        (0.2, 0.06): Finding.INCONCLUSIVE,
        (
            0.09,
            0.02,
        ): Finding.PASSED,  # 0.051 to 0.129: as narrow as it gets, so the estimate decides
        (0.11, 0.02): Finding.WORSE,
    }
    for (value, error), finding in findings.items():
        assert decide(Estimate(value, error, 1e6), policy) is finding, (value, error)


def test_a_requests_drafts_are_not_taken_for_independent():
    """Each request of 16 polls has one tau.

    64 polls are four requests, and no interval of four is narrow.
    """
    canary = [[(100.0, 100.0 * rate)] for rate in (0.3, 0.7, 0.4, 0.6) for _ in range(16)]
    control = [[(100.0, 100.0 * rate)] for rate in (0.6, 0.4, 0.7, 0.3) for _ in range(16)]
    loss = estimate_loss(np.array(canary), np.array(control))
    assert loss.value == pytest.approx(0)
    assert decide(loss, RolloutPolicy()) is Finding.INCONCLUSIVE


@in_event_loop
@pytest.mark.parametrize(
    ("tau", "easy_on_canary", "is_passed", "loss"),
    # By totals the first would be 0.48 worse and the second 0.34 better.
    [(2.0, 0.2, True, 0.0), (1.7, 0.9, False, 0.3)],
)
async def test_unlike_traffic_does_not_decide(tau, easy_on_canary, is_passed, loss):
    traffic = Traffic(tau={OLD: 2.0, NEW: tau}, drafts_per_reading=500)
    fakes = [
        FakeServer(traffic, easy_share=share) for share in (easy_on_canary, 1 - easy_on_canary)
    ]
    async with running(*fakes) as servers:
        outcome = await try_canary(servers, NEW, OLD, QUICK)
    assert outcome.passed is is_passed, outcome.reason
    interval = re.search(r"domain ([-+.\d]+) to ([-+.\d]+)", outcome.reason)
    assert [float(end) for end in interval.groups()] == pytest.approx([loss] * 2), outcome.reason


@in_event_loop
async def test_a_group_with_a_server_of_an_earlier_release_is_compared_by_totals():
    fakes = [
        FakeServer(Traffic(), easy_share=0.2),
        FakeServer(Traffic(), easy_share=0.8),
        FakeServer(Traffic()),
    ]
    async with running(*fakes) as servers:
        outcome = await try_canary(servers, NEW, OLD, QUICK)
    assert "interval of the loss by position " in outcome.reason
    assert "domain" not in outcome.reason


@in_event_loop
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("tau", "tokens", "is_passed", "loss"),
    # By tau, the first would be 0.67 worse and the second 0.1 better. Each token has a third of tau
    # - 1.
    [
        (2.0, {OLD: 3, NEW: 1}, True, 0.0),
        (1.4, {OLD: 1, NEW: 3}, False, 0.2),
        (1.7, {OLD: 2, NEW: 3}, False, 0.2),
    ],
)
async def test_the_number_of_draft_tokens_does_not_decide(count, tau, tokens, is_passed, loss):
    traffic = Traffic(tau={OLD: 2.0, NEW: tau}, drafts_per_reading=600)
    pace = {"pace": {"line": "pace auto: 3 tokens at 1"}}
    fakes = [
        FakeServer(traffic, easy_share=0.5, tokens=tokens, drafting=pace) for _ in range(count)
    ]
    async with running(*fakes) as servers:
        outcome = await try_canary(servers, NEW, OLD, QUICK)
    assert outcome.passed is is_passed, outcome.reason
    interval = re.search(
        r"interval of the loss by position and domain ([-+.\d]+) to ([-+.\d]+)", outcome.reason
    )
    assert [float(end) for end in interval.groups()] == pytest.approx([loss] * 2, abs=1e-3), (
        outcome.reason
    )


def test_a_position_counts_as_far_as_both_groups_had_it():
    """Each poll has 100 drafts of one token or two.

    The canary accepts half and a fifth of the tokens, the control group half and two fifths. The
    canary has a second token in half of its drafts, the control group in a quarter.
    """
    canary = np.array([[(100, 50), (25, 5)]] * 16, float)
    control = np.array([[(100, 50), (12.5, 5)]] * 16, float)
    # 1 / (1/50 + 1/25) = 16.7 of 1 / (1/100 + 1/100) = 50 drafts lose 0.5 (0.4 - 0.2)
    for is_paired in (True, False):
        loss = estimate_loss(canary, control, is_paired=is_paired)
        assert (loss.value, loss.error) == (pytest.approx(0.1 / 3), pytest.approx(0, abs=1e-9))
        short = estimate_loss(canary[:, :1], control, is_paired=is_paired)
        assert (short.value, short.error) == (pytest.approx(0), pytest.approx(0, abs=1e-9))


def test_drafts_of_one_length_are_compared_by_their_tau():
    """The estimate and its error are those of accepted tokens over drafts, block by block."""
    rng = np.random.default_rng(0)
    polls = []
    for rate in (0.5, 0.6):
        drafts = rng.integers(80, 120, 16)
        first = rng.binomial(drafts, rate)
        second = rng.binomial(first, rate)
        polls.append(np.stack([drafts, first, first, second], -1).reshape(16, 2, 2).astype(float))
    canary_B22, control_B22 = (one.reshape(8, 2, 2, 2).sum(1) for one in polls)
    accepted_B2 = np.stack([control_B22[..., 1].sum(1), canary_B22[..., 1].sum(1)], -1)
    drafts_B2 = np.stack([control_B22[:, 0, 0], canary_B22[:, 0, 0]], -1)
    wanted, found = estimate_gain(accepted_B2, drafts_B2), estimate_loss(*polls)
    assert (found.value, found.error) == pytest.approx((wanted.value, wanted.error))
    assert found.value > 0.1


def test_a_domain_counts_as_far_as_both_groups_had_it():
    def polls(drafts, tau):
        return np.array([[(drafts, drafts * (tau - 1))]] * 16)

    canary = {
        "code": polls(90, 2.0),
        "prose": polls(30, 1.5),
        "rare": polls(1, 1.0),
        "only here": polls(50, 1.0),
    }
    control = {"code": polls(18, 2.1), "prose": polls(70, 1.9), "rare": polls(90, 3.0)}
    # 90 * 18 / 108 = 15 and 30 * 70 / 100 = 21
    assert estimate_loss_by_domain(canary, control).value == pytest.approx(
        (15 * 0.1 + 21 * 0.4) / 36
    )
    nothing_in_common = estimate_loss_by_domain({"code": polls(90, 2.0)}, {"prose": polls(90, 1.0)})
    assert decide(nothing_in_common, RolloutPolicy()) is Finding.INCONCLUSIVE


def test_a_split_by_load_makes_no_interval_narrower():
    """A request runs at several loads, so its difficulty affects the counts at all of them.

    Here, every poll is spread evenly over four loads.
    """
    rng = np.random.default_rng(0)
    drafts = 400.0
    canary, control = (
        np.array([[(drafts, drafts * rate)] for rate in rng.normal(0.5, 0.1, 16)]) for _ in range(2)
    )
    by_load = [
        {f"code{AT_LOAD}{load}": polls / 4 for load in range(4)} for polls in (canary, control)
    ]
    for is_paired in (True, False):
        whole = estimate_loss(canary, control, is_paired=is_paired)
        split = estimate_loss_by_domain(*by_load, is_paired=is_paired)
        found, wanted = ((one.value, one.error, one.freedom) for one in (split, whole))
        assert found == pytest.approx(wanted)
    # Domains share no request, so their errors stay independent.
    domains = [{f"domain {i}": polls / 4 for i in range(4)} for polls in (canary, control)]
    alone = estimate_loss(canary, control).error
    assert estimate_loss_by_domain(*domains).error == pytest.approx(alone / 2)


def test_one_burst_in_a_domain_or_at_a_load_does_not_leave_the_rest_undecided():
    """The spread within a single block is unknown, so the burst is left out."""
    steady, burst = np.full((64, 1, 2), (100.0, 60.0)), np.zeros((64, 1, 2))
    burst[30] = 300.0, 90.0
    for name in ("batch", f"code{AT_LOAD}18"):
        group = {"code": steady, f"code{AT_LOAD}8": steady, name: burst}
        loss = estimate_loss_by_domain(group, group)
        assert decide(loss, RolloutPolicy()) is Finding.PASSED
    alone = estimate_loss_by_domain({"batch": burst}, {"batch": burst})
    assert decide(alone, RolloutPolicy()) is Finding.INCONCLUSIVE


@in_event_loop
async def test_one_server_of_two_that_refuses_leaves_both_on_the_incumbent():
    for refusing in range(2):
        fakes = [FakeServer(Traffic(), refuses={NEW} if i == refusing else set()) for i in range(2)]
        async with running(*fakes) as servers:
            outcome = await roll_out(servers, NEW)
            assert (outcome.passed, outcome.version, outcome.refused) == (False, OLD, {})
            assert re.search(
                rf"{fakes[refusing].url} .*POST /redraft/swap\b.*\b500\b", outcome.reason
            )
            assert [fake.version for fake in fakes] == [OLD, OLD]


@in_event_loop
async def test_a_fleet_of_one_is_compared_with_itself_before():
    traffic = Traffic()
    async with running(FakeServer(traffic)) as servers:
        outcome = await roll_out(servers, NEW)
        assert outcome.passed
    async with running(FakeServer(traffic)) as servers:
        outcome = await try_canary(servers, "worse", OLD, QUICK)
        assert not outcome.passed
        assert read_taus(outcome) == pytest.approx((1.8, 2.0))
    fake = FakeServer(Traffic(drafts_per_reading=0))
    async with running(fake) as servers:
        assert not (await try_canary(servers, NEW, OLD, IMPATIENT)).passed
        assert fake.swaps == [], "without a measurement before there is nothing to compare with"


class Trainer:
    """Moves the target at every 13th reading, of whichever server.

    So some polls fall into a move.
    """

    def __init__(self):
        self.num_readings = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.num_readings += 1
        return f"{self.num_readings // 13}@{self.num_readings // 13:012x}"


@in_event_loop
async def test_a_fleet_whose_target_moves_together_is_compared_as_any_other():
    for candidate, is_passed in ((NEW, True), ("worse", False)):
        trainer, traffic = Trainer(), Traffic()
        fakes = [FakeServer(traffic, target_versions=trainer) for _ in range(3)]
        async with running(*fakes) as servers:
            outcome = await try_canary(servers, candidate, OLD, QUICK)
            assert outcome.passed is is_passed, outcome.reason


@in_event_loop
async def test_minutes_in_which_the_servers_have_different_weights_do_not_count():
    """Where the canary alone has the new weights, its draft looks bad."""
    traffic, ahead = Traffic(), Traffic(tau={NEW: 1.85, OLD: 1.85})
    fakes = [FakeServer(ahead, target_versions=repeat("1@1"), easy_share=0.5)]
    fakes += [FakeServer(traffic, easy_share=0.5) for _ in range(2)]
    async with running(*fakes) as servers:
        outcome = await try_canary(servers, NEW, OLD, IMPATIENT)
        assert (outcome.passed, outcome.is_inconclusive) == (False, True), outcome.reason
        assert "no drafts against no drafts" in outcome.reason


@in_event_loop
async def test_a_fleet_of_one_whose_target_moves_has_no_minutes_to_compare_with():
    traffic = Traffic()
    fake = FakeServer(traffic)
    async with running(fake) as servers:
        rollout = asyncio.ensure_future(try_canary(servers, NEW, OLD, QUICK))
        await until(lambda: fake.version == NEW)
        traffic.tau[NEW], fake.target_versions = 1.5, repeat("1@1")
        outcome = await rollout
        assert (outcome.passed, "weights changed" in outcome.reason) == (True, True), outcome.reason


@in_event_loop
async def test_a_single_server_can_leave_a_draft_that_is_hardly_accepted():
    fake = FakeServer(Traffic(), started_with="bad")
    async with running(fake) as servers:
        outcome = await roll_out(servers, NEW, incumbent="bad")
        assert (outcome.passed, fake.version) == (True, NEW)


@in_event_loop
async def test_a_canary_that_restarts_in_its_window_has_not_passed():
    fakes = [FakeServer(Traffic(drafts_per_reading=10)) for _ in range(3)]
    async with running(*fakes) as servers:
        rollout = asyncio.ensure_future(try_canary(servers, NEW, OLD, replace(QUICK, warm_up_s=0)))
        await until(lambda: fakes[0].drafts >= 30 and fakes[0].version == NEW)
        await fakes[0].restart()
        outcome = await rollout
        assert not outcome.passed
        assert "restarted" in outcome.reason
        assert {fake.version for fake in fakes} == {OLD}


@in_event_loop
async def test_a_canary_that_restarts_in_its_warm_up_has_not_passed():
    """It serves the draft of its start again, which would be compared in place of the candidate."""
    fakes = [FakeServer(Traffic()) for _ in range(3)]
    async with running(*fakes) as servers:
        rollout = asyncio.ensure_future(try_canary(servers, NEW, OLD, replace(QUICK, warm_up_s=1)))
        # asked for its status, it has answered the swap: one cut off would be tried again
        await until(lambda: fakes[0].version == NEW and fakes[0].asked[-1] == "/redraft/status")
        await fakes[0].restart()
        outcome = await rollout
        assert not outcome.passed
        assert "restarted" in outcome.reason


@pytest.mark.parametrize("count", [1, 3])
@in_event_loop
async def test_lost_answers_of_a_canary_end_no_rollout(count):
    """The next answer covers the same time, also where a lone server is measured beforehand."""
    fakes = [FakeServer(Traffic(drafts_per_reading=60)) for _ in range(count)]
    async with running(*fakes) as servers:
        rollout = asyncio.ensure_future(try_canary(servers, NEW, OLD, QUICK))
        for version in [NEW] if count > 1 else [OLD, NEW]:
            await until(lambda version=version: fakes[0].version == version, rollout)
            for answers in ({}, {"/redraft/status": b"half an answ"}, {}):
                fakes[0].answers, num_asked = answers, len(fakes[0].asked)
                await until(lambda n=num_asked: len(fakes[0].asked) > n + 2, rollout)
        outcome = await rollout
        assert outcome.passed, outcome.reason
        assert fakes[0].swaps == [NEW]


@in_event_loop
async def test_a_canary_that_falls_silent_fails():
    fakes = [FakeServer(Traffic(drafts_per_reading=20)) for _ in range(3)]
    async with running(*fakes) as servers:
        policy = replace(IMPATIENT, window_timeout_s=60)
        rollout = asyncio.ensure_future(try_canary(servers, NEW, OLD, policy))
        await until(lambda: fakes[0].version == NEW, rollout)
        num_asked = len(fakes[0].asked)
        await until(lambda: len(fakes[0].asked) > num_asked + 2, rollout)  # it is being measured
        fakes[0].stop()
        outcome = await rollout
        assert "stopped answering" in outcome.reason
        assert list(outcome.absent) == [fakes[0].url]


@in_event_loop
async def test_a_control_server_that_restarts_in_the_warm_up_is_no_control():
    """It has the draft of its start again, next to which a worse candidate looks better."""
    fakes = [FakeServer(Traffic()) for _ in range(2)]
    async with running(*fakes) as servers:
        policy = replace(QUICK, warm_up_s=1, window_timeout_s=1)
        rollout = asyncio.ensure_future(try_canary(servers, "worse", OLD, policy))
        await until(lambda: fakes[0].version == "worse" and fakes[0].asked[-1] == "/redraft/status")
        fakes[1].started_with = "bad"
        await fakes[1].restart()
        outcome = await rollout
        assert outcome.is_inconclusive, outcome.reason
        assert {fake.version for fake in fakes} == {OLD}


@in_event_loop
async def test_a_restarted_control_server_is_left_out_of_the_window():
    fakes = [FakeServer(Traffic()) for _ in range(3)]
    async with running(*fakes) as servers:
        window = await Window.open(servers)
        await fakes[1].restart()
        fakes[2].stop()
        assert list(await window.read()) == [servers[0]]


@in_event_loop
async def test_servers_with_adaptive_verification_are_compared_within_a_domain_and_a_load():
    status = {"server_id": "boot", "draft_version": "v000001", "target_fingerprint": "f"}
    status |= {"draft_intact": True, "target_intact": True, "drafts": [5, 9, 4]}
    # Of 40 drafts at a high load, vLLM verified a token of 5.
    status |= {"positions": {"code": [[5, 4], [2, 1]]}}
    status |= {"loads": {"code": {"5": [10, 3, 2, 0], "12": [40, 4, 1, 0]}}}

    def answer(request):
        return httpx.Response(200, stream=httpx.ByteStream(json.dumps(status).encode()))

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        server = FleetServer("http://a", TOKEN, http)
        window = await Window.open([server])
        status["loads"] = {
            "code": {"5": [10, 3, 2, 0], "12": [60, 6, 1, 0]},
            "": {"0": [1, 1, 1, 1]},
        }
        counted = (await window.read())[server]
        found = await server.status()
    assert found.total.acceptance_per_position[0] == 0.8, "of the tokens that were verified"
    assert set(found.by_load) == {"code\n5", "code\n12", "\n0"}
    more = {name: one for name, one in counted.by_domain.items() if one.num_drafts}
    assert more["code\n12"].tau == 1 + 2 / 20, "a token that was left out is one that users lack"
    assert more["code\n12"].tried_per_position == (20, 2, 0)
    assert set(more) == {"code\n12", "\n0"}


@pytest.mark.parametrize("is_gone", [False, True])
@in_event_loop
async def test_a_server_that_miscounts_a_domain_counts_none_and_still_counts_its_drafts(is_gone):
    fakes = [FakeServer(Traffic(), easy_share=0.5) for _ in range(2)]
    async with running(*fakes) as servers:
        await Window.open(servers)  # a first reading: counters begin at 0
        window = await Window.open(servers)
        zeros = [[0, 0], [0, 0], [0, 0]]
        fakes[1].positions = defaultdict(
            zeros.copy, {"easy": [[10**6, 10**6]] * 3} | ({} if is_gone else {"hard": zeros})
        )
        fakes[1].drafts += 10**6
        counted = await window.read()
        assert list(counted[servers[0]].by_domain) == ["easy", "hard"]
        assert counted[servers[1]].by_domain == {}
        assert counted[servers[1]].total.num_drafts > 10**5


@in_event_loop
async def test_an_alarm_in_a_wave_brings_all_servers_back():
    """The canary's traffic suits the draft, that of the servers of the second wave does not."""
    fakes = [FakeServer(Traffic()) for _ in range(10)]
    for fake in fakes[1:5]:
        fake.traffic = Traffic(tau={OLD: 2.0, NEW: 1.01}, drafts_per_reading=50_000)
    async with running(*fakes) as servers:
        outcome = await roll_out(servers, NEW)
        assert not outcome.passed
        assert re.search(r"5 servers\b.*tau 1\.0", outcome.reason)
        assert "against 2.000" in outcome.reason
        assert {fake.version for fake in fakes} == {OLD}


@in_event_loop
async def test_clients_that_no_draft_suits_stop_no_rollout():
    """Temperature 2 or few allowed tokens bring every server's counters down, whatever its draft."""
    fakes = [FakeServer(Traffic(tau={OLD: 1.01, NEW: 1.01})) for _ in range(4)]
    async with running(*fakes) as servers:
        assert (await roll_out(servers, NEW)).passed
        assert {fake.version for fake in fakes} == {NEW}


@in_event_loop
async def test_waves_grow_and_later_servers_wait():
    fakes = [FakeServer(Traffic(), refuses={NEW} if i >= 2 else set()) for i in range(10)]
    async with running(*fakes) as servers:
        policy = replace(QUICK, waves=(0.2, 0.5, 1.0))
        await roll_waves(servers, NEW, OLD, policy)
        assert [len(fake.swaps) for fake in fakes] == [2, 2] + [0] * 8


@pytest.mark.parametrize("away", [0, 3])
@in_event_loop
async def test_a_server_that_is_away_is_left_to_reconcile(away):
    fakes = [FakeServer(Traffic()) for _ in range(5)]
    async with running(*fakes) as servers:
        fakes[away].stop()
        policy = replace(IMPATIENT, window_timeout_s=60, waves=(0.2, 1.0))
        outcome = await roll_out(servers, NEW, policy)
        assert outcome.passed
        assert list(outcome.absent) == [fakes[away].url]
        await fakes[away].start()
        assert fakes[away].version == OLD
        assert (await converge(servers, outcome.version, timeout_s=0)).is_complete
        assert {fake.version for fake in fakes} == {NEW}


@pytest.mark.parametrize("passes", [True, False])
@in_event_loop
async def test_a_member_that_has_long_been_gone_holds_up_no_rollout(tmp_path, passes):
    traffic = Traffic(tau={OLD: 2.0, NEW: 2.5 if passes else 1.0})
    fakes = [FakeServer(traffic) for _ in range(4)]
    async with running(*fakes) as servers:
        journal = Journal(tmp_path)
        known = [JournaledServer(one.url, one.token, one.http, journal) for one in servers]
        fakes[2].stop()
        known[2].answered_s -= 31
        began_s = time.monotonic()
        outcome = await roll_out(known, NEW)
        assert time.monotonic() - began_s < 20, "it was waited for three times 30 s"
        assert outcome.passed is passes
        assert list(outcome.absent) == [fakes[2].url]
        await fakes[2].start()  # as soon as it answers, it is waited for as any other
        assert (await converge(known, outcome.version, 30)).is_complete


@in_event_loop
async def test_servers_that_were_gone_before_the_waves_do_not_end_a_rollout():
    """Three of ten are more than a draft may take down."""
    fakes = [FakeServer(Traffic()) for _ in range(10)]
    async with running(*fakes) as servers:
        for fake, server in zip(fakes[7:], servers[7:], strict=True):
            fake.stop()
            server.answered_s -= 31
        outcome = await roll_out(servers, NEW)
        assert outcome.passed, outcome.reason
        assert set(outcome.absent) == {fake.url for fake in fakes[7:]}
        assert {fake.version for fake in fakes[:7]} == {NEW}


@in_event_loop
async def test_a_fleet_that_falls_silent_is_not_rolled_on():
    fakes = [FakeServer(Traffic()) for _ in range(8)]
    async with running(*fakes) as servers:
        assert (await try_canary(servers, NEW, OLD, QUICK)).passed
        for fake, server in zip(fakes[4:], servers[4:], strict=True):
            fake.stop()
            server.answered_s = time.monotonic()
        outcome = await roll_waves(servers, NEW, OLD, IMPATIENT)
        assert not outcome.passed
        assert "gone" in outcome.reason
        assert {fake.version for fake in fakes[:4]} == {OLD}
        assert set(outcome.absent) == {fake.url for fake in fakes[4:]}


@in_event_loop
async def test_the_only_server_gone_is_no_rollout():
    fake = FakeServer(Traffic())
    async with running(fake) as servers:
        assert (await try_canary(servers, NEW, OLD, QUICK)).passed
        fake.stop()
        outcome = await roll_waves(servers, NEW, OLD, IMPATIENT)
        assert (outcome.passed, outcome.version) == (False, OLD)


@in_event_loop
async def test_a_fleet_without_any_server_up_does_not_raise():
    fake = FakeServer(Traffic())
    async with running(fake) as servers:
        fake.stop()
        outcome = await try_canary(servers, NEW, OLD, IMPATIENT)
        assert (outcome.passed, list(outcome.absent)) == (False, [fake.url])
        assert not (await converge(servers, NEW, timeout_s=0)).is_complete
        assert not (await try_canary([], NEW, OLD, IMPATIENT)).passed


@in_event_loop
async def test_a_lost_draft_is_pushed_again():
    """After a sleep that dropped the draft's weights, the version is right but the draft is not."""
    fake = FakeServer(Traffic())
    async with running(fake) as servers:
        fake.intact = False
        assert (await converge(servers, OLD, timeout_s=0)).is_complete
        assert fake.swaps == [OLD]


@in_event_loop
async def test_a_server_that_cannot_go_back_either_is_named():
    fakes = [FakeServer(Traffic()), FakeServer(Traffic(), refuses={NEW})]
    async with running(*fakes) as servers:
        assert (await try_canary(servers, NEW, OLD, QUICK)).passed
        fakes[0].refuses = {OLD}
        outcome = await roll_waves(servers, NEW, OLD, IMPATIENT)
        assert (outcome.passed, list(outcome.refused)) == (False, [fakes[0].url])


@in_event_loop
async def test_a_killed_rollout_can_be_run_again_from_any_point():
    fakes = [FakeServer(Traffic()) for _ in range(10)]
    async with running(*fakes) as servers:
        for interrupt_s in (0.005, 0.02, 0.05, 0.1, 0.2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(
                    roll_out(servers, NEW, replace(QUICK, watch_s=5)), interrupt_s
                )
        assert (await roll_out(servers, NEW)).passed
        assert {fake.version for fake in fakes} == {NEW}


@pytest.mark.parametrize(
    ("num_servers", "num_rollouts"), [pytest.param(200, 3, marks=pytest.mark.slow), (12, 4)]
)
@in_event_loop
async def test_unreliable_servers_end_on_one_version_every_time(num_servers, num_rollouts):
    """One swap in ten is cut off or ends in a restart.

    Every other candidate is also refused by some servers.
    """
    rng = random.Random(4)
    versions = [f"v{i:06d}" for i in range(1, num_rollouts + 2)]
    traffic = Traffic(tau=dict.fromkeys(versions, 2.0), registry=set(versions))
    fakes = [FakeServer(traffic, rng=random.Random(i), down_s=0.1) for i in range(num_servers)]
    policy = replace(QUICK, min_drafts=500, waves=(0.1, 1.0))
    current, passed = versions[0], []
    async with running(*fakes) as servers:
        for number, candidate in enumerate(versions[1:]):
            for fake in fakes:
                fake.failure_rate = 0.1
                fake.faults = ("500", "cut before", "cut after", "restart")[1 - number % 2 :]
                fake.refuses = (
                    {candidate} if number % 2 and rng.random() < 3 / num_servers else set()
                )
            outcome = await roll_out(servers, candidate, policy, incumbent=current)
            for fake in fakes:
                fake.failure_rate = 0.0
            await asyncio.gather(*(fake.until_back() for fake in fakes))
            await converge(servers, outcome.version, 30)
            assert {fake.version for fake in fakes} == {outcome.version}, outcome.reason
            assert outcome.version == (candidate if outcome.passed else current)
            passed.append(outcome.passed)
            current = outcome.version
    assert sum(fake.boot for fake in fakes) > num_servers, "servers restarted"
    assert set(passed) == {True, False}, "some rollouts went through and some were taken back"


@in_event_loop
async def test_a_wrong_token_is_a_refusal_and_never_shown():
    fake = FakeServer(Traffic())
    async with running(fake) as servers:
        stranger = FleetServer(fake.url, "not-the-token", servers[0].http)
        with pytest.raises(RefusedError, match="401"):
            await stranger.status()
        assert TOKEN not in repr(servers[0])


@pytest.mark.parametrize("code", [200, 500])
@in_event_loop
async def test_a_page_that_repeats_the_headers_does_not_show_the_token(code):
    async def echo(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(
            b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (code, len(head))
        )
        writer.write(head)
        writer.close()

    listener = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with listener, httpx.AsyncClient() as http:
        server = FleetServer(
            f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", TOKEN, http
        )
        with pytest.raises(RefusedError) as refusal:
            await server.status()
        assert TOKEN not in str(refusal.value)


@pytest.mark.parametrize("url", ["http://user:secret@10.0.0.5:8000", "http://user@10.0.0.5"])
def test_an_address_with_a_password_is_refused(url):
    with pytest.raises(ValueError, match=r"10\.0\.0\.5"):
        require_address(url)


@in_event_loop
async def test_servers_are_asked_how_they_draft_and_those_that_do_not_tell_are_left_out():
    ways = [
        {"num_speculative_tokens": 5, "draft_sample_method": "probabilistic"},
        {"num_speculative_tokens": 5, "draft_sample_method": "probabilistic"},
        {"num_speculative_tokens": 3},  # an earlier release
        {"num_speculative_tokens": 3, "draft_sample_method": "a method of a later release"},
        {"num_speculative_tokens": 0, "draft_sample_method": None},  # without a draft
        {"num_speculative_tokens": 3, "draft_sample_method": "greedy"},
    ]
    fakes = [FakeServer(Traffic(), drafting=way) for way in ways]
    async with running(*fakes) as servers:
        fakes[-1].stop()
        assert await ask_drafting(servers) == {Drafting(5, "probabilistic"): 2}


@in_event_loop
async def test_a_port_that_nobody_listens_on_is_unreachable():
    fake = FakeServer(Traffic())
    async with running(fake) as servers:
        fake.stop()
        with pytest.raises(UnreachableError, match=rf"{fake.url} .*\baddress\b"):
            await servers[0].status()


@in_event_loop
async def test_another_service_on_the_address_is_a_refusal():
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener, httpx.AsyncClient() as http:
        server = FleetServer(
            f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", TOKEN, http
        )
        assert (await converge([server], NEW, 0)).refused
        with pytest.raises(NonsenseError, match=rf"{server.url} .*status"):
            await server.status()


@in_event_loop
async def test_the_journal_takes_the_swap_of_a_server_that_came_without_a_draft(tmp_path):
    fake = FakeServer(Traffic(), started_with="")
    async with running(fake) as servers:
        journal = Journal(tmp_path)
        (server,) = [JournaledServer(one.url, one.token, one.http, journal) for one in servers]
        assert (await converge([server], NEW, 5)).is_complete
        assert (await converge([server], OLD, 5)).is_complete
    found = [(entry.from_version, entry.version, entry.outcome) for entry in journal.read().entries]
    assert found == [(None, NEW, "swapped"), (NEW, OLD, "rolled_back")]


@pytest.mark.parametrize(
    ("drafts", "accepted", "alarming"), [(1000, 10, True), (1000, 500, False), (50, 0, False)]
)
def test_the_alarm_needs_both_enough_drafts_and_hardly_any_acceptance(drafts, accepted, alarming):
    assert is_alarming(AcceptanceCounts(num_drafts=drafts, num_accepted=accepted)) is alarming


def test_waves_must_reach_the_whole_fleet():
    with pytest.raises(ValueError, match=r"0.*1\.0"):
        RolloutPolicy(waves=(0.1, 0.5))
    with pytest.raises(ValueError, match="waves"):
        RolloutPolicy(waves=(0.5, 0.1, 1.0))


@in_event_loop
async def test_the_counts_of_a_status_are_those_of_the_plugin():
    status = {
        "server_id": "boot",
        "draft_version": "v000001",
        "draft_intact": True,
        "target_intact": True,
    }
    status |= {
        "target_fingerprint": "f",
        "positions": {"code": [[10, 6], [5, 2]]},
        "drafts": [10, 30, 6, 2],
        "notes": ["a flag"],
    }
    status["pace"] = {"pace": "auto", "line": "pace auto: 0 tokens at 8"}

    def answer(request):
        assert request.url.path == "/redraft/status"
        return httpx.Response(200, stream=httpx.ByteStream(json.dumps(status).encode()))

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        server = FleetServer("http://a", TOKEN, http)
        found = await server.status()
    wanted = AcceptanceCounts(
        num_drafts=10, num_accepted=8, accepted_per_position=(6, 2), tried_per_position=(10, 5)
    )
    assert (found.total, found.by_domain, found.notes) == (wanted, {"code": wanted}, ("a flag",))
    assert found.pace == "pace auto: 0 tokens at 8"
    del status[
        "positions"
    ]  # as from a server of an earlier release: all drafts count as equally long
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
        found = await FleetServer("http://a", TOKEN, http).status()
    assert (found.total, found.by_domain) == (replace(wanted, tried_per_position=(10, 6)), {})
