"""The part of a backend that drives a device: the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class Driver(DriverBase):
    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is compiled here: set TRITON_INTERPRET=1")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def bench(
            kernel_call: Callable[[], Any], *, quantiles: list[float], **options: Any
        ) -> list[float]:
            began_s = time.perf_counter()
            kernel_call()
            return [1e3 * (time.perf_counter() - began_s)] * len(quantiles)

        return bench
