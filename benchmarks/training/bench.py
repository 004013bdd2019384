"""Measure the speed and memory of training, compared with other trainers.

The ratios come from one interleaved run.

$ python -m benchmarks.training                            # losses and whole steps of standalone drafts and heads
$ python -m benchmarks.training --cases EAGLE --profile    # one family, with a profile
$ python -m benchmarks.training --gpu                      # steps that `redraft plan` counts, run on one GPU

Peers are measured as they ship and compiled (`torch.compile`), and so is redraft
(`--loop.compile`). Compiled peers are compared with compiled redraft. A peer that does not run on
this machine is reported and left out.

Each case runs in a separate process. Its sides take turns with bare matmuls of the same shapes, so
a change of the machine's speed affects all of them. Peak memory is measured above weights and
inputs, after the runs that compile. A ratio that misses its requirement is printed, but is not an
error.

The file is written after every case:

| key | content |
|---|---|
| `ratio.FAMILY.PEER` | tokens/s, ours over the peer's: `median`, `low` and `high` of the rounds |
| `memory.FAMILY.PEER` | peak memory, ours over the peer's; `low` and `high` are the extremes that the peaks allow |
| `cases` | all measurements of every case |
| `environment`, `date`, `device`, `rounds` | of the run |

FAMILY is a draft's family, `kl` (a whole step of a standalone draft), `fused_kl` (the loss alone)
or `lk_hybrid` (an EAGLE-3 step, whose peer is our `forward_kl`). PEER is speculators, modelopt,
trl, liger or naive. Each entry is for the compiled peer, if it ran (`compiled`), and for the worst
of the family's bfloat16 cases (`case`), or of its float32 cases if it has no bfloat16 cases.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.training import gpu
from benchmarks.training.heads import head_cases
from benchmarks.training.losses import fused_loss_cases, kl_step_cases
from benchmarks.training.measure import (
    FLOOR,
    OURS,
    OURS_COMPILED,
    Case,
    Measurement,
    Required,
    Side,
    measure,
    profile,
    round_ratios,
)
from redraft.engine.hardware import Machine, this_machine
from redraft.engine.machine import environment
from redraft.files.artifact import write_whole
from redraft.recipes.cli.run import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config(gpu.Config):
    output: Path | None = None
    """File that receives the results; by default outputs/bench/report.json, and with --gpu
    outputs/bench/gpu.json.
    """
    rounds: int = 5
    """Number of runs per side. A ratio is the median of the rounds' ratios."""
    threads: int = 0
    """Number of torch threads. 0 uses torch's default."""
    device: Literal["cpu", "cuda"] | None = None
    """Device to measure on; by default, the GPU if torch finds one, otherwise the CPU. Only the
    fused loss has sizes for GPUs. In the other cases, kernel launches would dominate on a GPU;
    --gpu measures steps of real sizes.
    """
    cases: str = ""
    """Measure only cases whose name contains this text."""
    gpu: bool = False
    """Run the steps that `redraft plan` counts, at the sizes of --target, on this machine's GPU:
    tokens/s, share of the data sheet's FLOP/s, and peak memory of a standalone draft, EAGLE-3,
    Medusa, MTP and DFlash.
    """
    profile: bool = False
    """Also print the operations that take most of our time."""


def list_cases(device: str) -> list[Case]:
    """List all cases, with the sides that run on the device."""
    return [*fused_loss_cases(device), *kl_step_cases(device), *head_cases(device)]


def main(cfg: Config) -> None:
    """Measure and print.

    Raises:
        ValueError: if no case has this name, or the flags of --gpu do not fit.
    """
    if cfg.gpu:
        gpu.main(cfg, rounds=cfg.rounds, output=cfg.output or Path("outputs/bench/gpu.json"))
    else:
        measure_cases(cfg)


def measure_cases(cfg: Config) -> None:
    """Measure and print the cases.

    Raises:
        ValueError: if no case has this name.
    """
    device = cfg.device or this_machine().device
    every = list_cases(device)
    cases = [case for case in every if cfg.cases.lower() in case.name.lower()]
    if not cases:
        names = ", ".join(case.name for case in every)
        raise ValueError(f"no case's name contains {cfg.cases!r}: choose from {names}")
    print("  ".join(f"{name} {value}" for name, value in environment().items()), flush=True)
    output = cfg.output or Path("outputs/bench/report.json")
    measured: list[tuple[Case, Measurement]] = []
    machine = this_machine()
    for case in worth_measuring(cases, machine if device == "cuda" else machine.without_gpu):
        result = measure(case, rounds=cfg.rounds, threads=cfg.threads, device=device)
        measured.append((case, result))
        print(*lines(case, result), sep="\n", flush=True)
        run = {"environment": environment(), "device": device, "rounds": cfg.rounds}
        write_whole(output, json.dumps(make_report(measured, run), indent=2) + "\n")
        if cfg.profile:
            shares = profile(case, threads=cfg.threads, device=device)
            print(
                *(f"    {share:6.1%}  {operation}" for operation, share in shares),
                sep="\n",
                flush=True,
            )
    print(f"threads {cfg.threads or torch.get_num_threads()}, {cfg.rounds} interleaved rounds")
    print(f"written to {output}")


