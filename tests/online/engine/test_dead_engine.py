"""A server whose engine was killed ends by itself, so that it is started again.

It ends also if somebody was asking for the status.
"""

from __future__ import annotations

import signal
import socket

import httpx
import psutil
import pytest
from real_server import running_server


def find_server(url: str) -> psutil.Process:
    port = url.rsplit(":", 1)[1]
    (found,) = (
        process
        for process in psutil.process_iter(["cmdline"])
        if {"--port", port} <= set(process.info["cmdline"] or ())
        and "vllm" in " ".join(process.info["cmdline"])
    )
    return found


@pytest.mark.slow
@pytest.mark.vllm
def test_a_server_ends_after_its_engine_though_a_call_was_running(
    random_target, registry, tmp_path
):
    with running_server(
        random_target, registry, tmp_path, ["--num-speculative-tokens", "2"]
    ) as server:
        process = find_server(server.url)
        (engine,) = (
            child for child in process.children(recursive=True) if "EngineCore" in child.name()
        )

        engine.send_signal(signal.SIGSTOP)  # so that the call is running when it dies
        url = httpx.URL(server.url)
        token = server.http.headers["Authorization"]
        with socket.create_connection((url.host, url.port)) as asking:
            asking.sendall(
                f"GET /redraft/status HTTP/1.1\r\nHost: x\r\nAuthorization: {token}\r\n\r\n".encode()
            )
            # The event loop that answers these has begun with the call before.
            for _ in range(20):
                server.http.get("/version").raise_for_status()
            engine.send_signal(signal.SIGKILL)
            process.wait(timeout=600)
