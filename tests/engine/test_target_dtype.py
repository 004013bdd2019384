"""The type in which a target computes by default: one choice for training, forecast and engine."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from local_hub import run_with_hub, serve_model

from redraft.distill.run import proof as prove
from redraft.engine import server
from redraft.engine.hardware import Machine, this_machine
from redraft.engine.machine import ENGINE_IS_CPU
from redraft.engine.prompts import Prompt
from redraft.engine.server import vllm_server
from redraft.engine.target_dtype import default_target_dtype
from redraft.files.target_folder import TargetFolder


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


FAST, SLOW = Machine(cpu_has_bfloat16=True), Machine()


@pytest.mark.parametrize(
    ("config", "computes", "chosen"),
    [
        ({"dtype": "bfloat16"}, True, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, True, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, True, "bfloat16"),
        ({"dtype": "bfloat16"}, False, "float32"),
        ({"dtype": "float32"}, True, "float32"),
        ({"dtype": "float16"}, True, "float32"),
        ({"text_config": None}, True, "float32"),
        # Computed by servers only, which may have kernels for the stored type alone.
        ({"dtype": "float16", "quantization_config": {"quant_method": "awq"}}, True, None),
        (
            {"text_config": {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}},
            False,
            None,
        ),
        ({"dtype": "bfloat16", "compression_config": {"format": "pack"}}, True, None),
    ],
)
def test_a_cpu_computes_in_bfloat16_if_it_can_and_the_target_is_stored_so(
    config: dict[str, Any], computes: bool, chosen: str | None, tmp_path: Path
) -> None:
    machine = FAST if computes else SLOW
    folder = write_config(tmp_path / "target", config)
    assert default_target_dtype(folder, on_cpu=True, machine=machine) == chosen
    assert default_target_dtype(folder, on_cpu=False, machine=machine) is None, "as stored"


def test_a_target_that_cannot_be_read_is_left_to_loading(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    for name in (tmp_path, tmp_path / "nowhere", "target.gguf"):
        assert default_target_dtype(name, on_cpu=True, machine=FAST) == "float32"


def test_the_config_of_a_hub_name_is_fetched_before_the_first_run(tmp_path: Path) -> None:
    files = {"config.json": b'{"dtype": "bfloat16"}', "tokenizer.json": b"{}"}
    code = (
        "from redraft.engine.hardware import Machine; from redraft.engine.target_dtype import *; "
    )
    code += (
        "print(open_target('owner/model', on_cpu=True, "
        "machine=Machine(cpu_has_bfloat16=True)).dtype)"
    )
    with serve_model(files) as hub:
        assert run_with_hub(code, hub, tmp_path).stdout.strip() == "bfloat16"


class StartedError(Exception):
    """Raised where an engine would start."""


QUANTISED = {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("config", "given"),
    [({"dtype": "bfloat16"}, None), ({"dtype": "bfloat16"}, "float32"), (QUANTISED, None)],
)
def test_an_engine_is_started_in_the_same_type(
    config: dict[str, Any], given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def start(command: list[str], **_: Any) -> None:
        started.extend(command)
        raise StartedError

    monkeypatch.setattr(server, "process_group", start)
    target = write_config(tmp_path / "target", config)
    asked = given or default_target_dtype(target, on_cpu=ENGINE_IS_CPU) or "auto"
    with pytest.raises(StartedError), vllm_server(target, log=tmp_path / "vllm.log", dtype=given):
        pass
    assert started[:2] == [sys.executable, "-m"]
    assert started[started.index("--dtype") + 1] == asked
    assert (config is QUANTISED) <= (asked == "auto")


def test_the_proof_serves_a_copy_of_the_target_in_the_type_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def start(model: str, *_: Any, dtype: str | None, **options: Any) -> None:
        started.append((model, dtype))
        raise StartedError

    monkeypatch.setattr(prove, "measure_servers", start)
    target = write_config(tmp_path / "target", QUANTISED)
    copy = write_config(tmp_path / "copy", {})  # on a CPU it would be float32
    opened, prompts = TargetFolder.open(target), [Prompt(token_ids=[1])]
    given = (prove.Prove(), opened, {"method": "mtp"}, prompts, tmp_path)
    with pytest.raises(StartedError):
        prove.prove_in_engine(*given, served=copy)
    assert started == [(str(copy), None)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of CPUs")
def test_a_cpu_that_computes_in_bfloat16_has_the_instructions_for_it() -> None:
    machine = this_machine()
    assert (machine.gpu, machine.device) == (None, "cpu")
    if machine.has_bfloat16:
        assert torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")


def test_a_machine_computes_in_bfloat16_on_its_gpu_or_its_cpu() -> None:
    old = Machine(gpu="Tesla V100", cpu_has_bfloat16=True)
    assert not old.has_bfloat16
    assert old.without_gpu == FAST
    assert replace(old, gpu_has_bfloat16=True).has_bfloat16
    assert (FAST.has_bfloat16, SLOW.has_bfloat16) == (True, False)
