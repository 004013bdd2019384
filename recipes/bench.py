"""Measure what drafts are worth in a real vLLM server: the tables that serving is decided by.

$ redraft bench --target T --draft D                        # the first value of each flag is the base of all tables
$ redraft bench --target T --draft D --draft ngram --num-speculative-tokens 4 1 2 6 --concurrency 8 1 32 128
$ redraft bench --target T --draft D --request-rate 1 4 16 --data sharegpt:sharegpt.json jsonl:ours.jsonl
$ redraft bench --preset demo                               # the small target with the draft of `make demo`

Every server is started once and gets its load from vLLM's own generator (`vllm bench serve`). A finished cell is kept:
run the same command again after an interruption and only what is missing is measured. The result is serving.html,
serving.md and serving.json; `redraft advise --serving serving.json` says from it how many tokens to draft.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tqdm import tqdm

from eval.engine import Server, engine_is_cpu, measurable, vllm_server
from eval.kept import file_print
from eval.load import run_load
from eval.report import environment, served_on
from eval.serving_bench import Cell, Results, Sweep, Variant, by_variant, plan, tables
from eval.serving_report import answer, serving_report, title, write_serving
from recipes.cli import run_recipe
from recipes.draft_config import cure, draft_config


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str = "meta-llama/Llama-3.1-70B-Instruct"
    """Folder or hub name of the model that is served."""
    draft: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Draft to measure, once for each: a folder, a hub name, `ngram`, `suffix`, or `mtp` for the target's own layer."""
    num_speculative_tokens: tuple[int, ...] = (3, 1, 2, 5)
    """Draft tokens; the first is that of all tables but the one by number of draft tokens."""
    concurrency: tuple[int, ...] = (8, 1, 32, 128)
    """Requests at once; the first is that of all tables but the one by concurrency."""
    request_rate: tuple[float, ...] = (1.0, 4.0, 16.0)
    """Requests per second, whatever is still running; empty: no such table."""
    data: tuple[str, ...] = ("sonnet",)
    """`random`, `sonnet` (lines of the Python manual), `sonnet:TEXT`, `sharegpt:JSON`, `jsonl:FILE` with `prompt`."""
    input_tokens: tuple[int, ...] = (512, 128, 2048)
    """Length of the prompts of `random` and `sonnet`."""
    output_tokens: int = 256
    """Of an answer, at most."""
    max_model_len: int = 4096
    """Longest prompt with its answer that the servers take."""
    draft_quantization: tuple[str, ...] = ()
    """Of the first draft, as vLLM calls it (`fp8`): one more table, where the engine can do it."""
    prompts_per_client: int = 8
    """A cell of 32 requests at once asks 32 times as many."""
    repeats: int = 1
    """Passes over all servers; of every cell the run of median speed counts."""
    dtype: str | None = None
    """Of the engine; by default float32 on a CPU and the model's own on a GPU."""
    vllm_args: tuple[str, ...] = ()
    """Further arguments of every server, a word each: --vllm-args=--tensor-parallel-size --vllm-args=4."""
    output: Path = Path("outputs/bench-serving")
    """Folder that receives the reports, the finished cells and the engine's logs."""
    overwrite: bool = False
    """Measure everything again."""


PRESETS = {
    "demo": Config(
        target="tests/assets/tiny-target",
        draft=("outputs/demo/draft", "ngram"),
        num_speculative_tokens=(3, 1),
        concurrency=(4, 1, 16),
        request_rate=(4.0, 16.0),
        input_tokens=(64, 256),
        output_tokens=64,
        max_model_len=1024,
        output=Path("outputs/demo-bench"),
    )
}


def main(cfg: Config) -> None:
    started = time.monotonic()
    # 1. what is asked, and how each draft is served
    configs = {draft: draft_config(draft) for draft in cfg.draft}
    questions = plan(sweep(cfg))
    cells = by_variant(cell for some in questions.values() for cell in some)

    # 2. what is missing, a server at a time
    if cfg.overwrite:
        shutil.rmtree(cfg.output / "cells", ignore_errors=True)
    results = Results(cfg.output, served(cfg))
    refused = measure_missing(cfg, cells, configs, results)

    # 3. the reports
    medians = {cell: results.median(cell, cfg.repeats) for some in cells.values() for cell in some}
    measured = {cell: median for cell, median in medians.items() if median is not None}
    report = serving_report(
        tables(questions, measured),
        configs,
        target=cfg.target,
        command=shlex.join(sys.argv),
        settings=settings(cfg),
        refused=refused,
        ideal_source="cost model" if engine_is_cpu() else "engine",
        environment=environment(),
        duration_s=round(time.monotonic() - started, 1),
    )
    page = write_serving(cfg.output, report)
    print(*answer(report), *(f"not measured: {entry['what']}: {entry['reason']}" for entry in refused), sep="\n")
    print(f"report: {page}")


