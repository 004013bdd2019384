"""The gate: does the candidate have a higher acceptance than the incumbent?

The gate takes numbers and returns a verdict with a reason. It uses no clock and no I/O.

Both drafts are scored on the same held-out requests with the served sampling method, so requests
are paired. The bounds are computed from the spread between requests, not between positions:
positions within a request are correlated, and treating them as independent would make any candidate
look proven. The turns of a conversation are correlated too: here, a request is the sum of all turns
of one conversation that were scored.

A learner compares one candidate after another with the same incumbent, on largely the same
requests. With an error of 5% per look, one of ten candidates without enough gain would often pass.
Each look therefore gets a share of the 5% (`spent_confidence`), and the shares of all looks since
the last promotion sum to at most 5%, however many there are.

Domains are a second check on a candidate that gains overall. For this check, each look uses the
whole 5%: the evidence for a rare domain hardly grows, so a bound that widened with the number of
looks would soon block every candidate, whatever its gain.

Ranges of context lengths are a third check. Only a proven loss in one of them counts against a
candidate.

N = requests, or conversations of several turns
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redraft.engine.counts import AcceptanceCounts, name_context
from redraft.eval.intervals import estimate_gain
from redraft.files.setting_error import SettingError
from redraft.online.learning.evidence import OTHER

Array = NDArray[np.float64]
Parts = Mapping[int, tuple[Sequence[AcceptanceCounts], Sequence[AcceptanceCounts]]]
"""Counts of the candidate and the incumbent, by length of the context (`split_by_context`)."""


class Decision(Enum):
    PROMOTE = "promote"
    REJECT = "reject"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The evidence that a candidate must show before it is published.

    tau is the mean number of tokens per target step.
    """

    min_gain: float = 0.02
    """Minimum gain in tau (mean tokens per step, bonus token included). A candidate is promoted
    only if the lower confidence bound of its gain is above this value.
    """
    max_domain_loss: float = 0.1
    """Maximum loss of tau in any domain that is evaluated. A candidate is promoted only if the
    lower confidence bound of each domain is within it. Over ten looks, a candidate that loses
    exactly this much in a domain of 20 to 100 requests passes in 8% to 27% of the cases, and one
    that loses twice as much never passes (`benchmarks/decisions.py`). A candidate that is proven to
    lose more than this in a range of context lengths is rejected as well.
    """
    confidence: float = 0.95
    """Confidence that no candidate without a gain is promoted, for all candidates since the last
    promotion together. The more candidates have been compared since then, the more evidence the
    next one needs.
    """
    min_requests: int = 24
    """Minimum number of held-out requests for a verdict; bounds on fewer are too wide. All turns of
    a conversation count as one request. With 24, a true gain of 0.1 in tau is proven at the first
    look in half of the cases, and a gain of 0.2 nearly always (`benchmarks/decisions.py`).
    """
    min_domain_requests: int = 20
    """Minimum number of held-out requests to evaluate a domain separately. Smaller domains are only
    mentioned in the reason, because otherwise a single rare domain would block every candidate.
    """

    def __post_init__(self) -> None:
        if not 0.5 < self.confidence < 1:
            raise SettingError(f"{{confidence}} must be between 0.5 and 1, got {self.confidence}")
        if self.min_domain_requests < 2 or self.min_requests < 2:
            raise SettingError(
                "{min_requests} and {min_domain_requests} must be at least 2: a single request has no spread"
            )


