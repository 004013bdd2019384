"""Check the advice against the engine: is the advised number of draft tokens within 5% of the best that was measured?

$ redraft bench-advice    # with the draft of `make demo`; where there is none, a short training makes one

A server without a draft and one for every number of draft tokens stay up, and take their loads in turn: a machine that
drifts drifts for all. What is compared is a median of ratios to the server without a draft. The advice knows the step
times of the fewest and the most draft tokens and the acceptance by position of the most: what lies between it has to
foresee. A ratio below its requirement is printed, not raised.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval.cost import Advice, StepCosts, advise
from eval.engine import IDLE_S, Server, vllm_server
from eval.load import Load, Served, run_load
from eval.report import write_results
from recipes.cli import run_recipe
from recipes.draft_config import draft_config

REQUIRED = 0.95
"""Of the best measured speed."""


@dataclass(frozen=True, kw_only=True)
class Config:
    target: str = "tests/assets/tiny-target"
    draft: str = "outputs/demo/draft"
    """A standalone draft; where it is not there, a short training makes one beside `output`."""
    num_speculative_tokens: tuple[int, ...] = (1, 2, 3, 5)
    concurrency: tuple[int, ...] = (1, 4, 16)
    input_tokens: int = 64
    output_tokens: int = 48
    rounds: int = 3
    """Times that every server takes every load."""
    output: Path = Path("outputs/bench/advice.json")


Cells = Mapping[tuple[int, int], Sequence[Served]]
"""By concurrency and number of draft tokens, round by round."""


def main(cfg: Config) -> None:
    draft = cfg.draft if Path(cfg.draft).is_dir() else trained_draft(cfg)
    with servers(cfg, draft) as running:
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
            {"concurrency": b, "num_speculative_tokens": k, "rounds": [run.to_json() for run in runs]}
            for (b, k), runs in cells.items()
        ],
    }
    write_results(cfg.output, result)


def trained_draft(cfg: Config) -> str:
    """A draft of two of the target's layers after 60 steps.

    Raises: ValueError where the training fails; it has said why.
    """
    folder = cfg.output.parent / "advice-draft"
    flags = ["--loop.steps", "60", "--loop.eval-every", "0", "--no-prove.engine", "--no-prove.ce-baseline"]
    command = [sys.executable, "-m", "recipes.distill_llama3b", "--preset", "demo", *flags]
    if subprocess.run([*command, "--target", cfg.target, "--output", str(folder), "--overwrite"]).returncode:
        raise ValueError("no draft could be trained: give one with --draft")
    return str(folder / "draft")


@contextlib.contextmanager
def servers(cfg: Config, draft: str) -> Iterator[dict[int, Server]]:
    """A server for every number of draft tokens, 0 among them, all at once."""
    with contextlib.ExitStack() as stack:
        running = {}
        for k in (0, *sorted(cfg.num_speculative_tokens)):
            running[k] = stack.enter_context(
                vllm_server(
                    cfg.target,
                    log=cfg.output.parent / "logs" / f"advice-{k}.log",
                    speculative_config={**draft_config(draft), "num_speculative_tokens": k} if k else None,
                    max_num_seqs=max(cfg.concurrency),
                    kv_cache_bytes=128 << 20,
                )
            )
        yield running


def measure(cfg: Config, running: Mapping[int, Server]) -> Cells:
    """Every load on every server, in turn; every round begins with another server."""
    cells: dict[tuple[int, int], list[Served]] = {(b, k): [] for b in cfg.concurrency for k in running}
    order = list(running)
    with tqdm(total=cfg.rounds * len(cells), desc="loads", unit="load") as bar:
        for number in range(cfg.rounds):
            for batch_size in cfg.concurrency:
                turn = number % len(order)
                for k in (*order[turn:], *order[:turn]):
                    load = Load(
                        data="sonnet",
                        input_tokens=cfg.input_tokens,
                        output_tokens=cfg.output_tokens,
                        num_prompts=8 + 6 * batch_size,  # seconds: a machine's hiccups last tenths
                        concurrency=batch_size,
                    )
                    time.sleep(IDLE_S)
                    cells[batch_size, k].append(run_load(running[k], load, cfg.output.parent / "prompts"))
                    bar.update()
    return cells


def cells_acceptance(cfg: Config, cells: Cells) -> list[float]:
    """Acceptance by position with the most draft tokens, over all loads."""
    most = max(cfg.num_speculative_tokens)
    runs = [run for b in cfg.concurrency for run in cells[b, most]]
    steps = sum(run.num_steps for run in runs)
    return [sum(run.acceptance_per_position[j] * run.num_steps for run in runs) / steps for j in range(most)]


def cells_costs(cfg: Config, cells: Cells) -> StepCosts:
    """Step times without a draft, with the fewest and with the most draft tokens."""
    known = {min(cfg.num_speculative_tokens), max(cfg.num_speculative_tokens)}
    steps: dict[int, dict[int, float]] = {}
    for b in cfg.concurrency:
        plain_s = [run.step_s for run in cells[b, 0]]
        steps[b] = {0: statistics.median(plain_s)}
        for k in known:
            longer = (run.step_s / alone for run, alone in zip(cells[b, k], plain_s, strict=True))
            steps[b][k] = steps[b][0] * statistics.median(longer)
    return StepCosts.from_steps(steps)


def speedups(cfg: Config, cells: Cells, batch_size: int) -> dict[int, float]:
    """Output speed over that without a draft, the median of the rounds' ratios, by number of draft tokens."""
    alone = [run.tokens_per_s for run in cells[batch_size, 0]]
    return {0: 1.0} | {
        k: statistics.median(run.tokens_per_s / plain for run, plain in zip(cells[batch_size, k], alone, strict=True))
        for k in sorted(cfg.num_speculative_tokens)
    }


def verdict(cfg: Config, cells: Cells, advice: Advice, batch_size: int) -> dict[str, Any]:
    """Advised against best measured, speculation off among the choices and with it on."""
    measured = speedups(cfg, cells, batch_size)
    expected = {k: advice.at(batch_size, k).speedup for k in measured}
    advised = max(expected, key=lambda k: expected[k])
    drafting = max(sorted(cfg.num_speculative_tokens), key=lambda k: expected[k])
    return {
        "batch_size": batch_size,
        "measured": measured,
        "expected": expected,
        "advised": advised,
        "ratio": measured[advised] / max(measured.values()),
        "advised_if_drafting": drafting,
        "ratio_if_drafting": measured[drafting] / max(measured[k] for k in cfg.num_speculative_tokens),
    }


def lines(entry: Mapping[str, Any]) -> Iterator[str]:
    measured, expected = entry["measured"], entry["expected"]
    yield f"{entry['batch_size']} requests at once: measured speed-up, and expected"
    yield "    " + "   ".join(f"k={k} {measured[k]:.3f} ({expected[k]:.3f})" for k in measured)
    for what, key in (("of all", "advised"), ("of those that draft", "advised_if_drafting")):
        ratio = entry["ratio" if key == "advised" else "ratio_if_drafting"]
        passed = "PASS" if ratio >= REQUIRED else "BELOW TARGET"
        yield f"    advised {what}: k={entry[key]}, {ratio:.3f} of the best measured  {passed} (at least {REQUIRED:g})"


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