def sweep(cfg: Config) -> Sweep:
    """Raises: ValueError where the prompts do not fit the servers, or something is asked for that cannot be."""
    if cfg.repeats < 1:
        raise ValueError(f"--repeats {cfg.repeats} measures nothing: give 1 or more")
    longest = max(cfg.input_tokens, default=0) + cfg.output_tokens
    if longest > cfg.max_model_len:
        raise ValueError(f"{longest} tokens of input and output do not fit --max-model-len {cfg.max_model_len}")
    return Sweep(
        drafts=cfg.draft,
        num_speculative_tokens=cfg.num_speculative_tokens,
        concurrency=cfg.concurrency,
        request_rates=cfg.request_rate,
        input_tokens=cfg.input_tokens,
        data=cfg.data,
        quantizations=cfg.draft_quantization,
        output_tokens=cfg.output_tokens,
        prompts_per_client=cfg.prompts_per_client,
        engine_has_ideal=not engine_is_cpu(),  # the CPU's kernels ignore the setting and accept as ever
    )


def served(cfg: Config) -> dict[str, Any]:
    """What all servers of the run have in common: with another value nothing that was measured before counts."""
    server = {"dtype": cfg.dtype, "vllm_args": cfg.vllm_args, "max_num_seqs": max_num_seqs(cfg)}
    return {"target": file_print(cfg.target), **server, **served_on()}


def max_num_seqs(cfg: Config) -> int:
    """Requests in a step, at most: it bounds what a rate of requests can do."""
    return max(16, *cfg.concurrency)


def settings(cfg: Config) -> dict[str, Any]:
    """What all tables share."""
    base = asdict(sweep(cfg).load())
    return {
        "draft": cfg.draft[0],
        "num_speculative_tokens": cfg.num_speculative_tokens[0],
        **{key: base[key] for key in ("concurrency", "input_tokens", "output_tokens", "data")},
        "repeats": cfg.repeats,
    }


def measure_missing(
    cfg: Config, cells: Mapping[Variant, Sequence[Cell]], configs: Mapping[str, Mapping[str, Any]], results: Results
) -> list[dict[str, str]]:
    """Measure every cell that no earlier run finished; what the engine cannot do with a draft, and why.

    Raises: ValueError where it refuses a draft as it is, with the cure where one is known.
    """
    refused: dict[str, str] = {}
    with tqdm(total=cfg.repeats * sum(map(len, cells.values())), desc="cells", unit="cell") as bar:
        for repeat, (variant, some) in itertools.product(range(cfg.repeats), cells.items()):
            missing = [cell for cell in some if not results.has(cell, repeat)]
            bar.update(len(some) - len(missing))
            bar.set_postfix_str(name(variant))
            if not missing or name(variant) in refused:
                continue
            try:
                with server(cfg, variant, configs) as running:
                    for cell in missing:
                        results.add(cell, repeat, run_load(running, cell.load, cfg.output / "prompts"))
                        bar.update()
            except ChildProcessError as error:
                refused[name(variant)] = optional(cfg, variant, error)
    return [{"what": what, "reason": reason} for what, reason in refused.items()]


def server(
    cfg: Config, variant: Variant, configs: Mapping[str, Mapping[str, Any]]
) -> contextlib.AbstractContextManager[Server]:
    return vllm_server(
        cfg.target,
        log=cfg.output / "logs" / f"{name(variant)}.log".replace("/", "-").replace(" ", "-"),
        speculative_config=speculative_config(variant, configs),
        max_model_len=cfg.max_model_len,
        max_num_seqs=max_num_seqs(cfg),
        dtype=cfg.dtype,
        extra_args=cfg.vllm_args,
    )


def optional(cfg: Config, variant: Variant, error: ChildProcessError) -> str:
    """Why the engine refused what the benchmark is whole without: a quantised draft, the ideal.

    Raises: the error where it refused the target; ValueError, with the cure where one is known, where a draft.
    """
    if variant.draft is None:
        raise error
    if not variant.quantization and not variant.is_ideal:
        raise ValueError(f"{error}{cure(cfg.target, variant.draft, variant.num_speculative_tokens)}") from error
    return str(error)


def speculative_config(variant: Variant, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """vLLM's --speculative-config of a variant; None for the target alone."""
    if variant.draft is None:
        return None
    config = {**measurable(configs[variant.draft]), "num_speculative_tokens": variant.num_speculative_tokens}
    if variant.quantization:
        config["quantization"] = variant.quantization
    if variant.is_ideal:
        config |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": variant.num_speculative_tokens + 1,
        }
    return config


def name(variant: Variant) -> str:
    """A variant as the progress bar and its log call it."""
    if variant.draft is None:
        return "without draft"
    quantized = f" in {variant.quantization}" if variant.quantization else ""
    ideal = " all accepted" if variant.is_ideal else ""
    return f"{title(variant.draft)}{quantized}{ideal} k={variant.num_speculative_tokens}"


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
