"""Measures the delays between a record's arrival and its first use in a served draft.

    arrival ── waiting ──► its step ── training, judging, publishing ──► canary ── swap ──► first use
                                        and idle, over several candidates                   ── rollout ──► all servers

The only source is the journal. A step's entry contains the waiting times of its fresh records and
its own duration. From its beginning to the first swap to a version, the learner's phases account
for all the time; pauses for running requests are counted separately. A record that arrives while an
earlier version is trained, judged or rolled out waits: `waiting_while` divides its wait by phase. A
record that was trained into an abandoned draft is never served.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from redraft.online.journal import Entry, GateEntry, StateEntry, SwapEntry, TrainingEntry

PARTS = (
    "waiting", "training", "judging", "paused", "publishing", "canary", "swap", "idle", "halted",
)  # fmt: skip
"""Parts of the delay, in seconds. `paused` covers the pauses of training and judging while requests
ran, `canary` is the phase until the swap, and `swap` is the swap itself.
"""

GIVEN_UP = "training begins again from"
"""First words of the learner's reason when it starts again from the served version."""


@dataclass(frozen=True)
class Step:
    """The fresh records of a training step."""

    begin_s: float
    records: int
    seen: int
    """Number of records trained on by the end of the step."""
    waited_s: float


@dataclass(frozen=True)
class Paused:
    """A period, and the share of it that the learner paused for running requests."""

    phase: str
    begin_s: float
    end_s: float
    share: float


def account(journal: Sequence[Entry]) -> dict[str, Any]:
    """Return a record's mean delays, in total and by version, and the number of unserved records.

    Each part is in seconds; `first_use` is their sum, and `rollout` the time from there to the last
    swap to the same version. `passed_over` records were never trained on as new, because training
    was slower than traffic.
    """
    states = [entry for entry in journal if isinstance(entry, StateEntry)]
    swaps = [e for e in journal if isinstance(e, SwapEntry) and e.outcome == "swapped"]
    paused = list(_list_paused(journal))
    pending: list[Step] = []
    versions: list[dict[str, Any]] = []
    served, given_up = 0, 0
    for entry in journal:
        if isinstance(entry, TrainingEntry):
            # A killed learner repeats the steps after its last checkpoint. Without a checkpoint, it
            # counts from 0.
            pending = [step for step in pending if step.seen < entry.records_seen]
            served = served if served < entry.records_seen else 0
            records = entry.records_seen - max([served, *(step.seen for step in pending)])
            if records and entry.waited_s is not None:
                begin_s = entry.time_s - (entry.step_s or 0.0)
                pending.append(Step(begin_s, records, entry.records_seen, entry.waited_s))
        elif isinstance(entry, StateEntry) and entry.reason.startswith(GIVEN_UP):
            given_up += sum(step.records for step in pending)
            served, pending = max([served, *(step.seen for step in pending)]), []
        elif isinstance(entry, SwapEntry) and entry.outcome == "swapped" and pending:
            if entry.version not in _list_candidates(states):
                continue  # a person or the reconciler swapped back to an earlier version
            last_s = max(swap.time_s for swap in swaps if swap.version == entry.version)
            rollout_s = last_s - entry.time_s
            versions.append(_account_version(entry, pending, states, paused, rollout_s))
            served, pending = pending[-1].seen, []
    return {
        "mean": _average(versions) if versions else None,
        "versions": versions,
        "never_served": given_up,
        "not_yet_served": sum(step.records for step in pending),
        "passed_over": max(
            (entry.skipped for entry in journal if isinstance(entry, TrainingEntry)), default=0
        ),
    }


def _list_paused(journal: Sequence[Entry]) -> Iterator[Paused]:
    """Yield the steps and the periods of judging in which the learner paused."""
    state_s = 0.0
    for entry in journal:
        if isinstance(entry, StateEntry):
            state_s = entry.time_s
        elif isinstance(entry, TrainingEntry) and entry.paused_s and entry.step_s:
            begin_s = entry.time_s - entry.step_s
            yield Paused("training", begin_s, entry.time_s, entry.paused_s / entry.step_s)
        elif isinstance(entry, GateEntry) and entry.paused_s and entry.time_s > state_s:
            share = min(1.0, entry.paused_s / (entry.time_s - state_s))
            yield Paused("judging", state_s, entry.time_s, share)


def _list_candidates(states: Sequence[StateEntry]) -> set[str]:
    return {entry.candidate for entry in states if entry.phase == "canary" and entry.candidate}


def _account_version(
    swap: SwapEntry,
    steps: Sequence[Step],
    states: Sequence[StateEntry],
    paused: Sequence[Paused],
    rollout_s: float,
) -> dict[str, Any]:
    swap_s = (swap.duration_ms or 0.0) / 1e3
    records = sum(step.records for step in steps)
    parts = dict.fromkeys(PARTS, 0.0)
    waiting = dict.fromkeys(PARTS[1:], 0.0)
    for step in steps:
        share = step.records / records
        parts["waiting"] += share * step.waited_s
        arrival_s, waited_s = step.begin_s - step.waited_s, 0.0
        for phase, seconds in _divide(states, [], arrival_s, step.begin_s):
            waiting[phase] += share * seconds
            waited_s += seconds
        waiting["idle"] += share * (step.waited_s - waited_s)  # before the learner's first entry
        for phase, seconds in _divide(states, paused, step.begin_s, swap.time_s - swap_s):
            parts[phase] += share * seconds
    parts["swap"] = swap_s
    return {
        "version": swap.version,
        "records": records,
        **parts,
        "first_use": sum(parts.values()),
        "rollout": rollout_s,
        "waiting_while": {phase: seconds for phase, seconds in waiting.items() if seconds},
    }


def _divide(
    states: Sequence[StateEntry], paused: Sequence[Paused], from_s: float, to_s: float
) -> Iterator[tuple[str, float]]:
    """Divide the time between two moments into phases and pauses, in seconds.

    `rolling` counts as `canary`.
    """
    ends = [*(state.time_s for state in states[1:]), to_s]
    for state, end_s in zip(states, ends, strict=True):
        seconds = min(end_s, to_s) - max(state.time_s, from_s)
        if seconds > 0:
            yield ("canary" if state.phase == "rolling" else state.phase), seconds
    for one in paused:
        seconds = one.share * (min(one.end_s, to_s) - max(one.begin_s, from_s))
        if seconds > 0:
            yield from ((one.phase, -seconds), ("paused", seconds))


def _average(versions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over the records of all versions."""
    records = sum(version["records"] for version in versions)

    def mean(values: Sequence[float]) -> float:
        pairs = zip(versions, values, strict=True)
        return float(sum(version["records"] * value for version, value in pairs) / records)

    names = (*PARTS, "first_use", "rollout")
    phases = dict.fromkeys(phase for version in versions for phase in version["waiting_while"])
    return {name: mean([version[name] for version in versions]) for name in names} | {
        "waiting_while": {
            phase: mean([version["waiting_while"].get(phase, 0.0) for version in versions])
            for phase in phases
        }
    }
