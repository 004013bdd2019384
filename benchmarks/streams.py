"""Many streamed answers at once: a fake server, a load, and the gaps between chunks.

    load ─ 600 connections ─► server           one event per stream every 0.5 s, sent at fixed times:
    load ─► router ─► server                   the difference between the gaps is due to the router

Both ends are bare asyncio protocols, because a framework at either end would itself be slow enough
to hide the router. A client asks twice in a round. The first answers have all lengths, so streams
begin and end while others flow.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

EVENTS_PER_CLIENT = 20
EVENTS_PER_S = 2.0

ROUND_TIMEOUT_S = 45.0
"""A round takes 10 s if nothing is late."""

EVENT = (
    b"data: "
    + json.dumps({"id": "cmpl-0", "choices": [{"index": 0, "text": " and so on"}]}).encode()
    + b"\n\n"
)
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
HEALTHY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class StreamingServer(asyncio.Protocol):
    """One connection to the fake server.

    It sends `max_tokens` events at fixed times, late or not.
    """

    def __init__(self) -> None:
        self._received = b""
        self._next: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        if not separator or len(body) < (int(length[1]) if length else 0):
            return
        self._received = b""
        if not head.startswith(b"POST"):
            self._transport.write(HEALTHY)
            return
        self._transport.write(HEAD)
        self._began_s, self._sent, self._wanted = (
            self._now_s(),
            0,
            int(json.loads(body)["max_tokens"]),
        )
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if self._next:
            self._next.cancel()

    def _send(self) -> None:
        self._sent += 1
        if self._sent == self._wanted:
            self._transport.write(CHUNK + END)
            return
        self._transport.write(CHUNK)
        # Counted from the beginning: a late event does not shift those after it.
        next_s = self._began_s + self._sent / EVENTS_PER_S
        self._next = asyncio.get_running_loop().call_at(next_s, self._send)

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


async def serve_streams(port: int) -> None:
    """Run the fake server until the process ends."""
    server = await asyncio.get_running_loop().create_server(
        StreamingServer, "127.0.0.1", port, backlog=2048
    )
    await server.serve_forever()


@dataclass
class Gaps:
    """The times measured by all clients of one side."""

    first_s: list[float] = field(default_factory=list)
    """From a request to its first event."""
    between_s: list[float] = field(default_factory=list)
    """From a chunk to the next one of the same stream."""
    failed: int = 0
    """Streams refused or ended early."""

    def summarize(self) -> dict[str, Any]:
        """Percentiles in milliseconds, and counts. Without any gap the percentiles are NaN."""
        gaps_ms = 1e3 * np.percentile(self.between_s or [np.nan], [50, 99, 99.9])
        names = ("gap_ms_p50", "gap_ms_p99", "gap_ms_p99_9")
        return {
            **{name: round(float(gap_ms), 1) for name, gap_ms in zip(names, gaps_ms, strict=True)},
            "first_event_ms_p50": round(1e3 * float(np.median(self.first_s or [np.nan])), 1),
            "gaps": len(self.between_s),
            "failed": self.failed,
        }


class StreamingClient(asyncio.Protocol):
    """One connection of the load. `done` is resolved when the stream has ended, well or not."""

    def __init__(self, request: bytes, gaps: Gaps) -> None:
        self.request, self.gaps = request, gaps
        self.done = asyncio.get_running_loop().create_future()
        self._received = b""
        self._last_s = time.perf_counter()
        self._is_streaming = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if b"data: " in data:
            (self.gaps.between_s if self._is_streaming else self.gaps.first_s).append(
                now_s - self._last_s
            )
            self._last_s, self._is_streaming = now_s, True
        # The tail alone: the end of an answer may come in two reads.
        self._received = (self._received + data)[-len(END) :]
        if self._received == END:
            self._finish(is_whole=self._is_streaming)

    def connection_lost(self, error: Exception | None) -> None:
        self._finish(is_whole=False)

    def _finish(self, *, is_whole: bool) -> None:
        if not self.done.done():
            self.gaps.failed += not is_whole
            self.done.set_result(None)
            self._transport.close()


async def load(url: str, num_streams: int, gaps: Gaps) -> None:
    """One round: `num_streams` clients at once, each of which reads `EVENTS_PER_CLIENT` events in
    two streams.

    A round is cut off after `ROUND_TIMEOUT_S`, and open streams count as failed.
    """
    # 1 to 19 events first, then the rest of 20.
    clients = [
        _stream_twice(url, 1 + number % (EVENTS_PER_CLIENT - 1), gaps)
        for number in range(num_streams)
    ]
    try:
        async with asyncio.timeout(ROUND_TIMEOUT_S):
            await asyncio.gather(*clients)
    except TimeoutError:
        gaps.failed += 1


async def _stream_twice(url: str, first_events: int, gaps: Gaps) -> None:
    for num_events in (first_events, EVENTS_PER_CLIENT - first_events):
        await _stream(url, num_events, gaps)


async def _stream(url: str, num_events: int, gaps: Gaps) -> None:
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    body = json.dumps(
        {"model": "m", "prompt": "x", "stream": True, "max_tokens": num_events}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Length: "
        f"{len(body)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    try:
        _, client = await loop.create_connection(
            lambda: StreamingClient(head.encode() + body, gaps), address.hostname, address.port
        )
    except OSError:
        gaps.failed += 1
        return
    try:
        await client.done
    finally:
        client._finish(is_whole=False)


def compare(sides: dict[str, str], num_streams: int, rounds: int) -> dict[str, dict[str, Any]]:
    """The summary of every side, by name.

    `sides` are addresses; the sides take turns, `rounds` times.
    """
    gaps = {name: Gaps() for name in sides}
    for number in range(rounds):
        for name in sorted(sides, reverse=bool(number % 2)):
            asyncio.run(load(sides[name], num_streams, gaps[name]))
    return {name: found.summarize() for name, found in gaps.items()}


def main(arguments: Sequence[str]) -> None:
    asyncio.run(serve_streams(int(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
