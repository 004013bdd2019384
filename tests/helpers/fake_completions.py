"""A completions server on a real socket, and a way to run the application.

Each request chooses the server's behaviour.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class Upstream:
    """Does what the request says, itself or in its metadata.

    {"do": "wait"}, "break", "break within", or a status. Otherwise it just answers.
    """

    name: str
    port: int = 0
    seen: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    clients: set[Any] = field(default_factory=set)
    """The other ends of the connections of all requests."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to release requests to wait, and to break off those that break within."""
    left: int = 0
    """Requests whose client disconnected before the answer."""
    health: int = 200
    """Status of /health."""
    checks: int = 0
    """Requests for /health."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        routes = [
            Route("/health", self._check),
            Route("/v1/models", lambda request: JSONResponse({"data": [{"id": self.name}]})),
            Route("/v1/{path:path}", self._complete, methods=["POST"]),
            Route("/redraft/swap", lambda request: Response(self.name), methods=["POST"]),
        ]
        self._serving = contextlib.AsyncExitStack()
        self._server = await self._serving.enter_async_context(
            served(Starlette(routes=routes), self.port)
        )
        self.port = self._server.port

    async def stop(self) -> None:
        await self._serving.aclose()

    def last(self) -> dict[str, str]:
        """Headers of the newest request."""
        return self.seen[-1][0]

    async def _check(self, request: Request) -> Response:
        self.checks += 1
        return Response(status_code=self.health)

    async def _complete(self, request: Request) -> Response:
        body = await request.body()
        self.seen.append((dict(request.headers), body))
        self.clients.add(request.client)
        question = json.loads(body) if body.startswith(b"{") else {}
        question |= question.get("metadata") or {}
        if question.get("do") == "break":
            self._server.cut_off()
        if question.get("do") == "wait":
            await self._wait(request)
        if isinstance(question.get("do"), int):
            return JSONResponse({"error": "as asked for"}, question["do"])
        if question.get("stream") is True:
            return StreamingResponse(self._events(question), media_type="text/event-stream")
        headers = {"x-own": "kept"} | (
            {"location": question["location"]} if "location" in question else {}
        )
        return JSONResponse(answer(self.name, question), headers=headers)

    async def _wait(self, request: Request) -> None:
        while not self.gate.is_set():
            if await request.is_disconnected():
                self.left += 1
                return
            await asyncio.sleep(0.005)

    async def _events(self, question: dict[str, Any]) -> AsyncIterator[bytes]:
        yield event(answer(self.name, question))
        if question.get("do") == "break within":
            await self.gate.wait()
            self._server.cut_off()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        yield event(answer(self.name, question))
        yield b"data: [DONE]\n\n"


def answer(name: str, question: dict[str, Any]) -> dict[str, Any]:
    """Two tokens, with log-probabilities and ids if the request asks for them."""
    choice: dict[str, Any] = {"index": 0, "text": name, "finish_reason": None, "logprobs": None}
    if question.get("return_token_ids"):
        top = {"token_id:7": -0.1, "token_id:8": -2.5, "token_id:9": -4.0}
        choice |= {
            "token_ids": [7, 8],
            "prompt_token_ids": [1, 2, 3],
            "logprobs": {"top_logprobs": [top, top]},
        }
    return {"id": "cmpl-1", "model": question.get("model"), "choices": [choice]}


def event(message: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


class Server(uvicorn.Server):
    """A uvicorn server without signal handlers: signals belong to the test.

    It ends as uvicorn's own does, which looks only ten times a second and always waits once.
    """

    @property
    def port(self) -> int:
        return int(self.servers[0].sockets[0].getsockname()[1])

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.005)

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        for listening in self.servers:
            listening.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while state.connections or state.tasks:
                    await asyncio.sleep(0.005)
                for listening in self.servers:
                    await listening.wait_closed()
        except TimeoutError:
            for task in state.tasks:
                task.cancel()
        await self.lifespan.shutdown()

    def cut_off(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def served(app: Any, port: int = 0) -> AsyncIterator[Server]:
    """Serve the application on a port; at the end, cut all connections."""
    server = Server(
        uvicorn.Config(
            app, host="127.0.0.1", port=port, log_level="critical", timeout_graceful_shutdown=2
        )
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:
        assert not serving.done()
        await asyncio.sleep(0.002)
    try:
        yield server
    finally:
        server.cut_off()
        server.should_exit = True
        await serving
