"""Measure the speed-up of drafts in a real vLLM server: the tables to decide with how to serve."""

import contextlib
import shlex
import sys
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redraft.eval.engine.draft_source import DraftSource, shorten_name
from redraft.eval.engine.sampling import Sampling, choose_sampling, list_penalties, require_served
from redraft.eval.engine.server import (
    Mode,
    VllmServer,
    forget_requests,
    require_servable,
    vllm_server,
)
from redraft.eval.engine.target_dtype import open_target
from redraft.eval.machine import ENGINE_IS_CPU, engine_environment, environment
from redraft.eval.serving.baseline import (
    MODE_ROUNDS,
    choose_mode,
    describe_baseline,
    describe_modes,
)
from redraft.eval.serving.load import Load, LoadResult, run_load
from redraft.eval.serving.report import GRID, build_serving_report, compose_answer, write_serving
from redraft.eval.serving.sweep import (
    ALONE,
    Cell,
    Results,
    Sweep,
    Variant,
    build_tables,
    group_by_variant,
    order_pass,
    plan,
)
from redraft.heads.files.kept import fingerprint_path
from redraft.heads.files.replaced import PREVIOUS, drop_previous, start_over
from redraft.heads.files.target_folder import TargetFolder
from redraft.heads.progress import Progress
from redraft.recipes.decide.bench_config import Config

ENGINE_HAS_IDEAL = not ENGINE_IS_CPU  # the CPU's kernels ignore synthetic acceptance


def main(cfg: Config, *, engine_has_ideal: bool = ENGINE_HAS_IDEAL) -> None:
    started = time.monotonic()
    target = open_target(cfg.target, cfg.target_dtype, on_cpu=ENGINE_IS_CPU)
    # 1. the cells of every table, and the configuration of each draft
    configs = {
        draft: DraftSource.parse(draft).speculative(cfg.draft_sample_method) for draft in cfg.draft
    }
    questions = plan(sweep(cfg, target, engine_has_ideal=engine_has_ideal))
    cells = group_by_variant(cell for some in questions.values() for cell in some)
    for variant in cells:
        require_servable(
            speculative_config(variant, configs)
        )  # now, not when its turn comes hours later

    # 2. the plain server to beat: compiled or eager, whichever is faster here
    if cfg.overwrite:
        start_over(cfg.output, "cells", cfg)
    mode, modes = choose_baseline(cfg, target, cells[ALONE][0].load)
    print(describe_modes(mode, modes), flush=True)

    # 3. measure the missing cells, one server at a time
    results = Results(cfg.output, served(cfg, target, mode))
    refused = measure_missing(cfg, target, cells, configs, results, mode)

    # 4. write the reports
    medians = {cell: results.median(cell, cfg.repeats) for some in cells.values() for cell in some}
    measured = {cell: median for cell, median in medians.items() if median is not None}
    ratios = {cell: found for cell in measured if (found := results.ratios(cell, cfg.repeats))}
    alone = {
        cell.load.concurrency: results.runs(cell, cfg.repeats)
        for cell in questions[GRID]
        if cell.variant == ALONE
    }
    baseline = describe_baseline(alone, mode, modes, log=log(cfg, ALONE), target=target.folder)
    report = build_serving_report(
        build_tables(questions, measured, ratios),
        configs,
        target=cfg.target,
        command=shlex.join(sys.argv),
        settings=settings(cfg, target),
        baseline=asdict(baseline),
        refused=refused,
        ideal_source="engine" if engine_has_ideal else "cost model",
        environment=environment(),
        duration_s=round(time.monotonic() - started, 1),
    )
    page = write_serving(cfg.output, report)
    drop_previous(cfg.output / PREVIOUS)
    unmeasured = (f"not measured: {entry['what']}: {entry['reason']}" for entry in refused)
    print(*compose_answer(report), *unmeasured, f"report: {page}", sep="\n")


def sweep(cfg: Config, target: TargetFolder, *, engine_has_ideal: bool = ENGINE_HAS_IDEAL) -> Sweep:
    """The benchmark's questions.

    Raises:
        ValueError: the prompts do not fit the servers.
    """
    if cfg.repeats < 1:
        raise ValueError(f"--repeats {cfg.repeats} measures nothing: give 1 or more")
    longest = cfg.input_tokens + cfg.max_tokens
    if longest > cfg.max_model_len:
        raise ValueError(
            f"{longest} tokens of input and output do not fit --max-model-len {cfg.max_model_len}"
        )
    return Sweep(
        drafts=cfg.draft,
        num_speculative_tokens=cfg.num_speculative_tokens,
        concurrency=cfg.concurrency,
        input_tokens=cfg.input_tokens,
        data=cfg.prompts,
        output_tokens=cfg.max_tokens,
        prompts_per_client=cfg.prompts_per_client,
        sampling=sampling(cfg, target),
        engine_has_ideal=engine_has_ideal,
    )


def sampling(cfg: Config, target: TargetFolder) -> Sampling:
    """How every request is sampled.

    Raises:
        ValueError: if vLLM refuses it beside a draft.
    """
    chosen = choose_sampling(
        target.folder,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        min_p=cfg.min_p,
    )
    require_served(chosen)
    return chosen


def served(cfg: Config, target: TargetFolder, mode: Mode) -> dict[str, Any]:
    """The settings of all servers. If one changes, earlier measurements are not reused."""
    server = {
        "mode": mode,
        "dtype": target.dtype,
        "vllm_args": cfg.vllm_args,
        "max_num_seqs": max_num_seqs(cfg),
    }
    drafting = {"draft_sample_method": cfg.draft_sample_method}
    return {"target": fingerprint_path(target.name), **server, **drafting, **engine_environment()}


