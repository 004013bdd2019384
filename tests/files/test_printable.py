"""Words of others on their way to a terminal."""

from __future__ import annotations

import pytest

from redraft.files.printable import printable


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("Zürich, 東京 and 🙂", "Zürich, 東京 and 🙂"),
        ("\x1b]0;title\x07\x1b[2J", r"\x1b]0;title\x07\x1b[2J"),
        ("ended\nredraft: all is well\r", r"ended\nredraft: all is well\r"),
        ("\x9b2J", r"\x9b2J"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\u2028\ud800", r"\u2028\ud800"),
        ("", ""),
    ],
)
def test_nothing_that_a_terminal_acts_on_is_left(words: str, shown: str) -> None:
    assert printable(words) == shown
    assert printable(shown) == shown
