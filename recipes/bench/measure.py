"""Measurement of a benchmark: all sides of a case take turns in one process, with the bare matmuls as a floor.

A change of the machine's speed affects all sides, and the matmuls show the speed available. Peak memory is the memory
of a side above weights and inputs, measured in a fresh process per side.
"""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

DtypeName = Literal["bfloat16", "float32"]
DTYPES: tuple[DtypeName, ...] = ("bfloat16", "float32")

Run = Callable[[], Tensor]
"""One whole run of a side. It returns the loss, which should be the same for all sides of a case."""

OURS = "ours"
FLOOR = "matmuls alone"

FLOOR_ROWS = 256
"""Rows per product of the floor. A larger result would leave the caches; fewer rows would make a matmul slower."""


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """`count` products [rows, inner] @ [inner, columns]."""

    count: int
    rows: int
    inner: int
    columns: int

    @property
    def flops(self) -> float:
        return 2.0 * self.count * self.rows * self.inner * self.columns


@dataclass(frozen=True, kw_only=True)
class Required:
    """Requirements for the ratio of ours to another side."""

    speed: float | None = None
    """Smallest passing ratio of tokens/s."""
    memory: float | None = None
    """Largest passing ratio of peak memory."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One task done in several ways, the sides."""

    name: str
    against: Mapping[str, str]
    """Descriptions of the other sides, by name."""
    tokens: int
    """Tokens of one run."""
    dtype: DtypeName
    matmuls: tuple[Matmul, ...]
    """The products needed by every side."""
    build: Callable[[str, str], Run]
    """Allocates a side's weights and inputs on a device. It must be picklable, because other processes call it."""
    required: Mapping[str, Required] = field(default_factory=dict)
    compiled: frozenset[str] = frozenset()
    """Sides that compile in their first run. That takes memory itself, so their peak is not told."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Side:
    """The measurements of one side."""

    tokens_per_s: float
    wall_s: list[float]
    """Wall time of every round."""
    cpu_s: list[float]
    """CPU time of every round."""
    peak_mib: float | None
    """None if it was not measured."""
    loss: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measurements of one case."""

    case: str
    sides: dict[str, Side]
    speed_ratio: dict[str, float]
    """Median over rounds of the ratio of tokens/s, ours to each other side, including the floor."""
    cpu_time_ratio: dict[str, float]
    """The same by CPU time, which is steadier on a busy machine."""
    gflops_per_s: float
    """Speed of the matmuls alone."""
    threads: int


def can_compile() -> bool:
    """Whether `torch.compile` finds the compiler it needs here: Triton on a GPU, else one for C++."""
    if torch.cuda.is_available():
        return importlib.util.find_spec("triton") is not None
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def measure(case: Case, *, rounds: int, threads: int, device: str) -> Measurement:
    """Measure a case: the time of all sides in turn, the memory of each alone."""
    fresh = functools.partial(_in_fresh_process, threads=threads)
    names = [OURS, *case.against]
    wall, cpu, losses, threads_used = fresh(_time_case, case, names, rounds, device)
    # One process each: a freed block of one side would hide the peak of the next.
    peaks = {name: fresh(_peak_bytes, case, name, device) / 2**20 for name in names if name not in case.compiled}
    sides = {
        name: Side(
            tokens_per_s=case.tokens / statistics.median(wall[name]),
            wall_s=wall[name],
            cpu_s=cpu[name],
            peak_mib=peaks.get(name),
            loss=losses.get(name, 0.0),
        )
        for name in (*names, FLOOR)
    }
    others = [*case.against, FLOOR]
    return Measurement(
        case=case.name,
        sides=sides,
        speed_ratio={name: _median_ratio(wall[name], wall[OURS]) for name in others},
        cpu_time_ratio={name: _median_ratio(cpu[name], cpu[OURS]) for name in others},
        gflops_per_s=sum(m.flops for m in case.matmuls) / statistics.median(wall[FLOOR]) / 1e9,
        threads=threads_used,
    )


def _median_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(other / our for other, our in zip(theirs, ours, strict=True))


Seconds = dict[str, list[float]]


def _time_case(case: Case, names: Sequence[str], rounds: int, device: str) -> tuple[Seconds, Seconds, Any, int]:
    """(wall seconds by side, CPU seconds by side, losses of the first runs by side, threads used by torch)."""
    runs = {name: case.build(name, device) for name in names}
    losses = {name: float(run()) for name, run in runs.items()}  # warms up too
    runs[FLOOR] = matmuls_alone(case.matmuls, getattr(torch, case.dtype), device)
    runs[FLOOR]()
    wall: Seconds = {name: [] for name in runs}
    cpu: Seconds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter(), time.process_time()  # wall, and CPU of all threads
            run()
            if device != "cpu":
                torch.cuda.synchronize()  # kernels are still running when their launch returns
            wall[name].append(time.perf_counter() - started[0])
            cpu[name].append(time.process_time() - started[1])
    return wall, cpu, losses, torch.get_num_threads()


def matmuls_alone(matmuls: Sequence[Matmul], dtype: torch.dtype, device: str) -> Run:
    """The products of a case, FLOOR_ROWS rows at a time, into preallocated memory: the speed available now."""
    operands = []
    for m in matmuls:
        rows = min(m.rows, FLOOR_ROWS)
        left, right = (
            torch.randn(*shape, device=device).to(dtype) for shape in ((rows, m.inner), (m.columns, m.inner))
        )
        out = torch.empty(rows, m.columns, device=device, dtype=dtype)
        # As many calls of FLOOR_ROWS rows as make up all products.
        operands.append((m.count * m.rows // rows, left, right.T, out))

    def run() -> Tensor:
        for count, left, right, out in operands:
            for _ in range(count):
                torch.mm(left, right, out=out)
        return torch.zeros(())

    return run


def _peak_bytes(case: Case, side: str, device: str) -> int:
    """Peak memory of one run of `side` above weights and inputs. Call it in a fresh process."""
    run = case.build(side, device)
    tiny = torch.ones(8, 8, device=device, dtype=getattr(torch, case.dtype), requires_grad=True)
    torch.autograd.backward((tiny @ tiny).sum())  # libraries allocate at their first call
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the process's peak of resident memory
    before = _resident_peak_bytes()
    run()
    return _resident_peak_bytes() - before


def _resident_peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


Result = TypeVar("Result")


def _in_fresh_process(function: Callable[..., Result], *args: Any, threads: int) -> Result:
    """Run `function(*args)` in a new interpreter, free of the memory and caches of other measurements."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_set_threads, initargs=(threads,)) as pool:
        return pool.submit(function, *args).result()


def _set_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)


def profile(case: Case, *, threads: int, device: str) -> list[tuple[str, float]]:
    """(operation, share of our time) of the twelve slowest operations, measured in a fresh process."""
    return _in_fresh_process(_profile, case, device, threads=threads)


def _profile(case: Case, device: str) -> list[tuple[str, float]]:
    run = case.build(OURS, device)
    run()
    with torch.profiler.profile() as profiler:
        run()
    times = {
        e.key: e.self_device_time_total if device != "cpu" else e.self_cpu_time_total for e in profiler.key_averages()
    }
    whole = sum(times.values())
    return [(key, time / whole) for key, time in sorted(times.items(), key=lambda item: -item[1])[:12]]
