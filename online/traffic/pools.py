"""The pools of servers, by domain, and the choice of a server for each request.

    request of code ──► server of code ── no connection ──► server without a domain ── no connection
    ──► any other
                        the one with the fewest requests in flight; a server once down is retried
                        when it is healthy

A hung server takes connections and never answers. So if a request has had no byte for a while, its
server is asked for /health, and gets no more requests until it replies.

Only a failed connection is tried on another server. A request is never sent again after it has
reached a server: it may have crashed that server, and would crash the others in turn.
"""

import asyncio
import contextlib
import logging
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable

from redraft.online.records.guard import Guard
from redraft.online.traffic.upstream import (
    ForwardedRequest,
    OutOfFilesError,
    RefusedError,
    Reply,
    Upstream,
)

logger = logging.getLogger("redraft.pools")

OUT_OF_FILES_TIMEOUT_S = 10.0
RETRY_S = 0.05  # Without a free descriptor a request waits this long for one, and looks this often.
OTHER = "other"  # label for domains without a pool: clients can invent names


OUT_OF_FILES = "the router has no free file descriptor: raise its limit (LimitNOFILE, ulimit -n)"


class NoServerError(Exception):
    """No server could be reached."""


class Pools:
    """All servers.

    Those of a domain form its pool; the others take requests of domains without a pool.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[tuple[str, str]]],
        poll_s: float = 2.0,
        guard: Guard | None = None,
    ) -> None:
        """Call `find` for address and domain of every server, now and every `poll_s` seconds.

        Raises its first error; later ones are logged.
        """
        self.find, self.poll_s, self.guard = find, poll_s, guard or Guard()
        self.upstreams: list[Upstream] = []
        self.requests: Counter[tuple[str, str]] = Counter()  # taken, by (domain, pool)
        self.fallbacks: Counter[str] = Counter()  # taken by a server outside the domain's pool
        self.refused_connections: Counter[str] = Counter()  # Failed connections, by server.
        self.waits_for_files = 0  # Failures to open a connection for want of a file descriptor.
        self._turn = 0
        self._leaving: list[Upstream] = []
        self._certificates = ssl.create_default_context()  # takes 20 ms, so all servers share it
        self.update()

    @property
    def domains(self) -> set[str]:
        return {upstream.domain for upstream in self.upstreams if upstream.domain}

    def update(self) -> None:
        """Add new servers. Removed ones get no more requests, and finish those in flight."""
        wanted = dict.fromkeys((url.rstrip("/"), domain) for url, domain in self.find())
        known = {(upstream.url, upstream.domain): upstream for upstream in self.upstreams}
        self._leaving += [upstream for key, upstream in known.items() if key not in wanted]
        # A known server stays the same object, with connections and requests in flight.
        self.upstreams = [known.get(key) or Upstream(*key, self._certificates) for key in wanted]

    async def send(self, forwarded: ForwardedRequest, domain: str) -> Reply:
        """The answer of the first server to take the request.

        Raises:
            NoServerError: if none takes it.
            BrokenError: if a server took it and then failed; UnsendableError.
        """
        untried = list(self.upstreams)
        while untried:
            # Chosen again for each attempt: the loads change while a connection fails.
            upstream = min(untried, key=lambda upstream: self._preference(upstream, domain))
            untried.remove(upstream)
            try:
                reply = await self._send_to(upstream, forwarded)
            except RefusedError:
                if not upstream.is_down:
                    logger.warning("%s cannot be reached: %s", upstream.url, upstream.problem)
                upstream.is_down = True
                self.refused_connections[upstream.url] += 1
                continue
            self._count(domain, upstream)
            return reply
        raise NoServerError(f"none of {len(self.upstreams)} servers can be reached")

    def _preference(self, upstream: Upstream, domain: str) -> tuple[bool, int, int, int]:
        """Sort key; the smallest goes first.

        Alive, then best pool, then least busy, then longest unused.
        """
        rank = 0 if upstream.domain == domain else 1 if not upstream.domain else 2
        # A server that is down is tried last, not never: it may be back before the next look.
        return upstream.is_down, rank, upstream.requests, upstream.last_turn

    async def _send_to(self, upstream: Upstream, forwarded: ForwardedRequest) -> Reply:
        self._turn += 1
        upstream.last_turn = self._turn
        deadline_s = time.monotonic() + OUT_OF_FILES_TIMEOUT_S
        while True:
            try:
                reply = await upstream.send(forwarded)
            except OutOfFilesError:
                # Not the server's fault: it stays up, and the request waits until another one has
                # ended.
                self.waits_for_files += 1
                if time.monotonic() > deadline_s:
                    raise NoServerError(OUT_OF_FILES) from None
                await asyncio.gather(*(upstream.close_idle() for upstream in self.upstreams))
                await asyncio.sleep(RETRY_S)
                continue
            upstream.is_down = False
            return reply

    def _count(self, domain: str, upstream: Upstream) -> None:
        has_pool = domain in self.domains
        self.requests[domain if has_pool or not domain else OTHER, upstream.domain] += 1
        if has_pool and upstream.domain != domain:
            self.fallbacks[domain] += 1

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check servers while the block runs, and close all connections at the end."""
        tending = asyncio.create_task(self._maintain_forever())
        try:
            yield
        finally:
            tending.cancel()
            await asyncio.gather(
                *(upstream.aclose() for upstream in [*self.upstreams, *self._leaving])
            )

    async def _maintain_forever(self) -> None:
        while True:
            await asyncio.sleep(self.poll_s)
            with self.guard.round("server-list"):
                try:
                    self.update()
                except (ValueError, OSError) as error:
                    logger.warning(
                        "the list of servers could not be read, the known ones stay: %s", error
                    )
            with self.guard.round("server-checks"):
                await self._maintain()

    async def _maintain(self) -> None:
        # A server that refuses at once has the fewest requests under way, and would get all the
        # others.
        suspects = [
            each for each in self.upstreams if each.is_down or each.has_failed or each.is_silent
        ]
        found = await asyncio.gather(*(upstream.is_healthy() for upstream in suspects))
        for upstream, is_healthy in zip(suspects, found, strict=True):
            if not is_healthy and not upstream.is_down:
                reason = upstream.problem or "it does not answer /health"
                logger.warning(
                    "%s gets no more requests until it is healthy: %s", upstream.url, reason
                )
            upstream.is_down = not is_healthy
        done = [upstream for upstream in self._leaving if not upstream.requests]
        self._leaving = [upstream for upstream in self._leaving if upstream not in done]
        await asyncio.gather(*(upstream.aclose() for upstream in done))
        await asyncio.gather(
            *(upstream.close_idle(only_expired=True) for upstream in self.upstreams)
        )
