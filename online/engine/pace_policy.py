"""Choose the number of draft tokens for the next step.

The policy is a pure calculation: it reads no clock.

An arm is a number of draft tokens per request; 0 is "off". The speed relative to off is tau / x.
tau, the tokens per step, follows from the acceptance by position. x is the time of a step with the
arm relative to one without. Both are measured by cell, i.e. by the number of decoding requests and
the mean length of their texts.

    base base base | arm arm arm arm arm | base base base
    └─ residuals ─┘ └────── probe ──────┘ └─ residuals ─┘
    log x[arm] - log x[base] = mean residual of the probe - mean residual around it

A residual is the log of a step's time minus the mean for its cell and base. So a probe may run
while requests come and go, and a drift in the machine's speed cancels out. A probe in one cell is
nearly as informative for neighbouring cells, and slightly for distant ones (`pace_evidence`).

Time lost in probes is paid from an account that gets SHARE of all busy time. A change of draft or
target adds nothing, so a draft that never pays off costs no more than this share in the long run. Evidence fades,
so arms are probed again after a change of load or machine.
"""

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from redraft.online.engine.config import list_arms
from redraft.online.engine.pace_evidence import (
    MEMORY_STEPS,
    Acceptance,
    Cell,
    Probe,
    Row,
    StepTimes,
    Tally,
    list_contexts,
    list_requests,
)

SHARE = 0.0093  # Fraction of the busy time that probes may lose, apart from FIRST_STEPS.
FIRST_STEPS, MOST_STEPS = 4, 16  # Initial and maximum time on the account, in steps.
# Number of steady steps in a probe, and of steps without a probe before and after it.
STEPS, AROUND = 5, 12
MARGIN = 0.015  # Minimum relative gain for a change of the base.
# Number of standard errors added to an arm's estimate to decide whether it is worth a probe.
DOUBT = 2.4
# Off is probed after at most this many probes of other arms, because only off shows whether
# drafting pays. The exception is a probe of off that costs more than the account can contain.
OFF_AFTER = 2
# Minimum number of steps with an arm in a cell before their mean time is used as a reference.
KNOWN = 4
FADE_STEPS = 100  # Number of steps between reductions of old evidence's weight.
LEAST_VARIANCE = 1e-6
"""Minimum variance of a step's log time. If it were zero, the probes' covariance matrix would be
singular.
"""


@dataclass
class Level:
    """Mean log time of the steps with one arm in one cell."""

    mean: float = 0.0
    count: int = 0

    def learn(self, value: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) / min(self.count, 50)


Place = tuple[Cell, int]
"""A cell and its base."""

Residual = tuple[Place, float]
"""The log of a step's time minus the mean for its place."""


@dataclass
class Running:
    """A probe in progress."""

    arm: int
    before: list[Residual]
    """Steps before the probe."""
    residuals: list[Residual] = field(default_factory=list)
    """Settled steps of the probe."""
    num_steps: int = 0
    is_over: bool = False


@dataclass(frozen=True)
class Speed:
    """Tokens/s relative to off."""

    mean: float
    error: float
    """Relative standard error."""

    def at(self, errors: float) -> float:
        return self.mean * (1 + errors * self.error)

    def interval(self) -> dict[str, float]:
        """Return the speed and the bounds of its 95% interval."""
        return dict(zip(BOUNDS, (self.at(-1.96), self.mean, self.at(1.96)), strict=True))


BOUNDS = ("low", "speed", "high")
OFF = Speed(1.0, 0.0)


@dataclass
class Times:
    """Time of recent steps, and the time that their tokens would have taken without drafts."""

    spent_s: float = 0.0
    off_s: float = 0.0
    error_s: float = 0.0
    """Standard error of `off_s`, assuming that all steps have the same error."""

    def add(self, spent_s: float, off_s: float, error_s: float = 0.0) -> None:
        self.spent_s += spent_s
        self.off_s += off_s
        self.error_s += error_s

    def fade(self, share: float) -> None:
        for name, value in vars(self).items():
            setattr(self, name, value * (1 - share))

    @property
    def gain(self) -> Speed:
        return Speed(self.off_s / self.spent_s, self.error_s / self.off_s) if self.off_s else OFF


@dataclass(frozen=True)
class Known:
    """A policy's estimates, in a form that another policy with the same arms and cells can load."""

    probes: list[Probe]
    accepted: list[tuple[int | None, int | None, list[float], list[float]]]
    """For each position: its row, the number of drafts tried and the number accepted."""


