"""`redraft bench-training --gpu`: the steps that `--count` counts, run on a GPU, beside the estimate.

plan (`count.make_plan`) ─► counted FLOPs and estimate
                        └─► run with random weights ─► tokens/s, share of the FLOP/s, peak memory
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from redraft.eval.machine import environment
from redraft.eval.report.page import write_results
from redraft.recipes.bench.count import Counting, FamilyName, make_plan, on_device
from redraft.recipes.bench.roofs import DEVICES, Device
from redraft.recipes.bench.step import Plan, count_step, time_step

FAMILIES: tuple[FamilyName, ...] = ("standalone", "eagle3", "medusa", "mtp", "dflash")


@dataclass(frozen=True, kw_only=True)
class GpuResult:
    """One family's step on one device."""

    family: str
    tokens: int
    """Tokens of a step."""
    tokens_per_s: float
    flops_per_s: float
    """Counted FLOPs of the step over the time."""
    mfu: float | None
    """`flops_per_s` as a share of the data sheet's; None for a device that is not in `roofs`."""
    peak_gb: float | None
    estimated_tokens_per_s: float | None
    estimated_peak_gb: float | None


def main(cfg: Counting, *, rounds: int, output: Path) -> None:
    """Measure every family, print and write.

    Raises:
        ValueError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("there is no GPU to measure on; --count estimates the same steps without one")
    device = torch.device("cuda", torch.cuda.current_device())
    print("  ".join(f"{name} {value}" for name, value in environment().items()), flush=True)
    results = measure(cfg, FAMILIES, device, find_device(torch.cuda.get_device_name(device)), rounds)
    write_results(output, {"device": torch.cuda.get_device_name(device), "results": [asdict(r) for r in results]})


def find_device(name: str) -> Device | None:
    """The data sheet of a GPU by the name that its driver gives."""
    return next((device for device in DEVICES if device.name in name), None)


def measure(
    cfg: Counting, families: Sequence[FamilyName], device: torch.device, sheet: Device | None, rounds: int
) -> list[GpuResult]:
    """The results of the families, printed one by one. A family that does not fit is told, and left out."""
    results = []
    for family in families:
        plan = make_plan(replace(cfg, family=family))
        try:
            result = measure_plan(cfg, plan, device, sheet, rounds)
        except torch.cuda.OutOfMemoryError as error:
            print(f"{family}: does not fit ({str(error).splitlines()[0]})", flush=True)
        else:
            print(describe(result), flush=True)
            results.append(result)
        # Modules in reference cycles keep device memory until they are collected. The next family needs it.
        gc.collect()
    return results


def measure_plan(cfg: Counting, plan: Plan, device: torch.device, sheet: Device | None, rounds: int) -> GpuResult:
    """Count, estimate and run one step."""
    counted = count_step(plan)
    flops = sum(work.flops * times for work, times in counted.operations.items())
    timed = time_step(plan, device, rounds=rounds)
    estimate = on_device(cfg, plan, counted, None, sheet) if sheet else None
    return GpuResult(
        family=plan.family,
        tokens=plan.tokens,
        tokens_per_s=plan.tokens / timed.seconds,
        flops_per_s=flops / timed.seconds,
        mfu=flops / timed.seconds / sheet.flops_per_s if sheet else None,
        peak_gb=None if timed.peak_bytes is None else timed.peak_bytes / 1e9,
        estimated_tokens_per_s=estimate.tokens_per_s if estimate else None,
        estimated_peak_gb=estimate.memory_bytes / 1e9 if estimate else None,
    )


def describe(result: GpuResult) -> str:
    """One line."""
    parts = [f"{result.tokens_per_s:,.0f} tokens/s", f"{result.flops_per_s / 1e12:,.1f} TFLOP/s"]
    if result.mfu is not None:
        parts.append(f"MFU {result.mfu:.0%}")
    if result.peak_gb is not None:
        parts.append(f"peak {result.peak_gb:,.1f} GB")
    if result.estimated_tokens_per_s is not None:
        parts.append(f"counted: {result.estimated_tokens_per_s:,.0f} tokens/s, peak {result.estimated_peak_gb:,.1f} GB")
    return f"{result.family:<12} {', '.join(parts)}"
