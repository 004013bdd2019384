"""The part of the journal that the page shows, in memory: the newest entries of every kind."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from redraft.online.journal import AcceptanceEntry, BufferEntry, Entry, TrainingEntry

E = TypeVar("E", bound=Entry)

KEPT: dict[type, int] = {AcceptanceEntry: 60_000, BufferEntry: 20_000, TrainingEntry: 20_000}
"""Number of entries kept, by kind; 200 for every kind not listed."""


class History:
    """The newest entries of every kind, in the order in which they were written."""

    def __init__(self) -> None:
        self._kinds: dict[type, deque[Any]] = {}

    def extend(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            kind = type(entry)
            self._kinds.setdefault(kind, deque(maxlen=KEPT.get(kind, 200))).append(entry)

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
