"""Detect whether the served draft has become worse.

Its acceptance on new held-out requests is compared with its acceptance at its promotion.

    then   the draft on the held-out requests of the time it became current
    now    the same draft on held-out requests that arrived since then, so both are independent
    loss   then - now in tau, domain by domain, weighted by the current share of each domain

A draft that training could not improve, and whose acceptance has not fallen since, is not worth
training: the learner sleeps. It wakes when the loss is proven, when a new domain appears, or, to
try once more, after the longest sleep. The module takes numbers and returns findings; it uses no
clock and no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from redraft.eval.intervals import (
    CONFIDENCE,
    Estimate,
    estimate_ratio,
    subtract_independent,
    sum_weighted,
)
from redraft.files.setting_error import SettingError
from redraft.online.learning.gate import Policy

Row = tuple[str, float, float]  # Domain, drafts and accepted draft tokens of one held-out request.


# First pause without a proven loss, in candidates. Short, because three candidates may not be enough
# to show a slow gain.
FIRST_PAUSE = 4


@dataclass(frozen=True, kw_only=True)
class SleepPolicy:
    """When the learner stops training, and when it resumes."""

    enabled: bool = True
    """Stop training after `training.patience` candidates in a row without a proven gain. The
    learner continues to store records, and checks the served draft after every
    `training.records_per_candidate` new ones.
    """
    confidence: float = 0.99
    """Confidence with which acceptance on new held-out requests must be proven lower than at the
    promotion before training resumes. A false alarm only costs some training; it does not change
    the served draft.
    """
    longest: int = 16
    """Maximum pause between two attempts to find a gain, in multiples of
    `training.records_per_candidate`. After the first attempt without a gain, the pause is 4 of
    these multiples, and it doubles with every further attempt. If acceptance has fallen, the first
    pause is 1 multiple.
    """

    def __post_init__(self) -> None:
        if not 0.5 < self.confidence < 1 or self.longest < 1:
            raise SettingError(
                "{confidence} must be between 0.5 and 1, and {longest} must be at least 1, got "
                f"{self.confidence} and {self.longest}"
            )


@dataclass(frozen=True, kw_only=True)
class Staleness:
    tau_then: float
    tau_now: float
    loss: float
    """tau_then - tau_now; positive if acceptance has fallen."""
    low: float
    high: float
    """Upper end of the 95% interval of the loss."""
    num_requests: int
    """Number of new held-out requests."""
    reason: str
    """Proof that the draft is stale; empty if there is none."""

    def __str__(self) -> str:
        return (
            f"tau {self.tau_then:.3f} at the promotion, {self.tau_now:.3f} now, loss "
            f"{self.loss:+.3f} "
            f"[{self.low:+.3f}, {self.high:+.3f}] over {self.num_requests} requests"
        )


def compare(
    then: Sequence[Row], now: Sequence[Row], policy: SleepPolicy, gate: Policy
) -> Staleness | None:
    """Compute the staleness of a draft.

    None if fewer than `gate.min_requests` new requests are from known domains and no domain is new.
    """
    then_by, now_by = _group(then), _group(now)
    enough = gate.min_domain_requests
    new = [name for name, rows in now_by.items() if name not in then_by and len(rows) >= enough]
    # A single request has no spread, so a rare domain would make the whole interval infinite.
    known = [name for name in now_by if min(len(now_by[name]), len(then_by.get(name, ()))) > 1]
    num_known = sum(len(now_by[name]) for name in known)
    if num_known < gate.min_requests:
        return None if not new else _only_new(new, len(now))
    total = sum(drafts for name in known for _, drafts, _ in now_by[name])
    tau_now = 1 + sum(accepted for name in known for _, _, accepted in now_by[name]) / total
    judged = _estimate_losses(then_by, now_by, known, enough)
    loss = judged["acceptance"]
    low, high = loss.interval(CONFIDENCE)
    confidence = _share_confidence(policy, judged)
    # One-sided: the lower bound at 99% is the lower end of the two-sided 98% interval.
    fallen = [
        name for name, estimate in judged.items() if estimate.interval(2 * confidence - 1)[0] > 0
    ]
    reasons = [f"{name} has fallen" for name in fallen[:1]] + [
        f"domain {name} is new" for name in new[:1]
    ]
    return Staleness(
        # This is not the mean over `then`: with the current shares of the domains, a shift of
        # traffic alone is not a loss.
        tau_then=tau_now + loss.value,
        tau_now=tau_now,
        loss=loss.value,
        low=low,
        high=high,
        num_requests=len(now),
        reason=" and ".join(reasons),
    )


def find_past(rows: Mapping[str, Sequence[Row]], policy: SleepPolicy, gate: Policy) -> list[str]:
    """Find the targets whose requests no longer represent a draft's acceptance.

    The decision uses one draft's scores on the requests of all targets.

    Args:
        rows: The rows by target: the served target first, then all earlier targets from newest to
            oldest.
        policy: The confidence of a difference, in either direction.
        gate: The smallest number of requests to compare. Targets with fewer are pooled, e.g. if a
            trainer changes the weights every minute.

    Returns:
        The oldest targets, from the first proven difference on. Small changes leave all of them
        usable.
    """
    targets, now, then, waiting = list(rows), list[Row](), list[Row](), list[str]()
    for i, target in enumerate(targets):
        if len(now) < gate.min_requests:
            now += rows[target]
            continue
        then += rows[target]
        waiting.append(target)
        if len(then) < gate.min_requests:
            continue
        if _is_different(then, now, policy, gate):
            return waiting + targets[i + 1 :]
        then, waiting = [], []
    return []


def _is_different(
    then: Sequence[Row], now: Sequence[Row], policy: SleepPolicy, gate: Policy
) -> bool:
    then_by, now_by = _group(then), _group(now)
    known = [name for name in now_by if min(len(now_by[name]), len(then_by.get(name, ()))) > 1]
    if not known:
        return False
    judged = _estimate_losses(then_by, now_by, known, gate.min_domain_requests)
    intervals = [
        estimate.interval(_share_confidence(policy, judged)) for estimate in judged.values()
    ]
    return any(low > 0 or high < 0 for low, high in intervals)


def _estimate_losses(
    then_by: Mapping[str, Sequence[Row]],
    now_by: Mapping[str, Sequence[Row]],
    known: Sequence[str],
    enough: int,
) -> dict[str, Estimate]:
    """Estimate the loss of acceptance over these domains, and in each with enough new requests."""
    # Weighted by drafts, because tau is a mean over drafts and not over requests.
    weights = {name: sum(drafts for _, drafts, _ in now_by[name]) for name in known}
    total = sum(weights.values())
    losses = {
        n: subtract_independent(_estimate_rate(then_by[n]), _estimate_rate(now_by[n]))
        for n in known
    }
    # Domains share no request, so their errors are independent.
    loss = sum_weighted([losses[name] for name in known], [weights[name] / total for name in known])
    return {"acceptance": loss} | {
        f"acceptance of domain {name}": losses[name]
        for name in known
        if len(now_by[name]) >= enough
    }


def _share_confidence(policy: SleepPolicy, judged: Mapping[str, Estimate]) -> float:
    """Return the confidence per comparison that keeps the total error at one comparison's."""
    return 1 - (1 - policy.confidence) / len(judged)


