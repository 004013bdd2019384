"""Run on the card the training steps that `redraft plan` counts.

The results are the benchmark's numbers, the time of each part on device and host, the waits, and
the slowest kernels.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.gpu.check import Config
from benchmarks.gpu.results import Results
from benchmarks.training import gpu
from redraft.distill.plan.counted_step import Plan
from redraft.distill.plan.operations import Device
from redraft.recipes.plan.count import make_plan

LOSS_CASES = ("fused loss, vocabulary 128k, bfloat16", "fused loss, vocabulary 32k, bfloat16")

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


def measure_steps(cfg: Config, results: Results) -> None:
    """Each family's step."""
    device = torch.device("cuda", torch.cuda.current_device())
    sheet = gpu.find_device(torch.cuda.get_device_name(device))
    for family in cfg.families:
        own = gpu.choose_sizes(gpu.Config(), family, sheet)
        plan = make_plan(own)
        results.measure(family, measure_family, own, plan, device, sheet)
        results.measure(f"{family}, parts", measure_parts, plan, device)


def measure_family(
    own: gpu.Config, plan: Plan, device: torch.device, sheet: Device | None
) -> dict[str, Any]:
    """The benchmark's result."""
    return asdict(gpu.measure_plan(own, plan, device, sheet, 3))


class Marks:
    """Start times of a step's parts, on the device and on the host."""

    def __init__(self) -> None:
        self.found: list[tuple[str, torch.cuda.Event, float]] = []

    def begin(self, part: str) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self.found.append((part, event, time.perf_counter()))


def measure_parts(plan: Plan, device: torch.device) -> dict[str, Any]:
    """Measure each part of a step in milliseconds, on the device and on the host.

    If both times are equal, kernel launches are the limit, or the host waits for the device.
    """
    run = gpu.prepare_step(plan, device)
    for _ in range(2):
        run(Marks())
    device_ms: dict[str, list[float]] = {}
    host_ms: dict[str, list[float]] = {}
    for _ in range(4):
        marks = Marks()
        torch.cuda.synchronize()
        run(marks)
        marks.begin("")
        torch.cuda.synchronize()
        for (part, event, host_s), (_, next_event, next_s) in zip(
            marks.found, marks.found[1:], strict=False
        ):
            device_ms.setdefault(part, []).append(event.elapsed_time(next_event))
            host_ms.setdefault(part, []).append(1e3 * (next_s - host_s))
    kinds = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds) as seen:
        run(Marks())
        torch.cuda.synchronize()
    events = seen.key_averages()
    kernels = sorted(
        (event for event in events if "CUDA" in str(event.device_type)),
        key=lambda event: -event.self_device_time_total,
    )
    return {
        "tokens": plan.tokens,
        "device, ms": {
            part: round(statistics.median(values), 2) for part, values in device_ms.items()
        },
        "host, ms": {part: round(statistics.median(values), 2) for part, values in host_ms.items()},
        "peak GB": torch.cuda.max_memory_allocated() / 1e9,
        "waits": sum(event.count for event in events if event.key in WAITS),
        "kernels, count, ms": [
            (event.key[:110], event.count, round(event.self_device_time_total / 1e3, 3))
            for event in kernels[:28]
        ],
    }


def measure_loss(cfg: Config, results: Results) -> None:
    """Measure the fused loss alone, with the benchmark's command."""
    for case in LOSS_CASES:
        file = cfg.output / f"loss-{len(results.found)}.json"
        flags = ["--device", "cuda", "--rounds", "7", "--cases", case, "--output", str(file)]
        code = subprocess.run([sys.executable, "-m", "benchmarks.training", *flags]).returncode
        results.keep(case, file.read_text() if code == 0 else f"exit status {code}")


MEASURES = {"step": measure_steps, "loss": measure_loss}