def choose_baseline(
    cfg: Config, target: TargetFolder, load: Load
) -> tuple[Mode, dict[Mode, float]]:
    """(mode of all servers, tokens/s by mode at this load)."""
    prompts = cfg.output / "prompts"
    return choose_mode(
        target.name, lambda running: run_load(running, load, prompts).tokens_per_s, MODE_ROUNDS, cfg.output / "logs",
        cfg.output / "cells", [fingerprint_path(target.name), asdict(load)], **server_options(cfg, target),
    )  # fmt: skip


def max_num_seqs(cfg: Config) -> int:
    return max(16, *cfg.concurrency)


def settings(cfg: Config, target: TargetFolder) -> dict[str, Any]:
    base = asdict(sweep(cfg, target).load())
    return {
        "draft": cfg.draft[0],
        "num_speculative_tokens": cfg.num_speculative_tokens[0],
        **{
            key: base[key]
            for key in ("concurrency", "input_tokens", "output_tokens", "data", "sampling")
        },
        "penalties": list_penalties(target.folder),
        "draft_sample_method": cfg.draft_sample_method,
        "repeats": cfg.repeats,
    }


def measure_missing(
    cfg: Config,
    target: TargetFolder,
    cells: Mapping[Variant, Sequence[Cell]],
    configs: Mapping[str, Mapping[str, Any]],
    results: Results,
    mode: Mode,
) -> list[dict[str, str]]:
    """Measure every cell not finished by an earlier run, and return the refused variants with the
    reason. The target alone is measured again in a pass with missing cells, because they are
    compared with it.

    Raises:
        ValueError: if the engine refuses a draft; with the cure if one is known.
    """
    refused: dict[str, str] = {}
    in_pass = sum(map(len, cells.values()))
    with Progress(total=cfg.repeats * in_pass, desc="cells", unit="cell") as bar:
        # Repeats outside: the passes of a variant lie far apart, so a slow hour hits every one.
        for repeat in range(cfg.repeats):
            # A refused variant is not started again in the next pass: a failed start takes minutes.
            todo = order_pass(list_missing(cells, results, repeat, refused))
            bar.update(in_pass - sum(map(len, todo.values())))
            runs: dict[Cell, LoadResult] = {}
            drafts = {name(variant) for variant in todo if variant != ALONE}
            for variant, some in todo.items():
                if variant == ALONE and drafts and drafts <= refused.keys():
                    continue
                bar.set_postfix_str(name(variant))
                try:
                    with server(cfg, target, variant, configs, mode) as running:
                        for cell in some:
                            runs[cell] = run_load(running, cell.load, cfg.output / "prompts")
                            keep_compared(results, repeat, runs, cell)
                            bar.update()
                except ChildProcessError as error:
                    refused[name(variant)] = excuse_refusal(target, variant, error)
    return [{"what": refused_name, "reason": reason} for refused_name, reason in refused.items()]


def list_missing(
    cells: Mapping[Variant, Sequence[Cell]], results: Results, repeat: int, refused: Container[str]
) -> dict[Variant, list[Cell]]:
    missing = {
        variant: [cell for cell in some if not results.has(cell, repeat)]
        for variant, some in cells.items()
    }
    return {
        variant: some for variant, some in missing.items() if some and name(variant) not in refused
    }


def keep_compared(
    results: Results, repeat: int, runs: Mapping[Cell, LoadResult], newest: Cell
) -> None:
    """Write the newest run once the target's at this load is there.

    With the target's, also the runs that waited.
    """
    for cell, run in runs.items():
        if newest in (cell, cell.alone()) and cell.alone() in runs:
            results.add(cell, repeat, run, runs[cell.alone()])


def server_options(cfg: Config, target: TargetFolder) -> dict[str, Any]:
    return {
        "max_model_len": cfg.max_model_len,
        "max_num_seqs": max_num_seqs(cfg),
        "dtype": target.dtype,
        "extra_args": cfg.vllm_args,
    }


def server(
    cfg: Config,
    target: TargetFolder,
    variant: Variant,
    configs: Mapping[str, Mapping[str, Any]],
    mode: Mode,
) -> contextlib.AbstractContextManager[VllmServer]:
    config = speculative_config(variant, configs)
    options = server_options(cfg, target)
    return vllm_server(
        target.name, log=log(cfg, variant), speculative_config=config, mode=mode, **options
    )


def log(cfg: Config, variant: Variant) -> Path:
    return cfg.output / "logs" / f"{name(variant)}.log".replace("/", "-").replace(" ", "-")


def excuse_refusal(target: TargetFolder, variant: Variant, error: ChildProcessError) -> str:
    """The reason to refuse the ideal, which the benchmark can do without.

    Raises:
        ChildProcessError: for the target, ValueError, with the cure, for a draft.
    """
    if variant.draft is None:
        raise error
    if not variant.is_ideal:
        cure = DraftSource.parse(variant.draft).find_cure(
            target.name, variant.num_speculative_tokens
        )
        raise ValueError(f"{error}{cure}") from error
    return str(error)


def speculative_config(
    variant: Variant, configs: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any] | None:
    if variant.draft is None:
        return None
    config = {
        **forget_requests(configs[variant.draft]),
        "num_speculative_tokens": variant.num_speculative_tokens,
    }
    if variant.is_ideal:
        config |= {
            # The mean length counts the bonus: k + 1, vLLM's largest, accepts every token.
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": variant.num_speculative_tokens + 1,
        }
    return config


def name(variant: Variant) -> str:
    """The name of a variant on the progress bar and in the log's file name."""
    if variant.draft is None:
        return "without draft"
    ideal = " all accepted" if variant.is_ideal else ""
    return f"{shorten_name(variant.draft)}{ideal} k={variant.num_speculative_tokens}"
