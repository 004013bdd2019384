"""Measure what a target accepts of its drafts: by domain, temperature and number of draft tokens, with intervals.

$ redraft eval --preset demo --draft outputs/demo/draft        # the small target: `make demo` beside prompt lookup
$ redraft eval --target TARGET --draft DRAFT --draft ngram --data prompts.jsonl --domain-column topic
$ redraft eval --target TARGET --draft v13=DRAFT --baseline outputs/eval-v12/report.json --max-loss 0.02

One pass of the target over its own answers tells what it would accept of every draft (the forecast); then each is
served by a real vLLM, whose counters are set beside it. Killed, the same command goes on where it was. Exit status 1
where something fell against the baseline, 2 for what cannot be measured.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from distill.data import load_conversations, split_held_out
from distill.loop import write_offline_unless_logged_in
from distill.samples import held_out_prompts
from distill.setup import Signal, load_target
from distill.signals import InProcessTarget
from eval.acceptance import AcceptanceCounts
from eval.acceptance_report import SCHEMA_VERSION, acceptance_report, write_acceptance_report
from eval.acceptance_results import Measured, tau_of
from eval.card import write_card
from eval.cost import StepCosts
from eval.drafts import LoadedTarget, NamedDraft, SampleMethod, load_drafts
from eval.engine import engine_is_cpu
from eval.ngram import Ngram
from eval.prompts import Prompt
from eval.regression import compare, counterparts, describe, read_baseline
from eval.served import EngineOptions, serve_and_count
from eval.serving_report import read_serving
from eval.teacher_forced import Protocol, teacher_forced
from heads.artifact import fingerprint, write_whole
from heads.checkpoint import end_ids, model_folder
from recipes.cli import run_recipe
from recipes.serve import Config as Serve
from recipes.serve import plugin_environment


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str = "meta-llama/Llama-3.1-8B-Instruct"
    """Folder or hub name of the model that is served."""
    draft: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Draft to measure, once for each: a folder (a head, a standalone draft, a version of a registry), a hub name,
    `ngram` (prompt lookup) or `suffix`; NAME=FOLDER gives it a name."""
    data: str = "HuggingFaceH4/ultrachat_200k"
    """Where prompts come from: hub name, .jsonl, .parquet, or `stdlib` (code and prose, for the small target)."""
    split: str = "test_sft"
    """Split of a hub data set."""
    domain_column: str | None = None
    """Column that names a row's domain (chat, code, math, ...); by default `domain` where there is one."""
    held_out: float = 1.0
    """Share of the conversations that is used, chosen by their hash: what training held out with the same number."""
    num_prompts: int = 64
    """From every domain alike."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out."""
    temperature: tuple[float, ...] = (0.0,)
    """Each is measured; above 0 on answers that are sampled from the target."""
    num_speculative_tokens: tuple[int, ...] = (1, 2, 3, 5)
    """Each is measured."""
    max_tokens: int = 128
    """Longest answer."""
    draft_sample_method: SampleMethod = "greedy"
    """How the server drafts above temperature 0: the draft's most probable token, or one drawn from it."""
    ngram: Ngram = field(default_factory=Ngram)
    seed: int = 0
    """Of sampled answers and of the resampling behind the intervals."""
    batch_size: int = 16
    """Prompts in one pass of the target."""
    engine: bool = True
    """Serve every draft in a real vLLM too; without it, all numbers are forecast."""
    engine_tokens: tuple[int, ...] = ()
    """Of --num-speculative-tokens, those that the engine serves, each with a start of its own; by default the most."""
    concurrency: int = 4
    """Requests the engine serves at a time."""
    engine_args: tuple[str, ...] = ()
    """Passed through to vLLM, e.g. --tensor-parallel-size 8."""
    costs: Path | None = None
    """The serving.json of a `redraft bench` of these drafts: the report then says how many tokens to draft."""
    baseline: Path | None = None
    """An earlier report.json of the same target: what fell is listed, and is exit status 1."""
    max_loss: float = 0.02
    """Share of tau that may be lost against the baseline: 0.02 is 2%. On prompts that are not the baseline's, a loss
    also has to be more than chance explains."""
    card: bool = False
    """Write README.md, a model card of what was measured, into the folder of every draft that has one."""
    wandb: str | None = None
    """Project to log to; offline where nobody is logged in."""
    output: Path = Path("outputs/eval")
    """Folder that receives report.json, report.html, report.md and run.json, and keeps what is measured already."""


