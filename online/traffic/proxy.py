"""The proxy of tap and router: forwards requests to servers, and answers back as they arrive.

client ─► domain ─► pool ─► server       a tap asks the server for more than the client did, records
client ◄─────────── tap ◄─ server        the answer, and removes the extra fields again

tap      one server, recorded                   router   pools of servers, recorded if they have no plugin

A small body is read whole, because the domain and the tap need it. A large one is passed on piece
by piece.
"""

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import Message, Receive, Scope, Send

from redraft.online.records.origin import DOMAIN_HEADER, Origin, read_origin_headers
from redraft.online.traffic.domains import Domains
from redraft.online.traffic.front import FrontConfig
from redraft.online.traffic.pools import NoServerError, Pools
from redraft.online.traffic.tap import Tap
from redraft.online.traffic.tap_messages import COMPLETION_PATHS, TEXT_PATHS
from redraft.online.traffic.upstream import (
    BrokenError,
    ForwardedRequest,
    Header,
    Reply,
    UnsendableError,
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
by `Connection` are dropped too, except ours: a client must not take off what a gateway set.
"""

OWN_PREFIX = b"x-redraft-"
REFUSALS = (400, 422)  # statuses of an invalid request, before the engine sees it
NO_CONTENT = (204, 304)  # Statuses without a body, whatever their Content-Length says.

CLIENT_PATHS = (
    *(
        "v1",
        "v2",
        "health",
        "ping",
        "version",
        "metrics",
        "tokenize",
        "detokenize",
        "inference",
        "cohere",
    ),
    *("pooling", "classify", "score", "rerank", "generative_scoring", "invocations"),
)
"""First parts of the paths that vLLM has for clients."""

ADMIN_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # those that change the server
POOL_HEADER = b"x-redraft-pool"  # Response header: the domain of the answering server.
MAX_READ_BYTES = 1 << 20  # read whole; parsing 1 MiB of JSON holds the interpreter for 10 ms


STARTS_PER_TURN = 4  # requests started per turn; a start takes as long as a dozen chunks


class Turnstile:
    """Lets a few requests start per turn of the event loop.

    Otherwise streams stand still while hundreds arrive.
    """

    def __init__(self) -> None:
        self._started = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return at once, or in the first turn with room for this request.

        First come, first served.
        """
        # `_started` counts requests of this turn and those that wait. `_begin_turn` sets it for the
        # next turn.
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
            if not turn.done():  # unless the client has left
                turn.set_result(None)
        if self._started:
            asyncio.get_running_loop().call_soon(self._begin_turn)


class BodyTooLargeError(Exception):
    """The body is larger than `max_body_bytes`."""


class Body:
    """The body of a request.

    Whole in `beginning`, or `beginning` and the rest, which is still to come.
    """

    def __init__(self, request: Request, max_bytes: int) -> None:
        self.beginning = b""
        self.is_whole = False
        self.length = request.headers.get("content-length")  # the client's; None if it sends chunks
        self._receive, self._max_bytes = request.receive, max_bytes
        self._ended = asyncio.Event()
        if self.length and int(self.length) > max_bytes:
            raise BodyTooLargeError

    async def read_beginning(self) -> None:
        """Read the whole body, or the first `MAX_READ_BYTES`.

        Raises: BodyTooLargeError, ClientDisconnect.
        """
        pieces, num_bytes = [], 0
        # The last piece may pass the limit. Nothing is lost: `__aiter__` goes on after it.
        while not self._ended.is_set() and num_bytes <= MAX_READ_BYTES:
            pieces.append(await self._read_piece())
            num_bytes += len(pieces[-1])
        self.beginning, self.is_whole = b"".join(pieces), self._ended.is_set()
        if num_bytes > self._max_bytes:
            raise BodyTooLargeError

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """All of the body, once. Raises: BodyTooLargeError, ClientDisconnect."""
        yield self.beginning
        num_bytes = len(self.beginning)
        while not self._ended.is_set():
            piece = await self._read_piece()
            num_bytes += len(piece)
            if num_bytes > self._max_bytes:
                raise BodyTooLargeError
            yield piece

    async def wait_for_disconnect(self) -> None:
        """Return once the client has left. After the body, the next message can only be that."""
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
    """An answer for the client: the server's reply, and the chunks to send."""

    reply: Reply
    chunks: AsyncGenerator[bytes, None]
    is_changed: bool = False  # not the server's chunks: its Content-Length is wrong
    length: int | None = None  # Length of changed chunks in bytes, if it is known.


class Proxy:
    def __init__(
        self,
        pools: Pools,
        *,
        domains: Domains | None = None,
        tap: Tap | None = None,
        max_body_bytes: int = FrontConfig.max_body_bytes,
    ) -> None:
        self.pools, self.domains, self.tap = pools, domains or Domains(), tap
        self.max_body_bytes = max_body_bytes
        self._turnstile = Turnstile()

    def app(self, *, hidden: Sequence[str] = ()) -> Router:
        """For clients: forward the API that vLLM has for them, except `hidden`.

        Its other routes are the learner's (/redraft/...) or a developer's: one of them puts a
        server to sleep.
        """
        own = [
            # The first match counts, and the last route takes every path.
            *(Route(path, _respond_not_found, methods=METHODS) for path in (*hidden, *ADMIN_PATHS)),
            *(Route(f"/{name}", self, methods=METHODS) for name in CLIENT_PATHS),
            *(Route(f"/{name}/{{path:path}}", self, methods=METHODS) for name in CLIENT_PATHS),
        ]
        return Router(
            own, lifespan=self._lifespan
        )  # a full application's middleware would slow down every chunk

    def admin_app(
        self, routes: Sequence[BaseRoute] = (), metrics: CollectorRegistry | None = None
    ) -> Router:
        """For operators: `routes`, /metrics, and the state of the tap.

        They name servers, and are not for clients.
        """
        metrics = metrics or CollectorRegistry()
        metrics.register(self.pools.guard)  # type: ignore[arg-type]  # only `collect` is called

        async def show_metrics(request: Request) -> Response:
            return Response(generate_latest(metrics), media_type=CONTENT_TYPE_LATEST)

        own = [Route("/metrics", show_metrics), Route("/redraft/tap", self._tap_status)]
        return Router([*routes, *own])

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: object) -> AsyncIterator[None]:
        async with self.pools.running():
            if self.tap is None:
                yield
                return
            checking = asyncio.create_task(self.tap.checks.check_forever(self.pools))
            try:
                async with self.tap.shipping():
                    yield
            finally:
                checking.cancel()

    async def _tap_status(self, request: Request) -> Response:
        return _respond_not_found(request) if self.tap is None else JSONResponse(self.tap.status())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward one request and return the answer.

        If the client disconnects, cancel it, and the server stops too.
        """
        await self._turnstile.enter()
        request, send = Request(scope, receive), _sending(send)
        if not {".", ".."}.isdisjoint(
            scope["path"].split("/")
        ):  # it could resolve to the servers' /redraft/...
            await _respond_with_error(400, "a path that contains . or .. is not forwarded")(
                scope, receive, send
            )
            return
        with contextlib.suppress(ClientDisconnect):
            try:
                body = Body(request, self.max_body_bytes)
                await body.read_beginning()
            except BodyTooLargeError as error:
                await _respond_to(error, self.max_body_bytes)(scope, receive, send)
                return
            # Opened outside the task: cancelling the task must not cancel the closing of the reply.
            async with contextlib.AsyncExitStack() as closing:
                relaying = asyncio.ensure_future(self._relay(request, body, send, closing))
                leaving = asyncio.ensure_future(body.wait_for_disconnect())
                try:
                    await asyncio.wait([relaying, leaving], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    leaving.cancel()
                    relaying.cancel()
                    # `cancel` only asks. The task must be over before `closing` closes the reply it
                    # uses.
                    await asyncio.wait([relaying])
                if not relaying.cancelled():
                    relaying.result()

    async def _relay(
        self, request: Request, body: Body, send: Send, closing: contextlib.AsyncExitStack
    ) -> None:
        try:
            relayed = await self._forward(request, body)
        except (NoServerError, BrokenError, UnsendableError, BodyTooLargeError) as error:
            return await _respond_to(error, self.max_body_bytes)(
                request.scope, request.receive, send
            )
        reply, chunks = relayed.reply, relayed.chunks
        # Called in reverse order: the generator of chunks reads from the reply.
        closing.push_async_callback(reply.aclose)
        closing.push_async_callback(chunks.aclose)
        try:
            headers = _build_response_headers(relayed)
            await send({"type": "http.response.start", "status": reply.status, "headers": headers})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await (
                reply.aclose()
            )  # before the client knows the end: its next request then finds this connection free
            await send({"type": "http.response.body"})
        except BrokenError as error:
            # The client sees a broken connection, as it would without the proxy. A stream says why
            # before it breaks.
            logger.warning(
                "%s closed the connection in the middle of an answer: %s", reply.upstream.url, error
            )
            if _is_event_stream(reply):
                await send(
                    {
                        "type": "http.response.body",
                        "body": _build_error_event(error),
                        "more_body": True,
                    }
                )

    async def _forward(self, request: Request, body: Body) -> Relayed:
        """A server's reply, and the chunks to send to the client.

        Raises:
            NoServerError, BrokenError, UnsendableError, BodyTooLargeError
        """
        origin = read_origin_headers(request.headers)
        path = request.url.path
        is_text = request.method == "POST" and path.rstrip("/") in TEXT_PATHS
        kind = COMPLETION_PATHS.get(path, "") if is_text else ""
        payload: Any = _parse_json(body.beginning) if is_text and body.is_whole else None
        domain = self._detect_domain(origin, payload)
        forwarded = ForwardedRequest(
            method=request.method,
            path=_read_path(request),
            headers=_build_request_headers(request, "" if domain == origin.domain else domain),
            body=body.beginning if body.is_whole else body,
            length=body.length,
        )
        if self.tap is not None and is_text and (key := request.headers.get("authorization")):
            self.tap.checks.authorization = key.encode("latin-1")
        # After `forwarded`, which needs the domain as the client sent it.
        origin = origin._replace(domain=domain)
        if (
            self.tap is not None
            and is_text
            and self.tap.should_record(payload, origin, is_read=body.is_whole, is_known=bool(kind))
        ):
            reply = await self.pools.send(
                self.tap.ask_for_logprobs(forwarded, payload, kind), domain
            )
            if reply.status == 200:
                self.tap.counts["captured_requests"] += 1
                return await self._record(self.tap, reply, payload, origin)
            if reply.status not in REFUSALS:
                return Relayed(reply, reply.chunks())
            # Perhaps only the tap's extra fields were refused (--max-logprobs): try the client's
            # request unchanged.
            await reply.aclose()
            self.tap.counts["refused_requests"] += 1
        reply = await self.pools.send(forwarded, domain)
        return Relayed(reply, reply.chunks())

    def _detect_domain(self, origin: Origin, payload: Any) -> str:
        try:
            return self.domains.detect(origin, payload)
        except (
            Exception
        ) as error:  # an odd prompt may confuse the tokenizer, and must still be answered
            logger.warning(
                "the domain of a request could not be detected: %s", type(error).__name__
            )
            return origin.domain

    async def _record(
        self, tap: Tap, reply: Reply, payload: dict[str, Any], origin: Origin
    ) -> Relayed:
        if payload.get("stream"):
            return Relayed(reply, tap.relay_stream(reply, payload, origin), is_changed=True)
        try:
            answer = await tap.relay_answer(reply, payload, origin)
        except BaseException:
            await reply.aclose()
            raise
        return Relayed(reply, _yield_once(answer), is_changed=True, length=len(answer))


def _sending(send: Send) -> Send:
    """`send` that raises ClientDisconnect once the connection is closed.

    Uvloop raises RuntimeError.
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
    headers = _drop_hop_by_hop(reply.headers)
    is_chunked = any(
        name == b"transfer-encoding" for name, _ in reply.headers
    )  # a length beside it means nothing
    if relayed.is_changed or is_chunked or reply.status in NO_CONTENT:
        headers = [header for header in headers if header[0] != b"content-length"]
    if relayed.length is not None:
        headers.append((b"content-length", b"%d" % relayed.length))
    if reply.upstream.domain:
        headers.append((POOL_HEADER, reply.upstream.domain.encode()))
    return headers


