"""Show in five minutes on two CPU cores that counted answers make a real model faster.

$ make demo-quick
$ python -m benchmarks.demo.quick

    SmolLM2-135M-Instruct and HumanEval, from the hub or PyPI
        ─► the model's 4,000 answers in the repository, counted
        ─► two servers, plain vLLM and vLLM with the counts, compiled as vLLM starts by default
        ─► six interleaved rounds of two questions each, one request at a time
        ─► the ratio of tokens/s, its interval, and the outputs that differ

`make demo` confirms its drafts at one request with the same questions and rounds. It also chooses
the faster mode of vLLM, trains a head, and measures eight requests; quote its figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import write_results
from redraft.engine.machine import ENGINE_IS_CPU
from redraft.engine.target_dtype import open_target
from redraft.eval.serving.bench_report import LosslessReport, by_load, describe_ratio
from redraft.eval.serving.rounds import PLAIN, Compared, Plan, Results, measure_servers
from redraft.recipes.cli.run import run_recipe
from redraft.recipes.decide.bench import (
    PARTS,
    load_questions,
    prepare,
    prove_lossless,
    render_prompts,
)
from redraft.recipes.decide.bench_config import RETRIEVAL, SMOLLM2, BenchConfig
from redraft.recipes.decide.candidates import make_lookups
from redraft.recipes.demo.parts import make_target

LOAD = 1
"""Requests in flight."""


@dataclass(frozen=True, kw_only=True)
class QuickConfig:
    output: Path = Path("outputs/demo-quick")
    """Folder for report.json, the counted answers and the servers' logs."""


def main(cfg: QuickConfig) -> None:
    started = time.perf_counter()
    bench = make_settings(cfg.output)
    target = open_target(str(make_target(PARTS)), None, on_cpu=ENGINE_IS_CPU)
    questions = load_questions(bench)
    _, prompts = render_prompts(bench, target, questions)
    (counted,) = (
        each for each in make_lookups(prepare(bench, target, questions)) if each.name == RETRIEVAL
    )
    print("starting plain vLLM and vLLM with counted answers", flush=True)
    results = measure_servers(
        target.name,
        {PLAIN: None, RETRIEVAL: counted.speculative_config},
        prompts,
        Plan(rounds=bench.rounds, prompts={LOAD: 2 * LOAD}, max_tokens=bench.max_tokens),
        cfg.output / "logs",
        vllm_defaults=True,
        mode="compiled",
        dtype=target.dtype,
    )
    report(cfg, bench, results, prove_lossless(target.name, results, RETRIEVAL, bench), started)


def make_settings(output: Path) -> BenchConfig:
    """Return the settings of `make demo` at one request, without a training run."""
    return BenchConfig(**{**vars(SMOLLM2), "concurrency": (LOAD,), "output": output})


def report(
    cfg: QuickConfig,
    bench: BenchConfig,
    results: Results,
    lossless: LosslessReport,
    started: float,
) -> None:
    """Print the answer, and write it with the settings to report.json."""
    rows = {name: by_load(results, name, (LOAD,))[LOAD] for name in (PLAIN, RETRIEVAL)}
    duration_s = round(time.perf_counter() - started, 1)
    print(*describe(rows, lossless, duration_s), sep="\n")
    found: dict[str, Any] = {name: asdict(row) for name, row in rows.items()}
    found |= {"rounds": bench.rounds, "max_tokens": bench.max_tokens, "duration_s": duration_s}
    write_results(cfg.output / "report.json", {**found, "lossless": asdict(lossless)})


def describe(
    rows: dict[str, Compared], lossless: LosslessReport, duration_s: float
) -> Iterator[str]:
    """Describe the answer in lines of at most 60 characters."""
    for name, title in ((PLAIN, "plain vLLM"), (RETRIEVAL, "counted answers")):
        row = rows[name]
        yield f"{title + ':':<17}{row.tokens_per_s:6.1f} tokens/s, {row.tau:.2f} tokens per step"
    counted = rows[RETRIEVAL]
    yield f"{describe_ratio(counted.ratio, counted.interval)}, one request at a time"
    equal = lossless.num_prompts - len(lossless.differences)
    yield f"{equal} of {lossless.num_prompts} outputs equal plain vLLM's, token for token" + (
        "" if lossless.lossless else ": the others differ by more than rounding"
    )
    yield f"{duration_s / 60:.1f} minutes"


if __name__ == "__main__":
    run_recipe(main, QuickConfig, __doc__)
