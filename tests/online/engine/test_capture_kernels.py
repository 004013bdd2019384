"""The Triton kernels of capture, compiled for GPUs in a process that has Triton."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_runners import run_cases, triton_compiler


@pytest.mark.slow
def test_captures_kernels_compile_for_gpus(tmp_path: Path) -> None:
    run_cases(Path(__file__).with_name("in_compiler.py"), triton_compiler(tmp_path), at_least=20)