# -----------------------------------------------------------------------------------------------------------
# the report


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The ratio of redraft's result to a peer's."""

    median: float
    low: float
    high: float
    compiled: bool
    """Whether the peer was compiled."""
    case: str


def make_report(
    measured: Sequence[tuple[Case, Measurement]], run: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of the file, as described in the module's docstring.

    `run` describes the run.
    """
    families = dict.fromkeys(case.family for case, _ in measured)
    ratio: dict[str, dict[str, Any]] = {family: {} for family in families}
    memory: dict[str, dict[str, Any]] = {family: {} for family in families}
    for family in families:
        of_family = [(case, result) for case, result in measured if case.family == family]
        counted = [pair for pair in of_family if pair[0].dtype == "bfloat16"] or of_family
        for peer in dict.fromkeys(
            side.peer for case, _ in counted for side in case.against.values()
        ):
            speeds = [
                compare_speed(*pair, side) for pair in counted if (side := find_side(*pair, peer))
            ]
            peaks = [
                compare_memory(*pair, side) for pair in counted if (side := find_side(*pair, peer))
            ]
            if speeds:
                ratio[family][peer] = asdict(min(speeds, key=lambda compared: compared.median))
                memory[family][peer] = asdict(max(peaks, key=lambda compared: compared.median))
    date = run["environment"]["date"]
    return {
        "ratio": ratio,
        "memory": memory,
        "cases": [asdict(result) for _, result in measured],
        "date": date,
        **run,
    }


def find_side(case: Case, result: Measurement, peer: str) -> str | None:
    """Return the measured side of a peer, compiled if there is one; None if the case has none."""
    sides = [
        name for name, side in case.against.items() if side.peer == peer and name in result.sides
    ]
    return max(sides, key=lambda name: case.against[name].is_compiled, default=None)


def compare_speed(case: Case, result: Measurement, side: str) -> Compared:
    """Compare the tokens/s of every round, ours over the given side's."""
    ratios = round_ratios(
        result.sides[side].wall_s, result.sides[case.own_side(side, result.sides)].wall_s
    )
    return Compared(
        median=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        compiled=case.against[side].is_compiled,
        case=case.name,
    )


def compare_memory(case: Case, result: Measurement, side: str) -> Compared:
    """Compare the peak memory of our side with that of the given side.

    The peaks come from separate processes, so they do not form pairs.
    """
    ours, theirs = (
        result.sides[name].peaks_mib for name in (case.own_side(side, result.sides), side)
    )
    return Compared(
        median=statistics.median(ours) / statistics.median(theirs),
        low=min(ours) / max(theirs),
        high=max(ours) / min(theirs),
        compiled=case.against[side].is_compiled,
        case=case.name,
    )


# -----------------------------------------------------------------------------------------------------------
# the tables


def worth_measuring(cases: Sequence[Case], machine: Machine) -> Sequence[Case]:
    """Return the cases in dtypes with hardware support."""
    if machine.has_bfloat16:
        return cases
    print("no hardware for bfloat16 here: measuring float32 only", flush=True)
    return [case for case in cases if case.dtype == "float32"]


def lines(case: Case, result: Measurement) -> Iterator[str]:
    """Return the table of one case: a line per side, with the ratio of redraft's result to it."""
    floor_s = result.sides[FLOOR].wall_s
    yield f"{case.name} ({result.gflops_per_s:,.0f} GFLOP/s in the matmuls alone)"
    for name in (OURS, OURS_COMPILED):
        if name in result.left_out:
            yield _left_out(name, result)
        if name not in result.sides:
            continue
        ours = result.sides[name]
        times = statistics.median(round_ratios(ours.wall_s, floor_s))
        yield (
            f"    {name:<22} {ours.tokens_per_s:8,.0f} tokens/s  {_mib(ours)}   {times:.2f}x the "
            "time of its matmuls"
        )
    for name, against in case.against.items():
        if name in result.left_out:
            yield _left_out(name, result)
            continue
        ours = result.sides[case.own_side(name, result.sides)]
        side, required = result.sides[name], case.required.get(name, Required())
        speed, memory = compare_speed(case, result, name), compare_memory(case, result, name)
        yield (
            f"    {name:<22} {side.tokens_per_s:8,.0f} tokens/s  {_mib(side)}   "
            f"ours {speed.median:.2f}x ({speed.low:.2f} to {speed.high:.2f}) "
            f"{_verdict(speed.median, required.speed, at_least=True)}"
            f"[by CPU time {result.cpu_time_ratio[name]:.2f}x], memory {memory.median:.2f}x "
            f"{_verdict(memory.median, required.memory, at_least=False)}"
            f"  {against.description} (loss {abs(ours.loss - side.loss) / abs(side.loss):.0e} "
            "apart)"
        )
    if case.note:
        yield f"    {case.note}"


def _left_out(name: str, result: Measurement) -> str:
    return (
        f"    {name:<22} left out, because it does not run on this machine: {result.left_out[name]}"
    )


def _mib(side: Side) -> str:
    return f"{'–':>11}" if side.peak_mib is None else f"{side.peak_mib:7,.0f} MiB"


def _verdict(ratio: float, required: float | None, *, at_least: bool) -> str:
    if required is None:
        return ""
    passed = ratio >= required if at_least else ratio <= required
    return (
        f"{'PASS' if passed else 'BELOW TARGET'} (at {'least' if at_least else 'most'} "
        f"{required:g}) "
    )


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
