"""Counted operations, and GPUs as described by their data sheets."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["product", "attention", "other"]  # "other" moves bytes and computes little


@dataclass(frozen=True)
class Operation:
    """The work of one kernel."""

    part: str
    """Part of the code that ran the operation, set by `Count.begin`."""
    kind: Kind
    flops: int
    num_bytes: int
    """Bytes read and written, assuming no cache hits."""


@dataclass(frozen=True)
class Device:
    """A GPU as its data sheet describes it, without sparsity."""

    name: str
    flops_per_s: float
    """Peak rate of matrix products in bfloat16."""
    bytes_per_s: float
    memory_bytes: float
    """Advertised memory, in units of 10^9 bytes. The chips have 2^30 bytes per GB, and the
    difference is left to CUDA and NCCL.
    """


DEVICES = (
    # NVIDIA H100 SXM5 data sheet
    Device("H100", 989.4e12, 3.35e12, 80e9),
    # NVIDIA H200 SXM data sheet
    Device("H200", 989.4e12, 4.8e12, 141e9),
    # NVIDIA DGX B200 data sheet, one eighth of the system
    Device("B200", 2250e12, 8e12, 180e9),
    # AMD Instinct MI300X data sheet
    Device("MI300X", 1307.4e12, 5.3e12, 192e9),
)


@dataclass(frozen=True, kw_only=True)
class Work:
    flops: int = 0
    num_bytes: int = 0
    calls: int = 0


def add_up(operations: Counter[Operation], chosen: Iterable[Operation]) -> Work:
    kept = [(work, operations[work]) for work in chosen]
    return Work(
        flops=sum(work.flops * times for work, times in kept),
        num_bytes=sum(work.num_bytes * times for work, times in kept),
        # A view moves no bytes and launches no kernel.
        calls=sum(times for work, times in kept if work.num_bytes),
    )


def parts_of(operations: Counter[Operation]) -> list[str]:
    return list(dict.fromkeys(work.part for work in operations))


KINDS: dict[Kind, str] = {
    "product": "matrix products",
    "attention": "attention",
    "other": "everything else",
}
