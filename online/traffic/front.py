"""The sockets of tap and router.

Limits on unfinished requests of clients, and a port for operators.

    clients ──► port          the servers' API only        heads: 64 KiB, 10 s      bodies: no pause above 30 s
    operators ─► admin_port   /metrics, /redraft/...       unfinished requests: at most a quarter of the descriptors
    SIGTERM ──► the end        running answers: 20 s          unfinished requests: 1 s

uvicorn limits none of these: one client's half-sent requests would take every descriptor for as
long as it likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from redraft.online.records.guard import Guard

logger = logging.getLogger("redraft.proxy")

MAX_HEAD_BYTES = 64 << 10  # Largest head of a request: the first line and the headers.
HEAD_TIMEOUT_S = 10.0  # for the head of a request, from the answer before
BODY_PAUSE_S = 30.0  # Longest pause within the body of a request.

MAX_UNFINISHED_SHARE = 0.25
"""Share of the descriptors for connections without a complete request. Above it the oldest are
closed: an honest client's request arrives within milliseconds, so the oldest belong to a client
waiting on purpose.
"""

MOST_FILES = 1 << 20  # Limit to ask for if the system names none.
MIN_WAIT_S = 1.0  # connections stay open so long: in a burst honest ones wait too
LAST_LOOK_S = 0.05  # Time between the end of an idle connection's patience and its close.

TICK_S = 0.1
"""Time between two ticks of uvicorn's server. A longer time counts as this one: the process stood
still, and could not read what clients sent.
"""

TICKS_BETWEEN_LOOKS = 10

ENDING_S = 20.0
"""Time for running answers to end after SIGTERM. The records are shipped then: with the 10 s of the
ingest log the process ends within 30 s, after which Kubernetes would kill it."""

REFUSED_HEAD = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class _AnyLength(int):
    """A content length equal to any other: in HTTP/1.0 the end of the connection ends the body."""

    def __sub__(self, sent: int) -> _AnyLength:
        return self

    # uvicorn asks `sent > length`. Python gives a subclass the first word, so this method answers.
    def __lt__(self, sent: int) -> bool:
        return False

    def __ne__(self, left: object) -> bool:
        return False

    __hash__ = int.__hash__


class _Bounded(asyncio.Protocol):
    """Goes before uvicorn's protocol.

    Bounds the head of a request, and answers HTTP/1.0 without chunks.
    """

    cycle: Any
    scope: Any
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    timeout_keep_alive_task: asyncio.TimerHandle | None
    head_bytes = 0
    body_bytes = 0

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        is_in_body = before is not None and before.more_body
        super().data_received(data)
        # uvicorn makes a cycle for each request, as soon as the head is complete.
        if self.cycle is not before:
            self.head_bytes = 0
            if self.scope["http_version"] == "1.0":
                # uvicorn sends chunks whenever it does not know the length, and HTTP/1.0 has no
                # chunks.
                self.cycle.chunked_encoding, self.cycle.expected_content_length = (
                    False,
                    _AnyLength(),
                )
        elif is_in_body:
            self.body_bytes += len(data)
        else:
            self.head_bytes += len(data)
            if self.head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(REFUSED_HEAD)
                self.transport.close()

    def timeout_keep_alive_handler(self) -> None:
        # After a pause of the whole process, Linux wakes epoll without its events, and uvloop calls
        # what is due before it reads. A request sent in the pause would be cut off unread. So the
        # sockets are read once more before the close; a request cancels this timer.
        close_idle = super().timeout_keep_alive_handler  # type: ignore[misc]  # uvicorn's
        self.timeout_keep_alive_task = self.loop.call_later(LAST_LOOK_S, close_idle)


@dataclass(frozen=True, kw_only=True)
class FrontConfig:
    """Settings of the sockets of tap and router."""

    host: str = "127.0.0.1"
    """Address on which clients are accepted. The default accepts clients on this machine only."""
    admin_host: str = "127.0.0.1"
    """Address of the admin port. It names every server, so keep it away from clients."""
    max_body_bytes: int = 64 << 20
    """Largest request body, in bytes (default 64 MiB). A larger one is answered with status 413.
    Bodies above 1 MiB are passed on unread: they are not recorded, and only a header can give
    them a domain.
    """

    def __post_init__(self) -> None:
        if self.max_body_bytes < 1:
            raise ValueError(f"max_body_bytes is {self.max_body_bytes}: it must be at least 1")


class AdminServer(uvicorn.Server):
    """The admin port's server, beside the clients'; the port is open.

    Raises:
        OSError
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        super().__init__(_configure(app, lifespan="off", timeout_graceful_shutdown=1))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.socket = socket.create_server((host, port), family=family)
        except OSError as error:
            reason = f"{error.strerror}: set admin_port to a free port, or to 0 for none"
            raise OSError(
                error.errno, f"the admin port {host}:{port} cannot be opened, {reason}"
            ) from error

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals belong to the clients' server, which ends this one


