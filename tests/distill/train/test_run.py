"""The folder of a run: what may change between its beginning and its resumption."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from redraft.distill.run.run_folder import RunFolder
from redraft.distill.train.loop import make_accelerator


def open_run(folder: Path, resume: bool = False, **config: Any) -> RunFolder:
    return RunFolder.open(folder, config, make_accelerator(1, None, None), resume=resume, overwrite=False)


def test_a_run_is_resumed_though_its_teachers_moved(tmp_path: Path) -> None:
    open_run(tmp_path / "run", signal={"kind": "endpoint", "url": ("http://a:1", "http://b:2")}, seed=1)
    moved = {"kind": "endpoint", "url": ("http://c:3",), "storage": "s3://elsewhere"}
    open_run(tmp_path / "run", resume=True, signal=moved, seed=1)
    with pytest.raises(ValueError, match=r"'endpoint'.*'model'"):
        open_run(tmp_path / "run", resume=True, signal={"kind": "model", "url": ()}, seed=1)
    with pytest.raises(ValueError, match=r"seed.*1.*2"):
        open_run(tmp_path / "run", resume=True, signal={"kind": "endpoint", "url": ("http://c:3",)}, seed=2)


def test_a_run_is_resumed_with_its_layers_compiled_or_not(tmp_path: Path) -> None:
    open_run(tmp_path / "run", loop={"steps": 3, "compile": False})
    for compiles in (True, False):
        open_run(tmp_path / "run", resume=True, loop={"steps": 3, "compile": compiles})
    with pytest.raises(ValueError, match="loop was"):
        open_run(tmp_path / "run", resume=True, loop={"steps": 4, "compile": False})


def test_a_resumed_run_keeps_the_date_of_its_start(tmp_path: Path) -> None:
    run = open_run(tmp_path / "run")
    assert run.date == datetime.date.today()
    path = tmp_path / "run" / "run.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "date": "2024-02-29"}))
    resumed = open_run(tmp_path / "run", resume=True)
    assert resumed.date == resumed.beside("ce-baseline").date == datetime.date(2024, 2, 29)


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
