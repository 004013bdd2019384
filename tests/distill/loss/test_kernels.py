"""The Triton kernels of the fused divergence, in a process in which Triton's interpreter runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from model_runners import triton_interpreter

CASES = Path(__file__).with_name("in_triton.py")


@pytest.mark.slow
def test_kernels_equal_the_plain_form_within_float32() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, env=triton_interpreter(), cwd=CASES.parents[3], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found
    assert int(found[1]) >= 70
