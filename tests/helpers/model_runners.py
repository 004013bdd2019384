"""The environment in which a vLLM on a CPU uses its V1 or its V2 model runner.

V2 needs Triton. Where Triton can be seen, V1 breaks for standalone drafts, so it has a folder beside the environment's
packages, and only V2's processes see it. The folder is made once; the version and its hashes are those of the lock.
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

TRITON = Path(sys.prefix) / "triton-for-v2"
LOCK = Path(__file__).parents[2] / "requirements/cuda.txt"
BACKEND = Path(__file__).parent / "triton_on_cpu"


def environment(runner: str, *, schedules_ahead: bool = False) -> dict[str, str]:
    """The environment of a process with this runner; skips the test if V2 cannot run here."""
    plugins = {"VLLM_PLUGINS": "redraft,cpu_triton", "KEEP_ASYNC_SCHEDULING": "1" if schedules_ahead else "0"}
    path = [str(BACKEND), os.environ.get("PYTHONPATH", "")]
    if runner == "v1":
        return os.environ | plugins | {"PYTHONPATH": ":".join(path), "VLLM_USE_V2_MODEL_RUNNER": "0"}
    if problem := _install_triton():
        pytest.skip(f"V2 needs Triton, which could not be installed into {TRITON}: {problem}")
    return os.environ | plugins | {"PYTHONPATH": ":".join([str(TRITON), *path]), "TRITON_INTERPRET": "1",
                                   "VLLM_USE_V2_MODEL_RUNNER": "1"}  # fmt: skip


def triton_interpreter() -> dict[str, str]:
    """The environment of a process in which Triton's kernels run in its interpreter; skips the test without Triton."""
    return _with_triton() | {"TRITON_INTERPRET": "1"}


def triton_compiler(cache: Path) -> dict[str, str]:
    """The environment of a process that compiles Triton's kernels for GPUs into this folder; skips without Triton.

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
    if problem := _install_triton():
        pytest.skip(f"Triton could not be installed into {TRITON}: {problem}")
    return os.environ | {"PYTHONPATH": ":".join([str(TRITON), os.environ.get("PYTHONPATH", "")])}


@functools.cache
def _install_triton() -> str:
    """Install Triton unless it is there. Returns what went wrong."""
    with TRITON.with_name(f".{TRITON.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if TRITON.is_dir():
            return ""
        found = re.search(r"^triton==(?:.*\\\n)*.*", LOCK.read_text(), re.MULTILINE)
        assert found, f"{LOCK} has no Triton"
        partial = TRITON.with_name(f".{TRITON.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        (partial / "requirements.txt").write_text(found.group() + "\n")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--target", str(partial), "--requirement", str(partial / "requirements.txt")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            return done.stderr.strip().splitlines()[-1]
        partial.rename(TRITON)
        return ""
