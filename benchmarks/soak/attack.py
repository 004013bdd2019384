"""The attacker: a raw-socket client that sends what no honest client sends.

It sends bursts of requests to one door after another.

a burst    some well-known attacks, and mutations of the process's requests: bad lengths, upgrades, pipelining,
           truncated heads and bodies, header lines of 9,000 bytes, trailers, chunk extensions, answers that
           nobody reads, wrong keys, torn bytes; the connections stay open until the burst ends
judged     the process is alive; an honest request that began before the burst is answered whole; the log has
           hardly grown; every answer is an error status that blames the request, or the end of the connection;
           no answer comes from /redraft/...
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.soak.clients import Verdict, judge_refusal, judge_stream
from benchmarks.soak.supervisor import Supervised

BURST = 100
"""Number of requests per burst."""

AT_ONCE = 16
"""Maximum number of concurrent requests."""

HELD_S = 1.3
"""Minimum duration of a burst with its connections open. Taps look for unfinished requests once a
second.
"""

LOOK_S = 0.15
"""Time to wait for an answer to a mutated request. The server may be waiting for the rest of it."""

ANSWER_S = 60.0
"""Deadline for the answer to a complete request. It is long because a fault may stop the tap or all
servers in the meantime.
"""

MAX_LOG_BYTES = 10_000
"""Maximum growth of a log in one burst. Above it, the burst counts as having flooded the log."""

NUM_TOKENS = 40
"""Number of tokens in an honest answer."""

STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
SECRET = b"draft_version"
"""A word that every /redraft/status page contains."""

UNAVAILABLE = (502, 503)
"""Statuses of a tap without a server. Another fault caused this, so they are not held against the
tap.
"""

KILLED = b"EngineCore encountered an issue"
"""Text in vLLM's 500 response after its engine was killed. If no fault killed the engine, judge.py
reports that as a separate failure.
"""


@dataclass(frozen=True, kw_only=True)
class Shot:
    """One attack."""

    name: str
    sent: bytes
    is_complete: bool = False
    """Whether `sent` is one complete request, which must be answered."""
    max_answers: int = BURST
    is_read: bool = True
    """Whether the client reads the answer. If not, the answer stays in the buffers until the burst
    ends.
    """


@dataclass(frozen=True, kw_only=True)
class Door:
    """A listening process under attack."""

    process: Supervised
    port: int
    paths: Sequence[bytes]
    """Paths that the mutated requests use."""
    generates: bool = False
    """Whether the process forwards requests to an engine. If so, well-known attacks on completion
    servers are sent too.
    """
    streams: str = ""
    """Path of an honest stream. If empty, the honest request is a GET of the first path in `paths`,
    answered with JSON.
    """


@dataclass(kw_only=True)
class Attack:
    """The requests sent, and their effects."""

    doors: Sequence[Door]
    seed: int
    requests: int = 0
    bursts: int = 0
    ended: int = 0
    """Number of processes that exited during a burst although no fault had killed them."""
    honest_streams: int = 0
    honest_streams_cut: int = 0
    most_log_bytes: int = 0
    problems: list[str] = field(default_factory=list)
    """The first 20 violations."""

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    async def run(self, is_over: asyncio.Event, pause_s: float) -> None:
        """Send bursts until the event is set, one every `pause_s` seconds if they are short enough."""
        began_s, number = time.monotonic(), 0
        while not is_over.is_set():
            await self.burst(self.doors[number % len(self.doors)])
            number += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, began_s + number * pause_s - time.monotonic())):
                    await is_over.wait()

    async def burst(self, door: Door) -> None:
        """Send one burst. If a fault ends the process meanwhile, the burst is not judged."""
        process, began_s = door.process, time.monotonic()
        if not process.was_up(began_s):
            await asyncio.sleep(0.5)
            return
        run, log_bytes = process.run, process.log.stat().st_size
        shots = [draw_shot(self._rng, door) for _ in range(BURST)]
        slots = asyncio.Semaphore(AT_ONCE)
        async with AsyncExitStack() as held, httpx.AsyncClient(timeout=ANSWER_S + 30) as http:
            honest = asyncio.create_task(ask_honestly(http, door))
            broken = await asyncio.gather(*(_shoot(door.port, shot, slots, held) for shot in shots))
            await asyncio.sleep(began_s + HELD_S - time.monotonic())
            verdict = await honest
        self.requests += BURST
        self.bursts += 1
        if process.pid != run.pid and not run.is_wanted:
            self.ended += 1
            self._report(f"{process.name} exited during a burst")
            return
        if not process.was_up(began_s):
            return
        self.honest_streams += 1
        if verdict.kind == "untold":
            self.honest_streams_cut += 1
            self._report(f"an honest request to {process.name}: {verdict.detail}")
        grown = process.log.stat().st_size - log_bytes
        self.most_log_bytes = max(self.most_log_bytes, grown)
        if grown >= MAX_LOG_BYTES:
            self._report(f"the log of {process.name} grew by {grown} bytes in a burst")
        for problem in filter(None, broken):
            self._report(f"{process.name}: {problem}")

    def describe(self) -> dict[str, Any]:
        """Return the figures for the report."""
        counts = (
            "seed",
            "requests",
            "bursts",
            "ended",
            "honest_streams",
            "honest_streams_cut",
            "most_log_bytes",
            "problems",
        )
        return {name: getattr(self, name) for name in counts}

    def _report(self, problem: str) -> None:
        if len(self.problems) < 20:
            self.problems.append(problem)


async def ask_honestly(http: httpx.AsyncClient, door: Door) -> Verdict:
    """Send an honest request, and judge its answer: a whole stream, or an answer in JSON."""
    url = f"http://127.0.0.1:{door.port}"
    try:
        if not door.streams:
            answer = await http.get(url + door.paths[0].decode())
            return Verdict("answered") if answer.json() else Verdict("untold", "an empty answer")
        body = {
            "model": "m",
            "prompt": "Once",
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
        }
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with http.stream("POST", url + door.streams, json=body) as stream:
            if stream.status_code != 200:
                return judge_refusal(stream.status_code, await stream.aread())
            return await judge_stream(stream, 1, None, num_tokens=NUM_TOKENS)
    except (httpx.HTTPError, ValueError) as error:
        return Verdict("untold", f"{type(error).__name__}: {error}")


# -------------------------------------------------------------------------------------------------------
# the shots


def draw_shot(rng: random.Random, door: Door) -> Shot:
    """Return a well-known attack, or a mutation of a request for one of the door's paths."""
    if rng.random() < 0.2:
        return rng.choice(build_requests(rng) if door.generates else build_plain_requests(rng))
    names, sent = [], _draw_request(rng, door.paths)
    for mutate in rng.sample(MUTATIONS, rng.choice((1, 1, 2, 3))):
        sent = mutate(rng, sent, door.paths)
        names.append(mutate.__name__.removeprefix("_"))
    return Shot(name="+".join(names), sent=sent)


