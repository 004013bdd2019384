"""The policy of draft tokens against invented machines, whose best number is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import wait_until

from redraft.files.artifact import MANIFEST
from redraft.online.engine.pace_memory import SAVE_S, PaceMemory
from redraft.online.engine.pace_policy import MOST_STEPS, SHARE, Policy

MOST, STEPS, LEARNED_STEPS = 5, 6000, 2000

DRAFTS = {
    "useless": (0.01,) * MOST,
    "weak": (0.25, 0.2, 0.2, 0.2, 0.2),
    "fair": (0.5, 0.45, 0.4, 0.4, 0.4),
    "good": (0.75, 0.7, 0.7, 0.65, 0.65),
}
"""Chance that a draft token is accepted if those before it are."""


def wander(seed: int) -> Callable[[int], int]:
    rng, sizes = random.Random(seed), [8.0]
    for _ in range(STEPS // 5):
        sizes.append(min(64.0, max(1.0, sizes[-1] * math.exp(rng.gauss(0, 0.12)))))
    return lambda step: round(sizes[step // 5])


CLIENTS: dict[str, Callable[[int], Callable[[int], int]]] = {
    "1": lambda _: lambda step: 1,
    "8": lambda _: lambda step: 8,
    "1-16-1": lambda _: lambda step: 16 if 1000 <= step % 3000 < 2000 else 1,
    "1..64": wander,
}


class Machine:
    """Step times unlike the policy's formula.

    Free tokens, then linear, tiles of 16, and the draft.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(100 + seed)
        self.free = rng.choice([2, 4, 16, 64, 256])
        self.per_token = 4 * rng.uniform(0.02, 0.08) / max(self.free, 4)
        self.first, self.next = rng.uniform(0.02, 0.15), rng.uniform(0.02, 0.1)
        self.tile = rng.choice([0, 0, 8]) * self.per_token

    def step(self, size: int, arm: int) -> float:
        """Time of a step that verifies and drafts so many tokens for each request."""
        tokens = size * (1 + arm)
        target = 1 + self.per_token * max(tokens - self.free, 0) + self.tile * ((tokens - 1) // 16)
        return target + ((self.first + self.next * (arm - 1)) * (1 + size / 64) if arm else 0.0)


@dataclass
class Outcome:
    off: float
    """Speed against no draft, over all steps."""
    best: float
    """Against the best fixed number for this load, after LEARNED_STEPS."""
    policy: Policy


def simulate(
    draft: str, clients: str, noise: float, seed: int, steps: int = STEPS, pushes: int = 0
) -> Outcome:
    """One load.

    Its speeds are those expected, without the noise that the policy sees. Every so many `pushes`
    steps a trainer moves the target, by too little to change what is accepted.
    """
    rng, machine, policy, rates = (
        random.Random(seed),
        Machine(seed),
        Policy(MOST, 64),
        DRAFTS[draft],
    )
    taus = {arm: 1 + sum(math.prod(rates[: i + 1]) for i in range(arm)) for arm in policy.arms}
    size_of, verified, drift, stall = CLIENTS[clients](seed), 0, 0.0, 0
    spent, late, off = 0.0, 0.0, 0.0
    fixed = dict.fromkeys(policy.arms, 0.0)
    for step in range(steps):
        size = size_of(step)
        if pushes and step % pushes == 0:
            policy.swapped()
        drafted = policy.choose(size)
        stall = rng.randrange(5, 60) if rng.random() < 0.002 else stall - 1
        drift = min(max(drift + rng.gauss(0, 0.01), -0.35), 0.4)
        # A step verifies the tokens of the one before, and drafts those of the next.
        time = (machine.step(size, verified) + machine.step(size, drafted)) / 2
        seen = time * math.exp(drift + rng.gauss(0, noise)) * (1.6 if stall > 0 else 1)
        accepted = [
            next((i for i in range(verified) if rng.random() >= rates[i]), verified)
            for _ in range(size if verified else 0)
        ]
        is_clean = rng.random() > 0.02 * min(size, 16)
        policy.observe(size, drafted, verified, seen / 100, accepted, is_clean=is_clean)
        spent += time
        off += taus[verified] * machine.step(size, 0)
        if step >= LEARNED_STEPS:
            late += time
            for arm in policy.arms:
                fixed[arm] += taus[verified] / taus[arm] * machine.step(size, arm)
        verified = drafted
    return Outcome(off / spent, min(fixed.values()) / late, policy)


def judge(draft: str, clients: str, noise: float, seeds: range) -> None:
    outcomes = [simulate(draft, clients, noise, seed) for seed in seeds]
    assert min(outcome.off for outcome in outcomes) >= 0.985
    assert min(outcome.best for outcome in outcomes) >= 0.95
    for outcome in outcomes:
        assert outcome.policy.lost_s <= 0.015 * outcome.policy.busy_s


@pytest.mark.parametrize(("draft", "clients"), [("useless", "1..64"), ("good", "1-16-1")])
def test_never_slower_than_off_and_close_to_the_best_number(draft: str, clients: str) -> None:
    judge(draft, clients, 0.25, range(1))


def test_what_a_small_batch_showed_is_used_at_a_size_never_seen() -> None:
    policy = simulate("good", "1", 0.05, 0, LEARNED_STEPS + 1).policy
    known, prior = policy.speed(0, 2), Policy(MOST, 64).speed(1, 2)
    assert policy.base[0] > 0
    assert not policy.steps[1]
    assert policy.speed(1, 2).mean == pytest.approx(known.mean, rel=0.1)
    assert policy.speed(1, 2).error < prior.error / 2


def restart(policy: Policy, folder: Path, version: str = "v000002", key: str = "k" * 64) -> Policy:
    """A server's policy after a start beside what the one before has saved."""
    again = Policy(MOST, 64)
    PaceMemory(folder, key, version).recall(again)
    return again


def make_memory(folder: Path) -> PaceMemory:
    for version in ("v000001", "v000002"):
        (folder / version).mkdir()
        (folder / version / MANIFEST).write_text(version)
    return PaceMemory(folder, "k" * 64, "v000002")


def test_after_a_restart_it_drafts_in_the_first_step(tmp_path: Path) -> None:
    policy, memory = simulate("good", "1", 0.05, 0).policy, make_memory(tmp_path)
    memory.note(policy, 0.0)
    assert not memory.path.exists()
    memory.note(policy, SAVE_S)
    wait_until(memory.path.exists)
    assert Policy(MOST, 64).choose(1) == 0
    again = restart(policy, tmp_path)
    assert again.choose(1) == policy.choose(1) > 0
    (place,) = (again.sizes.index(1),)
    for arm in policy.arms:
        ours, theirs = again.speed(place, arm), policy.speed(place, arm)
        assert (ours.mean, ours.error) == pytest.approx((theirs.mean, theirs.error))


def test_the_acceptance_of_another_version_counts_as_after_a_swap(tmp_path: Path) -> None:
    policy, memory = simulate("good", "1", 0.05, 0).policy, make_memory(tmp_path)
    memory.save(policy.known())
    again = restart(policy, tmp_path, version="v000001")
    policy.swapped()
    assert again.tried == pytest.approx(policy.tried)
    assert again.speed(0, 2).mean == pytest.approx(policy.speed(0, 2).mean)
    assert again.tried.max() <= 3


@pytest.mark.parametrize("damage", ["cut", "foreign", "sizes", "numbers", "missing"])
def test_a_file_that_does_not_fit_is_ignored_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    policy, memory = simulate("good", "1", 0.05, 0, 2001).policy, make_memory(tmp_path)
    if damage == "numbers":
        policy.hit = policy.tried + 1
    known = (Policy(MOST, 8) if damage == "sizes" else policy).known()
    memory.save(known)
    if damage == "cut":
        memory.path.write_bytes(memory.path.read_bytes()[:-20])
    if damage == "missing":
        memory.path.unlink()
    key = "k" * 16 + "l" * 48 if damage == "foreign" else "k" * 64
    again = restart(policy, tmp_path, key=key)
    assert again.known() == Policy(MOST, 64).known()
    assert len(caplog.messages) == (damage != "missing")


def test_a_registry_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy, memory = Policy(MOST, 64), make_memory(tmp_path)
    memory.path.mkdir()
    memory.save(policy.known())
    for now_s in (0.0, 2 * SAVE_S, 4 * SAVE_S):
        memory.note(policy, now_s)
    assert memory._writer is None
    assert len(caplog.messages) == 1


def test_a_lookup_that_proposes_less_in_large_batches_is_judged_by_batch_size() -> None:
    policy = Policy(3, 16)
    alone, many, between = policy.sizes.index(1), policy.sizes.index(8), policy.sizes.index(4)
    for _ in range(400):
        policy.observe(1, 3, 3, 0.01, [3], is_clean=True)
        policy.observe(8, 3, 3, 0.01, [0] * 8, is_clean=True)
    taus = [
        policy.speed(place, 3).mean * policy._times[place][2][0] for place in (alone, between, many)
    ]
    assert taus[0] > 3.2
    assert taus[2] < 1.1
    assert taus[1] == pytest.approx(1 + 3 * 400 / 3600, rel=0.05), (
        "a size never seen has the rate of all"
    )


def test_a_swap_opens_the_question_again() -> None:
    policy = simulate("useless", "1", 0.05, 0).policy
    assert policy.base[0] == 0
    before, probes = policy.speed(0, 1), policy.num_probes
    policy.swapped()
    assert policy.speed(0, 1).error > 1.5 * before.error
    drafted = 0
    for _ in range(1500):  # the new draft is always right
        verified, drafted = drafted, policy.choose(1)
        policy.observe(1, drafted, verified, (1 + 0.1 * verified) / 100, [verified], is_clean=True)
    assert policy.num_probes > probes
    assert policy.base[0] > 0


@pytest.mark.parametrize("pushes", [30, 100])  # every few seconds
@pytest.mark.parametrize("draft", DRAFTS)
def test_frequent_pushes_of_a_target_give_no_more_time_for_probes(draft: str, pushes: int) -> None:
    outcome = simulate(draft, "1", 0.25, 0, 3 * STEPS, pushes)
    policy = outcome.policy
    assert (
        policy.lost_s <= (SHARE + 2 * MOST_STEPS / (3 * STEPS)) * policy.busy_s
    )  # and what the account begins with
    assert outcome.off >= 0.985


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.05, 0.25])
@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_320_loads(draft: str, clients: str, noise: float) -> None:
    judge(draft, clients, noise, range(10))


