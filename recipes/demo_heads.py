"""Train every family of heads for the small target, serve each in a real vLLM, and set them side by side.

$ make demo-heads                       # about 25 minutes on two CPU cores
$ redraft demo-heads --resume           # after an interruption: what is proven already is not done again

Each head is a run of its own recipe with --preset demo and has a report of its own. They share the target's answers
to the held-out prompts and the engine's measurement without a draft, which depend on the target alone.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distill.data import load_conversations
from distill.losses import Divergence
from eval.report import environment, write_page
from heads.artifact import write_whole
from recipes.cli import run_recipe


@dataclass(frozen=True)
class Head:
    """A family as the demo trains it."""

    recipe: str
    title: str
    note: str = ""


HeadName = Literal["eagle3", "eagle1", "mtp", "medusa", "mlp_speculator"]
HEADS: dict[HeadName, Head] = {
    "eagle3": Head("eagle3_llama8b", "EAGLE-3"),
    "eagle1": Head("eagle1_llama8b", "EAGLE-1"),
    "mtp": Head("mtp_qwen3_next", "MTP", "one MTP layer in the target's weights in the MiMo layout"),
    "medusa": Head("medusa_llama8b", "Medusa"),
    "mlp_speculator": Head(
        "mlp_speculator_llama8b",
        "MLPSpeculator",
        "vLLM has no proposer for it, so the reference decoder stands in for the engine",
    ),
}
DIVERGENCES = ("forward_kl", "total_variation", "lk_hybrid", "cross_entropy")
"""What EAGLE-3 is trained by; the first is its preset's."""


@dataclass(frozen=True, kw_only=True)
class Config:
    output: Path = Path("outputs/demo-heads")
    """Folder that receives report.json, report.html and a folder for every head."""
    heads: tuple[HeadName, ...] = tuple(HEADS)
    """Families to train."""
    divergences: tuple[str, ...] = DIVERGENCES
    """Of the ablation of EAGLE-3."""
    resume: bool = False
    """Go on with the runs in `output`."""
    overwrite: bool = False
    """Replace the runs in `output`."""
    flags: tuple[str, ...] = ()
    """Passed on to every recipe, as one word each: --flags=--loop.steps --flags=2."""


def main(cfg: Config) -> None:
    for name in cfg.divergences:
        Divergence(name=name)  # a name that is none is told now, not after the other runs
    # 1. a quarter of the standard library's conversations: more than the steps of a demo read
    conversations = cfg.output / "conversations.jsonl"
    if not conversations.is_file():
        write_whole(conversations, "".join(json.dumps(row) + "\n" for row in load_conversations("stdlib")[::4]))

    # 2. every head, and EAGLE-3 by every other divergence
    others = [name for name in cfg.divergences if name != DIVERGENCES[0]] if "eagle3" in cfg.heads else []
    runs: list[tuple[str, HeadName, tuple[str, ...]]] = [(name, name, ()) for name in cfg.heads]
    runs += [(f"eagle3-{name}", "eagle3", ("--divergence.name", name)) for name in others]
    if cfg.overwrite:
        shutil.rmtree(cfg.output / "target", ignore_errors=True)
    for number, (folder, name, flags) in enumerate(runs, 1):
        print(f"\n{number} of {len(runs)}: {folder}", flush=True)
        train_and_prove(HEADS[name].recipe, cfg.output / folder, cfg, flags)

    # 3. side by side
    reports = {folder: json.loads((cfg.output / folder / "report.json").read_text()) for folder, _, _ in runs}
    by_divergence = {DIVERGENCES[0]: "eagle3"} | {name: f"eagle3-{name}" for name in others}
    page = write_page(
        cfg.output,
        {
            "target": reports[cfg.heads[0]]["target"],
            "command": shlex.join(sys.argv),
            "families": {
                name: {**entry(reports[name]), "title": HEADS[name].title, "note": HEADS[name].note}
                for name in cfg.heads
            },
            "ablation": {name: entry(reports[run]) for name, run in by_divergence.items()} if others else {},
            "environment": environment(),
            "duration_s": round(sum(report["duration_s"] for report in reports.values()), 1),
        },
        "heads.html.j2",
        "charts.heads_charts",
    )
    print(f"report: {page}")


def train_and_prove(recipe: str, folder: Path, cfg: Config, flags: tuple[str, ...]) -> None:
    """A report in `folder`, by a process of its own so that its peak memory is its own.

    Raises: ValueError where it fails; it has said why.
    """
    if cfg.resume and (folder / "report.json").is_file():
        print(f"{folder} is proven already")
        return
    command = [sys.executable, str(Path(__file__).with_name(f"{recipe}.py")), "--preset", "demo"]
    command += ["--data.source", str(cfg.output / "conversations.jsonl"), "--output", str(folder)]
    command += ["--prove.reference", str(cfg.output / "target"), *flags, *cfg.flags]
    command += ["--resume"] * cfg.resume + ["--overwrite"] * cfg.overwrite
    if subprocess.run(command).returncode:
        raise ValueError(f"{folder.name} failed, as said above; mend it and go on with --resume")


def entry(report: Mapping[str, Any]) -> dict[str, Any]:
    """What one head's report comes down to."""
    offline, engine, train = report["offline"], report["engine"], report["train"]
    return {
        "alpha_greedy_before": offline["alpha_greedy_before"],
        "alpha_greedy_after": offline["alpha_greedy_after"],
        "tau_before": offline["tau_before"],
        "tau_forecast": offline["tau_forecast"],
        "tau_engine": engine["tau"],
        "forecast_error": engine["forecast_error"],
        "acceptance_per_position": engine["acceptance_per_position"],
        "lossless": engine["lossless"],
        "ties": len(engine["ties"]),
        "decoder": engine["decoder"],
        "num_prompts": engine["num_prompts"],
        "train_tokens_per_s": train["tokens_per_s"],
        "peak_rss_mib": train["peak_rss_mib"],
        "duration_s": report["duration_s"],
    }


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
