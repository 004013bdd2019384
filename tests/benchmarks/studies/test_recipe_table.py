"""The table of settings: the rows, and the comparison of the defaults with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.studies.recipe import (
    COMMITTED,
    DEFAULT,
    SETTINGS,
    Config,
    Setting,
    find_unadopted,
    make_course,
    make_table,
)
from benchmarks.time_to_tau.bench import Judged
from benchmarks.time_to_tau.course import Finished, Mark, make_settings


def make_judged(name: str, seed: int, tau: float) -> Judged:
    """A training whose last head has this tau, a little more on every second question."""
    course = make_course(Config(), "target", name, Setting(group=""), seed)
    mark = Mark(minutes=10.0, cpu_minutes=19.0, steps=9, tokens=900, labels=500, head="head-01")
    finished = Finished(course=course, settings={}, planned_steps=9, marks=[mark])
    accepted = 10 * (tau - 1) + 0.1 * seed
    return Judged(finished, [np.array([[accepted, 10.0], [accepted + 1, 10.0]] * 8)], None)


def test_a_row_has_the_gain_over_the_default_paired_by_question_and_seed() -> None:
    judged = {
        DEFAULT: [make_judged(DEFAULT, seed, 1.4) for seed in range(3)],
        "3 draft steps": [make_judged("3 draft steps", seed, 1.5) for seed in range(3)],
    }
    default, row = make_table("eagle3", judged)
    assert default["gain"] is None
    assert default["tau"]["value"] == pytest.approx(1.46)
    # Questions and seeds differ alike on both sides.
    assert row["gain"] == pytest.approx({"value": 0.1, "low": 0.1, "high": 0.1})
    assert row["flags"] == (
        *("--head.num-steps", "3"),
        *("--prove.num-speculative-tokens", "1"),
    )
    assert row["labels"] == [500, 500, 500]


def make_row(setting: str, low: float, high: float, family: str = "eagle3") -> dict[str, Any]:
    row = SETTINGS[family][setting]
    gain = {"value": (low + high) / 2, "low": low, "high": high}
    return {"setting": setting, "flags": list(row.flags), "group": row.group, "gain": gain}


def test_a_better_setting_that_is_no_default_is_named() -> None:
    table = {
        "family": "eagle3",
        "rows": [
            make_row("AdamW, 1e-3", 0.01, 0.05),
            make_row("AdamW, 2e-3", 0.02, 0.08),  # the best of its group
            make_row("constant rate", -0.01, 0.05),  # not proven
            {"setting": "default", "flags": [], "group": "", "gain": None},
        ],
    }
    assert find_unadopted(table) == ["AdamW, 2e-3"]


def test_a_better_setting_that_is_the_default_is_not_named() -> None:
    row = {**make_row("Muon, 1e-3", 0.01, 0.05), "flags": ["--optim.lr", "5e-4"]}
    assert find_unadopted({"family": "eagle3", "rows": [row]}) == []


@pytest.mark.parametrize("family", list(SETTINGS))
def test_every_setting_is_understood_by_the_trainer(family: Any, tmp_path: Path) -> None:
    cfg = Config(family=family, output=tmp_path)
    folders = set()
    for name, setting in cfg.chosen.items():
        course = make_course(cfg, "target", name, setting, 0)
        make_settings(course)  # raises for a wrong flag
        folders.add(course.output)
    assert len(folders) == len(SETTINGS[family]) + 1


def test_a_setting_brings_what_it_is_compared_with() -> None:
    cfg = Config(family="dflash", settings=("speculators, D-PACE",))
    assert list(cfg.chosen) == [DEFAULT, "speculators, fixed decay", "speculators, D-PACE"]
    with pytest.raises(ValueError, match="no setting 'Adam'"):
        Config(settings=("Adam",))


@pytest.mark.skipif(not COMMITTED.is_file(), reason="no table was measured yet")
def test_the_defaults_are_the_best_settings_of_the_committed_table() -> None:
    assert find_unadopted(json.loads(COMMITTED.read_text())) == []
