"""How many tokens to draft in the next step: a policy of numbers alone, without clock, torch or vLLM.

An *arm* is a number of draft tokens; arm 0 is "off", and the draft is not called at all. Speed relative to off is

    tau(arm) / x(size, arm)        x = time of a step with the arm / time of a step without a draft

tau comes from acceptance by position, pooled over batch sizes. x comes from one linear Gaussian model of all steps:

    log seconds = level + off(size) + log x(size, arm) + noise        level: the machine's speed, a random walk

Every run of equal steps updates it (a Kalman filter), so an arm is judged against the steps just before and after it,
and a machine that slows down misleads nobody. Batch sizes share what they learn: x is correlated over sizes and arms.

A probe is a few steps with another arm. Time lost in probes is paid from an account, which gets a small share of the
busy time: drafting that does not pay costs no more than this share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SHARE_OPEN, SHARE_SETTLED = 0.008, 0.003
"""Shares of the busy time for probes: while another arm may be better, and otherwise."""
START_STEPS = 10
"""Credit at the start and after a swap, in steps."""
MARGIN = 0.015
"""Relative gain that changes the arm."""
MIN_PROBES = 3
"""Probes at a batch size before drafting begins there: a single one may have met a stall."""
PROBE_STEPS = 6
"""Steps of a probe, without the step that changes the arm."""
REST_STEPS = 12
"""Steps between two probes at least."""
PAUSE_STEPS = 400
"""Steps between two probes if no other arm promises a gain."""
HOPE, CAUTION = 1.5, 1.5
"""Standard errors by which a rival may be better than it looks; by which drafting must be better than off."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
"""Upper ends of the ranges of batch sizes. Larger ones count as the last."""

KNOWN_ERROR = 0.2
"""Standard error of log x up to which an arm of several tokens may be tried."""
DRIFT_VARIANCE = 1e-4
"""Variance of the machine's log speed, per step."""
GUESS = (0.08, 0.08)
"""Guess for x - 1: a part for any draft, and a part per draft token."""
GUESS_ERRORS = (0.2, 0.35, 0.05)
"""Standard errors of log x: of all arms together, of a slope of five tokens, of each arm by itself."""
OCTAVES = 1.2
"""Distance between two batch sizes at which they know half of each other, roughly."""
FORGET_STEPS = 30_000
"""Steps after which half of what is known of x is forgotten."""
WINDOW = 600
"""Requests' steps that acceptance is averaged over, and steps after which it is forgotten without any."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the policy thinks of an arm at a batch size."""

    speed: float
    """Tokens per second relative to off."""
    low: float
    high: float
    """95% interval of `speed`."""