def _is_event_stream(reply: Reply) -> bool:
    headers = dict(reply.headers)
    return (
        headers.get(b"content-type", b"").startswith(b"text/event-stream")
        and b"content-encoding" not in headers
    )


def _build_error_event(error: BrokenError) -> bytes:
    """The last event of a stream that broke, in the form of vLLM's and OpenAI's own.

    Their clients raise it.
    """
    message = f"the server closed the connection in the middle of the answer: {error}"
    content = {"error": {"message": message, "type": "server_error", "code": 502}}
    return (
        b"\n\ndata: " + json.dumps(content).encode() + b"\n\n"
    )  # the blank line ends an event that broke off


def _parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _read_path(request: Request) -> bytes:
    query = request.scope["query_string"]
    path: bytes = request.scope["raw_path"]
    return path + b"?" + query if query else path


def _build_request_headers(request: Request, found: str) -> list[Header]:
    """Headers for the server, with the domain if it was `found`.

    A label of the client is passed on as it is.
    """
    dropped = {b"host", b"content-length", *([DOMAIN_HEADER] if found else [])}
    headers = [
        header for header in _drop_hop_by_hop(request.headers.raw) if header[0] not in dropped
    ]
    return [*headers, (DOMAIN_HEADER, found.encode("latin-1"))] if found else headers


