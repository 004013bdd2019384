"""Wrap help to the terminal, and collect what tyro prints without wrapping.

tyro and `textwrap` break lines at every space. NO_BREAK stands for the spaces of a command until the
text is printed, so that the command stays in one line.
"""

import contextlib
import io
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, TextIO, cast

NO_BREAK = "\N{NO-BREAK SPACE}"

HELP_COLUMNS = 65
"""Width of tyro's narrowest column of flags, on a terminal that is at least that wide."""
FLAG_COLUMNS = 31
"""Columns without help text in tyro's output: its frame, and at most 24 characters of a flag."""


def wrap_prose(text: str) -> str:
    """Wrap the text's paragraphs to the terminal.

    Indented lines, commands (`$ ...`) and text in backticks stay as they are.
    """
    width = min(shutil.get_terminal_size().columns, 100)
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    wrapped: list[str] = []
    for is_prose, lines in itertools.groupby(
        text.strip().splitlines(), lambda line: line[:1] not in ("", " ", "$")
    ):
        block = list(lines)
        wrapped += wrapper.wrap(_hold_together(" ".join(block), width)) if is_prose else block
    return "\n".join(wrapped).replace(NO_BREAK, " ")


def hold_commands(help_text: str) -> str:
    """Return the help of a flag with NO_BREAK in the text in backticks, if this fits into a line."""
    columns = min(shutil.get_terminal_size().columns, HELP_COLUMNS)
    return _hold_together(help_text, columns - FLAG_COLUMNS)


def _hold_together(text: str, most: int) -> str:
    def hold(found: re.Match[str]) -> str:
        # tyro cuts a longer one anywhere.
        return found[0].replace(" ", NO_BREAK) if len(found[0]) <= most else found[0]

    return re.sub(r"`[^`]+`", hold, text)


class _Spacing:
    """A stream that prints a space for NO_BREAK."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text.replace(NO_BREAK, " "))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def printing_spaces() -> contextlib.AbstractContextManager[object]:
    """Print a space for NO_BREAK on the standard output while the block runs."""
    return contextlib.redirect_stdout(cast(Any, _Spacing(sys.stdout)))


@contextlib.contextmanager
def collecting() -> Iterator[io.StringIO]:
    """Collect what tyro prints, without frames, colours and line breaks.

    tyro chooses these by the standard output and the width of the terminal.
    """
    printed, width = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield printed
    finally:
        if width is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = width
