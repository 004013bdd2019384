"""The end of vLLM's API server after SIGTERM, while clients keep their connections open."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from redraft.engine import patches
from redraft.engine.settings import write_settings
from redraft.engine.wait import ENABLED

# As `serve_http` of vLLM ends: the server's task is cancelled, then its `shutdown` is awaited.
SERVE = """
import asyncio, sys
import uvicorn
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.plugins import load_general_plugins
from redraft.engine import patches
patches.ENDING_S = 1
load_general_plugins()

async def app(scope, receive, send):
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["more_body"]:
            pass
        for _ in range(2000):
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})

async def main():
    server = NoSignalServer(uvicorn.Config(app, port=0, lifespan="off", log_level="error"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    server.should_exit = True
    serving.cancel()
    await server.shutdown()

asyncio.run(main())
"""
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"


@pytest.mark.vllm
@pytest.mark.parametrize(
    "name",
    [
        "half a head",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("half a body", "a slow reader")),
    ],
)
def test_a_client_that_keeps_its_connection_does_not_keep_the_server(name):
    sent = {
        "half a head": HEAD[:20],
        "half a body": HEAD + b"abc",
        "a slow reader": HEAD + b"123456789",
    }[name]
    environment = os.environ | write_settings(ENABLED)
    environment.pop("VLLM_PLUGINS", None)
    command = [sys.executable, "-c", SERVE]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            port = int(next(line for line in server.stdout if line.strip().isdecimal()))
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(sent)
                if name == "a slow reader":
                    assert client.recv(1) == b"H"
                began_s = time.monotonic()
                server.stdin.write("\n")
                server.stdin.flush()
                assert server.wait(timeout=600) == 0
                assert time.monotonic() - began_s < patches.ENDING_S + 120
        finally:
            server.kill()
