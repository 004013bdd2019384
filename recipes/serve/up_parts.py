"""The parts of `redraft up`: processes with logs, and the terminal output."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from redraft.engine.counters import PrefixCache, find_counts, parse_prefix_cache, read_samples
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.engine_log import read_line, split_lines, why_ended
from redraft.engine.process import start_group, stop_group
from redraft.engine.server import http_client
from redraft.files.printable import printable
from redraft.online.engine.pace_status import describe_pace, read_gauges
from redraft.online.fleet.reach import REFUSED
from redraft.online.journal import (
    AcceptanceEntry,
    FaultEntry,
    GateEntry,
    StateEntry,
    SwapEntry,
    decode,
)
from redraft.online.page.headline import shorten_version

LONGEST_PAUSE_S = 60  # seconds before a learner that exited is restarted
PLAIN_LINE_S = 60  # seconds between two status lines if the output is not a terminal

TOLD = re.compile(
    r"(?:redraft: )?((?<=redraft: )(?:--pace|the draft takes|the prefix cache|plain vLLM may) .*|warning: (?!--).*)"
)
"""Pattern for log lines of a starting server that concern the draft and its costs. Warnings about
flags are printed before the start.
"""


@dataclass
class Part:
    """A process with a log."""

    name: str
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    most_bytes: int = 256 << 20
    """Maximum size of the log in bytes. At this size, it is moved to `.before`, and a new log
    begins.
    """
    niceness: int = 0
    """Nice level relative to this process."""
    begun_s: float = 0.0
    takes_requests: bool = False
    """Whether the log may contain text that clients chose."""
    _read_to: int = 0

    def start(self) -> None:
        # Search the whole log for the cause of an exit.
        if self.process is None and self.log.exists():
            self.log.replace(self.log.with_suffix(".before"))
        self.process, self.begun_s = (
            start_group(self.command, log=self.log, env=self.environment, niceness=self.niceness),
            time.monotonic(),
        )

    def read_lines(self) -> list[str]:
        """Return the complete log lines since the last call; empty if the log cannot be read."""
        if self.process is None:
            return []
        try:
            with self.log.open("rb") as file:
                # The log may have been truncated.
                self._read_to = min(self._read_to, file.seek(0, os.SEEK_END))
                file.seek(self._read_to)
                new = file.read()
        except OSError:  # the log was moved, or the disk fails; serving continues
            return []
        end = new.rfind(b"\n") + 1
        self._read_to += end
        if self._read_to > self.most_bytes:
            self._restart_log()
        return split_lines(new[:end].decode(errors="replace"))[:-1]

    def _restart_log(self) -> None:
        """Copy the log, then empty it, because the part keeps writing into this file."""
        before = self.log.with_suffix(".before")
        try:
            shutil.copyfile(self.log, before)
        except OSError:  # the disk is full, and half a copy would keep it full
            with contextlib.suppress(OSError):
                before.unlink()
        with contextlib.suppress(OSError):
            os.truncate(self.log, 0)
            self._read_to = 0

    @property
    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    @property
    def why_ended(self) -> str:
        assert self.process is not None
        return why_ended(self.process, self.log, takes_requests=self.takes_requests)

    def stop(self, timeout_s: float) -> None:
        """Ask the process and its children to exit, and kill those that remain."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
        finally:
            stop_group(self.process)


@dataclass
class Screen:
    """The terminal: printed lines, and below them a status that is updated in place."""

    is_terminal: bool = field(default_factory=sys.stdout.isatty)
    _shown_s: float = -PLAIN_LINE_S
    _num_rows: int = 0
    """Number of terminal rows of the status."""

    def say(self, line: str) -> None:
        print(f"{self._erase()}{printable(line)}", flush=True)

    def update(self, status: str, now_s: float) -> None:
        if self.is_terminal:
            rows = wrap_status(status, shutil.get_terminal_size().columns - 1)
            print(self._erase() + "\n".join(rows), end="", flush=True)
            self._num_rows = len(rows)
        elif now_s - self._shown_s >= PLAIN_LINE_S:
            self._shown_s = now_s
            print(status, flush=True)

    def _erase(self) -> str:
        """Return the control sequences that erase the status."""
        if not self.is_terminal:
            return ""
        above, self._num_rows = self._num_rows - 1, 0
        return "\r\x1b[K" + "\x1b[A\x1b[K" * above


def wrap_status(status: str, width: int) -> list[str]:
    """Break a status into rows between its parts, or within a part that is wider than a row."""
    rows: list[str] = []
    for part in status.split(" | "):
        if rows and len(row := f"{rows[-1]} | {part}") <= width:
            rows[-1] = row
        else:
            rows += textwrap.wrap(part, max(width, 20))
    return rows


