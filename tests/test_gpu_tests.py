"""The tests of tests/gpu on a machine without a GPU.

So they still run when the first one comes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from model_runners import run_cases


@pytest.mark.slow
def test_the_tests_of_gpus_pass_on_a_cpu() -> None:
    env = os.environ | {"REDRAFT_GPU_TESTS_ON": "cpu"}
    run_cases(Path(__file__).parent / "gpu", env, at_least=100)
