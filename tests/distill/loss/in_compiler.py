"""The kernels of the fused divergence, compiled for GPUs as they are launched. No GPU is needed, and nothing runs.

`test_kernels.py` runs this file in a process that has Triton. C = target rows, M = draft rows, V = target vocabulary,
W = draft vocabulary, K = kept top-k ids.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from redraft.distill.loss import kernels, rows
from redraft.distill.loss.divergences import DIVERGENCES

A100, H100, B200 = 80, 90, 100
"""Compute capability, times ten."""

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

H100_PROCESSORS, H100_CACHE_BYTES = 132, 50 << 20
REGISTERS, THREADS = 65_536, 2_048
"""Of a multiprocessor."""


class Compiled(NamedTuple):
    """A kernel in machine code."""

    capability: int
    ptx: str
    threads: int
    registers: int
    stack_bytes: int
    """Of each thread: registers that had to go to memory."""

    @property
    def programs(self) -> int:
        """Programs that run at once on a multiprocessor."""
        allocated = -(-self.registers // 8) * 8 * self.threads
        return min(REGISTERS // allocated, THREADS // self.threads)


class Driver:
    """Names the GPU to compile for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # Triton asks a device's target once

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Kernels:
    """`distill.loss.kernels`, but a launch only compiles."""

    def __init__(self, folder: Path) -> None:
        self.compiled: list[Compiled] = []
        self._folder = folder

    def __getattr__(self, name: str) -> dict[tuple[int], Callable[..., None]]:
        outer = self

        class Grid(dict[tuple[int], Callable[..., None]]):
            def __missing__(self, grid: tuple[int]) -> Callable[..., None]:
                return lambda *args, **options: outer._compile(getattr(kernels, name), grid, *args, **options)

        return Grid()

    def _compile(self, kernel: Any, grid: tuple[int], *args: Any, **options: Any) -> None:
        made = kernel.warmup(*args, grid=grid, **options)
        binary = self._folder / "kernel.cubin"
        binary.write_bytes(made.asm["cubin"])
        usage = subprocess.run([CUOBJDUMP, "-res-usage", binary], capture_output=True, text=True, check=True)
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
        assert found, usage
        threads = 32 * made.metadata.num_warps
        self.compiled.append(
            Compiled(made.metadata.target.arch, made.asm["ptx"], threads, int(found[1]), int(found[2]))
        )


@pytest.fixture
def compiled(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[Compiled]]:
    """The kernels of all launches so far. The parameter is the GPU."""
    launched = Kernels(tmp_path)
    monkeypatch.setattr(rows, "_kernels", lambda: launched)
    driver.set_active(Driver(request.param))
    return lambda: launched.compiled


def launch(name: str, width: int, target_width: int, dtype: torch.dtype) -> None:
    """All launches of this divergence: the exact target, and a top-k one."""
    C, M, K = 4, 8, 32
    draft_MW, target_CW = torch.zeros(M, width, dtype=dtype), torch.zeros(C, width, dtype=dtype)
    place_M, scale_M = torch.arange(M) % C, torch.ones(M)
    label_C = torch.zeros(C, dtype=torch.long) if name == "cross_entropy" else None
    ids_W = torch.arange(width) if width < target_width else None
    rows.target_rows(torch.zeros(C, target_width, dtype=dtype), ids_W, 1.0)
    rows.draft_rows(draft_MW, target_CW, torch.zeros(2, C), place_M, scale_M, label_C, name, 1.0, 0.5, 3.0)
    kept_CK, log_p_CX = torch.zeros(C, K, dtype=torch.long), torch.zeros(C, K + 1)
    rows.top_k_rows(draft_MW, kept_CK, log_p_CX, place_M, scale_M, label_C, name, 0.5, 3.0)


@pytest.mark.parametrize("compiled", [A100, H100, B200], ids=["A100", "H100", "B200"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_every_launch_compiles_and_reads_16_bytes_at_once(
    name: str, dtype: torch.dtype, compiled: Callable[[], list[Compiled]], request: pytest.FixtureRequest
) -> None:
    launch(name, 32_000, 128_256, dtype)
    launch(name, 128_256, 128_256, dtype)
    assert len(compiled()) == 6
    for kernel in compiled():
        assert kernel.capability == request.node.callspec.params["compiled"]
        assert kernel.stack_bytes <= 48
        assert re.search(r"ld\.global\S*\.v4\.b32", kernel.ptx)


@pytest.mark.parametrize("compiled", [H100], indirect=True)
@pytest.mark.parametrize("width", [32_000, 128_256])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_the_draft_rows_of_all_running_programs_fit_in_the_cache(
    name: str, width: int, compiled: Callable[[], list[Compiled]]
) -> None:
    launch(name, width, width, torch.bfloat16)
    for kernel in compiled():
        assert H100_PROCESSORS * kernel.programs * width * 2 <= H100_CACHE_BYTES
