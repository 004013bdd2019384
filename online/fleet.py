"""The servers of a fleet: what each of them serves, and how all of them are brought to one version.

A server that does not answer and a server that says no are different things. The first may be starting, and comes
back with whatever draft its command line names: it is tried again, and by `reconcile` for as long as the learner runs.
The second has kept its last good draft and will say no again.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import httpx

from online.metrics import Acceptance, read_acceptance

STATUS_TIMEOUT_S = 10.0
"""A swap in progress holds the engine, and with it the answer, for a fraction of a second."""

SWAP_TIMEOUT_S = 300.0
"""Reading and checking a large draft from a shared disk takes minutes, and giving up a request does not stop it."""

ALARM_TAU = 1.05
"""Below this mean acceptance length a draft is as good as rejected: wrong weights, or made for another target."""

ALARM_DRAFTS = 200
"""Target steps before ALARM_TAU is believed. With tau = 1.5 and 3 draft tokens the chance of a false alarm is nil."""


LOSSES = {
    "dropped_steps_queue_full": "queue_full",
    "broken_requests_gap": "broken",
    "dropped_records_spool": "spool_full",
    "evicted_files_spool_budget": "spool_evicted",
    "dropped_records_broker": "log_silent",
    "dropped_records_too_large": "too_large",
}
"""What capture counts of what never reaches spool or log, or not the learner, and what the learner calls it."""


def require_address(url: str) -> None:
    """Return where it can be a server's. Raises: ValueError."""
    try:
        parts = httpx.URL(url)
        has_port = parts.port is None or parts.port < 1 << 16
        is_one = parts.scheme in ("http", "https") and bool(parts.host) and has_port
    except (httpx.InvalidURL, TypeError):
        is_one = False
    if not is_one:
        raise ValueError(f"{url!r} is no server: it must be like http://10.0.0.5:8000")


class UnreachableError(Exception):
    """The server gave no answer."""


class RefusedError(Exception):
    """The server answered, and not with success."""


@dataclass(frozen=True, kw_only=True)
class Status:
    """What GET /redraft/status says."""

    boot: str
    """Another one after every start of the server."""
    draft_version: str
    is_intact: bool
    """Draft and target are as they were loaded, on all ranks."""
    target_fingerprint: str
    lost: Mapping[str, int] = field(default_factory=dict)
    """What its capture dropped since it started, by reason."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A server's counters, and which boot counted them."""

    boot: str
    draft_version: str
    total: Acceptance


