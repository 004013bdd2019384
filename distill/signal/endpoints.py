"""Use several servers of one target like a single server.

request ──► the live server with the fewest tokens in flight, as soon as one has a free slot
                no answer? ──► another server; the first gets no requests until it answers a probe
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from redraft.distill.signal.endpoint import Endpoint
from redraft.files.progress import Progress

# Maximum number of times that the pause between probes doubles. Without a limit, it would overflow
# in a long outage.
MAX_DOUBLINGS = 16
PROBE_TIMEOUT_S = 10.0  # a server that takes longer to list its models is considered dead


@dataclass(eq=False)
class Member:
    endpoint: Endpoint
    requests: int = 0
    tokens: int = 0
    """Number of prompt tokens in flight."""
    is_dead: bool = False
    failures: int = 0
    """Number of failed probes since the server's last answer."""

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
    """Sends each request to the least busy server, from one event loop.

    Requests wait here instead of at a server, until a server has a free slot. A fast server
    therefore gets more requests.
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
        """Set up the servers without opening a connection.

        Each of the `attempts` is made at a live server. The pause before a dead server is probed
        doubles with every probe, from `pause_s` to `longest_pause_s`. While all servers are dead,
        requests wait for `patience_s`.
        """
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
        """Run `check` on every server, and on a dead server when it comes back.

        Raises:
            ConnectionError: no server answers. Errors raised by `check` are passed on.
        """
        self._check = check
        failure: ConnectionError | None = None
        for member in self.members:
            try:
                await check(member.endpoint)
            except ConnectionError as error:
                failure = error
                self._bury(member, str(error))
        if failure is not None and all(member.is_dead for member in self.members):
            raise failure

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        """Return one server's answer to a request for the model.

        Raises:
            RequestRefusedError: the server refuses the request.
            ConnectionError: `attempts` tries failed, or all servers stay dead.
        """
        # Prompts are lists of ids here. For text, this would count characters.
        tokens, failure = len(body.get("prompt", "")), ""
        for _ in range(self.attempts):
            member = await self._free_member()
            try:
                # There must be no `await` after the choice, or two requests could take the last
                # slot.
                with member.busy(tokens):
                    answer = await member.endpoint.post(path, **body)
                member.failures = 0
                return answer
            except ConnectionError as error:
                failure = str(error)
                self._bury(member, failure)
            finally:
                async with self._changed:
                    # A slot is free again, so one waiting request can proceed.
                    self._changed.notify()
        raise ConnectionError(f"a request failed {self.attempts} times; the last error: {failure}")

    async def _free_member(self) -> Member:
        async with self._changed:
            while not (free := [member for member in self.members if member.is_free]):
                self._require_patience()
                # Wait with a timeout, because `patience_s` may pass without any change.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), self.patience_s)
            return min(free, key=lambda member: (member.tokens, member.requests))

    def _require_patience(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._all_dead_since_s is not None and now_s - self._all_dead_since_s >= self.patience_s:
            raise ConnectionError(f"no server has answered for {self.patience_s:g} s: {self.url}")

    def _bury(self, member: Member, failure: str) -> None:
        """Send the server no more requests until a probe succeeds."""
        # All requests in flight to this server fail at about the same time, but only the first one
        # starts a probe.
        if member.is_dead:
            return
        member.is_dead = True
        if all(member.is_dead for member in self.members):
            self._all_dead_since_s = asyncio.get_running_loop().time()
        Progress.write(f"no requests are sent to this server until it recovers: {failure}")
        probe = asyncio.create_task(self._probe(member))
        self._probes.add(probe)  # an event loop keeps only weak references to tasks
        probe.add_done_callback(self._probes.discard)

    async def _probe(self, member: Member) -> None:
        while member.is_dead:
            await asyncio.sleep(
                min(self.pause_s * 2 ** min(member.failures, MAX_DOUBLINGS), self.longest_pause_s)
            )
            member.failures += 1
            if await self._passes(member.endpoint):
                member.is_dead, self._all_dead_since_s = False, None
                Progress.write(f"{member.endpoint.url} has recovered")
            async with self._changed:
                self._changed.notify_all()

    async def _passes(self, endpoint: Endpoint) -> bool:
        try:
            if not await endpoint.is_back(PROBE_TIMEOUT_S):
                return False
            if self._check is not None:
                await self._check(endpoint)
        except (ConnectionError, ValueError) as error:
            Progress.write(f"this server still gets no requests: {error}")
            return False
        except (
            Exception
            # A probe must handle any answer, because one that raises would leave the server dead
            # forever.
        ) as error:
            Progress.write(
                f"{endpoint.url} still gets no requests, because its answer is malformed: {error!r}"
            )
            return False
        return True
