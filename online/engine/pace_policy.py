"""The number of draft tokens of the next step: numbers in, a number out.

It reads no clock.

An arm is a number of draft tokens per request; 0 is "off". The speed against off is tau / x: tokens
per step, tau, from the acceptance by position, which differs little between batch sizes unless a
lookup proposes less in larger ones; x is the time of a step with the arm relative to one without.

    base base base | arm arm arm arm arm | base base base
    └─ residuals ─┘ └────── probe ──────┘ └─ residuals ─┘
    log x[arm] - log x[base] = mean residual of the probe - mean residual around it

A residual is the log of a step's time less the mean for this batch size and base. So a probe may
run while requests come and go, and a machine whose speed drifts misleads nobody. log x is a
Gaussian process over batch size and arm (Rasmussen and Williams, 2006): a probe at 4 requests tells
nearly as much about 5, and a little about 16.

Time lost in probes is paid from an account, which gets SHARE of all busy time, and no more when a
draft or target changes: a draft that never pays costs no more. Knowledge fades, so a question opens
again after a change of load or machine.
"""

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from redraft.online.engine.config import list_arms

SHARE = 0.0085  # Part of the busy time for probes.
MOST_STEPS = 16  # Steps' worth of time on the account, at the start and at most.
STEPS, AROUND = 5, 12  # Steady steps of a probe, and steps without a probe on both sides.
MARGIN = 0.015  # Relative gain for which the base changes.
DOUBT = 1.6  # Standard errors by which an arm may be better than it looks, to be worth a probe.
MEMORY_STEPS = 4000  # Steps after which acceptance and times count 1/e.
MEMORY_DRAFTS = 4000  # The most drafts that the acceptance of a position remembers.
POOL = 100  # Drafts at a batch size, after which its own acceptance counts as much as that of all

OFFSET, SLOPE = 0.06, 0.1
"""log x = OFFSET + SLOPE g log2(1 + arm), before anything is known, with g = 1 + log2(size) / 3: a
token costs more where requests keep the machine busy, and nobody knows how much more."""

SPREAD_OFFSET, SPREAD_SLOPE, OCTAVES = 0.12, 0.15, 1.5
"""Standard deviations of both, and the batch sizes over which they change."""

SPREAD_ARM, ARM_OCTAVES = 0.05, 0.5  # of an arm's distance from that line, e.g. by tiles
OFF_AFTER = 2  # probes of others, then off is due: only off shows whether drafting pays
KNOWN = 4  # Steps with an arm at a batch size, after which the mean time is a reference.


def make_sizes(most: int) -> list[int]:
    """Batch sizes that are told apart: each up to 8, then four an octave."""
    sizes = list(range(1, 9))
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 3)))
    return sizes[: bisect_left(sizes, most) + 1]


@dataclass
class Level:
    """Mean log time of the steps with one arm at one batch size."""

    mean: float = 0.0
    count: int = 0

    def learn(self, value: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) / min(self.count, 50)


@dataclass
class Probe:
    arm: int
    before: float
    """Mean residual of the steps before."""
    residuals: list[tuple[int, int, float]] = field(default_factory=list)
    """(batch size's index, base, residual) of the steady steps."""
    num_steps: int = 0
    is_over: bool = False


@dataclass(frozen=True)
class Speed:
    """An arm at a batch size: tokens/s against off."""

    mean: float
    error: float
    """Standard error, relative."""

    def at(self, errors: float) -> float:
        return self.mean * (1 + errors * self.error)


OFF = Speed(1.0, 0.0)


@dataclass(frozen=True)
class Known:
    """A policy's knowledge, for another one with the same arms and sizes."""

    log_x: list[float]
    variance: list[float]
    tried: list[list[float]]
    hit: list[list[float]]


