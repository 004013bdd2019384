"""Compute how many tokens to draft.

The module predicts the speed by number of draft tokens and batch size, and finds the best number.

b = batch size, k = num_speculative_tokens, c_j = acceptance per position.

    tokens/s(b, k) = b * (1 + c_1 + ... + c_k) / (target step(b, k) + k * draft step(b))

This is theorem 3.8 of Leviathan et al. (arXiv 2211.17192) with two changes. Each position has a
measured acceptance, so positions need not be independent. Step times grow with the batch, as in the
goodput that Liu et al. (SmartSpec and TurboSpec, arXiv 2406.14066) maximise at every step: in a
small batch, a target step takes as long for k + 1 rows as for one. In a large batch, it takes k + 1
times as long, and drafting no longer pays off.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redraft.engine.counts import tau
from redraft.engine.lookups import depends_on_load
from redraft.heads.catalog import find_speculative


def has_fixed_tokens(draft: Mapping[str, Any]) -> bool:
    """Whether vLLM accepts only the number of draft tokens that is set in this config.

    vLLM would exit if a step requested a different number from the draft.
    """
    family = find_speculative(draft)
    return family is not None and not family.varies_tokens


def has_one_acceptance(draft: Mapping[str, Any]) -> bool:
    """Whether acceptance at a position is independent of the load and of the tokens after it.

    In a block drafter, it is not, because every proposal attends to the others.
    """
    family = find_speculative(draft)
    return not depends_on_load(draft) and (family is None or family.parity != "block")


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Measured durations of an engine's steps, in seconds, with interpolation.

    Raises:
        ValueError: a batch size has no step with or without a draft, or a time is not positive.
    """

    target_s: Mapping[int, Mapping[int, float]]
    """target_s[b][k] is the time of a target step that verifies k + 1 rows for each of b requests.
    k = 0 is a step without a draft.
    """
    draft_s: Mapping[int, float]
    """draft_s[b] is the time to propose one more token for each of b requests."""

    def __post_init__(self) -> None:
        if (
            not self.target_s
            or self.target_s.keys() != self.draft_s.keys()
            or min(self.target_s) < 1
        ):
            raise ValueError(
                "step costs need the same batch sizes for target and draft, got "
                f"{sorted(self.target_s)} and {sorted(self.draft_s)}"
            )
        for batch_size, by_k in self.target_s.items():
            if 0 not in by_k:
                raise ValueError(
                    f"the step costs at batch size {batch_size} have no step without draft tokens "
                    "(k = 0)"
                )
            if min(by_k.values()) <= 0 or self.draft_s[batch_size] < 0:
                raise ValueError(
                    f"the step costs at batch size {batch_size} have a time that is not positive"
                )

    @staticmethod
    def from_steps(step_s: Mapping[int, Mapping[int, float]]) -> StepCosts:
        """Split the durations of whole steps, step_s[b][k], into verification and drafting.

        A server exposes only their sum. A target step that verifies k + 1 rows for each of b
        requests computes as much as a step without a draft for b * (k + 1) requests, whose duration
        is known from the steps with k = 0. The rest of the step is its k draft steps. Whatever the
        split, the two parts add up to the measured step.
        """
        plain_s = {b: by_k[0] for b, by_k in step_s.items() if 0 in by_k}
        draft_s = {b: _draft_step_s(b, by_k, plain_s) for b, by_k in step_s.items()}
        return StepCosts(
            target_s={
                b: {k: s - k * draft_s[b] for k, s in by_k.items()} for b, by_k in step_s.items()
            },
            draft_s=draft_s,
        )

    @property
    def batch_sizes(self) -> list[int]:
        return sorted(self.target_s)

    def step_s(self, batch_size: float, num_speculative_tokens: int) -> float:
        """Duration in seconds of a whole step.

        The step drafts and verifies k tokens for each of b requests.
        """
        return self.verify_s(batch_size, num_speculative_tokens + 1) + self.propose_s(
            batch_size, num_speculative_tokens
        )

    def verify_s(self, batch_size: float, rows: float) -> float:
        """Duration in seconds of a target step with `rows` rows per request on average."""
        # Interpolate first along k at every measured batch size, then along the batch size.
        steps = {b: _line(by_k, rows - 1) for b, by_k in self.target_s.items()}
        return _line(steps, batch_size)

    def propose_s(self, batch_size: float, num_speculative_tokens: int) -> float:
        """Time in seconds to draft k tokens for each of b requests."""
        return num_speculative_tokens * _line(self.draft_s, batch_size)


