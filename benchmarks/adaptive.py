"""Simulate decisions under adaptive verification: how do canary and alarm react to the load?

The same draft runs at several loads. vLLM's rule admits the tokens with the highest estimated
survival, as long as they are worth the cost of their rows. So, although the draft stays the same,
tau falls with the load, and the accepted share of verified tokens rises. A worse draft has half a
logit less at each token.

N = requests per step, K = draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redraft.engine.counts import AcceptanceCounts
from redraft.online.engine.domains import find_load
from redraft.online.fleet.rollout import (
    MIN_POLLS,
    Finding,
    RolloutPolicy,
    decide,
    estimate_loss_by_domain,
)
from redraft.online.fleet.server import ALARM_DRAFTS, AT_LOAD, is_alarming

Array = NDArray[np.float64]

NUM_TOKENS = 7
STEPS = 6  # of a poll
POLLS = 128  # of a window; looks are at 16, 32, 64 and 128
MOST_REQUESTS = 512
KNEE_ROWS = 192  # a step takes longer with more rows than these
LOSS = -0.5  # logits

Load = Callable[[int], float]
"""Mean number of requests per step in each poll."""

CASES: Mapping[str, tuple[Load, Load]] = {
    "alike": (lambda poll: 40, lambda poll: 40),
    "busier": (lambda poll: 64, lambda poll: 40),
    "idler": (lambda poll: 28, lambda poll: 40),
    "twice_as_busy": (lambda poll: 80, lambda poll: 40),
    "risen": (lambda poll: 16 if poll <= 16 else 80, lambda poll: 16 if poll < 16 else 80),
}
"""Loads of the canary and the control group, by name."""


def price_rows() -> Array:
    """Return the time of a step in milliseconds by number of rows.

    It is flat up to the knee, then linear, in tiles of eight.
    """
    padded = np.ceil(np.arange(MOST_REQUESTS * (NUM_TOKENS + 1) + 1) / 8) * 8
    return np.asarray(10 + np.maximum(0, padded - KNEE_ROWS) * 0.045 + 0.002 * padded)


STEP_MS = price_rows()


@dataclass
class Server:
    """Steps of a simulated server.

    Its requests differ, and each keeps its properties until it ends.
    """

    rng: np.random.Generator
    loss: float = 0.0

    def __post_init__(self) -> None:
        self._base_N = self.rng.normal(0.35, 0.9, MOST_REQUESTS)
        self._left_N = self.rng.integers(1, 28, MOST_REQUESTS)

    def step(self, mean_load: float) -> tuple[int, Array, Array]:
        """Return (requests, drafts with a verified token and accepted tokens, both by position)."""
        rng = self.rng
        n = int(np.clip(round(mean_load * np.exp(rng.normal(0, 0.35))), 1, MOST_REQUESTS))
        self._left_N -= 1
        new_N = self._left_N <= 0
        self._base_N[new_N] = rng.normal(0.35, 0.9, int(new_N.sum()))
        self._left_N[new_N] = rng.integers(14, 42, int(new_N.sum()))
        # 1. Draw the acceptance probabilities, and vLLM's informative but inexact estimates of
        # them.
        places_K = np.arange(NUM_TOKENS)
        odds_NK = self._base_N[:n, None] + self.loss + rng.normal(0, 1.2, (n, NUM_TOKENS))
        odds_NK -= 0.08 * places_K
        guess_NK = 0.8 * odds_NK + rng.normal(0, 0.7, (n, NUM_TOKENS))
        survival_NK = np.cumprod(1 / (1 + np.exp(-guess_NK)), axis=1)
        # 2. Find the budget with the most tokens per millisecond, and the tokens that it admits.
        order = np.argsort(-survival_NK.ravel(), kind="stable")
        gains = n + np.concatenate([[0], np.cumsum(survival_NK.ravel()[order])])
        budget = int(np.argmax(gains / STEP_MS[n : n + len(gains)]))
        is_admitted = np.zeros(n * NUM_TOKENS, bool)
        is_admitted[order[:budget]] = True
        admitted_N = is_admitted.reshape(n, NUM_TOKENS).sum(1)
        # 3. Verification.
        hits_NK = np.cumprod(rng.random((n, NUM_TOKENS)) < 1 / (1 + np.exp(-odds_NK)), axis=1)
        accepted_N = np.minimum(hits_NK.sum(1), admitted_N)
        tried_K = ((admitted_N[:, None] > places_K) & (accepted_N[:, None] >= places_K)).sum(0)
        return n, tried_K.astype(float), (accepted_N[:, None] > places_K).sum(0).astype(float)


@dataclass
class Window:
    """A server's counts in the form that redraft keeps."""

    by_load: dict[str, Array]
    """All drafts by load: (tried, accepted) by poll and position, [P, K, 2]."""
    verified: list[AcceptanceCounts]
    """Number of drafts with a verified token, by poll."""

    @property
    def by_tau(self) -> dict[str, Array]:
        return {"": sum(self.by_load.values(), np.zeros((POLLS, NUM_TOKENS, 2)))}


