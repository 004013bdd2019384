"""How long the fresh records of a step have waited, which the journal keeps."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redraft.online.learning.config import Replay, Training
from redraft.online.learning.trainer import Trainer


def take_step(ages_s: list[float], folder: Path) -> Trainer:
    """A step on records of these ages, without a model."""
    now_s = time.time()
    fresh = [
        SimpleNamespace(seq=number, record=SimpleNamespace(time_s=now_s - age_s))
        for number, age_s in enumerate(ages_s, 1)
    ]
    buffer: Any = SimpleNamespace(
        bound_lag=lambda *_: (0, 0), fresh=lambda *_: fresh, replay=lambda *_, **__: []
    )
    candidate: Any = SimpleNamespace(accelerator=SimpleNamespace(num_processes=1), paused_s=5.0)
    registry: Any = None
    cfg = Training(fresh_per_step=len(ages_s))
    trainer = Trainer(cfg, Replay(), buffer, registry, candidate, folder)

    def do(*_: Any) -> Any:
        candidate.paused_s += 2.0
        return SimpleNamespace(skipped=False)

    ranks: Any = SimpleNamespace(do=do)
    trainer.ranks = ranks
    trainer.step()
    return trainer


def test_the_wait_is_the_mean_age_of_the_fresh_records(tmp_path: Path) -> None:
    trainer = take_step([60.0, 30.0, 0.0], tmp_path)
    assert trainer.waited_s == pytest.approx(30.0, abs=0.5)
    assert trainer.progress.through == 3


def test_the_pauses_of_a_step_are_its_own(tmp_path: Path) -> None:
    trainer = take_step([0.0], tmp_path)
    assert trainer.paused_s == 2.0
    assert 0 < trainer.step_s < 10


def test_a_server_whose_clock_is_ahead_gives_no_negative_wait(tmp_path: Path) -> None:
    assert take_step([-100.0], tmp_path).waited_s == 0.0