class FrontServer(uvicorn.Server):
    """uvicorn's server, which also closes connections waiting too long for the rest of a request."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        admin: AdminServer | None = None,
        guard: Guard | None = None,
    ) -> None:
        # Our own end comes first: uvicorn's would cancel a stream, and not wait for its record.
        limit_s = int(ENDING_S) + 2
        super().__init__(_configure(app, host=host, port=port, timeout_graceful_shutdown=limit_s))
        self.admin, self.guard = admin, guard or Guard()
        self.max_unfinished = int(
            resource.getrlimit(resource.RLIMIT_NOFILE)[0] * MAX_UNFINISHED_SHARE
        )
        self._unfinished: dict[Any, tuple[_Wait, float]] = {}
        """Connections without a complete request: the missing part, and the start of the wait in
        seconds.
        """
        self._num_ticks = 0

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        beside = asyncio.create_task(self.admin.serve([self.admin.socket])) if self.admin else None
        try:
            await super().serve(sockets)
        finally:
            if self.admin and beside:
                self.admin.should_exit = True
                await beside

    async def on_tick(self, counter: int) -> bool:
        self._num_ticks += 1
        if (
            counter % TICKS_BETWEEN_LOOKS == 0
            or len(self.server_state.connections) > self.max_unfinished
        ):
            with self.guard.round("unfinished-requests"):
                self.close_unfinished(self._num_ticks * TICK_S)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End after the running answers, at most `ENDING_S` later.

        What has not arrived is not awaited.
        """
        ending = asyncio.create_task(self._end_connections())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_connections(self) -> None:
        self.max_unfinished = 0  # so all of them are closed, once they make no progress
        for _ in range(int(ENDING_S / TICK_S)):
            self._num_ticks += 1
            with self.guard.round("unfinished-requests"):
                self.close_unfinished(self._num_ticks * TICK_S)
            await asyncio.sleep(TICK_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # as if the client had left: what was answered is recorded

    def close_unfinished(self, now_s: float) -> None:
        """Close connections after too long a wait, and the oldest if there are too many."""
        known, self._unfinished = self._unfinished, {}
        for connection in self.server_state.connections:
            if wait := _find_wait(connection):
                last, since_s = known.get(connection, (None, now_s))
                self._unfinished[connection] = wait, since_s if last == wait else now_s
        oldest_first = sorted(self._unfinished.items(), key=lambda item: item[1][1])
        num_excess = len(oldest_first) - self.max_unfinished
        for number, (connection, (wait, since_s)) in enumerate(oldest_first):
            patience_s = HEAD_TIMEOUT_S if wait.is_for_head else BODY_PAUSE_S
            if now_s - since_s > (MIN_WAIT_S if number < num_excess else patience_s):
                # Not `close`, which first waits for the client to take all that is still to be
                # sent.
                connection.transport.abort()


class _Wait(NamedTuple):
    """The missing part of a request. It stays equal until the client makes progress."""

    is_for_head: bool
    cycle: Any  # uvicorn's state of the newest request of the connection, or None before the first.
    body_bytes: int = 0


def _find_wait(connection: Any) -> _Wait | None:
    """The missing part, or None if the request is complete and not yet answered."""
    cycle = connection.cycle
    if cycle is None or cycle.response_complete:
        return _Wait(True, cycle)
    return _Wait(False, cycle, connection.body_bytes) if cycle.more_body else None


def serve(
    app: ASGIApp, host: str, port: int, admin: AdminServer | None = None, guard: Guard | None = None
) -> None:
    """Serve until the process is told to end.

    Date and Server headers come from the answering server.
    """
    raise_file_limit()
    FrontServer(app, host, port, admin, guard).run()


def raise_file_limit() -> None:
    """Allow this process as many file descriptors as it may have.

    A stream takes two, and the usual limit is 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as error:
            logger.warning("the limit of %d file descriptors could not be raised: %s", soft, error)


BoundedProtocol = type("BoundedProtocol", (_Bounded, AutoHTTPProtocol), {})
"""Our protocol on top of uvicorn's default, which uses httptools if it is installed, and h11 if
not.
"""


def _configure(app: ASGIApp, **settings: Any) -> uvicorn.Config:
    # Without websockets: uvicorn hands an upgrade to another class of connection, which has neither
    # our limits nor an answer for a client that sends no valid one. As plain HTTP it goes to the
    # server like any other request.
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        ws="none",
        log_level="error",  # its warnings are about what clients send, a line each
        access_log=False,
        date_header=False,
        server_header=False,
        **settings,
    )
