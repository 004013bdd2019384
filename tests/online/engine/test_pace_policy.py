"""The policy of draft tokens against invented machines, whose best number is known."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from waiting import wait_until

from redraft.files.artifact import MANIFEST
from redraft.files.sealed import write_sealed
from redraft.online.engine.pace_evidence import ALL, MEMORY_STEPS, Cell
from redraft.online.engine.pace_memory import SAVE_S, PaceMemory
from redraft.online.engine.pace_policy import MOST_STEPS, SHARE, Policy, Speed

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


LONGEST = 16384
SEEN = Cell(1, 1024)
"""One client's requests of a short text."""


def walk(seed: int) -> Callable[[int], float]:
    rng, lengths = random.Random(1000 + seed), [1500.0]
    for _ in range(STEPS // 5):
        lengths.append(min(LONGEST, max(200.0, lengths[-1] * math.exp(rng.gauss(0, 0.15)))))
    return lambda step: lengths[step // 5 % len(lengths)]


CONTEXTS: dict[str, Callable[[int], Callable[[int], float]]] = {
    "short": lambda _: lambda step: 400.0,
    "short-long": lambda _: lambda step: 600.0 if step % 2000 < 1000 else 12000.0,
    "growing": lambda _: lambda step: 300.0 + 9 * (step % 1300),
    "any": walk,
}
"""Mean length of the texts."""


class Machine:
    """Step times unlike the policy's formula.

    Free tokens, then linear, tiles of 16, the draft, and attention to long texts.
    """

    def __init__(self, seed: int) -> None:
        rng = random.Random(100 + seed)
        self.free = rng.choice([2, 4, 16, 64, 256])
        self.per_token = 4 * rng.uniform(0.02, 0.08) / max(self.free, 4)
        self.first, self.next = rng.uniform(0.02, 0.15), rng.uniform(0.02, 0.1)
        self.tile = rng.choice([0, 0, 8]) * self.per_token
        self.forgets = seed % 2 == 0
        """Whether a long text makes the draft worse. If not, its keys make each step longer, with
        and without drafts, and drafting pays the more."""
        self.per_key = rng.uniform(0.3, 1.0) * self.per_token

    def step(self, size: int, arm: int, context: float = 0.0) -> float:
        """Time of a step that verifies and drafts so many tokens for each request."""
        tokens, keys = size * (1 + arm), 0.0 if self.forgets else context / 1024
        target = 1 + self.per_token * max(tokens - self.free, 0) + self.tile * ((tokens - 1) // 16)
        drafting = (self.first + self.next * (arm - 1)) * (1 + size / 64) if arm else 0.0
        return target + drafting + self.per_key * size * keys * (1 + 0.02 * arm)

    def accepts(self, rates: tuple[float, ...], context: float) -> tuple[float, ...]:
        """The chances of the draft's tokens at this length."""
        octaves = max(0.0, math.log2(context / 1024)) if self.forgets else 0.0
        return tuple(rate * max(0.0, 1 - 0.3 * octaves) for rate in rates)


@dataclass
class Outcome:
    off: float
    """Speed against no draft, over all steps."""
    best: float
    """Against the best fixed number for this load, after LEARNED_STEPS."""
    policy: Policy
    gain: float = 1.0
    """Speed against no draft, over recent steps as the policy weighs them."""


def expect(rates: tuple[float, ...], arm: int) -> float:
    return 1 + sum(math.prod(rates[: i + 1]) for i in range(arm))


def simulate(
    draft: str,
    clients: str,
    noise: float,
    seed: int,
    steps: int = STEPS,
    pushes: int = 0,
    contexts: str = "short",
) -> Outcome:
    """One load.

    Its speeds are those expected, without the noise that the policy sees. Every so many `pushes`
    steps a trainer moves the target, by too little to change what is accepted.
    """
    rng, machine, policy = random.Random(seed), Machine(seed), Policy(MOST, 64, LONGEST)
    size_of, context_of = CLIENTS[clients](seed), CONTEXTS[contexts](seed)
    verified, drift, stall = 0, 0.0, 0
    spent, late, off = 0.0, 0.0, 0.0
    recent = [0.0, 0.0]
    fixed = dict.fromkeys(policy.arms, 0.0)
    for step in range(steps):
        size, context = size_of(step), context_of(step)
        rates = machine.accepts(DRAFTS[draft], context)
        if pushes and step % pushes == 0:
            policy.swapped()
        drafted = policy.choose(size, context)
        stall = rng.randrange(5, 60) if rng.random() < 0.002 else stall - 1
        drift = min(max(drift + rng.gauss(0, 0.01), -0.35), 0.4)
        # A step verifies the tokens of the one before, and drafts those of the next.
        time = sum(machine.step(size, arm, context) for arm in (verified, drafted)) / 2
        seen = time * math.exp(drift + rng.gauss(0, noise)) * (1.6 if stall > 0 else 1)
        accepted = [
            next((i for i in range(verified) if rng.random() >= rates[i]), verified)
            for _ in range(size if verified else 0)
        ]
        num_reading = int(rng.random() < 0.02 * min(size, 16))
        policy.observe(
            size, context, drafted, verified, seen / 100, accepted,
            tokens=size + sum(accepted), num_reading=num_reading,
        )  # fmt: skip
        spent += time
        tau, alone = expect(rates, verified), machine.step(size, 0, context)
        off += tau * alone
        keep = math.exp(-1 / MEMORY_STEPS)
        recent = [was * keep + new for was, new in zip(recent, (tau * alone, time), strict=True)]
        if step >= LEARNED_STEPS:
            late += time
            for arm in policy.arms:
                fixed[arm] += tau / expect(rates, arm) * machine.step(size, arm, context)
        verified = drafted
    best = min(fixed.values()) / late if late else 1.0
    return Outcome(off / spent, best, policy, recent[0] / recent[1])


def judge(draft: str, clients: str, noise: float, seeds: range, contexts: str) -> None:
    outcomes = [simulate(draft, clients, noise, seed, contexts=contexts) for seed in seeds]
    assert min(outcome.off for outcome in outcomes) >= 0.985
    assert min(outcome.best for outcome in outcomes) >= 0.95
    for outcome in outcomes:
        assert outcome.policy.lost_s <= 0.012 * outcome.policy.busy_s
        gain = outcome.policy.recent.gain
        assert gain.mean == pytest.approx(outcome.gain, rel=0.06 + 1.96 * gain.error)


@pytest.mark.parametrize(
    ("draft", "clients", "contexts"),
    [("useless", "1..64", "short"), ("good", "1-16-1", "short"), ("useless", "1-16-1", "any")],
)
def test_never_slower_than_off_and_close_to_the_best_number(
    draft: str, clients: str, contexts: str
) -> None:
    judge(draft, clients, 0.25, range(1), contexts)


@pytest.mark.parametrize("forgets", [True, False])
def test_where_the_gain_changes_sign_with_the_length_so_does_the_choice(forgets: bool) -> None:
    """The draft of one machine forgets in long texts.

    On the other a token costs too much, unless the keys of long texts make each step long.
    """
    seed, clients, draft = (0, "1", "good") if forgets else (11, "8", "weak")
    machine, size = Machine(seed), CLIENTS[clients](seed)(0)
    assert machine.forgets == forgets
    true = {}
    for context in (600, 12000):
        rates = machine.accepts(DRAFTS[draft], context)
        alone = machine.step(size, 0, context)
        speeds = [expect(rates, k) * alone / machine.step(size, k, context) for k in range(1, 6)]
        true[context] = max(speeds)
    outcome = simulate(draft, clients, 0.05, seed, contexts="short-long")
    policy = outcome.policy
    cells = {context: policy.cell(size, context) for context in true}
    for context, cell in cells.items():
        assert (policy.base[cell] > 0) == (true[context] > 1.03), (context, true)
    assert {true[600] > 1.03, true[12000] > 1.03} == {True, False}, true
    assert outcome.best > 1.01, "no fixed number is right at both lengths"


def test_what_one_cell_showed_is_used_in_cells_never_seen() -> None:
    policy = simulate("good", "1", 0.05, 0, LEARNED_STEPS + 1).policy
    seen, prior = SEEN, Policy(MOST, 64, LONGEST)
    assert policy.base[seen] > 0
    known = policy.speed(seen, 2)
    for unseen, least in ((Cell(2, 1024), 2.0), (Cell(1, 2048), 2.0), (Cell(1, LONGEST), 1.0)):
        assert not policy.steps[unseen]
        speed, doubt = policy.speed(unseen, 2), prior.speed(unseen, 2).error
        assert speed.mean == pytest.approx(known.mean, rel=0.15)
        assert known.error < speed.error < doubt / least


def test_drafting_continues_in_a_cell_never_seen_if_it_is_estimated_to_pay() -> None:
    policy = simulate("good", "1", 0.05, 0, LEARNED_STEPS + 1).policy
    base, speed = policy.base[SEEN], policy.speed(Cell(8, 1024), policy.base[SEEN])
    assert base > 0
    assert speed.at(-1) < 1 < speed.mean, "too uncertain to begin here"
    fresh = Policy(MOST, 64, LONGEST)
    fresh.recall(policy.known())
    assert fresh.choose(8, 400) == 0
    assert policy.choose(8, 400) == base
    policy.swapped()
    policy.accepted.learn(SEEN, [0] * 4000, MOST)
    assert policy.choose(12, 400) == 0


def test_the_number_with_the_best_cautious_estimate_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """5 tokens are estimated to be faster than 2, but may be slower."""
    speeds = {0: (1.0, 0.0), 1: (1.2, 0.05), 2: (1.69, 0.1), 3: (1.7, 0.4), 5: (1.83, 0.29)}
    policy = Policy(MOST, 64, LONGEST)
    monkeypatch.setattr(policy, "speed", lambda cell, arm: Speed(*speeds[arm]))
    assert policy.choose(1, 400) == 2
    speeds[5] = (1.83, 0.1)
    assert policy.choose(1, 400) == 5


def test_a_probe_in_a_cell_that_is_new_is_less_certain() -> None:
    """The error of its mean cancels out only if the steps around the probe are in the cell too."""
    variances = []
    for probed in (1, 2):
        policy, rng, verified = Policy(MOST, 64, LONGEST), random.Random(0), 0
        sizes = [2] * 4
        while not policy.num_probes:
            is_probe = policy._probe is not None and not policy._probe.is_over
            size = sizes.pop() if sizes else probed if is_probe else 1
            drafted = policy.choose(size, 400)
            policy.observe(
                size, 400, drafted, verified, math.exp(rng.gauss(0, 0.1)),
                [0] * size if verified else [], tokens=size, num_reading=0,
            )  # fmt: skip
            verified = drafted
        variances.append(policy.times.probes[-1].variance)
    counts = [policy._levels[Cell(size, 1024), 0].count for size in (1, 2)]
    assert counts[1] == 4
    added = policy._variance * sum(1 / count for count in counts)
    assert variances[1] == pytest.approx(variances[0] + added)


def restart(policy: Policy, folder: Path, version: str = "v000002", key: str = "k" * 64) -> Policy:
    """A server's policy after a start beside what the one before has saved."""
    again = Policy(MOST, 64, LONGEST)
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
    assert Policy(MOST, 64, LONGEST).choose(1, 400) == 0
    again = restart(policy, tmp_path)
    assert again.choose(1, 400) == policy.base[SEEN] > 0
    for cell, arm in itertools.product((Cell(1, 1024), Cell(8, LONGEST)), policy.arms):
        ours, theirs = again.speed(cell, arm), policy.speed(cell, arm)
        assert (ours.mean, ours.error) == pytest.approx((theirs.mean, theirs.error))


def test_the_acceptance_of_another_version_counts_as_after_a_swap(tmp_path: Path) -> None:
    policy, memory = simulate("good", "1", 0.05, 0).policy, make_memory(tmp_path)
    memory.save(policy.known())
    again = restart(policy, tmp_path, version="v000001")
    policy.swapped()
    assert again.accepted.tallies == policy.accepted.tallies
    assert again.speed(SEEN, 2).mean == pytest.approx(policy.speed(SEEN, 2).mean)
    assert max(again.accepted.tallies[ALL].tried) <= 3


@pytest.mark.parametrize(
    "damage", ["cut", "foreign", "sizes", "contexts", "numbers", "layout", "missing"]
)
def test_a_file_that_does_not_fit_is_ignored_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    policy, memory = simulate("good", "1", 0.05, 0, 2001).policy, make_memory(tmp_path)
    if damage == "numbers":
        policy.accepted.tallies[ALL].hit[0] = 1 + policy.accepted.tallies[ALL].tried[0]
    known = policy.known()
    if damage == "sizes":
        known.probes[0].cell = Cell(1024, 1024)
    if damage == "contexts":
        known.probes[0].cell = Cell(1, 2 * LONGEST)
    memory.save(known)
    if damage == "layout":  # without context lengths
        write_sealed(memory.path, {"key": memory.key, "draft": "", "policy": {"log_x": [0.1]}})
    if damage == "cut":
        memory.path.write_bytes(memory.path.read_bytes()[:-20])
    if damage == "missing":
        memory.path.unlink()
    key = "k" * 16 + "l" * 48 if damage == "foreign" else "k" * 64
    again = restart(policy, tmp_path, key=key)
    assert again.known() == Policy(MOST, 64, LONGEST).known()
    assert len(caplog.messages) == (damage != "missing")


def test_a_registry_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy, memory = Policy(MOST, 64, LONGEST), make_memory(tmp_path)
    memory.path.mkdir()
    memory.save(policy.known())
    for now_s in (0.0, 2 * SAVE_S, 4 * SAVE_S):
        memory.note(policy, now_s)
    assert memory._writer is None
    assert len(caplog.messages) == 1


def test_a_lookup_that_proposes_less_in_large_batches_is_judged_by_batch_size() -> None:
    accepted = Policy(3, 16, 4096).accepted
    for _ in range(400):
        accepted.learn(Cell(1, 1024), [3], 3)
        accepted.learn(Cell(8, 1024), [0] * 8, 3)
    taus = [accepted.find(Cell(requests, 1024), 3)[0] for requests in (1, 4, 8)]
    assert taus[0] > 3.2
    assert taus[2] < 1.1
    assert taus[1] == pytest.approx(1 + 3 * 400 / 3600, rel=0.05), (
        "a size never seen has the rate of all"
    )


def test_a_head_that_forgets_is_judged_by_context_length() -> None:
    accepted = Policy(3, 16, LONGEST).accepted
    for _ in range(300):
        accepted.learn(Cell(1, 1024), [2], 3)
        accepted.learn(Cell(1, 8192), [0], 3)
    short, near, long, longer = (
        accepted.find(Cell(1, context), 2) for context in (1024, 2048, 8192, LONGEST)
    )
    assert short[0] > 2.7
    assert long[0] < 1.3
    assert long[0] < longer[0] < 1.6 < near[0] < short[0], "others are as those next to them"
    assert min(near[1], longer[1]) > 1.5 * max(short[1], long[1]), "and less certain"
    # Beside two requests it forgets as much, by what one has shown.
    assert accepted.find(Cell(2, 8192), 2)[0] < 1.6


def test_a_swap_opens_the_question_again() -> None:
    policy = simulate("useless", "1", 0.05, 0).policy
    assert policy.base[SEEN] == 0
    before, probes = policy.speed(SEEN, 1), policy.num_probes
    policy.swapped()
    assert policy.speed(SEEN, 1).error > 1.5 * before.error
    drafted = 0
    for _ in range(1500):  # the new draft is always right
        verified, drafted = drafted, policy.choose(1, 400)
        policy.observe(
            1, 400, drafted, verified, (1 + 0.1 * verified) / 100, [verified],
            tokens=1 + verified, num_reading=0,
        )  # fmt: skip
    assert policy.num_probes > probes
    assert policy.base[SEEN] > 0


@pytest.mark.parametrize(
    "pushes", [30, pytest.param(100, marks=pytest.mark.slow)]
)  # every few seconds
@pytest.mark.parametrize("draft", DRAFTS)
def test_frequent_pushes_of_a_target_give_no_more_time_for_probes(draft: str, pushes: int) -> None:
    outcome = simulate(draft, "1", 0.25, 0, 3 * STEPS, pushes)
    policy = outcome.policy
    assert (
        policy.lost_s <= (SHARE + 2 * MOST_STEPS / (3 * STEPS)) * policy.busy_s
    )  # and what the account begins with
    assert outcome.off >= 0.985


@pytest.mark.slow
@pytest.mark.parametrize("contexts", CONTEXTS)
@pytest.mark.parametrize("noise", [0.05, 0.25])
@pytest.mark.parametrize("clients", CLIENTS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_320_loads_at_each_kind_of_length(
    draft: str, clients: str, noise: float, contexts: str
) -> None:
    judge(draft, clients, noise, range(10), contexts)


def test_no_probe_of_more_tokens_begins_while_the_draft_has_not_read_the_text() -> None:
    policy, drafted = Policy(MOST, 64, LONGEST), []
    for step in range(200):
        drafted.append(policy.choose(1, 400, is_read=step >= 100))
        verified = drafted[-2] if step else 0
        policy.observe(1, 400, drafted[-1], verified, 1.0, [], tokens=1, num_reading=0)
    assert not any(drafted[:100])
    assert any(drafted[100:])


def simulate_beside(rates: list[float], steps: int = 3000, learned: int = 1500) -> float:
    """The speed of the first request against no drafts, beside others with these rates.

    A draft token costs 0.02 of a step, and verifying it 0.05.
    """
    rng, policy, verified, spent, tokens = random.Random(0), Policy(12, 64, 4096), 0, 0.0, 0
    for step in range(steps):
        drafted = policy.choose(len(rates), 400)
        time = 1 + 0.05 * len(rates) * verified + 0.02 * drafted
        accepted = [
            next((i for i in range(verified) if rng.random() >= rate), verified) for rate in rates
        ]
        policy.observe(
            len(rates), 400, drafted, verified, time / 100, accepted if verified else [],
            tokens=len(rates) + sum(accepted), num_reading=0,
        )  # fmt: skip
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
        (0.3, [1.0] * 7, 0.24),
        (1.0, [], 7.1),
        (1.0, [0.0] * 7, 1.0),
    ],
)
def test_all_requests_together_are_served_and_one_may_pay_for_the_others(
    rate: float, others: list[float], speed: float
) -> None:
    """The numbers of docs/threat-model.md."""
    assert simulate_beside([rate, *others]) == pytest.approx(speed, rel=0.06)


def test_probes_continue_if_off_is_too_slow_to_be_probed() -> None:
    """A probe of off would cost more than the account can contain."""
    policy, verified = Policy(12, 64, 4096), 0
    for _ in range(3000):
        drafted = policy.choose(1, 400)
        policy.observe(
            1, 400, drafted, verified, (1 + 0.07 * verified) / 100, [verified] if verified else [],
            tokens=1 + verified, num_reading=0,
        )  # fmt: skip
        verified = drafted
    assert policy.speed(SEEN, 12).mean == pytest.approx(13 / 1.84, rel=0.05)
    assert policy.base[SEEN] == 12


def test_step_times_without_noise_do_not_raise() -> None:
    assert simulate_beside([0.3], steps=6000) == pytest.approx(1.2, rel=0.02)