def _draw_request(rng: random.Random, paths: Sequence[bytes]) -> bytes:
    path = rng.choice(paths)
    if rng.random() < 0.4:
        return b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n"
    body = rng.choice(
        (b"{}", b'{"version":"v000001"}', b'{"model":"m","prompt":"x","max_tokens":1}')
    )
    head = b"POST " + path + b" HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


Paths = Sequence[bytes]


def _length(rng: random.Random, sent: bytes, paths: Paths) -> bytes:
    given = rng.choice(
        (
            b"-1",
            b"0",
            b"3",
            b"%d" % (1 << 31),
            b"%d" % (1 << 70),
            b"ten",
            b"0x10",
            b"+5",
            b"5, 5",
            b"",
        )
    )
    return re.sub(rb"Content-Length: \d+", b"Content-Length: " + given, sent)


def _upgrade(rng: random.Random, sent: bytes, paths: Paths) -> bytes:
    to = rng.choice((b"websocket", b"h2c", b"TLS/1.0", b"\xff"))
    key = rng.choice(
        (b"", b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n")
    )
    return _add_header(sent, b"Connection: Upgrade\r\nUpgrade: " + to + b"\r\n" + key)


def _pipeline(rng: random.Random, sent: bytes, paths: Paths) -> bytes:
    more = [_draw_request(rng, paths) for _ in range(rng.randrange(1, 5))]
    return sent + b"".join(more) + rng.choice((b"", rng.randbytes(50), b"\r\n" * 20))


def _half_head(rng: random.Random, sent: bytes, paths: Paths) -> bytes:
    return sent[: rng.randrange(1, max(2, sent.find(b"\r\n\r\n") + 3))]


def _half_body(rng: random.Random, sent: bytes, paths: Paths) -> bytes:
    return re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % rng.randrange(100, 5000), sent)