PRESETS = {
    "demo": Config(
        target="tests/assets/tiny-target",
        draft=("ngram",),
        data="stdlib",
        held_out=0.05,
        max_prompt_tokens=512,
        temperature=(0.0, 1.0),
        output=Path("outputs/demo-eval"),
    )
}


def main(cfg: Config) -> None:
    started = time.perf_counter()
    check(cfg)

    # 1. target, drafts and what they are compared with
    target = load(cfg.target)
    baseline = read_baseline(cfg.baseline, target.fingerprint, SCHEMA_VERSION) if cfg.baseline else None
    most = max(cfg.num_speculative_tokens)
    drafts = load_drafts(cfg.draft, target, cfg.ngram, cfg.draft_sample_method, most)
    if baseline:
        counterparts([vars(draft) for draft in drafts], settings(cfg), baseline)
    costs = read_costs(cfg.costs, drafts) if cfg.costs else {}
    if not cfg.engine and (unmeasured := [draft.name for draft in drafts if draft.forecast is None]):
        raise ValueError(f"{unmeasured[0]} is measured in the engine only: leave out --no-engine")

    # 2. prompts
    prompts = load_prompts(cfg, target.tokenizer)
    protocol = Protocol(
        temperatures=tuple(dict.fromkeys(cfg.temperature)),
        num_speculative_tokens=tuple(sorted(set(cfg.num_speculative_tokens))),
        max_tokens=cfg.max_tokens,
        end_ids=end_ids(cfg.target, target.tokenizer),
        seed=cfg.seed,
        batch_size=cfg.batch_size,
    )

    # 3. all drafts over one pass of the target per batch
    forecastable = {draft.name: draft.forecast for draft in drafts if draft.forecast}
    layers = sorted({layer for draft in forecastable.values() for layer in draft.aux_layer_ids})
    signal = InProcessTarget(target.model, layers)
    rows = teacher_forced(
        target.model, target.fingerprint, signal, forecastable, prompts, protocol, cfg.output / "kept"
    )

    # 4. each draft in the engine
    for module in (target.model, *(draft.module for draft in forecastable.values() if draft.module)):
        module.to("cpu")  # the engine wants the GPU for itself
    torch.cuda.empty_cache()
    engine = measure_in_engine(cfg, target, drafts, prompts, protocol) if cfg.engine else {}

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
    report = acceptance_report(
        measured,
        target={"name": cfg.target, "fingerprint": target.fingerprint},
        drafts=drafts,
        settings=settings(cfg),
        costs=costs,
    )
    if baseline:
        report["baseline"] = compare(report, baseline, cfg.max_loss)
    page = write_acceptance_report(cfg.output, report)
    write_run(cfg, time.perf_counter() - started)
    tell(report, page)
    for draft in drafts if cfg.card else ():
        if draft.folder:
            print(f"model card: {write_card(draft.folder, report, draft.name)}")
    if cfg.wandb:
        upload(cfg.wandb, report, page)
    if baseline and report["baseline"]["num_fell"]:
        raise SystemExit(1)


def check(cfg: Config) -> None:
    """Return where the numbers make sense.

    Raises: ValueError.
    """
    if not cfg.num_speculative_tokens or min(cfg.num_speculative_tokens) < 1:
        raise ValueError("--num-speculative-tokens needs numbers of at least 1")
    if not cfg.temperature or min(cfg.temperature) < 0:
        raise ValueError("--temperature needs numbers of at least 0")
    for name in ("num_prompts", "max_tokens", "batch_size", "concurrency"):
        if getattr(cfg, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(cfg, name)}: it must be at least 1")
    if not 0 < cfg.held_out <= 1:
        raise ValueError(f"--held-out is {cfg.held_out}: a share of the conversations lies above 0 and up to 1")
    if beyond := set(cfg.engine_tokens) - set(cfg.num_speculative_tokens):
        raise ValueError(f"--engine-tokens {min(beyond)} is none of --num-speculative-tokens")


