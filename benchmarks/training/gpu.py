"""Run the steps that `redraft plan` counts on a GPU, and compare the time with the estimate.

This is `python -m benchmarks.training --gpu`.

plan (`count.make_plan`) ─► counted FLOPs and estimate
                        └─► run with random weights ─► tokens/s, share of the FLOP/s, peak memory

The file is written after every family, so that if a family crashes the process, the results of
earlier families are not lost.
"""

from __future__ import annotations

import gc
import json
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import cast

import torch

from redraft.distill.plan.counted_step import (
    Counted,
    Marker,
    Plan,
    count_flops,
    count_step,
    make_batch,
    make_models,
    make_source,
    make_step_optimizers,
    run_parts,
)
from redraft.distill.plan.operations import DEVICES, Device, Operation
from redraft.distill.signal.transfer import to_device
from redraft.distill.train.step import compile_layers
from redraft.engine.machine import environment
from redraft.files.artifact import write_whole
from redraft.heads.catalog import FamilyName
from redraft.recipes.plan.count import fit, make_plan
from redraft.recipes.plan.plan import PlanConfig

FAMILIES: tuple[FamilyName, ...] = ("standalone", "eagle3", "medusa", "mtp", "dflash")


@dataclass(frozen=True, kw_only=True)
class Config(PlanConfig):
    """A step to count and run."""

    compile: bool = False
    """With --gpu, run the step with compiled layers (--loop.compile). Operations are counted for
    uncompiled layers.
    """


@dataclass(frozen=True, kw_only=True)
class GpuResult:
    """One family's step on one device."""

    family: str
    target: str
    """The name of the target's sizes."""
    settings: str
    """The flags of `redraft plan` that count this step."""
    tokens: int
    """Number of tokens in a step."""
    tokens_per_s: float
    flops_per_s: float
    """Counted FLOPs of the step divided by its time; recomputation does not count."""
    mfu: float | None
    """`flops_per_s` as a share of the data sheet's value; None for a device that is not in
    `operations`.
    """
    peak_gb: float | None
    estimated_tokens_per_s: float | None
    estimated_peak_gb: float | None


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A family that did not run."""

    family: str
    target: str
    reason: str


def main(cfg: Config, *, rounds: int, output: Path) -> None:
    """Measure every family, print and write.

    Raises:
        ValueError: there is no GPU, or no family ran.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "there is no GPU to measure on; `redraft plan` counts the same steps without one"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    print("  ".join(f"{name} {value}" for name, value in environment().items()), flush=True)
    measure_all(
        cfg, FAMILIES, device, torch.cuda.get_device_name(device), rounds=rounds, output=output
    )


def measure_all(
    cfg: Config,
    families: Sequence[FamilyName],
    device: torch.device,
    name: str,
    *,
    rounds: int,
    output: Path,
) -> None:
    """Measure the families on the device that its driver calls `name`.

    Print and write each result as soon as it is available.

    Raises:
        ValueError: no family ran.
    """
    results: list[GpuResult] = []
    left_out: list[LeftOut] = []
    for result in measure(cfg, families, device, find_device(name), rounds):
        print(describe(result), flush=True)
        if isinstance(result, GpuResult):
            results.append(result)
        else:
            left_out.append(result)
        report = {
            "environment": environment(),
            "device": name,
            "results": [asdict(one) for one in results],
            "left_out": [asdict(one) for one in left_out],
        }
        write_whole(output, json.dumps(report, indent=2) + "\n")
    print(f"written to {output}")
    if not results:
        raise ValueError("no family ran, for the reasons above")


def find_device(name: str) -> Device | None:
    """Find the data sheet of a GPU by the name that its driver reports."""
    return next((device for device in DEVICES if device.name in name), None)


def measure(
    cfg: Config,
    families: Sequence[FamilyName],
    device: torch.device,
    sheet: Device | None,
    rounds: int,
) -> Iterator[GpuResult | LeftOut]:
    """Yield the result of each family, or the reason why it did not run.

    A family that fails does not stop the others.
    """
    for family in families:
        try:
            own = choose_sizes(cfg, family, sheet)
            yield measure_plan(own, make_plan(own), device, sheet, rounds)
        # Catch all exceptions, because a kernel compiler has a different exception type for every
        # stage.
        except Exception as error:
            yield LeftOut(
                family=family, target=replace(cfg, family=family).target_name, reason=explain(error)
            )
        # Modules in reference cycles keep device memory until they are collected, and the next
        # family needs it.
        gc.collect()


def choose_sizes(cfg: Config, family: FamilyName, sheet: Device | None) -> Config:
    """Choose the flags of a family's step.

    With them, `redraft plan` fits the step on this GPU, or on the smallest known one.
    """
    smallest = min(DEVICES, key=lambda device: device.memory_bytes)
    return cast(Config, fit(replace(cfg, family=family), sheet or smallest))


def explain(error: Exception) -> str:
    """Explain an error in one line."""
    first = next(iter(str(error).splitlines()), "")
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return f"it does not fit ({first})"
    # Other exceptions are not written for users, so their type says more than their text.
    return first if isinstance(error, ValueError) else f"{type(error).__name__}: {first}"


