"""Print the acceptance of a running fleet at intervals, in total and by draft position.

The numbers come from the servers' /metrics.

$ redraft fleet watch http://gpu1:8000 http://gpu2:8000                 # a line per server every 10 seconds
$ redraft fleet watch http://gpu1:8000 --min-tau 1.8                    # exits with status 1 once tau falls below
$ redraft fleet watch http://gpu1:8000 --min-tau 1.8 --polls 6          # for a cron job: one minute, then status 0 or 1

A server's first line covers the time since it started; each further line covers the time since the
previous one. If a server cannot be reached, its line gives the reason, and polling continues. The
exit status is 2 if a server cannot be reached at the first reading.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import httpx
import tyro

from redraft.engine.counters import parse_counts
from redraft.engine.counts import AcceptanceCounts
from redraft.files.printable import printable
from redraft.online.engine.pace_status import describe_pace, read_gauges
from redraft.online.fleet.reach import explain, explain_answer
from redraft.online.fleet.server import MAX_QUOTED, require_address, trusted_certificates

BARS = " ▁▂▃▄▅▆▇█"
TIMEOUT_S = 10


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    urls: Annotated[tuple[str, ...], tyro.conf.Positional]
    """vLLM servers with a draft, as http://HOST:PORT."""
    interval_s: float = 10.0
    """Time between two readings, in seconds."""
    min_tau: float | None = None
    """Exit with status 1 if the fleet's tokens per drafted step fall below this value. By default,
    the command only prints. With `--pace auto`, tau also falls with the number of draft tokens.
    Steps in which a lookup finds nothing are not counted.
    """
    min_drafts: int = 200
    """Minimum number of drafts before tau is compared with --min-tau; with few drafts, tau is
    noise.
    """
    polls: int = 0
    """Number of readings after the first; 0 means until interrupted."""


class Reading(NamedTuple):
    counts: AcceptanceCounts
    """Counts since the server started, summed over its engines."""
    pace: str
    """Draft tokens by batch size, if the server chooses them at run time."""


@dataclass(frozen=True, kw_only=True)
class Poll:
    counts: dict[str, AcceptanceCounts]
    """By server, since the previous reading; in the first round, since the server's start."""
    away: dict[str, str]
    """Unreachable servers, with the reason."""
    paces: dict[str, str]
    """`Reading.pace` of servers that have one."""
    durations_s: dict[str, float]
    """By server, time since the previous reading; empty in the first round."""

    def pace(self, *urls: str) -> float | None:
        if not self.durations_s:
            return None
        return sum(self.counts[url].num_drafts / self.durations_s[url] for url in urls)


def main(cfg: WatchConfig) -> None:
    """Print lines until interrupted, or for the given number of polls.

    Raises:
        SystemExit: with status 1, if tau is below `min_tau`.
        ConnectionError: a server cannot be reached in the first round.
        ValueError: a server serves no draft.
    """
    if not cfg.urls:
        raise ValueError("no servers to watch: give http://HOST:PORT")
    for url in cfg.urls:
        require_address(url)
    recent = AcceptanceCounts.zero()
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual way to stop watching
        for number, poll in enumerate(poll_servers(cfg)):
            print(*format_poll(poll, time.strftime("%H:%M:%S")), sep="\n", flush=True)
            if number > 0:  # the first round covers the hours before this command
                recent = sum(poll.counts.values(), recent)
            # Counting restarts after each comparison, so that a good hour cannot hide a bad minute
            # after it.
            if cfg.min_tau is not None and recent.num_drafts >= max(cfg.min_drafts, 1):
                if recent.tau < cfg.min_tau:
                    over = f"over {recent.num_drafts:,.0f} drafts: below {cfg.min_tau:g}"
                    print(f"{recent.tau:.2f} tokens per drafted step {over}", flush=True)
                    raise SystemExit(1)
                recent = AcceptanceCounts.zero()


