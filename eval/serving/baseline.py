"""The plain server that a draft has to beat: the fastest vLLM that a user would start, without a draft.

    target ─► compiled, as vLLM starts ─┐
                                        ├─► interleaved rounds ─► mode of every server in the comparison
              eager ────────────────────┘

A step cannot be faster than reading the weights once. The report says which share of that limit the baseline reaches:
a gain over a server far below it may be a gain over a fault.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from redraft.eval.engine.measure import CHANGED, Measurement
from redraft.eval.engine.server import Mode, engine_is_cpu, vllm_server
from redraft.eval.machine import engine_environment
from redraft.eval.prompts import Prompt
from redraft.eval.serving.rounds import PLAIN, Plan, Results, keep_rounds, run_rounds, share_memory

if TYPE_CHECKING:
    from torch import Tensor

MODES: tuple[Mode, ...] = get_args(Mode)

BANDWIDTH_BYTES = 1 << 30
"""Bytes of the buffer that is read to measure the bandwidth: far more than any cache."""

BANDWIDTH_READS = 5


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The plain server of a comparison, at one request in flight."""

    mode: Mode
    tokens_s: float
    step_ms: float
    """Median time of a step without a prefill."""
    limit_share: float
    """Time to read the weights once at the measured bandwidth, as a share of the step."""
    speeds: int
    """Number of speeds over all rounds; two speeds differ by the factor `CHANGED`. 1 is sound."""
    repeated: int
    """Loads that were measured again because a server changed its speed."""
    modes: Mapping[Mode, float]
    """Tokens/s of the rounds that chose the mode."""


def choose_mode(
    target: str, prompts: Sequence[Prompt], plan: Plan, logs: Path, kept: Path, key: object, **options: Any
) -> tuple[Mode, dict[Mode, float]]:
    """(mode in which vLLM serves the target fastest, tokens/s by mode), from interleaved rounds.

    The rounds are at the first load of `plan`. They are kept in `kept` under `key`, as `keep_rounds` does. `options`
    are those of `vllm_server`.
    """
    load, count = next(iter(plan.prompts.items()))
    plan = replace(plan, prompts={load: count})

    def measure() -> Results:
        results: dict[tuple[str, int], list[Measurement]] = {(mode, load): [] for mode in MODES}
        args = options.get("extra_args", ())
        args = args if engine_is_cpu() else share_memory(args, len(MODES))
        with contextlib.ExitStack() as stack:
            servers = {
                mode: stack.enter_context(
                    vllm_server(target, log=logs / f"vllm-{mode}.log", mode=mode, **options | {"extra_args": args})
                )
                for mode in MODES
            }
            for number in range(plan.rounds):
                for mode in MODES if number % 2 else MODES[::-1]:
                    # Each alone: two modes are compared here only.
                    alone = run_rounds({mode: servers[mode]}, prompts, replace(plan, rounds=1))
                    results[mode, load] += alone[mode, load]
        return results

    found = keep_rounds(kept, ["mode", key, prompts, plan, options, engine_environment()], measure)
    speeds = {mode: statistics.median(run.tokens_per_s for run in found[mode, load]) for mode in MODES}
    return max(MODES, key=lambda mode: speeds[mode]), speeds


def describe_baseline(
    results: Iterable[Results], mode: Mode, modes: Mapping[Mode, float], weight_bytes: int, bandwidth: float
) -> Baseline:
    """The baseline of a comparison from its rounds of the target alone; `bandwidth` in bytes/s."""
    loads: dict[int, list[Measurement]] = {}
    for group in results:
        for (name, load), runs in group.items():
            if name == PLAIN:
                loads.setdefault(load, []).extend(runs)
    single = loads[min(loads)]
    step_s = statistics.median(run.step_s or 1 / run.tokens_per_s for run in single)
    return Baseline(
        mode=mode,
        tokens_s=statistics.median(run.tokens_per_s for run in single),
        step_ms=1000 * step_s,
        limit_share=weight_bytes / bandwidth / step_s,
        speeds=max(map(count_speeds, loads.values())),
        repeated=sum(run.repeats for runs in loads.values() for run in runs),
        modes=dict(modes),
    )


def count_speeds(runs: Sequence[Measurement]) -> int:
    """The number of different speeds of one server at one load: groups of step times a factor `CHANGED` apart."""
    steps_s = sorted(step for run in runs for step in run.half_step_s or ())
    return 1 + sum(later > CHANGED * earlier for earlier, later in itertools.pairwise(steps_s))


def measure_bandwidth() -> float:
    """Bytes/s at which this machine reads memory: the GPU's if the engine runs on one, else the CPU's, all cores."""
    import torch

    device = torch.device("cpu" if engine_is_cpu() else "cuda")
    # The fastest: a limit is not what neighbours leave at the moment.
    fastest_s = min(_time_reads(torch.ones(BANDWIDTH_BYTES // 4, dtype=torch.float32, device=device)))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the servers start next, and take what is free
    return BANDWIDTH_BYTES / fastest_s


def _time_reads(buffer: Tensor) -> list[float]:
    """Seconds of each read of the whole buffer."""
    times_s = []
    for _ in range(1 + BANDWIDTH_READS):
        began_s = time.perf_counter()
        # A sum reads everything and writes one number; `item` waits for a GPU.
        buffer.sum().item()
        times_s.append(time.perf_counter() - began_s)
    return times_s[1:]
