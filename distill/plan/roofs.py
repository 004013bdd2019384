"""The time of counted operations on devices, by the best that each can compute and move.

No measurement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["product", "attention", "other"]  # other: moves bytes and computes little

PRODUCT_SHARE, ATTENTION_SHARE, BANDWIDTH_SHARE = 0.65, 0.4, 0.85
"""The part of a device's best that operations reach: of the FLOP/s in large matrix products and in
fused attention kernels, and of the memory's bandwidth.
"""

LAUNCH_S = 5e-6  # least time of an operation: eager PyTorch launches about 200,000 a second


@dataclass(frozen=True)
class Operation:
    """One kernel's work."""

    part: str  # The part of the code that ran it, by `Count.begin`.
    kind: Kind
    flops: int
    num_bytes: int  # Read and written, if nothing is found in a cache.

    def seconds(self, device: Device) -> float:
        """The longest of computing, moving and launching."""
        reached = {"product": PRODUCT_SHARE, "attention": ATTENTION_SHARE}.get(self.kind, 1.0)
        moving = self.num_bytes / (device.bytes_per_s * BANDWIDTH_SHARE)
        # A view moves no byte and launches no kernel.
        return max(
            self.flops / (device.flops_per_s * reached), moving, LAUNCH_S if self.num_bytes else 0.0
        )


HOST_BYTES_PER_S = 20e9  # over PCIe 5 x16 (63 GB/s at best), pinning included


@dataclass(frozen=True)
class Device:
    """A GPU, by the data sheet. Sparsity is not used."""

    name: str
    flops_per_s: float  # Matrix products in bfloat16.
    bytes_per_s: float
    memory_bytes: float  # advertised: the chips have 2^30 each, the rest is for CUDA and NCCL
    link_bytes_per_s: float  # NVLink, one direction.


DEVICES = (
    # NVIDIA H100 SXM5 data sheet
    Device("H100", 989.4e12, 3.35e12, 80e9, 450e9),
    # NVIDIA H200 SXM data sheet
    Device("H200", 989.4e12, 4.8e12, 141e9, 450e9),
    # NVIDIA DGX B200 data sheet, an eighth of the system
    Device("B200", 2250e12, 8e12, 180e9, 900e9),
)


@dataclass(frozen=True, kw_only=True)
class Work:
    flops: int = 0
    num_bytes: int = 0
    calls: int = 0
    seconds: dict[str, float]


def add_up(operations: Counter[Operation], chosen: Iterable[Operation]) -> Work:
    kept = [(work, operations[work]) for work in chosen]
    return Work(
        flops=sum(work.flops * times for work, times in kept),
        num_bytes=sum(work.num_bytes * times for work, times in kept),
        calls=sum(times for work, times in kept if work.num_bytes),
        seconds={d.name: sum(work.seconds(d) * times for work, times in kept) for d in DEVICES},
    )


def parts_of(operations: Counter[Operation]) -> list[str]:
    return list(dict.fromkeys(work.part for work in operations))


KINDS: dict[Kind, str] = {
    "product": "matrix products",
    "attention": "attention",
    "other": "everything else",
}


def all_reduce_s(num_bytes: float, num_devices: int, device: Device) -> float:
    """Time to sum a gradient over devices on one ring of NVLink.

    Every byte but one part of it travels twice.
    """
    return 2 * all_gather_s(num_bytes, num_devices, device)


def all_gather_s(num_bytes: float, num_devices: int, device: Device) -> float:
    """Time for every device to receive the other devices' parts of `num_bytes`, on one ring of
    NVLink.
    """
    return (num_devices - 1) / num_devices * num_bytes / device.link_bytes_per_s