def _long_header(rng: random.Random, sent: bytes, paths: Paths) -> bytes:
    return _add_header(sent, b"X-A: " + b"0" * 9000 + b"\r\n")


def _chunks(rng: random.Random, sent: bytes, paths: Paths) -> bytes:
    head, _, body = sent.partition(b"\r\n\r\n")
    head = re.sub(rb"\r\nContent-Length: [^\r]*", rng.choice((b"", rb"\g<0>")), head)
    size = rng.choice(
        (b"%x" % len(body), b"zz", b"f" * 40, b"-1", b"%x;ext=%s" % (len(body), b"a" * 5000))
    )
    end = rng.choice((b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n", b""))
    return head + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + size + b"\r\n" + body + b"\r\n" + end


def _twice(rng: random.Random, sent: bytes, paths: Paths) -> bytes:
    lines = sent.split(b"\r\n")
    return b"\r\n".join([lines[0], rng.choice(lines), *lines[1:]])


def _torn(rng: random.Random, sent: bytes, paths: Paths) -> bytes:
    torn = bytearray(sent)
    for _ in range(rng.randrange(1, 9)):
        torn[rng.randrange(len(torn))] = rng.randrange(256)
    return bytes(torn)


def _first_line(rng: random.Random, sent: bytes, paths: Paths) -> bytes:
    line = rng.choice(
        (
            b"GET  / HTTP/1.1",
            b"GET / HTTP/0.9",
            b"GET / HTTP/9.9",
            b"get / HTTP/1.0",
            b"FETCH / HTTP/1.1",
        )
    )
    return line + sent[sent.find(b"\r\n") :]


MUTATIONS: tuple[Callable[[random.Random, bytes, Paths], bytes], ...] = (
    *(
        _length,
        _upgrade,
        _pipeline,
        _half_head,
        _half_body,
        _long_header,
        _chunks,
        _twice,
        _torn,
        _first_line,
    ),
)


def _add_header(sent: bytes, lines: bytes) -> bytes:
    head, separator, rest = sent.partition(b"\r\n")
    return head + separator + lines + rest


def build_plain_requests(rng: random.Random) -> list[Shot]:
    """Return well-known attacks on any HTTP server."""
    body = b'{"model":"m","prompt":"x","max_tokens":2}'
    plain = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    length = b"Content-Length: %d\r\n" % len(body)
    chunked = b"Transfer-Encoding: chunked\r\n"
    smuggled = b"GET /redraft/status HTTP/1.1\r\nHost: a\r\n\r\n"
    requests = [
        ("two lengths", plain + length + b"Content-Length: 3\r\n\r\n" + body),
        ("length and chunks", plain + length + chunked + b"\r\n0\r\n\r\n" + smuggled),
        ("negative length", plain + b"Content-Length: -1\r\n\r\n"),
        ("length of letters", plain + b"Content-Length: ten\r\n\r\n"),
        ("chunk size of letters", plain + chunked + b"\r\nzz\r\nx\r\n0\r\n\r\n"),
        ("endless chunk size", plain + chunked + b"\r\n" + b"f" * 40 + b"\r\n"),
        (
            "trailers",
            plain
            + chunked
            + b"\r\n2\r\n{}\r\n0\r\nX-Redraft-Tenant: a\r\n"
            + b"a:b\r\n" * 50_000
            + b"\r\n",
        ),
        ("length of 5,001 digits", plain + b"Content-Length: " + b"0" * 5000 + b"5\r\n\r\n{}123"),
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
        ("h2c", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
        ("absolute form", b"GET http://127.0.0.1/redraft/status HTTP/1.1\r\nHost: a\r\n\r\n"),
        *((f"path {path!r}", b"GET " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n") for path in _PATHS),
        (
            "swap",
            b"POST /redraft/swap HTTP/1.1\r\nHost: a\r\nContent-Length: 21\r\n\r\n"
            + b'{"version":"v000001"}',
        ),
    ]
    shots = [Shot(name=name, sent=sent, is_complete=True, max_answers=2) for name, sent in requests]
    # These requests are never complete: a server without our limits would wait for the rest.
    for name, sent in (("trailer", b"0\r\nX: "), ("chunk extension", b"2;")):
        endless = plain + chunked + b"\r\n" + sent + b"a" * 300_000
        shots.append(Shot(name=f"endless {name}", sent=endless))
    many = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 1000
    shots.append(Shot(name="a thousand pipelined", sent=many, max_answers=1000))
    shots.append(Shot(name="pipelined and not read", sent=many * 2, is_read=False))
    return shots


def build_requests(rng: random.Random) -> list[Shot]:
    """Return well-known attacks on any HTTP server and on a completion server."""
    requests = [
        (
            "websocket",
            b"GET /v1/realtime HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        ),
        *((name, _complete(content)) for name, content in _BODIES),
        *(
            (str(setting), _complete(json.dumps({**_QUESTION, **setting}).encode()))
            for setting in _SETTINGS
        ),
        ("wrong key", _complete(json.dumps(_QUESTION).encode(), _WRONG_KEY % rng.randrange(1000))),
        (
            "odd labels",
            _complete(
                json.dumps(_QUESTION).encode(),
                b"X-Redraft-Domain: \xff\xfe\r\nX-Redraft-Tenant: " + b"t" * 5000 + b"\r\n",
            ),
        ),
    ]
    shots = [Shot(name=name, sent=sent, is_complete=True, max_answers=2) for name, sent in requests]
    stream = json.dumps({**_QUESTION, "max_tokens": 400, "stream": True}).encode()
    shots.append(Shot(name="a stream not read", sent=_complete(stream), is_read=False))
    return [*build_plain_requests(rng), *shots]


_PATHS = (
    *(
        b"/redraft/status",
        b"/redraft/%73tatus",
        b"/v1/../redraft/status",
        b"/v1/%2e%2e/redraft/status",
    ),
    *(
        b"//redraft/status",
        b"/redraft/status?x=/v1",
        b"/./redraft/status",
        b"/%00",
        b"/metrics",
        b"/" + b"a" * 9000,
    ),
)

_WRONG_KEY = b"Authorization: Bearer wrong-%d\r\n"

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


# -------------------------------------------------------------------------------------------------------
# the answers


async def _shoot(port: int, shot: Shot, slots: asyncio.Semaphore, held: AsyncExitStack) -> str:
    """Send a shot, and return the rule that its answers violate; empty if none.

    The connection is left open in `held`.
    """
    async with slots:
        try:
            connection = await held.enter_async_context(connected(port))
            answer = await exchange(*connection, shot)
        except ConnectionError:
            return ""  # the process has exited, which the caller notices
        except TimeoutError:
            return f"{shot.name}: no answer within {ANSWER_S:.0f} s"
        broken = find_broken_rule(answer, shot.max_answers)
        return f"{shot.name}: {broken}" if broken else ""


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection; it is closed without a shutdown."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, shot: Shot) -> bytes:
    """Return the server's answer until it closes the connection or pauses.

    The result is empty if there was no answer.

    Raises:
        TimeoutError: a complete request got no answer.
    """
    answer = b""
    try:
        writer.write(shot.sent)
        await writer.drain()
        if not shot.is_read:
            return b""
        async with asyncio.timeout(ANSWER_S if shot.is_complete else LOOK_S):
            answer = await reader.read(1 << 16)
        while piece := await asyncio.wait_for(reader.read(1 << 16), LOOK_S):
            answer += piece
    except ConnectionError:
        pass  # it was closed while we were sending
    except TimeoutError:
        if shot.is_complete and not answer:
            raise
    return answer


def find_broken_rule(answer: bytes, max_answers: int = 2) -> str:
    """Return the rule that the answers violate; empty if none."""
    if SECRET in answer:
        return "it reached /redraft/status"
    statuses = [int(status) for status in STATUS.findall(answer)]
    if len(statuses) > max_answers:
        return f"answered {len(statuses)} times"
    told = (501, 505, *UNAVAILABLE, *((500,) if KILLED in answer else ()))
    wrong = [status for status in statuses if not (status < 500 or status in told)]
    return f"status {wrong[0]}" if wrong else ""
