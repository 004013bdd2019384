"""Terminals as SVG: real commands in a pseudo-terminal, or the log of a long run.

    commands ─► bash in a pseudo-terminal ─► docs/pictures/NAME.cast (asciicast 2) ─┐
    docs/pictures/NAME.log: what `redraft up` printed ──────────────────────────────┴─► SVG

The SVG shows the lines one after the other, with pauses of at most `MOST_PAUSE_S`; without
animation, it shows all of them at once. Nothing else in a recording is changed. Of a log, only some
lines are shown (`read_log`), and long lines are wrapped between words.
"""

from __future__ import annotations

import codecs
import html
import json
import os
import pty
import re
import signal
import subprocess
import termios
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from redraft.engine.machine import environment
from redraft.files.artifact import write_whole

COLUMNS, ROWS = 60, 40
"""The terminal is narrow, so that its text stays legible on a phone."""
MOST_PAUSE_S = 0.6
FONT_PX, LINE_PX, PADDING_PX, BAR_PX = 14, 20, 16, 34
CHAR_PX = 0.6 * FONT_PX
GROUND, EDGE, INK, FAINT = "#151b23", "#3d444d", "#dce3ea", "#8d97a3"
PALETTE = ("#8d97a3", "#ff7b72", "#56d364", "#e3b341", "#79b8ff", "#d2a8ff", "#56d4dd", "#dce3ea")
ESCAPE = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])|\x1b[()].|\x1b.")
PROMPT = "$ "
LOG_COLUMNS = 84
NEWS = re.compile(r"all files|the learner trains|page:|ready:|learner:")
STATUS = re.compile(r"\d+ requests done")
"""How the lines begin that a picture of `redraft up` shows. STATUS matches status lines."""
GAP = "..."


def record(commands: Sequence[str], folder: Path, cast: Path) -> None:
    """Run the commands in `folder`, and write what the terminal received to `cast`.

    Raises:
        ValueError: a command failed; nothing is written.
    """
    events: list[tuple[float, str, str]] = []
    start = time.monotonic()
    for command in commands:
        typed = command.replace("\n", "\r\n")
        events.append((time.monotonic() - start, "o", f"\x1b[1m{PROMPT}{typed}\x1b[0m\r\n"))
        events += _run(command, folder, start)
    where = environment()
    header = {
        "version": 2,
        "width": COLUMNS,
        "height": ROWS,
        "timestamp": int(time.time()),
        "title": f"{where['date'][:10]}, {where['cores']} cores of {where['processor']}",
    }
    write_whole(cast, "".join(f"{json.dumps(line)}\n" for line in (header, *events)))


def _run(command: str, folder: Path, start: float) -> Iterator[tuple[float, str, str]]:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (ROWS, COLUMNS))
    hidden = ("COLUMNS", "LINES", "NO_COLOR")
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    process = subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=env | {"TERM": "xterm-256color"},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    try:
        while data := _read(ours):
            yield round(time.monotonic() - start, 3), "o", decoder.decode(data)
        if code := process.wait():
            raise ValueError(f"{command} ended with status {code}")
    finally:
        os.close(ours)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux: no process has the terminal open any more
        return b""


@dataclass(slots=True)
class Row:
    """A line of the screen."""

    cells: list[tuple[str, str]] = field(default_factory=list)
    """(character, CSS class) by column."""
    changed_s: float = 0.0


@dataclass(slots=True)
class Screen:
    """A terminal without a limit on rows, with the functions that these commands need."""

    width: int
    rows: list[Row] = field(default_factory=lambda: [Row()])
    row: int = 0
    column: int = 0
    style: str = ""

    def write(self, text: str, time_s: float) -> None:
        position = 0
        while position < len(text):
            if found := ESCAPE.match(text, position):
                self._control(found[1] or "", found[2] or "")
                position = found.end()
                continue
            self._put(text[position], time_s)
            position += 1

    def _put(self, char: str, time_s: float) -> None:
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self._move(self.row + 1)
        elif char >= " ":
            if self.column == self.width:
                self._move(self.row + 1)
                self.column = 0
            line = self.rows[self.row]
            line.cells += [(" ", "")] * (self.column + 1 - len(line.cells))
            line.cells[self.column] = (char, self.style)
            line.changed_s = time_s
            self.column += 1

    def _move(self, row: int) -> None:
        self.row = max(0, row)
        self.rows += [Row() for _ in range(self.row + 1 - len(self.rows))]

    def _control(self, numbers: str, letter: str) -> None:
        given = [int(number) for number in re.findall(r"\d+", numbers)]
        if letter == "m":
            self._paint(given or [0])
        elif letter == "K":
            self.rows[self.row].cells = self.rows[self.row].cells[: self.column]
        elif letter == "A":
            self._move(self.row - (given or [1])[0])
        elif letter == "B":
            self._move(self.row + (given or [1])[0])

    def _paint(self, codes: Sequence[int]) -> None:
        for code in codes:
            if code == 0:
                self.style = ""
            elif code in (1, 2):
                self.style = f"{self.style} {'bold' if code == 1 else 'faint'}".strip()
            elif 30 <= code < 38 or 90 <= code < 98:
                self.style = f"{self.style} c{code % 10}".strip()