def poll_servers(cfg: WatchConfig) -> Iterator[Poll]:
    """Yield rounds of readings, `interval_s` apart.

    Raises:
        ConnectionError: a server cannot be reached in the first round.
        ValueError: a server serves no draft in the first round.
    """
    # Strict on purpose: a wrong address would otherwise be polled for all time.
    last = {url: read_server(url) for url in cfg.urls}
    read_at = dict.fromkeys(last, time.monotonic())
    yield Poll(
        counts={url: reading.counts for url, reading in last.items()},
        away={},
        paces=list_paces(last),
        durations_s={},
    )
    number = 0
    while number < cfg.polls or not cfg.polls:
        time.sleep(cfg.interval_s)
        now, away = read_all(cfg.urls)
        now_s = time.monotonic()
        # A counter that decreased belongs to a new process, so all its counts are new.
        counts = {
            url: reading.counts.since(last[url].counts) or reading.counts
            for url, reading in now.items()
        }
        durations_s = {url: now_s - read_at[url] for url in now}
        yield Poll(counts=counts, away=away, paces=list_paces(now), durations_s=durations_s)
        # An unreachable server keeps its earlier reading, so its next line covers the whole gap.
        last |= now
        read_at |= dict.fromkeys(now, now_s)
        number += 1


def list_paces(readings: Mapping[str, Reading]) -> dict[str, str]:
    return {url: reading.pace for url, reading in readings.items() if reading.pace}


def read_all(urls: Sequence[str]) -> tuple[dict[str, Reading], dict[str, str]]:
    found: dict[str, Reading] = {}
    away: dict[str, str] = {}
    for url in urls:
        try:
            found[url] = read_server(url)
        except (ConnectionError, ValueError) as error:
            away[url] = str(error)
    return found, away


def read_server(url: str) -> Reading:
    """Return a server's counts and pace.

    Raises:
        ConnectionError: the server cannot be reached.
        ValueError: the server serves no draft.
    """
    try:
        # Without the environment's proxy, like the requests of the learner and the tap.
        certificates = trusted_certificates()
        answer = httpx.get(
            f"{url.rstrip('/')}/metrics", timeout=TIMEOUT_S, trust_env=False, verify=certificates
        )
        if foreign := explain_answer(answer.status_code, answer.headers.raw):
            raise ConnectionError(f"cannot read {url}/metrics: {foreign}")
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConnectionError(f"cannot read {url}/metrics: {explain(error)}") from error
    try:
        gauges = read_gauges(answer.text)
        return Reading(parse_counts(answer.text), describe_pace(gauges) if gauges else "")
    except ValueError as error:
        raise ValueError(f"{url}: {printable(str(error))[:MAX_QUOTED]}") from error


def format_poll(poll: Poll, clock: str) -> Iterator[str]:
    """Yield a line per server, and one for the fleet if there are several servers."""
    width = max(len(name) for name in (*poll.counts, *poll.away, "fleet"))
    for url, counts in poll.counts.items():
        yield f"{clock}  {url:<{width}}  {format_counts(counts, poll.pace(url))}"
        if pace := poll.paces.get(url):
            yield f"{'':{len(clock)}}  {'':{width}}  {pace}"
    for url, reason in poll.away.items():
        yield f"{clock}  {url:<{width}}  {reason}"
    if len(poll.counts) > 1:
        fleet = sum(poll.counts.values(), AcceptanceCounts.zero())
        yield f"{clock}  {'fleet':<{width}}  {format_counts(fleet, poll.pace(*poll.counts))}"


def format_counts(counts: AcceptanceCounts, pace: float | None) -> str:
    """Format tokens per drafted step, acceptance by position, and drafts per second.

    Without a pace, the total number of drafts replaces the rate.
    """
    if not counts.num_drafts:
        return "no drafts"
    rates = counts.acceptance_per_position
    bars = "".join(BARS[round(rate * (len(BARS) - 1))] for rate in rates)
    numbers = " ".join(f"{rate:.2f}" for rate in rates)
    drafts = f"{counts.num_drafts:,.0f} drafts so far" if pace is None else f"{pace:,.0f} drafts/s"
    return f"{counts.tau:.2f} tokens per drafted step  |{bars}|  {numbers}  {drafts}"
