"""The table of the names of vLLM that redraft wraps, and its installation."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from redraft.engine import hooks
from redraft.engine.hooks import METHODS, TABLE, Attached, Hook, attach, hook, hooked, install


@pytest.fixture
def engine(monkeypatch):
    """A class of vLLM with a method whose answer names who was called, in order."""

    class Engine:
        def step(self, said):
            return [*said, "vLLM"]

    module = ModuleType("vllm.made_up")
    module.Engine = Engine
    monkeypatch.setitem(sys.modules, "vllm.made_up", module)
    ours = ModuleType("redraft.made_up")
    for name in ("first", "second"):
        setattr(ours, name, naming(name))
    ours.answer = lambda engine: "answer"
    monkeypatch.setitem(sys.modules, "redraft.made_up", ours)
    rows = [
        Hook(
            names=("made_up:Engine.step",),
            feature=name,
            by=f"made_up:{name}",
            why="nobody is named",
        )
        for name in ("first", "second")
    ]
    gone = Hook(names=("made_up:Engine.gone",), feature="gone", by="made_up:first", why="")
    objects = [Hook(**vars(row) | {"of_object": True}) for row in rows]
    for name, value in {
        "TABLE": (*objects, *rows, gone, Hook(**vars(rows[0]) | {"feature": "gone"})),
        "METHODS": {"made_up:Engine.redraft_answer": ("second", "made_up:answer")},
        "_installed": set(),
        "_chains": {},
    }.items():
        monkeypatch.setattr(hooks, name, value)
    return Engine


def naming(name):
    def wrap(call):
        return lambda engine, said: call(engine, [*said, name])

    return wrap


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first", "second")])
def test_the_table_decides_the_order_of_the_calls_and_not_the_installation(engine, order):
    for feature in order:
        install(feature)
    assert engine().step([]) == ["first", "second", "vLLM"]
    assert engine().redraft_answer() == "answer"
    assert hooks.is_installed("second")


def test_a_feature_whose_name_vllm_lacks_changes_nothing(engine):
    install("second")
    with pytest.raises(AttributeError, match="gone"):
        install("gone")
    assert engine().step([]) == ["second", "vLLM"]
    assert not hooks.is_installed("gone")


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first", "first")])
def test_methods_of_an_object_are_wrapped_in_the_same_order_and_of_that_object_alone(engine, order):
    install("second")
    one, other = engine(), engine()

    def of_one(name):
        return lambda call: lambda said: call([*said, name])

    for feature in order:
        hook(one, feature, step=of_one(feature))
    assert one.step([]) == ["first", "second", "second", "vLLM"]
    assert other.step([]) == ["second", "vLLM"], "of the class alone"
    attach(one, Attached())  # another value keeps the wrappers
    with hooked(one, "second", step=lambda _: lambda said: "for a block"):
        assert one.step([]) == "for a block"
    assert one.step([]) == ["first", "second", "vLLM"]


def test_the_call_of_one_object_is_wrapped_and_not_that_of_its_class():
    class Sampler:
        def __call__(self, rows):
            return rows

    one, other = Sampler(), Sampler()
    hook(one, "capture", __call__=lambda call: lambda sampler, rows: [call(sampler, rows)])
    assert (one(1), other(1), type(one).__name__) == ([1], 1, "Sampler")
    assert isinstance(one, Sampler)


def test_every_row_names_a_function_of_redraft_and_a_reason():
    for name in [row.by for row in TABLE] + [by for _, by in METHODS.values()]:
        assert callable(hooks._load(name)), name
    for row in TABLE:
        assert {name.rpartition(":")[2].rpartition(".")[2] for name in row.names} == {row.attribute}
        assert row.why
    rows = [(row.feature, name) for row in TABLE for name in row.names]
    assert len(rows) == len(set(rows)), "a feature wraps a name once"
    asked = {row.feature for row in TABLE if not row.of_object} | {
        feature for feature, _ in METHODS.values()
    }
    assert {feature.name for feature in hooks.FEATURES} <= asked
    assert all(callable(hooks._load(each.asked)) for each in hooks.FEATURES if each.asked)


def test_the_calls_that_several_features_see_are_in_this_order():
    """The first is called first; for what each needs of the next, see the rows."""
    found: dict[str, list[str]] = {}
    for row in TABLE:
        for name in row.names:
            if row.feature != "parity":  # in a process of its own
                found.setdefault(name, []).append(row.feature)
    several = {name.rpartition(":")[2]: order for name, order in found.items() if len(order) > 1}
    assert several == {
        "GPUModelRunner.sample_tokens": ["proposers", "capture"],
        "Scheduler.schedule": ["seeds", "pace"],
        "Scheduler.update_from_output": ["domains", "pace"],
        "EngineCore.collective_rpc": ["pace", "labels"],
        "WorkerWrapperBase.initialize_from_config": ["worker", "pace", "late_drafts", "lookups"],
        "Worker.finish_weight_update": ["pushes", "target_watch"],
        "LlamaForCausalLM.load_weights": ["pushes", "target_watch"],
        "GPUModelRunner._on_request_state_removed": ["capture", "live_counts"],
        "GPUModelRunner.execute_model": ["late_drafts", "reread"],
        "GPUModelRunner.propose_draft_token_ids": [
            "late_drafts",
            "capture",
            "proposers",
            "pace",
            "lookups",
        ],
        "GPUModelRunner.add_requests": ["capture", "lookups"],
        "GPUModelRunner.finish_requests": ["capture", "lookups"],
        "StandaloneARSpeculator.propose": ["capture", "pace", "lookups"],
        "TargetDependentARSpeculator.propose": ["capture", "pace", "lookups"],
        "DFlashSpeculator.propose": ["capture", "pace", "lookups"],
        "NgramGPUSpeculator.propose": ["capture", "pace", "lookups"],
    }
