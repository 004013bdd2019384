"""The server behind the proxy: connections to it, and the kinds of failures.

refused         no connection
out of files    no connection, because of our own limit; the request waits for a descriptor
broken          the connection broke after the request had been sent; it is never sent again,
                because it may have crashed the server
unsendable      the client's headers are not valid HTTP"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx

from redraft.engine.proxies import load_certificates
from redraft.online.fleet.reach import explain, explain_answer, list_causes
from redraft.online.records.guard import Guard

logger = logging.getLogger("redraft.upstream")

CONNECT_TIMEOUT_S = 2.0  # time limit for connecting; the response itself may take any time
# Less than uvicorn's 5 s, because a request fails if its connection is closed just then.
KEEP_ALIVE_S = 2.0
MAX_IDLE_CONNECTIONS = 128  # maximum number of idle connections per server; each uses a descriptor
TIDY_S = 2.0  # Seconds between two checks for expired idle connections.
OUT_OF_FILES_TIMEOUT_S = 10.0
RETRY_S = (
    0.05  # Without a free descriptor a request waits this long for one, and checks this often.
)
OUT_OF_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

# Name in lower case, and the value as bytes, because values need not be text.
Header = tuple[bytes, bytes]


class RefusedError(Exception):
    """The server did not accept the connection. The message gives the reason."""


class OutOfFilesError(Exception):
    """This process could not open a connection.

    It has no free file descriptor, or the system has no memory for one.
    """

    def __str__(self) -> str:
        return "there is no free file descriptor: raise the limit (LimitNOFILE, ulimit -n)"


class BrokenError(Exception):
    """The connection broke after the request had been sent.

    The message contains no text from the request.
    """


class UnsendableError(Exception):
    """The request has a header that HTTP forbids."""


@dataclass(frozen=True, kw_only=True)
class ForwardedRequest:
    method: str
    path: bytes
    """Path of the request, with the query."""
    headers: list[Header]
    """Without Host, Content-Length and Transfer-Encoding."""
    body: bytes | AsyncIterable[bytes]
    length: str | None = None
    """Content-Length of a body that arrives in pieces; None to send it in chunks."""

    def frame(self) -> list[Header]:
        """Return the header that marks the end of the body: a length, or chunked encoding."""
        if not isinstance(self.body, bytes):
            return (
                [(b"content-length", self.length.encode())]
                if self.length
                else [(b"transfer-encoding", b"chunked")]
            )
        has_body = self.body or self.method in ("POST", "PUT", "PATCH")
        return [(b"content-length", b"%d" % len(self.body))] if has_body else []


class Reply:
    """A server's response, whose head has arrived. The receiver must close it."""

    def __init__(
        self,
        upstream: Upstream,
        connection: httpcore.AsyncHTTPConnection,
        response: httpcore.Response,
    ) -> None:
        self.upstream, self.status = upstream, response.status
        self.headers: list[Header] = [(name.lower(), value) for name, value in response.headers]
        self._connection, self._response = connection, response
        self._is_open = True

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives, still encoded.

        Raises:
            BrokenError
        """
        body = self._response.stream
        assert isinstance(body, AsyncIterable)
        with _named_failures():
            async for chunk in body:
                yield chunk

    async def read(self) -> bytes:
        """Return the whole body, still encoded.

        Raises:
            BrokenError
        """
        return b"".join([chunk async for chunk in self.chunks()])

    async def aclose(self) -> None:
        """Return the connection for reuse, or close it if part of the response is unread.

        Only the first call has an effect.
        """
        if self._is_open:
            # Marked before the first `await`, because at a second call, another request may already
            # use the connection.
            self._is_open = False
            await self.upstream.finish(self._connection, self._response)


class Upstream:
    """The server, and the connections to it.

    It does not use httpx's pool, which scans all connections for every idle one whenever a request
    ends. With 600 streams, all of them stall for seconds. Here, a request uses the most recently
    used connection, in constant time.
    """

    def __init__(self, url: str, guard: Guard | None = None) -> None:
        self.url, self.guard = url.rstrip("/"), guard or Guard()
        self.is_down = False  # whether the last request or `look` was refused a connection
        self.problem = ""  # why the last request did not arrive, with the fix; empty if it arrived
        self._is_told = False
        base = httpx.URL(self.url)
        self._certificates = load_certificates(self.url) or None
        self._origin = httpcore.Origin(
            base.raw_scheme, base.raw_host, base.port or (443 if base.scheme == "https" else 80)
        )
        self._host, self._path = base.netloc, base.raw_path.rstrip(b"/")
        self._backend = PlainBackend() if base.scheme == "http" and _is_address(base.host) else None
        self._idle: deque[httpcore.AsyncHTTPConnection] = deque()
        self._in_flight: set[httpcore.AsyncHTTPConnection] = set()

    @property
    def requests(self) -> int:
        return len(self._in_flight)

    async def look(self) -> None:
        """Set `is_down` if the server accepts no connection.

        Without this, a restart goes unnoticed if no client sends a request during it.
        """
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, writer = await asyncio.open_connection(
                    self._origin.host.decode(), self._origin.port
                )
        except OSError as error:
            self.is_down |= not _is_out_of_files(error)
        else:
            writer.transport.abort()

    async def send(self, forwarded: ForwardedRequest) -> Reply:
        """Send the request and return the response once its headers have arrived.

        Raises:
            RefusedError, OutOfFilesError, BrokenError, UnsendableError
        """
        deadline_s = time.monotonic() + OUT_OF_FILES_TIMEOUT_S
        while True:
            try:
                reply = await self._send_once(forwarded)
            except OutOfFilesError:
                # The cause is our limit, not the server, so the request waits until another request
                # has ended.
                if time.monotonic() > deadline_s:
                    raise
                await self.close_idle()
                await asyncio.sleep(RETRY_S)
                continue
            except RefusedError:
                self.is_down = True
                raise RefusedError(f"the server cannot be reached: {self.problem}") from None
            self.is_down = False
            return reply

    async def _send_once(self, forwarded: ForwardedRequest) -> Reply:
        connection = await self._take_connection()
        self._in_flight.add(connection)
        try:
            response = await self._send_on(connection, forwarded)
        except BaseException:
            # The connection is also closed if the request was cancelled, because a connection with
            # half a request on it must not be used again.
            self._in_flight.discard(connection)
            await connection.aclose()
            raise
        return Reply(self, connection, response)

    async def finish(
        self, connection: httpcore.AsyncHTTPConnection, response: httpcore.Response
    ) -> None:
        """Count the request as done, and keep the connection if another request can use it."""
        self._in_flight.discard(connection)
        await response.aclose()
        await self._put_back(connection)

    def own_path(self, location: bytes) -> bytes:
        """Rewrite a URL of this server as a path at the proxy; any other URL is unchanged."""
        for scheme in (b"http://", b"https://", b"//"):
            below = location.removeprefix(scheme + self._host)
            if below != location and below[:1] in (b"", b"/", b"?", b"#"):
                # A single slash, because two slashes would begin the name of another server.
                return b"/" + below.removeprefix(self._path).lstrip(b"/")
        return location

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Close expired connections while the block runs, and all of them at the end."""
        tidying = asyncio.create_task(self._tidy_forever())
        try:
            yield
        finally:
            tidying.cancel()
            await self.aclose()

    async def _tidy_forever(self) -> None:
        while True:
            await asyncio.sleep(TIDY_S)
            with self.guard.round("idle-connections"):
                await self.close_idle(only_expired=True)

    async def close_idle(self, *, only_expired: bool = False) -> None:
        """Close idle connections, to free descriptors."""
        idle, self._idle = self._idle, deque()
        for connection in idle:
            if only_expired and not connection.has_expired():
                self._idle.append(connection)
            else:
                await connection.aclose()

    async def aclose(self) -> None:
        await self.close_idle()
        for connection in list(self._in_flight):
            await connection.aclose()

    async def _take_connection(self) -> httpcore.AsyncHTTPConnection:
        while self._idle:
            # Take the connection used last, so that the others expire and free their descriptors.
            connection = self._idle.pop()
            if not connection.has_expired():
                return connection
            await connection.aclose()
        return httpcore.AsyncHTTPConnection(
            self._origin, self._certificates, KEEP_ALIVE_S, network_backend=self._backend
        )

    async def _put_back(self, connection: httpcore.AsyncHTTPConnection) -> None:
        if connection.is_idle() and len(self._idle) < MAX_IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            await connection.aclose()

    async def _send_on(
        self, connection: httpcore.AsyncHTTPConnection, forwarded: ForwardedRequest
    ) -> httpcore.Response:
        scheme, host, port = self._origin.scheme, self._origin.host, self._origin.port
        request = httpcore.Request(
            forwarded.method,
            httpcore.URL(scheme=scheme, host=host, port=port, target=self._path + forwarded.path),
            headers=[(b"host", self._host), *forwarded.headers, *forwarded.frame()],
            content=forwarded.body,
            extensions={"timeout": {"connect": CONNECT_TIMEOUT_S}},
        )
        try:
            with _named_failures():
                response = await connection.handle_async_request(request)
        except (RefusedError, BrokenError) as error:
            self.problem = explain(error)
            raise
        self.problem = explain_answer(response.status, response.headers)
        if self.problem and not self._is_told:
            logger.warning("%s: %s", self.url, self.problem)
            # Retried only once, because a missing password of the client looks the same.
            self._is_told = True
        return response


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def _named_failures() -> Iterator[None]:
    """Convert httpcore's errors into ours.

    Only the type is kept, because h11 quotes the offending bytes, which come from a user.
    """
    try:
        yield
    # These come first, because the last clause would catch them as well: ConnectError is a
    # NetworkError.
    except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
        kind = OutOfFilesError if _is_out_of_files(error) else RefusedError
        raise kind(type(error).__name__) from error
    except httpcore.LocalProtocolError as error:
        raise UnsendableError(type(error).__name__) from None
    except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
        raise BrokenError(type(error).__name__) from None


