"""Compare heads with and without a window at long context, beyond their training length.

$ python -m benchmarks.windows                      # SmolLM2-135M-Instruct, about 100 minutes on a quiet core
$ python -m benchmarks.windows --steps 2000 --num-prompts 32 --output outputs/bench/windows-long    # a day
$ python -m benchmarks.windows --target tests/assets/tiny-target --lengths 64 128 --contexts 64 192 \
      --window 32 --steps 4 --num-prompts 2         # a one-minute trial

EAGLE-3 heads of one target are trained on files of the Python standard library: with and without a
window, on rows of each of `lengths`, and all on the same number of tokens. Their tau is forecast on
different files, which the target continues after each of `contexts` tokens. `tau_full_N` and
`tau_window_N` belong to the heads trained on the longest rows, with N tokens of context; the others
are under `trained_at`. Each tau has its 95% interval over prompts.

The times are estimates from counted tokens: 4 heads x 24 steps x 8,192 tokens are 0.8 million
tokens of training (the long form has 66 million), at about 150 tokens/s of one thread. After a kill, run
the same command again: it keeps finished heads and finished batches of prompts.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.demo.online_config import SMOLLM2
from benchmarks.results import write_results
from redraft.files.checkpoint import load_tokenizer
from redraft.recipes.cli.run import run_recipe
from redraft.recipes.demo.parts import make_target

HELD_OUT = 8  # One file in so many is for prompts only.
QUESTION = "Continue this Python file:\n\n"
GIVEN = 16  # Number of a file's tokens in the question of a training row.
FULL, WINDOW = "full", "window"


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Path = SMOLLM2
    """Folder of the target, or the word `smollm2` for SmolLM2-135M-Instruct."""
    parts: Path = Path("outputs/parts")
    """Folder for the downloaded model, if `target` is the word `smollm2`."""
    lengths: tuple[int, ...] = (1024, 4096)
    """Lengths of the training rows in tokens, in ascending order."""
    contexts: tuple[int, ...] = (512, 2048, 4096, 7936)
    """Numbers of context tokens before the first draft token."""
    window: int = 512
    """Number of positions that the layer of a windowed head sees."""
    steps: int = 24
    """Number of training steps for each head."""
    tokens_per_step: int = 8192
    """Number of tokens per training step. It divides by the row length to give the batch size."""
    num_steps: int = 3
    """Number of draft tokens, in training and in the forecast."""
    num_prompts: int = 10
    """Prompts per context."""
    max_tokens: int = 64
    """Number of tokens per answer."""
    draft_vocab_size: int = 8192
    """Number of target tokens that the heads can propose."""
    output: Path = Path("outputs/bench/windows")
    """Folder for the data, the heads and `windows.json`."""

    def __post_init__(self) -> None:
        if list(self.lengths) != sorted({*self.lengths}):
            raise ValueError(f"--lengths {self.lengths}: give them in ascending order")


def main(cfg: Config) -> None:
    target = make_target(cfg.parts) if cfg.target == SMOLLM2 else cfg.target
    cfg.output.mkdir(parents=True, exist_ok=True)
    # 1. Choose files to train on, and different files to ask about.
    tokenizer = load_tokenizer(target)
    for length in cfg.lengths:
        write_lines(cfg.output / f"train-{length}.jsonl", make_training(length, tokenizer))
    write_lines(cfg.output / "prompts.jsonl", make_prompts(cfg, tokenizer))
    # 2. Train one head with a window and one without, for each length.
    heads: dict[tuple[int, str], Path] = {}
    kinds = [(length, kind) for length in cfg.lengths for kind in (FULL, WINDOW)]
    began = time.monotonic()
    for number, (length, kind) in enumerate(kinds, 1):
        minutes = (time.monotonic() - began) / 60
        print(
            f"head {number} of {len(kinds)}: {kind}, rows of {length}; {minutes:.0f} minutes so far"
        )
        heads[length, kind] = train(cfg, target, length, kind)
    # 3. Forecast their acceptance by context.
    count = cfg.num_prompts * len(cfg.contexts)
    minutes = (time.monotonic() - began) / 60
    print(f"forecasts of {len(kinds)} heads on {count} prompts; {minutes:.0f} minutes so far")
    taus = forecast(cfg, target, heads)
    longest = cfg.lengths[-1]
    write_results(
        cfg.output / "windows.json",
        {
            "window": cfg.window,
            **by_context(taus, longest),
            "trained_at": {str(length): by_context(taus, length) for length in cfg.lengths[:-1]},
        },
    )


def read_files(*, held_out: bool) -> Iterator[str]:
    """Return the library's held-out files or all its other files, in the order of their hashes."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = {hashlib.sha256(path.name.encode()).hexdigest(): path for path in root.glob("*.py")}
    for key in sorted(paths):
        if (int(key[:8], 16) % HELD_OUT == 0) == held_out:
            yield paths[key].read_text(errors="replace")


