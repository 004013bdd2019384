"""Several servers of one target, asked as if they were one.

request ──► the live server with the fewest tokens under way, once one has a free slot
                no answer? ──► to another; the server is passed over, asked by and by, and comes back
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from distill.endpoint import Endpoint

MAX_DOUBLINGS = 16
"""Of the pause between two looks at a dead server."""

PROBE_TIMEOUT_S = 10.0
"""A server that takes longer to say what it serves is as good as dead."""


@dataclass(eq=False)
class Member:
    """One server, and what it has to do."""

    endpoint: Endpoint
    requests: int = 0
    tokens: int = 0
    is_dead: bool = False
    failures: int = 0
    """Since its last answer."""

    @property
    def is_free(self) -> bool:
        return not self.is_dead and self.requests < self.endpoint.concurrency

    @contextmanager
    def busy(self, tokens: int) -> Iterator[None]:
        self.requests, self.tokens = self.requests + 1, self.tokens + tokens
        try:
            yield
        finally:
            self.requests, self.tokens = self.requests - 1, self.tokens - tokens


class Endpoints:
    """Requests to whichever server has the least to do, from one event loop.

    A request waits here, not at a server, until one has a slot: so a fast server takes more of them than a slow one.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        attempts: int = 8,
        pause_s: float = 1.0,
        longest_pause_s: float = 30.0,
        patience_s: float = 120.0,
    ) -> None:
        """`attempts` of one request, each at a server that lives; `pause_s` before a dead one is asked again, doubling
        to `longest_pause_s` until it answers; `patience_s` while all are dead."""
        self.members = [Member(endpoint) for endpoint in endpoints]
        self.attempts, self.pause_s, self.longest_pause_s = attempts, pause_s, longest_pause_s
        self.patience_s = patience_s
        self._check: Callable[[Endpoint], Awaitable[None]] | None = None
        self._changed = asyncio.Condition()
        self._all_dead_since_s: float | None = None
        self._probes: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return ", ".join(member.endpoint.url for member in self.members)

    async def require(self, check: Callable[[Endpoint], Awaitable[None]]) -> None:
        """Return where every server that answers passes `check`; one that does not answer has to when it is back.

        Raises: what `check` does; ConnectionError where none answers.
        """
        self._check = check
        failure: ConnectionError | None = None
        for member in self.members:
            try:
                await check(member.endpoint)
            except ConnectionError as error:
                failure = error
                self._pass_over(member, str(error))
        if failure is not None and all(member.is_dead for member in self.members):
            raise failure

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """The answer to one request about the model.

        Raises: RequestRefusedError; ConnectionError after `attempts` tries, or where all servers stay dead.
        """
        tokens, failure = len(body.get("prompt", "")), ""
        for _ in range(self.attempts):
            member = await self._free_member()
            try:
                with member.busy(tokens):
                    answer = await member.endpoint.post(path, **body)
                member.failures = 0
                return answer
            except ConnectionError as error:
                failure = str(error)
                self._pass_over(member, failure)
            finally:
                async with self._changed:
                    self._changed.notify()
        raise ConnectionError(f"{self.attempts} servers in turn gave no answer to one request; the last: {failure}")

    async def _free_member(self) -> Member:
        async with self._changed:
            while not (free := [member for member in self.members if member.is_free]):
                self._require_patience()
                with suppress(TimeoutError):  # whatever becomes of those who would say that something has changed
                    await asyncio.wait_for(self._changed.wait(), self.patience_s)
            return min(free, key=lambda member: (member.tokens, member.requests))

    def _require_patience(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._all_dead_since_s is not None and now_s - self._all_dead_since_s >= self.patience_s:
            raise ConnectionError(f"no server answers, for {self.patience_s:g} s now: {self.url}")

    def _pass_over(self, member: Member, failure: str) -> None:
        if member.is_dead:
            return
        member.is_dead = True
        if all(member.is_dead for member in self.members):
            self._all_dead_since_s = asyncio.get_running_loop().time()
        tqdm.write(f"passed over until it is back: {failure}")
        probe = asyncio.create_task(self._probe(member))
        self._probes.add(probe)  # a loop holds its tasks weakly
        probe.add_done_callback(self._probes.discard)

    async def _probe(self, member: Member) -> None:
        """Ask until it is back, and let those who wait look again."""
        while member.is_dead:
            await asyncio.sleep(min(self.pause_s * 2 ** min(member.failures, MAX_DOUBLINGS), self.longest_pause_s))
            member.failures += 1
            if await member.endpoint.is_back(PROBE_TIMEOUT_S) and await self._passes(member.endpoint):
                member.is_dead, self._all_dead_since_s = False, None
                tqdm.write(f"{member.endpoint.url} is back")
            async with self._changed:
                self._changed.notify_all()

    async def _passes(self, endpoint: Endpoint) -> bool:
        try:
            if self._check is not None:
                await self._check(endpoint)
        except (ConnectionError, ValueError) as error:
            tqdm.write(f"still passed over: {error}")
            return False
        return True
