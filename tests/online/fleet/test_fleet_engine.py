"""The fleet's client against the plugin in a real vLLM.

It justifies the fake servers of test_fleet.py.
"""

import asyncio
import re

import pytest
from real_server import COPY, CORRUPT, RANDOM, TOKEN

from redraft.online.fleet.rollout import RolloutPolicy, roll_waves, try_canary
from redraft.online.fleet.server import Window, connected, converge

pytestmark = pytest.mark.vllm

POLICY = RolloutPolicy(warm_up_s=0.1, min_drafts=40, poll_s=0.2, window_timeout_s=600, watch_s=0.1)


async def traffic(server):
    """Requests one after the other, until cancelled."""
    number = 0
    while True:
        await asyncio.to_thread(server.complete, [5 + number % 50, 6, 7])
        number += 1


async def roll_out_under_traffic(server, candidate, incumbent):
    async with connected({server.url: TOKEN}) as servers:
        await converge(servers, incumbent, 600)
        requests = asyncio.ensure_future(traffic(server))
        try:
            outcome = await try_canary(servers, candidate, incumbent, POLICY)
            return await roll_waves(
                servers, candidate, incumbent, POLICY
            ) if outcome.passed else outcome, outcome
        finally:
            requests.cancel()


def test_a_real_engines_counters_over_a_window_agree_with_the_responses(server):
    async def measure():
        async with connected({server.url: TOKEN}) as servers:
            assert (await converge(servers, COPY, timeout_s=0)).is_complete
            window = await Window.open(servers)
            answers = [
                server.complete([9, 8, 7 + n])["metrics"]["speculative_decoding"] for n in range(4)
            ]
            answers += [
                server.complete([9, 8, 7], headers={"X-Redraft-Domain": "code"})["metrics"][
                    "speculative_decoding"
                ]
            ]
            return (await window.read())[servers[0]], answers

    (counted, by_domain, *_), answers = asyncio.run(measure())
    histograms = [answer["acceptance_histogram"] for answer in answers]
    assert counted.num_drafts == sum(map(sum, histograms))
    assert counted.num_accepted == sum(n * times for h in histograms for n, times in enumerate(h))
    assert sum(counted.accepted_per_position) == counted.num_accepted
    # drafts of one length: a token is tried if the one before was accepted
    assert counted.tried_per_position == (counted.num_drafts, *counted.accepted_per_position[:-1])
    code = histograms[-1]
    found = by_domain["code"]
    assert (found.num_drafts, found.num_accepted) == (
        sum(code),
        sum(n * times for n, times in enumerate(code)),
    )
    assert sum(counts.num_drafts for counts in by_domain.values()) == counted.num_drafts
    assert sum(counts.num_accepted for counts in by_domain.values()) == counted.num_accepted


def test_a_better_draft_passes_and_a_bad_one_is_taken_back(server):
    rolled, canary = asyncio.run(roll_out_under_traffic(server, COPY, RANDOM))
    assert rolled.passed, rolled.reason
    taus = re.findall(r"tau ([\d.]+) \(\d+ drafts\) against ([\d.]+) \(", canary.reason)
    assert float(taus[0][0]) > 2 > float(taus[0][1])
    assert server.status()["draft_version"] == COPY
    drafting = (server.status()["num_speculative_tokens"], server.status()["draft_sample_method"])
    assert drafting == (3, "probabilistic"), "as the server was started: the gate judges with these"
    taken_back, _ = asyncio.run(roll_out_under_traffic(server, RANDOM, COPY))
    assert not taken_back.passed
    assert (taken_back.version, taken_back.refused, taken_back.absent) == (COPY, {}, {})
    assert server.status()["draft_version"] == COPY


def test_a_damaged_version_is_refused_and_nothing_changes(server):
    outcome, _ = asyncio.run(roll_out_under_traffic(server, CORRUPT, COPY))
    assert not outcome.passed
    assert re.search(r"POST /redraft/swap\b.*\b422\b", outcome.reason)
    assert server.status()["draft_version"] == COPY
