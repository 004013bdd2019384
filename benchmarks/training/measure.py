"""The measurement of a benchmark.

All sides of a case take turns in one process, with bare matmuls as a floor.

A change of the machine's speed affects all sides, and the matmuls show the speed available. Peak
memory is a side's memory above weights and inputs, measured in a fresh process per side, after a
run that compiles.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

DtypeName = Literal["bfloat16", "float32"]
DTYPES: tuple[DtypeName, ...] = ("bfloat16", "float32")

Run = Callable[[], Tensor]
"""One whole run of a side. It returns the loss, which should be the same for all sides of a case.
"""

OURS, OURS_COMPILED = "ours", "ours, compiled"
"""Names of redraft's sides: by default, and with `--loop.compile`, which is compared with compiled
peers.
"""
FLOOR = "matmuls alone"

FLOOR_ROWS, FLOOR_ROWS_GPU = 256, 4096
"""Number of rows per matmul of the floor. On a CPU, a larger result would not fit into the caches.
Fewer rows would make a matmul slower, or leave most of a GPU idle.
"""

MEMORY_RUNS = 3
"""Number of peak-memory runs per side."""


class Step:
    """One side's training step.

    It computes the loss and the backward pass, and takes an optimizer step if there is one.
    """

    def __init__(
        self,
        loss: Run,
        trained: Iterable[Tensor],
        make_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    ) -> None:
        self.loss = loss
        self.trained = list(trained)
        self.optimizer = make_optimizer(self.trained) if make_optimizer else None

    def __call__(self) -> Tensor:
        self._drop_gradients()
        loss = self.loss()
        torch.autograd.backward(loss)
        if self.optimizer:
            self.optimizer.step()
        return loss.detach()

    def forget(self) -> None:
        """Free the gradients and the optimizer's state.

        The next run then allocates everything that the first run did.
        """
        self._drop_gradients()
        if self.optimizer:
            self.optimizer.state.clear()

    def _drop_gradients(self) -> None:
        for tensor in self.trained:
            tensor.grad = None


adamw = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)
"""The optimizer of every side that has one. It is the default of transformers' Trainer."""


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
    """Requirements for the ratio of redraft's result to a peer's."""

    speed: float | None = None
    """Smallest ratio of tokens/s that passes."""
    memory: float | None = None
    """Largest ratio of peak memory that passes."""


@dataclass(frozen=True, kw_only=True)
class Against:
    """A side of a case with which ours is compared."""

    description: str
    peer: str
    """Name in the report, i.e. the peer's name in lower case. It is the same for the peer as it
    ships and compiled.
    """
    is_compiled: bool = False
    """Whether `torch.compile` is applied. If compilation fails, the side is left out."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One task that is done in several ways, called sides."""

    name: str
    family: str
    """Name of the draft's family or the loss, for the report."""
    against: Mapping[str, Against]
    """The other sides, by name."""
    tokens: int
    """Number of tokens in one run."""
    dtype: DtypeName
    matmuls: tuple[Matmul, ...]
    """The matrix products that every side needs."""
    build: Callable[[str, str], Run]
    """Allocates a side's weights and inputs on a device. It must be picklable, because other
    processes call it.
    """
    required: Mapping[str, Required] = field(default_factory=dict)
    note: str = ""
    compiles: bool = False
    """Whether our side has a compiled form, which `build` supports too."""

    def own_sides(self, device: str) -> tuple[str, ...]:
        return (OURS, OURS_COMPILED) if self.compiles and can_compile(device) else (OURS,)

    def own_side(self, other: str, ran: Iterable[str]) -> str:
        """Return our side for the comparison with a given one.

        For a compiled peer, this is ours compiled, if that is among `ran`.
        """
        is_compiled = other in self.against and self.against[other].is_compiled
        return OURS_COMPILED if is_compiled and OURS_COMPILED in ran else OURS


