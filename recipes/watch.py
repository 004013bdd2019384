"""Watch what a running fleet accepts: tau and acceptance by position over time, from the servers' own /metrics.

$ redraft watch http://gpu1:8000 http://gpu2:8000                 # a line for every server every 10 seconds
$ redraft watch http://gpu1:8000 --min-tau 1.8                    # ends with status 1 once tau falls below
$ redraft watch http://gpu1:8000 --min-tau 1.8 --polls 6          # for a cron job: a minute, then status 0 or 1

The first line of a server is over everything since its start, every other over the time since the one before. A server
that is away, or was restarted between two readings, says so and is read on. Exit status 2: it was not there at first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import httpx
import tyro

from online.metrics import Acceptance, read_acceptance
from recipes.cli import run_recipe

BARS = " ▁▂▃▄▅▆▇█"

TIMEOUT_S = 10


@dataclass(frozen=True, kw_only=True)
class Config:
    urls: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Servers of vLLM that serve a draft, as http://HOST:PORT."""
    interval_s: float = 10.0
    """Between two readings."""
    min_tau: float | None = None
    """End with status 1 when the fleet's tau is lower; unset: only watch."""
    min_drafts: int = 200
    """Drafts that such a judgement waits for: tau of a few says nothing."""
    polls: int = 0
    """Readings after the first; 0: until interrupted."""


@dataclass(frozen=True, kw_only=True)
class Poll:
    """What one round of readings saw of every server."""

    counts: dict[str, Acceptance]
    """Since the round before; the first round: since the server's start."""
    away: dict[str, str]
    """Servers that could not be read, and why."""
    duration_s: float | None
    """Since the round before."""


def main(cfg: Config) -> None:
    """Raises: SystemExit(1) where tau is below `min_tau`; ConnectionError, ValueError where a server cannot be read."""
    if not cfg.urls:
        raise ValueError("no server to watch: give http://HOST:PORT")
    unjudged = Acceptance()
    with contextlib.suppress(KeyboardInterrupt):  # which is how watching ends
        for number, poll in enumerate(polls(cfg)):
            print(*lines(poll, time.strftime("%H:%M:%S")), sep="\n", flush=True)
            if number > 0:  # the first covers hours that nobody asked about
                unjudged = sum(poll.counts.values(), unjudged)
            if cfg.min_tau is not None and unjudged.drafts >= max(cfg.min_drafts, 1):
                judge(unjudged, cfg.min_tau)
                unjudged = Acceptance()


def polls(cfg: Config) -> Iterator[Poll]:
    """Rounds of readings, `interval_s` apart.

    Raises: ConnectionError, ValueError where a server cannot be read the first time.
    """
    last = {url: read(url) for url in cfg.urls}
    read_at = time.monotonic()
    yield Poll(counts=dict(last), away={}, duration_s=None)
    number = 0
    while number < cfg.polls or not cfg.polls:
        time.sleep(cfg.interval_s)
        now, away = read_all(cfg.urls)
        duration_s, read_at = time.monotonic() - read_at, time.monotonic()
        # a counter that fell was counted by another process: all of it is new
        counts = {url: reading.since(last[url]) or reading for url, reading in now.items()}
        yield Poll(counts=counts, away=away, duration_s=duration_s)
        last |= now
        number += 1


def read_all(urls: Sequence[str]) -> tuple[dict[str, Acceptance], dict[str, str]]:
    """(readings, why the others could not be read)"""
    found: dict[str, Acceptance] = {}
    away: dict[str, str] = {}
    for url in urls:
        try:
            found[url] = read(url)
        except (ConnectionError, ValueError) as error:
            away[url] = str(error)
    return found, away


def read(url: str) -> Acceptance:
    """What the server at `url` has counted since it started, its engines summed.

    Raises: ConnectionError where it cannot be reached; ValueError where it serves no draft.
    """
    try:
        answer = httpx.get(f"{url.rstrip('/')}/metrics", timeout=TIMEOUT_S)
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise ConnectionError(f"cannot read {url}/metrics: {why}") from error
    try:
        return read_acceptance(answer.text)
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from error


def lines(poll: Poll, clock: str) -> Iterator[str]:
    """A line for every server, and one for all of them where there are several."""
    width = max(len(name) for name in (*poll.counts, *poll.away, "fleet"))
    for url, counts in poll.counts.items():
        yield f"{clock}  {url:<{width}}  {describe(counts, poll.duration_s)}"
    for url, reason in poll.away.items():
        yield f"{clock}  {url:<{width}}  {reason}"
    if len(poll.counts) > 1:
        fleet = sum(poll.counts.values(), Acceptance())
        yield f"{clock}  {'fleet':<{width}}  {describe(fleet, poll.duration_s)}"


def describe(counts: Acceptance, duration_s: float | None) -> str:
    """tau, acceptance by position as bars and numbers, and how many drafts that is."""
    if counts.tau is None:
        return "no drafts"
    rates = [accepted / counts.drafts for accepted in counts.accepted_at]
    bars = "".join(BARS[round(rate * (len(BARS) - 1))] for rate in rates)
    numbers = " ".join(f"{rate:.2f}" for rate in rates)
    pace = f"{counts.drafts / duration_s:,.0f} drafts/s" if duration_s else f"{counts.drafts:,.0f} drafts so far"
    return f"tau {counts.tau:.2f}  |{bars}|  {numbers}  {pace}"


def judge(counts: Acceptance, min_tau: float) -> None:
    """Raises: SystemExit(1) where tau is below."""
    if counts.tau is not None and counts.tau < min_tau:
        print(f"tau {counts.tau:.2f} over {counts.drafts:,.0f} drafts is below {min_tau:g}", flush=True)
        raise SystemExit(1)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
