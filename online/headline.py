"""The page's answer in one sentence, and the numbers it stands on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from online.fleet import ALARM_TAU
from online.history import History
from online.journal import AcceptanceEntry, StateEntry, SwapEntry

RECENT_S = 300.0
"""What the headline's numbers are taken over."""

SILENT_S = 60.0
"""Older than this is not "now", and a curve has a gap there."""

NOTABLE_TAU = 0.05
"""A change below this is shown without a judgement: traffic alone changes tau by as much."""


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence in four parts, the line below it, and how the change should look."""

    before: str
    number: str = ""
    after: str = ""
    change: str = ""
    below: str = ""
    tone: Literal["good", "plain", "bad"] = "plain"


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


def headline(draft: Served | None, state: StateEntry | None, now_s: float) -> Headline:
    """The page's answer: how many tokens a target step emits, since when it is so, and what the learner does."""
    if draft is None:
        below = "The curves begin when a server has answered requests with a draft."
        return Headline(before="Nothing was measured yet.", below=f"{_learner(state)} {below}")
    tau, before = _tau(draft.entries), draft.before
    name, below = short(draft.version), f"{_learner(state)} {_traffic(draft, now_s)}"
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


def served(history: History) -> Served | None:
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


def short(version: str) -> str:
    """v000012 as v12; what is no version stays."""
    digits = version.removeprefix("v")
    return f"v{int(digits)}" if version.startswith("v") and digits.isdecimal() else version


def _traffic(draft: Served, now_s: float) -> str:
    on_it, servers = list(draft.servers.values()).count(draft.version), len(draft.servers)
    fleet = {1: "Its server has it", 2: "Both servers have it"}.get(servers, f"All {servers} servers have it")
    if on_it < servers:
        fleet = f"{on_it} of {servers} servers have it"
    silent_s = now_s - draft.last_s
    ago = f"; no traffic for {duration(silent_s)}" if silent_s > SILENT_S else ""
    return f"{fleet}; counted over {sum(entry.drafts for entry in draft.entries):,.0f} target steps{ago}."


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
