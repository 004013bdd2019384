"""The tap's proxy: forwards requests to the server, and answers back as they arrive.

client ─► tap ─► server       the tap asks the server for more than the client did, records the
client ◄─ tap ◄─ server       answer, and removes the extra fields again

A small body is read completely, because the tap needs it. A large body is forwarded piece by piece.
"""

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from redraft.online.records.origin import Origin, read_origin_headers
from redraft.online.traffic.front import FrontConfig
from redraft.online.traffic.tap import Tap
from redraft.online.traffic.tap_messages import TEXT_PATHS
from redraft.online.traffic.upstream import (
    BrokenError,
    ForwardedRequest,
    Header,
    OutOfFilesError,
    RefusedError,
    Reply,
    UnsendableError,
    Upstream,
)

logger = logging.getLogger("redraft.proxy")

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]

HOP_BY_HOP = {
    *(
        b"connection",
        b"proxy-connection",
        b"keep-alive",
        b"transfer-encoding",
        b"upgrade",
        b"te",
        b"trailer",
    ),
    *(b"proxy-authenticate", b"proxy-authorization", b"proxy-authentication-info"),
}
"""Headers about a single connection or meant for a proxy (RFC 9110, 7.6.1 and 11.7). Headers named
by `Connection` are also dropped, except ours, because a client must not remove headers set by a
gateway.
"""

OWN_PREFIX = b"x-redraft-"
REFUSALS = (400, 422)  # statuses for an invalid request, which the engine never receives
NO_CONTENT = (204, 304)  # statuses without a body, whatever their Content-Length is

CLIENT_PATHS = (
    *("v1", "v2", "health", "ping", "version", "tokenize", "detokenize", "inference", "cohere"),
    *("metrics", "pooling", "classify", "score", "rerank", "generative_scoring", "invocations"),
)
"""First components of vLLM's paths for clients."""

ADMIN_PATHS = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/inference/v1/abort_requests",
)
"""Client paths that change the server or can end another client's request."""

URL_HEADERS = (b"location", b"content-location")
MAX_READ_BYTES = 1 << 20  # maximum size of a body that is read whole
MAX_JSON_PARTS = 150_000
"""Maximum number of members and elements in a JSON body that is parsed, enough for a prompt of
131,072 token ids. All streams wait during parsing, which takes tens of milliseconds at this limit.
"""

MAX_LENGTH_DIGITS = 18


# Requests started per turn; starting one takes as long as forwarding a dozen chunks.
STARTS_PER_TURN = 4


