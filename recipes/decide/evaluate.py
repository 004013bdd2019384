"""Measure the acceptance of drafts, with intervals.

Results are reported by domain, temperature and number of draft tokens.
"""

import datetime
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from redraft.distill.data.conversations import load_conversations, split_held_out
from redraft.distill.data.day import keep_day
from redraft.distill.data.samples import held_out_prompts
from redraft.distill.plan.memory_check import require_target_room
from redraft.distill.run.inputs import load_target
from redraft.distill.run.proof import leave_gpu
from redraft.distill.signal.features import load_skeleton
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.run_config import Signal
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.prompts import Prompt
from redraft.engine.sampling import Sampling, choose_sampling, list_penalties, require_served
from redraft.engine.server import require_runner
from redraft.engine.target_dtype import open_target
from redraft.eval.forecast.drafts import NamedDraft, load_drafts
from redraft.eval.forecast.teacher_forced import Protocol, Rows, forecast_drafts
from redraft.eval.report import regression
from redraft.eval.report.acceptance import (
    SCHEMA_VERSION,
    build_acceptance_report,
    write_acceptance_report,
)
from redraft.eval.report.results import Measured
from redraft.eval.served import EngineOptions, serve_and_count
from redraft.files.artifact import write_whole
from redraft.files.replaced import PREVIOUS, drop_previous, find_obstacle, start_over
from redraft.files.setting_error import require_least
from redraft.files.target_folder import TargetFolder
from redraft.heads.target import LoadedTarget
from redraft.recipes.decide.evaluate_config import EvalConfig

WRITTEN = ("report.json", "report.html", "report.md", "run.json")


def main(cfg: EvalConfig) -> None:
    started = time.perf_counter()
    check(cfg)
    # The dtype is chosen once, because measurements are stored separately for each dtype, and the
    # report names it.
    on_cpu = not torch.cuda.is_available()
    opened = open_target(cfg.target, cfg.target_dtype, on_cpu=on_cpu)
    cfg = replace(cfg, target_dtype=opened.dtype)

    # 1. Open target, drafts and baseline.
    sampling = choose_sampling(opened.folder, top_p=cfg.top_p, top_k=cfg.top_k, min_p=cfg.min_p)
    if cfg.engine:
        require_served(sampling, way_out=", or forecast with --no-engine")
    target = LoadedTarget(files=opened, model=load(opened, whole=cfg.forecast))
    # If the dtype is empty, no subfolder is added.
    kept = cfg.output / "kept" / (cfg.target_dtype or "")
    baseline = None
    if cfg.baseline:
        baseline = regression.read_baseline(cfg.baseline, opened.fingerprint, SCHEMA_VERSION)
    drafts = load_drafts(cfg.draft, target, cfg.draft_sample_method)
    require_measurable(cfg, drafts)

    # 2. prompts
    earlier = baseline.settings if baseline else {}
    day = choose_day(cfg, earlier) if opened.writes_date else None
    prompts = load_prompts(cfg, opened.tokenizer, day)
    protocol = Protocol(
        temperatures=tuple(dict.fromkeys(cfg.temperature)) or (sampling.temperature,),
        num_speculative_tokens=tuple(sorted(set(cfg.num_speculative_tokens))),
        max_tokens=cfg.max_tokens,
        end_ids=opened.end_ids,
        seed=cfg.seed,
        batch_size=cfg.batch_size,
        filters=sampling,
    )
    if baseline:
        # Refuse an unsuitable baseline now, not after hours of measuring.
        families = {draft.name: draft.family for draft in drafts}
        asked = settings(cfg, opened, sampling) | {"temperatures": protocol.temperatures}
        regression.match_drafts(families, asked, baseline)

    if cfg.overwrite:
        start_over(cfg.output, "kept", cfg)

    # 3. Forecast all drafts, then leave the whole GPU to the engine.
    rows = forecast_all(target, drafts, prompts, protocol, kept) if cfg.forecast else {}

    # 4. Measure each draft in the engine.
    engine = measure_in_engine(cfg, target, drafts, prompts, protocol, kept) if cfg.engine else {}

    # 5. report
    measured = Measured(
        prompts=prompts,
        drafts=[draft.name for draft in drafts],
        temperatures=protocol.temperatures,
        num_speculative_tokens=protocol.num_speculative_tokens,
        forecast=rows,
        engine=engine,
        seed=cfg.seed,
    )
    report = build_acceptance_report(
        measured,
        target={"name": cfg.target, "fingerprint": opened.fingerprint},
        drafts=drafts,
        settings=settings(cfg, opened, sampling) | ({"date": day.isoformat()} if day else {}),
    )
    comparison = None
    if baseline:
        now = msgspec.convert(report, regression.Report)
        comparison = regression.compare_reports(now, baseline, cfg.max_loss)
        report["baseline"] = asdict(comparison)
    page = write_acceptance_report(cfg.output, report)
    write_run(cfg, time.perf_counter() - started)
    drop_previous(cfg.output / PREVIOUS)
    tell(report, comparison, page)
    # Do this last, so that the report exists when a pipeline stops at this exit status.
    if comparison and comparison.num_fell:
        raise SystemExit(1)