def test_no_probe_of_more_tokens_begins_while_the_draft_has_not_read_the_text() -> None:
    policy, drafted = Policy(MOST, 64), []
    for step in range(200):
        drafted.append(policy.choose(1, is_read=step >= 100))
        policy.observe(1, drafted[-1], drafted[-2] if step else 0, 1.0, [], is_clean=True)
    assert not any(drafted[:100])
    assert any(drafted[100:])


def simulate_beside(rates: list[float], steps: int = 2000, learned: int = 800) -> float:
    """The speed of the first request against no drafts, beside others with these rates.

    A draft token costs 0.02 of a step, and verifying it 0.05.
    """
    rng, policy, verified, spent, tokens = random.Random(0), Policy(12, 64), 0, 0.0, 0
    for step in range(steps):
        drafted = policy.choose(len(rates))
        time = 1 + 0.05 * len(rates) * verified + 0.02 * drafted
        accepted = [
            next((i for i in range(verified) if rng.random() >= rate), verified) for rate in rates
        ]
        policy.observe(
            len(rates), drafted, verified, time / 100, accepted if verified else [], is_clean=True
        )
        if step >= learned:
            spent += time
            tokens += 1 + accepted[0]
        verified = drafted
    return tokens / spent


@pytest.mark.parametrize(
    ("rate", "others", "speed"),
    [
        (0.3, [], 1.2),
        (0.3, [1.0], 0.6),
        (0.3, [1.0] * 7, 0.25),
        (1.0, [], 7.1),
        (1.0, [0.0] * 7, 1.0),
    ],
)
def test_all_requests_together_are_served_and_one_may_pay_for_the_others(
    rate: float, others: list[float], speed: float
) -> None:
    """The numbers of docs/threat-model.md."""
    assert simulate_beside([rate, *others]) == pytest.approx(speed, rel=0.06)
