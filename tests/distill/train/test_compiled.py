"""Compiled layers: the numbers, the names and the checkpoints of layers that are not compiled."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import ENVIRONMENT, ROOT, accelerate_launch, run_all
from make_heads import make_batch, make_ids, make_signal, make_target
from train_on_ranks import FAMILIES, make_family_target, micro_batches

from redraft.distill.launch import compiled
from redraft.distill.launch.compiled import draft_layers
from redraft.distill.loss.choice import Divergence
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.loop import make_accelerator
from redraft.distill.train.optim import Optim
from redraft.distill.train.run_config import Loop
from redraft.distill.train.step import Distillation
from redraft.heads.families import eagle3
from redraft.heads.target import Target

OTHERS = (
    "eagle3-recompute",
    "standalone-recompute",
    "standalone",
    "eagle1",
    "dflash",
    "dspark",
    "peagle",
    "medusa",
    "mtp",
)


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No graph of another test, and afterwards no function that a graph ends before."""
    for owner, name in compiled.EAGER:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    compiled._compiled.cache_clear()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(optimize_ddp=True):
        yield
    compiled._compiled.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def without_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs and their gradients as for any backend, without minutes of C++."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def make_distillation(
    draft: Any, target: Any, divergence: Divergence | None = None
) -> Distillation:
    signal = InProcessTarget(target, draft.aux_layer_ids)
    return Distillation(
        draft,
        signal,
        divergence or Divergence(),
        Optim(lr=1e-2, warmup_fraction=0.0),
        3,
        make_accelerator(1, None, None),
    )


def three_losses(draft: Any, target: Any, *, compiles: bool) -> list[float]:
    """And an evaluation after each: it runs without gradients."""
    distillation = make_distillation(draft, target)
    if compiles:
        distillation.compile_layers()
    found = []
    for step in range(3):
        found.append(distillation.step(micro_batches(step, 0, 1, 1)).loss)
        found.append(distillation.evaluate(micro_batches(9, 0, 1, 1), 2).tau)
    distillation.close()
    return found


def make_draft(name: str, target: Any) -> Any:
    torch.manual_seed(1)
    draft: Any = FAMILIES[name.removesuffix("-recompute")](target)
    draft.recomputes = name.endswith("-recompute")
    return draft


@pytest.mark.usefixtures("without_cpp")
@pytest.mark.parametrize(
    "name",
    ["eagle3", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)],
)
def test_compiled_layers_train_as_layers_that_are_not(name: str) -> None:
    target = make_family_target(name)
    plain = three_losses(make_draft(name, target), target, compiles=False)
    assert num_graphs() == 0
    assert three_losses(make_draft(name, target), target, compiles=True) == pytest.approx(
        plain, abs=1e-4
    )
    assert num_graphs() > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3-recompute", "standalone"])
def test_kernels_in_cpp_train_as_layers_that_are_not_compiled(name: str) -> None:
    target = make_target()
    plain = three_losses(make_draft(name, target), target, compiles=False)
    assert three_losses(make_draft(name, target), target, compiles=True) == pytest.approx(
        plain, abs=1e-4
    )


@pytest.mark.slow
@pytest.mark.usefixtures("without_cpp")
def test_a_graph_serves_every_draft_step() -> None:
    target = make_target()
    graphs = []
    for num_steps in (2, 6):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        options = eagle3.Config(aux_layer_ids=(1, 2, 4), num_steps=num_steps)
        # The divergence has graphs of its own: for rows compared row for row, and for others.
        plain = Divergence(form="plain")
        distillation = make_distillation(
            eagle3.Eagle3(options, Target.from_model(target)), target, plain
        )
        distillation.compile_layers()
        distillation.step(micro_batches(0, 0, 1, 1))
        graphs.append(num_graphs())
        distillation.close()
    assert graphs[0] == graphs[1] > 0


@pytest.mark.usefixtures("without_cpp")
def test_the_streams_of_a_compiled_target_are_those_of_the_batch() -> None:
    target, source = make_target(), InProcessTarget(make_target(), (0, 2, 4))
    source.compile_layers()
    graphs = []
    for seed in (1, 2):
        batch = make_batch([[make_ids(12, seed), make_ids(7, seed + 5)]])
        found, expected = source(batch), make_signal(target, batch, (0, 2, 4))
        assert found.aux_BTLD is not None
        torch.testing.assert_close(found.aux_BTLD, expected.aux_BTLD)
        graphs.append(num_graphs())
    # A layer is six graphs: attention is outside of them, and PyTorch cuts every call on the way to
    # it in two.
    assert graphs[0] == graphs[1] < 2 * len(target.model.layers), (
        "the same graphs for all layers and batches"
    )
    assert not any("forward" in vars(layer) for layer in source.model.model.layers), (
        "others find the model as it was"
    )


@pytest.mark.slow
@pytest.mark.usefixtures("without_cpp")
def test_a_compiled_draft_has_the_names_of_any_other_and_its_export_loads(tmp_path: Path) -> None:
    target = make_target()
    draft = make_draft("eagle3", target)
    names = list(draft.state_dict())
    distillation = make_distillation(draft, target)
    distillation.compile_layers()
    distillation.step(micro_batches(0, 0, 1, 1))
    distillation.save(tmp_path / "checkpoint")
    weights = {name: tensor.clone() for name, tensor in distillation.weights().items()}
    losses = [distillation.step(micro_batches(step, 0, 1, 1)).loss for step in (1, 2)]
    distillation.resume(tmp_path / "checkpoint")
    assert [distillation.step(micro_batches(step, 0, 1, 1)).loss for step in (1, 2)] == losses
    distillation.close()
    assert list(weights) == list(draft.state_dict()) == names
    draft.export(tmp_path / "draft", weights=weights)
    loaded = eagle3.Eagle3.load(tmp_path / "draft", Target.from_model(target))
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, weights[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_layers_to_compile(name: str) -> None:
    layers = draft_layers(make_draft(name, make_family_target(name)))
    assert layers
    if name != "medusa":
        assert all(any("attn" in child for child, _ in layer.named_children()) for layer in layers)
    assert len(set(map(id, layers))) == len(layers)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_ranks_train_compiled_layers_as_one_process_does_without(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = str(ROOT / "tests/distill/train/compiled_worker.py")
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests/helpers'}")
    run_all([[sys.executable]], [script, str(tmp_path / "one"), "eager"])
    run_all(accelerate_launch(config), [script, str(tmp_path / "two"), "compiled"])
    one, two = (torch.load(tmp_path / name, weights_only=True) for name in ("one", "two"))
    assert one["graphs"] == 0 < two["graphs"]
    for name, expected in one["found"].items():
        assert two["found"][name]["losses"] == pytest.approx(expected["losses"], abs=1e-4)
        assert two["found"][name]["weights"].keys() == expected["weights"].keys()


def test_a_machine_or_launch_that_cannot_compile_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Loop(compile=True)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=r"--loop\.compile.*DeepSpeed"):
        Loop(compile=True)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ValueError, match=r"--loop\.compile"):
        Loop(compile=True)
    Loop()