def load(name: str) -> LoadedTarget:
    """The target, frozen, on the GPU where there is one; in float32 on a CPU, as the engine serves it there."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = load_target(name, Signal(), device)
    folder = model_folder(name)
    return LoadedTarget(name=name, folder=folder, fingerprint=fingerprint(folder), model=model, tokenizer=tokenizer)


def load_prompts(cfg: Config, tokenizer: Any) -> list[Prompt]:
    """Raises: ValueError where the data cannot be read, lacks the column, or leaves no prompt."""
    conversations = load_conversations(cfg.data, split=cfg.split, domain_column=cfg.domain_column)
    _, used = split_held_out(conversations, cfg.held_out)
    return held_out_prompts(used, tokenizer, num_prompts=cfg.num_prompts, max_length=cfg.max_prompt_tokens)


def measure_in_engine(
    cfg: Config, target: LoadedTarget, drafts: Sequence[NamedDraft], prompts: Sequence[Prompt], protocol: Protocol
) -> dict[tuple[str, float, int], list[AcceptanceCounts]]:
    """By draft, temperature and number of draft tokens, what the engine counted of every prompt."""
    # the CPU engine needs our plugin to sample with speculation; it mends that and does nothing else unasked
    env = plugin_environment(Serve(target=cfg.target), os.environ) if engine_is_cpu() else {}
    options = EngineOptions(concurrency=cfg.concurrency, args=cfg.engine_args, env=env)
    found: dict[tuple[str, float, int], list[AcceptanceCounts]] = {}
    for draft in drafts:
        asked = [k for k in cfg.engine_tokens or protocol.num_speculative_tokens if draft.serves(k)]
        for k in asked if cfg.engine_tokens else asked[-1:]:
            if draft.speculative:
                counted = serve_and_count(target, draft, k, prompts, protocol, options, cfg.output / "kept")
                found |= {(draft.name, t, k): c for t, c in zip(protocol.temperatures, counted, strict=True)}
    return found


def settings(cfg: Config) -> dict[str, Any]:
    """What the report says of how it was asked for."""
    shown = ("data", "split", "domain_column", "held_out", "max_prompt_tokens", "max_tokens", "draft_sample_method")
    return {name: getattr(cfg, name) for name in shown} | {"ngram": asdict(cfg.ngram)}


def write_run(cfg: Config, duration_s: float) -> None:
    """run.json: the command, its whole config, when it ended and how long it took; not the report's, which repeats."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    run = {"command": sys.argv, "config": asdict(cfg), "date": now, "duration_s": round(duration_s, 1)}
    write_whole(cfg.output / "run.json", json.dumps(run, indent=2, default=str) + "\n")


def tell(report: Mapping[str, Any], page: Path) -> None:
    print("\n".join(report["answer"]))
    for note in report["notes"]:
        print(f"note: {note}")
    if section := report["baseline"]:
        fallen = [change for change in section["changes"] if change["fell"]]
        print(f"baseline: {len(fallen)} of {len(section['changes'])} fell by more than {section['max_loss']:.1%}")
        for change in fallen:
            print(f"  {describe(change)}")
    print(f"report: {page}")


def upload(project: str, report: Mapping[str, Any], page: Path) -> None:
    """The numbers as a summary, the page and the JSON as files of a wandb run."""
    import wandb

    write_offline_unless_logged_in()
    with wandb.init(project=project, job_type="eval", config=report["settings"]) as run:
        for row in report["results"]:
            for entry in row["by_num_speculative_tokens"]:
                where = [row["draft"], row["domain"] or "all", f"t{row['temperature']:g}"]
                run.summary["/".join([*where, f"k{entry['num_speculative_tokens']}", "tau"])] = tau_of(entry)
        artifact = wandb.Artifact("acceptance-report", type="report")
        artifact.add_file(str(page.with_name("report.json")))
        run.log_artifact(artifact)
        if page.suffix == ".html":
            run.log({"report": wandb.Html(page.read_text())})


def read_costs(path: Path, drafts: Sequence[NamedDraft]) -> dict[str, StepCosts]:
    """By draft, the step costs of a serving.json; a draft that it did not measure has none.

    Raises: FileNotFoundError; ValueError where it is no serving.json, or measured none of these drafts.
    """
    serving = read_serving(path)
    measured = [(about["title"], source, about["costs"]) for source, about in serving["drafts"].items()]
    names = {name for title, source, _ in measured for name in (title, source)}
    found = {
        draft.name: StepCosts.from_json(costs)
        for draft in drafts
        for title, source, costs in measured
        if costs and {draft.name, draft.source} & {title, source}
    }
    if not found:
        raise ValueError(
            f"{path} has the step times of {', '.join(sorted(names)) or 'no draft'}, of none of these drafts"
        )
    return found


if __name__ == "__main__":
    run_recipe(main, Config, __doc__, PRESETS)
