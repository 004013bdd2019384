"""Servers that speak the plugin's contract on real sockets.

They refuse, fail, vanish and restart as told.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import repeat

from redraft.online.fleet.server import FleetServer, connected

TOKEN = "a-token-for-tests"


@dataclass
class Traffic:
    """All requests the servers of a fleet received."""

    tau: dict[str, float] = field(
        default_factory=lambda: {"v000001": 2.0, "v000002": 2.5, "bad": 1.0, "worse": 1.8}
    )
    harder: float = 0.0
    """Subtracted from the tau of every draft."""
    drafts_per_reading: float = 500
    registry: set[str] = field(default_factory=lambda: {"v000001", "v000002", "bad", "worse"})


@dataclass
class FakeServer:
    traffic: Traffic
    started_with: str = "v000001"
    refuses: set[str] = field(default_factory=set)
    """A swap to one of these versions is answered with 500; the previous version is kept."""
    failure_rate: float = 0.0
    """Probability that a swap fails."""
    faults: tuple[str, ...] = ("cut before", "cut after", "restart")
    """Ways to fail: a connection cut before or after the swap, a restart, or "500"."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    port: int = 0
    version: str = ""
    boot: int = 0
    swaps: list[str] = field(default_factory=list)
    down_s: float = 0.0
    """Duration of a restart, in seconds."""
    intact: bool = True
    target_fingerprint: str = "target"
    target_versions: Iterator[str | None] = field(default_factory=lambda: repeat(""))
    """The version of the target's weights, by answer."""
    capture: dict[str, int] = field(default_factory=dict)
    """The counters of the server, as far as a test needs them."""
    drafting: dict[str, object] = field(default_factory=dict)
    """The fields of the status that tell how the server drafts; none if it has no draft."""
    trouble: dict[str, str] = field(default_factory=dict)
    """By path: "hang" (no answer), "drip" (a byte every 0.2 s) or "pour" (an answer without end).
    """
    answers: dict[str, bytes] = field(default_factory=dict)
    """By path: the content to answer with instead."""
    manifests: dict[str, str] | None = None
    """Hash of each version's manifest in the server's registry. None: its drafts have none."""
    registry_id: str = ""
    easy_share: float | None = None
    """Share of the drafts in an easy domain; the others are in a hard one, where tau is lower by
    0.8. None: counted are neither domains nor the drafts that had a token, as by a server of an
    earlier release.
    """
    tokens: dict[str, int] = field(default_factory=dict)
    """Draft tokens by version, if not 3. `Traffic.tau` is that of 3, a third of it for each."""
    bodies: list[dict[str, str]] = field(default_factory=list)
    """Bodies of all swap requests."""
    asked: list[str] = field(default_factory=list)
    """Paths of all requests, also of those not answered."""
    _restarting: asyncio.Future[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.boot += 1
        self.version, self.intact = self.started_with, True
        self.drafts = self.draft_tokens = 0
        self.positions = {name: [[0, 0] for _ in range(3)] for name in ("easy", "hard")}
        self._connections: set[asyncio.StreamWriter] = set()
        self._listener = await asyncio.start_server(
            self._serve, "127.0.0.1", self.port, reuse_address=True
        )
        self.port = self._listener.sockets[0].getsockname()[1]

    def stop(self) -> None:
        self._listener.close()
        for writer in self._connections:
            writer.transport.abort()

    async def restart(self) -> None:
        self.stop()
        await asyncio.sleep(self.down_s)
        await self.start()

    async def until_back(self) -> None:
        """Wait for the end of a restart that a failed swap began."""
        if self._restarting:
            await self._restarting

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = next(
                    (
                        int(line[15:])
                        for line in head.splitlines()
                        if line.lower().startswith("content-length")
                    ),
                    0,
                )
                body = await reader.readexactly(length)
                path = head.split(" ", 2)[1]
                self.asked.append(path)
                trouble = self.trouble.get(path, "")
                if trouble == "hang":
                    await asyncio.Event().wait()
                code, content = await self._answer(head, body)
                content = self.answers.get(path, content)
                whole = (
                    f"HTTP/1.1 {code} X\r\nContent-Length: {len(content)}\r\n\r\n".encode()
                    + content
                )
                if trouble == "pour":
                    writer.write(b"HTTP/1.1 200 X\r\n\r\n")
                    while True:
                        writer.write(bytes(1 << 16))
                        await writer.drain()
                for begin in range(0, len(whole), step := 1 if trouble == "drip" else len(whole)):
                    writer.write(whole[begin : begin + step])
                    await writer.drain()
                    await asyncio.sleep(0.2 * (trouble == "drip"))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # cut off by either side, or by the end of the test
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, head: str, body: bytes) -> tuple[int, bytes]:
        method, path, _ = head.split(" ", 2)
        if f"Bearer {TOKEN}" not in head:
            return 401, b"wrong or missing bearer token"
        if (method, path) == ("GET", "/redraft/status"):
            return 200, json.dumps(self._status()).encode()
        if (method, path) == ("POST", "/redraft/pace"):
            self.drafting["pace"] = {"line": f"pace {json.loads(body)['pace']}"}
            return 200, b"{}"
        if path != "/redraft/swap":  # what a test needs of other routes is in `answers`
            return (200 if path in self.answers else 404), b""
        assert method == "POST"
        asked = json.loads(body)
        self.bodies.append(asked)
        if (
            self.manifests is not None
            and asked.get("registry", self.registry_id) != self.registry_id
        ):
            return 409, b"this server serves another registry"
        if self.manifests is not None and asked.get("manifest_sha256") != self.manifests.get(
            asked["version"]
        ):
            return 409, b"another version of this name"
        return await self._swap(asked["version"])

    def _status(self) -> dict[str, object]:
        return {
            "server_id": f"{self.port}-{self.boot}",
            "draft_version": self.version,
            "draft_intact": self.intact,
            "target_intact": True,
            "target_fingerprint": self.target_fingerprint,
            "target_version": next(self.target_versions),
            "capture": self.capture,
            **({"drafts": self.count()} if self.version else {}),
            **({} if self.easy_share is None else {"positions": self.positions}),
            **self.drafting,
            **(
                {}
                if self.manifests is None
                else {"manifest_sha256": self.manifests.get(self.version, "")}
            ),
        }

    async def _swap(self, version: str) -> tuple[int, bytes]:
        if version not in self.traffic.registry:
            return 404, b"no such version in the registry"
        if version in self.refuses:
            return 500, f"{version} does not fit; {self.version} was restored".encode()
        fault = self.rng.choice(self.faults)
        if self.rng.random() >= self.failure_rate:
            fault = ""
        if fault == "500":
            return 500, f"out of memory; {self.version} was restored".encode()
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

    def count(self) -> list[int]:
        """Drafts, draft tokens, and the accepted ones by position.

        They are those after another reading's worth of traffic.
        """
        tau = max(1.0, self.traffic.tau[self.version] - self.traffic.harder)
        num_tokens = self.tokens.get(self.version, 3)
        is_off = self.drafting.get("pace") == {"line": "pace 0"}
        parts = (
            (("easy", self.easy_share, 0.4), ("hard", 1 - self.easy_share, -0.4))
            if self.easy_share
            else ()
        )
        for name, share, more in parts or (("easy", 1, 0),):
            drafts = tried = 0 if is_off else round(share * self.traffic.drafts_per_reading)
            accepted = round(drafts * (tau + more - 1))
            for position in range(num_tokens):
                counts, of_position = self.positions[name][position], (accepted + 2 - position) // 3
                counts[:] = counts[0] + tried, counts[1] + of_position
                tried = of_position
            self.drafts += drafts
            self.draft_tokens += drafts * num_tokens
        accepted = [
            sum(counts[position][1] for counts in self.positions.values()) for position in range(3)
        ]
        return [self.drafts, self.draft_tokens, *accepted]


@asynccontextmanager
async def running(*fakes: FakeServer) -> AsyncIterator[list[FleetServer]]:
    """Clients of running fake servers."""
    for fake in fakes:
        await fake.start()
    try:
        async with connected({fake.url: TOKEN for fake in fakes}) as servers:
            yield servers
    finally:
        for fake in fakes:
            fake.stop()
