"""The headline of the page, i.e. the result in one sentence, with the numbers behind it."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from redraft.online.fleet.server import ALARM_SHARE, is_paced
from redraft.online.journal import AcceptanceEntry, StateEntry, SwapEntry
from redraft.online.page.history import History

RECENT_S = 300.0  # Period covered by the headline's numbers, in seconds.
# Maximum age of a number shown as current; a larger distance leaves a gap in a curve.
SILENT_S = 60.0
# Smallest change shown as good or bad, because traffic alone causes smaller ones.
NOTABLE_TAU = 0.05


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """One sentence in four parts, the line below it, and whether the change is good or bad."""

    before: str
    number: str = ""
    after: str = ""
    change: str = ""
    below: str = ""
    tone: Literal["good", "plain", "bad"] = "plain"


@dataclass(frozen=True, kw_only=True)
class ServedDraft:
    """The version on most servers, and the engines' counts for it."""

    version: str
    entries: list[AcceptanceEntry]
    """Entries of this version with traffic, from the last RECENT_S."""
    before: list[AcceptanceEntry]
    """Acceptance of the previous version over RECENT_S; empty if unknown."""
    servers: dict[str | None, str]
    """The last known version of every server."""
    tokens_per_s: float | None
    """Tokens per second of all servers, over the last RECENT_S with traffic."""
    shares: tuple[float, float] | None
    """Fractions of all servers' tokens drafted by lookups and by the versions. A draft that has not
    read the text counts as a lookup. None if unknown.
    """
    last_s: float


def compose_headline(
    draft: ServedDraft | None,
    state: StateEntry | None,
    now_s: float,
    *,
    is_asleep: bool = False,
    promoted: int | None = None,
) -> Headline:
    """Compose the headline of the page.

    It gives the tokens per drafted step, the change since the last version, and the learner's
    phase.
    """
    learner = _describe_learner(state, is_asleep, promoted)
    if draft is None:
        below = "The curves start once a server has answered requests with a draft."
        return Headline(
            before="Nothing has been measured yet.",
            below=f"{learner} {below}",
        )
    before, name = draft.before, shorten_version(draft.version)
    tau, own = _compute_tau(draft.entries), _compute_own_tau(draft.entries)
    below = f"{learner} {_describe_traffic(draft, now_s)}"
    number = f"{tau:.2f} tokens"
    # The draft is off until it has been trained.
    is_new = not before and is_paced(draft.entries[-1].pace)
    if own is not None and own < 1 + ALARM_SHARE and not is_new:
        remedy = "If the learner does not roll it back, run redraft fleet rollback."
        return Headline(
            before=f"Draft {name} is hardly accepted:",
            number=f"{own:.2f} tokens",
            after="per drafted step.",
            below=f"{below} {remedy}",
            tone="bad",
        )
    if not before:
        return Headline(
            before=f"Draft {name} emits", number=number, after="per drafted step.", below=below
        )
    gain = tau - _compute_tau(before)
    return Headline(
        before=f"Draft {name} emits",
        number=number,
        after="per drafted step,",
        change=f"{f'{gain:+.2f}'.replace('-', '−')} since "
        f"{shorten_version(before[0].draft_version)}.",
        below=below,
        tone="good" if gain >= NOTABLE_TAU else "bad" if gain <= -NOTABLE_TAU else "plain",
    )


def find_served_draft(history: History) -> ServedDraft | None:
    """Find the version that most servers had in their latest entries.

    In a tie, the most recently observed version wins.
    """
    recent = _select_engine_entries(history, ending_s=None)
    if not recent:
        return None
    servers: dict[str | None, str] = {}
    for entry in recent:
        # Move it to the end, because a dict keeps the position of the first entry.
        servers.pop(entry.server, None)
        servers[entry.server] = entry.draft_version
    versions = list(servers.values())[::-1]
    version = max(versions, key=versions.count)
    meanwhile = history.select(AcceptanceEntry, recent[-1].time_s - RECENT_S)
    return ServedDraft(
        version=version,
        entries=[entry for entry in recent if entry.draft_version == version],
        before=_select_entries_before(history, version),
        servers=servers,
        tokens_per_s=_sum_rates(meanwhile),
        shares=_compute_shares(meanwhile),
        last_s=recent[-1].time_s,
    )


def _select_entries_before(history: History, version: str) -> list[AcceptanceEntry]:
    """Select the previous version's entries in the RECENT_S before the first swap.

    Rollbacks are skipped, because they restored a version that had been served before.
    """
    first: SwapEntry | None = None
    # Search from the newest swap back to the first one in the latest run of swaps to this version.
    for swap in reversed([swap for swap in history.select(SwapEntry) if swap.outcome == "swapped"]):
        if swap.version == version and swap.from_version != version:
            first = swap
        elif first is not None:
            break
    if first is None:
        return []
    engine = _select_engine_entries(history, ending_s=first.time_s)
    return [entry for entry in engine if entry.draft_version == first.from_version]


