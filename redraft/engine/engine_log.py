"""Read the log of a vLLM server: which process wrote a line, and which lines are errors.

    (EngineCore pid=7) ERROR 01-31 12:00:00 [core.py:9] ValueError: the vocabularies differ
     process           level                            text

Once the server accepts requests, the API server's lines contain text that clients choose. These
lines are never quoted, neither as the cause of an exit nor on a terminal.
"""

import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from redraft.engine.adaptive import explain_refusal
from redraft.files.printable import printable

STARTED = "Application startup complete."
"""Line that uvicorn logs before the first request."""

_LINE = re.compile(
    r"(?:\((?P<process>\w+)[^)]*\) )?"
    r"(?:[\d:,. T-]*(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\b:?"
    r"(?: [\d: -]+ \[[^]]*\])?)?"
    r"\s*(?P<text>.*)"
)
_ENGINE = re.compile(r"EngineCore|(?:Vllm)?Worker")
_EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception)\b")
# pydantic appends the whole input to the message, after " [type=value_error, ".
_CAUSE = re.compile(
    r"(?:[\w.]+\.py: )?(?:\w+\.)*"
    r"((?:[A-Z]\w*(?:Error|Exception)|error|Value error)[:,] .+?)(?: \[type=.*)?$"
)


@dataclass(frozen=True, kw_only=True)
class LogLine:
    process: str
    """Name of the process. Empty for a line from uvicorn, an argument parser or a different
    program.
    """
    level: str
    """Log level. Empty for tracebacks and printed text."""
    text: str

    @property
    def is_of_engine(self) -> bool:
        return _ENGINE.match(self.process) is not None

    @property
    def is_error(self) -> bool:
        if self.level:
            return self.level in ("ERROR", "CRITICAL")
        return self.text.startswith("redraft: ") or _EXCEPTION.match(self.text) is not None


def split_lines(log: str) -> list[str]:
    """Split the log at newlines only, because `str.splitlines` would also split a client's text."""
    return [printable(line.rstrip("\r")) for line in log.split("\n")]


def read_line(line: str) -> LogLine:
    found = _LINE.match(line)
    assert found is not None  # always matches, because every part may be empty
    return LogLine(
        process=found["process"] or "", level=found["level"] or "", text=found["text"].strip()
    )


def last_error(log: Path, *, takes_requests: bool = False) -> str:
    """Return the line of an engine's log that states why it exited.

    It is the last error, unless that error merely refers to an earlier one. If `takes_requests` is
    true, the server counts as started, whatever its log says.
    """
    try:
        lines = split_lines(log.read_text(errors="replace"))
    except OSError as error:
        return f"its log cannot be read ({error.strerror})"
    if causes := list(_find_causes(lines, takes_requests)):
        return explain_refusal(causes[-1])
    if takes_requests or any(line.endswith(STARTED) for line in lines):
        return "its log states no cause"
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said else "it wrote nothing"


def _find_causes(lines: Sequence[str], has_started: bool) -> Iterator[str]:
    for line in map(read_line, lines):
        has_started |= line.text == STARTED
        if line.level in ("", "ERROR", "CRITICAL") and (line.is_of_engine or not has_started):
            found = _CAUSE.match(line.text)
            # The API server reports the exit of its engine core after the core has reported the
            # cause.
            if found and "Engine core initialization failed" not in found[1]:
                yield found[1]


def why_ended(process: subprocess.Popen[bytes], log: Path, *, takes_requests: bool = False) -> str:
    """Return why a process exited: the signal that killed it, or the error in its log."""
    code = process.poll()
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        memory = ", which the kernel sends if memory runs out" if name == "SIGKILL" else ""
        return f"killed by {name}{memory}"
    return (
        "it was asked to stop (exit status 0)"
        if code == 0
        else last_error(log, takes_requests=takes_requests)
    )