class Acceptance:
    """Acceptance of draft tokens by position, for the most recent steps."""

    def __init__(self, most: int) -> None:
        # Two tokens' worth of a guess that halves from position to position.
        self._guess = 0.5 ** np.arange(1, most + 1)
        self._tried, self._hit = np.zeros(most), np.zeros(most)

    def add(self, limit: int, accepted: int) -> None:
        """Note one request's step, in which up to `limit` tokens could be accepted."""
        keep = 1 - 1 / WINDOW
        self._tried[:limit] = self._tried[:limit] * keep + 1
        self._hit[:limit] = self._hit[:limit] * keep + (np.arange(limit) < accepted)

    def age(self) -> None:
        """Forget a little, after a step in which nothing was tried."""
        self._tried *= 1 - 0.1 / WINDOW
        self._hit *= 1 - 0.1 / WINDOW

    def doubt(self) -> None:
        """Keep what is known with the weight of ten tokens: another version is served."""
        keep = np.minimum(1.0, 10 / np.maximum(self._tried, 1e-9))
        self._tried, self._hit = self._tried * keep, self._hit * keep

    @property
    def rates(self) -> NDArray[np.float64]:
        """Share of steps in which the token at each position is accepted, [most]."""
        rates: NDArray[np.float64] = (self._hit + 2 * self._guess) / (self._tried + 2)
        return np.minimum.accumulate(rates)

    def log_tau(self, arms: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """log tau of each arm, and the covariance of these."""
        rates = self.rates
        variances = rates * (1 - rates) / (self._tried + 3)
        sums = np.concatenate([[1.0], 1 + rates.cumsum()])
        errors = np.concatenate([[0.0], np.sqrt(variances).cumsum() ** 2])
        tau = sums[list(arms)]
        # The positions of a smaller arm are among those of a larger one.
        shared = errors[np.minimum.outer(list(arms), list(arms))]
        return np.log(tau), shared / np.outer(tau, tau)


class StepTimes:
    """The model of log seconds: one level, `off` of every size, and log x of every size and arm."""

    def __init__(self, arms: Sequence[int]) -> None:
        """`arms` ascend from 0."""
        self.arms = tuple(arms)
        sizes, drafts = np.log2(np.array(SIZES)), np.array(arms[1:], dtype=float)
        near = np.exp(-0.5 * (np.subtract.outer(sizes, sizes) / OCTAVES) ** 2)
        both, slope, single = (error**2 for error in GUESS_ERRORS)
        by_arm = both + slope * np.outer(drafts, drafts) / 25
        over_sizes = np.kron(0.15 + 0.85 * near, by_arm) + np.kron(near, single * np.eye(len(drafts)))
        self._first_off, self._first_x = 1, 1 + len(SIZES)
        count = self._first_x + len(over_sizes)
        self._prior = np.zeros((count, count))
        self._prior[0, 0] = 100.0
        self._prior[1 : self._first_x, 1 : self._first_x] = 0.25 * (0.5 + 0.5 * near)
        self._prior[self._first_x :, self._first_x :] = over_sizes
        self._guess = np.zeros(count)
        self._guess[self._first_x :] = np.tile(np.log(1 + GUESS[0] + GUESS[1] * drafts), len(SIZES))
        self.mean, self.covariance = self._guess.copy(), self._prior.copy()
        self._last: tuple[int, int] | None = None
        self._surprises: dict[tuple[int, int], float] = {}
        self.noise = 0.05
        """Variance of a step's log seconds, from neighbouring steps."""

    def index(self, place: int, arm: int) -> int | None:
        """Where log x of the arm is in the state; None for off, whose log x is 0."""
        if arm == 0:
            return None
        return self._first_x + place * (len(self.arms) - 1) + self.arms.index(arm) - 1

    def pass_time(self, steps: int) -> None:
        """The machine's speed wanders, and what is known of x ages."""
        self.covariance[0, 0] += DRIFT_VARIANCE * steps

    def forget(self, steps: int) -> None:
        keep = 0.5 ** (steps / FORGET_STEPS)
        rows = slice(self._first_x, None)
        self.mean[rows] = keep * self.mean[rows] + (1 - keep) * self._guess[rows]
        self.covariance[rows] *= keep
        self.covariance[:, rows] *= keep
        self.covariance[rows, rows] /= keep
        self.covariance[rows, rows] = keep * self.covariance[rows, rows] + (1 - keep) * self._prior[rows, rows]

    def update(self, place: int, arm: int, log_seconds: Sequence[float]) -> None:
        """Learn from a run of steps with one arm at one batch size."""
        values = np.array(log_seconds)
        if len(values) > 1:
            # Differences of neighbours: neither level nor arm are in them. A stall is cut.
            squares = np.minimum(0.5 * np.diff(values) ** 2, 9 * self.noise)
            weight = 0.02 * len(squares) / (1 + 0.02 * len(squares))
            self.noise = max((1 - weight) * self.noise + weight * 1.05 * float(squares.mean()), 1e-5)
        at = [0, self._first_off + place]
        if (x := self.index(place, arm)) is not None:
            at.append(x)
        # The median withstands single stalls, at a price in precision.
        innovation = float(np.median(values)) - float(self.mean[at].sum())
        noise = 1.57 * self.noise / len(values) if len(values) > 2 else self.noise / len(values)
        gain = self.covariance[:, at].sum(axis=1)
        variance = float(gain[at].sum()) + noise
        if innovation**2 > 9 * variance:
            self._doubt(place, arm, innovation)
            gain = self.covariance[:, at].sum(axis=1)
            variance = float(gain[at].sum()) + noise
        else:
            self._surprises.pop((place, arm), None)
        self._last = (place, arm)
        self.mean += gain * (innovation / variance)
        self.covariance -= np.outer(gain, gain / variance)

    def _doubt(self, place: int, arm: int, innovation: float) -> None:
        """Make room for a surprise: the level has jumped, or log x at this batch size is far from what was believed."""
        self.covariance[0, 0] += innovation**2
        # The same steps as before took another time: only the level can have done this.
        if self._last == (place, arm):
            return
        # A stall that began with the arm looks like a slow arm. Twice in a row it is the arm.
        if self._surprises.get((place, arm), 0.0) * innovation <= 0:
            self._surprises[place, arm] = innovation
            return
        shift = np.zeros(len(self.mean))
        count = len(self.arms) - 1
        first = self._first_x + place * count
        shift[first : first + count] = 1.0
        if arm == 0:  # the sum of off and log x is known, if another arm ran before
            shift[first : first + count] = -1.0
            shift[self._first_off + place] = 1.0
        self.covariance += innovation**2 * np.outer(shift, shift)

    def log_x(self, place: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """log x of each arm at a batch size, and the covariance of these. Off is exactly 0."""
        count = len(self.arms) - 1
        rows = slice(self._first_x + place * count, self._first_x + (place + 1) * count)
        mean, covariance = np.zeros(count + 1), np.zeros((count + 1, count + 1))
        mean[1:], covariance[1:, 1:] = np.maximum(self.mean[rows], 0.0), self.covariance[rows, rows]
        return mean, covariance


class Policy:
    """Chooses an arm for each step and learns from what the steps took."""

    def __init__(self, most: int) -> None:
        """`most` is the largest number of draft tokens, at least 1."""
        self.arms = (0, *(k for k in (1, 2, 3, 5, 8, 12) if k < most), most)
        self.acceptance, self.times = Acceptance(most), StepTimes(self.arms)
        self.best = dict.fromkeys(range(len(SIZES)), 0)
        """The arm of each range of batch sizes, as an index of `arms`."""
        self.busy_s = self.lost_s = 0.0
        self.num_probes = 0
        self._account_s, self._grant = 0.0, START_STEPS
        self._probe: int | None = None
        self._probe_steps, self._probe_tries, self._probe_s = 0, 0, 0.0
        self._since_probe, self._since_update = 0, 0
        self._run: list[float] = []
        self._run_of: tuple[int, int] | None = None
        self._mean_s, self._steady = 0.0, 0.7
        self._pause = dict.fromkeys(range(len(SIZES)), PAUSE_STEPS)
        self._num_runs = dict.fromkeys(range(len(SIZES)), 0)
        self._used_s = dict.fromkeys(range(len(SIZES)), 0.0)
        self._views: dict[int, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}

    def choose(self, size: int) -> int:
        """Number of tokens to draft after the next step, for a batch of `size` requests."""
        place = find_place(size)
        if self._probe is None:
            self._begin_probe(place)
        return self.arms[self.best[place] if self._probe is None else self._probe]

    def accept(self, limit: int, accepted: int) -> None:
        """Note one request's step, in which up to `limit` draft tokens could be accepted."""
        self.acceptance.add(limit, accepted)

    def step(self, size: int, drafted: int, verified: int, seconds: float, *, is_decode: bool) -> None:
        """Note a step that verified the drafts of the step before and then drafted.

        `is_decode`: no prompt was read in it. Other steps say nothing about an arm.
        """
        place = find_place(size)
        self.busy_s += seconds
        self._mean_s = 0.95 * self._mean_s + 0.05 * seconds if self._mean_s else seconds
        self._since_update += 1
        self._steady = 0.98 * self._steady + 0.02 * is_decode
        if not drafted and not verified:
            self.acceptance.age()
        if is_decode and drafted == verified and drafted in self.arms and seconds > 0:
            self._add(place, self.arms.index(drafted), math.log(seconds))
        if self._probe is None:
            share = SHARE_OPEN if self._find_rival(place) is not None else SHARE_SETTLED
            self._account_s += share * seconds
            self._used_s[place] += seconds
            self._since_probe += 1
        else:
            self._follow_probe(place, drafted, verified, seconds, is_decode)

    def swapped(self) -> None:
        """Another version is served: its acceptance is unknown, its cost is not."""
        self.acceptance.doubt()
        self._grant = START_STEPS
        self._views.clear()

    def judge(self, size: int) -> dict[int, Verdict]:
        """What is known of each number of draft tokens at a batch size."""
        means, covariance = self._view(find_place(size))
        errors = 1.96 * np.sqrt(np.diag(covariance))
        return {
            arm: Verdict(speed=math.exp(m), low=math.exp(m - e), high=math.exp(m + e))
            for arm, m, e in zip(self.arms, means, errors, strict=True)
        }

    # -- learning

    def _add(self, place: int, arm: int, log_seconds: float) -> None:
        if self._run_of != (place, arm) or len(self._run) == PROBE_STEPS:
            self._end_run()
        self._run_of = (place, arm)
        self._run.append(log_seconds)

    def _end_run(self) -> None:
        if self._run_of is not None and self._run:
            place, arm = self._run_of
            self.times.pass_time(self._since_update)
            self.times.update(place, self.arms[arm], self._run)
            self.times.forget(self._since_update)
            self._since_update = 0
            self._views.clear()
            # Not right after a probe: a stall that began with it looks like a slow arm until the base has run again.
            if arm == self.best[place]:
                self._decide(place)
        self._run, self._run_of = [], None

    def _view(self, place: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """log speed of each arm relative to off, and the covariance of these."""
        if place not in self._views:
            log_tau, tau_covariance = self.acceptance.log_tau(self.arms)
            log_x, x_covariance = self.times.log_x(place)
            self._views[place] = (log_tau - log_x, tau_covariance + x_covariance)
        return self._views[place]

    def _decide(self, place: int) -> None:
        means, covariance = self._view(place)
        errors = np.sqrt(np.diag(covariance))
        best = self.best[place]
        if best == 0 and self._num_runs[place] < MIN_PROBES:
            return
        sure = [0, *(i for i in range(1, len(self.arms)) if means[i] - CAUTION * errors[i] > 0 or i == best)]
        rival = max(sure, key=lambda i: means[i])
        if means[rival] > means[best] + MARGIN or means[best] < -0.5 * errors[best]:
            # Drafting that turns out to lose is paid for as a probe is: the next rival has to wait.
            self._pay(min(self._used_s[place], PAUSE_STEPS * self._mean_s) * self._loss(place, best, 0))
            self.best[place], self._used_s[place], self._pause[place] = rival, 0.0, PAUSE_STEPS // 8

    # -- probes

    def _find_rival(self, place: int) -> int | None:
        """The arm that may be better than the one in use by more than the margin."""
        hopes = self._hopes(place)
        rival = int(hopes.argmax())
        return rival if hopes[rival] > MARGIN else None

    def _hopes(self, place: int) -> NDArray[np.float64]:
        """log speed of each arm relative to the one in use, as high as it may be. Minus infinity: do not try it."""
        means, covariance = self._view(place)
        best = self.best[place]
        variances = np.diag(covariance) + covariance[best, best] - 2 * covariance[best]
        hopes: NDArray[np.float64] = means - means[best] + HOPE * np.sqrt(np.maximum(variances, 0.0))
        hopes[best] = -math.inf
        # Step by step: five tokens may take five times as long, which one token would have shown.
        _, times = self.times.log_x(place)
        hopes[2:][np.sqrt(np.diag(times)[2:]) > KNOWN_ERROR] = -math.inf
        return hopes

    def _begin_probe(self, place: int) -> None:
        if self._since_probe < REST_STEPS:
            return
        rival = self._find_rival(place)
        if rival is None:
            if self._since_probe < self._pause[place]:
                return
            rival = self._choose_check(place)
        if self._grant:
            self._account_s, self._grant = max(self._account_s, self._grant * self._mean_s), 0
        if (PROBE_STEPS / self._steady + 1) * self._mean_s * max(
            0.02, self._loss(place, rival, self.best[place])
        ) <= self._account_s:
            self._end_run()
            self._pause[place] = min(2 * self._pause[place], PAUSE_STEPS)
            self._probe, self._probe_steps, self._probe_tries, self._probe_s = rival, 0, 0, 0.0

    def _choose_check(self, place: int) -> int:
        """The arm to look at again when nothing is open: the best of the others, or off in turn with it."""
        best = self.best[place]
        if best and self.num_probes % 2:
            return 0
        hopes = self._hopes(place)
        return int(hopes[1:].argmax()) + 1

    def _loss(self, place: int, arm: int, other: int) -> float:
        """Share of its time that a step with one arm loses against the other; 0 if it gains."""
        means, _ = self._view(place)
        return max(0.0, 1 - math.exp(means[arm] - means[other]))

    def _pay(self, lost_s: float) -> None:
        self._account_s -= lost_s
        self.lost_s += lost_s

    def _follow_probe(self, place: int, drafted: int, verified: int, seconds: float, is_decode: bool) -> None:
        assert self._probe is not None
        self._probe_tries += 1
        self._probe_s += seconds
        if is_decode and drafted == verified == self.arms[self._probe]:
            self._probe_steps += 1
        is_dear = self._probe_s > 3 * PROBE_STEPS * self._mean_s
        if self._probe_steps < PROBE_STEPS and self._probe_tries < 4 * PROBE_STEPS and not is_dear:
            return
        self._end_run()
        self._num_runs[place] += 1
        self._pay(self._probe_s * self._loss(place, self._probe, self.best[place]))
        self.num_probes += 1
        self._probe, self._since_probe = None, 0


def find_place(size: int) -> int:
    """Index of the range of batch sizes in `SIZES`."""
    return next((i for i, end in enumerate(SIZES) if size <= end), len(SIZES) - 1)
