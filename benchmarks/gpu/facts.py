"""Measure the machine's limits: its packages, its card, copy bandwidth and matrix products."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict

import torch

from benchmarks.gpu.check import Config
from benchmarks.gpu.results import Results, median_s
from redraft.engine.hardware import this_machine
from redraft.engine.machine import environment, find_version

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "datasets",
    "safetensors",
    "vllm",
    "liger-kernel",
    "trl",
)


def measure(cfg: Config, results: Results) -> None:
    """Record the versions, then measure bandwidth and matrix products."""
    device = torch.device(cfg.device)
    results.measure("environment", environment)
    results.measure("machine", lambda: asdict(this_machine()))
    results.measure("versions", lambda: {name: find_version(name) for name in PACKAGES})
    results.measure(
        "compilers", lambda: {name: shutil.which(name) for name in ("g++", "nvcc", "ncu")}
    )
    results.measure("cores", os.cpu_count)
    results.measure("copy, TB/s read and written", time_copy, device)
    for dtype in (torch.bfloat16, torch.float32):
        results.measure(f"matrix product in {dtype}, TFLOP/s", time_product, device, dtype)
    if device.type == "cuda":
        for pinned in (True, False):
            kind = "pinned" if pinned else "pageable"
            results.measure(f"host to device, {kind}, GB/s", time_upload, device, pinned)


def time_copy(device: torch.device) -> float:
    """Measure the bandwidth of a copy, read plus written bytes, in TB/s."""
    source = torch.ones(
        1 << (30 if device.type == "cuda" else 25), dtype=torch.uint8, device=device
    )
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_s(lambda: target.copy_(source), device) / 1e12


def time_product(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the product of two square matrices, in TFLOP/s."""
    size = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / median_s(lambda: left @ right, device, rounds=5) / 1e12


def time_upload(device: torch.device, pinned: bool) -> float:
    """In GB/s."""
    source = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    return source.nbytes / median_s(lambda: target.copy_(source), device, rounds=5) / 1e9


MEASURES = {"facts": measure}
