"""Small HTTP servers that speak a teacher's contract: they list a model and complete a prompt."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, Any]]
"""HTTP status and body."""


def log_probs(request: dict[str, Any]) -> dict[str, Any]:
    """The k largest at every position but the first, and at the generated token.

    They are a function of the token before.
    """
    prompt, k = request["prompt"], request.get("prompt_logprobs", 1)
    *entries, last = [
        {str((token + i) % 97): {"logprob": -1.0 - i - token / 100} for i in range(k)}
        for token in prompt
    ]
    return {"choices": [{"prompt_logprobs": [None, *entries], **generated(last)}]}


def generated(entry: dict[str, Any]) -> dict[str, Any]:
    """The log-probabilities of a generated token, in vLLM's form for token ids."""
    log_probs = {f"token_id:{token}": value["logprob"] for token, value in entry.items()}
    return {"logprobs": {"top_logprobs": [log_probs]}}


@dataclass
class Teacher:
    """A server's manners, to be changed while it runs, and what it was asked."""

    url: str = ""
    model: str = "the-target"
    delay_s: float = 0.0
    status: int = 200
    answer: Callable[[dict[str, Any]], dict[str, Any]] = log_probs
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    """Of the last request."""
    probes: int = 0
    listing: bytes | None = None
    """Its answer when asked for its models, instead of the true one."""
    redirect: str = ""
    """Address to which it redirects requests for its models."""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def reply(self, request: dict[str, Any]) -> Reply:
        time.sleep(self.delay_s)
        if self.status != 200:
            return self.status, {"error": {"message": "no"}}
        return 200, self.answer(request)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    teacher: Teacher

    def do_GET(self) -> None:
        self.teacher.probes += 1
        if self.teacher.redirect:
            self.send_response(308)
            self.send_header("Location", self.teacher.redirect)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        listed = json.dumps({"data": [{"id": self.teacher.model}]}).encode()
        self.send_bytes(200, listed if self.teacher.listing is None else self.teacher.listing)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.teacher.requests.append(request)
        self.teacher.headers = dict(self.headers)
        self.send(*self.teacher.reply(request))

    def send(self, status: int, body: dict[str, Any]) -> None:
        self.send_bytes(status, json.dumps(body).encode())

    def send_bytes(self, status: int, payload: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connections: list[Any] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, *_: object) -> None:
        pass  # the client of a server that dies is gone


@contextmanager
def teaching(
    teacher: Teacher | None = None, port: int = 0, context: ssl.SSLContext | None = None
) -> Iterator[Teacher]:
    """A teacher at work; on exit it is dead, its connections cut. With a `context`, over TLS."""
    teacher = teacher or Teacher()
    server = Server(("127.0.0.1", port), type("TheHandler", (Handler,), {"teacher": teacher}))
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    teacher.url = f"http{'s' if context else ''}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield teacher
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        for connection in server.connections:
            server.shutdown_request(connection)