@dataclass
class Learned:
    """The learner's phase and the served version, read from the learner's log."""

    phase: str = "starts"
    version: str = ""

    def read(self, line: str, *, is_served: bool) -> str:
        """Return the news in this log line; empty for most lines.

        Until the target `is_served`, nothing listens at the server's address, so refused
        connections are not reported.
        """
        match decode(line.encode()):
            case StateEntry() as entry:
                self.phase = entry.phase
            case AcceptanceEntry(server=str()) as entry:
                self.version = entry.draft_version
            case GateEntry(verdict="promote") as entry:
                return f"{_describe_gain(entry)}; it is rolled out to the servers"
            case SwapEntry(outcome="swapped") as entry:
                self.version = entry.version
                return f"{entry.server} serves {shorten_version(entry.version)}"
            case SwapEntry(outcome="rolled_back") as entry:
                self.version = entry.version
                before = shorten_version(entry.from_version or "the previous version")
                back = f"{entry.server} returned from {before} to {shorten_version(entry.version)}"
                return f"{back}: {entry.reason}" if entry.reason else back
            case SwapEntry() as entry:
                version = shorten_version(entry.version)
                return f"{entry.server} does not serve {version} ({entry.outcome}): {entry.reason}"
            case FaultEntry() as entry if is_served or REFUSED not in entry.reason:
                return f"{entry.what} {entry.detail or ''}: {entry.reason}"
        return ""


def _describe_gain(entry: GateEntry) -> str:
    passed = f"{shorten_version(entry.candidate)} passed the gate on {entry.requests} requests"
    if entry.tau_incumbent is None or entry.tau_candidate is None:
        return passed
    return f"{passed}, with tau {entry.tau_candidate:.2f} (now {entry.tau_incumbent:.2f})"


def show_lines(screen: Screen, part: Part, lines: Sequence[str]) -> None:
    """Show the new lines that matter to users.

    Only the last error line is shown, because a vLLM traceback has dozens of lines. Once a server
    accepts requests, only the engine's lines are shown, because the API server's lines contain text
    that clients choose.
    """
    read = [line for line in map(read_line, lines) if line.is_of_engine or not part.takes_requests]
    for line in read:
        if found := TOLD.match(line.text):
            screen.say(f"{part.name}: {found[1]}")
    errors = [line for line in read if line.is_error]
    if errors:
        more = f" ({len(errors) - 1} more in {part.log})" if len(errors) > 1 else ""
        screen.say(f"{part.name}: {errors[-1].text}{more}")


@dataclass
class Restarts:
    """Restarts a learner that exited, with longer pauses after repeated early exits."""

    deaths: int = 0
    due_s: float | None = None

    def follow(self, learner: Part, now_s: float, say: Callable[[str], None]) -> None:
        if not learner.has_ended:
            return
        if self.due_s is None:
            self.deaths = 1 if now_s - learner.begun_s > LONGEST_PAUSE_S else self.deaths + 1
            pause_s = min(LONGEST_PAUSE_S, 2 ** (self.deaths - 1))
            self.due_s = now_s + pause_s
            say(
                f"learner: exited ({learner.why_ended}); restarting in {pause_s} s, "
                "serving continues"
            )
        if now_s >= self.due_s:
            self.due_s = None
            with contextlib.suppress(OSError):  # e.g. a full disk: counted as another early exit
                learner.start()


@dataclass
class Meter:
    """Reads a server's counters."""

    url: str
    is_ready: bool = False
    _tokens: float = 0.0
    _counts: AcceptanceCounts = field(default_factory=AcceptanceCounts.zero)
    _prompts: PrefixCache = field(default_factory=PrefixCache)
    _read_s: float = 0.0

    def read(self, now_s: float) -> str:
        """Describe requests, tokens/s, tokens per drafted step and pace since the last call.

        If the server does not answer, the text says so.
        """
        try:
            text = http_client().get(f"{self.url}/metrics", timeout=5).raise_for_status().text
        except httpx.HTTPStatusError as error:
            return f"the server answers /metrics with status {error.response.status_code}"
        except httpx.HTTPError:
            return "the server does not answer" if self.is_ready else "the server is starting"
        shown = self.describe(text, now_s)
        self.is_ready = True
        return shown

    def describe(self, text: str, now_s: float) -> str:
        done, running, tokens = (
            sum(sample.value for sample in read_samples(text, f"vllm:{name}"))
            for name in ("request_success_total", "num_requests_running", "generation_tokens_total")
        )
        counts = find_counts(text) or AcceptanceCounts.zero()
        new = counts.since(self._counts) or counts
        parts = [f"{done:.0f} requests done, {running:.0f} running"]
        answers = read_samples(text, "http_requests_total")
        broken = sum(one.value for one in answers if one.labels.get("status") == "5xx")
        parts += [f"{broken:.0f} failed (5xx)"] if broken else []
        if self.is_ready:
            parts.append(
                f"{(tokens - self._tokens) / max(1e-9, now_s - self._read_s):.1f} tokens/s"
            )
        cached, read = parse_prefix_cache(text), self._prompts
        if self.is_ready and cached.queries > read.queries:
            share = (cached.hits - read.hits) / (cached.queries - read.queries)
            parts.append(f"{share:.0%} of prompt tokens cached")
        self._prompts = cached
        parts += [f"{new.tau:.2f} tokens per drafted step"] if new.num_drafts else []
        parts += [describe_pace(gauges)] if (gauges := read_gauges(text)) else []
        self._tokens, self._counts, self._read_s = tokens, counts, now_s
        return " | ".join(parts)
