"""Requests passed on to servers, answers passed back as they arrive: what tap and router are.

client ─► domain ─► pool ─► server       a tap asks for more than the client did, records it, and
client ◄─────────── tap ◄─ server        takes it out of the answer again

tap      one server, recorded                   router   pools of servers, recorded where they have no plugin
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Any, cast

import httpx
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from online.domains import Domains
from online.pools import Asked, Header, NoServerError, Pools, Reply
from online.request_origin import DOMAIN_HEADER, Origin, origin_of
from online.tap import Tap
from online.tap_messages import COMPLETION_PATHS

logger = logging.getLogger("redraft.proxy")

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]

HOP_BY_HOP = {
    *(b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"trailer", b"host", b"content-length")
}

REFUSALS = (400, 422)
"""A request is refused as such, and no engine has seen it."""

POOL_HEADER = b"x-redraft-pool"
"""Of an answer: the domain of the server that gave it."""


class Proxy:
    """The ASGI application in front of `pools`."""

    def __init__(self, pools: Pools, *, domains: Domains | None = None, tap: Tap | None = None) -> None:
        self.pools, self.domains, self.tap = pools, domains or Domains(), tap

    def app(self, routes: Sequence[BaseRoute] = ()) -> Router:
        """What is none of `routes` is passed on, but for the servers' own /redraft/...: these are for their learner."""
        own = [
            *routes,
            Route("/redraft/tap", self._tap_status),
            Route("/redraft/{path:path}", _not_found, methods=METHODS),
            Route("/{path:path}", self, methods=METHODS),
        ]
        return Router(own, lifespan=self._lifespan)  # an application's middleware would be in the way of every chunk

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: object) -> AsyncIterator[None]:
        async with self.pools.running(), self.tap.shipping() if self.tap else contextlib.nullcontext():
            yield

    async def _tap_status(self, request: Request) -> Response:
        return _not_found(request) if self.tap is None else JSONResponse(self.tap.status())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, and its answer back; given up, so that its server gives up too, where the client goes
        away."""
        request = Request(scope, receive)
        if not {".", ".."}.isdisjoint(scope["path"].split("/")):  # it could lead to the servers' own /redraft/...
            await _failed(400, "a path with . or .. in it is not passed on")(scope, receive, send)
            return
        with contextlib.suppress(ClientDisconnect):
            body = await request.body()
            async with contextlib.AsyncExitStack() as closing:  # here, where a client that leaves cancels nothing
                relaying = asyncio.ensure_future(self._relay(request, body, send, closing))
                leaving = asyncio.ensure_future(receive())  # its body is read: only its end can come
                try:
                    await asyncio.wait([relaying, leaving], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    leaving.cancel()
                    relaying.cancel()
                    await asyncio.wait([relaying])
                if not relaying.cancelled():
                    relaying.result()

    async def _relay(self, request: Request, body: bytes, send: Send, closing: contextlib.AsyncExitStack) -> None:
        try:
            reply, chunks = await self._asked(request, body)
        except NoServerError as error:
            return await _failed(503, str(error))(request.scope, request.receive, send)
        except httpx.TransportError as error:
            message = f"the server broke off before it answered: {error!r}"
            return await _failed(502, message)(request.scope, request.receive, send)
        closing.push_async_callback(reply.aclose)
        closing.push_async_callback(chunks.aclose)
        try:
            await send({"type": "http.response.start", "status": reply.answer.status_code, "headers": _head(reply)})
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body"})
        except httpx.TransportError as error:  # the client sees that as it would see it there: a connection cut off
            logger.warning("%s broke off within an answer: %r", reply.member.url, error)

    async def _asked(self, request: Request, body: bytes) -> tuple[Reply, AsyncGenerator[bytes, None]]:
        """A server's reply, and what the client gets of it.

        Raises: NoServerError, httpx.TransportError, as `Pools.send`.
        """
        origin = origin_of(request.headers)
        kind = COMPLETION_PATHS.get(request.url.path) if request.method == "POST" else None
        question: Any = _json(body) if kind else None
        origin = origin._replace(domain=self.domains.of(origin, question))
        asked = Asked(method=request.method, path=_path(request), headers=_headers(request, origin), body=body)
        if self.tap is not None and kind and self.tap.wants(question, origin):
            reply = await self.pools.send(self.tap.wish(asked, question, kind), origin.domain)
            if reply.answer.status_code == 200:
                return reply, self.tap.read(reply.answer, question, origin)
            if reply.answer.status_code not in REFUSALS:
                return reply, _raw(reply)
            # It may be the tap's own wish that was refused (--max-logprobs): the client's decides.
            await reply.aclose()
            self.tap.counts["refused_requests"] += 1
        reply = await self.pools.send(asked, origin.domain)
        return reply, _raw(reply)


def serve(app: ASGIApp, host: str, port: int) -> None:
    """Until the process is told to end. Date and Server of an answer are those of the server that gave it."""
    uvicorn.run(
        app, host=host, port=port, log_level="warning", access_log=False, date_header=False, server_header=False
    )


def _raw(reply: Reply) -> AsyncGenerator[bytes, None]:
    """Its body, as it is encoded."""
    return cast("AsyncGenerator[bytes, None]", reply.answer.aiter_raw())  # an iterator only, httpx says


def _head(reply: Reply) -> list[Header]:
    """The headers that the client gets."""
    pool = [(POOL_HEADER, reply.member.domain.encode())] if reply.member.domain else []
    return _passing(reply.answer.headers.raw) + pool


def _json(body: bytes) -> Any:
    """None where it is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _path(request: Request) -> bytes:
    query = request.scope["query_string"]
    path: bytes = request.scope["raw_path"]
    return path + b"?" + query if query else path


def _headers(request: Request, origin: Origin) -> list[Header]:
    domain = [(DOMAIN_HEADER, origin.domain.encode("latin-1"))] if origin.domain else []
    return [header for header in _passing(request.headers.raw) if header[0] != DOMAIN_HEADER] + domain


def _passing(headers: Iterable[Header]) -> list[Header]:
    """Without those that are about one connection only."""
    lowered = ((name.lower(), value) for name, value in headers)
    return [(name, value) for name, value in lowered if name not in HOP_BY_HOP]


def _not_found(request: Request) -> Response:
    return Response(status_code=404)


def _failed(status: int, message: str) -> Response:
    """An error as an OpenAI client reads it."""
    logger.warning("%s", message)
    return JSONResponse({"error": {"message": message, "type": "server_error", "code": status}}, status)