@dataclass(frozen=True)
class Server:
    """One vLLM server with the plugin. Equal to another by its address."""

    url: str
    token: str = field(repr=False, compare=False)
    http: httpx.AsyncClient = field(repr=False, compare=False)
    """Its own: for every request httpx's pool walks over all connections it has, a square in the number of servers."""

    async def status(self) -> Status:
        """Raises: UnreachableError, RefusedError."""
        answer = await self._request("GET", "/redraft/status", STATUS_TIMEOUT_S)
        try:
            body = answer.json()
            return Status(
                boot=body["server_id"],
                draft_version=body["draft_version"],
                is_intact=body["draft_intact"] and body["target_intact"],
                target_fingerprint=body["target_fingerprint"],
                lost=_lost(body.get("capture") or {}),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise RefusedError(f"{self.url} answers with something else than a status: {error!r}") from error

    async def swap(self, version: str) -> None:
        """Return once the server serves `version`.

        Raises: UnreachableError (the swap may have happened or may yet happen), RefusedError.
        """
        await self._request("POST", "/redraft/swap", SWAP_TIMEOUT_S, json={"version": version})

    async def read(self) -> Reading:
        """Raises: UnreachableError, RefusedError."""
        status = await self.status()
        # The token is for our routes only.
        answer = await self._request("GET", "/metrics", STATUS_TIMEOUT_S, headers={})
        try:
            total = read_acceptance(answer.text)
        except ValueError as error:
            raise RefusedError(f"{self.url}: {error}") from error
        return Reading(boot=status.boot, draft_version=status.draft_version, total=total)

    async def _request(
        self, method: str, path: str, timeout_s: float, json: object = None, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        authorization = {"Authorization": f"Bearer {self.token}"} if headers is None else headers
        try:
            answer = await self.http.request(
                method, self.url + path, json=json, headers=authorization, timeout=timeout_s
            )
        except httpx.HTTPError as error:
            raise UnreachableError(f"{self.url} does not answer: {error!r}") from error
        if answer.status_code != 200:
            raise RefusedError(f"{self.url} answers {method} {path} with {answer.status_code}: {answer.text[:300]}")
        return answer


def _lost(capture: Mapping[str, int]) -> dict[str, int]:
    return {reason: int(capture.get(counter, 0)) for counter, reason in LOSSES.items()}


@asynccontextmanager
async def connected(tokens: Mapping[str, str]) -> AsyncIterator[list[Server]]:
    """The servers of a fleet, from their tokens by URL, in the order given."""
    certificates = ssl.create_default_context()  # 20 ms each time: shared
    async with AsyncExitStack() as clients:
        yield [
            Server(url.rstrip("/"), token, await clients.enter_async_context(httpx.AsyncClient(verify=certificates)))
            for url, token in tokens.items()
        ]


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """How an attempt to bring servers to one version ended."""

    version: str
    refused: dict[str, str] = field(default_factory=dict)
    """Servers that answered but have another version, with the last reason."""
    absent: dict[str, str] = field(default_factory=dict)
    """Servers that did not answer."""

    @property
    def is_complete(self) -> bool:
        return not self.refused and not self.absent

    def __str__(self) -> str:
        return "; ".join([*self.refused.values(), *self.absent.values()]) or f"all on {self.version}"


async def converge(servers: Iterable[Server], version: str, timeout_s: float, *, insist: bool = True) -> Convergence:
    """Bring all servers to `version`, at the same time, trying again until `timeout_s` is over. Never raises for them.

    With `insist` a refusal is tried again too (there is nothing better to do when going back); without, it is final.
    """
    deadline_s = time.monotonic() + timeout_s
    servers = list(servers)
    errors = await asyncio.gather(*(_bring(server, version, deadline_s, insist) for server in servers))
    failed = {server.url: error for server, error in zip(servers, errors, strict=True) if error is not None}
    return Convergence(
        version=version,
        refused={url: str(error) for url, error in failed.items() if isinstance(error, RefusedError)},
        absent={url: str(error) for url, error in failed.items() if isinstance(error, UnreachableError)},
    )


async def reconcile(servers: Iterable[Server], version: str) -> Convergence:
    """One look at every server, one push to those that have another version: after a restart, a sleep, a partition."""
    return await converge(servers, version, timeout_s=0)


async def _bring(
    server: Server, version: str, deadline_s: float, insist: bool
) -> UnreachableError | RefusedError | None:
    """None once the server says itself that it serves `version`, intact; else the last error."""
    pause_s = 0.05
    while True:
        try:
            status = await server.status()
            if status.draft_version != version or not status.is_intact:
                await server.swap(version)
                status = await server.status()  # what it says now counts, not what it said to the swap
            if status.draft_version == version and status.is_intact:
                return None
            error: UnreachableError | RefusedError = RefusedError(
                f"{server.url} took {version} and says it has {status.draft_version}"
            )
        except (UnreachableError, RefusedError) as failure:
            error = failure
        is_final = isinstance(error, RefusedError) and not insist
        if is_final or time.monotonic() + pause_s > deadline_s:
            return error
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 5.0)


class Window:
    """What servers accept from now on: differences of their counters, all taken over the same time."""

    def __init__(self, first: dict[Server, Reading]) -> None:
        self._first = first

    @classmethod
    async def open(cls, servers: Iterable[Server]) -> Window:
        """A window over the servers that answer."""
        return cls(await _read_all(servers))

    async def read(self) -> dict[Server, Acceptance]:
        """By server since the window opened, without those that restarted, changed their draft or do not answer."""
        readings = await _read_all(self._first)
        counted = {}
        for server, now in readings.items():
            first = self._first[server]
            difference = now.total.since(first.total)
            if difference is not None and (now.boot, now.draft_version) == (first.boot, first.draft_version):
                counted[server] = difference
        return counted


async def _read_all(servers: Iterable[Server]) -> dict[Server, Reading]:
    async def read(server: Server) -> Reading | None:
        try:
            return await server.read()
        except (UnreachableError, RefusedError):
            return None

    servers = list(servers)
    readings = await asyncio.gather(*map(read, servers))
    return {server: reading for server, reading in zip(servers, readings, strict=True) if reading is not None}


def is_alarming(acceptance: Acceptance) -> bool:
    """Whether a draft is hardly accepted at all."""
    tau = acceptance.tau
    return tau is not None and acceptance.drafts >= ALARM_DRAFTS and tau < ALARM_TAU