def count_model_flops(plan: Plan, counted: Counted) -> int:
    """Count a step's FLOPs without recomputation, as for an MFU (arXiv 2204.02311, appendix B)."""
    if not plan.gradient_checkpointing:
        return count_flops(counted)
    return count_flops(count_step(replace(plan, gradient_checkpointing=False)))


def measure_plan(
    cfg: Config, plan: Plan, device: torch.device, sheet: Device | None, rounds: int
) -> GpuResult:
    """Count, estimate and run one step."""
    counted = count_step(plan)
    flops = count_model_flops(plan, counted)
    timed = time_step(plan, device, rounds=rounds, compiles=cfg.compile)
    return GpuResult(
        family=plan.family,
        target=cfg.target_name,
        settings=write_flags(cfg),
        tokens=plan.tokens,
        tokens_per_s=plan.tokens / timed.seconds,
        flops_per_s=flops / timed.seconds,
        mfu=flops / timed.seconds / sheet.flops_per_s if sheet else None,
        peak_gb=None if timed.peak_bytes is None else timed.peak_bytes / 1e9,
        estimated_tokens_per_s=plan.tokens / estimate_s(counted.operations, sheet)
        if sheet
        else None,
        estimated_peak_gb=counted.memory.total() / 1e9 if sheet else None,
    )


SHARES = {"product": 0.65, "attention": 0.4}
"""Share of a device's FLOP/s that large matrix products and fused attention kernels reach."""

BANDWIDTH_SHARE = 0.85  # the part of the memory's bandwidth that kernels reach
LAUNCH_S = 5e-6  # shortest time of an operation: eager PyTorch launches about 200,000 a second


def estimate_s(operations: Counter[Operation], device: Device) -> float:
    """Estimate the time of counted operations: each takes the longest of compute, memory and launch.

    This is not a measurement, and has not been confirmed on any GPU.
    """

    def seconds(work: Operation) -> float:
        computing = work.flops / (device.flops_per_s * SHARES.get(work.kind, 1.0))
        moving = work.num_bytes / (device.bytes_per_s * BANDWIDTH_SHARE)
        # A view moves no data and launches no kernel.
        return max(computing, moving, LAUNCH_S if work.num_bytes else 0.0)

    return sum(seconds(work) * times for work, times in operations.items())


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The measurements of a step that was run."""

    seconds: float
    """The median."""
    peak_bytes: int | None
    """Peak memory in use on the device, including weights; None on a CPU."""


class Unmarked:
    """A `Marker` that records nothing."""

    def begin(self, part: str) -> None: ...


def prepare_step(
    plan: Plan, device: torch.device, *, compiles: bool = False
) -> Callable[[Marker], None]:
    """Prepare the step of `count_step` on a device, with random weights.

    Each call of the result runs the step once and marks its parts.
    """
    torch.manual_seed(0)
    model, draft = make_models(plan, device)
    # Created on the CPU and moved, because the generator of the ids is on the CPU.
    batch = to_device(make_batch(plan), device)
    with device:
        source = make_source(plan, model, draft, batch, has_weights=False)
        signal = None if plan.signal == "model" else source(batch)
    optimizers = make_step_optimizers(plan, draft)
    if compiles:
        compile_layers(draft, source)

    def run(marker: Marker) -> None:
        run_parts(plan, draft, source, batch, signal, optimizers, marker, device.type)
        for optimizer in optimizers:
            optimizer.zero_grad()

    return run


def time_step(
    plan: Plan, device: torch.device, *, rounds: int, warm_up: int = 2, compiles: bool = False
) -> Timed:
    """Run the step of `count_step` on a device, with random weights. `compiles` compiles layers."""
    on_gpu = device.type == "cuda"
    run = prepare_step(plan, device, compiles=compiles)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for _ in range(warm_up + rounds):
        started = time.perf_counter()
        run(Unmarked())
        if on_gpu:
            torch.cuda.synchronize(device)  # kernels are still running when their launch returns
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else None
    return Timed(seconds=statistics.median(seconds[warm_up:]), peak_bytes=peak)


def write_flags(cfg: PlanConfig) -> str:
    """Return the flags of `redraft plan` that differ from its defaults."""
    words = []
    for one in fields(PlanConfig):
        value = getattr(cfg, one.name)
        if one.name != "json" and value != one.default:
            words.append(f"--{one.name.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return shlex.join(words)


def describe(result: GpuResult | LeftOut) -> str:
    """One line."""
    name = f"{result.family:<12} {result.target:<14}"
    if isinstance(result, LeftOut):
        return f"{name} left out: {result.reason}"
    parts = [f"{result.tokens_per_s:,.0f} tokens/s", f"{result.flops_per_s / 1e12:,.1f} TFLOP/s"]
    if result.mfu is not None:
        parts.append(f"MFU {result.mfu:.0%}")
    if result.peak_gb is not None:
        parts.append(f"peak {result.peak_gb:,.1f} GB")
    if result.estimated_tokens_per_s is not None:
        parts.append(
            f"counted: {result.estimated_tokens_per_s:,.0f} tokens/s, peak "
            f"{result.estimated_peak_gb:,.1f} GB"
        )
    if result.settings:
        parts.append(f"by redraft plan {result.settings}")
    return f"{name} {', '.join(parts)}"
