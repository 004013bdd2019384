"""The folder of a run: what may change between its beginning and its resumption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distill.loop import make_accelerator
from distill.run import Run


def open_run(folder: Path, resume: bool = False, **config: Any) -> Run:
    return Run.open(folder, config, make_accelerator(1, None, None), resume=resume, overwrite=False)


def test_a_run_is_resumed_though_its_teachers_moved(tmp_path: Path) -> None:
    open_run(tmp_path / "run", signal={"kind": "endpoint", "url": ("http://a:1", "http://b:2")}, seed=1)
    open_run(tmp_path / "run", resume=True, signal={"kind": "endpoint", "url": ("http://c:3",)}, seed=1)
    with pytest.raises(ValueError, match=r"cannot resume .*: signal was .*'endpoint'.* and is now .*'model'"):
        open_run(tmp_path / "run", resume=True, signal={"kind": "model", "url": ()}, seed=1)
    with pytest.raises(ValueError, match="seed was 1 and is now 2"):
        open_run(tmp_path / "run", resume=True, signal={"kind": "endpoint", "url": ("http://c:3",)}, seed=2)
