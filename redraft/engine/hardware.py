"""This machine's hardware as a value that determines defaults. Tests pass in other values."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine, or a part of one. Its first GPU represents all of its GPUs."""

    gpu: str | None = None
    """Name of the GPU. None if the machine has no GPU."""
    gpu_has_bfloat16: bool = False
    """Whether the GPU has matrix units for bfloat16 (compute capability 8.0 or higher)."""
    gpu_shared_bytes: int = 0
    """Maximum shared memory per thread block, in bytes."""
    is_rocm: bool = False
    """Whether this is an AMD GPU, which torch's ROCm build calls cuda."""
    gpu_bytes: int | None = None
    host_bytes: int = sys.maxsize
    """Memory of the machine or container, in bytes."""
    cpu_has_bfloat16: bool = False
    """Whether the CPU has bfloat16 instructions (AMX, AVX-512). Without them, bfloat16 is about a
    hundred times slower than float32.
    """

    @property
    def device(self) -> str:
        """The device on which a process on this machine computes: cuda or cpu."""
        return "cpu" if self.gpu is None else "cuda"

    @property
    def has_bfloat16(self) -> bool:
        """Whether `device` multiplies bfloat16 matrices at least about as fast as float32 ones."""
        return self.cpu_has_bfloat16 if self.gpu is None else self.gpu_has_bfloat16

    @property
    def without_gpu(self) -> Machine:
        return Machine(cpu_has_bfloat16=self.cpu_has_bfloat16, host_bytes=self.host_bytes)


@functools.cache
def this_machine() -> Machine:
    """Return the machine that this process runs on. Imports torch."""
    import torch

    has_gpu = torch.cuda.is_available()
    properties: Any = torch.cuda.get_device_properties() if has_gpu else None
    return Machine(
        gpu=torch.cuda.get_device_name() if has_gpu else None,
        # Emulated bfloat16 is slower than float32.
        gpu_has_bfloat16=has_gpu and torch.cuda.is_bf16_supported(including_emulation=False),
        gpu_shared_bytes=getattr(properties, "shared_memory_per_block_optin", 0),
        is_rocm=has_gpu and torch.version.hip is not None,
        gpu_bytes=properties.total_memory if properties else None,
        host_bytes=read_host_bytes(),
        cpu_has_bfloat16=bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    )


def launch_machine(machine: Machine | None = None) -> Machine:
    """Return the machine for training: the given or this one, as far as accelerate may use it."""
    from accelerate.utils import parse_flag_from_env  # imported here, because it imports torch

    machine = machine or this_machine()
    return machine.without_gpu if parse_flag_from_env("ACCELERATE_USE_CPU") else machine


def read_host_bytes(cgroup_limit: Path = CGROUP_LIMIT) -> int:
    """Return the memory of this machine, or the limit of this container, in bytes."""
    num_bytes: int = psutil.virtual_memory().total
    if cgroup_limit.is_file() and (limit := cgroup_limit.read_text().strip()).isdigit():
        # This is cgroup v2. Without a limit, the file contains `max`.
        num_bytes = min(num_bytes, int(limit))
    return num_bytes
