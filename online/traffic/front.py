"""The tap's sockets: the port for clients, the port for operators, and their common shutdown.

    clients ──► port          the servers' API only
    operators ─► admin_port   /metrics, /redraft/tap
    SIGTERM ──► shutdown      running answers: 20 s          unfinished requests: 1 s

`online.traffic.sockets` bounds what a client may occupy.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from dataclasses import dataclass

from starlette.types import ASGIApp

from redraft.files.setting_error import require_least
from redraft.online.records.guard import Guard
from redraft.online.traffic.sockets import TICK_S, BoundedServer, OperatorServer, Sparing

logger = logging.getLogger("redraft.proxy")

MOST_FILES = 1 << 20  # limit to request if the system has none

ENDING_S = 20.0
"""Time in seconds for running answers to finish after SIGTERM. Records are then sent: with the 10 s
of the ingest log, the process exits within 30 s, after which Kubernetes would kill it.
"""


@dataclass(frozen=True, kw_only=True)
class FrontConfig:
    """Settings for the tap's sockets."""

    host: str = "127.0.0.1"
    """Address on which clients are accepted. By default, only clients on this machine are accepted.
    """
    admin_host: str = "127.0.0.1"
    """Address of the admin port. The port reveals the server's name, so do not expose it to
    clients.
    """
    admin_hosts: tuple[str, ...] = ()
    """Host names under which the admin port may be accessed, in addition to IP addresses and local
    names.
    """
    max_body_bytes: int = 64 << 20
    """Maximum size of a request body in bytes (default 64 MiB). Larger bodies are answered with
    status 413. Bodies above 1 MiB are forwarded without being parsed or recorded.
    """

    def __post_init__(self) -> None:
        require_least(self, max_body_bytes=1)


class FrontServer(BoundedServer):
    """The server for clients, combined with the server for operators."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        admin: OperatorServer | None = None,
        guard: Guard | None = None,
    ) -> None:
        # Our own limit must be reached first, because uvicorn's would cancel a stream without
        # waiting for its record.
        limit_s = int(ENDING_S) + 2
        super().__init__(app, guard, host=host, port=port, timeout_graceful_shutdown=limit_s)
        self.admin = admin

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        beside = asyncio.create_task(self.admin.serve([self.admin.socket])) if self.admin else None
        try:
            await super().serve(sockets)
        finally:
            if self.admin and beside:
                self.admin.should_exit = True
                await beside

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down once the running answers have ended, or after `ENDING_S` at the latest.

        Requests that have not fully arrived are dropped.
        """
        ending = asyncio.create_task(self._end_connections())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_connections(self) -> None:
        self.max_waiting = 0  # all of them are closed once they make no progress
        for _ in range(int(ENDING_S / TICK_S)):
            self.tick()
            await asyncio.sleep(TICK_S)
        for connection in list(self.server_state.connections):
            # Treated as if the client had disconnected: the answer received so far is recorded.
            connection.transport.abort()


def serve(
    app: ASGIApp,
    host: str,
    port: int,
    admin: OperatorServer | None = None,
    guard: Guard | None = None,
) -> None:
    """Serve until the process is told to exit.

    The Date and Server headers come from the upstream server.
    """
    raise_file_limit()
    sparing = Sparing()
    for name in ("uvicorn.error", "redraft.proxy", "redraft.tap"):
        logging.getLogger(name).addFilter(sparing)
    FrontServer(app, host, port, admin, guard).run()


def raise_file_limit() -> None:
    """Raise the limit on this process's file descriptors as far as allowed.

    A stream needs two descriptors, and the usual limit is 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:
            logger.warning("the limit of %d file descriptors could not be raised: %s", soft, error)
