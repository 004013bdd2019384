"""`redraft up` next to a plain `vllm serve`: the same sessions, in interleaved blocks.

    workload ─► a block of sessions ─┬─► plain vLLM, while the learner rests
                                     └─► redraft up, as it serves           in turn; only one computes

Both servers use vLLM's prefix cache. The requests of a block are new to both, except for the
prefixes that its sessions share by design.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from benchmarks.demo.fleet import Answer, find_rate, stream
from benchmarks.workloads import Session, Workload, extend
from redraft.engine.counters import (
    find_counts,
    parse_decode_time,
    parse_prefix_cache,
    read_samples,
)
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.server import IDLE_S
from redraft.eval.intervals import UNBOUNDED, median_interval
from redraft.files.progress import Progress

TOKENS = "vllm:generation_tokens_total"


@dataclass(frozen=True, kw_only=True)
class Counted:
    """A server's counters, or the differences between two readings."""

    queries: float
    """Number of prompt tokens looked up in the prefix cache."""
    hits: float
    drafts: float
    accepted: float
    """Number of accepted draft tokens, from lookups and from the head."""
    by_head: float
    tokens: float = 0
    """Number of output tokens."""
    answers: float = 0

    def since(self, before: Counted) -> Counted:
        return Counted(**{name: at - getattr(before, name) for name, at in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Block:
    """The measurement of one server over a block of sessions."""

    tokens_s: float
    first_s: float
    """Median time to the first token."""
    decoding: float
    """Median over the answers of the tokens/s after the first token."""


@dataclass(kw_only=True)
class Beside:
    """Two servers, and the settings with which to measure them in turn."""

    plain: str
    up: str
    """Their addresses."""
    resting: Callable[[], AbstractContextManager[None]]
    """Context in which the learner computes nothing, as if it were not running."""
    count_head: Callable[[], Awaitable[float]]
    """Count the head's tokens that were accepted since its current version was first served."""
    failures: list[str] = field(default_factory=list)

    async def compare(self, workload: Workload, pairs: int) -> dict[str, Any]:
        """Measure `never_slower.NAME` of a report.

        Raises:
            ValueError: the workload has too few sessions.
        """
        urls, failed, requests = (self.plain, self.up), len(self.failures), 0
        before = [await self._count(url) for url in urls]
        found: list[tuple[Block, Block]] = []
        for number in Progress(range(pairs), desc=workload.name, unit="pair"):
            sessions = list(itertools.islice(workload.sessions, workload.block))
            if len(sessions) < workload.block:
                raise ValueError(f"{workload.name} has too few sessions for {pairs} pairs")
            requests += len(urls) * sum(1 + len(session.results) for session in sessions)
            blocks = {
                url: await self._measure(url, workload, sessions)
                for url in (urls if number % 2 else reversed(urls))
            }
            plain, ours = blocks[self.plain], blocks[self.up]
            if plain and ours:
                found.append((ours, plain))
        grown = [
            (await self._count(url)).since(then) for url, then in zip(urls, before, strict=True)
        ]
        about: dict[str, Any] = {"clients": workload.clients, "requests": requests}
        about["failed"] = len(self.failures) - failed
        return about | summarise(found) | describe_counts(*reversed(grown))

    async def _measure(
        self, url: str, workload: Workload, sessions: Sequence[Session]
    ) -> Block | None:
        """Measure a block; None if a request failed, because then its pair cannot be compared."""
        failed = len(self.failures)
        with self.resting() if url == self.plain else nullcontext():
            await asyncio.sleep(IDLE_S)  # the previous server's worker is still spinning
            answers = await self._answer(url, workload, sessions)
        if len(self.failures) > failed:
            return None
        firsts, speeds = [], []
        for answer in answers:
            first_s, first_tokens = find_first(answer)
            firsts.append(first_s)
            decode_s = answer.times_s[-1] - answer.times_s[0] - first_s
            if (later := sum(answer.counts) - first_tokens) and decode_s > 0:
                speeds.append(later / decode_s)
        return Block(
            tokens_s=find_rate(answers),
            first_s=statistics.median(firsts),
            decoding=statistics.median(speeds) if speeds else 0.0,
        )

    async def _answer(
        self, url: str, workload: Workload, sessions: Sequence[Session]
    ) -> list[Answer]:
        waiting, answers = iter(sessions), list[Answer]()

        async def ask(http: httpx.AsyncClient, session: Session) -> None:
            prompt = session.prompt
            for result in (*session.results, None):
                answer = await stream(http, url, prompt, workload.max_tokens, captured=True)
                answers.append(answer)
                if result is not None:
                    prompt = extend(prompt, answer.token_ids, result)

        async def client(http: httpx.AsyncClient) -> None:
            for session in waiting:
                try:
                    await ask(http, session)
                except (httpx.HTTPError, ValueError) as error:
                    self.failures.append(repr(error))

        async with httpx.AsyncClient(timeout=300) as http:
            await asyncio.gather(*(client(http) for _ in range(workload.clients)))
        return answers

    async def _count(self, url: str) -> Counted:
        await asyncio.sleep(
            IDLE_S
        )  # /metrics includes the last step shortly after the client has received its tokens
        async with httpx.AsyncClient(timeout=60) as http:
            page = (await http.get(f"{url}/metrics")).raise_for_status().text
        counts = find_counts(page) or AcceptanceCounts.zero()
        cached = parse_prefix_cache(page)
        return Counted(
            queries=cached.queries,
            hits=cached.hits,
            drafts=counts.num_drafts,
            accepted=counts.num_accepted,
            by_head=await self.count_head() if url == self.up else 0.0,
            tokens=sum(sample.value for sample in read_samples(page, TOKENS)),
            answers=parse_decode_time(page).requests,
        )


def find_first(answer: Answer) -> tuple[float, int]:
    """Return the seconds until the first token, and the number of tokens that arrived with it."""
    at = next(place for place, count in enumerate(answer.counts) if count)
    return answer.times_s[at] - answer.times_s[0], answer.counts[at]


def summarise(pairs: Sequence[tuple[Block, Block]]) -> dict[str, Any]:
    """Return the ratios of a server's blocks to the plain one's, and medians with 95% intervals."""
    found: dict[str, Any] = {}
    for key, name in (("tokens_s", "tokens_s"), ("first_token", "first_s"), ("decoding",) * 2):
        ratios = [
            getattr(ours, name) / getattr(plain, name)
            for ours, plain in pairs
            if getattr(plain, name)
        ]
        found[key] = estimate_ratio(ratios)
    return found


def estimate_ratio(ratios: Sequence[float]) -> dict[str, Any]:
    """Return the median, with its 95% interval if there are enough ratios for one."""
    if not ratios:
        return {"ratio": None, "interval": None, "pairs": 0}
    ratio, interval = median_interval(ratios)
    bounded = None if interval == UNBOUNDED else interval
    return {"ratio": ratio, "interval": bounded, "pairs": len(ratios)}


def describe_counts(counts: Counted, plain: Counted) -> dict[str, Any]:
    """Return the prefix-cache hits, tau, and the accepted tokens by kind of draft.

    The shares are None if a version was swapped in meanwhile, which resets the head's count to 0.
    """
    is_known = counts.accepted > 0 and counts.by_head >= 0
    # As in `served.count_steps`: vLLM counts no draft in a step that proposes nothing.
    steps = max(counts.drafts, counts.tokens - counts.answers - counts.accepted)
    head = min(1.0, counts.by_head / counts.accepted) if is_known else None
    return {
        "hit_rate": counts.hits / counts.queries if counts.queries else None,
        "hit_rate_plain": plain.hits / plain.queries if plain.queries else None,
        "tau": 1 + counts.accepted / steps if steps else 1.0,
        "head_share": head,
        "lookup_share": None if head is None else 1 - head,
    }


@contextmanager
def learner_stopped(up: int) -> Iterator[None]:
    """Stop the learner of the `redraft up` with this process id for the duration of the block."""
    learners = [
        process
        for process in psutil.Process(up).children(recursive=True)
        if "learner" in process.cmdline()
    ]
    stopped = [one for each in learners for one in (each, *each.children(recursive=True))]
    try:
        for process in stopped:
            process.suspend()
        yield
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()
