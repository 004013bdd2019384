"""The servers that requests are passed on to, by the domain whose draft they serve, and which of them takes the next.

    request of code ──► server of code ── no connection ──► server without a domain ── no connection ──► any other
                        the one with the fewest requests under way; one that was down is asked again when it is healthy

Only a connection that was never made is tried elsewhere. A request that a server has received is not sent again: it may
be what ended that server, and would end the others in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

import httpx

logger = logging.getLogger("redraft.pools")

CONNECT_TIMEOUT_S = 2.0
"""For a server's machine to answer at all. An answer itself may take as long as it takes."""

KEEP_ALIVE_S = 2.0
"""Below uvicorn's 5 s: a connection that its server closes just then would cost a request."""

HEALTH_TIMEOUT_S = 5.0

OTHER = "other"
"""What a domain counts as that no server is for: anybody can make up another."""

Header = tuple[bytes, bytes]
"""Name, in small letters, and value, as they came: clients may send what is no text."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as it is passed on."""

    method: str
    path: bytes
    """With its query."""
    headers: list[Header]
    body: bytes


@dataclass(eq=False)
class Member:
    """One server, and what it has to do."""

    url: str
    domain: str
    http: httpx.AsyncHTTPTransport
    """Not a client: that would share its cookies among all who are served, and takes twice as long."""
    requests: int = 0
    """Under way."""
    last_turn: int = 0
    is_down: bool = False

    def __post_init__(self) -> None:
        self._base = httpx.URL(self.url)

    async def send(self, asked: Asked) -> httpx.Response:
        """The head of its answer. Raises: httpx.TransportError."""
        request = httpx.Request(
            asked.method,
            self._base.copy_with(raw_path=self._base.raw_path.rstrip(b"/") + asked.path),
            headers=asked.headers,
            content=asked.body,
            extensions={"timeout": {"connect": CONNECT_TIMEOUT_S}},
        )
        return await self.http.handle_async_request(request)

    async def is_healthy(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                answer = await self.send(Asked(method="GET", path=b"/health", headers=[], body=b""))
                await answer.aclose()
        except (httpx.TransportError, TimeoutError):
            return False
        return answer.status_code < 500  # not every server has that route


@dataclass(frozen=True)
class Reply:
    """A server's answer as it begins. Whoever has it closes it, once."""

    answer: httpx.Response
    member: Member

    async def aclose(self) -> None:
        self.member.requests -= 1
        await self.answer.aclose()


class NoServerError(Exception):
    """Not one server could be reached."""


class Pools:
    """Servers in one list; those of a domain are its pool, those without take what has no pool of its own."""

    def __init__(self, find: Callable[[], Iterable[tuple[str, str]]], poll_s: float = 2.0) -> None:
        """`find` gives every server's address and domain, as of now, and is asked again every `poll_s`.

        Raises: what `find` does; later on that leaves the servers that are known.
        """
        self.find, self.poll_s = find, poll_s
        self.members: list[Member] = []
        self.requests: Counter[tuple[str, str]] = Counter()
        """Taken, by domain and by the pool that took them."""
        self.fallbacks: Counter[str] = Counter()
        """Of these, the ones of a domain with a pool that none of its own servers took."""
        self.refused_connections: Counter[str] = Counter()
        """By server."""
        self._turn = 0
        self._leaving: list[Member] = []
        self._certificates = ssl.create_default_context()  # 20 ms each time: shared
        self.update()

    @property
    def domains(self) -> set[str]:
        return {member.domain for member in self.members if member.domain}

    def update(self) -> None:
        """Take up new servers; those that are gone get no request any more and end what they have."""
        wanted = dict.fromkeys((url.rstrip("/"), domain) for url, domain in self.find())
        known = {(member.url, member.domain): member for member in self.members}
        self._leaving += [member for key, member in known.items() if key not in wanted]
        self.members = [known.get(key) or self._member(*key) for key in wanted]

    def _member(self, url: str, domain: str) -> Member:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE_S)
        return Member(url, domain, httpx.AsyncHTTPTransport(verify=self._certificates, limits=limits))

    async def send(self, asked: Asked, domain: str) -> Reply:
        """The answer of the first server to take the request.

        Raises: NoServerError; httpx.TransportError where a server took it and gave no answer.
        """
        untried = list(self.members)
        while untried:
            member = min(untried, key=lambda member: self._preference(member, domain))
            untried.remove(member)
            try:
                reply = await self._send_to(member, asked)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                member.is_down = True
                self.refused_connections[member.url] += 1
                continue
            self._count(domain, member)
            return reply
        raise NoServerError(f"none of {len(self.members)} servers can be reached")

    def _preference(self, member: Member, domain: str) -> tuple[bool, int, int, int]:
        """The smallest is asked: alive, of the right pool, with the least to do, and whose turn it is."""
        rank = 0 if member.domain == domain else 1 if not member.domain else 2
        return member.is_down, rank, member.requests, member.last_turn

    async def _send_to(self, member: Member, asked: Asked) -> Reply:
        self._turn += 1
        member.last_turn, member.requests = self._turn, member.requests + 1
        try:
            answer = await member.send(asked)
        except BaseException:
            member.requests -= 1
            raise
        member.is_down = False
        return Reply(answer, member)

    def _count(self, domain: str, member: Member) -> None:
        has_pool = domain in self.domains
        self.requests[domain if has_pool or not domain else OTHER, member.domain] += 1
        if has_pool and member.domain != domain:
            self.fallbacks[domain] += 1

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Looked after while the block runs, closed at its end."""
        tending = asyncio.create_task(self._tend_for_ever())
        try:
            yield
        finally:
            tending.cancel()
            await asyncio.gather(*(member.http.aclose() for member in [*self.members, *self._leaving]))

    async def _tend_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self.poll_s)
            try:
                self.update()
            except (ValueError, OSError) as error:
                logger.warning("the servers that are known stay: %s", error)
            try:
                await self._tend()
            except Exception:  # or a server that is down would stay so, and nobody would notice
                logger.exception("the servers could not be looked after, and will be again")

    async def _tend(self) -> None:
        """Ask the servers that are down whether they are back; let go of those that have left and are done."""
        down = [member for member in self.members if member.is_down]
        for member, is_healthy in zip(down, await asyncio.gather(*(m.is_healthy() for m in down)), strict=True):
            member.is_down = not is_healthy
        done = [member for member in self._leaving if not member.requests]
        self._leaving = [member for member in self._leaving if member not in done]
        await asyncio.gather(*(member.http.aclose() for member in done))
