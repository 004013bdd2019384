"""Processes for the soak's attacker, without an engine.

`python attacked.py server PORT`, or `page PORT`.

The server is FastAPI on uvicorn, as vLLM's, with the plugin's routes beside the part of the API
that clients use.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from fake_completions import answer, event
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from redraft.online.engine.config import PluginConfig
from redraft.online.engine.routes import Endpoint
from redraft.online.journal import Journal
from redraft.online.page.app import build_app, serve_in_background
from redraft.online.page.config import Page


async def stream(num_tokens: int, reports_use: bool) -> AsyncIterator[bytes]:
    for number in range(num_tokens):
        reason = "length" if number + 1 == num_tokens else None
        yield event({"choices": [{"index": 0, "text": "x", "finish_reason": reason}]})
        await asyncio.sleep(0.03)
    if reports_use:
        yield event({"choices": [], "usage": {"completion_tokens": num_tokens}})
    yield b"data: [DONE]\n\n"


async def complete(request: Request) -> Response:
    try:
        body: dict[str, Any] = json.loads(await request.body())
        num_tokens, is_stream = int(body.get("max_tokens", 16)), bool(body.get("stream"))
    except (ClientDisconnect, ValueError, AttributeError, TypeError, RecursionError, OverflowError):
        return JSONResponse({"error": {"message": "no request"}}, 400)
    if is_stream and num_tokens < 1000:
        return StreamingResponse(
            stream(num_tokens, bool(body.get("stream_options"))), media_type="text/event-stream"
        )
    return JSONResponse(answer("m", body))


def serve(port: int) -> None:
    endpoint, app = Endpoint(), FastAPI()
    endpoint.config = PluginConfig(
        registry=Path(tempfile.mkdtemp()), token="right", allow_remote=True
    )
    endpoint.attach_router(app)
    app.add_api_route("/v1/completions", complete, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", lambda: {"data": [{"id": "m"}]})
    app.add_api_route("/health", lambda: None)
    uvicorn.run(app, port=port, access_log=False)


async def serve_page(port: int) -> None:
    logging.basicConfig(level="INFO")
    with tempfile.TemporaryDirectory() as folder:
        async with serve_in_background(build_app(Journal(Path(folder)).folder), Page(port=port)):
            await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[1] == "page":
        asyncio.run(serve_page(int(sys.argv[2])))
    else:
        serve(int(sys.argv[2]))