class Turnstile:
    """Limits how many requests start per turn of the event loop.

    Otherwise streams would stall while hundreds of requests arrive.
    """

    def __init__(self) -> None:
        self._started = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return at once, or in the first turn with room for this request.

        Requests are admitted in the order in which they arrive.
        """
        # `_started` counts the requests of this turn and those waiting. `_begin_turn` sets it for
        # the next turn.
        if not self._started:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._started += 1
        if self._started > STARTS_PER_TURN:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn

    def _begin_turn(self) -> None:
        self._started = min(STARTS_PER_TURN, len(self._waiting))
        for _ in range(self._started):
            turn = self._waiting.popleft()
            if not turn.done():  # the future may be cancelled, because the client has disconnected
                turn.set_result(None)
        if self._started:
            asyncio.get_running_loop().call_soon(self._begin_turn)


class BodyTooLargeError(Exception):
    """The body is larger than `max_body_bytes`."""


class BadLengthError(Exception):
    """The Content-Length is not a number, or has more digits than any real length."""


SENDING_ERRORS = (
    *(RefusedError, OutOfFilesError, BrokenError, UnsendableError),
    BodyTooLargeError,
)


class Body:
    """The body of a request.

    `beginning` is either the whole body, or its first part while the remainder has not arrived.
    """

    def __init__(self, request: Request, max_bytes: int) -> None:
        self.beginning = b""
        self.is_whole = False
        # The Content-Length from the client; None if it sends chunks.
        self.length = request.headers.get("content-length")
        self._receive, self._max_bytes = request.receive, max_bytes
        self._ended = asyncio.Event()
        if self.length is not None:
            if not (self.length.isdecimal() and len(self.length) <= MAX_LENGTH_DIGITS):
                raise BadLengthError
            if int(self.length) > max_bytes:
                raise BodyTooLargeError

    async def read_beginning(self) -> None:
        """Read the whole body, or its first `MAX_READ_BYTES`.

        Raises:
            BodyTooLargeError, ClientDisconnect
        """
        pieces, num_bytes = [], 0
        # The last piece may exceed the limit. Nothing is lost, because `__aiter__` continues after
        # it.
        while not self._ended.is_set() and num_bytes <= MAX_READ_BYTES:
            pieces.append(await self._read_piece())
            num_bytes += len(pieces[-1])
        self.beginning, self.is_whole = b"".join(pieces), self._ended.is_set()
        if num_bytes > self._max_bytes:
            raise BodyTooLargeError

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Iterate over the whole body, once.

        Raises:
            BodyTooLargeError, ClientDisconnect
        """
        yield self.beginning
        num_bytes = len(self.beginning)
        while not self._ended.is_set():
            piece = await self._read_piece()
            num_bytes += len(piece)
            if num_bytes > self._max_bytes:
                raise BodyTooLargeError
            yield piece

    async def wait_for_disconnect(self) -> None:
        """Wait until the client disconnects.

        After the body, the only possible message is the disconnect.
        """
        await self._ended.wait()
        await self._receive()

    async def _read_piece(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if not message.get("more_body", False):
            self._ended.set()
        piece: bytes = message.get("body", b"")
        return piece


@dataclass(frozen=True)
class Relayed:
    """A response for the client: the server's reply, and the chunks to send."""

    reply: Reply
    chunks: AsyncGenerator[bytes, None]
    is_changed: bool = False
    """Whether the chunks differ from the server's, so that its Content-Length is wrong."""
    length: int | None = None
    """Length of the changed chunks in bytes, if known."""


class Proxy:
    def __init__(
        self, upstream: Upstream, tap: Tap, *, max_body_bytes: int = FrontConfig.max_body_bytes
    ) -> None:
        self.upstream, self.tap, self.max_body_bytes = upstream, tap, max_body_bytes
        self._turnstile = Turnstile()

    def app(self) -> Router:
        """Return the application for clients, which forwards the API that vLLM has for them.

        vLLM's other routes are for the learner (/redraft/...) or for developers; one of them puts a
        server to sleep.
        """
        names = (*CLIENT_PATHS, *self.tap.dialect.client_paths)
        own = [
            *(Route(f"/{name}", self, methods=METHODS) for name in names),
            *(Route(f"/{name}/{{path:path}}", self, methods=METHODS) for name in names),
        ]
        return Router(
            own, lifespan=self._lifespan
        )  # a full application's middleware would slow down every chunk

    def admin_app(self) -> Router:
        """Return the application for operators: /metrics, and the state of the tap.

        The application reveals the server's name, so it is not for clients.
        """
        metrics = CollectorRegistry()
        metrics.register(self.tap.guard)  # type: ignore[arg-type]  # only `collect` is called

        async def show_metrics(request: Request) -> Response:
            return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)

        async def show_status(request: Request) -> Response:
            return JSONResponse({"requests": self.upstream.requests, **self.tap.status()})

        return Router([Route("/metrics", show_metrics), Route("/redraft/tap", show_status)])

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: object) -> AsyncIterator[None]:
        async with self.upstream.running(), self.tap.running(self.upstream):
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request and return the response.

        If the client disconnects, the request is cancelled, so that the server stops too.
        """
        await self._turnstile.enter()
        request, send = Request(scope, receive), _sending(send)
        if refused := _refuse_path(scope["path"]):
            await refused(scope, receive, send)
            return
        with contextlib.suppress(ClientDisconnect):
            try:
                body = Body(request, self.max_body_bytes)
                await body.read_beginning()
            except (BodyTooLargeError, BadLengthError) as error:
                await _respond_to(error, self.max_body_bytes)(scope, receive, send)
                return
            # Opened outside the task, because cancelling the task must not cancel the closing of
            # the reply.
            async with contextlib.AsyncExitStack() as closing:
                relaying = asyncio.ensure_future(self._relay(request, body, send, closing))
                leaving = asyncio.ensure_future(body.wait_for_disconnect())
                try:
                    await asyncio.wait([relaying, leaving], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    leaving.cancel()
                    relaying.cancel()
                    # `cancel` only requests the end. The task must have ended before `closing`
                    # closes the reply that it uses.
                    await asyncio.wait([relaying])
                if not relaying.cancelled():
                    relaying.result()

    async def _relay(
        self, request: Request, body: Body, send: Send, closing: contextlib.AsyncExitStack
    ) -> None:
        try:
            relayed = await self._forward(request, body)
        except SENDING_ERRORS as error:
            return await _respond_to(error, self.max_body_bytes)(
                request.scope, request.receive, send
            )
        reply, chunks = relayed.reply, relayed.chunks
        # These run in reverse order, because the generator of chunks reads from the reply.
        closing.push_async_callback(reply.aclose)
        closing.push_async_callback(chunks.aclose)
        try:
            headers = _build_response_headers(relayed)
            await send({"type": "http.response.start", "status": reply.status, "headers": headers})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await (
                reply.aclose()
                # Done before the client receives the end of the answer, so that its next request
                # finds this connection free.
            )
            await send({"type": "http.response.body"})
        except BrokenError as error:
            # Break the connection to the client, as would happen without the proxy. A stream states
            # the reason first.
            logger.warning("the server closed the connection in the middle of an answer: %s", error)
            if _is_event_stream(reply):
                await send(
                    {
                        "type": "http.response.body",
                        "body": _build_error_event(error),
                        "more_body": True,
                    }
                )

    async def _forward(self, request: Request, body: Body) -> Relayed:
        """Return the server's reply, and the chunks to send to the client.

        Raises:
            RefusedError, OutOfFilesError, BrokenError, UnsendableError, BodyTooLargeError
        """
        origin = read_origin_headers(request.headers)
        path = request.url.path
        paths = self.tap.dialect.paths
        is_text = request.method == "POST" and path.rstrip("/") in {*TEXT_PATHS, *paths}
        forwarded = ForwardedRequest(
            method=request.method,
            path=_read_path(request),
            headers=_build_request_headers(request),
            body=body.beginning if body.is_whole else body,
            length=body.length,
        )
        if not is_text:
            reply = await self.upstream.send(forwarded)
            return Relayed(reply, reply.chunks())
        kind = paths.get(path, "")
        is_read = body.is_whole and _count_parts(body.beginning) <= MAX_JSON_PARTS
        payload: Any = _parse_json(body.beginning) if kind and is_read else None
        if self.tap.should_record(payload, origin, is_read=is_read, is_known=bool(kind)):
            reply = await self.upstream.send(self.tap.ask_for_logprobs(forwarded, payload, kind))
            if reply.status == 200:
                self.tap.counts["captured_requests"] += 1
                return await self._record(reply, payload, origin)
            if reply.status not in REFUSALS:
                return Relayed(reply, reply.chunks())
            # Perhaps only the tap's extra fields were refused (--max-logprobs): try the client's
            # request unchanged.
            await reply.aclose()
            self.tap.counts["refused_requests"] += 1
        reply = await self.upstream.send(forwarded)
        if reply.status == 200:
            self.tap.check.offer_key(request.headers.get("authorization", ""))
        return Relayed(reply, reply.chunks())

    async def _record(self, reply: Reply, payload: dict[str, Any], origin: Origin) -> Relayed:
        # Check the response, not the request's `stream`, because vLLM accepts "no" and 0 as false.
        if _is_event_stream(reply):
            return Relayed(reply, self.tap.relay_stream(reply, payload, origin), is_changed=True)
        try:
            answer = await self.tap.relay_answer(reply, payload, origin)
        except BaseException:
            await reply.aclose()
            raise
        return Relayed(reply, _yield_once(answer), is_changed=True, length=len(answer))


def _refuse_path(path: str) -> Response | None:
    """Return the response for a path that is not open to clients; None for any other path."""
    if not {".", ".."}.isdisjoint(path.split("/")):  # such a path could resolve to /redraft/...
        return _respond_with_error(400, "a path that contains . or .. is not forwarded")
    return Response(status_code=404) if path.rstrip("/") in ADMIN_PATHS else None


def _sending(send: Send) -> Send:
    """Wrap `send` so that it raises ClientDisconnect once the connection is closed.

    uvloop raises RuntimeError instead.
    """

    async def send_while_open(message: Message) -> None:
        try:
            await send(message)
        except RuntimeError as error:
            raise ClientDisconnect from error

    return send_while_open


async def _yield_once(chunk: bytes) -> AsyncGenerator[bytes, None]:
    yield chunk


def _build_response_headers(relayed: Relayed) -> list[Header]:
    reply = relayed.reply
    headers = [
        (name, reply.upstream.own_path(value) if name in URL_HEADERS else value)
        for name, value in _drop_hop_by_hop(reply.headers)
    ]
    is_chunked = any(
        name == b"transfer-encoding" for name, _ in reply.headers
    )  # with chunked encoding, a length is meaningless
    if relayed.is_changed or is_chunked or reply.status in NO_CONTENT:
        headers = [header for header in headers if header[0] != b"content-length"]
    if relayed.length is not None:
        headers.append((b"content-length", b"%d" % relayed.length))
    return headers


def _is_event_stream(reply: Reply) -> bool:
    headers = dict(reply.headers)
    return (
        headers.get(b"content-type", b"").startswith(b"text/event-stream")
        and b"content-encoding" not in headers
    )


def _build_error_event(error: BrokenError) -> bytes:
    """Build the last event of a stream that broke, in the format of vLLM and OpenAI.

    Their clients raise it as an exception.
    """
    message = f"the server closed the connection in the middle of the answer: {error}"
    content = {"error": {"message": message, "type": "server_error", "code": 502}}
    return (
        b"\n\ndata: " + json.dumps(content).encode() + b"\n\n"
    )  # the blank line ends an event that was truncated


def _count_parts(body: bytes) -> int:
    """Return an upper bound on the members and elements of this JSON, without parsing it."""
    return sum(map(body.count, (b",", b"[", b"{", b":")))


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _read_path(request: Request) -> bytes:
    query = request.scope["query_string"]
    path: bytes = request.scope["raw_path"]
    return path + b"?" + query if query else path


def _build_request_headers(request: Request) -> list[Header]:
    dropped = (b"host", b"content-length")
    return [header for header in _drop_hop_by_hop(request.headers.raw) if header[0] not in dropped]


def _drop_hop_by_hop(headers: Iterable[Header]) -> list[Header]:
    """Return the headers with lower-case names, without those about a single connection."""
    lowered = [(name.lower(), value) for name, value in headers]
    options = (
        b",".join(value for name, value in lowered if name == b"connection").lower().split(b",")
    )
    named = {option.strip() for option in options if not option.strip().startswith(OWN_PREFIX)}
    return [
        (name, value) for name, value in lowered if name not in HOP_BY_HOP and name not in named
    ]


def _respond_to(error: Exception, max_body_bytes: int) -> Response:
    match error:
        case RefusedError() | OutOfFilesError():
            logger.warning("a request was not sent: %s", error)
            return _respond_with_error(503, str(error))
        case BodyTooLargeError():
            return _respond_with_error(
                413, f"the body is larger than {max_body_bytes} bytes (max_body_bytes)"
            )
        case BadLengthError():
            return _respond_with_error(400, "the Content-Length is not a number of bytes")
        case UnsendableError():
            return _respond_with_error(400, "the request has a header that cannot be forwarded")
        case _:
            logger.warning("the server closed the connection before it answered: %s", error)
            return _respond_with_error(
                502, f"the server closed the connection before it answered: {error}"
            )


def _respond_with_error(status: int, message: str) -> Response:
    """Build an error response in the format that OpenAI clients expect."""
    return JSONResponse(
        {"error": {"message": message, "type": "server_error", "code": status}}, status
    )
