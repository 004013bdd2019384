"""One cache of compiled code on two processors.

This one, and this one without its widest vectors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CODE = """
import torch
from redraft.heads.nn.compilation import compile_here
x = torch.randn(24, 41, generator=torch.Generator().manual_seed(0))
torch.testing.assert_close(compile_here(lambda x: x.logsumexp(-1), dynamic=True)(x), x.logsumexp(-1))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this processor has no AVX-512"
)
def test_code_of_another_processor_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    for capability in ("avx512", "avx2"):
        env = os.environ | {
            "ATEN_CPU_CAPABILITY": capability,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        }
        subprocess.run([sys.executable, "-c", CODE], env=env, check=True)
