"""HTTP sockets of bounded cost, which limit what one client may use of the listening process.

    clients ──► BoundedProtocol    a head: 64 KiB and 256 fields         requests waiting for an earlier answer: 16
                                   bytes between two pieces of a body: 64 KiB; trailer fields are dropped
            ──► BoundedServer      a head: 10 s     a pause within a body: 30 s    an answer not read: 30 s
                                   connections that wait for their client: a quarter of the descriptors
                                   unfinished bodies: 64 MiB in all
    operators ─► OperatorServer    the same limits, and only under names that no web site can have

uvicorn limits none of these: one client's half-sent requests could take every descriptor, and its
trailers all memory, for as long as the client keeps its connections open.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import resource
import socket
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from redraft.online.records.guard import Guard

MAX_HEAD_BYTES = 64 << 10
"""Maximum number of bytes in a request's head, and in the framing (chunk extensions and trailers)
between two pieces of its body.
"""

MAX_FIELDS = 256  # maximum number of header fields per request
# Maximum number of requests per connection that wait for the response to an earlier request.
MAX_PIPELINED = 16
HEAD_TIMEOUT_S = 10.0  # time for the head of a request, from the end of the previous response
BODY_PAUSE_S = 30.0  # Longest pause within the body of a request.
READ_PAUSE_S = 30.0  # Longest pause of a client while it reads a response.

MAX_WAITING_SHARE = 0.25
"""Share of the descriptors for connections that wait for their client. If it is exceeded, the
oldest connections are closed: a normal client's request arrives within milliseconds, so the oldest
connections belong to a client that stalls deliberately.
"""

# Maximum size of all unfinished bodies together, in bytes. If it is exceeded, the oldest
# connections are closed.
MAX_BODY_BYTES = 64 << 20
# Maximum number of bytes counted for one body. No more than these are kept of a longer body.
HELD_BYTES = 1 << 20

# Minimum time that connections stay open, because in a burst normal clients wait too.
MIN_WAIT_S = 1.0
LAST_LOOK_S = 0.05  # Time between an idle connection's timeout and its close.

TICK_S = 0.1
"""Time in seconds between two ticks of uvicorn's server. A longer time counts as one tick, because
the process was suspended and could not read what clients sent.
"""

TICKS_BETWEEN_LOOKS = 10

REFUSED_HEAD = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

LOG_PAUSE_S = 60.0  # A warning is logged at most once in this time.

PRIVATE_NAMES = (".localhost", ".svc", ".cluster.local", ".internal")
"""Domain suffixes that cannot be registered, so that no web site can use them."""


class TooMuchError(Exception):
    """Raised to end parsing when a client has sent more than it is allowed to."""


class _AnyLength(int):
    """A content length that equals any other. In HTTP/1.0, a body ends with the connection."""

    def __sub__(self, sent: int) -> _AnyLength:
        return self

    # uvicorn evaluates `sent > length`. Python tries a subclass's reflected method first, so this
    # method is called.
    def __lt__(self, sent: int) -> bool:
        return False

    def __ne__(self, left: object) -> bool:
        return False

    __hash__ = int.__hash__


class _Bounded(asyncio.Protocol):
    """Mixin in front of uvicorn's protocol.

    It limits what a client may send, and answers HTTP/1.0 without chunks. h11, which uvicorn uses
    if httptools is not installed, limits heads, framing and pipelines itself, drops trailers, and
    calls none of the `on_...` methods.
    """

    cycle: Any
    scope: Any
    headers: list[tuple[bytes, bytes]]
    pipeline: Any
    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    timeout_keep_alive_task: asyncio.TimerHandle | None
    framing_bytes = 0  # bytes of framing since the last piece of a body, or the last request
    body_bytes = 0  # of the newest request
    # Body bytes among those just received, even if the request is already answered.
    has_piece = False
    is_in_head = False
    unanswered: Sequence[Any] = ()  # uvicorn's state for each request whose response is incomplete

    def data_received(self, data: bytes) -> None:
        before, self.has_piece = self.cycle, False
        num_unread = len(before.body) if before else 0
        super().data_received(data)
        # uvicorn creates a cycle for each request, as soon as the head is complete.
        if self.cycle is not before:
            self.framing_bytes, self.body_bytes = 0, len(self.cycle.body)
            if self.scope["http_version"] == "1.0":
                # uvicorn sends chunks if it does not know the length, but HTTP/1.0 has no chunks.
                self.cycle.chunked_encoding, self.cycle.expected_content_length = (
                    False,
                    _AnyLength(),
                )
        elif self.has_piece or (before and len(before.body) > num_unread):
            self.framing_bytes = 0
            self.body_bytes += len(before.body) - num_unread
        else:
            self.framing_bytes += len(data)
            if self.framing_bytes > MAX_HEAD_BYTES:
                self._refuse()

    def on_message_begin(self) -> None:
        self.is_in_head = True
        super().on_message_begin()  # type: ignore[misc]  # uvicorn's, as all below

    def on_header(self, name: bytes, value: bytes) -> None:
        # A field after the head is a trailer. uvicorn would add it to the request's headers, next
        # to those that a gateway has set, without a limit on their number.
        if self.is_in_head:
            if len(self.headers) == MAX_FIELDS:
                self._refuse()
                raise TooMuchError
            super().on_header(name, value)  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        self.is_in_head = False
        if len(self.pipeline) == MAX_PIPELINED:
            raise TooMuchError
        super().on_headers_complete()  # type: ignore[misc]
        earlier = [one for one in self.unanswered if not one.response_complete]
        self.unanswered = [*earlier, self.cycle]

    def on_body(self, body: bytes) -> None:
        self.has_piece = True
        super().on_body(body)  # type: ignore[misc]

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)  # type: ignore[misc]

    def connection_lost(self, exc: Exception | None) -> None:
        # uvicorn ends only the newest request, which may not be the running one.
        for cycle in self.unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        # After the whole process was paused, Linux wakes epoll without its events, and uvloop runs
        # due timers before it reads. A request sent during the pause would be cut off unread.
        # Therefore the sockets are read once more before a connection is closed; a request cancels
        # this timer.
        close_idle = super().timeout_keep_alive_handler  # type: ignore[misc]
        self.timeout_keep_alive_task = self.loop.call_later(LAST_LOOK_S, close_idle)

    def _refuse(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(REFUSED_HEAD)
            self.transport.close()


BoundedProtocol = type("BoundedProtocol", (_Bounded, AutoHTTPProtocol), {})
"""Our protocol on top of uvicorn's default, which uses httptools if it is installed, and h11 if
not.
"""


class BoundedServer(uvicorn.Server):
    """uvicorn's server, which also closes connections that wait too long for their client."""

    def __init__(self, app: ASGIApp, guard: Guard | None = None, **settings: Any) -> None:
        # Websockets are off, because uvicorn hands an upgrade to a different connection class,
        # which has neither our limits nor a response for a client that sends no valid upgrade. As
        # plain HTTP, an upgrade goes to the application like any other request.
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            log_level="error",  # uvicorn logs one warning for each malformed request
            access_log=False,
            date_header=False,
            server_header=False,
            **settings,
        )
        super().__init__(config)
        self.guard = guard or Guard()
        self.max_waiting = int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * MAX_WAITING_SHARE)
        self._waiting: dict[Any, tuple[_Wait, float, float]] = {}
        """For each connection that waits for its client: what it waits for, when the wait for this
        request began, and when it last made progress, in seconds.
        """
        self._num_ticks = 0

    async def on_tick(self, counter: int) -> bool:
        is_due = counter % TICKS_BETWEEN_LOOKS == 0
        self.tick(is_due=is_due or len(self.server_state.connections) > self.max_waiting)
        return await super().on_tick(counter)

    def tick(self, *, is_due: bool = True) -> None:
        self._num_ticks += 1
        if is_due:
            with self.guard.round("waiting-connections"):
                self.close_waiting(self._num_ticks * TICK_S)

    def close_waiting(self, now_s: float) -> None:
        """Close connections that have waited too long, and those beyond the limits.

        The number of waiting connections and the bytes of all unfinished bodies are limited; the
        oldest are closed first.
        """
        known, self._waiting = self._waiting, {}
        for connection in self.server_state.connections:
            if wait := _find_wait(connection):
                before, begun_s, since_s = known.get(connection, (wait, now_s, now_s))
                self._waiting[connection] = (
                    wait,
                    begun_s if before.cycle is wait.cycle else now_s,
                    since_s if before == wait else now_s,
                )
        excess = self._find_excess(now_s)
        for connection, (wait, _, since_s) in self._waiting.items():
            if connection in excess or now_s - since_s > wait.patience_s:
                # `close` is not used, because it first waits for the client to receive all pending
                # data.
                connection.transport.abort()

    def _find_excess(self, now_s: float) -> set[Any]:
        """Find the connections beyond the limits.

        If there are too many connections, the ones longest without progress are chosen. If their
        bodies have too many bytes, the ones with the oldest requests are chosen.
        """
        by_progress = sorted(self._waiting.items(), key=lambda item: item[1][2])
        too_many = by_progress[: max(0, len(by_progress) - self.max_waiting)]
        excess = {one for one, (_, _, since_s) in too_many if now_s - since_s > MIN_WAIT_S}
        left_bytes = sum(wait.held_bytes for wait, _, _ in self._waiting.values()) - MAX_BODY_BYTES
        for one, (wait, begun_s, _) in sorted(self._waiting.items(), key=lambda item: item[1][1]):
            if left_bytes > 0 and wait.held_bytes and now_s - begun_s > MIN_WAIT_S:
                excess.add(one)
                left_bytes -= wait.held_bytes
        return excess


