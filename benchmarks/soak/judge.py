"""Judge whether the service survived everything.

The functions depend only on the observations they are given.

faults     every target recovered, and no process ended unless the soak killed it
records    every record that the broker or the spool acknowledged is stored, by id: faults are too short
           for records to expire, and nothing deletes them
versions   all servers of a domain serve the current version; in a long soak, new versions were promoted
requests   every failed request got an error that the client can see
attack     no process was ended, no honest stream cut, no log flooded, no rule broken, and enough was sent
memory     resident bytes and descriptors of every process are flat over its life
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

WARM_UP_S = 120.0
"""Time in seconds after readiness that is not measured: the process fills its caches, and a learner
begins to train.
"""

MIN_LIFE_S = 120.0
"""Minimum measured lifetime of a process in seconds. A shorter one shows no growth."""

MIN_TOLD = 6
"""Minimum number of phase changes for judging a learner's memory."""

FLAT_SHARE, FLAT_BYTES, FLAT_DESCRIPTORS = 0.1, 64 << 20, 64
"""A process is flat if it grows by less than this share or by less than this number of bytes.
Allocators and caches need some room.
"""


@dataclass(frozen=True, kw_only=True)
class FaultSeen:
    name: str
    at: str = ""
    """Time of the injection (UTC), for finding it in the logs."""
    problem: str = ""
    """Why the service did not survive the fault; empty if it did."""
    seconds: float = 0.0
    """Time in seconds from the injection until the target recovered."""


@dataclass(frozen=True, kw_only=True)
class RecordsSeen:
    acked: Collection[str]
    """Ids of the records that the log or the spool acknowledged."""
    stored: Collection[str]
    """Ids of the records in the learner's files at the end."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of records that the learner dropped, by reason. They are the hostile ones."""

    @property
    def lost(self) -> set[str]:
        return set(self.acked) - set(self.stored)


