"""Check the advice of `redraft bench` against the engine.

It asks whether the advised number of draft tokens is within 5% of the best measured one.

$ python -m benchmarks.advice    # with the draft of `make demo-tiny`, or else after a short training run

One server runs without a draft and one for each number of draft tokens. All run at the same time
and get their loads in turn, as in `redraft bench`. Speed-ups are medians of ratios to the server
without a draft. The advice uses only the rounds with the most draft tokens, and must predict the
others. A ratio below the requirement is printed but is not an error.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import write_results
from redraft.distill.data.conversations import load_conversations
from redraft.distill.data.samples import held_out_prompts
from redraft.eval.forecast.draft_source import DraftSource
from redraft.eval.serving.prediction import Candidate, Choice, predict
from redraft.eval.serving.rounds import PLAIN, Plan, Results, compare, measure_servers
from redraft.files.target_folder import TargetFolder
from redraft.recipes.cli.run import run_recipe

REQUIRED = 0.95
"""Minimum ratio of the advised speed to the best measured one."""

TRAINING = ("--loop.steps", "60", "--loop.eval-every", "0", "--prove.no-engine")
"""Flags of the short training run."""


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str = "tests/assets/tiny-target"
    """Folder or hub name of the model to serve."""
    draft: str = "outputs/demo-tiny/draft"
    """Folder of a standalone draft. If it does not exist, a short training run makes one next to
    `output`.
    """
    num_speculative_tokens: tuple[int, ...] = (1, 2, 3, 5)
    """Numbers of draft tokens to measure."""
    concurrency: tuple[int, ...] = (1, 4, 16)
    """Numbers of concurrent requests to measure."""
    max_tokens: int = 48
    """Length of each answer, in tokens."""
    rounds: int = 3
    """Number of times that every load is sent to every server."""
    output: Path = Path("outputs/bench/advice.json")
    """File for the results."""


def main(cfg: Config) -> None:
    draft = cfg.draft if Path(cfg.draft).is_dir() else train_draft(cfg)
    config = DraftSource.parse(draft).speculative()
    results = measure(cfg, config)
    most = max(cfg.num_speculative_tokens)
    choice = predict(Candidate(str(most), draft, config, most), results, sorted(cfg.concurrency))
    verdicts = [judge(cfg, results, choice, load) for load in cfg.concurrency]
    print(f"{draft} for {cfg.target}: {choice.advice}")
    print(*(line for entry in verdicts for line in lines(entry)), sep="\n")
    write_results(
        cfg.output,
        {
            "draft": draft,
            "advice": choice.advice,
            "verdicts": verdicts,
            "loads": [
                {"concurrency": load, "num_speculative_tokens": int(name)}
                | asdict(compare(results, name, load))
                for name, load in results
                if name != PLAIN
            ],
        },
    )


def train_draft(cfg: Config) -> str:
    """Train a draft from two target layers for 60 steps, and return its folder.

    Raises:
        ValueError: the training run failed; its reason was printed before.
    """
    folder = cfg.output.parent / "advice-draft"
    command = [sys.executable, "-m", "benchmarks.studies.presets", "standalone", *TRAINING]
    if subprocess.run(
        [*command, "--target", cfg.target, "--output", str(folder), "--overwrite"]
    ).returncode:
        raise ValueError("no draft could be trained: give one with --draft")
    return str(folder / "draft")


def measure(cfg: Config, config: dict[str, Any]) -> Results:
    """Measure one server without a draft and one per number of draft tokens, all at once."""
    # Each load takes seconds, so a disturbance of a few tenths of a second matters little.
    plan = Plan(
        rounds=cfg.rounds,
        prompts={load: 8 + 6 * load for load in cfg.concurrency},
        max_tokens=cfg.max_tokens,
    )
    prompts = held_out_prompts(
        load_conversations("stdlib"),
        TargetFolder.open(cfg.target).tokenizer,
        num_prompts=cfg.rounds * max(plan.prompts.values()),
        max_length=128,
    )
    drafts = {str(k): {**config, "num_speculative_tokens": k} for k in cfg.num_speculative_tokens}
    return measure_servers(
        cfg.target,
        {PLAIN: None, **drafts},
        prompts,
        plan,
        cfg.output.parent / "logs",
        vllm_defaults=True,
        dtype="float32",  # as the preset that trains the draft
        mode="compiled",
        kv_cache_bytes=128 << 20,
    )


def judge(cfg: Config, results: Results, choice: Choice, load: int) -> dict[str, Any]:
    """Compare the advised number of draft tokens with the best measured one.

    The comparison is made both with 0 as a possible choice and without.
    """
    counts = sorted(cfg.num_speculative_tokens)
    measured = {0: 1.0} | {k: compare(results, str(k), load).ratio for k in counts}
    rows = {row.num_speculative_tokens: row.speedup for row in choice.by_tokens[load]}
    expected = {k: rows[k] for k in measured}
    advised = max(expected, key=lambda k: expected[k])
    drafting = max(counts, key=lambda k: expected[k])
    return {
        "batch_size": load,
        "measured": measured,
        "expected": expected,
        "advised": advised,
        # 1.0 if the advised number is the best measured one, including 0.
        "ratio": measured[advised] / max(measured.values()),
        "advised_if_drafting": drafting,
        "ratio_if_drafting": measured[drafting] / max(measured[k] for k in counts),
    }


def lines(entry: dict[str, Any]) -> Iterator[str]:
    measured, expected = entry["measured"], entry["expected"]
    yield f"{entry['batch_size']} requests in flight: measured speed-up (and expected)"
    yield "    " + "   ".join(f"k={k} {measured[k]:.3f} ({expected[k]:.3f})" for k in measured)
    for choice, key in (("of all", "advised"), ("with a draft", "advised_if_drafting")):
        ratio = entry["ratio" if key == "advised" else "ratio_if_drafting"]
        passed = "PASS" if ratio >= REQUIRED else "BELOW TARGET"
        verdict_line = f"{ratio:.3f} of the best measured  {passed} (at least {REQUIRED:g})"
        yield f"    advised {choice}: k={entry[key]}, {verdict_line}"


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
