"""The data of the page, computed from the journal's entries.

The functions are pure: they take entries and the time, and return numbers and words.

A point of a curve sums the counts of a time bucket, so a curve is never a mean of means.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from redraft.online.fleet.watch import SERVER_FAULTS
from redraft.online.journal import (
    AcceptanceEntry,
    BufferEntry,
    FaultEntry,
    GateEntry,
    StalenessEntry,
    StateEntry,
    SwapEntry,
    TrainingEntry,
)
from redraft.online.page.headline import (
    RECENT_S,
    SILENT_S,
    Headline,
    ServedDraft,
    compose_headline,
    count_shown,
    find_served_draft,
)
from redraft.online.page.history import DONE, E, History

MAX_POINTS = 180  # Maximum number of points in a server's curve.
# Maximum number of points in a domain's curve; there are few captured requests, so buckets are
# wide.
MAX_DOMAIN_POINTS = 90
MAX_CURVES = 8  # Maximum number of curves in one chart; the rest are summed into one.
BUCKETS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)


class Point(msgspec.Struct, frozen=True, array_like=True):
    time_s: float
    tau: float
    drafts: float
    version: str


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tau: float
    """tau over the last RECENT_S of the curve, for the newest version."""
    points: list[Point]
    target_version: str
    """Newest target weights of a server; empty for the weights in its folder."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """The first successful swap of a rollout or rollback."""

    time_s: float
    version: str
    is_rollback: bool


class Positions(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    shares: list[float]
    """Fraction of the drafts accepted up to each position."""


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    now_s: float
    begin_s: float
    """Start time of the curves."""
    width_s: float
    gap_s: float
    """Gap in seconds above which two points are not connected."""
    headline: Headline
    state: StateEntry | None
    servers: list[Curve]
    paces: dict[str, str]
    """Draft tokens by batch size, for each server that chooses them at run time."""
    domains: list[Curve]
    marks: list[Mark]
    positions: list[Positions]
    """Positions of the served version, followed by those of the previous version."""
    buffer: list[BufferEntry]
    drops: list[tuple[float, dict[str, int]]]
    """Records dropped since the previous point, by reason."""
    training: list[TrainingEntry]
    gates: list[GateEntry]
    staleness: StalenessEntry | None
    """The newest comparison of the draft with its own acceptance at promotion."""
    swaps: list[SwapEntry]
    faults: list[FaultEntry]


def build_overview(history: History, now_s: float, range_s: float = 0) -> Overview:
    """Build the page's data from the last `range_s` seconds, and from the newest events.

    The events are verdicts, swaps and faults. With a `range_s` of 0, all entries kept in memory are
    used.
    """
    first_s = history.begin_s()
    begin_s = max(now_s - range_s if range_s else 0.0, now_s if first_s is None else first_s)
    width_s = _choose_bucket_width_s(now_s - begin_s, MAX_POINTS)
    domain_width_s = _choose_bucket_width_s(now_s - begin_s, MAX_DOMAIN_POINTS)
    counted = history.select(AcceptanceEntry, begin_s)
    engine = [entry for entry in counted if entry.domain is None]
    captured = [entry for entry in counted if entry.domain is not None]
    swaps = history.select(SwapEntry)
    buffer = history.select(BufferEntry, begin_s)
    draft, state = find_served_draft(history), history.last(StateEntry)
    counted_state = history.last(StateEntry, lambda entry: entry.promoted is not None)
    staleness = history.last(StalenessEntry)
    return Overview(
        now_s=now_s,
        begin_s=begin_s,
        width_s=width_s,
        gap_s=max(SILENT_S, 4.0 * domain_width_s),
        headline=compose_headline(
            draft,
            state,
            now_s,
            is_asleep=staleness is not None and staleness.is_asleep,
            promoted=counted_state.promoted if counted_state else None,
        ),
        state=state,
        servers=build_curves(
            engine,
            lambda entry: entry.server or "all servers",
            width_s,
            lambda n, accepted: -accepted / n,
        ),
        paces={
            server: pace
            for server, pace in {entry.server or "": entry.pace for entry in engine}.items()
            if pace
        },
        domains=build_curves(
            captured, lambda entry: entry.domain or "no domain", domain_width_s, lambda n, _: n
        ),
        marks=[mark for mark in find_marks(swaps) if mark.time_s >= begin_s],
        positions=_build_positions(draft),
        buffer=_thin(buffer, width_s),
        drops=_sum_drops(buffer, width_s),
        training=_thin(history.select(TrainingEntry, begin_s), width_s),
        gates=history.select(GateEntry)[-12:][::-1],
        staleness=staleness,
        swaps=swaps[-30:][::-1],
        faults=_list_faults(history.select(FaultEntry), now_s),
    )


def build_curves(
    entries: Sequence[AcceptanceEntry],
    name: Callable[[AcceptanceEntry], str],
    width_s: float,
    rank: Callable[[float, float], float],
) -> list[Curve]:
    """Build the curves of tau over time, by name.

    The names with the highest `rank(drafts, accepted)` are shown, and the others are summed.
    """
    # 1. Sum drafts and accepted tokens by name, to choose the curves to draw.
    totals: dict[str, list[float]] = {}
    for entry in entries:
        drafts, accepted = count_shown(entry)
        total = totals.setdefault(name(entry), [0.0, 0.0])
        total[0] += drafts
        total[1] += accepted
    drawn = sorted(
        (key for key in totals if totals[key][0]), key=lambda key: rank(*totals[key]), reverse=True
    )
    shown = set(drawn if len(drawn) <= MAX_CURVES else drawn[: MAX_CURVES - 1])
    rest = f"{len(drawn) - len(shown)} others"
    # 2. Sum the counts by bucket and version. A bucket in which a server swapped gives two points.
    sums: dict[str, dict[tuple[int, str], list[float]]] = {key: {} for key in sorted(shown)}
    for entry in entries:
        buckets = sums.setdefault(name(entry) if name(entry) in shown else rest, {})
        bucket = buckets.setdefault(
            (int(entry.time_s // width_s), entry.draft_version), [0.0, 0.0, 0.0]
        )
        # [time of the last entry, drafts, accepted]. The point is drawn at that time, because the
        # end of the bucket may be in the future.
        bucket[0] = max(bucket[0], entry.time_s)
        drafts, accepted = count_shown(entry)
        bucket[1] += drafts
        bucket[2] += accepted
    points = {key: _build_points(buckets) for key, buckets in sums.items()}
    targets = {name(entry): entry.target_version or "" for entry in entries}
    return [
        Curve(
            name=key,
            tau=_compute_recent_tau(found),
            points=found,
            target_version=targets.get(key, ""),
        )
        for key, found in points.items()
        if found
    ]


def find_marks(swaps: Sequence[SwapEntry]) -> list[Mark]:
    """Return one mark per rollout and rollback.

    The mark is the first successful swap after a different version was requested from the fleet.
    """
    found: list[Mark] = []
    for swap in swaps:
        if swap.outcome not in DONE:
            continue
        is_rollback = swap.outcome == "rolled_back"
        if not found or (found[-1].version, found[-1].is_rollback) != (swap.version, is_rollback):
            found.append(Mark(time_s=swap.time_s, version=swap.version, is_rollback=is_rollback))
    return found


def _list_faults(faults: Sequence[FaultEntry], now_s: float) -> list[FaultEntry]:
    """List the last day's faults, newest first.

    A repeated fault of a server is listed once, with its last reason.
    """
    kept: dict[tuple[str, str | None], FaultEntry] = {}
    for fault in faults:
        if fault.time_s > now_s - 86400:
            what = SERVER_FAULTS[0] if fault.what in SERVER_FAULTS else fault.what
            kept.pop((what, fault.detail), None)
            kept[what, fault.detail] = fault
    return list(kept.values())[-12:][::-1]


def _build_points(buckets: dict[tuple[int, str], list[float]]) -> list[Point]:
    points = []
    for (_, version), (time_s, drafts, accepted) in buckets.items():
        if drafts:
            points.append(Point(time_s, 1 + accepted / drafts, drafts, version))
    points.sort(key=lambda point: point.time_s)
    if (
        len(points) > 1
        and points[-2].version == points[-1].version
        and points[-1].drafts < points[-2].drafts / 2
    ):
        # A new bucket is mostly noise, so merge it into the one before it.
        points[-2:] = [Point(points[-1].time_s, *_merge_points(points[-2:]), points[-1].version)]
    return points


def _compute_recent_tau(points: Sequence[Point]) -> float:
    last = points[-1]
    return _merge_points(
        [p for p in points if p.version == last.version and p.time_s > last.time_s - RECENT_S]
    )[0]


def _merge_points(points: Sequence[Point]) -> tuple[float, float]:
    drafts = sum(point.drafts for point in points)
    return sum(point.tau * point.drafts for point in points) / drafts, drafts


def _build_positions(draft: ServedDraft | None) -> list[Positions]:
    if draft is None:
        return []
    shown = []
    for version_entries in (draft.entries, draft.before):
        entries = [entry for entry in version_entries if entry.accepted_at]
        if entries:
            drafts = sum(entry.drafts for entry in entries)
            accepted = [
                sum(at) for at in zip(*(entry.accepted_at for entry in entries), strict=False)
            ]
            shown.append(
                Positions(
                    version=entries[0].draft_version, shares=[count / drafts for count in accepted]
                )
            )
    return shown


def _thin(entries: Sequence[E], width_s: float) -> list[E]:
    """Keep the last entry of every bucket."""
    return list({int(entry.time_s // width_s): entry for entry in entries}.values())


def _sum_drops(
    entries: Sequence[BufferEntry], width_s: float
) -> list[tuple[float, dict[str, int]]]:
    found: dict[int, tuple[float, Counter[str]]] = {}
    for earlier, entry in pairwise(entries):
        more = Counter[str]()
        for reason, count in entry.dropped.items():
            before = earlier.dropped.get(reason, 0)
            # A counter below its last value has restarted from 0 with its process.
            more[reason] = count - before if count >= before else count
        bucket = int(entry.time_s // width_s)
        _, counts = found.get(bucket, (0.0, Counter[str]()))
        found[bucket] = (entry.time_s, counts + more)
    return [(time_s, dict(counts)) for time_s, counts in found.values() if counts]


def _choose_bucket_width_s(range_s: float, max_points: int) -> float:
    return next((width for width in BUCKETS_S if range_s / width <= max_points), BUCKETS_S[-1])
