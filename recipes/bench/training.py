"""Measure the speed and memory of training against other trainers, as ratios from one interleaved run; or count the
cost of a training on GPUs, without one.

$ redraft bench-training                         # losses and whole steps: standalone drafts, EAGLE-3, Medusa, MTP
$ redraft bench-training --cases EAGLE --profile # one family, with a profile
$ redraft bench-training --count --target llama-3.1-8b --family eagle3       # FLOPs, memory and time, counted
$ redraft bench-training --gpu                   # the same steps, run on one GPU (make bench-gpu)
$ redraft bench-training --count --target llama-3.3-70b --features served --devices 8 --tokens 1e9    # hours on 8 GPUs

Peers are measured as they ship and compiled (`torch.compile`), where that works on this machine.

Each case runs in a separate process. Its sides take turns with the bare matmuls of the same shapes, so a change of the
machine's speed affects all of them. Peak memory is the memory above weights and inputs. A ratio below the requirement
is printed, and is not an error.

`--count` runs one real step at the target's real sizes on tensors without memory, and counts every operation. Times
are estimates: each operation takes the longest of computing, moving bytes and being launched, at stated shares of
a device's best. Data, evaluations and checkpoints take none. Peak memory is that of all tensors, weights included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from redraft.distill.train.loop import computes_bfloat16
from redraft.eval.machine import environment
from redraft.eval.report.page import write_results
from redraft.recipes.bench import count, gpu
from redraft.recipes.bench.heads import head_cases
from redraft.recipes.bench.losses import fused_loss_cases, kl_step_cases
from redraft.recipes.bench.measure import FLOOR, OURS, Case, Measurement, Required, Side, measure, profile
from redraft.recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config(count.Counting):
    output: Path = Path("outputs/bench/training.json")
    """File that receives the results."""
    rounds: int = 5
    """Times each side runs; a ratio is the median of the rounds' ratios."""
    threads: int = 0
    """Threads for torch. 0 uses torch's default."""
    device: Literal["cpu", "cuda"] | None = None
    """Device to measure on; by default the GPU if torch sees one, else the CPU."""
    cases: str = ""
    """Only cases whose name contains this."""
    gpu: bool = False
    """Run the steps that --count counts, at the sizes of --target, on this machine's GPU: tokens/s, share of the data
    sheet's FLOP/s, and peak memory of a standalone draft, EAGLE-3, Medusa, MTP and DFlash."""
    profile: bool = False
    """Also print the operations that take most of our time."""


SECTIONS: tuple[Callable[[], list[Case]], ...] = (fused_loss_cases, kl_step_cases, head_cases)


def main(cfg: Config) -> None:
    """Measure or count, and print.

    Raises:
        ValueError: if no case has this name, or the flags of --count do not fit.
    """
    if cfg.gpu:
        gpu.main(cfg, rounds=cfg.rounds, output=cfg.output)
    elif cfg.count:
        count.main(cfg)
    else:
        measure_cases(cfg)


def measure_cases(cfg: Config) -> None:
    """Measure and print the cases. Raises ValueError if no case has this name."""
    cases = [case for section in SECTIONS for case in section() if cfg.cases.lower() in case.name.lower()]
    if not cases:
        names = ", ".join(case.name for section in SECTIONS for case in section())
        raise ValueError(f"no case's name contains {cfg.cases!r}: choose from {names}")
    device = cfg.device or ("cuda" if torch.cuda.is_available() else "cpu")
    print("  ".join(f"{name} {value}" for name, value in environment().items()), flush=True)
    results = []
    for case in worth_measuring(cases, device):
        result = measure(case, rounds=cfg.rounds, threads=cfg.threads, device=device)
        results.append(result)
        print(*lines(case, result), sep="\n", flush=True)
        if cfg.profile:
            shares = profile(case, threads=cfg.threads, device=device)
            print(*(f"    {share:6.1%}  {operation}" for operation, share in shares), sep="\n", flush=True)
    print(f"threads {cfg.threads or torch.get_num_threads()}, {cfg.rounds} interleaved rounds")
    write_results(cfg.output, {"device": device, "results": [asdict(result) for result in results]})


def worth_measuring(cases: Sequence[Case], device: str) -> Sequence[Case]:
    """The cases in dtypes with hardware support on the device."""
    if device != "cpu" or computes_bfloat16():
        return cases
    print("this CPU has no bfloat16 instructions: measuring float32 only", flush=True)
    return [case for case in cases if case.dtype == "float32"]


def lines(case: Case, result: Measurement) -> Iterator[str]:
    """The table of one case: a line per side, with the ratios of ours to it."""
    # `speed_ratio` of the floor is the floor's time over ours, so the inverse says how many times longer we
    # take.
    ours = result.sides[OURS]
    yield f"{case.name}"
    yield (
        f"    {'ours':<22} {ours.tokens_per_s:8,.0f} tokens/s  {_mib(ours)}   "
        f"{1 / result.speed_ratio[FLOOR]:.2f} x the time of its matmuls alone ({result.gflops_per_s:,.0f} GFLOP/s)"
    )
    for name, description in case.against.items():
        side, required = result.sides[name], case.required.get(name, Required())
        speed, memory = result.speed_ratio[name], ""
        if ours.peak_mib is not None and side.peak_mib is not None:
            ratio = ours.peak_mib / side.peak_mib
            memory = f", memory {ratio:.2f}x {_verdict(ratio, required.memory, at_least=False)}"
        yield (
            f"    {name:<22} {side.tokens_per_s:8,.0f} tokens/s  {_mib(side)}   "
            f"ours {speed:.2f}x {_verdict(speed, required.speed, at_least=True)}"
            f"[by CPU time {result.cpu_time_ratio[name]:.2f}x]{memory}   {description}"
            f" (loss {abs(ours.loss - side.loss) / abs(side.loss):.0e} apart)"
        )
    if case.note:
        yield f"    {case.note}"


def _mib(side: Side) -> str:
    return f"{'–':>11}" if side.peak_mib is None else f"{side.peak_mib:7,.0f} MiB"


def _verdict(ratio: float, required: float | None, *, at_least: bool) -> str:
    if required is None:
        return ""
    passed = ratio >= required if at_least else ratio <= required
    return f"{'PASS' if passed else 'BELOW TARGET'} (at {'least' if at_least else 'most'} {required:g}) "


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
