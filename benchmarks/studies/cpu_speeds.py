"""Measure why one vLLM on a CPU has two speeds.

The study measures decode speed by thread binding, with and without redraft's wait.

$ python -m benchmarks.studies.cpu_speeds --target outputs/parts/smollm2-135m-instruct    # 15 minutes on two cores

vLLM's engine core polls for the worker's answer in a loop, which takes a core while the worker
computes. By default vLLM binds the worker's OpenMP threads to all cores but one, so the loop does
no harm. Without a binding there is a thread for every core, each matrix product ends with a barrier
for all threads, and the barrier waits while the loop occupies the core of any thread. Every row is
one server, measured in turn with one and with eight requests in flight, after pauses of different
lengths.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import write_results
from redraft.engine.measure import Measurement, measure
from redraft.engine.prompts import Prompt
from redraft.engine.server import Mode, vllm_server
from redraft.engine.settings import write_settings
from redraft.eval.serving.baseline import count_speeds
from redraft.recipes.cli.run import run_recipe

BIND = "VLLM_CPU_OMP_THREADS_BIND"
OWN_WAIT = write_settings({"engine_wait": False})

SETTINGS: Mapping[str, tuple[Mode, Mapping[str, str]]] = {
    "auto, eager": ("eager", {}),
    "auto, compiled": ("compiled", {}),
    "auto, eager, vLLM's own wait": ("eager", OWN_WAIT),
    "nobind, eager": ("eager", {BIND: "nobind"}),
    "nobind, eager, vLLM's own wait": ("eager", {BIND: "nobind", **OWN_WAIT}),
    "nobind, one thread, eager": ("eager", {BIND: "nobind", "OMP_NUM_THREADS": "1"}),
}
"""Mode and environment of a server, by the setting's name."""

PAUSES_S = (0.0, 0.3, 1.2, 2.2)
LOADS = (1, 8)


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str
    """Folder of a model with steps of tens of milliseconds on this machine."""
    rounds: int = 12
    """Rounds for each setting."""
    max_tokens: int = 48
    output: Path = Path("outputs/cpu-speeds")
    """Folder for report.json and the logs."""


def main(cfg: Config) -> None:
    rows = []
    for name, (mode, env) in SETTINGS.items():
        rows += measure_setting(cfg, name, mode, env)
        for row in rows[-len(LOADS) :]:
            print(
                f"{row['setting']:32} {row['requests']} requests: {row['slowest']:.0f} to "
                f"{row['fastest']:.0f} "
                f"tokens/s, median {row['median']:.0f}, {row['speeds']} speed(s)",
                flush=True,
            )
    write_results(cfg.output / "report.json", {"target": cfg.target, "rows": rows})


def measure_setting(
    cfg: Config, name: str, mode: Mode, env: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Measure a setting; return one row per load."""
    runs: dict[int, list[Measurement]] = {load: [] for load in LOADS}
    prompts = [Prompt(token_ids=[1, *range(100 + n, 140 + n)]) for n in range(max(LOADS))]
    log = cfg.output / f"{name.replace(', ', '-').replace(' ', '-')}.log"
    with vllm_server(cfg.target, log=log, mode=mode, extra_env=env) as server:
        for number in range(cfg.rounds):
            for load in LOADS:
                time.sleep(PAUSES_S[number % len(PAUSES_S)])
                run = measure(server, prompts[:load], max_tokens=cfg.max_tokens, concurrency=load)
                runs[load].append(run)
    rows: list[dict[str, Any]] = []
    for load, some in runs.items():
        rates = [run.tokens_per_s for run in some]
        rows.append(
            {
                "setting": name,
                "requests": load,
                "slowest": min(rates),
                "fastest": max(rates),
                "median": statistics.median(rates),
                "speeds": count_speeds(some),
                "rates": rates,
            }
        )
    return rows


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
