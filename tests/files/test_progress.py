"""Bars in a log are lines, ten seconds apart; in a terminal they move."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from redraft.files.progress import Progress

ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let time pass, in seconds."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return pass_by


def test_a_log_gets_a_line_every_ten_seconds_and_the_end(wait: Callable[[float], None]) -> None:
    log = io.StringIO()
    with Progress(total=100, desc="caching", unit="batch", file=log, mininterval=0) as bar:
        for _ in range(100):
            wait(0.25)
            bar.update()
            bar.set_postfix(loss="1.0")
    lines = log.getvalue().splitlines()
    assert [re.search(r"(\d+)/100", line)[1] for line in lines] == ["40", "80", "100"]  # type: ignore[index]
    assert all(line.startswith("caching: ") and "loss=1.0" in line for line in lines)
    assert not re.search(r"[\r\x1b█]", log.getvalue())


def test_a_bar_that_is_done_at_once_writes_nothing_to_a_log() -> None:
    log = io.StringIO()
    assert list(Progress(range(1000), desc="quick", file=log, mininterval=0)) == list(range(1000))
    with Progress(desc="waits", bar_format="{desc}: {elapsed}", leave=False, file=log) as bar:
        bar.refresh()
    Progress(total=3, disable=True, file=log).close()
    assert log.getvalue() == ""


def test_text_between_the_lines_of_a_log_stays_as_it_is(wait: Callable[[float], None]) -> None:
    log = io.StringIO()
    with Progress(total=2, desc="fleet", file=log, mininterval=0) as bar:
        wait(11)
        bar.update()
        Progress.write("a server is back", file=log)
    assert [line.partition(":")[0] for line in log.getvalue().splitlines()] == [
        "fleet",
        "a server is back",
        "fleet",
    ]


def test_a_terminal_gets_the_bar(wait: Callable[[float], None]) -> None:
    screen = Terminal()
    for _ in Progress(range(3), desc="steps", file=screen, mininterval=0, ascii=False):
        pass
    assert screen.getvalue().count("\r") >= 4
    assert "█" in screen.getvalue()


def test_every_bar_of_ours_is_one_of_these() -> None:
    folders = ("heads", "distill", "eval", "online", "recipes", "redraft/engine", "redraft/files")
    users = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if "tqdm import" in path.read_text()
    ]
    assert users == [ROOT / "redraft/files/progress.py"]