class _Wait(NamedTuple):
    """Why a connection is waiting.

    Two values are equal if the client made no progress in between.
    """

    patience_s: float
    cycle: Any
    """Uvicorn's state of the connection's newest request; None before the first request."""
    num_bytes: int = 0
    """Number of body bytes received, or of response bytes still to be sent."""
    held_bytes: int = 0


def _find_wait(connection: Any) -> _Wait | None:
    """Return what the server is waiting for from the client; None while it is the server's turn."""
    cycle = connection.cycle
    is_answered = cycle is None or cycle.response_complete
    unread = connection.transport.get_write_buffer_size()
    # uvicorn pauses writing until the client has received something, so it is the client's turn.
    if unread and (is_answered or connection.flow.write_paused):
        return _Wait(READ_PAUSE_S, cycle, unread)
    if is_answered:
        return _Wait(HEAD_TIMEOUT_S, cycle)
    if not cycle.more_body:
        return None
    return _Wait(BODY_PAUSE_S, cycle, connection.body_bytes, min(connection.body_bytes, HELD_BYTES))


class OperatorServer(BoundedServer):
    """A server for operators inside another server's process; its port is opened at once.

    A page in the operator's browser may rebind its own name to this address, and would then have
    the same origin. Therefore requests are answered only under names that no website can have: any
    IP address, names without a dot, `PRIVATE_NAMES`, and `hosts`.

    Raises:
        OSError: the port is taken, or the host is not an address of this machine; the message
            names `setting`.
    """

    def __init__(
        self, app: ASGIApp, host: str, port: int, *, setting: str, hosts: Collection[str] = ()
    ) -> None:
        # Opened here, because uvicorn would end the whole process if the port were taken.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.socket = socket.create_server((host, port), family=family)
        except OSError as error:
            reason = f"{error.strerror}: set {setting} to a free port, or to 0 for none"
            raise OSError(error.errno, f"{host}:{port} cannot be opened, {reason}") from error
        names = _PrivateNames(app, {host, *hosts}, setting.removesuffix("port") + "hosts")
        super().__init__(names, lifespan="off", timeout_graceful_shutdown=1)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the surrounding process handles signals


