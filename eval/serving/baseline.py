"""The plain server that a draft must beat.

It is the fastest vLLM that a user would start without a draft.

    target ─► compiled, as vLLM starts ─┐
                                        ├─► interleaved rounds ─► mode of every server in the comparison
              eager ────────────────────┘

A step cannot be faster than reading the weights once. The report states which fraction of that
limit the baseline reaches, because a gain over a server far below the limit may only be due to a
misconfiguration.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from redraft.engine.machine import ENGINE_IS_CPU, engine_environment
from redraft.engine.measure import CHANGED, Measurement
from redraft.engine.process import exiting_on_sigterm
from redraft.engine.server import EAGER, Mode, VllmServer, read_threads, vllm_server
from redraft.files.folder import read_config, tensor_entries
from redraft.files.kept import compute_once

MODES: tuple[Mode, ...] = get_args(Mode)
BANDWIDTH_BYTES = 1 << 30  # bytes read to measure the bandwidth, far more than fit into any cache
BANDWIDTH_READS = 5
SERVED = re.compile(
    r" dtype=torch\.(\w+),.* tensor_parallel_size=(\d+), pipeline_parallel_size=1, "
    r"data_parallel_size=1,.* quantization=None,"
)  # In vLLM's log.
MODE_ROUNDS = 3
NOT_DEFAULT = re.compile(r"non-default args: \{(.*)\}")  # In vLLM's log.


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The plain server of a comparison, at the smallest load."""

    mode: Mode
    tokens_s: float
    threads: int | None
    """Number of OpenMP compute threads. None if vLLM does not bind threads."""
    step_ms: float
    """Median time of a step without a prefill."""
    limit_share: float | None
    """Time to read the weights once, as a fraction of the step time, if known."""
    speeds: int
    """Number of speeds over all rounds, counting only speeds that differ by more than the factor
    `CHANGED`. It should be 1.
    """
    repeated: int
    """Number of loads that were measured again because a server changed speed."""
    modes: Mapping[Mode, float]
    """Tokens/s in the rounds that chose the mode. Empty if the user chose it."""
    not_default: str | None
    """Server arguments that differ from vLLM's defaults, according to its log."""


def choose_mode(
    target: str | Path,
    speed: Callable[[VllmServer], float],
    rounds: int,
    logs: Path,
    kept: Path,
    key: object,
    *,
    on_cpu: bool = ENGINE_IS_CPU,
    **options: Any,
) -> tuple[Mode, dict[Mode, float]]:
    """Find the mode in which vLLM serves the target fastest, in interleaved rounds.

    Returns the mode, and the median tokens/s by mode. `speed` puts load on a server and returns
    tokens/s. `options` are passed to `vllm_server`; if they request eager servers, nothing is
    measured. The result is cached in the folder `kept` for runs with an equal `key`.
    """
    if EAGER in options.get("extra_args", ()):
        return "eager", {}

    def start(mode: Mode) -> contextlib.AbstractContextManager[VllmServer]:
        return vllm_server(target, log=logs / f"vllm-{mode}.log", mode=mode, **options)

    def measure() -> dict[Mode, list[float]]:
        found: dict[Mode, list[float]] = {mode: [] for mode in MODES}
        if on_cpu:
            # Start both at once, because CPU measurements are noisy and the servers share the
            # memory.
            with exiting_on_sigterm(), contextlib.ExitStack() as stack:
                servers = {mode: stack.enter_context(start(mode)) for mode in MODES}
                for number in range(rounds):
                    for mode in MODES if number % 2 else MODES[::-1]:
                        found[mode].append(speed(servers[mode]))
        else:
            for mode in MODES:
                with start(mode) as server:
                    found[mode] = [speed(server) for _ in range(rounds)]
        return found

    asked = ["mode", key, rounds, options, engine_environment()]
    found = compute_once(kept, "mode", asked, dict[Mode, list[float]], measure)
    speeds = {mode: statistics.median(runs) for mode, runs in found.items()}
    return max(MODES, key=lambda mode: speeds[mode]), speeds