def _is_out_of_files(error: BaseException) -> bool:
    """Whether the cause is a lack of file descriptors, or of memory for one."""
    if any(
        isinstance(cause, OSError) and cause.errno in OUT_OF_FILES for cause in list_causes(error)
    ):
        return True
    try:  # without a free descriptor, a resolver only reports "unknown name"
        os.close(os.dup(0))
    except OSError as failure:
        return failure.errno in OUT_OF_FILES
    return False


class PlainBackend(httpcore.AsyncNetworkBackend):
    """Opens TCP connections to IP addresses."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> PlainStream:
        with _named_errors(httpcore.ConnectTimeout, httpcore.ConnectError):
            async with asyncio.timeout(timeout):
                return PlainStream(*await asyncio.open_connection(host, port))


class PlainStream(httpcore.AsyncNetworkStream):
    """One connection, without timeouts, because a response may take any amount of time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _named_errors(httpcore.ReadTimeout, httpcore.ReadError):
            return await self._reader.read(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with _named_errors(httpcore.WriteTimeout, httpcore.WriteError):
            self._writer.write(buffer)
            await self._writer.drain()

    async def aclose(self) -> None:
        # Nothing remains to be sent once a request is finished or abandoned.
        self._writer.transport.abort()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> PlainStream:
        raise NotImplementedError("plain sockets have no TLS")

    def get_extra_info(self, info: str) -> Any:
        # On an idle connection, readable data means that the server has closed it.
        if info == "is_readable":
            return (
                self._reader.at_eof()
                or self._reader.exception() is not None
                or self._writer.is_closing()
            )
        # httpcore asks e.g. for `ssl_object`; without one, it speaks HTTP/1.1.
        return None


@contextlib.contextmanager
def _named_errors(timeout: type[Exception], failure: type[Exception]) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise timeout from error
    except (
        OSError,
        RuntimeError,
    ) as error:  # RuntimeError: uvloop, if the connection is already closed
        raise failure(str(error)) from error
