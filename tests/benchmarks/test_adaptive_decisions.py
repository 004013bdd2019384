"""What a canary and the alarm make of the load, under adaptive verification."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import adaptive
from redraft.engine.counts import AcceptanceCounts
from redraft.online.fleet.server import is_alarming


def test_adaptive_load_alone_rolls_nothing_back_and_a_worse_draft_is_found(monkeypatch):
    monkeypatch.setattr(adaptive, "CASES", {"busier": adaptive.CASES["busier"]})
    found = adaptive.simulate_adaptive(4)
    assert (found["equal_rolled_back"], found["equal_alarmed"]) == (0.0, 0.0)
    assert found["worse_found"] == 1.0
    (case,) = found["cases"]
    assert case["by_tau_rolled_back"] >= 0.5, "the load looks like a worse draft"


@pytest.mark.parametrize("load", [2, 32, 256])
def test_no_adaptive_load_raises_the_alarm_and_a_useless_draft_does_at_each(load):
    rng, verified = np.random.default_rng(0), {}
    for loss in (0.0, -9.0):
        server = adaptive.Server(rng, loss)
        steps = [server.step(load) for _ in range(2000 // load + 20)]
        tried_K, accepted_K = (sum(column) for column in list(zip(*steps, strict=True))[1:])
        verified[loss] = AcceptanceCounts(
            num_drafts=tried_K[0],
            num_accepted=accepted_K.sum(),
            accepted_per_position=tuple(accepted_K),
        )
    assert not is_alarming(verified[0.0])
    # the estimates of a useless draft admit next to nothing of it: count more steps
    useless = verified[-9.0]
    assert useless.acceptance_per_position[0] < 0.05
    assert is_alarming(replace(useless, num_drafts=max(useless.num_drafts, 200)))


def test_adaptive_verification_makes_tau_fall_with_the_load_and_the_accepted_share_rise():
    rng, taus, shares = np.random.default_rng(1), [], []
    for load in (8, 64, 200):
        server = adaptive.Server(rng)
        steps = [server.step(load) for _ in range(40)]
        requests, tried_K, accepted_K = (sum(column) for column in zip(*steps, strict=True))
        taus.append(1 + accepted_K.sum() / requests)
        shares.append(accepted_K[0] / tried_K[0])
    assert taus == sorted(taus, reverse=True)
    assert taus[-1] < 1.5
    assert shares == sorted(shares)
