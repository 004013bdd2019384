"""The folder of a run: what may change between its beginning and its resumption."""

from __future__ import annotations

import datetime
import errno
import json
import math
import os
import shutil
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_learner import FORKS

from redraft.distill.train import run_folder
from redraft.distill.train.loop import make_accelerator
from redraft.distill.train.run_folder import RunFolder


def open_run(folder: Path, **config: Any) -> RunFolder:
    run = RunFolder.open(folder, config, make_accelerator(1, None, None), overwrite=False)
    (folder / "metrics.jsonl").touch()  # work, which is not lost without --overwrite
    return run


def test_a_run_is_resumed_though_its_teachers_moved(tmp_path: Path) -> None:
    open_run(
        tmp_path / "run", signal={"kind": "endpoint", "url": ("http://a:1", "http://b:2")}, seed=1
    )
    moved = {"kind": "endpoint", "url": ("http://c:3",), "storage": "s3://elsewhere"}
    open_run(tmp_path / "run", signal=moved, seed=1)
    with pytest.raises(ValueError, match=r"'endpoint'.*'model'"):
        open_run(tmp_path / "run", signal={"kind": "model", "url": ()}, seed=1)
    with pytest.raises(ValueError, match=r"seed.*1.*2"):
        open_run(tmp_path / "run", signal={"kind": "endpoint", "url": ("http://c:3",)}, seed=2)


def test_a_run_is_resumed_with_its_layers_compiled_or_not(tmp_path: Path) -> None:
    open_run(tmp_path / "run", loop={"steps": 3, "compile": False})
    for compiles in (True, False):
        open_run(tmp_path / "run", loop={"steps": 3, "compile": compiles})
    with pytest.raises(ValueError, match=r"\bloop\.steps\b[^{]*\b3\b[^{]*\b4\b"):
        open_run(tmp_path / "run", loop={"steps": 4, "compile": False})