def _only_new(names: Sequence[str], num_requests: int) -> Staleness:
    nothing = math.nan
    return Staleness(
        tau_then=nothing, tau_now=nothing, loss=nothing, low=nothing, high=nothing, num_requests=num_requests,
        reason=f"domain {names[0]} is new",
    )  # fmt: skip


def _group(rows: Sequence[Row]) -> dict[str, list[Row]]:
    by_domain: dict[str, list[Row]] = {}
    for row in rows:
        by_domain.setdefault(row[0], []).append(row)
    return by_domain


def _estimate_rate(rows: Sequence[Row]) -> Estimate:
    return estimate_ratio(np.array([row[2] for row in rows]), np.array([row[1] for row in rows]))


@dataclass(frozen=True, kw_only=True)
class Sleep:
    """The reference of the served draft, and whether the learner is asleep.

    This state is saved on disk and survives kills.
    """

    version: str = ""
    """Version that `then` was measured for; empty before the first measurement."""
    drafting: str = ""
    """Draft settings of the measurement, because tau depends on the number of draft tokens."""
    through: int = 0
    """Newest held-out record of the reference. Newer records are independent of it."""
    then: tuple[Row, ...] = ()
    is_asleep: bool = False
    num_attempts: int = 0
    """Number of training attempts without a gain since the promotion; each doubles the pause."""
    num_passed: int = 0
    """Number of records skipped since the learner fell asleep."""
    num_saved: int = 0
    """Total number of skipped records."""

    def is_asleep_at(self, version: str) -> bool:
        """Whether the learner is asleep while `version` is served.

        Any version other than the reference's wakes the learner.
        """
        return self.is_asleep and self.version == version

    def refer(self, version: str, through: int, rows: Sequence[Row], drafting: str = "") -> Sleep:
        """Return the state with a new reference; awake unless only the settings have changed."""
        base = self if version == self.version else Sleep(num_saved=self.num_saved)
        return replace(base, version=version, drafting=drafting, through=through, then=tuple(rows))

    def fall_asleep(self, now: Sequence[Row]) -> Sleep:
        """Return the state after falling asleep.

        Domains in `now` that are not in the reference are no longer new, because training has used
        them.
        """
        known = {domain for domain, _, _ in self.then}
        then = (*self.then, *(row for row in now if row[0] not in known))
        return replace(
            self, then=then, is_asleep=True, num_attempts=self.num_attempts + 1, num_passed=0
        )

    def wake(self) -> Sleep:
        return replace(self, is_asleep=False, num_passed=0)

    def pass_over(self, num_records: int) -> Sleep:
        """Return the state, still asleep, after skipping `num_records` more records."""
        return replace(
            self, num_passed=self.num_passed + num_records, num_saved=self.num_saved + num_records
        )

    def find_reason_to_wake(
        self,
        staleness: Staleness | None,
        num_waiting: int,
        policy: SleepPolicy,
        records_per_candidate: int,
    ) -> str:
        """Return the reason to train again, given `num_waiting` records not yet trained on.

        Empty if there is no reason.
        """
        candidates = (self.num_passed + num_waiting) / records_per_candidate
        # After 1, 2 or 3 attempts, the pause is 1, 2 or 4 candidates with a proven loss, and 4, 8
        # or 16 without one.
        pause = 2 ** max(0, self.num_attempts - 1)
        # With a proven loss, the pause starts at one candidate, otherwise at FIRST_PAUSE
        # candidates.
        if staleness and staleness.reason and candidates >= min(pause, policy.longest):
            return staleness.reason
        if candidates >= min(FIRST_PAUSE * pause, policy.longest):
            return (
                f"{self.num_passed + num_waiting} records since the last attempt, so "
                "training is tried again"
            )
        return ""
