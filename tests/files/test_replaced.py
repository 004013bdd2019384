"""Results of an earlier run are replaced only by complete ones, and never with other files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from redraft.files.artifact import find_foreign, publish
from redraft.files.kept import compute_once
from redraft.files.replaced import (
    PREVIOUS,
    drop_previous,
    find_obstacle,
    keep_previous,
    require_apart,
    require_replaceable,
    start_over,
    undo_move,
)


@dataclass(frozen=True)
class Inner:
    source: str


@dataclass(frozen=True)
class Settings:
    data: Inner
    output: Path


def make_published(folder: Path, text: str = "old") -> Path:
    publish(folder, lambda partial: (partial / "weights").write_text(text), {})
    return folder


def read_tree(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_results_are_set_aside_and_dropped_when_the_new_ones_are_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_text("old")
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "weights").write_text("old")
    (tmp_path / "notes").write_text("mine")
    results, previous = [tmp_path / "report.json", tmp_path / "draft"], tmp_path / PREVIOUS
    keep_previous(results, previous)
    assert str(previous) in capsys.readouterr().out
    assert read_tree(previous) == {"draft/weights": "old", "report.json": "old"}
    (tmp_path / "report.json").write_text("interrupted")
    keep_previous(results, previous)  # the complete ones stay, the interrupted ones go
    assert read_tree(previous) == {"draft/weights": "old", "report.json": "old"}
    assert not (tmp_path / "report.json").exists()
    drop_previous(previous)
    assert read_tree(tmp_path) == {"notes": "mine"}


def test_a_move_that_was_killed_is_undone(tmp_path: Path) -> None:
    moving = tmp_path / f"{PREVIOUS}.partial"
    moving.mkdir()
    (moving / "report.json").write_text("old")
    (tmp_path / "metrics.jsonl").write_text("old")
    undo_move(tmp_path / PREVIOUS)
    assert read_tree(tmp_path) == {"metrics.jsonl": "old", "report.json": "old"}
    assert not moving.exists()


def test_what_a_command_reads_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = make_published(tmp_path / "out")
    (tmp_path / "link").symlink_to(out)
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "weights").symlink_to(out / "weights")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    for read in ("out", "out/weights", "./other/../out", "link", "link/weights", "snapshot"):
        settings = Settings(data=Inner(read), output=out)
        assert f"--data.source {read} " in find_obstacle([Path("out")], settings)
        for overwrite in (True, False):
            with pytest.raises(FileExistsError, match=r"--data\.source") as refused:
                require_replaceable(out, settings, overwrite=overwrite)
            assert "--overwrite" not in str(refused.value)
    assert "--draft" in find_obstacle([out], {"draft": ("v1=out",)})
    for read in ("other", "owner/name", ""):
        require_replaceable(out, Settings(data=Inner(read), output=out), overwrite=True)


def test_a_folder_with_files_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    out = make_published(tmp_path / "out")
    assert find_foreign(out) is None
    (out / "deep").mkdir()
    (out / "deep" / "notes.md").write_text("mine")
    assert find_foreign(out) == out / "deep" / "notes.md"
    with pytest.raises(FileExistsError, match=r"notes\.md"):
        publish(out, lambda partial: (partial / "weights").write_text("new"), {}, overwrite=True)
    assert (out / "weights").read_text() == "old"
    os.rename(out / "deep" / "notes.md", tmp_path / "notes.md")
    publish(out, lambda partial: (partial / "weights").write_text("new"), {}, overwrite=True)
    assert (out / "weights").read_text() == "new"


def test_measurements_start_over_beside_nothing_but_measurements(tmp_path: Path) -> None:
    compute_once(tmp_path / "kept" / "float32", "rows", ["a"], int, lambda: 1)
    start_over(tmp_path, "kept", {})
    assert not (tmp_path / "kept").exists()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"letter\.txt"):
        start_over(tmp_path, "kept", {})
    assert (tmp_path / "kept" / "letter.txt").read_text() == "mine"


def test_numbers_are_written_in_place_of_nothing_that_is_read(tmp_path: Path) -> None:
    source, folder = tmp_path / "rows.json", tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    source.write_text("[]")
    (tmp_path / "link.json").symlink_to(source)
    for read, file in (
        (source, source),
        (source, tmp_path / "link.json"),
        (tmp_path / "link.json", source),
        (folder, folder / "config.json"),
        (folder, folder),
    ):
        with pytest.raises(ValueError, match=re.escape(str(file))):
            require_apart(file, Settings(data=Inner(str(read)), output=tmp_path))
    old = tmp_path / "old.json"
    old.write_text("{}")
    for file in (None, old, folder / "new.json"):
        require_apart(file, Settings(data=Inner(str(folder)), output=tmp_path))
