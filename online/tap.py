"""Records from a vLLM that can not be touched: an OpenAI-compatible proxy in front of it.

    client ─► tap ─► vLLM       the tap asks for token ids and log-probabilities besides what the client asked for,
    client ◄─ tap ◄─ vLLM       and takes them out of the answer again
               └─► outlet       what they said becomes a record

A record from here has the target's top-k at every output token, and nothing of any draft: vLLM does not tell. What the
tap does not understand, and whatever goes wrong while recording, passes through as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from online.outlet import open_outlet
from online.plugin_config import CaptureConfig
from online.records import Record, frame_of
from online.request_origin import Origin, origin_of
from online.tap_messages import Answer, is_recordable, strip, tapped

logger = logging.getLogger("redraft.tap")

TAPPED_PATHS = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host", "content-length"}

MAX_WAITING_RECORDS = 1024
SHIP_INTERVAL_S = 1.0


class Tap:
    """One proxy: its counters, and the records that wait to be written."""

    def __init__(self, upstream: str, config: CaptureConfig, target_fingerprint: str) -> None:
        self.config = config
        self.target_fingerprint = target_fingerprint
        self.server_id = uuid.uuid4().hex[:16]
        self.counts: Counter[str] = Counter()
        self.http = httpx.AsyncClient(base_url=upstream, timeout=None)
        self._outlet = open_outlet(config, self.server_id)
        self._waiting: deque[Record] = deque()

    def app(self) -> Starlette:
        """The proxy as an ASGI application; `/redraft/tap` answers with its counters."""
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
        routes = [
            Route("/redraft/tap", self._status, methods=["GET"]),
            Route("/{path:path}", self._forward, methods=methods),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    async def _status(self, request: Request) -> Response:
        return Response(json.dumps(self.counts | self._outlet.status()), media_type="application/json")

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        shipping = asyncio.create_task(self._ship_for_ever())
        yield
        shipping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await shipping
        await asyncio.to_thread(self._ship)
        await asyncio.to_thread(self._outlet.close)
        await self.http.aclose()

    async def _forward(self, request: Request) -> Response:
        body = await request.body()
        origin = origin_of(request.headers)
        question = self._question(request, body, origin)
        if question is not None:
            wish = tapped(question, TAPPED_PATHS[request.url.path], self.config.top_k)
            upstream = await self._send(request, json.dumps(wish).encode(), identity=True)
            if upstream.status_code == 200:
                return self._answer(upstream, question, origin)
            # It may be the tap's own wish that was refused (--max-logprobs): the client's decides.
            await upstream.aclose()
            self.counts["refused_requests"] += 1
        return _passed_on(await self._send(request, body))

    def _question(self, request: Request, body: bytes, origin: Origin) -> dict[str, Any] | None:
        """The request's JSON where it is to be recorded, else None."""
        if request.method != "POST" or request.url.path not in TAPPED_PATHS:
            return None
        reason = ""
        question: Any = None
        try:
            question = json.loads(body)
        except ValueError:
            reason = "unreadable"
        if origin.opt_out:
            reason = "opt_out"
        elif self.config.tenants is not None and origin.tenant not in self.config.tenants:
            reason = "tenant"
        elif not reason and not is_recordable(question):
            reason = "unfit"
        elif zlib.crc32(uuid.uuid4().bytes) >= self.config.fraction * 2**32:
            reason = "fraction"
        self.counts[f"skipped_requests_{reason}" if reason else "captured_requests"] += 1
        return None if reason else question

    async def _send(self, request: Request, body: bytes, *, identity: bool = False) -> httpx.Response:
        headers = [(name, value) for name, value in request.headers.items() if name not in HOP_BY_HOP]
        if identity:  # the tap reads this answer
            headers = [(name, value) for name, value in headers if name != "accept-encoding"]
            headers.append(("accept-encoding", "identity"))
        url = httpx.URL(path=request.url.path, query=request.url.query.encode())
        return await self.http.send(
            self.http.build_request(request.method, url, headers=headers, content=body), stream=True
        )

    def _answer(self, upstream: httpx.Response, question: dict[str, Any], origin: Origin) -> Response:
        answer = Answer()

        async def finish() -> None:
            await upstream.aclose()
            self._keep(answer, question, origin)

        events = self._events(upstream, answer) if question.get("stream") else self._whole(upstream, answer)
        headers = {name: value for name, value in upstream.headers.items() if name not in HOP_BY_HOP}
        return StreamingResponse(_finally(events, finish), upstream.status_code, headers)

    async def _whole(self, upstream: httpx.Response, answer: Answer) -> AsyncIterator[bytes]:
        yield self._read(await upstream.aread(), answer)

    async def _events(self, upstream: httpx.Response, answer: Answer) -> AsyncIterator[bytes]:
        """The server-sent events without what the tap asked for, each as soon as it is complete."""
        waiting = b""
        async for chunk in upstream.aiter_raw():
            *events, waiting = (waiting + chunk).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    message = self._read(event.removeprefix(b"data: "), answer)
                    if message:
                        yield b"data: " + message + b"\n\n"
                else:
                    yield event + b"\n\n"
        if waiting:
            yield waiting

    def _read(self, message: bytes, answer: Answer) -> bytes:
        """The message as the client would have got it; empty where it would not have got one."""
        try:
            content = json.loads(message)
            answer.read(content)
            return json.dumps(content).encode() if strip(content) else b""
        except Exception as error:  # recording may fail, serving may not
            self._report(error)
            return message

    def _keep(self, answer: Answer, question: dict[str, Any], origin: Origin) -> None:
        try:
            record = answer.record(question, origin, self.server_id, self.target_fingerprint, self.config.top_k)
        except Exception as error:
            self._report(error)
            return
        if record is None:
            self.counts["empty_answers"] += 1
            return
        self._waiting.append(record)
        if len(self._waiting) > MAX_WAITING_RECORDS:
            self._waiting.popleft()
            self.counts["dropped_records_queue_full"] += 1

    def _report(self, error: Exception) -> None:
        self.counts["errors"] += 1
        logger.warning("not recorded: %s: %s", type(error).__name__, error)

    async def _ship_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SHIP_INTERVAL_S)
            await asyncio.to_thread(self._ship)

    def _ship(self) -> None:
        records = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not records:
            return
        try:
            self._outlet.write([frame_of(record) for record in records])
            self.counts["shipped_records"] += len(records)
        except OSError as error:
            self.counts["dropped_records_spool"] += len(records)
            self._report(error)


def _passed_on(upstream: httpx.Response) -> Response:
    headers = {name: value for name, value in upstream.headers.items() if name not in HOP_BY_HOP}
    return StreamingResponse(
        upstream.aiter_raw(), upstream.status_code, headers, background=BackgroundTask(upstream.aclose)
    )


async def _finally(chunks: AsyncIterator[bytes], finish: Any) -> AsyncIterator[bytes]:
    """The chunks, and `finish` behind them also where the client goes away first."""
    try:
        async for chunk in chunks:
            yield chunk
    finally:
        await finish()
