"""The Triton kernels of the fused divergence in a process that has Triton: interpreted, and compiled for GPUs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from model_runners import triton_compiler, triton_interpreter

HERE = Path(__file__).parent


@pytest.mark.slow
def test_kernels_equal_the_plain_form_within_float32() -> None:
    run_cases("in_triton.py", triton_interpreter(), at_least=70)


@pytest.mark.slow
def test_kernels_compile_for_gpus_and_keep_their_rows_in_the_cache(tmp_path: Path) -> None:
    # a cache of its own, or a second run would compile nothing
    run_cases("in_compiler.py", triton_compiler() | {"TRITON_CACHE_DIR": str(tmp_path)}, at_least=56)


def run_cases(file: str, env: dict[str, str], *, at_least: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    done = subprocess.run(command, env=env, cwd=HERE.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found
    assert int(found[1]) >= at_least