def _select_engine_entries(history: History, ending_s: float | None) -> list[AcceptanceEntry]:
    """Select the engines' counts in the RECENT_S seconds before `ending_s`.

    If `ending_s` is None, the period ends with the last entry that has traffic.
    """
    if ending_s is None:
        last = history.last(
            AcceptanceEntry, lambda entry: entry.domain is None and count_shown(entry)[0] > 0
        )
        if last is None:
            return []
        ending_s = last.time_s
    entries = history.select(AcceptanceEntry, ending_s - RECENT_S)
    return [
        entry
        for entry in entries
        if entry.domain is None and count_shown(entry)[0] and entry.time_s <= ending_s
    ]


def count_shown(entry: AcceptanceEntry) -> tuple[float, float]:
    """Return drafts and accepted tokens as the engine counts them, including lookups.

    `redraft up` shows the same numbers. If the engine's counts are unknown, those of the version
    are returned.
    """
    if entry.served_drafts is None or entry.served_accepted is None:
        return entry.drafts, entry.accepted
    return entry.served_drafts, entry.served_accepted


def _compute_tau(entries: Sequence[AcceptanceEntry]) -> float:
    drafts, accepted = map(sum, zip(*map(count_shown, entries), strict=True))
    return 1 + accepted / drafts


def _compute_own_tau(entries: Sequence[AcceptanceEntry]) -> float | None:
    """Compute tau for the version's own drafts; None if there are none."""
    drafts = sum(entry.drafts for entry in entries)
    return 1 + sum(entry.accepted for entry in entries) / drafts if drafts else None


def _sum_rates(entries: Sequence[AcceptanceEntry]) -> float | None:
    """Sum the tokens per second of all servers; None if no engine counts them."""
    tokens, seconds = defaultdict[str | None, float](float), defaultdict[str | None, float](float)
    for entry in entries:
        if entry.served_tokens is not None and entry.served_s:
            tokens[entry.server] += entry.served_tokens
            seconds[entry.server] += entry.served_s
    return sum(tokens[server] / seconds[server] for server in seconds) if seconds else None


def _compute_shares(entries: Sequence[AcceptanceEntry]) -> tuple[float, float] | None:
    """Compute `ServedDraft.shares`."""
    lookups = own = tokens = 0.0
    for entry in entries:
        if entry.served_accepted is not None and entry.served_tokens is not None:
            # The two counters are read one after the other, so they may differ slightly.
            lookups += max(0.0, entry.served_accepted - entry.accepted)
            own += entry.accepted
            tokens += entry.served_tokens
    return (lookups / tokens, own / tokens) if tokens else None


def shorten_version(version: str) -> str:
    """Shorten v000012 to v12; other names are returned unchanged."""
    digits = version.removeprefix("v")
    return f"v{int(digits)}" if version.startswith("v") and digits.isdecimal() else version


def _describe_traffic(draft: ServedDraft, now_s: float) -> str:
    on_it, servers = list(draft.servers.values()).count(draft.version), len(draft.servers)
    fleet = {1: "Its server runs it", 2: "Both servers run it"}.get(
        servers, f"All {servers} servers run it"
    )
    if on_it < servers:
        fleet = f"{on_it} of {servers} servers run it"
    silent_s = now_s - draft.last_s
    ago = f"; no traffic for {format_duration(silent_s)}" if silent_s > SILENT_S else ""
    rate = "" if draft.tokens_per_s is None else f"; {draft.tokens_per_s:,.1f} tokens/s"
    if draft.shares is not None:
        lookups, own = draft.shares
        rate += f", {lookups:.0%} of them drafted by lookups and {own:.0%} by the draft"
    steps = sum(count_shown(entry)[0] for entry in draft.entries)
    return f"{fleet}{rate}; measured over {steps:,.0f} drafted steps{ago}."


def _describe_learner(state: StateEntry | None, is_asleep: bool, promoted: int | None) -> str:
    if state is None:
        return "The learner has not started."
    versions = "" if promoted is None else f" {describe_promoted(promoted)}."
    if is_asleep and state.phase == "idle":
        return f"The learner sleeps: training is not worth it until acceptance falls.{versions}"
    candidate = f" {shorten_version(state.candidate)}" if state.candidate else ""
    return f"Learner: {state.phase}{candidate}.{versions}"


def describe_promoted(promoted: int) -> str:
    """Return "No version was promoted yet", "2 versions were promoted" or similar."""
    if not promoted:
        return "No version was promoted yet"
    return "1 version was promoted" if promoted == 1 else f"{promoted} versions were promoted"


def format_duration(seconds: float) -> str:
    """Format a duration in the largest fitting unit: 42 s, 7 min, 3 h, 2 days."""
    # A larger unit begins at 90 s, 90 min and 48 h, so that no duration is rounded to 1.
    for unit_s, name in ((172800, "days"), (5400, "h"), (90, "min")):
        if seconds >= unit_s:
            return f"{seconds / {'days': 86400, 'h': 3600, 'min': 60}[name]:.0f} {name}"
    return f"{seconds:.0f} s"