def count_requests(load: int | str) -> str:
    return f"{load} request{'' if int(load) == 1 else 's'}"


def _draft_step_s(
    batch_size: int, step_s: Mapping[int, float], plain_s: Mapping[int, float]
) -> float:
    """Time per draft token, excluding verification, in seconds: the median over the measured k."""
    drafted = {k: s for k, s in step_s.items() if k}
    if not drafted or not plain_s:
        return 0.0
    # E.g. for b = 2 and k = 3, verification costs as much as a plain step of 8 requests. The rest
    # is three draft steps.
    each = [(s - _line(plain_s, batch_size * (k + 1))) / k for k, s in drafted.items()]
    most = 0.9 * min(
        s / k for k, s in drafted.items()
    )  # noise must not make the verification time zero or negative
    return min(max(statistics.median(each), 0.0), most)


def _line(points: Mapping[int, float], x: float) -> float:
    """Linear interpolation at x.

    The line is constant before the first point and extrapolated after the last, but never
    downwards.
    """
    known = sorted(points.items())
    if x <= known[0][0] or len(known) == 1:
        return known[0][1]
    (x0, y0), (x1, y1) = next(
        (pair for pair in itertools.pairwise(known) if x <= pair[1][0]), known[-2:]
    )
    # If the last two points fall, this is noise. Extrapolating it would reach a time below 0.
    slope = (y1 - y0) / (x1 - x0)
    return y0 + (x - x0) * slope if x <= x1 else y1 + (x - x1) * max(slope, 0.0)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    batch_size: int
    num_speculative_tokens: int
    """Number of draft tokens. 0 means no speculation."""
    tau: float
    """Tokens per request and step."""
    step_s: float
    tokens_per_s: float
    """Output tokens per second of all requests."""
    speedup: float
    """Ratio of tokens_per_s to tokens/s without speculation at the same batch size."""


@dataclass(frozen=True, kw_only=True)
class AdaptivePoint:
    """Forecast tau and verified rows per step at a survival threshold."""

    threshold: float
    tau: float
    rows: float


@dataclass(frozen=True, kw_only=True)
class AdaptivePrediction(Prediction):
    """The speed with adaptive verification: all tokens are drafted, and some are verified."""

    threshold: float
    rows_per_token: float
    """Verified rows per output token."""


def predict_adaptive(
    curve: Sequence[AdaptivePoint],
    costs: StepCosts,
    *,
    batch_size: int,
    num_speculative_tokens: int,
) -> AdaptivePrediction:
    """Return the threshold with the most tokens/s at a batch size. Ties go to the fewest rows."""

    def predict(point: AdaptivePoint) -> AdaptivePrediction:
        step_s = costs.verify_s(batch_size, point.rows)
        step_s += costs.propose_s(batch_size, num_speculative_tokens)
        return AdaptivePrediction(
            batch_size=batch_size,
            num_speculative_tokens=num_speculative_tokens,
            tau=point.tau,
            step_s=step_s,
            tokens_per_s=batch_size * point.tau / step_s,
            speedup=point.tau * costs.step_s(batch_size, 0) / step_s,
            threshold=point.threshold,
            rows_per_token=point.rows / point.tau,
        )

    return max(map(predict, curve), key=lambda row: (row.tokens_per_s, -row.rows_per_token))


def predict_speed(
    acceptance_per_position: Sequence[float],
    costs: StepCosts,
    *,
    batch_size: int,
    num_speculative_tokens: int,
) -> Prediction:
    """The speed at batch size b with k draft tokens: b * tau_k / step(b, k), in tokens/s."""
    emitted = tau(acceptance_per_position[:num_speculative_tokens])
    step_s = costs.step_s(batch_size, num_speculative_tokens)
    return Prediction(
        batch_size=batch_size,
        num_speculative_tokens=num_speculative_tokens,
        tau=emitted,
        step_s=step_s,
        tokens_per_s=batch_size * emitted / step_s,
        speedup=emitted * costs.step_s(batch_size, 0) / step_s,
    )


@dataclass(frozen=True, kw_only=True)
class Range:
    """Batch sizes from first to last, inclusive, that share a best number of draft tokens.

    A number of 0 means no speculation.
    """

    first: int
    last: int
    num_speculative_tokens: int


