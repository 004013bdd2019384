"""What the page shows, computed from the journal's entries. Pure: entries and the time in, numbers and words out.

A point of a curve sums the counts of everything that falls into its bucket, so a curve is never a mean of means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from online.headline import RECENT_S, SILENT_S, Headline, Served, headline, served
from online.history import E, History
from online.journal import (
    AcceptanceEntry,
    BufferEntry,
    FaultEntry,
    GateEntry,
    StateEntry,
    SwapEntry,
    TrainingEntry,
)

MAX_POINTS = 180
"""Of a curve of the engines' counts."""

MAX_DOMAIN_POINTS = 90
"""Captured requests are fewer: a wider bucket keeps the noise of a point about the same."""

MAX_CURVES = 8
"""Of one picture: what is beyond is summed into one curve."""

BUCKETS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)


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
    draft, state = served(history), history.last(StateEntry)
    return Overview(
        now_s=now_s,
        begin_s=begin_s,
        width_s=width_s,
        gap_s=max(SILENT_S, 4.0 * domain_width_s),
        headline=headline(draft, state, now_s),
        state=state,
        servers=curves(engine, lambda entry: entry.server or "all servers", width_s, worst_first),
        domains=curves(captured, lambda entry: entry.domain or "no domain", domain_width_s, busiest_first),
        marks=[mark for mark in marks(swaps) if mark.time_s >= begin_s],
        positions=_positions(draft),
        buffer=_thinned(buffer, width_s),
        drops=_drops(buffer, width_s),
        training=_thinned(history.of(TrainingEntry, begin_s), width_s),
        gates=history.of(GateEntry)[-12:][::-1],
        swaps=_without_repeats(swaps)[-30:][::-1],
        faults=[fault for fault in history.of(FaultEntry) if fault.time_s > now_s - 86400][-12:][::-1],
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


def _positions(draft: Served | None) -> list[Positions]:
    shown = []
    for entries in (draft.entries, draft.before) if draft else ():
        entries = [entry for entry in entries if entry.accepted_at]
        if entries:
            drafts = sum(entry.drafts for entry in entries)
            accepted = [sum(at) for at in zip(*(entry.accepted_at for entry in entries), strict=False)]
            shown.append(Positions(version=entries[0].draft_version, shares=[count / drafts for count in accepted]))
    return shown


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
