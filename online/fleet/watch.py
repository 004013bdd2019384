"""Watch a running fleet: the acceptance, target and draft of every server, and alarms.

For the journal, counters are compared with the previous poll; for the alarm, with the start of a
longer window. Both comparisons restart when a server restarts or receives a different draft.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from redraft.engine.counts import AcceptanceCounts
from redraft.online.fleet.server import (
    ALARM_DRAFTS,
    STATUS_TIMEOUT_S,
    FleetServer,
    NonsenseError,
    RefusedError,
    Served,
    Status,
    UnreachableError,
    is_alarming,
)
from redraft.online.journal import Journal, SwapEntry, SwapOutcome

SERVER_FAULTS = ("server_unreachable", "server_refuses", "server_nonsense")
"""Reasons why a server returned no status. A server has at most one of them at a time."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    server: FleetServer
    status: Status | None
    """None if the server sent no valid status in time."""
    fault: str = ""
    """One of SERVER_FAULTS; empty if the response was valid."""
    reason: str = ""
    since_last: AcceptanceCounts = field(default_factory=AcceptanceCounts.zero)
    served: Served | None = None
    """Tokens served since the previous poll."""
    lost: Counter[str] = field(default_factory=Counter)
    """Records lost since the previous poll, by reason."""
    is_alarming: bool | None = None
    """Whether almost no tokens were accepted over ALARM_DRAFTS drafts; False after a swap or a
    restart, and then None until that many drafts have been counted.
    """


class Watch:
    """Polls all servers concurrently at intervals.

    A poll returns after `patience_s` at the latest, without the responses that are still pending.
    The requests continue, and the next poll collects their responses, so one hung server delays the
    others by at most `patience_s`.
    """

    def __init__(
        self, servers: Sequence[FleetServer], patience_s: float = STATUS_TIMEOUT_S
    ) -> None:
        self.servers = servers
        self.patience_s = patience_s
        self._looks: dict[FleetServer, asyncio.Task[Observation]] = {}
        self._last: dict[FleetServer, Status] = {}
        self._window: dict[FleetServer, Status] = {}
        self._served: dict[FleetServer, Served] = {}
        self._faulty: dict[FleetServer, Observation] = {}

    async def look(self) -> list[Observation]:
        """Poll every server once. A server's failure is never raised."""
        for gone in {*self._last, *self._looks, *self._faulty} - set(
            self.servers
        ):  # former servers
            if gone in self._looks:
                self._looks.pop(gone).cancel()
            for known in (self._last, self._window, self._served, self._faulty):
                known.pop(gone, None)
        for server in self.servers:
            if server not in self._looks:
                self._looks[server] = asyncio.create_task(self._look_at(server))
        if self._looks:
            await asyncio.wait(self._looks.values(), timeout=self.patience_s)
        return [self._take(server) for server in self.servers if server in self._looks]

    async def aclose(self) -> None:
        looks = list(self._looks.values())
        self._looks.clear()
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)

    def _take(self, server: FleetServer) -> Observation:
        if self._looks[server].done():
            observation = self._looks.pop(server).result()
            if observation.fault:
                self._faulty[server] = observation
            else:
                self._faulty.pop(server, None)
            return observation
        # The task stays in `_looks` until the next call collects it. It may bring the same fault
        # again, so the reason for a server that hangs does not change at every call.
        if server in self._faulty:
            return self._faulty[server]
        reason = f"{server.url} has not answered for {self.patience_s:.0f} s"
        return Observation(server=server, status=None, fault="server_unreachable", reason=reason)

    async def _look_at(self, server: FleetServer) -> Observation:
        try:
            status = await server.status()
        except (UnreachableError, RefusedError) as error:
            fault = "server_unreachable"
            if isinstance(error, RefusedError):
                fault = "server_nonsense" if isinstance(error, NonsenseError) else "server_refuses"
            return Observation(server=server, status=None, fault=fault, reason=str(error))
        # By default, the status is compared with itself, so that nothing is lost or counted at the
        # first call.
        last = self._last.get(server, status)
        self._last[server] = status
        served, before = await server.served(), self._served.get(server)
        if served is not None:
            self._served[server] = served
        is_same = (status.boot, status.draft_version) == (last.boot, last.draft_version)
        window = status.since(self._window.get(server, status))
        # The window is evaluated once it contains enough drafts, and then restarts, because an
        # alarm is about recent traffic.
        if server not in self._window or window is None or window.num_drafts >= ALARM_DRAFTS:
            self._window[server] = status
        return Observation(
            server=server,
            status=status,
            since_last=status.since(last) or AcceptanceCounts.zero(),
            served=served.since(before) if served and before and is_same else None,
            lost=_count_lost(last, status),
            is_alarming=is_alarming(window)
            if window and window.num_drafts >= ALARM_DRAFTS
            else (None if is_same else False),
        )


def _count_lost(last: Status, now: Status) -> Counter[str]:
    """Count the records lost since the previous poll; a restarted server counts from 0."""
    before = last.lost if last.boot == now.boot else {}
    # A count that falls within one boot is invalid, and must not lower the sum.
    return Counter(
        {reason: max(0, count - before.get(reason, 0)) for reason, count in now.lost.items()}
    )


@dataclass(unsafe_hash=True)
class JournaledServer(FleetServer):
    """A server that records each of its swaps in the journal."""

    journal: Journal = field(repr=False, compare=False)
    seen: str | None = field(default=None, repr=False, compare=False)
    """The last version seen on the server."""

    async def status(self) -> Status:
        status = await super().status()
        self.seen = status.draft_version
        return status

    async def swap(self, version: str) -> None:
        before = self.seen
        began_s = time.monotonic()
        outcome: SwapOutcome = "swapped"
        reason = ""
        try:
            await super().swap(version)
            self.seen = version
        except asyncio.CancelledError:
            outcome, reason = "unreachable", "abandoned, because a rollout or rollback started"
            raise
        except (UnreachableError, RefusedError) as error:
            outcome = "refused" if isinstance(error, RefusedError) else "unreachable"
            reason = str(error)
            raise
        finally:
            # Only versions from the registry are ordered; a swap from the draft on the command line
            # is never a step back.
            is_back = (
                outcome == "swapped"
                and before is not None
                and before.startswith("v")
                and before > version
            )
            self.journal.write(
                SwapEntry(
                    server=self.url,
                    version=version,
                    from_version=before or None,  # None for a server without a draft
                    outcome="rolled_back" if is_back else outcome,
                    duration_ms=1e3 * (time.monotonic() - began_s),
                    reason=reason,
                )
            )