@dataclass(frozen=True, kw_only=True)
class Gain:
    """tau(candidate) - tau(incumbent) over some requests, with one-sided confidence bounds.

    For the overall gain, the confidence of `lower` rises with each look. `upper` decides a
    rejection and has the policy's confidence at every look, because a wrong rejection costs some
    training, but no user notices it.
    """

    num_requests: int
    tau_candidate: float
    tau_incumbent: float
    lower: float
    upper: float

    @property
    def value(self) -> float:
        return self.tau_candidate - self.tau_incumbent

    def __str__(self) -> str:
        return (
            f"tau {self.tau_incumbent:.3f} -> {self.tau_candidate:.3f}, gain {self.value:+.3f} "
            f"[{self.lower:+.3f}, {self.upper:+.3f}] over {self.num_requests} requests"
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    decision: Decision
    reason: str
    overall: Gain | None
    domains: dict[str, Gain]
    contexts: dict[str, Gain]
    """By context length, in ascending order."""


def judge(
    candidate: Sequence[AcceptanceCounts],
    incumbent: Sequence[AcceptanceCounts],
    domains: Sequence[str],
    policy: Policy,
    look: int = 1,
    modes: Sequence[str] = (),
    contexts: Parts | None = None,
) -> Verdict:
    """Return the verdict on a candidate.

    Row i of each sequence belongs to the same held-out request. If there are several thinking
    `modes`, they are evaluated in the same way as domains. Each request is then in two groups.
    `contexts` has parts of the same counts. A proven loss in one of several length ranges
    rejects the candidate. A range without a proof does not, because there are many ranges with few
    requests each.

    `look` is 1 for the first verdict after a promotion, 2 for the next one, and so on. A verdict
    without enough requests (`overall` is None) does not count as a look.

    Raises:
        ValueError: the sequences differ in length, a count of the incumbent is negative or not
            finite, or `look` is below 1.
    """
    spent = spent_confidence(policy.confidence, look)
    if not len(candidate) == len(incumbent) == len(domains):
        raise ValueError(
            f"candidate, incumbent and domains must have the same length, got {len(candidate)}, "
            f"{len(incumbent)} and {len(domains)}"
        )
    # The served draft is finite, so such a count is the caller's mistake. For a candidate, it is a
    # reason to reject it.
    if not _is_sane(incumbent):
        raise ValueError("the incumbent's counts must be finite, drafts >= 0 and accepted >= 0")
    if not _is_sane(candidate):
        return _verdict(Decision.REJECT, "the candidate's counts are not finite")

    counts_N4, usable_N = _pair_counts(candidate, incumbent)
    if usable_N.sum() < policy.min_requests:
        return _verdict(
            Decision.INCONCLUSIVE,
            f"{usable_N.sum()} held-out requests with drafts, {policy.min_requests} needed",
        )
    counts_N4 = counts_N4[usable_N]
    overall = _gain(counts_N4, spent, policy.confidence)
    judged, unjudged = {}, []
    for groups in (domains, modes) if len(set(modes)) > 1 else (domains,):
        names_N = np.array(groups)[usable_N]
        for name in sorted(set(names_N.tolist())):
            rows_N = names_N == name
            # Any client can send a request of a different domain; all such requests together must
            # not block a candidate.
            if name != OTHER and rows_N.sum() >= policy.min_domain_requests:
                judged[name] = _gain(counts_N4[rows_N], policy.confidence, policy.confidence)
            else:
                unjudged.append(f"{name} ({rows_N.sum()})")
    by_context = _judge_contexts(contexts or {}, policy)
    decision, why = _decide(overall, judged, by_context, policy)
    note = f"; not evaluated separately: {', '.join(unjudged)}" if unjudged else ""
    return _verdict(decision, f"{why}{note}", overall, judged, by_context)


def _judge_contexts(contexts: Parts, policy: Policy) -> dict[str, Gain]:
    """Return the gain by context length; empty if all blocks begin in one range of lengths."""
    found = {}
    for power, sides in sorted(contexts.items()) if len(contexts) > 1 else ():
        counts_N4, usable_N = _pair_counts(*sides)
        if usable_N.sum() >= policy.min_domain_requests:
            found[name_context(power)] = _gain(
                counts_N4[usable_N], policy.confidence, policy.confidence
            )
    return found


def find_loss(
    current: Sequence[AcceptanceCounts],
    previous: Sequence[AcceptanceCounts],
    policy: Policy,
    look: int = 1,
) -> tuple[bool, str]:
    """Whether the current version is proven to be accepted less than the previous one.

    The numbers are also returned, as readable text. Row i of both sequences belongs to the same
    held-out request. As with `judge`, `look` counts the comparisons since the current version was
    promoted, and the error over all of them is bounded by 1 - `policy.confidence`.

    Raises:
        ValueError: the sequences differ in length, or `look` is below 1.
    """
    spent = spent_confidence(policy.confidence, look)
    counts_N4, usable_N = _pair_counts(current, previous)
    if not _is_sane(current):
        return True, "its counts are not finite"
    if usable_N.sum() < policy.min_requests:
        return (
            False,
            f"{usable_N.sum()} held-out requests with drafts, {policy.min_requests} needed",
        )
    gain = _gain(counts_N4[usable_N], spent, spent)
    return gain.upper < 0, str(gain)


def _pair_counts(
    ours: Sequence[AcceptanceCounts], theirs: Sequence[AcceptanceCounts]
) -> tuple[Array, Any]:
    """Return (drafts, accepted, drafts, accepted) for every request, [N, 4].

    The mask of the requests that can be compared, [N], is returned too.
    """
    pairs = zip(ours, theirs, strict=True)
    counts_N4 = np.array(
        [(o.num_drafts, o.num_accepted, t.num_drafts, t.num_accepted) for o, t in pairs]
    )
    # Without requests, `np.array` has shape [0], but the columns below need [0, 4].
    counts_N4 = counts_N4.reshape(-1, 4)
    # A request without drafts on one side, e.g. with a single output token, cannot be compared.
    return counts_N4, (counts_N4[:, [0, 2]] > 0).all(1)


def _decide(
    overall: Gain, domains: dict[str, Gain], contexts: dict[str, Gain], policy: Policy
) -> tuple[Decision, str]:
    loss = policy.max_domain_loss
    parts = [(f"domain {name}", gain) for name, gain in domains.items()]
    parts += [(f"in contexts of {name}, it", gain) for name, gain in contexts.items()]
    # A proven loss is rejected first. Only afterwards may missing evidence leave the verdict open.
    for name, gain in parts:
        if gain.upper < -loss:
            return Decision.REJECT, f"{name} loses more than {loss}: {gain}"
    if overall.upper <= policy.min_gain:
        return Decision.REJECT, f"gain is not above {policy.min_gain}: {overall}"
    if overall.lower <= policy.min_gain:
        return Decision.INCONCLUSIVE, f"gain is not proven to be above {policy.min_gain}: {overall}"
    for name, gain in domains.items():
        if gain.lower < -loss:
            return Decision.INCONCLUSIVE, f"domain {name} may lose more than {loss}: {gain}"
    return Decision.PROMOTE, str(overall)


def spent_confidence(confidence: float, look: int) -> float:
    """Return the confidence of the bound at one look.

    The errors of all looks sum to 1 - `confidence`: 1/3 + 1/6 + 1/10 + ... + 2/((look + 1) (look +
    2)) + ... = 1, so no number of looks has to be agreed on beforehand.

    Raises:
        ValueError: `look` is below 1.
    """
    if look < 1:
        raise ValueError(f"look must be at least 1, got {look}")
    # With 95%, this is 98.3% at the first look, 99.2% at the second, 99.5% at the third and 99.9%
    # at the tenth.
    return 1 - 2 * (1 - confidence) / ((look + 1) * (look + 2))


def _gain(counts_N4: Array, lower_confidence: float, upper_confidence: float) -> Gain:
    # Column 0 is the candidate, column 1 the incumbent.
    accepted_N2, drafts_N2 = counts_N4[:, [1, 3]], counts_N4[:, [0, 2]]
    tau_candidate, tau_incumbent = 1 + accepted_N2.sum(0) / drafts_N2.sum(0)
    gain = estimate_gain(accepted_N2, drafts_N2)
    # A one-sided bound at a confidence is the end of a two-sided interval at 2 * confidence - 1.
    lower, _ = gain.interval(2 * lower_confidence - 1)
    _, upper = gain.interval(2 * upper_confidence - 1)
    return Gain(
        num_requests=len(counts_N4),
        tau_candidate=float(tau_candidate),
        tau_incumbent=float(tau_incumbent),
        lower=lower,
        upper=upper,
    )


def _is_sane(scored: Sequence[AcceptanceCounts]) -> bool:
    counts_N2 = np.array([(s.num_drafts, s.num_accepted) for s in scored], dtype=float).reshape(
        -1, 2
    )
    return bool(np.isfinite(counts_N2).all() and (counts_N2 >= 0).all())


def _verdict(
    decision: Decision,
    reason: str,
    overall: Gain | None = None,
    domains: dict[str, Gain] | None = None,
    contexts: dict[str, Gain] | None = None,
) -> Verdict:
    return Verdict(
        decision=decision,
        reason=f"{decision.value}: {reason}",
        overall=overall,
        domains=domains or {},
        contexts=contexts or {},
    )