class Policy:
    """Ask `choose` before a step, and tell `observe` what it took."""

    def __init__(self, most: int, max_size: int, *, is_adaptive: bool = False) -> None:
        self.arms = list_arms(most, is_adaptive=is_adaptive)
        self.sizes = make_sizes(max_size)
        self.base = [0] * len(self.sizes)
        self.steps = [0] * len(self.sizes)
        # By batch size and position; the last row has all batch sizes.
        self.tried, self.hit = np.zeros((2, len(self.sizes) + 1, most))
        self._guess = 0.5 ** np.arange(1, most + 1)
        self.account_s = math.inf  # and so the most, at the first look
        self.lost_s = self.busy_s = self.prompt_s = 0.0
        self.num_probes = 0
        self._levels: dict[tuple[int, int], Level] = {}
        self._recent: deque[float] = deque(maxlen=AROUND)
        self._drift = 0.0
        self._variance = 0.01
        self._probe: Probe | None = None
        self._fade = 0
        self._since_off = OFF_AFTER
        octaves = np.log2(np.array(self.sizes, float))
        apart = octaves[:, None] - octaves
        tokens = np.log2(1 + np.array(self.arms[1:], float))
        costs = np.outer(1 + octaves / 3, tokens).ravel()
        near = np.kron(_near(apart, OCTAVES), np.ones((len(tokens), len(tokens))))
        arms = np.kron(_near(apart, ARM_OCTAVES), np.diag(tokens**2))
        self._prior = OFFSET + SLOPE * costs
        self._prior_covariance = near * (
            SPREAD_OFFSET**2 + SPREAD_SLOPE**2 * np.outer(costs, costs)
        )
        self._prior_covariance += SPREAD_ARM**2 * arms
        self._log_x, self._covariance = self._prior.copy(), self._prior_covariance.copy()
        self._believe()

    # --- decisions

    def choose(self, size: int, *, is_read: bool = True) -> int:
        """The arm of the next step, for so many decoding requests.

        A probe of acceptance begins only if `is_read`: if the draft has read the text.
        """
        place = self._place(size)
        self._update_base(place)
        if self._probe and not self._probe.is_over:
            if self._probe.arm != self.base[place] and self._probe.num_steps < 3 * STEPS:
                return self._probe.arm
            self._end_probe()
        elif (
            not self._probe
            and len(self._recent) == AROUND
            and self._is_known(place, self.base[place])
        ):
            arm = self._find_wanted(place)
            if arm is not None and (is_read or not arm) and self._can_pay(place, arm):
                self._probe = Probe(arm, _typical(self._recent))
                return arm
        return self.base[place]

    def speed(self, place: int, arm: int) -> Speed:
        """The estimate for an arm at the batch size of this index, in steps that read no prompt."""
        if not arm:
            return OFF
        x, error = self._times[place][self.arms.index(arm) - 1]
        tau, tau_error = self._taus[place][arm]
        return Speed(tau / x, math.hypot(error, tau_error / tau))

    def known(self) -> Known:
        """All that the next start of this server can use."""
        variance = np.diag(self._covariance)
        return Known(
            self._log_x.tolist(), variance.tolist(), self.tried.tolist(), self.hit.tolist()
        )

    def recall(self, known: Known) -> None:
        """Take another policy's knowledge.

        Raises:
            ValueError: it is that of other arms or sizes, or no knowledge.
        """
        log_x, variance = np.array(known.log_x, float), np.array(known.variance, float)
        tried, hit = np.array(known.tried, float), np.array(known.hit, float)
        is_alike = log_x.shape == variance.shape == self._log_x.shape
        if not is_alike or not tried.shape == hit.shape == self.tried.shape:
            raise ValueError("the pace was learned with other numbers of tokens or requests")
        is_finite = all(np.isfinite(one).all() for one in (log_x, variance, tried, hit))
        if not is_finite or (variance <= 0).any() or (hit < 0).any() or (hit > tried).any():
            raise ValueError("the pace that was learned has impossible numbers")
        self._log_x, self.tried, self.hit = log_x, tried, hit
        # Of the covariance only the diagonal is kept; the prior says what goes together.
        scale = np.sqrt(variance / np.diag(self._prior_covariance))
        self._covariance = self._prior_covariance * np.outer(scale, scale)
        self._believe()

    def swapped(self) -> None:
        """Another version is served, of unknown acceptance and the same cost."""
        # The old one stays as a guess of little weight, or a good draft would be left for a moment.
        keep = np.minimum(1.0, 3 / np.maximum(self.tried[-1], 1e-9))
        self.tried, self.hit = self.tried * keep, self.hit * keep
        self._believe()

    def _update_base(self, place: int) -> None:
        base = self.base[place]
        own = self.speed(place, base)
        if base and own.mean < 1:
            base, own = 0, OFF
        # Nothing is drafted on credit: an arm must beat off even if one error worse than it looks.
        sure = [arm for arm in self.arms[1:] if self.speed(place, arm).at(-1) > 1]
        best = max(sure, key=lambda arm: self.speed(place, arm).mean, default=base)
        if self.speed(place, best).mean > own.mean * (1 + MARGIN):
            base = best
        self.base[place] = base

    def _find_wanted(self, place: int) -> int | None:
        """The arm that is worth a probe."""
        base = self.base[place]
        own = self.speed(place, base)
        if base and (own.at(-DOUBT) < 1 or self._since_off >= OFF_AFTER):
            return 0
        rivals = {arm: self.speed(place, arm).at(DOUBT) for arm in self.arms[1:] if arm != base}
        gains = {arm: (most - own.mean) / self._cost(place, arm) for arm, most in rivals.items()}
        arm = max(gains, key=gains.__getitem__, default=None)
        return arm if arm is not None and rivals[arm] > own.mean * (1 + MARGIN) else None

    def _cost(self, place: int, arm: int) -> float:
        """Time that a step with the arm may lose, relative to one with the base."""
        # Not the mean: an arm one error worse than it looks.
        loss = (
            self.speed(place, self.base[place]).mean / max(0.2, self.speed(place, arm).at(-1)) - 1
        )
        return max(0.03, loss)

    def _can_pay(self, place: int, arm: int) -> bool:
        step_s = math.exp(self._levels[place, self.base[place]].mean + self._drift)
        self.account_s = min(self.account_s, MOST_STEPS * step_s)
        return (STEPS + 1) * step_s * self._cost(place, arm) <= self.account_s

    # --- observations

    def observe(
        self,
        size: int,
        drafted: int,
        verified: int,
        seconds: float,
        accepted: list[int],
        *,
        is_clean: bool,
    ) -> None:
        """One step of `size` decoding requests.

        `verified`: the arm whose tokens it verified. `accepted`: of these, by request. `is_clean`:
        no prompt was read.
        """
        place = self._place(size)
        self.busy_s += seconds
        self.prompt_s += 0.0 if is_clean else seconds
        self.account_s += SHARE * seconds
        self.steps[place] += 1
        self._learn_acceptance(place, verified, accepted)
        self._fade_away()
        probe = self._probe
        is_probe = probe is not None and not probe.is_over and drafted == probe.arm
        if probe and is_probe:
            probe.num_steps += 1
            tokens = (
                1 + sum(accepted) / len(accepted) if accepted else self._taus[place][verified][0]
            )
            self._pay(place, tokens, seconds)
        if not is_clean or drafted != verified or seconds <= 0:
            return
        level = self._levels.setdefault((place, drafted), Level())
        if probe and is_probe:
            if self._is_known(place, self.base[place]):
                reference = self._levels[place, self.base[place]].mean
                probe.residuals.append((place, self.base[place], math.log(seconds) - reference))
            if len(probe.residuals) >= STEPS:
                self._end_probe()
        elif drafted == self.base[place]:
            residual = math.log(seconds) - level.mean
            if level.count >= KNOWN:
                self._recent.append(residual)
                self._drift = _typical(self._recent)
                rest = max(-0.5, min(0.5, residual - self._drift))
                self._variance += (rest**2 - self._variance) / 50
            level.learn(math.log(seconds) - self._drift)
            if probe and probe.is_over and len(self._recent) == AROUND:
                self._settle(probe)

    def _learn_acceptance(self, place: int, verified: int, accepted: list[int]) -> None:
        if not (accepted and verified):
            return
        keep = max(0.0, 1 - len(accepted) / MEMORY_DRAFTS)
        hits = [sum(count > i for count in accepted) for i in range(verified)]
        for row in (place, -1):
            self.tried[row, :verified] = self.tried[row, :verified] * keep + len(accepted)
            self.hit[row, :verified] = self.hit[row, :verified] * keep + hits
        self._add_up()

    def _believe(self) -> None:
        """Update what `speed` reads."""
        places, arms = len(self.sizes), len(self.arms) - 1
        x = np.exp(np.maximum(self._log_x, 0)).reshape(places, arms)
        errors = np.sqrt(np.maximum(np.diag(self._covariance), 0)).reshape(places, arms)
        self._times = [
            list(zip(*pair, strict=True)) for pair in zip(x.tolist(), errors.tolist(), strict=True)
        ]
        self._add_up()

    def _add_up(self) -> None:
        """Tokens per step of a request by batch size and arm, and the standard error.

        A guess that halves from token to token counts as two drafts.
        """
        tried, hit = self.tried[-1] + 2, self.hit[-1] + 2 * self._guess
        rates = (self.hit[:-1] + POOL * hit / tried) / (self.tried[:-1] + POOL)
        errors = np.sqrt(rates * (1 - rates) / tried)
        pairs = np.stack([1 + np.cumsum(rates, 1), np.cumsum(errors, 1)], 2).tolist()
        self._taus = [[(1.0, 0.0), *map(tuple, row)] for row in pairs]

    def _pay(self, place: int, tokens: float, seconds: float) -> None:
        """Pay for a step of a probe.

        The time less that of the base for as many tokens per request.
        """
        base = self.base[place]
        if self._is_known(place, base):
            base_s = math.exp(self._levels[place, base].mean + self._drift)
            loss_s = min(seconds, 3 * base_s) - base_s * tokens / self._taus[place][base][0]
            self.account_s -= loss_s
            self.lost_s += loss_s

    def _end_probe(self) -> None:
        assert self._probe
        self._probe.is_over = True
        self._recent.clear()
        if not self._probe.residuals:
            self._probe = None

    def _settle(self, probe: Probe) -> None:
        """Both sides of a probe are known."""
        after, count = _typical(self._recent), len(probe.residuals)
        around, middle = (
            (probe.before + after) / 2,
            _typical([residual for _, _, residual in probe.residuals]),
        )
        # Each step measures one batch size. All share the error of those around, which a stall
        # makes large.
        variance = (
            self._variance * (1 + count / (2 * AROUND)) + count * (probe.before - after) ** 2 / 4
        )
        for place, base, residual in probe.residuals:
            self._learn_time(
                place,
                probe.arm,
                base,
                max(middle - 0.4, min(middle + 0.4, residual)) - around,
                variance,
            )
        self._believe()
        self._since_off = 0 if not probe.arm else self._since_off + 1
        self.num_probes += 1
        self._probe = None

    def _learn_time(
        self, place: int, arm: int, base: int, log_ratio: float, variance: float
    ) -> None:
        """log x[arm] - log x[base] = log_ratio: a Kalman update."""
        h = np.zeros(len(self._log_x))
        for number, sign in ((arm, 1), (base, -1)):
            if number:
                h[self._index(place, number)] = sign
        toward = self._covariance @ h
        gain = toward / (h @ toward + variance)
        self._log_x += gain * (log_ratio - h @ self._log_x)
        self._covariance -= np.outer(gain, toward)

    def _fade_away(self) -> None:
        self._fade += 1
        if self._fade < 100:
            return
        share, self._fade = self._fade / MEMORY_STEPS, 0
        self._log_x += share * (self._prior - self._log_x)
        self._covariance += share * (self._prior_covariance - self._covariance)
        self.tried, self.hit = self.tried * (1 - share), self.hit * (1 - share)
        self._believe()

    def _place(self, size: int) -> int:
        return min(bisect_left(self.sizes, size), len(self.sizes) - 1)

    def _index(self, place: int, arm: int) -> int:
        return place * (len(self.arms) - 1) + self.arms.index(arm) - 1

    def _is_known(self, place: int, arm: int) -> bool:
        level = self._levels.get((place, arm))
        return level is not None and level.count >= KNOWN


def _near(apart: NDArray[np.float64], octaves: float) -> NDArray[np.float64]:
    return np.exp(-0.5 * (apart / octaves) ** 2)


def _typical(values: deque[float] | list[float]) -> float:
    """The mean, with outliers cut at 0.4 from the median: a stall says nothing about an arm."""
    median = sorted(values)[len(values) // 2]
    return sum(max(median - 0.4, min(median + 0.4, value)) for value in values) / len(values)
