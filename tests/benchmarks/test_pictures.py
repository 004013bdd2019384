"""Pictures: none is stale, charts show the tables, recordings show what a terminal shows."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.pictures import catalog, charts, terminal
from benchmarks.pictures.catalog import PICTURES, ROOT, Picture, find_stale, make
from benchmarks.pictures.tables import Figure, read_cells, read_figures
from benchmarks.pictures.terminal import Screen, draw, draw_log, play, read_log, record


def test_no_picture_is_older_than_the_code_or_data_that_it_is_made_from() -> None:
    assert find_stale() == [], "run `make pictures`"


def test_every_picture_of_the_documents_is_made_by_the_command() -> None:
    made = {picture.path for picture in PICTURES}
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.[ps][nv]g")}
    assert found == made


@pytest.mark.parametrize("change", ["code", "figures", "picture", "missing"])
def test_a_change_of_anything_behind_a_picture_makes_it_stale(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = [1.0]
    code = tmp_path / "code.py"
    code.write_text("1")
    picture = Picture(
        path="a.svg",
        draw=lambda path: path.write_text(f"<svg>{figures}</svg>") and None,
        files=("*.py",),
        rows=lambda: figures,
    )
    monkeypatch.setattr(catalog, "ROOT", tmp_path)
    monkeypatch.setattr(catalog, "MANIFEST", tmp_path / "manifest.json")
    monkeypatch.setattr(catalog, "PICTURES", (picture,))
    make()
    assert find_stale() == []
    if change == "code":
        code.write_text("2")
    elif change == "figures":
        figures[0] = 2.0
    elif change == "picture":
        (tmp_path / "a.svg").write_text("<svg>by hand</svg>")
    else:
        (tmp_path / "a.svg").unlink()
    assert len(find_stale()) == 1
    assert "a.svg" in find_stale()[0]
    make(("other.svg",))
    assert len(find_stale()) == 1, "only the named pictures are made"
    make()
    assert find_stale() == []


def test_figures_of_a_table_are_read_with_their_intervals() -> None:
    assert read_figures("**1.62x** [1.49, 2.16]") == [Figure(value=1.62, interval=(1.49, 2.16))]
    assert [figure.value for figure in read_figures("1.27, 1.51, **1.96**")] == [1.27, 1.51, 1.96]
    with pytest.raises(ValueError, match="equal"):
        read_figures("equal [0.9, 1.1]")
    page = "| a draft | 1 | 2 |\n| a draft of two | 3 | 4 |\n| b | 5 | 6 |"
    assert read_cells(page, "b |") == ["5", "6"]
    with pytest.raises(ValueError, match="2 rows"):
        read_cells(page, "a draft")
    with pytest.raises(ValueError, match="0 rows"):
        read_cells(page, "c")


def test_the_chart_of_speeds_shows_every_draft_at_both_loads() -> None:
    rows = charts.read_speeds(catalog.MEASUREMENTS.read_text())
    assert len(rows) == len(charts.SPEEDS) * len(charts.LOADS)
    assert all(row["value"] > 0 for row in rows)
    drawn = charts.draw_speeds(rows)
    for row in rows:
        assert f"{row['value']:.2f}" in drawn
    assert "prefers-color-scheme: dark" in drawn


def show(screen: Screen) -> list[str]:
    return ["".join(char for char, _ in row.cells).rstrip() for row in screen.rows]


def test_a_screen_shows_what_a_terminal_shows() -> None:
    screen = Screen(width=10)
    screen.write("abc\rX\r\n", 0.0)
    screen.write("0123456789ab\r\n", 1.0)
    screen.write("one\r\ntwo\r\n\x1b[2A\r\x1b[Kthree\x1b[B\r\n", 2.0)
    screen.write("\x1b[1mbold\x1b[0m \x1b[32mgreen\x1b[0m", 3.0)
    assert show(screen) == ["Xbc", "0123456789", "ab", "three", "two", "bold green"]
    assert screen.rows[5].cells[0] == ("b", "bold")
    assert screen.rows[5].cells[5] == ("g", "c2")
    assert screen.rows[3].changed_s == 2.0


def test_a_recording_has_the_commands_their_output_and_nothing_else(tmp_path: Path) -> None:
    script = "import sys, os; print(sys.stdout.isatty(), os.get_terminal_size().columns)"
    (tmp_path / "script.py").write_text(script)
    command = f"{sys.executable} script.py"
    cast = tmp_path / "a.cast"
    record((command, "printf '<b>'"), tmp_path, cast)
    header, *events = map(json.loads, cast.read_text().splitlines())
    assert (header["version"], header["width"]) == (2, terminal.COLUMNS)
    assert {event[1] for event in events} == {"o"}
    _, rows = play(cast)
    shown = "".join("".join(char for char, _ in row.cells) for row in rows)
    assert shown == f"$ {command}True {terminal.COLUMNS}$ printf '<b>'<b>"
    drawn = draw(cast)
    assert "&lt;b&gt;" in drawn
    assert re.search(r'viewBox="0 0 \d+ \d+"', drawn)


def test_a_command_that_fails_leaves_the_old_recording(tmp_path: Path) -> None:
    cast = tmp_path / "a.cast"
    cast.write_text("old")
    with pytest.raises(ValueError, match=r"exit 3.*status 3"):
        record(("exit 3",), tmp_path, cast)
    assert cast.read_text() == "old"


def test_long_pauses_are_shortened(tmp_path: Path) -> None:
    cast = tmp_path / "a.cast"
    header = {"version": 2, "width": 20, "height": 9, "title": "t"}
    lines = [header, [0.1, "o", "a\r\n"], [100.0, "o", "b\r\n"], [100.2, "o", "c\r\n"]]
    cast.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    _, rows = play(cast)
    assert [row.changed_s for row in rows] == pytest.approx([0.1, 0.7, 0.9])


def test_a_log_shows_its_news_and_the_status_after_each(tmp_path: Path) -> None:
    status = [f"{number} requests done, 0 running" for number in range(6)]
    lines = ["all files are in a", "note: b", "note: c", "ready: <d>", *status[:2]]
    lines += ["learner: serves v2", *status[2:]]
    log = tmp_path / "a.log"
    log.write_text("\n".join(lines))
    rows = read_log(log, "redraft up T")
    assert ["".join(char for char, _ in row.cells) for row in rows] == [
        *("$ redraft up T", "all files are in a", "...", "ready: <d>", status[0], "..."),
        *("learner: serves v2", status[2], "...", status[5]),
    ]
    assert "ready: &lt;d&gt;" in draw_log(log, "title", "redraft up T")


def test_a_long_line_of_a_log_is_wrapped_between_words(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(f"ready: {'word ' * 40}")
    first, *others = read_log(log, "redraft up T")[1:]
    assert all(len(row.cells) <= terminal.LOG_COLUMNS for row in (first, *others))
    assert {row.changed_s for row in others} == {first.changed_s}
    text = " ".join("".join(char for char, _ in row.cells).strip() for row in (first, *others))
    assert text == log.read_text().strip()
