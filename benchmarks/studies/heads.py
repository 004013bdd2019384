"""Train every family of heads for the small target, serve each in a real vLLM, and compare them.

$ make demo-heads                       # 30 to 60 minutes on two CPU cores
$ python -m benchmarks.studies.heads --resume           # after an interruption: finished heads are kept

Each head is trained with the settings of `presets.py`, and has a separate report. All share the
target's answers to the held-out prompts and the measurement without a draft, which depend only on
the target.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from redraft.distill.data.conversations import load_conversations
from redraft.distill.data.day import keep_day
from redraft.distill.loss.choice import Divergence
from redraft.engine.machine import environment
from redraft.eval.intervals import Estimate, estimate_gain, subtract_independent
from redraft.eval.report.page import charts_of, write_page
from redraft.files.artifact import write_whole
from redraft.heads.catalog import find_family
from redraft.recipes.cli.run import run_recipe

TEMPLATE = Path(__file__).parent / "templates" / "heads.html.j2"

draw_charts = charts_of("benchmarks.studies.heads_charts")

HeadName = Literal["eagle3", "peagle", "dflash", "dspark", "eagle1", "mtp", "medusa"]
NOTES: dict[HeadName, str] = {
    "eagle3": "",
    "peagle": "",
    "dflash": "",
    "dspark": "only vLLM's V2 model runner serves it, which needs a GPU here, so its tau is the "
    "forecast",
    "eagle1": "",
    "mtp": "one MTP layer in the target's weights in the MiMo layout",
    "medusa": "",
}
"""The families, each with a note for the reader."""

FROM_ENGINE = (
    "tau", "forecast_error", "lossless", "decoder", "runner", "num_prompts", "drafts_by_prompt",
    "accepted_by_prompt",
)  # fmt: skip
"""Numbers of a report that only an engine can measure."""

DIVERGENCES = ("forward_kl", "total_variation", "lk_hybrid", "cross_entropy")
"""Divergences of the ablation with EAGLE-3. The first is the preset's default."""