def test_a_resumed_run_keeps_the_date_of_its_start(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run")
    assert run.date == datetime.date.today()
    path = tmp_path / "run" / "run.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "date": "2024-02-29"}))
    resumed = open_run(tmp_path / "run")
    assert resumed.date == datetime.date(2024, 2, 29)


def test_the_newest_checkpoint_is_that_of_the_last_step_beyond_a_million(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-000100-good").mkdir(parents=True)
    for step in (999_998, 999_999, 1_000_000):
        run.save(step, lambda folder, step=step: (folder / "step").write_text(str(step)))
    read: list[str] = []
    step = run.restore(lambda folder: read.append((folder / "step").read_text()))
    assert (step, read) == (1_000_000, ["1000000"])
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert kept == {"step-000100-good", "step-999999", "step-1000000"}


def test_a_damaged_checkpoint_is_deleted_to_resume_from_the_one_before(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run")
    for step in (1, 2):
        run.save(step, lambda folder: (folder / "step").write_text("whole"))
    newest = tmp_path / "run/checkpoints/step-000002"
    for damage in ("cut", "other"):
        (newest / "step").write_text(damage)
        with pytest.raises(ValueError, match=rf"^{newest}/step .*: delete {newest} to resume"):
            run.restore(lambda _: None)
    shutil.rmtree(newest)
    assert run.restore(lambda _: None) == 1


def test_metrics_that_are_not_finite_are_left_out_of_a_resumed_run(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run")
    lines = [{"step": 0, "alpha": [0.5, math.nan], "lr": 1.0}, {"step": 0, "loss": math.inf}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "run/metrics.jsonl").write_text(text)
    run.restore(lambda _: None)
    assert run.metrics == [{"step": 0, "lr": 1.0}, {"step": 0}]


def test_a_run_judged_by_acceptance_is_resumed_with_the_same_number_of_draft_tokens(
    tmp_path: Path,
) -> None:
    def resume(folder: str, num_tokens: int, stop_by: str) -> None:
        loop, prove = (
            {"steps": 3, "compile": None, "stop_by": stop_by},
            {"num_speculative_tokens": num_tokens},
        )
        open_run(tmp_path / folder, loop=loop, prove=prove)

    for folder, stop_by in (("by-steps", "steps"), ("by-acceptance", "acceptance")):
        resume(folder, 6, stop_by)
    resume("by-steps", 2, "steps")
    with pytest.raises(ValueError, match=r"--prove\.num-speculative-tokens\b.*\b6\b.*\b2\b"):
        resume("by-acceptance", 2, "acceptance")


def test_every_rank_reads_the_checkpoint_that_the_main_process_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank on another machine, whose view of the shared folder is seconds old."""
    run = open_run(tmp_path / "run")
    run.save(500, lambda folder: (folder / "step").write_text("500"))
    answers = iter(["step-001000", [{"step": 1000}]])
    monkeypatch.setattr(
        run_folder,
        "broadcast_object_list",
        lambda told, from_process: told.insert(1, next(answers)),
    )
    late = RunFolder(run.folder, SimpleNamespace(is_main_process=False))  # type: ignore[arg-type]
    read: list[str] = []
    assert late.restore(lambda folder: read.append(folder.name)) == 1000
    assert (read, late.metrics) == (["step-001000"], [{"step": 1000}])


def test_a_checkpoint_is_not_continued_on_data_or_a_target_that_changed_under_one_name(
    tmp_path: Path,
) -> None:
    run = open_run(tmp_path / "run")
    run.confirm(lambda: {"target": "a", "data": "b"})
    run.confirm(lambda: {"target": "a", "data": "c"})  # no step was trained
    run.save(1, lambda folder: (folder / "step").touch())
    again = open_run(tmp_path / "run")
    again.confirm(lambda: {"target": "a", "data": "c"})
    again.confirm(lambda: {"target": "a", "data": "c", "start": "d"})
    for changed in ("target", "data", "start"):
        with pytest.raises(ValueError, match=changed):
            again.confirm(
                lambda changed=changed: {
                    "target": "a",
                    "data": "c",
                    "start": "d",
                    changed: "another",
                }
            )


def open_when_told(told: Connection, folder: Path) -> None:
    for overwrite in (False, True, False, True):
        told.recv()
        try:
            RunFolder.open(folder, {}, make_accelerator(1, None, None), overwrite=overwrite)
        except ValueError as error:
            told.send(str(error))
        else:
            told.send("opened")


def test_a_run_has_one_process_that_writes_it(tmp_path: Path) -> None:
    """Also with --overwrite: nothing of the other's run is deleted."""
    run = open_run(tmp_path / "run")
    run.save(1, lambda folder: (folder / "step").write_text("1"))
    mine, its = FORKS.Pipe()
    other = FORKS.Process(target=open_when_told, args=(its, run.folder))
    other.start()

    def open_elsewhere() -> Any:
        mine.send("open")
        assert mine.poll(300)
        return mine.recv()

    assert all(str(run.folder) in open_elsewhere() for _ in range(2))
    assert run.restore(lambda folder: None) == 1
    del run
    assert [open_elsewhere(), open_elsewhere()] == ["opened", "opened"]
    other.join()
    assert other.exitcode == 0


def test_a_run_is_replaced_when_it_begins_and_removed_when_the_new_one_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    old = open_run(folder, seed=1)
    old.save(3, lambda partial: (partial / "step").write_text("old"))
    (folder / "notes.md").write_text("mine")
    before = sorted(folder.rglob("*"))

    def reopen(**config: Any) -> RunFolder:
        accelerator = make_accelerator(1, None, None)
        return RunFolder.open(folder, config, accelerator, overwrite=True)

    reopen(seed=2).confirm(lambda: {"data": "b"})
    assert sorted(folder.rglob("*")) == before, "whatever is refused from here on loses nothing"
    assert open_run(folder, seed=1).restore(lambda _: None) == 3

    for _ in range(2):  # the second one replaces an interrupted one
        run = reopen(seed=2)
        run.confirm(lambda: {"data": "b"})
        run.begin()
        assert run.restore(lambda _: None) == 0
        run.save(1, lambda partial: (partial / "step").write_text("new"))
        previous = folder / ".previous"
        assert str(previous) in capsys.readouterr().out
        assert (previous / "checkpoints/step-000003/step").read_text() == "old"
    about = json.loads((folder / "run.json").read_text())
    assert (about["config"], about["inputs"]) == ({"seed": 2}, {"data": "b"})
    resumed = RunFolder.open(folder, {"seed": 2}, make_accelerator(1, None, None), overwrite=False)
    assert resumed.restore(lambda _: None) == 1
    resumed.complete()
    assert not previous.exists()
    assert (folder / "notes.md").read_text() == "mine"


def test_a_run_that_holds_its_input_or_files_of_others_is_not_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = open_run(folder, start_from=None)
    run.save(3, lambda partial: (partial / "step").write_text("old"))
    checkpoint = folder / "checkpoints" / "step-000003"

    def refuse(match: str, **config: Any) -> None:
        for overwrite in (True, False):
            with pytest.raises(ValueError, match=match) as refused:
                RunFolder.open(folder, config, make_accelerator(1, None, None), overwrite=overwrite)
            assert "--overwrite" not in str(refused.value)
        assert (checkpoint / "step").read_text() == "old"

    (tmp_path / "link").symlink_to(checkpoint)
    refuse("start_from|--start-from", start_from=str(checkpoint))
    refuse("start_from|--start-from", start_from=str(tmp_path / "link"))
    (folder / "checkpoints" / "step-000003-good").mkdir()
    refuse("step-000003-good|a different run", start_from="")


def test_a_run_begins_where_no_file_can_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.lockf", without)
    open_run(tmp_path / "run")
    warning = capsys.readouterr().out
    assert f"{tmp_path}/run/.lock" in warning
    assert os.strerror(errno.ENOSYS) in warning
    assert "--output" in warning