def play(cast: Path) -> tuple[str, list[Row]]:
    """Return (title, the last lines of a recording, each with the time of its last change)."""
    header, *events = map(json.loads, cast.read_text().splitlines())
    screen, shown_s, before_s = Screen(header["width"]), 0.0, 0.0
    for time_s, _, text in events:
        shown_s += min(time_s - before_s, MOST_PAUSE_S)
        before_s = time_s
        screen.write(text, shown_s)
    while screen.rows and not "".join(char for char, _ in screen.rows[-1].cells).strip():
        screen.rows.pop()
    return header["title"], screen.rows


def read_log(log: Path, command: str) -> list[Row]:
    """Return the lines that a picture shows from a log of `redraft up`, each with a time.

    A picture shows all news, the first status line after each piece of news, and the last status
    line. A gap replaces the other lines.
    """
    lines = log.read_text().splitlines()
    shown = [PROMPT + command]
    for number, line in enumerate(lines):
        is_first = number > 0 and not STATUS.match(lines[number - 1])
        is_shown = is_first or number == len(lines) - 1 if STATUS.match(line) else NEWS.match(line)
        if is_shown:
            shown.append(line)
        elif shown[-1] != GAP:
            shown.append(GAP)
    rows = list[Row]()
    for number, line in enumerate(shown):
        style = "bold" if number == 0 else "faint" if line == GAP else ""
        for part in textwrap.wrap(line, LOG_COLUMNS, subsequent_indent="  "):
            rows.append(Row([(char, style) for char in part], number * MOST_PAUSE_S))
    return rows


def draw(cast: Path) -> str:
    """Draw a recording."""
    return to_svg(*play(cast), COLUMNS)


def draw_log(log: Path, title: str, command: str) -> str:
    """Draw parts of a log (`read_log`)."""
    return to_svg(title, read_log(log, command), LOG_COLUMNS)


def to_svg(title: str, rows: Sequence[Row], columns: int) -> str:
    """Draw the rows as an SVG that adapts to the page's width, with a dark background."""
    width = round(columns * CHAR_PX + 2 * PADDING_PX)
    height = BAR_PX + LINE_PX * len(rows) + 2 * PADDING_PX
    classes = "".join(f".c{number}{{fill:{color}}}" for number, color in enumerate(PALETTE))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-size="{FONT_PX}" '
        'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,DejaVu Sans Mono,monospace">',
        f"<style>text{{fill:{INK};white-space:pre}}.bold{{font-weight:700}}"
        f".faint,.title{{fill:{FAINT}}}{classes}@keyframes wait{{from,to{{opacity:0}}}}"
        "@media(prefers-reduced-motion:no-preference){g{animation:wait step-end}}</style>",
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" '
        f'fill="{GROUND}" stroke="{EDGE}"/>',
        f'<text class="title" x="{PADDING_PX}" y="23" font-size="12">{html.escape(title)}</text>',
        f'<path d="M0 {BAR_PX}H{width}" stroke="{EDGE}"/>',
    ]
    for number, row in enumerate(rows):
        base = BAR_PX + PADDING_PX + LINE_PX * (number + 0.7)
        texts = "".join(_spans(row, base))
        if texts:
            lines.append(f'<g style="animation-duration:{row.changed_s:.2f}s">{texts}</g>')
    return "\n".join([*lines, "</svg>\n"])


def _spans(row: Row, base: float) -> Iterator[str]:
    """Return the row's runs of one style, each stretched to its columns whatever the font."""
    start = 0
    for end in range(1, len(row.cells) + 1):
        style = row.cells[start][1]
        if end < len(row.cells) and row.cells[end][1] == style:
            continue
        text = "".join(char for char, _ in row.cells[start:end])
        if text.strip():
            x, length = PADDING_PX + start * CHAR_PX, len(text) * CHAR_PX
            named = f' class="{style}"' if style else ""
            yield (
                f'<text{named} x="{x:g}" y="{base:g}" textLength="{length:g}" '
                f'lengthAdjust="spacingAndGlyphs">{html.escape(text)}</text>'
            )
        start = end
