"""Run whole training runs with redraft's command, on a small target with random weights.

The loss must fall, the export must exist, and a resumed run must end with the same loss as an
uninterrupted one.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.gpu.check import Config
from benchmarks.gpu.results import Results
from redraft.files.checkpoint import load_tokenizer

ASSET = Path(__file__).parents[2] / "tests/assets/tiny-target"

SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "compiled": ("eagle3", ("--loop.compile",)),
    "cached": ("medusa", ("--signal.kind", "cache")),
}
"""Family and further flags of the runs that are not named after a family."""


def measure(cfg: Config, results: Results) -> None:
    """Run every training run, then resume the first.

    Raises:
        ValueError: a training run failed.
    """
    on_gpu = cfg.device == "cuda"
    work = cfg.output / "trainings"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    target = make_target(work / "target")
    steps = cfg.steps or (60 if on_gpu else 3)
    names = cfg.trainings if on_gpu else cfg.trainings[:1]
    with ThreadPoolExecutor(3 if on_gpu else 1) as pool:
        jobs = {
            name: pool.submit(train, name, target, work / name, steps, on_gpu=on_gpu)
            for name in names
        }
        for name, job in jobs.items():
            results.measure(name, job.result)
    first = names[0]
    results.measure(f"{first}, resumed", resume, first, target, work / first, steps, on_gpu)
    failed = [
        name
        for name, found in results.found.items()
        if isinstance(found, dict) and "error" in found
    ]
    if failed:
        raise ValueError(f"{', '.join(failed)} failed")


def make_target(folder: Path) -> Path:
    """Save a copy of the tests' tiny target with new random weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ASSET))
    model.to(torch.bfloat16).save_pretrained(folder)
    load_tokenizer(ASSET).save_pretrained(folder)
    return folder


def train(
    name: str, target: Path, folder: Path, steps: int, *flags: str, on_gpu: bool
) -> dict[str, Any]:
    """Run the command. Raises: ValueError with the end of its output if it fails."""
    family, own = SETTINGS.get(name, (name, ()))
    rows = ("4", "1024") if on_gpu else ("1", "256")
    third = str(max(1, steps // 3))
    command = [
        *(
            sys.executable,
            "-m",
            "benchmarks.studies.presets",
            family,
            "--target",
            str(target),
            "--output",
            str(folder),
        ),
        *(
            "--target-dtype",
            "bfloat16" if on_gpu else "float32",
            "--prove.no-engine",
        ),
        *("--prove.max-tokens", "8", "--data.num-prompts", "2"),
        *(
            "--loop.steps",
            str(steps),
            "--loop.batch-size",
            rows[0],
            "--loop.sequence-length",
            rows[1],
        ),
        *(
            "--loop.log-every",
            "1",
            "--loop.eval-every",
            third,
            "--loop.eval-batches",
            "1",
            "--loop.save-every",
            third,
        ),
        *own,
        *flags,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ValueError(f"exit status {done.returncode}: {done.stdout[-1500:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    return {
        "first loss": losses[0],
        "last loss": losses[-1],
        "tokens_per_s": next(
            (line["tokens_per_s"] for line in reversed(lines) if "tokens_per_s" in line), None
        ),
        "exported": (folder / "draft").is_dir(),
        "start": next((line for line in done.stdout.splitlines() if "training in" in line), ""),
    }


def resume(name: str, target: Path, folder: Path, steps: int, on_gpu: bool) -> dict[str, Any]:
    """Resume the run from its second-last checkpoint."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    unbroken = [line["loss"] for line in lines if "loss" in line][-1]
    checkpoints = sorted((folder / "checkpoints").iterdir())
    shutil.rmtree(checkpoints[-1])
    shutil.rmtree(folder / "draft", ignore_errors=True)
    found = train(name, target, folder, steps, on_gpu=on_gpu)
    return found | {
        "unbroken last loss": unbroken,
        "difference": abs(found["last loss"] - unbroken),
    }


MEASURES = {"train": measure}