@dataclass(frozen=True, kw_only=True)
class Advice:
    table: tuple[Prediction, ...]
    """Predictions for every measured batch size and number of draft tokens."""
    schedule: tuple[Range, ...]
    """Best number of draft tokens by batch size, as measured."""

    @property
    def sentence(self) -> str:
        """The schedule in words: "best k = 4 up to 8 requests, k = 2 up to 48, off above 48"."""
        *bounded, last = self.schedule
        best = [
            f"k = {r.num_speculative_tokens}" if r.num_speculative_tokens else "off"
            for r in self.schedule
        ]
        if best == ["off"]:
            return f"speculation does not pay at any batch size up to {last.last}: leave it off"
        if not bounded:
            return f"best {best[0]} up to {count_requests(last.last)}, the largest number measured"
        limits = [
            f"up to {count_requests(bounded[0].last)}",
            *(f"up to {r.last}" for r in bounded[1:]),
        ]
        limits.append(f"above {bounded[-1].last}")
        sentence = ", ".join(f"{k} {limit}" for k, limit in zip(best, limits, strict=True))
        return sentence if best[0] == "off" else f"best {sentence}"

    def speculative_config(self, draft: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return vLLM's --speculative-config for a draft. None if it should not be served.

        It starts with {"method": ..., "model": ...}. `num_speculative_tokens_per_batch_size`
        contains ranges [first, last, k] with both ends included. For batch sizes above the last
        range, vLLM uses the k of that range. A draft for which `has_fixed_tokens` is true gets one
        number for all batch sizes: the best on average.
        """
        most = max(r.num_speculative_tokens for r in self.schedule)
        if most == 0:
            return None
        if has_fixed_tokens(draft):
            return {**draft, "num_speculative_tokens": self._best_of_all()}
        config = {**draft, "num_speculative_tokens": most}
        if len(self.schedule) > 1:
            config["num_speculative_tokens_per_batch_size"] = [
                [r.first, r.last, r.num_speculative_tokens] for r in self.schedule
            ]
        return config

    def _best_of_all(self) -> int:
        """The number of draft tokens above 0 with the highest mean speed-up over batch sizes."""
        speedups: dict[int, float] = {}
        for row in self.table:
            speedups[row.num_speculative_tokens] = (
                speedups.get(row.num_speculative_tokens, 0.0) + row.speedup
            )
        # All k have the same batch sizes, so the highest sum is the highest mean. -k prefers the
        # smaller k.
        return max((k for k in speedups if k), key=lambda k: (speedups[k], -k))


def advise(
    acceptance_per_position: Sequence[float],
    costs: StepCosts,
    *,
    choices: Iterable[int] | None = None,
) -> Advice:
    """Find the best k for every batch size from acceptance by position and measured step costs.

    `choices` are the values of k to choose from besides 0; by default, all values with a measured
    acceptance. If several are equally fast, the smallest is chosen, because it leaves more of the
    engine to other requests.

    Raises:
        ValueError: acceptance is empty or malformed, or was not measured for all of `choices`.
    """
    rates = tuple(acceptance_per_position)
    # The margin of 1e-9 is needed because rates are rounded sums, and equal rates may differ in the
    # last bit.
    if not rates or not all(
        0 <= now <= before + 1e-9 for before, now in itertools.pairwise((1.0, *rates))
    ):
        raise ValueError(
            f"acceptance by position must be non-increasing and between 0 and 1, got {list(rates)}"
        )
    ks = sorted({0, *(choices if choices is not None else range(1, len(rates) + 1))})
    if ks[0] < 0 or ks[-1] > len(rates):
        raise ValueError(
            f"acceptance was measured for k = 1 to {len(rates)}, not for all of {ks[1:]}"
        )

    def row(batch_size: int, k: int) -> Prediction:
        return predict_speed(rates, costs, batch_size=batch_size, num_speculative_tokens=k)

    def best(batch_size: int) -> int:
        return max(ks, key=lambda k: (row(batch_size, k).tokens_per_s, -k))

    batch_sizes = range(1, costs.batch_sizes[-1] + 1)
    # Group consecutive batch sizes with the same best k: [4, 4, 2, 2, 0] becomes 1-2: 4, 3-4: 2, 5:
    # 0.
    groups = [(k, list(same)) for k, same in itertools.groupby(batch_sizes, key=best)]
    return Advice(
        table=tuple(row(b, k) for b in costs.batch_sizes for k in ks),
        schedule=tuple(
            Range(first=same[0], last=same[-1], num_speculative_tokens=k) for k, same in groups
        ),
    )
