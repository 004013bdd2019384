"""The environment in which a vLLM on a CPU uses its V1 or its V2 model runner.

V2 needs Triton. Where Triton can be seen, V1 breaks for standalone drafts, so it has a folder
beside the environment's packages, and only V2's processes see it. So has torchvision, which models
of text and images import. A folder is made once; versions and hashes are those of the lock.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TRITON, TORCHVISION = (
    Path(sys.prefix) / "triton-for-v2",
    Path(sys.prefix) / "torchvision-for-images",
)
LOCK = Path(__file__).parents[2] / "requirements/cuda.txt"
BACKEND = Path(__file__).parent / "triton_on_cpu"


NO_KERNELS = """\
import torch
_ops = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _ops.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""Operators that torchvision names when it is imported. The kernels of its wheel need CUDA and are
not loaded.
"""


def environment(runner: str, *, schedules_ahead: bool = False) -> dict[str, str]:
    """The environment of a process with this runner; skips the test if V2 cannot run here."""
    plugins = {
        "VLLM_PLUGINS": "redraft,cpu_triton",
        "KEEP_ASYNC_SCHEDULING": "1" if schedules_ahead else "0",
    }
    path = [str(BACKEND), os.environ.get("PYTHONPATH", "")]
    if runner == "v1":
        return (
            os.environ | plugins | {"PYTHONPATH": ":".join(path), "VLLM_USE_V2_MODEL_RUNNER": "0"}
        )
    if problem := _install("triton", TRITON):
        pytest.skip(f"V2 needs Triton, which could not be installed into {TRITON}: {problem}")
    return os.environ | plugins | {"PYTHONPATH": ":".join([str(TRITON), *path]), "TRITON_INTERPRET": "1",
                                   "VLLM_USE_V2_MODEL_RUNNER": "1"}  # fmt: skip


def adaptive_environment(mode: str) -> dict[str, str]:
    """Return V2's environment with the cost per row of a mode of `adaptive_on_cpu`."""
    return environment("v2") | {"ADAPTIVE_ON_CPU": mode}


def with_torchvision() -> dict[str, str]:
    """V1's environment, with torchvision; skips the test if it cannot be installed."""
    if problem := _install("torchvision", TORCHVISION):
        pytest.skip(f"torchvision could not be installed into {TORCHVISION}: {problem}")
    found = environment("v1")
    return found | {
        "PYTHONPATH": ":".join([str(TORCHVISION), str(LOCK.parents[1]), found["PYTHONPATH"]])
    }


def triton_interpreter() -> dict[str, str]:
    """The environment of a process in which Triton's kernels run in its interpreter.

    Skips the test without Triton.
    """
    return _with_triton() | {"TRITON_INTERPRET": "1"}


def triton_compiler(cache: Path) -> dict[str, str]:
    """The environment of a process that compiles Triton's kernels for GPUs into this folder.

    Skips without Triton.

    The folder should be empty, or nothing is compiled.
    """
    return _with_triton() | {"TRITON_CACHE_DIR": str(cache)}


def run_cases(file: Path, env: dict[str, str], *, at_least: int) -> None:
    """Run a file of tests in a process of this environment; so many must pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, env=env, cwd=LOCK.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found
    assert int(found[1]) >= at_least


def _with_triton() -> dict[str, str]:
    if problem := _install("triton", TRITON):
        pytest.skip(f"Triton could not be installed into {TRITON}: {problem}")
    return os.environ | {"PYTHONPATH": ":".join([str(TRITON), os.environ.get("PYTHONPATH", "")])}


@functools.cache
def _install(package: str, folder: Path) -> str:
    """Install a package of the lock unless it is there. Returns what went wrong."""
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return ""
        found = re.search(rf"^{package}==(?:.*\\\n)*.*", LOCK.read_text(), re.MULTILINE)
        assert found, f"{LOCK} has no {package}"
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        (partial / "requirements.txt").write_text(found.group() + "\n")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--require-hashes",
        ]
        command += ["--target", str(partial), "--requirement", str(partial / "requirements.txt")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
        if done.returncode:
            return done.stderr.strip().splitlines()[-1]
        for file in partial.glob("torchvision/_meta_registrations.py"):
            file.write_text(NO_KERNELS + file.read_text())
        partial.rename(folder)
        return ""
