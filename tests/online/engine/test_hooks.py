"""The table of the names of vLLM that redraft wraps, and its installation."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from redraft.eval.engine import hooks
from redraft.eval.engine.hooks import METHODS, TABLE, Hook, install


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
    for name, value in {
        "TABLE": (*rows, gone, Hook(**vars(rows[0]) | {"feature": "gone"})),
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


def test_every_row_names_a_function_of_redraft_and_a_reason():
    for name in [hook.by for hook in TABLE] + [by for _, by in METHODS.values()]:
        assert callable(hooks._load(name)), name
    for hook in TABLE:
        assert {name.rpartition(":")[2].rpartition(".")[2] for name in hook.names} == {
            hook.attribute
        }
        assert hook.why
    rows = [(hook.feature, name) for hook in TABLE for name in hook.names]
    assert len(rows) == len(set(rows)), "a feature wraps a name once"
    asked = {hook.feature for hook in TABLE} | {feature for feature, _ in METHODS.values()}
    assert {feature.name for feature in hooks.FEATURES} <= asked
    assert all(callable(hooks._load(each.asked)) for each in hooks.FEATURES if each.asked)


def test_the_calls_that_several_features_see_are_in_this_order():
    """The first is called first; for what each needs of the next, see the rows."""
    found: dict[str, list[str]] = {}
    for hook in TABLE:
        for name in hook.names:
            found.setdefault(name, []).append(hook.feature)
    several = {name.rpartition(":")[2]: order for name, order in found.items() if len(order) > 1}
    assert several == {
        "Scheduler.schedule": ["seeds", "pace"],
        "Scheduler.update_from_output": ["domains", "pace"],
        "EngineCore.collective_rpc": ["pace", "labels"],
        "WorkerWrapperBase.initialize_from_config": ["worker", "pace", "lookups"],
    }
