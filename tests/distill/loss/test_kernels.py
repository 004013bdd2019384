"""The Triton kernels of the fused divergence in a process that has Triton.

Interpreted, and compiled for GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from model_runners import run_cases, triton_compiler, triton_interpreter

HERE = Path(__file__).parent


@pytest.mark.slow
def test_kernels_equal_the_plain_form_within_float32() -> None:
    run_cases(HERE / "in_triton.py", triton_interpreter(), at_least=130)


@pytest.mark.slow
def test_kernels_compile_for_gpus_and_keep_their_rows_in_the_cache(tmp_path: Path) -> None:
    run_cases(HERE / "in_compiler.py", triton_compiler(tmp_path), at_least=71)
