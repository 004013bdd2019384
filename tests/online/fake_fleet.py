"""Servers that speak the plugin's contract on real sockets: they refuse, fail, vanish and restart as they are told."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from online.fleet import Server, connected

TOKEN = "a-token-for-tests"


@dataclass
class Traffic:
    """What all servers of a fleet are asked."""

    tau: dict[str, float] = field(default_factory=lambda: {"v000001": 2.0, "v000002": 2.5, "bad": 1.0, "worse": 1.8})
    harder: float = 0.0
    """Taken off every draft's tau."""
    drafts_per_reading: float = 500
    registry: set[str] = field(default_factory=lambda: {"v000001", "v000002", "bad", "worse"})


@dataclass
class FakeServer:
    traffic: Traffic
    started_with: str = "v000001"
    refuses: set[str] = field(default_factory=set)
    """Versions that a swap to is answered with 500; the version before is kept."""
    failure_rate: float = 0.0
    """Of swaps."""
    faults: tuple[str, ...] = ("cut before", "cut after", "restart")
    """How they fail; a cut connection before or after the swap, a restart, or "500"."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    port: int = 0
    version: str = ""
    boot: int = 0
    swaps: list[str] = field(default_factory=list)
    down_s: float = 0.0
    """How long a restart takes."""
    intact: bool = True
    target_fingerprint: str = "target"
    capture: dict[str, int] = field(default_factory=dict)
    """Its counters, as far as a test cares."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.boot += 1
        self.version, self.intact = self.started_with, True
        self.drafts = self.accepted = 0.0
        self._connections: set[asyncio.StreamWriter] = set()
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port, reuse_address=True)
        self.port = self._listener.sockets[0].getsockname()[1]

    def stop(self) -> None:
        self._listener.close()
        for writer in self._connections:
            writer.transport.abort()

    async def restart(self) -> None:
        self.stop()
        await asyncio.sleep(self.down_s)
        await self.start()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = next(
                    (int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length")), 0
                )
                body = await reader.readexactly(length)
                code, content = await self._answer(head, body)
                writer.write(f"HTTP/1.1 {code} X\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # cut off, by either side or by the end of the test
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, head: str, body: bytes) -> tuple[int, bytes]:
        method, path, _ = head.split(" ", 2)
        if path == "/metrics":
            assert TOKEN not in head, "the token is for the plugin's routes"
            return 200, self._metrics().encode()
        if f"Bearer {TOKEN}" not in head:
            return 401, b"wrong or missing bearer token"
        if (method, path) == ("GET", "/redraft/status"):
            return 200, json.dumps(self._status()).encode()
        assert (method, path) == ("POST", "/redraft/swap")
        return await self._swap(json.loads(body)["version"])

    def _status(self) -> dict[str, object]:
        return {
            "server_id": f"{self.port}-{self.boot}",
            "draft_version": self.version,
            "draft_intact": self.intact,
            "target_intact": True,
            "target_fingerprint": self.target_fingerprint,
            "capture": self.capture,
        }

    async def _swap(self, version: str) -> tuple[int, bytes]:
        if version not in self.traffic.registry:
            return 404, b"no such version in the registry"
        if version in self.refuses:
            return 500, f"{version} does not fit; {self.version} was put back".encode()
        fault = self.rng.choice(self.faults)
        if self.rng.random() >= self.failure_rate:
            fault = ""
        if fault == "500":
            return 500, f"out of memory; {self.version} was put back".encode()
        if fault == "cut before":
            raise ConnectionResetError
        if fault == "restart":
            self._restarting = asyncio.ensure_future(self.restart())
            raise ConnectionResetError
        self.swaps.append(version)
        self.version, self.intact = version, True
        if fault == "cut after":
            raise ConnectionResetError
        return 200, json.dumps({"version": version, "swapped": True}).encode()

    def _metrics(self) -> str:
        tau = max(1.0, self.traffic.tau[self.version] - self.traffic.harder)
        self.drafts += self.traffic.drafts_per_reading
        self.accepted += self.traffic.drafts_per_reading * (tau - 1)
        counters = {
            "vllm:spec_decode_num_drafts_total": self.drafts,
            "vllm:spec_decode_num_draft_tokens_total": 3 * self.drafts,
            "vllm:spec_decode_num_accepted_tokens_total": self.accepted,
        }
        lines = [f'{name}{{engine="0",model_name="m"}} {value}' for name, value in counters.items()]
        return "\n".join(["# TYPE vllm:num_requests_running gauge", "vllm:num_requests_running 3.0", *lines, ""])


@asynccontextmanager
async def running(*fakes: FakeServer) -> AsyncIterator[list[Server]]:
    """The clients of fake servers that run."""
    for fake in fakes:
        await fake.start()
    try:
        async with connected({fake.url: TOKEN for fake in fakes}) as servers:
            yield servers
    finally:
        for fake in fakes:
            fake.stop()