def require_measurable(cfg: EvalConfig, drafts: Sequence[NamedDraft]) -> None:
    """Raise ValueError if a draft does not support the only requested measurement."""
    for draft in drafts if cfg.engine else ():
        require_runner(draft.speculative, way_out=", or forecast with --no-engine")
    if not cfg.engine and (
        unmeasured := [draft.name for draft in drafts if draft.forecast is None]
    ):
        raise ValueError(f"{unmeasured[0]} can only be measured in the engine: remove --no-engine")
    if not cfg.forecast and (
        unserved := [draft.name for draft in drafts if draft.speculative is None]
    ):
        raise ValueError(
            f"{unserved[0]} has no proposer in vLLM and can only be forecast: remove --no-forecast"
        )


def forecast_all(
    target: LoadedTarget,
    drafts: Sequence[NamedDraft],
    prompts: Sequence[Prompt],
    protocol: Protocol,
    kept: Path,
) -> Rows:
    """Forecast all drafts, with one pass of the target per batch. The rows are stored in `kept`.

    Afterwards, the models are on the CPU, and so are the tensors that drafts borrow from the target.
    """
    forecastable = {draft.name: draft.forecast for draft in drafts if draft.forecast}
    # Capture all layers that any draft reads: one pass of the target serves all drafts, and each
    # selects its own layers.
    layers = sorted({layer for draft in forecastable.values() for layer in draft.aux_layer_ids})
    signal = InProcessTarget(target.model, layers)
    rows = forecast_drafts(
        target.model, target.files.fingerprint, signal, forecastable, prompts, protocol, kept
    )
    for module in (target.model, *(one.module for one in forecastable.values() if one.module)):
        leave_gpu(module, *(value for value in vars(module).values() if torch.is_tensor(value)))
    return rows


def check(cfg: EvalConfig) -> None:
    """Raise ValueError if settings contradict each other or a number is out of range."""
    if not cfg.num_speculative_tokens or min(cfg.num_speculative_tokens) < 1:
        raise ValueError("--num-speculative-tokens must be at least 1")
    if min(cfg.temperature, default=0) < 0:
        raise ValueError("--temperature must be at least 0")
    if not 0 <= cfg.max_loss < 1:
        raise ValueError(f"--max-loss is {cfg.max_loss}: it must be at least 0 and below 1")
    require_least(cfg, num_prompts=1, max_tokens=1, batch_size=1, concurrency=1)
    if not (cfg.forecast or cfg.engine):
        raise ValueError(
            "--no-forecast and --no-engine leave nothing to measure: remove one of them"
        )
    if not cfg.forecast and cfg.baseline:
        raise ValueError("--baseline needs forecasts: remove --no-forecast")
    if not 0 < cfg.held_out <= 1:
        raise ValueError(f"--held-out is {cfg.held_out}: it must be above 0 and at most 1")
    if cfg.output.is_file():
        raise ValueError(f"{cfg.output} is a file: choose a different --output")
    # A baseline is never replaced by the report that is compared with it.
    if obstacle := find_obstacle([cfg.output / name for name in WRITTEN], cfg):
        raise ValueError(f"{obstacle}: choose a different --output")
    if (cfg.output / "checkpoints").exists():
        raise ValueError(f"{cfg.output} contains a training run: choose a different --output")