@dataclass(frozen=True, kw_only=True)
class Side:
    """The measurements of one side."""

    tokens_per_s: float
    wall_s: list[float]
    """Wall time of every round."""
    cpu_s: list[float]
    """CPU time of every round."""
    peak_mib: float | None
    """The median of `peaks_mib`; None for the floor."""
    peaks_mib: list[float]
    """Peak memory of every measured run."""
    loss: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measurements of one case."""

    case: str
    sides: dict[str, Side]
    speed_ratio: dict[str, float]
    """Our side's tokens/s (`Case.own_side`) divided by each other side's and by the floor's, as the
    median over rounds.
    """
    cpu_time_ratio: dict[str, float]
    """The same ratio by CPU time, which is steadier on a busy machine."""
    gflops_per_s: float
    """Speed of the matmuls alone."""
    threads: int
    left_out: dict[str, str]
    """Sides that do not compile on this machine, with the first line of the error."""


def can_compile(device: str) -> bool:
    """Whether `torch.compile` finds the compiler it needs, i.e.

    Triton for a GPU and otherwise a C++ compiler.
    """
    if device != "cpu":
        return importlib.util.find_spec("triton") is not None
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def measure(case: Case, *, rounds: int, threads: int, device: str) -> Measurement:
    """Measure a case: the time of all sides in turn, and the memory of each side alone."""
    fresh = functools.partial(_in_fresh_process, threads=threads)
    timed = fresh(_time_case, case, rounds, device)
    wall, cpu = timed.wall_s, timed.cpu_s
    # Each side has its own process, because a freed block of one side would hide the peak of the
    # next.
    peaks = {name: fresh(_measure_peaks, case, name, device) for name in timed.losses}
    sides = {
        name: Side(
            tokens_per_s=case.tokens / statistics.median(wall[name]),
            wall_s=wall[name],
            cpu_s=cpu[name],
            peak_mib=statistics.median(peaks[name]) if name in peaks else None,
            peaks_mib=peaks.get(name, []),
            loss=timed.losses.get(name, 0.0),
        )
        for name in wall
    }
    ours = {name: case.own_side(name, wall) for name in wall if name not in (OURS, OURS_COMPILED)}
    return Measurement(
        case=case.name,
        sides=sides,
        speed_ratio={
            name: statistics.median(round_ratios(wall[name], wall[own]))
            for name, own in ours.items()
        },
        cpu_time_ratio={
            name: statistics.median(round_ratios(cpu[name], cpu[own])) for name, own in ours.items()
        },
        gflops_per_s=sum(m.flops for m in case.matmuls) / statistics.median(wall[FLOOR]) / 1e9,
        threads=timed.threads,
        left_out=timed.left_out,
    )


def round_ratios(theirs: Sequence[float], ours: Sequence[float]) -> list[float]:
    """Return the other side's time over ours in each round, i.e. our speed over theirs."""
    return [other / our for other, our in zip(theirs, ours, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The times of a case's sides and floor, by name."""

    wall_s: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    losses: dict[str, float]
    """Loss of the first run; there is none for the floor."""
    left_out: dict[str, str]
    threads: int
    """Threads used by torch."""


def _time_case(case: Case, rounds: int, device: str) -> Timed:
    runs, losses, left_out = _start(case, device)
    runs[FLOOR] = matmuls_alone(case.matmuls, getattr(torch, case.dtype), device)
    runs[FLOOR]()
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            started = time.perf_counter(), time.process_time()  # wall, and CPU of all threads
            run()
            if device != "cpu":
                torch.cuda.synchronize()  # kernels are still running when their launch returns
            wall[name].append(time.perf_counter() - started[0])
            cpu[name].append(time.process_time() - started[1])
    return Timed(
        wall_s=wall, cpu_s=cpu, losses=losses, left_out=left_out, threads=torch.get_num_threads()
    )


def _start(case: Case, device: str) -> tuple[dict[str, Run], dict[str, float], dict[str, str]]:
    """Return (runs, losses of the first run of each, errors of the peers that do not run)."""
    runs: dict[str, Run] = {}
    losses: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for name in (*case.own_sides(device), *case.against):
        try:
            run = case.build(name, device)
            losses[name] = float(run())  # warms up too
            # Run a second time, because the results of the first run, such as gradients, may cause
            # a recompilation.
            run()
            runs[name] = run
        # Catch all exceptions: a compiler has a different exception type for every stage, and so
        # does a peer on an unsupported machine.
        except Exception as error:
            if name == OURS:
                raise
            losses.pop(name, None)
            left_out[name] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return runs, losses, left_out


def matmuls_alone(matmuls: Sequence[Matmul], dtype: torch.dtype, device: str) -> Run:
    """Compute the products of a case, some rows at a time, in preallocated memory.

    This measures the speed available at this moment.
    """
    operands, most = [], FLOOR_ROWS if device == "cpu" else FLOOR_ROWS_GPU
    for m in matmuls:
        rows = min(m.rows, most)
        left, right = (
            torch.randn(*shape, device=device).to(dtype)
            for shape in ((rows, m.inner), (m.columns, m.inner))
        )
        out = torch.empty(rows, m.columns, device=device, dtype=dtype)
        # Make enough calls for all products.
        operands.append((m.count * m.rows // rows, left, right.T, out))

    def run() -> Tensor:
        for count, left, right, out in operands:
            for _ in range(count):
                torch.mm(left, right, out=out)
        return torch.zeros(())

    return run


def _measure_peaks(case: Case, side: str, device: str) -> list[float]:
    """Measure the peak memory of `MEMORY_RUNS` runs of `side` above weights and inputs, in MiB.

    Call it in a fresh process.
    """
    run = case.build(side, device)
    for _ in range(2):
        run()  # compiles; libraries allocate at their first call
    return [_peak_bytes(run, device) / 2**20 for _ in range(MEMORY_RUNS)]


def _peak_bytes(run: Run, device: str) -> int:
    if isinstance(run, Step):
        run.forget()
    gc.collect()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    _trim()
    Path("/proc/self/clear_refs").write_text(
        "5"
    )  # resets VmHWM, the process's peak of resident memory
    before = _resident_peak_bytes()
    run()
    return _resident_peak_bytes() - before


def _trim() -> None:
    """Return freed memory to the system, because a run that reused it would appear to need none."""
    with suppress(AttributeError):  # other C libraries than glibc have no such function
        ctypes.CDLL(None).malloc_trim(0)


def _resident_peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


Result = TypeVar("Result")


def _in_fresh_process(function: Callable[..., Result], *args: Any, threads: int) -> Result:
    """Run `function(*args)` in a new interpreter.

    The new process is free of the memory and caches of other measurements.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        1, mp_context=spawn, initializer=_set_threads, initargs=(threads,)
    ) as pool:
        return pool.submit(function, *args).result()


def _set_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)


def profile(case: Case, *, threads: int, device: str) -> list[tuple[str, float]]:
    """Return (operation, share of our time) of the twelve slowest operations, in a fresh process."""
    return _in_fresh_process(_profile, case, device, threads=threads)


def _profile(case: Case, device: str) -> list[tuple[str, float]]:
    run = case.build(OURS, device)
    run()
    with torch.profiler.profile() as profiler:
        run()
    times = {
        e.key: e.self_device_time_total if device != "cpu" else e.self_cpu_time_total
        for e in profiler.key_averages()
    }
    whole = sum(times.values())
    return [
        (key, time / whole) for key, time in sorted(times.items(), key=lambda item: -item[1])[:12]
    ]
