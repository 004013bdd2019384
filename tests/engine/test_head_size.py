"""Head sizes of attention that a GPU can launch, refused in a line before a model is loaded."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState

from benchmarks.studies.presets import make_preset
from redraft.distill.run.inputs import load_target
from redraft.distill.run.training_run import run
from redraft.distill.train.run_config import HeadConfig, Signal
from redraft.engine.hardware import Machine
from redraft.engine.head_size import head_size, require_draft_heads, require_head_size
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import find_family
from redraft.heads.options import Standalone


def make_machine(name: str, shared_bytes: int) -> Machine:
    return Machine(gpu=name, gpu_has_bfloat16=True, gpu_shared_bytes=shared_bytes)


RTX_4090, A100, H100, B200 = (
    make_machine("RTX 4090", 101_376),
    make_machine("A100", 166_912),
    make_machine("H100", 232_448),
    make_machine("B200", 232_448),
)
EVERY, LARGE, NONE = {RTX_4090, A100, H100, B200}, {H100, B200}, set[Machine]()


@pytest.mark.parametrize(
    ("size", "dtype", "takes"),
    [
        (8, torch.bfloat16, NONE),
        (16, torch.bfloat16, EVERY),
        (80, torch.bfloat16, EVERY),
        (128, torch.bfloat16, EVERY),
        (160, torch.bfloat16, LARGE),
        (192, torch.bfloat16, EVERY - {RTX_4090}),
        (256, torch.bfloat16, EVERY - {RTX_4090}),
        (320, torch.bfloat16, NONE),
        (64, torch.float32, EVERY),
        (96, torch.float32, LARGE),
        (128, torch.float32, EVERY - {RTX_4090}),
        (160, torch.float32, NONE),
    ],
)
def test_a_head_size_is_refused_on_the_gpus_for_which_pytorchs_kernels_are_too_large(
    size: int, dtype: torch.dtype, takes: set[Machine]
) -> None:
    """As `compile_function` of tests/helpers finds it with torch 2.13."""
    config = SimpleNamespace(head_dim=size, model_type="llama")
    for machine in EVERY:
        if machine in takes:
            require_head_size("the draft", config, dtype, machine)
        else:
            with pytest.raises(
                ValueError, match=rf"size {size}\b.*GPU|size {size}\b.*{machine.gpu}"
            ):
                require_head_size("the draft", config, dtype, machine)
    require_head_size("the draft", config, dtype, Machine())


def test_the_size_is_that_of_queries_and_keys() -> None:
    assert head_size(SimpleNamespace(hidden_size=64, num_attention_heads=4)) == 16
    assert head_size(SimpleNamespace(hidden_size=64, num_attention_heads=4, head_dim=32)) == 32
    assert head_size(SimpleNamespace(head_dim=64, qk_head_dim=192)) == 192


@pytest.fixture
def narrow_target(random_target: Path, tmp_path: Path) -> Path:
    """A target with heads of 8, by its config; its weights must not be read."""
    folder = shutil.copytree(random_target, tmp_path / "target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 8}))
    return folder


@pytest.fixture
def first_accelerator() -> Iterator[None]:
    """The next accelerator may have any precision, and one after the test too."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


@pytest.mark.usefixtures("first_accelerator")
@pytest.mark.parametrize("family", ["eagle1", "standalone"])
def test_a_training_with_unsupported_heads_leaves_nothing_behind(
    family: str, narrow_target: Path, tmp_path: Path
) -> None:
    cfg = replace(make_preset(family), target=str(narrow_target), output=tmp_path / "run")
    cfg = replace(cfg, loop=replace(cfg.loop, sequence_length=256))
    if isinstance(cfg, HeadConfig):
        cfg = replace(cfg, draft_vocab_size=0)
    else:
        cfg = replace(cfg, draft=Standalone(layers=(0,)))
    with pytest.raises(ValueError, match=r"\b8\b.*\b16 to 256\b") as raised:
        run(find_family(family), cfg, H100)
    assert not re.search(r"\n", str(raised.value))
    assert not (tmp_path / "run").exists()


def test_a_draft_is_refused_by_its_own_heads_if_it_is_no_head_and_has_our_attention() -> None:
    narrow, other = (SimpleNamespace(head_dim=8, model_type=name) for name in ("llama", "gpt_neox"))
    for family in ("eagle1", "standalone"):
        with pytest.raises(ValueError, match=r"\b8\b.*\b16 to 256\b"):
            require_draft_heads(find_family(family), "the draft", narrow, torch.bfloat16, H100)
    for family, config in (("standalone", other), ("medusa", narrow)):
        require_draft_heads(find_family(family), "the draft", config, torch.bfloat16, H100)


def test_a_target_with_unsupported_heads_is_refused_before_it_is_loaded(
    narrow_target: Path,
) -> None:
    with pytest.raises(ValueError, match=r"\b8\b.*\b16 to 256\b"):
        load_target(TargetFolder.open(narrow_target), Signal(), torch.device("cuda"), machine=H100)