def watch(server: Server, load: Load) -> Window:
    by_load: dict[str, Array] = {}
    verified = []
    for poll in range(POLLS):
        counts = AcceptanceCounts.zero(NUM_TOKENS)
        for _ in range(STEPS):
            n, tried_K, accepted_K = server.step(load(poll))
            load_name = f"{AT_LOAD}{find_load(n)}"  # as in `Status.by_load`
            of_load = by_load.setdefault(load_name, np.zeros((POLLS, NUM_TOKENS, 2)))
            of_load[poll, :, 0] += [n, *accepted_K[:-1]]
            of_load[poll, :, 1] += accepted_K
            counts += AcceptanceCounts(
                num_drafts=float(tried_K[0]),
                num_accepted=float(accepted_K.sum()),
                accepted_per_position=tuple(accepted_K.tolist()),
                tried_per_position=tuple(tried_K.tolist()),
            )
        verified.append(counts)
    return Window(by_load, verified)


def judge(canary: Mapping[str, Array], control: Mapping[str, Array]) -> Finding:
    """Judge after each doubling of the polls, as a rollout does, until a finding is conclusive."""
    policy, finding, end = RolloutPolicy(), Finding.INCONCLUSIVE, MIN_POLLS
    while finding is Finding.INCONCLUSIVE and end <= POLLS:
        seen = [{load: one[:end] for load, one in group.items()} for group in (canary, control)]
        finding, end = decide(estimate_loss_by_domain(*seen), policy), 2 * end
    return finding


def count_alarms(verified: list[AcceptanceCounts]) -> tuple[int, int]:
    """Return (alarms, windows with enough drafts)."""
    alarms = windows = 0
    counts = AcceptanceCounts.zero(NUM_TOKENS)
    for one in verified:
        counts += one
        if counts.num_drafts >= ALARM_DRAFTS:
            alarms, windows = alarms + is_alarming(counts), windows + 1
            counts = AcceptanceCounts.zero(NUM_TOKENS)
    return alarms, windows


def simulate_adaptive(trials: int, seed: int = 0) -> dict[str, Any]:
    """Return the rates of wrong and right decisions by load, worst first.

    `by_tau` is the share of equal drafts that would be rolled back if the same counts were judged
    without the load. `equal_covered` is the share of equal drafts whose loss over the whole window
    has a 95% interval that contains 0.
    """
    cases: list[dict[str, Any]] = []
    for number, (name, (load, other)) in enumerate(CASES.items()):
        rng = np.random.default_rng([seed, number])
        equal, worse, by_tau, covered, alarms, windows = [], [], [], 0, 0, 0
        for _ in range(trials):
            canary, control = watch(Server(rng), load), watch(Server(rng), other)
            equal.append(judge(canary.by_load, control.by_load))
            low, high = estimate_loss_by_domain(canary.by_load, control.by_load).interval()
            covered += low <= 0 <= high
            by_tau.append(judge(canary.by_tau, control.by_tau))
            found, looked = count_alarms([*canary.verified, *control.verified])
            alarms, windows = alarms + found, windows + looked
            worse.append(judge(watch(Server(rng, LOSS), load).by_load, control.by_load))
        cases.append(
            {
                "load": name,
                "equal_rolled_back": equal.count(Finding.WORSE) / trials,
                "equal_passed": equal.count(Finding.PASSED) / trials,
                "equal_covered": covered / trials,
                "by_tau_rolled_back": by_tau.count(Finding.WORSE) / trials,
                "equal_alarmed": alarms / windows,
                "worse_found": worse.count(Finding.WORSE) / trials,
                "worse_passed": worse.count(Finding.PASSED) / trials,
            }
        )
    return {
        "equal_rolled_back": max(case["equal_rolled_back"] for case in cases),
        "equal_alarmed": max(case["equal_alarmed"] for case in cases),
        "worse_found": min(case["worse_found"] for case in cases),
        "cases": cases,
    }
