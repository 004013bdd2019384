"""The part of the journal that the page shows, in memory: the newest entries of every kind."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from redraft.online.journal import (
    AcceptanceEntry,
    BufferEntry,
    Entry,
    FaultEntry,
    SwapEntry,
    TrainingEntry,
)

E = TypeVar("E", bound=Entry)

KEPT: dict[type, int] = {
    AcceptanceEntry: 60_000,
    BufferEntry: 20_000,
    TrainingEntry: 20_000,
    SwapEntry: 5_000,  # one for each server and rollout
}
"""Number of entries kept, by kind; 200 for every kind not listed."""
DONE = ("swapped", "rolled_back")
"""Outcomes of successful swaps."""


class History:
    """The newest entries of every kind, in the order in which they were written.

    Of a fault, and of a server's failures to swap to a version, only the last entry is kept. They
    may be repeated at every poll, and would displace all others.
    """

    def __init__(self) -> None:
        self._kinds: dict[type, deque[Any]] = {}

    def extend(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            kind = type(entry)
            kept = self._kinds.setdefault(kind, deque(maxlen=KEPT.get(kind, 200)))
            if (repeated := _find_repeated(kept, entry)) is not None:
                kept.remove(repeated)
            kept.append(entry)

    def select(self, kind: type[E], since_s: float = float("-inf")) -> list[E]:
        kept = []
        # Search backwards from the newest entry. Entries are in chronological order, so the first
        # one that is too old ends the search.
        for entry in reversed(self._kinds.get(kind, ())):
            if entry.time_s < since_s:
                break
            kept.append(entry)
        return kept[::-1]

    def last(self, kind: type[E], accept: Callable[[E], bool] = lambda entry: True) -> E | None:
        return next((entry for entry in reversed(self._kinds.get(kind, ())) if accept(entry)), None)

    def begin_s(self) -> float | None:
        return min((entries[0].time_s for entries in self._kinds.values()), default=None)


def _find_repeated(kept: deque[Any], entry: Entry) -> Any:
    """Find the entry that this one repeats; None if there is none.

    A successful swap of the server ends a repetition.
    """
    if isinstance(entry, FaultEntry):
        for fault in reversed(kept):
            if (fault.what, fault.detail) == (entry.what, entry.detail):
                return fault
    if isinstance(entry, SwapEntry) and entry.outcome not in DONE:
        for swap in reversed(kept):
            if swap.server == entry.server:
                if swap.outcome in DONE:
                    return None
                if (swap.version, swap.outcome) == (entry.version, entry.outcome):
                    return swap
    return None
