"""Weight updates from files: refused before anything is loaded, unless they are whole."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from redraft.online.engine import swap
from redraft.online.engine.trainer_files import (
    OutsideError,
    describe_target,
    list_files,
    require_whole,
)

WHOLE = {"up.weight": torch.ones(4, 2), "down.weight": torch.ones(2, 4), "norm": torch.ones(2)}


class Worker:
    """The part of vLLM's worker that updates go through, and a model that takes all it gets."""

    def __init__(self, root: Path, tensors: dict[str, Tensor] | None = None) -> None:
        from redraft.online.engine.weight_transfer import Files

        save_file(tensors or WHOLE, root / "model.safetensors")
        (root / "config.json").write_text("{}")
        self.redraft = SimpleNamespace(target_tensors=describe_target(root), draft=None)
        self.loaded: dict[str, float] = {}
        self._weight_update_active = True
        self.engine = Files.__new__(Files)
        self.engine.model = self.engine._default_model = object()
        self.engine.worker, self.engine.roots = self, [root]
        self.engine.reset_weight_update_target = lambda: None
        self.engine.start_weight_update()

    def reload_weights(self, *, weights_iterator: Any) -> None:
        self.loaded |= {name: tensor.sum().item() for name, tensor in weights_iterator}

    def push(self, *parts: Path) -> None:
        for part in parts:
            self.engine.update_weights({"path": str(part)})
        self.engine.finish_weight_update()


