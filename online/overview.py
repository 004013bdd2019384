"""What the page shows, computed from the journal's entries. Pure: entries and the time in, numbers and words out.

A point of a curve sums the counts of everything that falls into its bucket, so a curve is never a mean of means.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeVar

import msgspec

from online.journal import (
    AcceptanceEntry,
    BufferEntry,
    Entry,
    FaultEntry,
    GateEntry,
    StateEntry,
    SwapEntry,
    TrainingEntry,
)

E = TypeVar("E", bound=Entry)

RECENT_S = 300.0
"""What the headline's numbers are taken over."""

SILENT_S = 60.0
"""Older than this is not "now", and a curve has a gap there."""

ALARM_TAU = 1.05
"""Below this a draft is as good as rejected."""

NOTABLE_TAU = 0.05
"""A change below this is shown without a judgement: traffic alone changes tau by as much."""

KEPT: dict[type, int] = {AcceptanceEntry: 60_000, BufferEntry: 20_000, TrainingEntry: 20_000}
"""Entries that are kept to be shown, the newest; of every other kind 200."""

MAX_POINTS = 180
"""Of a curve of the engines' counts."""

MAX_DOMAIN_POINTS = 90
"""Captured requests are fewer: a wider bucket keeps the noise of a point about the same."""

MAX_CURVES = 8
"""Of one picture: what is beyond is summed into one curve."""

BUCKETS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence in four parts, the line below it, and how the change should look."""

    before: str
    number: str = ""
    after: str = ""
    change: str = ""
    below: str = ""
    tone: Literal["good", "plain", "bad"] = "plain"


class Point(msgspec.Struct, frozen=True, array_like=True):
    time_s: float
    tau: float
    drafts: float
    version: str


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tau: float
    """Over the last RECENT_S of the curve, for its newest version."""
    points: list[Point]


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A version's first successful swap of a rollout."""

    time_s: float
    version: str
    is_rollback: bool