class Policy:
    """Chooses the arm of each step: call `choose` before a step, and `observe` after it."""

    def __init__(
        self, most: int, max_requests: int, max_context: int, *, is_adaptive: bool = False
    ) -> None:
        self.arms = list_arms(most, is_adaptive=is_adaptive)
        self.requests, self.contexts = list_requests(max_requests), list_contexts(max_context)
        self.base: defaultdict[Cell, int] = defaultdict(int)
        self.steps: defaultdict[Cell, int] = defaultdict(int)
        self.times, self.accepted = StepTimes(self.arms), Acceptance(most, self.contexts)
        self.recent = Times()
        self.account_s = self.lost_s = self.busy_s = 0.0
        self.num_probes = 0
        self._cell = self.cell(1, 0)  # of the previous step
        self._levels: defaultdict[Place, Level] = defaultdict(Level)
        self._recent: deque[Residual] = deque(maxlen=AROUND)
        self._drift = 0.0
        self._variance = 0.01
        self._probe: Running | None = None
        self._num_faded = 0
        self._since_off = OFF_AFTER

    # --- decisions

    def choose(self, requests: int, context: float, *, is_read: bool = True) -> int:
        """Choose the next step's arm, for `requests` decoding requests of mean length `context`.

        A probe of acceptance starts only if the draft has processed the context (`is_read`).
        """
        cell = self.cell(requests, context)
        self._update_base(cell)
        base = self.base[cell]
        if self._probe and not self._probe.is_over:
            if self._probe.arm != base and self._probe.num_steps < 3 * STEPS:
                return self._probe.arm
            self._end_probe()
        elif not self._probe and len(self._recent) == AROUND and self._is_known(cell, base):
            arm = self._find_wanted(cell)
            if arm is not None and (is_read or not arm) and self._can_pay(cell, arm):
                self._probe = Running(arm, [*self._recent])
                return arm
        return base

    def cell(self, requests: int, context: float) -> Cell:
        """The cell that a step belongs to."""
        place, length = (
            min(bisect_left(borders, value), len(borders) - 1)
            for borders, value in ((self.requests, requests), (self.contexts, context))
        )
        return Cell(self.requests[place], self.contexts[length])

    def speed(self, cell: Cell, arm: int) -> Speed:
        """Return the estimated speed of an arm in a cell, in steps that read no prompt."""
        if not arm:
            return OFF
        x, error = self.times.find(cell, arm)
        tau, tau_error = self.accepted.find(cell, arm)
        return Speed(tau / x, math.hypot(error, tau_error / tau))

    def known(self) -> Known:
        """Return the estimates for this server's next start."""
        rows = [
            (*row, [*tally.tried], [*tally.hit]) for row, tally in self.accepted.tallies.items()
        ]
        return Known([replace(probe) for probe in self.times.probes], rows)

    def recall(self, known: Known) -> None:
        """Restore another policy's estimates.

        Raises:
            ValueError: it belongs to different arms or cells, or contains impossible numbers.
        """
        tallies = {(row[0], row[1]): Tally(*row[2:]) for row in known.accepted}
        counts = [some for tally in tallies.values() for some in (tally.tried, tally.hit)]
        rows: list[Row] = [*tallies, *((*probe.cell,) for probe in known.probes)]
        if (
            any(len(some) != self.accepted.most for some in counts)
            or any({probe.tokens, probe.base} - {*self.arms} for probe in known.probes)
            or {requests for requests, _ in rows} - {*self.requests, None}
            or {context for _, context in rows} - {*self.contexts, None}
        ):
            raise ValueError("the stored pace has different numbers of tokens or requests")
        if (
            any(not 0 <= count < math.inf for some in counts for count in some)
            or any(
                hit > tried
                for one in tallies.values()
                for hit, tried in zip(one.hit, one.tried, strict=True)
            )
            or not all(math.isfinite(probe.log_ratio) for probe in known.probes)
            or not all(0 < probe.variance < math.inf for probe in known.probes)
        ):
            raise ValueError("the stored pace contains invalid numbers")
        self.accepted = Acceptance(self.accepted.most, self.contexts, tallies)
        self.times.learn(known.probes)

    def swapped(self) -> None:
        """Note that a different version is served, with unknown acceptance and the same cost."""
        self.accepted.swapped()

    def _update_base(self, cell: Cell) -> None:
        # A cell with base 0 takes over the previous step's base while it is estimated to pay.
        # Otherwise, drafting would stop in every new cell.
        base = self.base[cell] or self.base[self._cell]
        self._cell = cell
        own = self.speed(cell, base)
        if base and own.mean < 1:
            base, own = 0, OFF
        # Compare arms at one standard error below their estimates, so that the server starts to
        # draft, or drafts more tokens, only with evidence.
        sure = [arm for arm in self.arms[1:] if self.speed(cell, arm).at(-1) > 1]
        best = max(sure, key=lambda arm: self.speed(cell, arm).at(-1), default=base)
        if self.speed(cell, best).mean > own.mean * (1 + MARGIN):
            base = best
        self.base[cell] = base

    def _find_wanted(self, cell: Cell) -> int | None:
        """Return the arm that is worth a probe, or None."""
        base = self.base[cell]
        own = self.speed(cell, base)
        # Skip arms whose probe costs more than the account can contain, because waiting for one
        # would block all other probes. If off is one of them, drafting clearly pays.
        prices = {arm: self._price(cell, arm) for arm in self.arms if arm != base}
        affordable = {arm: price for arm, price in prices.items() if price <= MOST_STEPS}
        if 0 in affordable and (own.at(-DOUBT) < 1 or self._since_off >= OFF_AFTER):
            return 0
        rivals = {arm: self.speed(cell, arm).at(DOUBT) for arm in affordable if arm}
        gains = {arm: (most - own.mean) / affordable[arm] for arm, most in rivals.items()}
        arm = max(gains, key=gains.__getitem__, default=None)
        return arm if arm is not None and rivals[arm] > own.mean * (1 + MARGIN) else None

    def _price(self, cell: Cell, arm: int) -> float:
        """Return the time that a probe may lose, in steps with the base."""
        own = self.speed(cell, self.base[cell])
        # Do not use the mean, but assume that the arm is one standard error worse than estimated.
        # For off, use the base's gain minus one standard error; otherwise, leaving an uncertain
        # base would be too expensive.
        loss = own.mean / max(0.2, self.speed(cell, arm).at(-1)) - 1 if arm else own.at(-1) - 1
        return (STEPS + 1) * max(0.03, loss)

    def _can_pay(self, cell: Cell, arm: int) -> bool:
        step_s = self._base_s(cell)
        self.account_s = min(self.account_s, MOST_STEPS * step_s)
        return self._price(cell, arm) * step_s <= self.account_s

    # --- observations

    def observe(
        self,
        requests: int,
        context: float,
        drafted: int,
        verified: int,
        seconds: float,
        accepted: list[int],
        *,
        tokens: int,
        num_reading: int,
    ) -> None:
        """Observe one step of `requests` decoding requests that got `tokens` tokens in total.

        `verified` is the arm whose tokens the step verified. `accepted` contains the number of
        accepted tokens for each request whose acceptance is evidence about the draft. `num_reading`
        is the number of additional requests, which were reading their prompts.
        """
        self.busy_s += seconds
        self.account_s += SHARE * seconds
        self._fade_away()
        if not requests:  # prompts alone
            self.recent.add(seconds, seconds)
            return
        if not self.steps:
            self.account_s += FIRST_STEPS * seconds
        cell = self.cell(requests, context)
        self.steps[cell] += 1
        self.accepted.learn(cell, accepted, verified)
        self._add_times(cell, (drafted, verified), seconds, requests, tokens, num_reading)
        probe = self._probe
        is_probe = probe is not None and not probe.is_over and drafted == probe.arm
        if probe and is_probe:
            probe.num_steps += 1
            expected = self.accepted.find(cell, verified)[0]
            each = 1 + sum(accepted) / len(accepted) if accepted else expected
            self._pay(cell, probe.arm, each, seconds)
        if num_reading or drafted != verified or seconds <= 0:
            return
        level, base = self._levels[cell, drafted], self.base[cell]
        if probe and is_probe:
            if self._is_known(cell, base):
                residual = math.log(seconds) - self._levels[cell, base].mean
                probe.residuals.append(((cell, base), residual))
            if len(probe.residuals) >= STEPS:
                self._end_probe()
        elif drafted == base:
            residual = math.log(seconds) - level.mean
            if level.count >= KNOWN:
                self._recent.append(((cell, base), residual))
                self._drift = _typical(self._recent)
                rest = max(-0.5, min(0.5, residual - self._drift))
                self._variance += (max(rest**2, LEAST_VARIANCE) - self._variance) / 50
            level.learn(math.log(seconds) - self._drift)
            if probe and probe.is_over and len(self._recent) == AROUND:
                self._settle(probe)

    def _add_times(
        self,
        cell: Cell,
        arms: tuple[int, int],
        seconds: float,
        requests: int,
        tokens: int,
        num_reading: int,
    ) -> None:
        """Add a step that drafts and verifies these arms to the recent times."""
        found = [self.times.find(cell, arm) if arm else (1.0, 0.0) for arm in arms]
        x, error = (sum(pair) / 2 for pair in zip(*found, strict=True))
        if not num_reading:
            off_s = tokens / requests * seconds / x
            self.recent.add(seconds, off_s, error * off_s)
            return
        # A prompt takes the same time with and without drafts. Off saves the draft's time, but
        # needs later steps for the accepted tokens, in which the other requests decode too.
        base = self.base[cell]
        off_step_s = 0.0
        if self._is_known(cell, base):
            off_step_s = self._base_s(cell) / self._x(cell, base)
        saved_s = (tokens - requests) * off_step_s / (requests + num_reading)
        self.recent.add(seconds, seconds - (x - 1) * off_step_s + saved_s, error * saved_s)

    def _base_s(self, cell: Cell) -> float:
        return math.exp(self._levels[cell, self.base[cell]].mean + self._drift)

    def _pay(self, cell: Cell, arm: int, tokens: float, seconds: float) -> None:
        """Charge the account for a step of a probe.

        The charge is the step's time minus the time that the base takes for the same number of
        tokens per request.
        """
        base = self.base[cell]
        if self._is_known(cell, base):
            base_s = self._base_s(cell)
        else:  # estimated, if the load has just entered the cell
            base_s = seconds * self._x(cell, base) / self._x(cell, arm)
        loss_s = min(seconds, 3 * base_s) - base_s * tokens / self.accepted.find(cell, base)[0]
        self.account_s -= loss_s
        self.lost_s += loss_s

    def _x(self, cell: Cell, arm: int) -> float:
        return self.times.find(cell, arm)[0] if arm else 1.0

    def _end_probe(self) -> None:
        assert self._probe
        self._probe.is_over = True
        self._recent.clear()
        if not self._probe.residuals:
            self._probe = None

    def _settle(self, running: Running) -> None:
        """Evaluate a probe once the steps before and after it are known."""
        count, around = len(running.residuals), [*running.before, *self._recent]
        before, after, middle = map(_typical, (running.before, self._recent, running.residuals))
        # The error of a place's mean cancels out if the place has the same share of the steps in
        # the probe and around it.
        shares: defaultdict[Place, float] = defaultdict(float)
        for steps, sign in ((running.residuals, 1), (around, -1)):
            for place, _ in steps:
                shares[place] += sign / len(steps)
        levels = sum(share**2 / self._levels[place].count for place, share in shares.items())
        # Each step measures one cell. All share the errors of the means and of the surrounding
        # steps; a stall makes the latter error large.
        variance = (
            self._variance * (1 + count * (1 / len(around) + levels))
            + count * (before - after) ** 2 / 4
        )
        probes = []
        for cell, base in dict.fromkeys(place for place, _ in running.residuals):
            cut = [
                max(middle - 0.4, min(middle + 0.4, residual))
                for place, residual in running.residuals
                if place == (cell, base)
            ]
            probes.append(
                Probe(
                    cell=cell,
                    tokens=running.arm,
                    base=base,
                    log_ratio=sum(cut) / len(cut) - (before + after) / 2,
                    variance=variance / len(cut),
                )
            )
        self.times.learn(probes)
        self._since_off = 0 if not running.arm else self._since_off + 1
        self.num_probes += 1
        self._probe = None

    def _fade_away(self) -> None:
        self._num_faded += 1
        if self._num_faded == FADE_STEPS:
            self._num_faded, share = 0, FADE_STEPS / MEMORY_STEPS
            self.times.age(FADE_STEPS)
            self.accepted.fade(share)
            self.recent.fade(share)

    def _is_known(self, cell: Cell, arm: int) -> bool:
        return (cell, arm) in self._levels and self._levels[cell, arm].count >= KNOWN


def _typical(steps: Iterable[Residual]) -> float:
    """Return the mean residual, with outliers clipped at a distance of 0.4 from the median.

    A stall is no evidence about an arm.
    """
    values = [residual for _, residual in steps]
    median = sorted(values)[len(values) // 2]
    return sum(max(median - 0.4, min(median + 0.4, value)) for value in values) / len(values)