@dataclass(frozen=True, kw_only=True)
class LifeSeen:
    """One life of a process."""

    name: str
    samples: Sequence[tuple[float, int, int]] = ()
    """Samples of (monotonic time, resident bytes, descriptors), oldest first."""
    settled: Sequence[int] = ()
    """Resident bytes of a learner after each phase change, once freed memory was returned. The
    first value follows the first training attempt, because no optimizer exists before it.
    """
    unwanted_exit: str = ""
    """How the process ended, if the soak did not kill it."""

    def find_growth(self) -> Growth | None:
        """Compare the minimum memory in the last quarter with the first two, after the warm-up.

        Minima are compared because a learner uses more memory while it trains than while it waits.
        The larger minimum of the first two quarters counts, because training may begin in the
        second. A learner that trains reports the memory it keeps at each phase change. The minima
        of the two halves of these values are compared, because gradients and optimizer states (87
        MB for the draft here) come and go. Descriptors are compared by their medians. Returns None
        if the life was too short or had too few phase changes.
        """
        begin_s = self.samples[0][0] + WARM_UP_S if self.samples else 0.0
        measured = [sample for sample in self.samples if sample[0] >= begin_s]
        if len(measured) < 8 or measured[-1][0] - measured[0][0] < MIN_LIFE_S:
            return None
        quarter = len(measured) // 4
        first, second, last = (
            measured[:quarter],
            measured[quarter : 2 * quarter],
            measured[-quarter:],
        )
        least = [min(size for _, size, _ in part) for part in (first, second, last)]
        before, after = max(least[:2]), least[2]
        # These values exclude freed blocks. A sample may fall into a training step, which takes 70
        # MiB more than the learner keeps.
        if told := len(self.settled):
            if told < MIN_TOLD:
                return None
            before, after = min(self.settled[: told // 2]), min(self.settled[told // 2 :])
        files = [statistics.median(count for _, _, count in part) for part in (first, last)]
        born_s = self.samples[0][0]
        return Growth(
            name=self.name,
            before=before,
            after=after,
            descriptors=int(files[1] - files[0]),
            by_minute={
                int((time_s - born_s) // 60): size >> 20 for time_s, size, _ in self.samples
            },
        )


@dataclass(frozen=True, kw_only=True)
class Growth:
    name: str
    before: int
    """Resident bytes early in the process's life."""
    after: int
    """Resident bytes at the end of its life."""
    descriptors: int
    """Descriptors gained."""
    by_minute: Mapping[int, int]
    """Resident MiB at the end of each minute, including the warm-up. A step indicates a cache, a
    slope a leak.
    """

    @property
    def share(self) -> float:
        return self.after / self.before - 1

    @property
    def is_flat(self) -> bool:
        grown = self.after - self.before
        return (
            grown < FLAT_BYTES or self.share < FLAT_SHARE
        ) and self.descriptors < FLAT_DESCRIPTORS


@dataclass(frozen=True, kw_only=True)
class Seen:
    """All observations that the judge uses."""

    faults: Sequence[FaultSeen]
    num_planned: int
    """Number of faults requested."""
    records: Mapping[str, RecordsSeen]
    """The fate of the records, by route: `log` and `spool`."""
    served: Mapping[str, str]
    """Version that each server serves at the end; empty if the server does not answer."""
    current: str
    """The registry's current version at the end."""
    num_promoted: int = 0
    """Number of versions that became current during the soak."""
    must_promote: bool = False
    """Whether the soak is long enough that a version must have been promoted."""
    requests: Mapping[str, int]
    """Number of requests by verdict: answered, left, told, cut, untold."""
    untold: Sequence[str] = ()
    """The first requests that failed without an error that the client could see."""
    attack: Mapping[str, Any] = field(default_factory=dict)
    """Figures of the attacker, from `Attack.describe`."""
    must_attack: int = 0
    """Minimum number of the attacker's requests."""
    lives: Sequence[LifeSeen] = ()


def judge(seen: Seen) -> dict[str, Any]:
    """Return the report: figures, and under `failures` a line for everything not survived."""
    growths = [growth for life in seen.lives if (growth := life.find_growth())]
    worst = max(growths, key=lambda growth: growth.share, default=None)
    survived = [fault for fault in seen.faults if not fault.problem]
    return {
        "faults": {
            "planned": seen.num_planned,
            "injected": len(seen.faults),
            "survived": len(survived),
            "by_name": _count_by_name(seen.faults),
            "in_order": [asdict(fault) for fault in seen.faults],
        },
        "records": {
            "acked": sum(len(way.acked) for way in seen.records.values()),
            "lost": sum(len(way.lost) for way in seen.records.values()),
            "by_way": {name: _describe(way) for name, way in seen.records.items()},
        },
        "requests": {
            **seen.requests,
            "total": sum(seen.requests.values()),
            "failed_untold": seen.requests.get("untold", 0),
            "untold_examples": seen.untold,
        },
        "attack": dict(seen.attack),
        "versions": {"served": seen.served, "current": seen.current, "promoted": seen.num_promoted},
        "memory": {
            "growth": worst.share if worst else None,
            "of": worst.name if worst else None,
            "lives": [{**asdict(growth), "share": growth.share} for growth in growths],
        },
        "failures": find_failures(seen, growths),
    }


def find_failures(seen: Seen, growths: Sequence[Growth]) -> list[str]:
    """Return one line for everything that was not survived."""
    failures = [f"{fault.name}: {fault.problem}" for fault in seen.faults if fault.problem]
    if not seen.faults:
        failures.append("no fault was injected")
    for name, way in seen.records.items():
        if way.lost:
            failures.append(
                f"{len(way.lost)} of {len(way.acked)} acknowledged records of the {name} are lost"
            )
        if not way.acked:
            failures.append(f"no record came through the {name}")
    for server, version in seen.served.items():
        if version != seen.current:
            failures.append(
                f"{server} serves {version or 'nothing'}, the current version is {seen.current}"
            )
    if seen.must_promote and not seen.num_promoted:
        failures.append("no version was promoted, so no rollout was under fire")
    if untold := seen.requests.get("untold", 0):
        failures.append(
            f"{untold} requests failed untold, for example: {seen.untold[0] if seen.untold else ''}"
        )
    if not seen.requests.get("answered"):
        failures.append("no request was answered")
    failures += [f"attack: {problem}" for problem in seen.attack.get("problems", ())]
    if (num_sent := seen.attack.get("requests", 0)) < seen.must_attack:
        failures.append(f"{num_sent} requests of the attacker, {seen.must_attack} are needed")
    failures += [
        f"{life.name} exited by itself: {life.unwanted_exit}"
        for life in seen.lives
        if life.unwanted_exit
    ]
    for growth in growths:
        if not growth.is_flat:
            grown = (
                f"{growth.before >> 20} to {growth.after >> 20} MiB, {growth.descriptors:+d} "
                "descriptors"
            )
            failures.append(f"{growth.name} grew: {grown}")
    return failures


def _describe(way: RecordsSeen) -> dict[str, Any]:
    return {
        "acked": len(way.acked),
        "stored": len(way.stored),
        "lost": len(way.lost),
        "lost_ids": sorted(way.lost)[:20],
        "dropped": dict(way.dropped),
    }


def _count_by_name(faults: Sequence[FaultSeen]) -> dict[str, dict[str, float]]:
    injected = Counter(fault.name for fault in faults)
    survived = Counter(fault.name for fault in faults if not fault.problem)
    slowest = {
        name: max(fault.seconds for fault in faults if fault.name == name) for name in injected
    }
    return {
        name: {
            "injected": injected[name],
            "survived": survived[name],
            "slowest_s": round(slowest[name], 1),
        }
        for name in sorted(injected)
    }


def write_table(report: Mapping[str, Any]) -> str:
    """Return the table of faults with the figures below it."""
    rows = [f"{'fault':<36} injected survived  slowest"]
    for name, counts in report["faults"]["by_name"].items():
        rows.append(
            f"{name:<36} {counts['injected']:8d} {counts['survived']:8d} "
            f"{counts['slowest_s']:7.1f}s"
        )
    faults, records, requests = report["faults"], report["records"], report["requests"]
    growth, attack = report["memory"]["growth"], report["attack"]
    shown = (
        "not measured" if growth is None else f"{growth:+.1%} at most ({report['memory']['of']})"
    )
    return "\n".join(
        [
            *rows,
            f"{'all':<36} {faults['injected']:8d} {faults['survived']:8d}",
            f"faults: {faults['injected']} of {faults['planned']} injected",
            f"records: {records['acked']} acknowledged, {records['lost']} lost",
            f"requests: {requests['total']}, of which {requests.get('told', 0)} were told why they "
            f"failed, {requests.get('cut', 0)} cut by a kill of a tap, {requests['failed_untold']} "
            "untold",
            f"attack: {attack.get('requests', 0)} requests with seed {attack.get('seed')}, "
            f"{attack.get('ended', 0)} processes ended, {attack.get('honest_streams_cut', 0)} of "
            f"{attack.get('honest_streams', 0)} honest streams cut",
            f"versions: {report['versions']['current']} on "
            f"{sum(v == report['versions']['current'] for v in report['versions']['served'].values())} "
            f"of {len(report['versions']['served'])} servers, {report['versions']['promoted']} "
            "promoted under fire",
            f"memory: {shown}",
            *(f"NOT SURVIVED: {failure}" for failure in report["failures"]),
        ]
    )
