"""Where the time goes between a record's arrival and its first use in a served draft.

    arrival ── waiting ──► its step ── training, judging, publishing ──► canary ── swap ──► first use
                                        and idle, over several candidates                   ── rollout ──► all servers

The only source is the journal. A step's entry contains how long its fresh records have waited. From
its end to the first swap to a version, the phases of the learner divide the time without a gap. A
record that was trained into an abandoned draft is never served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redraft.online.journal import Entry, StateEntry, SwapEntry, TrainingEntry

PARTS = ("waiting", "training", "judging", "publishing", "canary", "swap", "idle", "halted")
"""In seconds; `canary` is the phase until the swap, `swap` the swap itself."""

GIVEN_UP = "training begins again from"
"""First words of the learner's reason when it starts again from the served version."""


@dataclass(frozen=True)
class Step:
    """The fresh records of a training step."""

    end_s: float
    records: int
    waited_s: float


def account(journal: Sequence[Entry]) -> dict[str, Any]:
    """The mean delays of a record, in all and by version, and the records never served.

    Each part is in seconds; `first_use` is their sum, and `rollout` the time from there to the last
    swap to the same version.
    """
    states = [entry for entry in journal if isinstance(entry, StateEntry)]
    swaps = [e for e in journal if isinstance(e, SwapEntry) and e.outcome == "swapped"]
    pending: list[Step] = []
    versions: list[dict[str, Any]] = []
    seen, given_up = 0, 0
    for entry in journal:
        if isinstance(entry, TrainingEntry):
            # Without a checkpoint, a restarted learner counts from 0 again.
            records = entry.records_seen - (seen if entry.records_seen >= seen else 0)
            seen = entry.records_seen
            if records and entry.waited_s is not None:
                pending.append(Step(entry.time_s, records, entry.waited_s))
        elif isinstance(entry, StateEntry) and entry.reason.startswith(GIVEN_UP):
            given_up += sum(step.records for step in pending)
            pending = []
        elif isinstance(entry, SwapEntry) and entry.outcome == "swapped" and pending:
            if entry.version not in _list_candidates(states):
                continue  # a person or the reconciler swapped back to an earlier version
            last_s = max(swap.time_s for swap in swaps if swap.version == entry.version)
            versions.append(_account_version(entry, pending, states, last_s - entry.time_s))
            pending = []
    waiting = sum(step.records for step in pending)
    return {
        "mean": _average(versions) if versions else None,
        "versions": versions,
        "never_served": given_up,
        "not_yet_served": waiting,
    }


def _list_candidates(states: Sequence[StateEntry]) -> set[str]:
    return {entry.candidate for entry in states if entry.phase == "canary" and entry.candidate}


def _account_version(
    swap: SwapEntry, steps: Sequence[Step], states: Sequence[StateEntry], rollout_s: float
) -> dict[str, Any]:
    swap_s = (swap.duration_ms or 0.0) / 1e3
    records = sum(step.records for step in steps)
    parts = dict.fromkeys(PARTS, 0.0)
    for step in steps:
        share = step.records / records
        parts["waiting"] += share * step.waited_s
        for phase, seconds in _divide(states, step.end_s, swap.time_s - swap_s):
            parts[phase] += share * seconds
    parts["swap"] = swap_s
    return {
        "version": swap.version,
        "records": records,
        **parts,
        "first_use": sum(parts.values()),
        "rollout": rollout_s,
    }


def _divide(states: Sequence[StateEntry], from_s: float, to_s: float) -> list[tuple[str, float]]:
    """The phases between two moments, with their seconds. `rolling` counts as `canary`."""
    pairs: list[tuple[str, float]] = []
    ends = [*(state.time_s for state in states[1:]), to_s]
    for state, end_s in zip(states, ends, strict=True):
        seconds = min(end_s, to_s) - max(state.time_s, from_s)
        if seconds > 0:
            pairs.append(("canary" if state.phase == "rolling" else state.phase, seconds))
    return pairs


def _average(versions: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The means over the records of all versions."""
    records = sum(version["records"] for version in versions)
    return {
        name: sum(version["records"] * version[name] for version in versions) / records
        for name in (*PARTS, "first_use", "rollout")
    }
