"""Evidence for a pace, by cell: step times, and the acceptance of draft tokens.

A cell is a number of decoding requests together with a context length. Measurements in one cell
also count in others, with a weight that falls with the distance, because most cells have no
evidence of their own when they are first used.

N = probes, R = points to predict, M = numbers of draft tokens above 0, F = features.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MEMORY_STEPS = 4000  # Number of steps until the weight of acceptance and times falls to 1/e.
# Maximum weight of the remembered acceptance at a position, in drafts.
MEMORY_DRAFTS = 4000
MOST_PROBES = 128  # The newest ones count.
# With this many drafts, a cell's own acceptance counts as much as other cells' acceptance.
POOL = 100
BORROWED = 60  # Maximum weight, in drafts, of other context lengths.

OFFSET, SLOPE = 0.06, 0.1
"""Prior before any measurement: log x = OFFSET + SLOPE g log2(1 + tokens), with g = 1 +
log2(requests) / 3. A token costs more if many requests keep the machine busy, but it is unknown how
much more.
"""

SPREAD_OFFSET, SPREAD_SLOPE = 0.12, 0.15
"""Standard deviations of OFFSET and SLOPE."""

OCTAVES, CONTEXT_OCTAVES = 1.5, 2.5
"""Both change over these length scales, in octaves of the number of requests and of the context
length.
"""

SPREAD_ARM, ARM_OCTAVES = 0.05, 0.5  # standard deviation from that line, e.g. because of tile sizes


class Cell(NamedTuple):
    """A group of steps that are treated as equivalent."""

    requests: int
    """Number of decoding requests, rounded up."""
    context: int
    """Mean text length in tokens, rounded up."""


def list_requests(most: int) -> list[int]:
    """Return the numbers of requests that are distinguished: each up to 8, then four per octave."""
    numbers = list(range(1, 9))
    while numbers[-1] < most:
        numbers.append(numbers[-1] + (1 << (numbers[-1].bit_length() - 3)))
    return numbers[: bisect_left(numbers, most) + 1]


def list_contexts(most: int) -> list[int]:
    """Return the context lengths that are distinguished: one per octave, from 1,024 tokens."""
    lengths = [1024]
    while lengths[-1] < most:
        lengths.append(2 * lengths[-1])
    return lengths


@dataclass(kw_only=True)
class Probe:
    """A measured ratio of step times."""

    cell: Cell
    tokens: int
    base: int
    """Number of draft tokens before and after the probe."""
    log_ratio: float
    """log x[tokens] - log x[base]."""
    variance: float
    """Variance of the ratio, which grows with the probe's age."""