def _drop_hop_by_hop(headers: Iterable[Header]) -> list[Header]:
    """The headers, with names in lower case, without those about a single connection."""
    lowered = [(name.lower(), value) for name, value in headers]
    options = (
        b",".join(value for name, value in lowered if name == b"connection").lower().split(b",")
    )
    named = {option.strip() for option in options if not option.strip().startswith(OWN_PREFIX)}
    return [
        (name, value) for name, value in lowered if name not in HOP_BY_HOP and name not in named
    ]


def _respond_not_found(request: Request) -> Response:
    return Response(status_code=404)


def _respond_to(error: Exception, max_body_bytes: int) -> Response:
    match error:
        case NoServerError():
            return _respond_with_error(503, str(error))
        case BodyTooLargeError():
            return _respond_with_error(
                413, f"the body is larger than {max_body_bytes} bytes (max_body_bytes)"
            )
        case UnsendableError():
            return _respond_with_error(400, "the request has a header that cannot be forwarded")
        case _:
            return _respond_with_error(
                502, f"the server closed the connection before it answered: {error}"
            )


def _respond_with_error(status: int, message: str) -> Response:
    """An error in the form OpenAI clients expect. A client's own mistake is not logged."""
    if status >= 500:
        logger.warning("%s", message)
    return JSONResponse(
        {"error": {"message": message, "type": "server_error", "code": status}}, status
    )