def write(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def test_parts_that_are_a_whole_together_are_loaded_and_of_two_the_later(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    first = write(tmp_path / "a.safetensors", {"up.weight": 5 * WHOLE["up.weight"]})
    (folder := tmp_path / "rest").mkdir()
    write(folder / "b.safetensors", {"up.weight": WHOLE["up.weight"], "norm": WHOLE["norm"]})
    write(folder / "c.safetensors", {"down.weight": WHOLE["down.weight"].bfloat16()})
    (folder / "config.json").write_text("{}")
    worker.push(first, folder)
    assert worker.loaded == {"up.weight": 8, "norm": 2, "down.weight": 8}


FAULTS = {
    "nothing": {},
    "one tensor": {"norm": WHOLE["norm"]},
    "a tensor more": WHOLE | {"more": torch.ones(1)},
    "a row short": WHOLE | {"up.weight": torch.ones(3, 2)},
    "transposed": WHOLE | {"up.weight": torch.ones(2, 4)},
    "integers": {name: tensor.long() for name, tensor in WHOLE.items()},
    "NaN": WHOLE | {"norm": torch.tensor([1, torch.nan])},
    "infinite": WHOLE | {"norm": torch.tensor([-torch.inf, 1])},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_update_that_is_not_whole_loads_nothing_and_the_next_one_may_come(
    tmp_path: Path, fault: str
) -> None:
    worker = Worker(tmp_path)
    path = write(tmp_path / "update.safetensors", FAULTS[fault])
    with pytest.raises(ValueError, match=r"differ from the model|non-finite"):
        worker.push(path)
    assert (worker.loaded, worker._weight_update_active) == ({}, False)
    worker.engine.start_weight_update()
    worker.push(write(path, WHOLE))
    assert worker.loaded.keys() == WHOLE.keys()


def test_a_file_that_is_another_one_at_the_end_loads_nothing(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    path = write(tmp_path / "update.safetensors", WHOLE)
    worker.engine.update_weights({"path": str(path)})
    write(path, FAULTS["a row short"])
    with pytest.raises(ValueError, match=r"up\.weight is \[3, 2\] of floats instead of \[4, 2\]"):
        worker.engine.finish_weight_update()
    assert worker.loaded == {}


def test_tied_heads_may_come_or_not() -> None:
    head = {"lm_head.weight": "[8, 2] of floats"}
    body = {"norm": "[2] of floats"}
    require_whole(body | head, body)
    require_whole(body, body)
    with pytest.raises(ValueError, match=r"lm_head\.weight is absent"):
        require_whole(body, body | head)


def test_the_head_of_a_tied_target_need_not_come(tmp_path: Path) -> None:
    save_file(WHOLE | {"lm_head.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    assert describe_target(tmp_path).keys() == WHOLE.keys()
    (tmp_path / "config.json").write_text("{}")
    assert "lm_head.weight" in describe_target(tmp_path)


def test_only_regular_files_within_the_roots_are_listed(tmp_path: Path) -> None:
    (root := tmp_path / "root").mkdir()
    (folder := root / "step-1").mkdir()
    write(tmp_path / "outside.safetensors", WHOLE)
    good = write(folder / "model.safetensors", WHOLE)
    (folder / "code").mkdir()
    assert list_files(folder, [root]) == list_files(good, [tmp_path, root]) == [good]
    for path in (tmp_path, tmp_path / "outside.safetensors", root / ".." / "outside.safetensors"):
        with pytest.raises(OutsideError):
            list_files(path, [root])
    with pytest.raises(OutsideError):
        list_files(good, [])
    with pytest.raises(FileNotFoundError):
        list_files(root / "gone", [root])
    link = folder / "link.safetensors"
    link.symlink_to(good)
    assert list_files(folder, [root]) == [link, good]
    link.unlink()
    link.symlink_to(tmp_path / "outside.safetensors")
    for path in (folder, link):
        with pytest.raises(OutsideError):
            list_files(path, [root])
    link.unlink()
    os.mkfifo(link)
    for path in (folder, link):
        with pytest.raises(ValueError, match=r"link\.safetensors is not a regular file"):
            list_files(path, [root])


class Layer(nn.Module):
    """Two parts of a merged weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = (nn.Parameter(torch.ones(2, 2), requires_grad=False) for _ in range(2))


def test_after_a_load_that_vllm_cannot_end_every_layer_has_its_weights() -> None:
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    model = nn.Sequential(*(Layer() for _ in range(4)))
    record_metadata_for_reloading(model)

    def load(number: float, gate: Tensor) -> None:
        initialize_layerwise_reload(model)
        for layer in model:
            layer.up.weight_loader(layer.up, torch.full((2, 2), number))
            layer.gate.weight_loader(layer.gate, gate)

    def weights() -> list[float]:
        return [layer.up.sum().item() + layer.gate.sum().item() for layer in model]

    model_config: Any = None  # asked for by attention layers only
    with torch.no_grad():
        load(2, torch.full((2, 2), 2.0))
        finalize_layerwise_reload(model, model_config)
        assert weights() == [16] * 4
        with pytest.raises(AssertionError, match=r"3, 1"):
            load(3, torch.ones(3, 1))
        with pytest.raises(AssertionError, match=r"3, 1"):
            finalize_layerwise_reload(model, model_config)
        swap.end_load(model, model_config)
        assert weights() == [16] * 4
        load(4, torch.full((2, 2), 4.0))
        finalize_layerwise_reload(model, model_config)
        assert weights() == [32] * 4


class Draft(nn.Sequential):
    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            weight: Any = self.get_parameter(name)
            weight.weight_loader(weight, tensor)


def test_a_draft_that_vllm_cannot_load_keeps_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

    draft = Draft(*(Layer() for _ in range(3)))
    record_metadata_for_reloading(draft)
    runner = SimpleNamespace(get_draft_model=lambda: draft, get_model=lambda: nn.Module())
    speculative = SimpleNamespace(draft_model_config=None)
    worker = SimpleNamespace(
        model_runner=runner, vllm_config=SimpleNamespace(speculative_config=speculative)
    )
    monkeypatch.setattr(swap, "loading", lambda worker: torch.no_grad())
    new = torch.full((2, 2), 2.0)
    bad = {"0.up": new, "0.gate": new, "1.up": new, "1.gate": torch.ones(3, 1)}
    with pytest.raises(AssertionError, match=r"3, 1"):
        swap.load_draft(worker, bad)
    assert [layer.up.sum().item() for layer in draft] == [8, 4, 4]
