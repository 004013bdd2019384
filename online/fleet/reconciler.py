"""Pushes the current version, in the background, to servers that run a different one.

A slow server does not delay the others.

    push ─► one task per server: status, swap, status ─► removed if the server has the version, else kept
    stop ─► cancels all tasks, before a rollout or a rollback swaps the servers itself
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from redraft.online.fleet.server import (
    Convergence,
    FleetServer,
    RefusedError,
    UnreachableError,
    bring,
)

SLOW_PUSH_S = 60.0  # A slower swap is reported (`server_behind`), and continues until its deadline.
PATIENCE_S = 3.0  # Time after which `bring_all` stops waiting for a minority of the servers.


@dataclass(frozen=True)
class _Push:
    version: str
    task: asyncio.Task[UnreachableError | RefusedError | None]
    began_s: float

    @property
    def is_failing(self) -> bool:
        if self.task.done():
            return self.task.cancelled() or self.task.result() is not None
        return time.monotonic() - self.began_s > SLOW_PUSH_S


class Reconciler:
    """The pushes in progress. For use within one event loop."""

    def __init__(self) -> None:
        self._pushes: dict[FleetServer, _Push] = {}

    def push(self, servers: Iterable[FleetServer], version: str, timeout_s: float = 0) -> None:
        """Start swapping the servers to `version`, with retries for `timeout_s`.

        A push of the same version that is already in progress continues; a push of a different
        version is cancelled and replaced.
        """
        for server in servers:
            known = self._pushes.get(server)
            if known is not None and not known.task.done():
                if known.version == version:
                    continue
                known.task.cancel()
            # With a timeout of 0, there is one attempt, and the next poll of the servers pushes
            # again.
            task = asyncio.create_task(bring(server, version, timeout_s, insist=True))
            self._pushes[server] = _Push(version, task, time.monotonic())

    def is_failing(self, server: FleetServer) -> bool:
        """Whether the last push to the server failed or is taking unusually long."""
        return server in self._pushes and self._pushes[server].is_failing

    async def bring_all(
        self, servers: Sequence[FleetServer], version: str, timeout_s: float
    ) -> Convergence:
        """Swap all servers to `version`.

        Wait for most of the servers, and continue with the others in the background. Return when
        every server has answered, or after `timeout_s` at the latest. Once PATIENCE_S has passed,
        return as soon as at least half of the servers are done, so that one hung server does not
        keep the user waiting.
        """
        servers = list(servers)
        self.push(servers, version, timeout_s)
        # Held here, because `forget` may drop a server's push during the wait.
        pushes = {server: self._pushes[server] for server in servers}
        began_s = time.monotonic()
        while waiting := [push.task for push in pushes.values() if not push.task.done()]:
            waited_s = time.monotonic() - began_s
            # One of 3 servers may still be pending, or one of 2, but a fleet of one server is
            # always waited for.
            is_most = 2 * len(waiting) <= len(pushes)
            if waited_s >= timeout_s or (waited_s >= PATIENCE_S and is_most):
                break
            await asyncio.wait(waiting, timeout=0.1)
        return _summarize(version, pushes)

    async def stop(self) -> None:
        """Cancel all pushes, and return once the last request has ended."""
        tasks = [push.task for push in self._pushes.values()]
        self._pushes.clear()
        for task in tasks:
            task.cancel()
        # A cancelled request may have reached its server, so the next swap must wait for it to end.
        await asyncio.gather(*tasks, return_exceptions=True)

    def forget(self, server: FleetServer) -> None:
        push = self._pushes.pop(server, None)
        if push is not None:
            push.task.cancel()


def _summarize(version: str, pushes: dict[FleetServer, _Push]) -> Convergence:
    refused: dict[str, str] = {}
    absent: dict[str, str] = {}
    for server, push in pushes.items():
        if not push.task.done():
            absent[server.url] = f"{server.url} has not answered yet; the request will be repeated"
        elif not push.task.cancelled() and (error := push.task.result()) is not None:
            failed = refused if isinstance(error, RefusedError) else absent
            failed[server.url] = str(error)
    return Convergence(version=version, refused=refused, absent=absent)
