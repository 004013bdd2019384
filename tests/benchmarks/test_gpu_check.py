"""The check of GPUs, run on the CPU where it needs no card.

Its settings are compared with those of `redraft plan`.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import tyro

from benchmarks.gpu import check, engines
from benchmarks.gpu.check import PHASES, Config, Ended, group_phases, main, run_phase
from benchmarks.gpu.results import Results
from benchmarks.training import gpu
from redraft.distill.plan.operations import DEVICES
from redraft.heads.catalog import FamilyName
from redraft.online.engine.config import is_enabled, read_config
from redraft.recipes.plan.count import count, make_plan, ways_to_fit
from redraft.recipes.plan.plan import PlanConfig


def read(folder: Path, name: str) -> dict[str, Any]:
    return dict(json.loads((folder / f"{name}.json").read_text()))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_on_a_cpu_the_check_writes_the_results_of_every_phase_that_needs_no_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "PHASES", tuple(replace(phase, limit_s=1700.0) for phase in PHASES))
    cfg = Config(
        output=tmp_path,
        minutes=30,
        tests="norm_under_autocast or kernels_of_capture_find",
        steps=2,
        trainings=("medusa",),
    )
    main(cfg)
    assert set(read(tmp_path, "facts")["versions"]) >= {"torch", "vllm"}
    assert read(tmp_path, "tests")["not passed"] == {}
    assert read(tmp_path, "tests")["outcomes"]["PASSED"] >= 1
    train = read(tmp_path, "train")
    assert train["medusa"]["exported"]
    assert train["medusa, resumed"]["difference"] == 0
    assert "training in" in train["medusa"]["start"]
    assert read(tmp_path, "micro")["rows_without_a_number"]["forms agree"]
    assert not any("error" in str(value)[:20] for value in read(tmp_path, "micro").values())
    out = capsys.readouterr().out
    assert [out.count(f"{phase.name} ") >= 1 for phase in PHASES] == [True] * len(PHASES)
    assert out.count("left out") == 3


def test_phases_that_measure_no_time_run_side_by_side() -> None:
    names = [[phase.name for phase in group] for group in group_phases(PHASES)]
    assert names == [["facts"], ["tests", "train"], ["micro"], ["step"], ["loss"], ["engine"]]


def test_a_phase_is_stopped_at_its_limit_and_keeps_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "LEFT_S", 0.01)
    phase = replace(PHASES[0], limit_s=0.1)
    ended = run_phase(phase, Config(output=tmp_path), "cpu", 60.0)
    assert ended == Ended(name="facts", outcome="stopped after 0 s", seconds=ended.seconds)
    assert run_phase(PHASES[0], Config(output=tmp_path), "cpu", 0.0).outcome == "left out"


def test_every_engine_of_the_check_has_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    environments: list[dict[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], timeout: float) -> Any:
        environments.append(env)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(
        engines, "subprocess", SimpleNamespace(run=run, TimeoutExpired=TimeoutError)
    )
    cfg = Config(output=tmp_path)
    engines.measure(cfg, Results(tmp_path / "engine.json"))
    assert [is_enabled(env) for env in environments] == [True] * 2 * len(cfg.drafts)
    assert [read_config(env).capture.is_on for env in environments] == [True, False] * len(
        cfg.drafts
    )


SIZES = {"batch_size": 1, "sequence_length": 64}


@pytest.mark.parametrize("family", get_args(FamilyName))
def test_the_benchmark_runs_the_step_that_redraft_plan_counts(family: Any) -> None:
    """Of every family, with nothing but its name and, to count fast, the sizes of a batch.

    Batch, recomputation, types, optimizer and options. The flags that the benchmark prints beside
    its result count the same step.
    """
    own = gpu.choose_sizes(gpu.Config(**SIZES), family, None)
    planned = make_plan(PlanConfig(family=family, **SIZES))
    assert str(make_plan(own)) == str(planned)
    assert str(make_plan(tyro.cli(PlanConfig, args=shlex.split(gpu.write_flags(own))))) == str(
        planned
    )
    assert (planned.dtype, planned.autocast) == (torch.bfloat16, True)


@pytest.mark.slow
@pytest.mark.parametrize("family", get_args(FamilyName))
def test_a_step_is_changed_for_the_benchmark_only_if_redraft_plan_says_that_it_does_not_fit(
    family: Any,
) -> None:
    own = gpu.choose_sizes(gpu.Config(), family, None)
    planned = PlanConfig(family=family)
    if (
        not count(own).on["H100"].fits
    ):  # weights and optimizer state alone are too much beside the target
        assert own.batch_size == 1
        assert next(ways_to_fit(planned, DEVICES[0])).startswith("--signal ")
    elif count(planned).on["H100"].fits:
        assert str(make_plan(own)) == str(make_plan(planned))
    else:
        changed = f"--batch-size {own.batch_size}" if own.batch_size else "--gradient-checkpointing"
        assert changed in next(ways_to_fit(planned, DEVICES[0]))
