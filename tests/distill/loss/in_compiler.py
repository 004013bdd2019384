"""The kernels of the fused divergence, compiled for GPUs as they are launched.

No GPU is needed, and nothing runs.

`test_kernels.py` runs this file in a process that has Triton.

C = target rows, M = draft rows, V = target vocabulary, W = draft vocabulary, K = kept top-k ids.
"""

from __future__ import annotations

import re

import pytest
import torch
from gpu_compiler import GPUS, H100, MI300X, Gpu, Kernel, Launches

from redraft.distill.loss import kernels, rows
from redraft.distill.loss.choice import DIVERGENCES


def launch(name: str, width: int, target_width: int, dtype: torch.dtype, gpu: Gpu) -> list[Kernel]:
    """The kernels of all launches of this divergence: the exact target, and a top-k one."""
    launches = Launches(kernels, gpu)
    C, M, K = 4, 8, 32
    draft_MW, target_CW = torch.zeros(M, width, dtype=dtype), torch.zeros(C, width, dtype=dtype)
    place_M, scale_M = torch.arange(M) % C, torch.ones(M)
    label_C = torch.zeros(C, dtype=torch.long) if name == "cross_entropy" else None
    ids_W = torch.arange(width) if width < target_width else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_kernels", lambda: launches)
        patch.setattr(torch.version, "hip", "7.2" if gpu.arch else None)
        rows.target_rows(torch.zeros(C, target_width, dtype=dtype), ids_W, 1.0)
        rows.draft_rows(
            draft_MW, target_CW, torch.zeros(2, C), place_M, scale_M, label_C, name, 1.0, 0.5, 3.0
        )
        kept_CK, log_p_CX = torch.zeros(C, K, dtype=torch.long), torch.zeros(C, K + 1)
        rows.top_k_rows(draft_MW, kept_CK, log_p_CX, place_M, scale_M, label_C, name, 0.5, 3.0)
    assert len(launches.kernels) == 3
    return launches.kernels


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_launch_compiles_and_reads_16_bytes_at_once(
    name: str, dtype: torch.dtype, gpu: Gpu
) -> None:
    for width in (32_000, 128_256):
        for kernel in launch(name, width, 128_256, dtype, gpu):
            assert kernel.capability == gpu.capability
            assert kernel.stack_bytes <= 48
            assert re.search(r"ld\.global\S*\.v4\.b32", kernel.ptx)


@pytest.mark.parametrize("width", [32_000, 128_256])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_draft_rows_of_all_running_programs_fit_in_the_cache(name: str, width: int) -> None:
    for kernel in launch(name, width, width, torch.bfloat16, H100):
        assert H100.processors * kernel.programs * width * 2 <= H100.cache_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_launch_compiles_for_rocm(name: str, dtype: torch.dtype) -> None:
    for width in (8_000, 128_256):
        for kernel in launch(name, width, 128_256, dtype, MI300X):
            assert kernel.arch == "gfx942"
            assert kernel.threads <= 1024
            assert kernel.stack_bytes == 0
            assert kernel.shared_bytes <= MI300X.shared_bytes
            assert re.search(r"(global|buffer)_load_dwordx4", kernel.amdgcn)


def test_a_barrier_of_rocm_does_not_wait_for_a_store() -> None:
    """The reason for `rows.orders_memory`: if this fails, the top-k kernel may be used there."""
    *_, top_k = launch("forward_kl", 128_256, 128_256, torch.bfloat16, MI300X)
    before = [part.splitlines() for part in top_k.amdgcn.split("s_barrier")[:-1]]
    stores = [
        lines
        for lines in before
        if "store_short" in "".join(lines)
        and "vmcnt(0)" not in "".join(lines).rpartition("store_short")[2]
    ]
    assert stores