def describe_modes(mode: Mode, speeds: Mapping[Mode, float]) -> str:
    found = ", ".join(f"{name} {speed:.1f} tokens/s" for name, speed in speeds.items())
    return f"the target alone: {found or 'not measured'}; every server runs {mode}"


def describe_baseline(
    loads: Mapping[int, Sequence[Measurement]],
    mode: Mode,
    modes: Mapping[Mode, float],
    *,
    log: Path,
    target: Path,
) -> Baseline:
    """Describe a comparison's baseline from all runs of the target alone, by requests in flight.

    `log` is the plain server's log, and `target` is the folder of its model. Call this after the
    servers have ended, because it measures the memory bandwidth.
    """
    load, smallest = min(loads), loads[min(loads)]
    # A step without a draft gives one token to each request.
    step_s = statistics.median(run.step_s or load / run.tokens_per_s for run in smallest)
    num_bytes = read_weight_bytes(target, log)
    named = NOT_DEFAULT.findall(log.read_text(errors="replace")) if log.is_file() else []
    return Baseline(
        mode=mode,
        tokens_s=statistics.median(run.tokens_per_s for run in smallest),
        threads=read_threads(log),
        step_ms=1000 * step_s,
        limit_share=num_bytes / measure_bandwidth() / step_s if num_bytes else None,
        speeds=max(map(count_speeds, loads.values())),
        repeated=sum(run.repeats for runs in loads.values() for run in runs),
        modes=dict(modes),
        not_default=named[-1] if named else None,
    )


def read_weight_bytes(target: Path, log: Path) -> float | None:
    """Return the bytes of weights that each GPU, or the CPU, reads per step of the server.

    It is None if unknown: for a target with experts, with modules next to the text model, or with
    quantised weights, and for a server with a pipeline or replicas.
    """
    served = SERVED.findall(log.read_text(errors="replace")) if log.is_file() else []
    config = read_config(target)
    if not served or any(
        config[key] and (key == "text_config" or "expert" in key) for key in config
    ):
        return None
    try:
        entries = tensor_entries(target)
    # A layout that only vLLM can read must not abort a benchmark.
    except (FileNotFoundError, ValueError):
        return None
    shapes = {name: entry["shape"] for name, entry in entries.items()}
    if any(name.endswith("lm_head.weight") for name in shapes):
        # A step reads only the embedding rows of its tokens.
        shapes = {name: shape for name, shape in shapes.items() if "embed_tokens" not in name}
    dtype, num_devices = served[-1]
    width = 4 if dtype == "float32" else 2
    return width * sum(map(math.prod, shapes.values())) / (1 if ENGINE_IS_CPU else int(num_devices))


def count_speeds(runs: Sequence[Measurement]) -> int:
    """Return the number of different speeds of one server under one load.

    Each speed is a group of step times. Groups differ by more than a factor of `CHANGED`.
    """
    steps_s = sorted(step for run in runs for step in run.half_step_s or ())
    return 1 + sum(later > CHANGED * earlier for earlier, later in itertools.pairwise(steps_s))


def measure_bandwidth() -> float:
    """Memory read bandwidth of this machine, in bytes/s.

    It is the GPU's if the engine runs on one, otherwise the CPU's.
    """
    import torch

    device = "cpu" if ENGINE_IS_CPU else "cuda"
    buffer, times_s = torch.ones(BANDWIDTH_BYTES // 4, device=device), []
    for _ in range(1 + BANDWIDTH_READS):
        began_s = time.perf_counter()
        # A sum reads everything and writes one number. `item` waits for a GPU.
        buffer.sum().item()
        times_s.append(time.perf_counter() - began_s)
    del buffer
    if device == "cuda":
        torch.cuda.empty_cache()  # free the memory for the next server
    # Take the fastest, because other processes only lower the measured bandwidth.
    return BANDWIDTH_BYTES / min(times_s)