class Positions(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    shares: list[float]
    """Of the drafts, accepted up to each position."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    now_s: float
    begin_s: float
    """Where the curves begin."""
    width_s: float
    """Of a bucket."""
    gap_s: float
    """Points further apart are not joined."""
    headline: Headline
    state: StateEntry | None
    servers: list[Curve]
    domains: list[Curve]
    marks: list[Mark]
    positions: list[Positions]
    """Of the version that is served, and of the one before."""
    buffer: list[BufferEntry]
    drops: list[tuple[float, dict[str, int]]]
    """Records dropped since the point before, by reason."""
    training: list[TrainingEntry]
    gates: list[GateEntry]
    swaps: list[SwapEntry]
    faults: list[FaultEntry]


@dataclass(frozen=True, kw_only=True)
class Served:
    """The version that most servers have, and what the engines counted of it."""

    version: str
    entries: list[AcceptanceEntry]
    """Of this version, over the last RECENT_S in which anything was counted."""
    before: list[AcceptanceEntry]
    """Of the version before it, over the RECENT_S before it came; empty where that is not known."""
    servers: dict[str | None, str]
    """The version of every server that was heard of."""
    last_s: float


class History:
    """The newest entries of every kind, in the order they were written."""

    def __init__(self) -> None:
        self._kinds: dict[type, deque[Any]] = {}

    def extend(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            kind = type(entry)
            self._kinds.setdefault(kind, deque(maxlen=KEPT.get(kind, 200))).append(entry)

    def of(self, kind: type[E], since_s: float = float("-inf")) -> list[E]:
        """Those of one kind from `since_s` on, oldest first."""
        kept = []
        for entry in reversed(self._kinds.get(kind, ())):
            if entry.time_s < since_s:
                break
            kept.append(entry)
        return kept[::-1]

    def last(self, kind: type[E], accept: Callable[[E], bool] = lambda entry: True) -> E | None:
        """The newest of a kind that is accepted."""
        return next((entry for entry in reversed(self._kinds.get(kind, ())) if accept(entry)), None)

    def begin_s(self) -> float | None:
        return min((entries[0].time_s for entries in self._kinds.values()), default=None)


def overview(history: History, now_s: float, range_s: float = 0) -> Overview:
    """Everything of the last `range_s` seconds (0: all that is kept), and the newest verdicts, swaps and faults."""
    first_s = history.begin_s()
    begin_s = max(now_s - range_s if range_s else 0.0, now_s if first_s is None else first_s)
    width_s = _bucket_width_s(now_s - begin_s, MAX_POINTS)
    domain_width_s = _bucket_width_s(now_s - begin_s, MAX_DOMAIN_POINTS)
    counted = history.of(AcceptanceEntry, begin_s)
    engine = [entry for entry in counted if entry.domain is None]
    captured = [entry for entry in counted if entry.domain is not None]
    swaps = history.of(SwapEntry)
    buffer = history.of(BufferEntry, begin_s)
    served, state = _served(history), history.last(StateEntry)
    return Overview(
        now_s=now_s,
        begin_s=begin_s,
        width_s=width_s,
        gap_s=max(SILENT_S, 4.0 * domain_width_s),
        headline=headline(served, state, now_s),
        state=state,
        servers=curves(engine, lambda entry: entry.server or "all servers", width_s, worst_first),
        domains=curves(captured, lambda entry: entry.domain or "no domain", domain_width_s, busiest_first),
        marks=[mark for mark in marks(swaps) if mark.time_s >= begin_s],
        positions=_positions(served),
        buffer=_thinned(buffer, width_s),
        drops=_drops(buffer, width_s),
        training=_thinned(history.of(TrainingEntry, begin_s), width_s),
        gates=history.of(GateEntry)[-12:][::-1],
        swaps=_without_repeats(swaps)[-30:][::-1],
        faults=[fault for fault in history.of(FaultEntry) if fault.time_s > now_s - 86400][-12:][::-1],
    )


def headline(served: Served | None, state: StateEntry | None, now_s: float) -> Headline:
    """The page's answer: how many tokens a target step emits, since when it is so, and what the learner does."""
    if served is None:
        below = "The curves begin when a server has answered requests with a draft."
        return Headline(before="Nothing was measured yet.", below=f"{_learner(state)} {below}")
    tau, before = _tau(served.entries), served.before
    name, below = short(served.version), f"{_learner(state)} {_traffic(served, now_s)}"
    number = f"{tau:.2f} tokens"
    if tau < ALARM_TAU:
        return Headline(
            before=f"Draft {name} is hardly accepted:", number=number, after="per target step.", below=below, tone="bad"
        )
    if not before:
        return Headline(before=f"Draft {name} emits", number=number, after="per target step.", below=below)
    gain = tau - _tau(before)
    return Headline(
        before=f"Draft {name} emits",
        number=number,
        after="per target step,",
        change=f"{_signed(gain)} since {short(before[0].draft_version)}.",
        below=below,
        tone="good" if gain >= NOTABLE_TAU else "bad" if gain <= -NOTABLE_TAU else "plain",
    )


def curves(
    entries: Sequence[AcceptanceEntry],
    name: Callable[[AcceptanceEntry], str],
    width_s: float,
    rank: Callable[[float, float], float],
) -> list[Curve]:
    """tau over time, a curve for every name; of too many, those of highest `rank(drafts, accepted)`, and their rest."""
    totals: dict[str, list[float]] = {}
    for entry in entries:
        total = totals.setdefault(name(entry), [0.0, 0.0])
        total[0] += entry.drafts
        total[1] += entry.accepted
    drawn = sorted((key for key in totals if totals[key][0]), key=lambda key: rank(*totals[key]), reverse=True)
    shown = set(drawn if len(drawn) <= MAX_CURVES else drawn[: MAX_CURVES - 1])
    rest = f"{len(drawn) - len(shown)} others"
    sums: dict[str, dict[tuple[int, str], list[float]]] = {key: {} for key in sorted(shown)}
    for entry in entries:
        buckets = sums.setdefault(name(entry) if name(entry) in shown else rest, {})
        bucket = buckets.setdefault((int(entry.time_s // width_s), entry.draft_version), [0.0, 0.0, 0.0])
        bucket[0] = max(bucket[0], entry.time_s)
        bucket[1] += entry.drafts
        bucket[2] += entry.accepted
    points = {key: _points(buckets) for key, buckets in sums.items()}
    return [Curve(name=key, tau=_recent_tau(its), points=its) for key, its in points.items() if its]


def worst_first(drafts: float, accepted: float) -> float:
    """For servers: what needs a look is the one that accepts least."""
    return -accepted / drafts


def busiest_first(drafts: float, accepted: float) -> float:
    return drafts


def marks(swaps: Sequence[SwapEntry]) -> list[Mark]:
    """One for every rollout and every way back: the first swap after the fleet was asked for something else."""
    found: list[Mark] = []
    for swap in swaps:
        if swap.outcome not in ("swapped", "rolled_back"):
            continue
        is_rollback = swap.outcome == "rolled_back"
        if not found or (found[-1].version, found[-1].is_rollback) != (swap.version, is_rollback):
            found.append(Mark(time_s=swap.time_s, version=swap.version, is_rollback=is_rollback))
    return found


def _without_repeats(swaps: Sequence[SwapEntry]) -> list[SwapEntry]:
    """The last of every row of failed attempts: a server that is out of reach is asked again every few seconds."""
    kept: dict[tuple[str, str, str, int], SwapEntry] = {}
    successes = Counter[str]()
    for swap in swaps:
        successes[swap.server] += swap.outcome in ("swapped", "rolled_back")
        key = (swap.server, swap.version, swap.outcome, successes[swap.server])
        kept.pop(key, None)
        kept[key] = swap
    return list(kept.values())


def short(version: str) -> str:
    """v000012 as v12; what is no version stays."""
    digits = version.removeprefix("v")
    return f"v{int(digits)}" if version.startswith("v") and digits.isdecimal() else version


def _points(buckets: dict[tuple[int, str], list[float]]) -> list[Point]:
    points = sorted(
        (
            Point(time_s, 1 + accepted / drafts, drafts, version)
            for (_, version), (time_s, drafts, accepted) in buckets.items()
            if drafts
        ),
        key=lambda point: point.time_s,
    )
    if len(points) > 1 and points[-2].version == points[-1].version and points[-1].drafts < points[-2].drafts / 2:
        # A bucket that has just begun is mostly noise.
        points[-2:] = [Point(points[-1].time_s, *_merged(points[-2:]), points[-1].version)]
    return points


def _recent_tau(points: Sequence[Point]) -> float:
    last = points[-1]
    return _merged([p for p in points if p.version == last.version and p.time_s > last.time_s - RECENT_S])[0]


def _merged(points: Sequence[Point]) -> tuple[float, float]:
    """tau and drafts of several points together."""
    drafts = sum(point.drafts for point in points)
    return sum(point.tau * point.drafts for point in points) / drafts, drafts


def _served(history: History) -> Served | None:
    """What most servers had when they were last heard of; of two versions, the one heard of later."""
    recent = _of_engine(history, ending_s=None)
    if not recent:
        return None
    servers = {entry.server: entry.draft_version for entry in recent}
    versions = list(servers.values())[::-1]
    version = max(versions, key=versions.count)
    return Served(
        version=version,
        entries=[entry for entry in recent if entry.draft_version == version],
        before=_before(history, version),
        servers=servers,
        last_s=recent[-1].time_s,
    )


def _before(history: History, version: str) -> list[AcceptanceEntry]:
    """What the version that the fleet had before this one came accepted, over the RECENT_S before the first swap.

    A way back does not count: the version was there before, and what it came back from was a canary.
    """
    first: SwapEntry | None = None
    for swap in reversed([swap for swap in history.of(SwapEntry) if swap.outcome == "swapped"]):
        if swap.version == version and swap.from_version != version:
            first = swap
        elif first is not None:
            break
    if first is None:
        return []
    engine = _of_engine(history, ending_s=first.time_s)
    return [entry for entry in engine if entry.draft_version == first.from_version]


def _of_engine(history: History, ending_s: float | None) -> list[AcceptanceEntry]:
    """What engines counted in the RECENT_S that end at a time, or with the last of it."""
    if ending_s is None:
        last = history.last(AcceptanceEntry, lambda entry: entry.domain is None and entry.drafts > 0)
        if last is None:
            return []
        ending_s = last.time_s
    entries = history.of(AcceptanceEntry, ending_s - RECENT_S)
    return [entry for entry in entries if entry.domain is None and entry.drafts and entry.time_s <= ending_s]


def _tau(entries: Sequence[AcceptanceEntry]) -> float:
    """1 + accepted / drafts over all entries."""
    return 1 + sum(entry.accepted for entry in entries) / sum(entry.drafts for entry in entries)


def _positions(served: Served | None) -> list[Positions]:
    shown = []
    for entries in (served.entries, served.before) if served else ():
        entries = [entry for entry in entries if entry.accepted_at]
        if entries:
            drafts = sum(entry.drafts for entry in entries)
            accepted = [sum(at) for at in zip(*(entry.accepted_at for entry in entries), strict=False)]
            shown.append(Positions(version=entries[0].draft_version, shares=[count / drafts for count in accepted]))
    return shown


def _traffic(served: Served, now_s: float) -> str:
    on_it, servers = list(served.servers.values()).count(served.version), len(served.servers)
    fleet = {1: "Its server has it", 2: "Both servers have it"}.get(servers, f"All {servers} servers have it")
    if on_it < servers:
        fleet = f"{on_it} of {servers} servers have it"
    silent_s = now_s - served.last_s
    ago = f"; no traffic for {duration(silent_s)}" if silent_s > SILENT_S else ""
    return f"{fleet}; counted over {sum(entry.drafts for entry in served.entries):,.0f} target steps{ago}."


def _learner(state: StateEntry | None) -> str:
    if state is None:
        return "The learner has not started."
    candidate = f" {short(state.candidate)}" if state.candidate else ""
    return f"Learner: {state.phase}{candidate}."


def duration(seconds: float) -> str:
    """In the largest unit that fits: 42 s, 7 min, 3 h, 2 days."""
    for unit_s, name in ((172800, "days"), (5400, "h"), (90, "min")):
        if seconds >= unit_s:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[name]:.0f} {name}"
    return f"{seconds:.0f} s"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def _thinned(entries: Sequence[E], width_s: float) -> list[E]:
    """The last entry of every bucket."""
    return list({int(entry.time_s // width_s): entry for entry in entries}.values())


def _drops(entries: Sequence[BufferEntry], width_s: float) -> list[tuple[float, dict[str, int]]]:
    found: dict[int, tuple[float, Counter[str]]] = {}
    for earlier, entry in pairwise(entries):
        # A counter that fell began anew with the process.
        more = Counter(
            {
                reason: count - earlier.dropped.get(reason, 0) if count >= earlier.dropped.get(reason, 0) else count
                for reason, count in entry.dropped.items()
            }
        )
        bucket = int(entry.time_s // width_s)
        found[bucket] = (entry.time_s, found.get(bucket, (0, Counter()))[1] + more)
    return [(time_s, dict(counts)) for time_s, counts in found.values() if counts]


def _bucket_width_s(range_s: float, max_points: int) -> float:
    return next((width for width in BUCKETS_S if range_s / width <= max_points), BUCKETS_S[-1])
