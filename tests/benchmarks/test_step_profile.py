"""The profile of a step: its cases, parts and counts, on an engine that is made up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.step_profile import (
    PARTS,
    Config,
    count,
    describe,
    environment_of,
    list_cases,
    time_parts,
)
from redraft.engine.counts import tau


class Scheduler:
    def schedule(self) -> None:
        pass

    def update_from_output(self) -> None:
        pass


class Runner:
    def execute_model(self) -> None:
        pass

    def _sample(self) -> None:
        pass

    def propose_draft_token_ids(self) -> None:
        pass


class Core:
    """A step calls each part once, runs three functions of ours and two copies of a tensor."""

    def __init__(self) -> None:
        self.scheduler, runner = Scheduler(), Runner()
        worker = SimpleNamespace(model_runner=runner)
        driver = SimpleNamespace(worker=worker)
        self.model_executor = SimpleNamespace(driver_worker=driver)
        self.runner = runner

    def step(self) -> None:
        self.scheduler.schedule()
        self.runner.execute_model()
        self.runner._sample()
        self.runner.propose_draft_token_ids()
        self.scheduler.update_from_output()
        for _ in range(3):
            tau([0.5])
        numbers = torch.ones(2)
        torch.cat([numbers.clone(), numbers])


def test_every_part_is_timed_and_the_methods_are_given_back() -> None:
    core = Core()
    ms = time_parts(core, core.step, steps=3)
    assert set(ms) == {*PARTS, "step", "between"}
    assert ms["step"] == pytest.approx(ms["between"] + sum(ms[name] for name in PARTS))
    assert not vars(core.scheduler)
    assert not vars(core.runner)


def test_calls_and_operations_are_those_of_one_step() -> None:
    core = Core()
    found = count(core.step, steps=5)
    assert found["own_calls"] == 3
    assert found["own_by_function"] == {"redraft/engine/counts.py:tau": 3}
    assert found["calls"] > 8
    assert found["operations"] == 3  # ones, clone and cat
    assert found["copies"] == 2
    row = {"name": "made up", "ms": {"step": 1.0, "between": 0.5, "target": 0.5}, **found}
    assert describe(row).endswith("ours 3; 3 operations, 2 copies")


def test_the_cases_are_plain_engines_and_the_same_under_the_plugin(tmp_path: Path) -> None:
    cfg = Config(draft=tmp_path, num_speculative_tokens=(3,), output=tmp_path)
    cases = {case.name: case for case in list_cases(cfg, "target")}
    assert list(cases) == [
        "no draft", "3 tokens", "3 tokens, plugin", "3 tokens, plugin, all recorded",
        "3 tokens, plugin, pace",
    ]  # fmt: skip
    assert cases["no draft"].draft is None
    assert environment_of(cases["3 tokens"])["VLLM_PLUGINS"] == "redraft_engine_wait"
    settings = {
        name: json.loads(environment_of(case)["REDRAFT_SETTINGS"])
        for name, case in cases.items()
        if case.plugin
    }
    assert settings["3 tokens, plugin"]["capture"]["fraction"] == 0
    assert settings["3 tokens, plugin, all recorded"]["capture"]["fraction"] == 1
    assert settings["3 tokens, plugin, pace"]["pace"] == "3"


def test_a_draft_of_no_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Config(draft=tmp_path, num_speculative_tokens=(0,))