class StepTimes:
    """Estimates x, a step's time relative to one without drafts, by cell and draft tokens.

    log x is modelled as a Gaussian process (Rasmussen and Williams, 2006, chapter 2) over requests,
    context length and number of tokens.
    """

    def __init__(self, arms: Sequence[int]) -> None:
        self.arms = list(arms)
        self.probes: list[Probe] = []
        tokens_M = np.log2(1 + np.array(arms[1:], float))
        line_M2 = np.stack([np.full_like(tokens_M, SPREAD_OFFSET), SPREAD_SLOPE * tokens_M], 1)
        self._own_MF = np.hstack([line_M2, SPREAD_ARM * np.diag(tokens_M)])
        """Features for one request."""
        self._mean_F = np.zeros(2 + len(tokens_M))
        self._mean_F[:2] = OFFSET / SPREAD_OFFSET, SLOPE / SPREAD_SLOPE
        self._found: dict[Cell, list[tuple[float, float]]] = {}
        self._solved: tuple[Array, Array, Array, Array] | None = None

    def find(self, cell: Cell, arm: int) -> tuple[float, float]:
        """Return x and its relative error. x is at least 1: no draft shortens a step."""
        if cell not in self._found:
            self._found[cell] = self._predict(cell)
        return self._found[cell][self.arms.index(arm) - 1]

    def learn(self, probes: Sequence[Probe]) -> None:
        self.probes = [*self.probes, *probes][-MOST_PROBES:]
        self._forget_found()

    def age(self, steps: int) -> None:
        """Age the evidence by this number of steps."""
        for probe in self.probes:
            probe.variance *= math.exp(steps / MEMORY_STEPS)
        self._forget_found()

    def _forget_found(self) -> None:
        self._found, self._solved = {}, None

    def _predict(self, cell: Cell) -> list[tuple[float, float]]:
        own_MF = self._features(cell)
        mean_M, variance_M = own_MF @ self._mean_F, np.square(own_MF).sum(1)
        if self.probes:
            if self._solved is None:
                self._solved = self._solve()
            at_N2, differs_NF, inverse_NN, weights_N = self._solved
            toward_MN = _covary(_places([cell]), own_MF, at_N2, differs_NF)
            mean_M = mean_M + toward_MN @ weights_N
            variance_M = variance_M - ((toward_MN @ inverse_NN) * toward_MN).sum(1)
        x_M, error_M = np.exp(np.maximum(mean_M, 0)), np.sqrt(np.maximum(variance_M, 0))
        return list(zip(x_M.tolist(), error_M.tolist(), strict=True))

    def _solve(self) -> tuple[Array, Array, Array, Array]:
        """Prepare the probes for the predictions of the Gaussian process.

        Returns the probes' positions [N, 2] and features [N, F], the inverse of their covariance
        [N, N], and the weights [N] of their residuals (measured minus expected log ratios).
        """
        at_N2 = _places([probe.cell for probe in self.probes])
        differs_NF = np.zeros((len(self.probes), len(self._mean_F)))
        for differs_F, probe in zip(differs_NF, self.probes, strict=True):
            for arm, sign in ((probe.tokens, 1), (probe.base, -1)):
                if arm:
                    differs_F += sign * self._features(probe.cell)[self.arms.index(arm) - 1]
        surprise_N = [probe.log_ratio for probe in self.probes] - differs_NF @ self._mean_F
        covariance_NN = _covary(at_N2, differs_NF, at_N2, differs_NF)
        covariance_NN += np.diag([probe.variance for probe in self.probes])
        inverse_NN = np.linalg.inv(covariance_NN).astype(np.float64)
        return at_N2, differs_NF, inverse_NN, inverse_NN @ surprise_N

    def _features(self, cell: Cell) -> Array:
        """Return features [M, F] in standard deviations: offset, slope, number of tokens."""
        features_MF = self._own_MF.copy()
        features_MF[:, 1] *= 1 + math.log2(cell.requests) / 3
        return features_MF


def _places(cells: Sequence[Cell]) -> Array:
    places_R2: Array = np.log2(np.array(cells, float))
    return places_R2


def _covary(ours_R2: Array, ours_RF: Array, theirs_N2: Array, theirs_NF: Array) -> Array:
    """Return the covariances [R, N] of the log ratios with these features at these positions."""
    apart_RN2 = np.square(ours_R2[:, None] - theirs_N2)
    near_RN, alike_RN = (
        np.exp(-0.5 * (apart_RN2[..., 0] / octaves**2 + apart_RN2[..., 1] / CONTEXT_OCTAVES**2))
        for octaves in (OCTAVES, ARM_OCTAVES)
    )
    lines_RN, arms_RN = (
        ours_RF[:, part] @ theirs_NF[:, part].T for part in (slice(2), slice(2, None))
    )
    return near_RN * lines_RN + alike_RN * arms_RN


@dataclass
class Tally:
    """Counts of drafts by position."""

    tried: list[float]
    hit: list[float]
    """Number of drafts in which this token and all earlier ones were accepted, by position."""

    def scale(self, factors: Sequence[float]) -> None:
        for counts in (self.tried, self.hit):
            counts[: len(factors)] = [
                count * factor for count, factor in zip(counts, factors, strict=False)
            ]


