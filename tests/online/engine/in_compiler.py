"""The kernels of capture's hook, compiled for GPUs as they are launched.

No GPU is needed, and nothing runs.

`test_capture_kernels.py` runs this file in a process that has Triton.

B = requests, J = draft tokens of one request, V = vocabulary.
"""

from __future__ import annotations

import re

import pytest
import torch
from gpu_compiler import GPUS, MI300X, Gpu, Launches

from redraft.online.engine import one_pass, scan_kernel


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("vocab_size", [32_000, 151_936])
def test_every_launch_compiles_and_keeps_a_chunk_in_registers(
    vocab_size: int, dtype: torch.dtype, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(scan_kernel, gpu)
    monkeypatch.setattr(one_pass, "find_kernels", lambda: launches)
    one_pass.find_in_one_pass(torch.zeros(5, vocab_size, dtype=dtype), 32)
    logits_BJV, draft_N = torch.zeros(2, 3, vocab_size, dtype=dtype), torch.tensor([0, 1])
    one_pass.gather_probs(logits_BJV, draft_N, draft_N, draft_N, torch.ones(2))
    names = [kernel.name for kernel in launches.kernels]
    assert names == ["scan", "join_chunks", "read_groups", "find_ids", "scan_drafts", "join_chunks"]
    for kernel in launches.kernels:
        assert kernel.capability == gpu.capability
        assert kernel.stack_bytes == 0
        if kernel.name in ("scan", "scan_drafts"):
            assert re.search(r"ld\.global\S*\.v4\.b32", kernel.ptx)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_launch_compiles_for_rocm(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = Launches(scan_kernel, MI300X)
    monkeypatch.setattr(one_pass, "find_kernels", lambda: launches)
    one_pass.find_in_one_pass(torch.zeros(5, 151_936, dtype=dtype), 32)
    logits_BJV, draft_N = torch.zeros(2, 3, 151_936, dtype=dtype), torch.tensor([0, 1])
    one_pass.gather_probs(logits_BJV, draft_N, draft_N, draft_N, torch.ones(2))
    assert len(launches.kernels) == 6
    for kernel in launches.kernels:
        assert kernel.arch == "gfx942"
        assert kernel.threads <= 1024
        assert kernel.stack_bytes == 0
        assert kernel.shared_bytes <= MI300X.shared_bytes