class _PrivateNames:
    """Forwards only requests whose Host no website can have; `setting` can allow other names."""

    def __init__(self, app: ASGIApp, names: Collection[str], setting: str) -> None:
        self.app, self.names, self.setting = app, names, setting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        app = self.app
        if not all(is_private_name(name, self.names) for name in asked):
            cure = f"this host name is not allowed: if it is yours, add it to {self.setting}\n"
            app = PlainTextResponse(cure, 421)
        await app(scope, receive, send)


def is_private_name(host: str, names: Collection[str] = ()) -> bool:
    """Whether no website can have this Host header: an address, a local name, or one of `names`."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return "." not in name or name.endswith(PRIVATE_NAMES) or name in names


class Sparing(logging.Filter):
    """Logs each kind of message at most once a minute, so that clients cannot fill the log."""

    def __init__(self) -> None:
        super().__init__()
        # Time of the last line, and number of lines withheld since.
        self._passed: dict[Any, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind = str(record.msg), record.exc_info and record.exc_info[0]
        now_s = time.monotonic()
        passed_s, withheld = self._passed.get(kind, (-math.inf, 0))
        if now_s - passed_s < LOG_PAUSE_S:
            self._passed[kind] = passed_s, withheld + 1
            return False
        self._passed[kind] = now_s, 0
        if withheld:
            record.msg = f"{record.msg} ({withheld} more since the last such line)"
        return True
