"""Measure memory and speed of training on long rows, and the error of ranks that share a row.

    python -m benchmarks.long                      # a tiny target, on this machine
    python -m benchmarks.long --lengths 8192       # a short form

For each length, a separate process trains on rows (`benchmarks.long.rows`). 2 and 4 ranks over gloo
share rows in float64 and are compared with one process (`benchmarks.long.ranks`). The results are
written after each part. A killed run continues, if its settings are the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.long.rows import CASES
from benchmarks.results import write_results
from redraft.recipes.cli.run import run_recipe

SHARED = ("eagle3", "eagle3+again", "eagle3-window", "dflash", "dflash+again", "dflash-window")
"""Cases of `benchmarks.long.ranks`."""
TOKENS_A_CASE = 1 << 15
"""Tokens of each case: with shorter rows, several steps are taken that together have this many
tokens.
"""


@dataclass(frozen=True, kw_only=True)
class LongConfig:
    lengths: tuple[int, ...] = (8192, 32768, 131072)
    """Tokens per row."""
    cases: tuple[str, ...] = CASES
    """Drafts to train. In cases ending in `-window`, layers see only 512 positions."""
    ranks: tuple[int, ...] = (2, 4)
    """Numbers of processes that share rows."""
    threads: int = 2
    """Number of threads per training run."""
    output: Path = Path("outputs/long.json")
    """File for the results."""


def main(cfg: LongConfig) -> None:
    settings = json.loads(json.dumps({**asdict(cfg), "output": None}))
    found: dict[str, Any] = {"rows": [], "errors": {}}
    if cfg.output.exists():
        earlier = json.loads(cfg.output.read_text())
        if earlier["config"] == settings:
            found = earlier["long"]
    parts = [(case, length) for length in cfg.lengths for case in cfg.cases]
    done = {(row["case"], row["tokens"]) for row in found["rows"]}
    for number, (case, length) in enumerate(parts, start=1):
        if (case, length) not in done:
            print(f"{number} of {len(parts)}: {case}, a row of {length:,} tokens")
            steps = max(1, TOKENS_A_CASE // length)
            row = run(cfg.threads, "rows", case, str(length), "--steps", str(steps))
            print(f"  {row['peak_mib']:,.0f} MiB, {row['tokens_per_s']:,.0f} tokens/s")
            found["rows"].append(row)
            write_results(cfg.output, {"config": settings, "long": found})
    for ranks in cfg.ranks:
        if str(ranks) not in found["errors"]:
            found["errors"][str(ranks)] = run(1, "ranks", str(ranks), *SHARED)
            worst = max(error for each in found["errors"].values() for error in each.values())
            found["context_parallel_error"] = worst
            write_results(cfg.output, {"config": settings, "long": found})
    print(f"long.context_parallel_error: {found['context_parallel_error']:.1e}")


def run(threads: int, module: str, *arguments: str) -> dict[str, Any]:
    """Run a module of this package in a separate process, and return the JSON that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", f"benchmarks.long.{module}", *arguments]
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(said.stdout.splitlines()[-1]))


if __name__ == "__main__":
    run_recipe(main, LongConfig, __doc__)