def make_training(length: int, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Cut the files into parts of one row, so that all lengths train on the same text."""
    size = max(32, length - _around(tokenizer))
    for text in read_files(held_out=False):
        ids = tokenizer(text)["input_ids"]
        for begin in range(0, len(ids), size):
            start, rest = (
                tokenizer.decode(part)
                for part in (ids[begin:][:GIVEN], ids[begin + GIVEN : begin + size])
            )
            yield {
                "messages": [
                    {"role": "user", "content": QUESTION + start},
                    {"role": "assistant", "content": rest or "\n"},
                ]
            }


def _around(tokenizer: Any) -> int:
    """Count the tokens of question and chat template, plus a small margin.

    The margin is needed because the tokenizer splits a few tokens differently at the cuts.
    """
    asked = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 8


def make_prompts(cfg: Config, tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Return questions about the held-out files, each with about `context` tokens."""
    ids = tokenizer("\n\n".join(read_files(held_out=True)))["input_ids"]
    for context in cfg.contexts:
        size = max(16, context - _around(tokenizer))
        for number in range(cfg.num_prompts):
            # Every context begins at the same positions, so that only its length differs.
            begin = number * (len(ids) // cfg.num_prompts)
            part = (ids[begin:] + ids[:begin])[:size]
            content = QUESTION + tokenizer.decode(part)
            yield {"domain": str(context), "messages": [{"role": "user", "content": content}]}


def write_lines(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    # A training run resumes only on the same file, which its modification time identifies.
    if not path.is_file() or path.read_text() != text:
        path.write_text(text)


def train(cfg: Config, target: Path, length: int, kind: str) -> Path:
    """Train a head of this kind. Resume an interrupted run, and keep a finished one."""
    folder = cfg.output / f"{kind}-{length}"
    window = ["--head.window", str(cfg.window)] if kind == WINDOW else []
    run_redraft(
        "train", "eagle3", "--target", str(target), "--output", str(folder),
        "--data.source", str(cfg.output / f"train-{length}.jsonl"), "--data.held-out", "0.02",
        "--data.num-prompts", "4", "--prove.max-tokens", "16", "--loop.eval-every", "0",
        "--loop.steps", str(cfg.steps), "--loop.sequence-length", str(length),
        "--loop.batch-size", str(max(1, cfg.tokens_per_step // length)),
        "--head.num-steps", str(cfg.num_steps), *window,
        "--draft-vocab-size", str(cfg.draft_vocab_size), "--prove.no-engine",
        "--prove.num-speculative-tokens", str(cfg.num_steps),
    )  # fmt: skip
    return folder / "draft"


def forecast(
    cfg: Config, target: Path, heads: dict[tuple[int, str], Path]
) -> dict[tuple[int, str, int], dict[str, Any]]:
    """Return tau with its interval, by training length, kind and context."""
    folder = cfg.output / "eval"
    drafts = [
        part
        for (length, kind), path in heads.items()
        for part in ("--draft", f"{kind}-{length}={path}")
    ]
    run_redraft(
        "eval", "--target", str(target), *drafts, "--no-engine",
        "--prompts", str(cfg.output / "prompts.jsonl"), "--domain-column", "domain",
        "--num-prompts", str(cfg.num_prompts * len(cfg.contexts)),
        "--max-prompt-tokens", str(max(cfg.contexts)), "--max-tokens", str(cfg.max_tokens),
        "--num-speculative-tokens", str(cfg.num_steps), "--temperature", "0",
        # Small batches, because a prompt has up to 7,936 tokens and a finished batch is kept.
        "--batch-size", "2", "--output", str(folder),
    )  # fmt: skip
    found = {}
    for row in json.loads((folder / "report.json").read_text())["results"]:
        if row["domain"] is not None:
            kind, _, length = row["draft"].rpartition("-")
            (entry,) = row["by_num_speculative_tokens"]
            found[int(length), kind, int(row["domain"])] = entry["forecast"]["tau"]
    return found


def by_context(taus: dict[tuple[int, str, int], dict[str, Any]], length: int) -> dict[str, Any]:
    """Return tau with its interval by kind and context, for heads trained on rows of `length`."""
    found: dict[str, Any] = {}
    for (trained, kind, context), tau in sorted(taus.items()):
        if trained == length:
            found[f"tau_{kind}_{context}"] = tau["value"]
            found[f"interval_{kind}_{context}"] = [tau["low"], tau["high"]]
    return found


def run_redraft(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "redraft.recipes.cli", *arguments])
    if done.returncode:  # the command has printed the reason
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
