"""A head starts as layers of the target, in this process or not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.studies.presets import make_preset
from redraft.distill.run import start as starting
from redraft.distill.run.start import start as start_draft
from redraft.distill.run.training_run import Run
from redraft.distill.signal import features
from redraft.distill.signal.parts import (
    TAKEN,
    last_layers,
    read_last_layers,
    read_stream_norms,
    stream_scales,
)
from redraft.distill.train.run_config import Signal
from redraft.files.folder import CONFIG, INDEX, WEIGHTS
from redraft.files.target_folder import TargetFolder
from redraft.files.tensors import read_tensors
from redraft.heads.catalog import find_family
from redraft.heads.families import dflash, dspark, eagle3, peagle
from redraft.heads.target import Target
from tests.helpers.target_families import FAMILIES, make_model

pytestmark = pytest.mark.usefixtures("fresh_accelerator")

SERVED = Signal(kind="endpoint", url=("http://127.0.0.1:9",))
"""Nobody listens there: a start by layers asks no server."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = [
        {"prompt": f"question {i} of many", "completion": f"an answer to question {i}"}
        for i in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def target_in_shards(random_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`random_target` in several files with an index."""
    folder = tmp_path_factory.mktemp("sharded") / "target"
    model = AutoModelForCausalLM.from_pretrained(random_target)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(folder, max_shard_size="100KB")
    assert (folder / INDEX).is_file()
    for path in (*random_target.glob("*token*"), *random_target.glob("*.jinja")):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def config_of(target: Path, data: Path, output: Path, signal: Signal, **changes: Any) -> Any:
    demo: Any = make_preset("eagle3")
    return replace(
        demo,
        target=str(target),
        data=replace(
            demo.data, source=str(data), held_out=0.2, num_prompts=3, max_prompt_tokens=128
        ),
        loop=replace(demo.loop, batch_size=2, sequence_length=128),
        prove=replace(demo.prove, engine=False),
        signal=signal,
        draft_vocab_size=300,
        output=output,
        mixed_precision="no",
        **changes,
    )


OPTIONS: dict[str, Any] = {
    "eagle3": eagle3.Config(aux_layer_ids=(0, 1, 2), num_steps=3),
    "dflash": dflash.Config(aux_layer_ids=(1, 2), num_layers=2, mask_token_id=5),
    "dspark": dspark.Config(aux_layer_ids=(1, 2), num_layers=2, mask_token_id=5, markov_rank=8),
    "peagle": peagle.Config(aux_layer_ids=(1, 2), num_layers=2, mask_token_id=5),
}


def start(
    target: Path, data: Path, output: Path, signal: Signal, family: str = "eagle3", **changes: Any
) -> dict[str, Tensor]:
    """The weights of a head before its first step."""
    init = {"init": "last_layer" if family == "eagle3" else "last_layers"}
    cfg = config_of(target, data, output, signal, **{"head": OPTIONS[family], **init, **changes})
    weights: dict[str, Tensor] = start_draft(Run(find_family(family), cfg)).state_dict()
    return weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", OPTIONS)
def test_a_target_on_servers_gives_the_start_of_one_in_this_process(
    family: str,
    dtype: str,
    target_in_shards: Path,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = start(target_in_shards, data, tmp_path / "here", Signal(), family, target_dtype=dtype)
    count = "layer" if family == "eagle3" else "2 layers"
    said = f"the head starts from the last {count} of {target_in_shards}"
    assert said in capsys.readouterr().out.splitlines()
    served = start(target_in_shards, data, tmp_path / "served", SERVED, family, target_dtype=dtype)
    assert (
        f"{said}, read from its files, because this process does not have them"
        in capsys.readouterr().out.splitlines()
    )
    assert here.keys() == served.keys()
    for name, tensor in here.items():
        assert torch.equal(tensor, served[name]), name
    random = start(target_in_shards, data, tmp_path / "random", SERVED, init="random")
    assert "the head starts from random weights" in capsys.readouterr().out.splitlines()
    assert not torch.equal(random["norm.weight"], here["norm.weight"])


# The files of OLMo Hybrid name the norms of recurrent layers otherwise than the class: its heads
# start at random.
@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - {"olmo_hybrid"}))
def test_the_files_of_every_target_give_the_start_of_the_model(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(model_type)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    model.save_pretrained(tmp_path)
    read: list[str] = []

    def note(folder: Path, names: Any) -> dict[str, Tensor]:
        read.extend(names)
        return read_tensors(folder, names)

    monkeypatch.setattr(features, "read_tensors", note)
    heads = []
    for layers, norm in (
        last_layers(model, 1),
        read_last_layers(TargetFolder.open(tmp_path), torch.float32, 1),
    ):
        torch.manual_seed(1)
        head = eagle3.Eagle3(eagle3.Config(), Target.from_model(model))
        head.init_from_layers(layers, norm)
        heads.append(head.state_dict())
    for name, tensor in heads[0].items():
        assert torch.equal(tensor, heads[1][name]), name
    # Nothing of another layer, of the experts or of the tables.
    assert all(".layers.7." in name or "norm" in name for name in read)
    assert not any(
        "experts" in name or "embed_tokens" in name or "lm_head" in name for name in read
    )
    taken = {name for name in head.midlayer.state_dict() if name != "hidden_norm.weight"}
    assert all(TAKEN.fullmatch(name) for name in taken)


@pytest.mark.parametrize("damage", ["quantised", "missing", "packed"])
def test_a_target_whose_layers_cannot_be_read_leaves_random_weights_and_says_why(
    damage: str, random_target: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    shutil.copytree(random_target, target)
    weights, name = load_file(target / WEIGHTS), "model.layers.1.mlp.up_proj.weight"
    if damage == "missing":
        del weights[name]
    if damage == "packed":
        weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, target / WEIGHTS, {"format": "pt"})
    if damage == "quantised":
        config = json.loads((target / CONFIG).read_text())
        (target / CONFIG).write_text(
            json.dumps({**config, "quantization_config": {"quant_method": "fp8"}})
        )
    here = start(target, data, tmp_path / "run", SERVED)
    said = {
        "quantised": f"{target} is quantised (fp8), but a head can start only from unquantised weights",
        "missing": f"{target} has no tensor {name}: give the folder of the target model",
        "packed": f"{target} contains quantised weights, such as {name}",
    }
    assert (
        f"the head starts from random weights: {said[damage]}"
        in capsys.readouterr().out.splitlines()
    )
    random = start(target, data, tmp_path / "random", SERVED, init="random")
    assert all(torch.equal(tensor, random[name]) for name, tensor in here.items())


def test_least_squares_need_no_more_than_states_and_norms(
    target_in_shards: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states are those of the model in both runs, because nobody serves it here."""
    read, known = starting.read_last_signals, list[Any]()

    def read_once(run: Run, layer_ids: Any, num_tokens: int) -> list[Any]:
        known.extend([] if known else read(run, layer_ids, num_tokens))
        return known

    monkeypatch.setattr(starting, "read_last_signals", read_once)
    head = eagle3.Config(aux_layer_ids=(0, 1, 2), fc_norm=True)
    changes = {"init": "least_squares", "init_tokens": 1000, "head": head}
    here = start(target_in_shards, data, tmp_path / "here", Signal(), **changes)
    served = start(target_in_shards, data, tmp_path / "served", SERVED, **changes)
    for name, tensor in here.items():
        assert torch.equal(tensor, served[name]), name
    assert not torch.equal(here["fc_norm.0.weight"], here["fc_norm.1.weight"])


def test_the_factors_of_a_quantised_target_are_read_too(
    random_target: Path, tmp_path: Path
) -> None:
    """Norms are stored plain beside packed matrices."""
    target = tmp_path / "target"
    shutil.copytree(random_target, target)
    weights = load_file(target / WEIGHTS)
    packed = {
        name: w.to(torch.float8_e4m3fn) if "_proj" in name else w for name, w in weights.items()
    }
    save_file(packed, target / WEIGHTS, {"format": "pt"})
    scales = stream_scales(
        read_stream_norms(TargetFolder.open(target), torch.float32, (1, 2)), (1, 2), "a target"
    )
    expected = [weights["model.layers.1.input_layernorm.weight"], weights["model.norm.weight"]]
    assert all(map(torch.equal, scales, expected))