@dataclass(frozen=True, kw_only=True)
class Config:
    output: Path = Path("outputs/demo-heads")
    """Folder for report.json, report.html and a folder per head."""
    heads: tuple[HeadName, ...] = tuple(NOTES)
    """Families to train."""
    divergences: tuple[str, ...] = DIVERGENCES
    """Divergences to compare with EAGLE-3."""
    seeds: int = 3
    """Number of seeds for EAGLE-3 with the first divergence, to show how much tau differs between
    seeds. All but the first seed are trained and forecast without an engine.
    """
    resume: bool = False
    """Keep the finished runs in `output`, whatever their settings."""
    overwrite: bool = False
    """Replace the runs in `output`."""
    flags: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Argument to append to the command of every recipe; repeat the flag for each word:
    --flags=--loop.steps --flags=2.
    """


def main(cfg: Config) -> None:
    for name in cfg.divergences:
        Divergence(name=name)  # report an unknown name now, not after the other runs
    if not any("v1" in find_family(name).decoders for name in cfg.heads):
        raise ValueError(
            f"the engine on this machine serves none of {', '.join(cfg.heads)}: add a head that it serves"
        )
    # 1. Read a quarter of the standard library's conversations, which is more than a demo reads.
    conversations = cfg.output / "conversations.jsonl"
    if not conversations.is_file():
        write_whole(
            conversations,
            "".join(json.dumps(row) + "\n" for row in load_conversations("stdlib")[::4]),
        )

    # 2. Train every head, and EAGLE-3 with every other divergence. The run of the family `eagle3`
    # also counts as the run with the first divergence.
    others = (
        [name for name in cfg.divergences if name != DIVERGENCES[0]]
        if "eagle3" in cfg.heads
        else []
    )
    runs: list[tuple[str, HeadName, tuple[str, ...]]] = [(name, name, ()) for name in cfg.heads]
    runs += [(f"eagle3-{name}", "eagle3", ("--divergence.name", name)) for name in others]
    reseeded = [f"eagle3-seed-{seed}" for seed in range(1, cfg.seeds)] if others else []
    runs += [
        (folder, "eagle3", ("--loop.seed", str(seed), "--prove.no-engine"))
        for seed, folder in enumerate(reseeded, 1)
    ]
    if cfg.overwrite:
        # The target's shared answers and the date belong to the earlier runs.
        shutil.rmtree(cfg.output / "target", ignore_errors=True)
        (cfg.output / "date").unlink(missing_ok=True)
    day = keep_day(cfg.output / "date")
    for number, (folder, name, flags) in enumerate(runs, 1):
        print(f"\n{number} of {len(runs)}: {folder}", flush=True)
        train_and_prove(name, cfg.output / folder, cfg, ("--data.date", day.isoformat(), *flags))

    # 3. compare
    reports = {
        folder: json.loads((cfg.output / folder / "report.json").read_text())
        for folder, _, _ in runs
    }
    by_divergence = {DIVERGENCES[0]: "eagle3"} | {name: f"eagle3-{name}" for name in others}
    ablation = (
        {name: extract_entry(reports[run]) for name, run in by_divergence.items()} if others else {}
    )
    seed_taus = (
        [reports[run]["offline"]["tau_forecast"] for run in ("eagle3", *reseeded)] if others else []
    )
    page = write_page(
        cfg.output,
        {
            "target": reports[cfg.heads[0]]["target"],
            "command": shlex.join(sys.argv),
            "families": {
                name: {
                    **(entry := extract_entry(reports[name])),
                    "runner": entry["runner"] or next(iter(find_family(name).decoders), "none"),
                    "title": find_family(name).title,
                    "note": NOTES[name],
                }
                for name in cfg.heads
            },
            "ablation": compare_with_best(ablation, seed_taus) if ablation else {},
            "seed_taus": seed_taus,
            "date": day.isoformat(),
            "environment": environment(),
            "duration_s": round(sum(report["duration_s"] for report in reports.values()), 1),
        },
        TEMPLATE,
        draw_charts,
    )
    print(f"report: {page}")


def train_and_prove(family: str, folder: Path, cfg: Config, flags: tuple[str, ...]) -> None:
    """Train a family into `folder`, in a separate process.

    The peak memory in the report is thus the peak of this run.

    Raises:
        ValueError: if it fails, after it has printed the reason.
    """
    if cfg.resume and (folder / "report.json").is_file():
        print(f"{folder} is already done")
        return
    command = [sys.executable, "-m", "benchmarks.studies.presets", family.replace("_", "-")]
    command += ["--data.source", str(cfg.output / "conversations.jsonl"), "--output", str(folder)]
    command += ["--prove.reference", str(cfg.output / "target"), *flags, *cfg.flags]
    if cfg.overwrite:
        command.append("--overwrite")
    if subprocess.run(command).returncode:
        raise ValueError(
            f"{folder.name} failed for the reason above: fix the problem and continue with --resume"
        )


def compare_with_best(
    entries: Mapping[str, Mapping[str, Any]], seed_taus: Sequence[float]
) -> dict[str, Any]:
    """Return every entry with the difference of its tau from the highest one.

    Each entry states whether the 95% interval of the difference includes 0. The interval covers
    prompts, which are paired, and seeds: both runs of a pair have the spread of `seed_taus`, which
    is assumed to be the same for all entries. With a single seed there is no interval.
    """
    best = max(entries, key=lambda name: entries[name]["tau_engine"])
    spread = float(np.std(seed_taus, ddof=1)) if len(seed_taus) > 1 else math.inf
    # Both runs vary with the seed, so the difference has sqrt(2) times the spread of one run.
    seeds = Estimate(0.0, math.sqrt(2) * spread, max(1.0, len(seed_taus) - 1.0))
    compared = {}
    for name, entry in entries.items():
        accepted_N2, drafts_N2 = (
            np.column_stack([entry[key], entries[best][key]]).astype(float)
            for key in ("accepted_by_prompt", "drafts_by_prompt")
        )
        # The result is the gain minus an estimate of 0: the gain stays the same, and the two errors
        # add up in squares.
        low, high = subtract_independent(estimate_gain(accepted_N2, drafts_N2), seeds).interval()
        is_told = math.isfinite(low)
        compared[name] = {
            **entry,
            "difference": entry["tau_engine"] - entries[best]["tau_engine"],
            "difference_interval": (low, high) if is_told and name != best else None,
            "is_best": name == best,
            "equals_best": name == best or not is_told or low <= 0 <= high,
        }
    return compared


def extract_entry(report: Mapping[str, Any]) -> dict[str, Any]:
    """Extract the numbers of one head's report for the comparison.

    The engine's numbers are None if no engine could serve the head.
    """
    offline, train = report["offline"], report["train"]
    forecast = {"acceptance_per_position": offline["forecast_per_position"], "ties": []}
    engine = report.get("engine", dict.fromkeys(FROM_ENGINE) | forecast)
    return {
        "alpha_greedy_before": offline["alpha_greedy_before"],
        "alpha_greedy_after": offline["alpha_greedy_after"],
        "tau_before": offline["tau_before"],
        "tau_forecast": offline["tau_forecast"],
        "tau_engine": engine["tau"],
        **{name: engine[name] for name in FROM_ENGINE if name != "tau"},
        "acceptance_per_position": engine["acceptance_per_position"],
        "ties": len(engine["ties"]),
        "train_tokens_per_s": train["tokens_per_s"],
        "peak_rss_mib": train["peak_rss_mib"],
        "duration_s": report["duration_s"],
    }


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
