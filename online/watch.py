"""The watch over a running fleet: what every server accepts, which target it has, and whether its draft is any good.

Counters are compared with those of the look before for the journal, and with the beginning of a longer window for the
alarm. A restart and another draft begin both anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from online.fleet import ALARM_DRAFTS, Reading, RefusedError, Server, Status, UnreachableError, is_alarming
from online.journal import Journal
from online.metrics import Acceptance


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One server at one look."""

    server: Server
    status: Status | None
    """None: it did not answer, or not with a status."""
    since_last: Acceptance = field(default_factory=Acceptance)
    lost: Counter[str] = field(default_factory=Counter)
    """What its capture dropped since the look before, by reason."""
    is_alarming: bool = False
    """Its draft was hardly accepted at all over the last ALARM_DRAFTS drafts or more."""


class Watch:
    """Looks at all servers at once, again and again."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = servers
        self._last: dict[Server, Reading] = {}
        self._statuses: dict[Server, Status] = {}
        self._window: dict[Server, Reading] = {}

    async def look(self) -> list[Seen]:
        """Every server as it is now; never raises for them."""
        for gone in set(self._statuses) - set(self.servers):
            for known in (self._last, self._statuses, self._window):
                known.pop(gone, None)
        return list(await asyncio.gather(*map(self._look_at, self.servers)))

    async def _look_at(self, server: Server) -> Seen:
        try:
            status = await server.status()
        except (UnreachableError, RefusedError):
            return Seen(server=server, status=None)
        lost = self._lost(server, status)
        try:
            reading = await server.read()
        except (UnreachableError, RefusedError):  # it may serve without a draft yet
            return Seen(server=server, status=status, lost=lost)
        since_last = _since(self._last.get(server), reading) or Acceptance()
        self._last[server] = reading
        window = _since(self._window.get(server), reading)
        if window is None or window.drafts >= ALARM_DRAFTS:
            self._window[server] = reading
        alarming = window is not None and is_alarming(window)
        return Seen(server=server, status=status, since_last=since_last, lost=lost, is_alarming=alarming)

    def _lost(self, server: Server, status: Status) -> Counter[str]:
        """What was lost before the first look is not this learner's to tell; after a restart counting begins at 0."""
        last = self._statuses.get(server, status)
        self._statuses[server] = status
        before = last.lost if last.boot == status.boot else {}
        return Counter({reason: count - before.get(reason, 0) for reason, count in status.lost.items()})


def _since(first: Reading | None, now: Reading) -> Acceptance | None:
    """What was counted between two readings of one boot and one draft."""
    if first is None or (first.boot, first.draft_version) != (now.boot, now.draft_version):
        return None
    return now.total.since(first.total)


@dataclass(frozen=True)
class JournaledServer(Server):
    """A server whose every swap goes into the journal."""

    journal: Journal = field(repr=False, compare=False)
    versions: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    """The version it was last seen with."""

    async def status(self) -> Status:
        status = await super().status()
        self.versions["seen"] = status.draft_version
        return status

    async def swap(self, version: str) -> None:
        before = self.versions.get("seen")
        began_s = time.monotonic()
        outcome, reason = "swapped", ""
        try:
            await super().swap(version)
            self.versions["seen"] = version
        except UnreachableError as error:
            outcome, reason = "unreachable", str(error)
            raise
        except RefusedError as error:
            outcome, reason = "refused", str(error)
            raise
        finally:
            # Only versions of the registry sort: a server that comes with the draft of its command line is not behind.
            is_back = outcome == "swapped" and before is not None and before.startswith("v") and before > version
            self.journal.write(
                "swap",
                server=self.url,
                version=version,
                from_version=before or None,  # a server without a draft has none
                outcome="rolled_back" if is_back else outcome,
                duration_ms=1e3 * (time.monotonic() - began_s),
                reason=reason,
            )
