"""Measure the speed and memory of training against what others do, as ratios of one interleaved run.

$ redraft bench-training                         # losses and whole steps: standalone drafts, EAGLE-3, Medusa, MTP
$ redraft bench-training --cases EAGLE --profile # one family, and where its time goes

Every case runs all of its sides in turn, in a process of its own, with the bare matmuls of the same shapes between: a
machine that drifts drifts for all. "Of the floor" is the time of these matmuls over ours. Peak memory is what a side
needs above its weights and inputs. A ratio below its requirement is printed, not raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from distill.loop import computes_bfloat16
from eval.report import environment, write_results
from recipes.bench_heads import head_cases
from recipes.bench_losses import fused_loss_cases, kl_step_cases
from recipes.bench_measure import FLOOR, OURS, Case, Measurement, Required, measure, profile
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    output: Path = Path("outputs/bench/training.json")
    """File that receives the results."""
    rounds: int = 5
    """Times each side runs; a ratio is the median of the rounds' ratios."""
    threads: int = 0
    """Threads of torch; 0 leaves torch's own choice."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    cases: str = ""
    """Only cases whose name contains this."""
    profile: bool = False
    """Say which operations our time goes to."""


SECTIONS: tuple[Callable[[], list[Case]], ...] = (fused_loss_cases, kl_step_cases, head_cases)


def main(cfg: Config) -> None:
    """Raises: ValueError where no case has that name."""
    cases = [case for section in SECTIONS for case in section() if cfg.cases.lower() in case.name.lower()]
    if not cases:
        names = ", ".join(case.name for section in SECTIONS for case in section())
        raise ValueError(f"no case's name contains {cfg.cases!r}: there is {names}")
    print("  ".join(f"{name} {value}" for name, value in environment().items()), flush=True)
    results = []
    for case in worth_measuring(cases, cfg.device):
        result = measure(case, rounds=cfg.rounds, threads=cfg.threads, device=cfg.device)
        results.append(result)
        print(*lines(case, result), sep="\n", flush=True)
        if cfg.profile:
            shares = profile(case, threads=cfg.threads, device=cfg.device)
            print(*(f"    {share:6.1%}  {operation}" for operation, share in shares), sep="\n", flush=True)
    print(f"threads {cfg.threads or torch.get_num_threads()}, {cfg.rounds} interleaved rounds")
    write_results(cfg.output, {"device": cfg.device, "results": [asdict(result) for result in results]})


def worth_measuring(cases: Sequence[Case], device: str) -> Sequence[Case]:
    """Those in types that the device computes in by itself."""
    if device != "cpu" or computes_bfloat16():
        return cases
    print("this CPU does not compute in bfloat16: float32 only", flush=True)
    return [case for case in cases if case.dtype == "float32"]


def lines(case: Case, result: Measurement) -> Iterator[str]:
    """The table of one case: a line a side, ratios of ours to it."""
    ours = result.sides[OURS]
    yield f"{case.name}"
    yield (
        f"    {'ours':<14} {ours.tokens_per_s:8,.0f} tokens/s  {ours.peak_mib:7,.0f} MiB   "
        f"{1 / result.speed_ratio[FLOOR]:.2f} x the time of its matmuls alone ({result.gflops_per_s:,.0f} GFLOP/s)"
    )
    for name, what in case.against.items():
        side, required = result.sides[name], case.required.get(name, Required())
        speed, memory = result.speed_ratio[name], ours.peak_mib / side.peak_mib
        yield (
            f"    {name:<14} {side.tokens_per_s:8,.0f} tokens/s  {side.peak_mib:7,.0f} MiB   "
            f"ours {speed:.2f}x {_verdict(speed, required.speed, at_least=True)}"
            f"[by CPU time {result.cpu_time_ratio[name]:.2f}x], memory {memory:.2f}x "
            f"{_verdict(memory, required.memory, at_least=False)}   {what}"
            f" (loss {abs(ours.loss - side.loss) / abs(side.loss):.0e} apart)"
        )
    if case.note:
        yield f"    {case.note}"


def _verdict(ratio: float, required: float | None, *, at_least: bool) -> str:
    if required is None:
        return ""
    passed = ratio >= required if at_least else ratio <= required
    return f"{'PASS' if passed else 'BELOW TARGET'} (at {'least' if at_least else 'most'} {required:g}) "


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
