"""How many tokens to draft: what each number of draft tokens is worth at each batch size, and what to tell the engine.

b = batch size, k = num_speculative_tokens, c_j = acceptance per position.

    tokens/s(b, k) = b * (1 + c_1 + ... + c_k) / (target step(b, k) + k * draft step(b))

Leviathan et al. (arXiv 2211.17192, theorem 3.8) with an acceptance of its own for every position, so that nothing need
be independent, and with step times that grow with the batch: the goodput that Liu et al. (SmartSpec/TurboSpec, arXiv
2406.14066) maximise at every step. At small batches a target step takes as long for k + 1 rows as for one, at large
ones k + 1 times as long, and drafting no longer pays.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from eval.acceptance import tau

V = TypeVar("V")

FIXED = ("medusa", "suffix")
"""Methods whose proposers in vLLM end the engine where a step asks for another number of tokens."""

STEP_COSTS_VERSION = 1
"""Of `StepCosts.to_json`."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds that an engine's steps take, measured. Between the measured points both are linear.

    Raises: ValueError where a batch size lacks the step without a draft or its draft step, or a time is not positive.
    """

    target_s: Mapping[int, Mapping[int, float]]
    """target_s[b][k]: a target step that verifies k + 1 rows of each of b requests; k = 0 is a step without a draft."""
    draft_s: Mapping[int, float]
    """draft_s[b]: proposing one more token for each of b requests."""

    def __post_init__(self) -> None:
        if not self.target_s or self.target_s.keys() != self.draft_s.keys() or min(self.target_s) < 1:
            raise ValueError(
                f"step costs need the same batch sizes for target and draft, got {sorted(self.target_s)} "
                f"and {sorted(self.draft_s)}"
            )
        for batch_size, by_k in self.target_s.items():
            if 0 not in by_k:
                raise ValueError(f"the step costs at batch size {batch_size} lack a step without draft tokens (k = 0)")
            if min(by_k.values()) <= 0 or self.draft_s[batch_size] < 0:
                raise ValueError(f"a step at batch size {batch_size} takes no time")

    @staticmethod
    def from_steps(step_s: Mapping[int, Mapping[int, float]]) -> StepCosts:
        """The costs of whole steps: step_s[b][k], drafting and verification together, as a server shows them.

        A target step that verifies k + 1 rows of b requests computes as much as one that writes a token for b * (k + 1)
        requests, which the steps without a draft tell; what a step takes longer than that is its k draft steps. The
        sum of both parts is the measured step, whatever their split.
        """
        plain_s = {b: by_k[0] for b, by_k in step_s.items() if 0 in by_k}
        draft_s = {b: _draft_step_s(b, by_k, plain_s) for b, by_k in step_s.items()}
        return StepCosts(
            target_s={b: {k: s - k * draft_s[b] for k, s in by_k.items()} for b, by_k in step_s.items()},
            draft_s=draft_s,
        )

    @property
    def batch_sizes(self) -> list[int]:
        """Where it was measured, ascending."""
        return sorted(self.target_s)

    def step_s(self, batch_size: float, num_speculative_tokens: int) -> float:
        """Seconds of a whole step: k draft tokens proposed and verified for each of b requests."""
        steps = {b: _line(by_k, num_speculative_tokens) for b, by_k in self.target_s.items()}
        return _line(steps, batch_size) + num_speculative_tokens * _line(self.draft_s, batch_size)

    def draft_cost(self, batch_size: float) -> float:
        """c = draft step / target step without a draft: Leviathan's cost coefficient."""
        return _line(self.draft_s, batch_size) / self.step_s(batch_size, 0)

    def to_json(self) -> dict[str, Any]:
        return {
            "version": STEP_COSTS_VERSION,
            "target_s": {str(b): {str(k): s for k, s in sorted(by_k.items())} for b, by_k in _sorted(self.target_s)},
            "draft_s": {str(b): s for b, s in _sorted(self.draft_s)},
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> StepCosts:
        """Raises: ValueError for another version, or a value that is no step costs."""
        if value.get("version") != STEP_COSTS_VERSION:
            raise ValueError(f"step costs of version {value.get('version')}, this redraft reads {STEP_COSTS_VERSION}")
        try:
            return StepCosts(
                target_s={int(b): {int(k): float(s) for k, s in by_k.items()} for b, by_k in value["target_s"].items()},
                draft_s={int(b): float(s) for b, s in value["draft_s"].items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"these are no step costs: {error!r}") from error


def _draft_step_s(batch_size: int, step_s: Mapping[int, float], plain_s: Mapping[int, float]) -> float:
    """Median over the measured k of what a step takes beyond its verification, per draft token, in seconds."""
    drafted = {k: s for k, s in step_s.items() if k}
    if not drafted or not plain_s:
        return 0.0
    each = [(s - _line(plain_s, batch_size * (k + 1))) / k for k, s in drafted.items()]
    most = 0.9 * min(s / k for k, s in drafted.items())  # noise must not leave verification without any time
    return min(max(statistics.median(each), 0.0), most)


def _line(points: Mapping[int, float], x: float) -> float:
    """The value at x of the line through `points`: flat before the first, straight on behind the last, never down."""
    known = _sorted(points)
    if x <= known[0][0] or len(known) == 1:
        return known[0][1]
    (x0, y0), (x1, y1) = next((pair for pair in itertools.pairwise(known) if x <= pair[1][0]), known[-2:])
    slope = (y1 - y0) / (x1 - x0)
    return y0 + (x - x0) * slope if x <= x1 else y1 + (x - x1) * max(slope, 0.0)


def _sorted(points: Mapping[int, V]) -> list[tuple[int, V]]:
    return sorted(points.items())


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the model expects of one number of draft tokens at one batch size."""

    batch_size: int
    num_speculative_tokens: int
    """0: no speculation."""
    tau: float
    """Tokens per request and step."""
    step_s: float
    tokens_per_s: float
    """Of all requests together."""
    speedup: float
    """tokens_per_s over that without speculation at the same batch size."""


def expected(
    acceptance_per_position: Sequence[float], costs: StepCosts, *, batch_size: int, num_speculative_tokens: int
) -> Expected:
    """Speed at batch size b with k draft tokens: b * tau_k / step(b, k), in tokens/s."""
    emitted = tau(acceptance_per_position[:num_speculative_tokens])
    step_s = costs.step_s(batch_size, num_speculative_tokens)
    return Expected(
        batch_size=batch_size,
        num_speculative_tokens=num_speculative_tokens,
        tau=emitted,
        step_s=step_s,
        tokens_per_s=batch_size * emitted / step_s,
        speedup=emitted * costs.step_s(batch_size, 0) / step_s,
    )


@dataclass(frozen=True, kw_only=True)
class Range:
    """Batch sizes, both ends included, at which the same number of draft tokens is best; 0 is no speculation."""

    first: int
    last: int
    num_speculative_tokens: int


@dataclass(frozen=True, kw_only=True)
class Advice:
    acceptance_per_position: tuple[float, ...]
    table: tuple[Expected, ...]
    """At every measured batch size, every number of draft tokens from 0."""
    schedule: tuple[Range, ...]
    """The best number of draft tokens for every batch size up to the largest measured."""

    def best(self, batch_size: int) -> int:
        """The best number of draft tokens; beyond the measured batch sizes that of the largest."""
        inside = (r.num_speculative_tokens for r in self.schedule if batch_size <= r.last)
        return next(inside, self.schedule[-1].num_speculative_tokens)

    def at(self, batch_size: int, num_speculative_tokens: int) -> Expected:
        """Raises: KeyError where the table has no such row."""
        for row in self.table:
            if (row.batch_size, row.num_speculative_tokens) == (batch_size, num_speculative_tokens):
                return row
        raise KeyError((batch_size, num_speculative_tokens))

    @property
    def off_from(self) -> int | None:
        """The batch size from which on speculation should be off; None where it pays at the largest measured."""
        last = self.schedule[-1]
        return last.first if last.num_speculative_tokens == 0 else None

    @property
    def sentence(self) -> str:
        """The schedule in words: "best k = 4 up to 8 requests, 2 up to 48, off above 48"."""
        ks = [r.num_speculative_tokens for r in self.schedule]
        if ks == [0]:
            return f"speculation does not pay at any batch size up to {self.schedule[-1].last}: leave it off"
        if len(ks) == 1:
            return f"best k = {ks[0]} up to {self.schedule[0].last} requests, the most that was measured"
        words = [str(k) if k else "off" for k in ks]
        limits = [f"up to {r.last}" for r in self.schedule[:-1]] + [f"above {self.schedule[-2].last}"]
        limits[0] += " requests"
        head = "best k = " if ks[0] else ""
        return head + ", ".join(f"{word} {limit}" for word, limit in zip(words, limits, strict=True))

    def speculative_config(self, draft: Mapping[str, Any]) -> dict[str, Any] | None:
        """vLLM's --speculative-config for a draft ({"method": ..., "model": ...}); None where it should not have one.

        `num_speculative_tokens_per_batch_size` holds [first, last, k], both ends included; behind the last range vLLM
        goes on with its k. A draft of FIXED methods has one number for all batch sizes: the best on their average.
        """
        most = max(r.num_speculative_tokens for r in self.schedule)
        if most == 0:
            return None
        if draft.get("method") in FIXED:
            return {**draft, "num_speculative_tokens": self._best_of_all()}
        config = {**draft, "num_speculative_tokens": most}
        if len(self.schedule) > 1:
            config["num_speculative_tokens_per_batch_size"] = [
                [r.first, r.last, r.num_speculative_tokens] for r in self.schedule
            ]
        return config

    def _best_of_all(self) -> int:
        """The number above 0 whose speed-ups at the measured batch sizes are the highest on average."""
        speedups: dict[int, float] = {}
        for row in self.table:
            speedups[row.num_speculative_tokens] = speedups.get(row.num_speculative_tokens, 0.0) + row.speedup
        return max((k for k in speedups if k), key=lambda k: (speedups[k], -k))

    def to_json(self) -> dict[str, Any]:
        return {
            "sentence": self.sentence,
            "off_from": self.off_from,
            "acceptance_per_position": list(self.acceptance_per_position),
            "schedule": [[r.first, r.last, r.num_speculative_tokens] for r in self.schedule],
            "table": [vars(row) for row in self.table],
        }


def advise(
    acceptance_per_position: Sequence[float], costs: StepCosts, *, choices: Iterable[int] | None = None
) -> Advice:
    """What k is worth at every batch size, from the acceptance by position and measured step costs.

    `choices` are the k to choose from beside 0, by default every one that acceptance was measured for. Between equals
    the smaller k is better: it leaves more of the engine to others.

    Raises: ValueError where acceptance is empty, no acceptance, or not measured for a k of `choices`.
    """
    rates = tuple(acceptance_per_position)
    if not rates or not all(0 <= now <= before + 1e-9 for before, now in itertools.pairwise((1.0, *rates))):
        raise ValueError(f"acceptance by position falls from at most 1 to at least 0, got {list(rates)}")
    ks = sorted({0, *(choices if choices is not None else range(1, len(rates) + 1))})
    if ks[0] < 0 or ks[-1] > len(rates):
        raise ValueError(f"acceptance was measured for k = 1 to {len(rates)}, not for all of {ks[1:]}")

    def row(batch_size: int, k: int) -> Expected:
        return expected(rates, costs, batch_size=batch_size, num_speculative_tokens=k)

    def best(batch_size: int) -> int:
        return max(ks, key=lambda k: (row(batch_size, k).tokens_per_s, -k))

    batch_sizes = range(1, costs.batch_sizes[-1] + 1)
    groups = [(k, list(same)) for k, same in itertools.groupby(batch_sizes, key=best)]
    return Advice(
        acceptance_per_position=rates,
        table=tuple(row(b, k) for b in costs.batch_sizes for k in ks),
        schedule=tuple(Range(first=same[0], last=same[-1], num_speculative_tokens=k) for k, same in groups),
    )
