"""Confidence intervals over prompts, because rows of one prompt are correlated.

They come from the jackknife with Student's t.

Leaving out each prompt in turn gives the standard error of a ratio of sums (Quenouille 1956; Tukey
1958). A few long prompts may carry most of a sum, so the degrees of freedom count prompts by their
weight, after Kish (1965). With plain N - 1, or with the percentile bootstrap, intervals over 16
prompts of unequal length contain the truth in only 88% to 92% of cases. `python -m
benchmarks.decisions` measures the coverage.

N = prompts.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from redraft.engine.counts import AcceptanceCounts

Array = NDArray[np.float64]

CONFIDENCE = 0.95
UNBOUNDED = (-math.inf, math.inf)


@dataclass(frozen=True)
class Estimate:
    """A ratio of sums over prompts, or a difference between two such ratios."""

    value: float
    error: float
    """Standard error; infinite if there is only one prompt, because its spread is unknown."""
    freedom: float
    """Degrees of freedom of the error, at least 1."""

    def interval(
        self, confidence: float = CONFIDENCE, bounds: tuple[float, float] = UNBOUNDED
    ) -> tuple[float, float]:
        """Return the two-sided interval, clipped to `bounds`, the range of possible values."""
        margin = student_t_quantile((1 + confidence) / 2, self.freedom) * self.error
        low, high = bounds
        return max(low, self.value - margin), min(high, self.value + margin)


def estimate_ratio(over_N: Array, under_N: Array) -> Estimate:
    """sum(over) / sum(under); 0 if the denominator is 0.

    Raises:
        ValueError: the arrays differ in length or are empty.
    """
    return sum_correlated([(over_N, under_N)], [1])


def estimate_gain(over_N2: Array, under_N2: Array) -> Estimate:
    """Return column 0's ratio minus column 1's, both over the same prompts.

    The difficulty of the prompts cancels out.

    Raises:
        ValueError: the arrays differ in shape or are empty.
    """
    columns = [(over_N2[:, column], under_N2[:, column]) for column in (0, 1)]
    return sum_correlated(columns, [1, -1])


def sum_correlated(ratios: Sequence[tuple[Array, Array]], weights: Sequence[float]) -> Estimate:
    """Return the weighted sum of the ratios of these (over, under), all over the same prompts.

    A prompt affects several ratios at once, so it is left out of all of them together. Their errors
    are not independent, as `sum_weighted` would assume.

    Raises:
        ValueError: the arrays differ in length or are empty.
    """
    value, deviation_N = 0.0, np.zeros(len(ratios[0][0]))
    for (over_N, under_N), weight in zip(ratios, weights, strict=True):
        ratio, left_out_N = _leave_one_out(over_N, under_N)
        value += weight * ratio
        deviation_N += weight * (left_out_N - ratio)
    under_RN = np.stack([under_N for _, under_N in ratios])
    # The ratios with weights of one sign are one side of a comparison. Of the two degrees of
    # freedom, the smaller is the safer choice.
    sides = [side for side in (np.array(weights) > 0, np.array(weights) < 0) if side.any()]
    freedom = min(_count_freedom(under_RN[side].sum(0)) for side in sides)
    # A prompt counts if any ratio has rows on it.
    return Estimate(value, _error(deviation_N, under_RN.max(0)), freedom)


def subtract_independent(one: Estimate, other: Estimate) -> Estimate:
    """Return `one` - `other`, measured on different prompts (Welch 1947)."""
    return sum_weighted([one, other], [1, -1])


def sum_weighted(estimates: Sequence[Estimate], weights: Sequence[float]) -> Estimate:
    """The weighted sum of estimates from different prompts.

    Its degrees of freedom are those of Satterthwaite (1946).
    """
    value = sum(weight * one.value for one, weight in zip(estimates, weights, strict=True))
    errors = [abs(weight) * one.error for one, weight in zip(estimates, weights, strict=True)]
    error = math.hypot(*errors)
    # The formula divides by the error. If the error is 0 or infinite, the degrees of freedom do not
    # matter.
    if not 0 < error < math.inf:
        return Estimate(value, error, 1.0)
    shares = sum(
        (part / error) ** 4 / one.freedom for one, part in zip(estimates, errors, strict=True)
    )
    return Estimate(value, error, 1 / shares)


def median_interval(values: Sequence[float] | Array) -> tuple[float, tuple[float, float]]:
    """The median and its 95% interval from order statistics (the sign test).

    It is valid for any distribution. With fewer than six values, the interval is infinite, because
    the smallest and the largest value then enclose the median in less than 95% of cases. Use it for
    rounds on a shared machine, where a few disturbed rounds would shift a mean.
    """
    sorted_N = np.sort(np.asarray(values, np.float64))
    size, outside, rank = len(sorted_N), 0.0, 0
    # `outside` is twice P(Binomial(size, 1/2) <= rank): the probability that the median is outside
    # the values at this rank. With six values, it is 3% (2 / 64) for the smallest and the largest
    # value, and 22% for the next ones, so the smallest and the largest are used.
    while (outside := outside + 2 * math.comb(size, rank) / 2**size) <= 1 - CONFIDENCE:
        rank += 1
    interval = (float(sorted_N[rank - 1]), float(sorted_N[size - rank])) if rank else UNBOUNDED
    return float(np.median(sorted_N)), interval


def estimate_tau_gain(
    ours: Sequence[AcceptanceCounts], theirs: Sequence[AcceptanceCounts]
) -> Estimate:
    """Return `estimate_gain` for one draft's gain in tau over another's.

    `ours` and `theirs` contain the counts per prompt, on the same prompts.
    """
    over_N2, under_N2 = (
        np.array(
            [
                [getattr(one, name), getattr(two, name)]
                for one, two in zip(ours, theirs, strict=True)
            ],
            np.float64,
        )
        for name in ("num_accepted", "num_drafts")
    )
    return estimate_gain(over_N2, under_N2)


def _leave_one_out(over_N: Array, under_N: Array) -> tuple[float, Array]:
    """Return the ratio, and the ratio with each prompt left out [N]."""
    if not len(over_N) or over_N.shape != under_N.shape:
        raise ValueError(
            f"the sums must have the same shape, got {over_N.shape} and {under_N.shape}"
        )
    over, under = over_N.sum(), under_N.sum()
    value = float(over / under) if under > 0 else 0.0
    rest_N = under - under_N
    # If one prompt has the whole denominator, leaving it out keeps the ratio, i.e. causes no
    # deviation.
    left_out_N = np.divide(over - over_N, rest_N, out=np.full(len(over_N), value), where=rest_N > 0)
    return value, left_out_N


def _count_freedom(under_N: Array) -> float:
    """Return the degrees of freedom of an error over these prompts, at least 1."""
    # This is Kish's effective number: 16 equal prompts count as 16, and one long prompt among empty
    # ones counts as 1.
    under = under_N.sum()
    num_effective = under**2 / np.square(under_N).sum() if under > 0 else 0.0
    return max(1.0, float(num_effective) - 1)


def _error(deviation_N: Array, under_N: Array) -> float:
    """The jackknife standard error. Prompts without rows carry no information and do not count."""
    num_prompts = np.count_nonzero(under_N)
    if num_prompts == 0:
        return 0.0
    if num_prompts == 1:
        return math.inf
    # Deviations are from the ratio over all prompts, so the sum of squares errs on the safe side.
    return math.sqrt((num_prompts - 1) / num_prompts * float(np.square(deviation_N).sum()))


# Cached, because a report needs it hundreds of times for the same prompts.
@functools.lru_cache(maxsize=4096)
def student_t_quantile(probability: float, freedom: float) -> float:
    """The `probability` quantile of Student's t with `freedom` degrees of freedom.

    `freedom` must be at least 1 and `probability` above 0.5. This is Algorithm 396 of Hill (1970).
    scipy has the exact quantile, but is not a dependency.
    """
    two_sided = 2 * (1 - probability)
    if (
        freedom < 2
    ):  # Hill's series does not converge there: round down to 1, where the quantile is larger
        return math.tan(math.pi / 2 * (1 - two_sided))
    if freedom == 2:
        return math.sqrt(2 / (two_sided * (2 - two_sided)) - 2)
    # The names and constants are Hill's.
    a = 1 / (freedom - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * freedom
    y = (d * two_sided) ** (2 / freedom)
    # Near the centre, expand about the normal quantile.
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(two_sided / 2)
        y = x * x
        if freedom < 5:
            c += 0.3 * (freedom - 4.5) * (x + 0.6)
        c += (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y * y)
    else:
        # Far out in the tail, use a series in y.
        series = 1 / (
            ((freedom + 6) / (freedom * y) - 0.089 * d - 0.822) * (freedom + 2) * 3
        ) + 0.5 / (freedom + 4)
        y = (series * y - 1) * (freedom + 1) / (freedom + 2) + 1 / y
    return math.sqrt(freedom * y)
