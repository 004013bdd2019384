"""Check the advice against the engine.

Is the advised number of draft tokens within 5% of the best measured one?

$ python -m benchmarks.advice    # with the draft of `make demo-tiny`; if there is none, a short training makes one

A server without a draft and one for every number of draft tokens run at the same time and get their
loads in turn, so a change of the machine's speed affects all of them. Speed-ups are medians of
ratios to the server without a draft. The advice is given the step times with the fewest and the
most draft tokens, and the acceptance by position with the most; it has to predict the rest. A ratio
below the requirement is printed, and is not an error.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import write_results
from redraft.eval.engine.draft_source import DraftSource
from redraft.eval.engine.sampling import GREEDY
from redraft.eval.engine.server import IDLE_S, VllmServer, vllm_server
from redraft.eval.serving.cost import Advice, StepCosts, advise
from redraft.eval.serving.load import Load, LoadResult, run_load
from redraft.heads.progress import Progress
from redraft.recipes.cli.run import run_recipe

REQUIRED = 0.95
"""Smallest passing ratio of the advised speed to the best measured one."""

TRAINING = ("--loop.steps", "60", "--loop.eval-every", "0", "--prove.no-engine",
            "--prove.no-ce-baseline")  # fmt: skip
"""Flags of the short training."""


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str = "tests/assets/tiny-target"
    """Folder or hub name of the model to serve."""
    draft: str = "outputs/demo-tiny/draft"
    """Folder of a standalone draft. If it does not exist, a short training makes one next to
    `output`.
    """
    num_speculative_tokens: tuple[int, ...] = (1, 2, 3, 5)
    """Numbers of draft tokens to measure."""
    concurrency: tuple[int, ...] = (1, 4, 16)
    """Numbers of requests in flight to measure."""
    input_tokens: int = 64
    """Length of each prompt, in tokens."""
    output_tokens: int = 48
    """Length of each answer, in tokens."""
    rounds: int = 3
    """Number of times every load is sent to every server."""
    output: Path = Path("outputs/bench/advice.json")
    """File that receives the results."""


Cells = Mapping[tuple[int, int], Sequence[LoadResult]]
"""Results of the rounds, by concurrency and number of draft tokens."""


def main(cfg: Config) -> None:
    draft = cfg.draft if Path(cfg.draft).is_dir() else train_draft(cfg)
    with start_servers(cfg, draft) as running:
        cells = measure(cfg, running)
    advice = advise(cells_acceptance(cfg, cells), cells_costs(cfg, cells))
    verdicts = [verdict(cfg, cells, advice, batch_size) for batch_size in cfg.concurrency]
    print(f"{draft} for {cfg.target}: {advice.sentence}")
    print(*(line for entry in verdicts for line in lines(entry)), sep="\n")
    result = {
        "draft": draft,
        "advice": advice.to_json(),
        "verdicts": verdicts,
        "loads": [
            {"concurrency": b, "num_speculative_tokens": k, "rounds": [asdict(run) for run in runs]}
            for (b, k), runs in cells.items()
        ],
    }
    write_results(cfg.output, result)


def train_draft(cfg: Config) -> str:
    """Train a draft of two of the target's layers for 60 steps, and return its folder.

    Raises:
        ValueError: if the training fails, after it has printed the reason.
    """
    folder = cfg.output.parent / "advice-draft"
    command = [sys.executable, "-m", "benchmarks.studies.presets", "standalone", *TRAINING]
    if subprocess.run(
        [*command, "--target", cfg.target, "--output", str(folder), "--overwrite"]
    ).returncode:
        raise ValueError("no draft could be trained: give one with --draft")
    return str(folder / "draft")


@contextlib.contextmanager
def start_servers(cfg: Config, draft: str) -> Iterator[dict[int, VllmServer]]:
    """A server for every number of draft tokens, including 0, all running at the same time."""
    with contextlib.ExitStack() as stack:
        running = {}
        for k in (0, *sorted(cfg.num_speculative_tokens)):
            running[k] = stack.enter_context(
                vllm_server(
                    cfg.target,
                    log=cfg.output.parent / "logs" / f"advice-{k}.log",
                    speculative_config={
                        **DraftSource.parse(draft).speculative(),
                        "num_speculative_tokens": k,
                    }
                    if k
                    else None,
                    dtype="float32",  # as the preset that trains the draft
                    max_num_seqs=max(cfg.concurrency),
                    mode="compiled",
                    kv_cache_bytes=128 << 20,
                )
            )
        yield running


def measure(cfg: Config, running: Mapping[int, VllmServer]) -> Cells:
    """Send every load to every server in turn. Every round begins with another server."""
    cells: dict[tuple[int, int], list[LoadResult]] = {
        (b, k): [] for b in cfg.concurrency for k in running
    }
    order = list(running)
    with Progress(total=cfg.rounds * len(cells), desc="loads", unit="load") as bar:
        for number in range(cfg.rounds):
            for batch_size in cfg.concurrency:
                turn = number % len(order)
                for k in (*order[turn:], *order[:turn]):
                    load = Load(
                        data="sonnet",
                        input_tokens=cfg.input_tokens,
                        output_tokens=cfg.output_tokens,
                        sampling=GREEDY,  # of the cost model, which knows no sampling
                        num_prompts=8
                        + 6 * batch_size,  # takes seconds; a machine's hiccups last tenths
                        concurrency=batch_size,
                    )
                    # The server before this one spins for a second after the last step, and would
                    # take time from it.
                    time.sleep(IDLE_S)
                    cells[batch_size, k].append(
                        run_load(running[k], load, cfg.output.parent / "prompts")
                    )
                    bar.update()
    return cells


def cells_acceptance(cfg: Config, cells: Cells) -> list[float]:
    """Acceptance by position with the largest number of draft tokens, over all loads."""
    most = max(cfg.num_speculative_tokens)
    runs = [run for b in cfg.concurrency for run in cells[b, most]]
    steps = sum(run.num_steps for run in runs)
    return [
        sum(run.acceptance_per_position[j] * run.num_steps for run in runs) / steps
        for j in range(most)
    ]


def cells_costs(cfg: Config, cells: Cells) -> StepCosts:
    """Step times without a draft, with the fewest and with the most draft tokens."""
    # A set: with a single number of tokens, the fewest are the most.
    known = {min(cfg.num_speculative_tokens), max(cfg.num_speculative_tokens)}
    steps: dict[int, dict[int, float]] = {}
    for b in cfg.concurrency:
        plain_s = [run.step_s for run in cells[b, 0]]
        steps[b] = {0: statistics.median(plain_s)}
        for k in known:
            # Ratios within a round, then the median: the machine's speed in a round cancels out.
            longer = (run.step_s / alone for run, alone in zip(cells[b, k], plain_s, strict=True))
            steps[b][k] = steps[b][0] * statistics.median(longer)
    return StepCosts.from_steps(steps)


def speedups(cfg: Config, cells: Cells, batch_size: int) -> dict[int, float]:
    """Speed-up by number of draft tokens.

    The median over rounds of the ratio to the speed without a draft.
    """
    alone = [run.tokens_per_s for run in cells[batch_size, 0]]
    return {0: 1.0} | {
        k: statistics.median(
            run.tokens_per_s / plain for run, plain in zip(cells[batch_size, k], alone, strict=True)
        )
        for k in sorted(cfg.num_speculative_tokens)
    }


def verdict(cfg: Config, cells: Cells, advice: Advice, batch_size: int) -> dict[str, Any]:
    """The advised number of draft tokens compared with the best measured one, with and without 0 as
    a choice.
    """
    measured = speedups(cfg, cells, batch_size)
    rows = {row.num_speculative_tokens: row for row in advice.table if row.batch_size == batch_size}
    expected = {k: rows[k].speedup for k in measured}
    advised = max(expected, key=lambda k: expected[k])
    drafting = max(sorted(cfg.num_speculative_tokens), key=lambda k: expected[k])
    return {
        "batch_size": batch_size,
        "measured": measured,
        "expected": expected,
        "advised": advised,
        # 1.0 if the advised number is the best measured one, no draft included.
        "ratio": measured[advised] / max(measured.values()),
        "advised_if_drafting": drafting,
        "ratio_if_drafting": measured[drafting]
        / max(measured[k] for k in cfg.num_speculative_tokens),
    }


def lines(entry: Mapping[str, Any]) -> Iterator[str]:
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
