"""The gate: does a candidate accept more than the incumbent? Numbers in, verdict and reason out; no clock, no I/O.

Both drafts are scored on the same held-out requests under the served sampling method, so requests pair up. The unit
that is resampled is the request: positions within one are correlated, and treating them as independent would make
any candidate look proven.

N = requests, R = bootstrap resamples
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from eval.bootstrap import interval, resampled_ratios

Array = NDArray[np.float64]


class Decision(Enum):
    PROMOTE = "promote"
    REJECT = "reject"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One draft on one held-out request. Counts, or their expectations under teacher forcing."""

    drafts: float
    """Target steps that verified a draft."""
    accepted: float
    """Draft tokens accepted, summed over those steps."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a candidate has to show."""

    min_gain: float = 0.02
    """Promote only when the lower confidence bound of tau(candidate) - tau(incumbent) is above this."""
    max_domain_loss: float = 0.1
    """Promote only when no judged domain's lower bound is below minus this, in tau."""
    confidence: float = 0.95
    """One-sided, of each bound. With 50 to 100 requests of very unequal length, a nominal 95% covers about 94%."""
    min_requests: int = 50
    """Fewer than this is never a verdict: the bootstrap's bounds are too narrow on small samples."""
    min_domain_requests: int = 20
    """A domain with fewer is named in the reason but not judged, or one rare domain would block for ever."""
    num_resamples: int = 2000

    def __post_init__(self) -> None:
        if not 0.5 < self.confidence < 1:
            raise ValueError(f"confidence must be between 0.5 and 1, got {self.confidence}")
        if self.min_domain_requests < 2 or self.min_requests < 2:
            raise ValueError("min_requests and min_domain_requests must be at least 2: one request has no spread")


@dataclass(frozen=True, kw_only=True)
class Gain:
    """tau(candidate) - tau(incumbent) over some requests, with its one-sided confidence bounds."""

    num_requests: int
    tau_candidate: float
    tau_incumbent: float
    lower: float
    upper: float

    def __str__(self) -> str:
        gain = self.tau_candidate - self.tau_incumbent
        return (
            f"tau {self.tau_incumbent:.3f} -> {self.tau_candidate:.3f}, gain {gain:+.3f} "
            f"[{self.lower:+.3f}, {self.upper:+.3f}] over {self.num_requests} requests"
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    decision: Decision
    reason: str
    overall: Gain | None
    domains: dict[str, Gain]


def judge(
    candidate: Sequence[Scored], incumbent: Sequence[Scored], domains: Sequence[str], policy: Policy, seed: int = 0
) -> Verdict:
    """The verdict on a candidate; row i of the three sequences is the same held-out request.

    Raises:
        ValueError: the sequences differ in length, or a number of the incumbent is not finite or makes no sense.
    """
    if not len(candidate) == len(incumbent) == len(domains):
        raise ValueError(
            f"candidate, incumbent and domains must pair up, got {len(candidate)}, {len(incumbent)} and {len(domains)}"
        )
    if not _is_sane(incumbent):
        raise ValueError("the incumbent's counts must be finite, drafts >= 0 and accepted >= 0")
    if not _is_sane(candidate):
        return _verdict(Decision.REJECT, "the candidate's counts are not finite")

    counts_N4 = np.array(
        [(c.drafts, c.accepted, i.drafts, i.accepted) for c, i in zip(candidate, incumbent, strict=True)]
    )
    # A request without drafts on either side (one output token) pairs with nothing.
    usable_N = (counts_N4[:, [0, 2]] > 0).all(1) if len(counts_N4) else np.zeros(0, bool)
    if usable_N.sum() < policy.min_requests:
        return _verdict(
            Decision.INCONCLUSIVE, f"{usable_N.sum()} held-out requests with drafts, {policy.min_requests} needed"
        )
    counts_N4, names_N = counts_N4[usable_N], np.array(domains)[usable_N]
    overall = _gain(counts_N4, policy, seed)
    judged, unjudged = {}, []
    for name in sorted(set(names_N.tolist())):
        rows_N = names_N == name
        if rows_N.sum() >= policy.min_domain_requests:
            judged[name] = _gain(counts_N4[rows_N], policy, seed)
        else:
            unjudged.append(f"{name} ({rows_N.sum()})")
    decision, why = _decide(overall, judged, policy)
    note = f"; too few requests to judge {', '.join(unjudged)}" if unjudged else ""
    return _verdict(decision, f"{why}{note}", overall, judged)


def _decide(overall: Gain, domains: dict[str, Gain], policy: Policy) -> tuple[Decision, str]:
    loss = policy.max_domain_loss
    for name, gain in domains.items():
        if gain.upper < -loss:
            return Decision.REJECT, f"domain {name} loses more than {loss}: {gain}"
    if overall.upper <= policy.min_gain:
        return Decision.REJECT, f"gain is not above {policy.min_gain}: {overall}"
    if overall.lower <= policy.min_gain:
        return Decision.INCONCLUSIVE, f"gain is not proven to be above {policy.min_gain}: {overall}"
    for name, gain in domains.items():
        if gain.lower < -loss:
            return Decision.INCONCLUSIVE, f"domain {name} may lose more than {loss}: {gain}"
    return Decision.PROMOTE, str(overall)


def _gain(counts_N4: Array, policy: Policy, seed: int) -> Gain:
    accepted_N2, drafts_N2 = counts_N4[:, [1, 3]], counts_N4[:, [0, 2]]
    tau_candidate, tau_incumbent = 1 + accepted_N2.sum(0) / drafts_N2.sum(0)
    ratios_R2 = resampled_ratios(accepted_N2, drafts_N2, seed=seed, num_resamples=policy.num_resamples)
    lower, upper = interval(ratios_R2[:, 0] - ratios_R2[:, 1], 2 * policy.confidence - 1)
    return Gain(
        num_requests=len(counts_N4),
        tau_candidate=float(tau_candidate),
        tau_incumbent=float(tau_incumbent),
        lower=lower,
        upper=upper,
    )


def _is_sane(scored: Sequence[Scored]) -> bool:
    counts_N2 = np.array([(s.drafts, s.accepted) for s in scored], dtype=float).reshape(-1, 2)
    return bool(np.isfinite(counts_N2).all() and (counts_N2 >= 0).all())


def _verdict(
    decision: Decision, reason: str, overall: Gain | None = None, domains: dict[str, Gain] | None = None
) -> Verdict:
    return Verdict(decision=decision, reason=f"{decision.value}: {reason}", overall=overall, domains=domains or {})