Row = tuple[int | None, int | None]
"""(requests, context length) of a cell. None means any number of requests, or any context
length.
"""

ALL: Row = (None, None)


@dataclass
class Acceptance:
    """The fraction of drafts that are accepted up to each position, by cell."""

    most: int
    """Number of positions."""
    contexts: Sequence[int]
    tallies: dict[Row, Tally] = field(default_factory=dict)
    _found: dict[Cell, list[tuple[float, float]]] = field(default_factory=dict)

    def learn(self, cell: Cell, accepted: Sequence[int], verified: int) -> None:
        """Add drafts of `verified` tokens, given their numbers of accepted tokens."""
        if not (accepted and verified):
            return
        keep = max(0.0, 1 - len(accepted) / MEMORY_DRAFTS)
        hits = [sum(count > i for count in accepted) for i in range(verified)]
        rows: list[Row] = [cell, (cell.requests, None), (None, cell.context), ALL]
        for row in rows:
            tally = self.tallies.setdefault(row, self._tally(row))
            tally.scale([keep] * verified)
            for i, count in enumerate(hits):
                tally.tried[i] += len(accepted)
                tally.hit[i] += count
        self._found = {}

    def find(self, cell: Cell, arm: int) -> tuple[float, float]:
        """Return tau for `arm` draft tokens, and its standard error."""
        if not arm:
            return 1.0, 0.0
        if cell not in self._found:
            self._found[cell] = self._estimate(cell)
        return self._found[cell][arm - 1]

    def fade(self, share: float) -> None:
        """Reduce the weight of all evidence by this fraction."""
        for tally in self.tallies.values():
            tally.scale([1 - share] * self.most)
        self._found = {}

    def swapped(self) -> None:
        """Reduce the weight of all evidence sharply, because the draft has changed."""
        # The old estimate remains with a low weight, so that a good draft is not abandoned at once.
        keep = [min(1.0, 3 / max(tried, 1e-9)) for tried in self._tally(ALL).tried]
        for tally in self.tallies.values():
            tally.scale(keep)
        self._found = {}

    def _tally(self, row: Row) -> Tally:
        return self.tallies.get(row) or Tally([0.0] * self.most, [0.0] * self.most)

    def _estimate(self, cell: Cell) -> list[tuple[float, float]]:
        every, own = self._tally(ALL), self._tally(cell)
        beside, long = self._tally((cell.requests, None)), self._tally((None, cell.context))
        others = [
            (math.exp(-0.5 * (math.log2(other / cell.context) / CONTEXT_OCTAVES) ** 2), tally)
            for other in self.contexts
            if other != cell.context and (tally := self.tallies.get((None, other)))
        ]
        tau, error, found = 1.0, 0.0, []
        for i in range(self.most):
            # The prior, which halves from token to token, counts as two drafts.
            rate = (every.hit[i] + 2 * 0.5 ** (i + 1)) / (every.tried[i] + 2)
            # A draft is accepted less often in long texts, and a lookup may propose fewer tokens if
            # there are many requests. Both change the acceptance of all drafts.
            near = sum(weight * tally.tried[i] for weight, tally in others)
            near_hit = sum(weight * tally.hit[i] for weight, tally in others)
            by_context = _pool(long, i, (near_hit + 2 * rate) / (near + 2))
            shifted = min(1.0, by_context * _pool(beside, i, rate) / rate)
            accepted = _pool(own, i, shifted)
            evidence = long.tried[i] + min(near, BORROWED) + 2
            tau += accepted
            error += math.sqrt(max(0.0, accepted * (1 - accepted)) / evidence)
            found.append((tau, error))
        return found


def _pool(tally: Tally, position: int, otherwise: float) -> float:
    """Return the rate at a position. The prior `otherwise` has the weight of POOL drafts."""
    return (tally.hit[position] + POOL * otherwise) / (tally.tried[position] + POOL)
