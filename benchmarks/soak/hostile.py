"""Requests that no honest client sends, as raw bytes, and the rules that every answer must keep.

An answer is a status that blames the request (2xx if vLLM takes it, else 4xx or 501), or the end of the connection. It
comes within ANSWER_S. Nothing may reach a server's /redraft/..., and no request may be answered twice.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from typing import Any

ANSWER_S = 60.0
"""Deadline of an answer. Generous: another fault may hold the router or all servers at the same time."""

STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
SECRET = b"draft_version"
"""A word of every /redraft/status page."""

UNAVAILABLE = (502, 503)
"""The router says that no server answers: another fault's doing, and clearly told."""


class HostileAnswerError(Exception):
    """The answer to a hostile request breaks a rule."""


def build_requests(rng: random.Random) -> list[tuple[str, bytes]]:
    """Name and bytes of every hostile request."""
    body = b'{"model":"m","prompt":"x","max_tokens":2}'
    plain = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    length = b"Content-Length: %d\r\n" % len(body)
    chunked = b"Transfer-Encoding: chunked\r\n"
    smuggled = b"GET /redraft/status HTTP/1.1\r\nHost: a\r\n\r\n"
    return [
        ("two lengths", plain + length + b"Content-Length: 3\r\n\r\n" + body),
        ("length and chunks", plain + length + chunked + b"\r\n0\r\n\r\n" + smuggled),
        ("negative length", plain + b"Content-Length: -1\r\n\r\n"),
        ("length of letters", plain + b"Content-Length: ten\r\n\r\n"),
        ("chunk size of letters", plain + chunked + b"\r\nzz\r\nx\r\n0\r\n\r\n"),
        ("endless chunk size", plain + chunked + b"\r\n" + b"f" * 40 + b"\r\n"),
        ("bare line feeds", b"GET /health HTTP/1.1\nHost: a\n\n"),
        ("NUL in a header", b"GET /health HTTP/1.1\r\nHost: a\r\nX: \0\r\n\r\n"),
        ("folded header", b"GET /health HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n"),
        ("blank before the colon", b"GET /health HTTP/1.1\r\nHost : a\r\n\r\n"),
        ("no HTTP", rng.randbytes(200) + b"\r\n\r\n"),
        ("TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200)),
        ("huge header", b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"x" * (1 << 20) + b"\r\n\r\n"),
        ("many headers", b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"X-A: b\r\n" * 20_000 + b"\r\n"),
        ("CONNECT", b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: a\r\n\r\n"),
        ("TRACE", b"TRACE / HTTP/1.1\r\nHost: a\r\n\r\n"),
        ("websocket", b"GET /v1/realtime HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"),
        ("h2c", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        ("absolute form", b"GET http://127.0.0.1/redraft/status HTTP/1.1\r\nHost: a\r\n\r\n"),
        *((f"path {path!r}", b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n") for path in _PATHS),
        ("swap", b"POST /redraft/swap HTTP/1.1\r\nHost: a\r\nContent-Length: 21\r\n\r\n" + b'{"version":"v000001"}'),
        *((name, _complete(content)) for name, content in _BODIES),
        *((str(setting), _complete(json.dumps({**_QUESTION, **setting}).encode())) for setting in _SETTINGS),
        ("odd labels", _complete(body, b"X-Redraft-Domain: \xff\xfe\r\nX-Redraft-Tenant: " + b"t" * 5000 + b"\r\n")),
    ]


_PATHS = (
    *(b"/redraft/status", b"/redraft/%73tatus", b"/v1/../redraft/status", b"/v1/%2e%2e/redraft/status"),
    *(b"//redraft/status", b"/redraft/status?x=/v1", b"/./redraft/status", b"/%00", b"/metrics", b"/" + b"a" * 9000),
)

_QUESTION: dict[str, Any] = {"model": "m", "prompt": "x", "max_tokens": 2}

_BODIES = (
    ("no JSON", b"{"),
    ("no object", b"[]"),
    ("nested body", b'{"model":"m","prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    ("no UTF-8", b'{"model":"m","prompt":"\xff\xfe"}'),
    ("lone surrogate", b'{"model":"m","prompt":"\\ud800","max_tokens":2}'),
    ("a body of 3 MB", b'{"model":"m","max_tokens":2,"prompt":"' + b"a " * 1_500_000 + b'"}'),
)

_SETTINGS: tuple[dict[str, Any], ...] = (
    *({"temperature": value} for value in (1e-40, -1, 1e300, "hot")),
    *({"repetition_penalty": value} for value in (99999999999999999999, 0, -1)),
    *({"max_tokens": value} for value in (-1, 0, 1 << 70)),
    *({"prompt": value} for value in ([], [1 << 40], [-1], "", ["x"] * 3, {"a": 1})),
    {"n": 0},
    {"n": -3},
    {"logprobs": 1 << 30},
    {"top_p": 0},
    {"top_k": -(1 << 63)},
    {"min_tokens": 1 << 40},
    {"stop": ["a"] * 10_000},
    {"logit_bias": {"999999": 100}},
    {"allowed_token_ids": [300]},
    {"model": "other"},
    {"vllm_xargs": {"redraft": "x"}},
)


def _complete(content: bytes, headers: bytes = b"") -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return head + headers + b"Content-Length: %d\r\n\r\n" % len(content) + content


async def send_hostile(port: int, rng: random.Random, count: int, was_router_up: Callable[[], bool]) -> None:
    """Send `count` hostile requests, a few at once.

    Raises:
        HostileAnswerError: if an answer breaks a rule.
    """
    slots = asyncio.Semaphore(4)

    async def one(name: str, request: bytes) -> None:
        async with slots:
            try:
                answer = await asyncio.wait_for(exchange(port, request), ANSWER_S)
            except TimeoutError:
                raise HostileAnswerError(f"{name}: no answer within {ANSWER_S:.0f} s") from None
            except ConnectionError as error:
                if was_router_up():
                    raise HostileAnswerError(f"{name}: {type(error).__name__}") from None
                return
            if broken := find_broken_rule(answer):
                raise HostileAnswerError(f"{name}: {broken}")

    requests = build_requests(rng)
    async with asyncio.TaskGroup() as group:
        for name, request in rng.sample(requests, min(count, len(requests))):
            group.create_task(one(name, request))


async def exchange(port: int, request: bytes) -> bytes:
    """The answer to raw bytes, up to the end of the connection or the first pause after an answer.

    Raises:
        ConnectionError: if there is no connection. One that ends without an answer is an empty answer.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    try:
        try:
            writer.write(request)
            await writer.drain()
            # The first byte may take until the caller's ANSWER_S. After it, a second of silence ends the
            # answer: the connection may stay open.
            while piece := await asyncio.wait_for(reader.read(1 << 16), 1.0 if answer else None):
                answer += piece
        except (ConnectionError, TimeoutError):
            pass  # it was closed while we were sending, or nothing more comes
        return answer
    finally:
        writer.close()


def find_broken_rule(answer: bytes) -> str:
    """The rule that the answer breaks; empty if it breaks none."""
    if SECRET in answer:
        return "it reached /redraft/status"
    statuses = [int(status) for status in STATUS.findall(answer)]
    if len(statuses) > 2:
        return f"answered {len(statuses)} times"
    wrong = [status for status in statuses if not (status < 500 or status in (501, 505, *UNAVAILABLE))]
    return f"status {wrong[0]}" if wrong else ""