def load(target: TargetFolder, *, whole: bool = True) -> Any:
    """Load a target's frozen model, on the GPU if there is one.

    If `whole` is false, load only the parts that a draft shares with it, on the CPU.

    Raises:
        ValueError: the model cannot be loaded, or does not fit into memory.
    """
    if not whole:
        return load_skeleton(target, target.torch_dtype, torch.device("cpu"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cure = "measure in the engine only: --no-forecast"
    require_target_room(target, device, way_out=f"{cure} -- --tensor-parallel-size=N")
    return load_target(target, Signal(), device, cure=cure)


def choose_day(cfg: EvalConfig, earlier: Mapping[str, Any]) -> datetime.date:
    """Return the date for a chat template that contains today's date.

    It is the date in the settings of an `earlier` report or in the measurements stored in --output,
    so that prompts stay the same on another day. Otherwise it is today, which is stored in
    --output.

    Raises:
        ValueError: the stored date cannot be read.
    """
    if recorded := earlier.get("date"):
        return datetime.date.fromisoformat(recorded)
    return keep_day(cfg.output / "kept" / "date")


def load_prompts(cfg: EvalConfig, tokenizer: Any, day: datetime.date | None) -> list[Prompt]:
    """Load the prompts to measure on.

    A chat template that contains today's date uses `day`.

    Raises:
        ValueError: the data cannot be read, the column is missing, or no prompt is left.
    """
    conversations = load_conversations(
        cfg.prompts, split=cfg.split, domain_column=cfg.domain_column
    )
    _, used = split_held_out(conversations, cfg.held_out)
    return held_out_prompts(
        used, tokenizer, num_prompts=cfg.num_prompts, max_length=cfg.max_prompt_tokens, day=day
    )


def measure_in_engine(
    cfg: EvalConfig,
    target: LoadedTarget,
    drafts: Sequence[NamedDraft],
    prompts: Sequence[Prompt],
    protocol: Protocol,
    kept: Path,
) -> dict[tuple[str, float, int], list[AcceptanceCounts]]:
    """Count in the engine, for every prompt, by draft, temperature and number of draft tokens.

    The counts are stored in `kept`.
    """
    options = EngineOptions(
        concurrency=cfg.concurrency,
        dtype=cfg.target_dtype,
        args=cfg.vllm_args,
        forecast=cfg.forecast,
    )
    found: dict[tuple[str, float, int], list[AcceptanceCounts]] = {}
    for draft in drafts:
        numbers = [k for k in protocol.num_speculative_tokens if draft.serves(k)]
        if draft.speculative and numbers:
            # The largest number is the most informative, and every run of the engine takes minutes.
            k = numbers[-1]
            counted = serve_and_count(target, draft, k, prompts, protocol, options, kept)
            found |= {
                (draft.name, t, k): c for t, c in zip(protocol.temperatures, counted, strict=True)
            }
    return found


def settings(cfg: EvalConfig, target: TargetFolder, sampling: Sampling) -> dict[str, Any]:
    shown = (
        "split",
        "domain_column",
        "held_out",
        "max_prompt_tokens",
        "max_tokens",
        "draft_sample_method",
    )
    filters = {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
    left_out = (
        {"penalties_left_out": penalties} if (penalties := list_penalties(target.folder)) else {}
    )
    dtype = {"target_dtype": cfg.target_dtype} if cfg.target_dtype else {}
    # A baseline must have the same filters, `max_tokens` and `draft_sample_method`
    # (`match_drafts`).
    shown_settings = {name: getattr(cfg, name) for name in shown}
    return {
        "data": cfg.prompts,
        **shown_settings,
        **dtype,
        **filters,
        **left_out,
    }


def write_run(cfg: EvalConfig, duration_s: float) -> None:
    """Write run.json: command, config, date and duration.

    They are not in the report, which must be reproducible.
    """
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    run = {
        "command": sys.argv,
        "config": asdict(cfg),
        "date": now,
        "duration_s": round(duration_s, 1),
    }
    write_whole(cfg.output / "run.json", json.dumps(run, indent=2, default=str) + "\n")


def tell(report: Mapping[str, Any], comparison: regression.Comparison | None, page: Path) -> None:
    print(*report["answer"], *(f"note: {note}" for note in report["notes"]), sep="\n")
    if comparison:
        fallen = [change for change in comparison.changes if change.fell]
        among = f"{len(fallen)} of {len(comparison.changes)}"
        print(f"baseline: {among} results fell by more than {comparison.max_loss:.1%}")
        for change in fallen:
            print(f"  {regression.describe_change(change)}")
    print(f"report: {page}")
