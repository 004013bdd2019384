"""Compare `--pace auto` with every fixed number of draft tokens, in one running server.

$ python -m benchmarks.pace --draft outputs/demo-up/up/registry/v000003    # a version that `make demo-up` trained
$ python -m benchmarks.pace --draft outputs/demo-up/up/registry/v000001 --fixed --rounds 24    # a useless draft

The modes take turns in one server of `redraft serve --pace auto`: no drafts, `auto`, and each fixed
number. In a round, all modes answer the same questions of HumanEval, with 1, 4 and 8 clients and
with a changing number of clients. Every round begins with a different mode. Speeds are medians over
rounds of the ratio to no drafts. Before the first round, `auto` runs for 2,000 steps. It must reach
0.95 of the best fixed number; without fixed numbers, the lower bound of its speed must reach 0.97.
A ratio below its requirement is printed but is not an error.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.demo.fleet import answer_all, find_rate
from benchmarks.demo.online_config import SMOLLM2
from benchmarks.demo.online_config import Config as SceneConfig
from benchmarks.demo.online_stage import count_kv_bytes, make_scene
from benchmarks.demo.up import serving
from benchmarks.results import write_results
from redraft.distill.data.day import choose_day
from redraft.distill.data.samples import held_out_prompts
from redraft.engine.prompts import Prompt
from redraft.eval.intervals import median_interval
from redraft.files.progress import Progress
from redraft.files.target_folder import TargetFolder
from redraft.online.tokens import read_token, write_token
from redraft.recipes.cli.run import run_recipe

LOADS = {"1": (1,), "4": (4,), "8": (8,), "moving": (1, 8, 2, 6)}
"""Numbers of clients for successive blocks of questions, by load."""

WARM_UP_STEPS = 2000
OF_OFF, OF_BEST = 0.97, 0.95


@dataclass(frozen=True, kw_only=True)
class Config:
    draft: Path
    """Folder of the draft."""
    target: Path = SMOLLM2
    """Folder of the target, or the word `smollm2` for SmolLM2-135M-Instruct."""
    num_speculative_tokens: int = 3
    """Maximum number of draft tokens per step."""
    fixed: tuple[int, ...] = (1, 2, 3)
    """Fixed numbers of draft tokens to compare with. Empty for a useless draft."""
    loads: tuple[str, ...] = tuple(LOADS)
    """Clients: `1`, `4`, `8` or `moving`."""
    rounds: int = 8
    """Number of rounds per mode and load. An interval needs at least 6."""
    max_tokens: int = 48
    """Maximum length of an answer, in tokens."""
    output: Path = Path("outputs/bench/pace.json")
    """File for the results."""

    def __post_init__(self) -> None:
        if self.rounds < 6:
            raise ValueError(
                f"--rounds {self.rounds} is too few for a 95% interval: give at least 6"
            )
        if unknown := set(self.loads) - set(LOADS):
            raise ValueError(f"--loads {' '.join(sorted(unknown))}: choose from {', '.join(LOADS)}")


Rates = dict[str, dict[str, list[float]]]
"""Tokens/s of the rounds, by load and mode."""


def main(cfg: Config) -> None:
    scene = make_scene(SceneConfig(target=cfg.target))
    opened = TargetFolder.open(scene.target)
    questions = held_out_prompts(
        scene.test["code"], opened.tokenizer, num_prompts=400, max_length=160, day=choose_day()
    )
    folder = cfg.output.absolute().parent / "pace"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "token").exists():
        write_token(folder / "token")
    options = ["--draft", str(cfg.draft), "--pace", "auto"]
    options += ["--num-speculative-tokens", str(cfg.num_speculative_tokens)]
    with serving(
        scene.target,
        [*options, "--token-file", str(folder / "token")],
        ["--no-enable-prefix-caching"],  # it would favor the later pace
        dtype=scene.dtype,
        kv_bytes=count_kv_bytes(opened.text_config, 1, scene.dtype),
        log=folder / "server.log",
    ) as url:
        server = Server(url, read_token(folder / "token"))
        rates, line = asyncio.run(measure(cfg, server, questions))
    verdicts = {load: judge(found) for load, found in rates.items()}
    for load, verdict in verdicts.items():
        print(f"{load} clients: {verdict['line']}")
    write_results(
        cfg.output,
        {"draft": str(cfg.draft), "verdicts": verdicts, "rates": rates, "pace": line},
    )


@dataclass(frozen=True)
class Server:
    url: str
    token: str

    async def take(self, pace: str) -> dict[str, Any]:
        """Change the pace, and return the previous status. Raises: httpx.HTTPError."""
        headers = {"Authorization": f"Bearer {self.token}"}
        async with httpx.AsyncClient(timeout=60, headers=headers) as http:
            status = await http.get(f"{self.url}/redraft/status")
            (await http.post(f"{self.url}/redraft/pace", json={"pace": pace})).raise_for_status()
            found: dict[str, Any] = status.raise_for_status().json()["pace"]
            return found


async def measure(cfg: Config, server: Server, questions: Sequence[Prompt]) -> tuple[Rates, str]:
    """Return the rates, and the server's line about its pace at the end."""
    waiting = itertools.cycle(questions)
    modes = ["0", "auto", *map(str, cfg.fixed)]
    rates: Rates = {load: {mode: [] for mode in modes} for load in cfg.loads}

    def ask(clients: Sequence[int]) -> list[list[Prompt]]:
        """Return a block of questions for each number of clients.

        Blocks are long enough to keep all of 8 clients busy.
        """
        return [list(itertools.islice(waiting, 8 if count < 4 else 16)) for count in clients]

    async def answer(clients: Sequence[int], asked: Sequence[Sequence[Prompt]]) -> float:
        """Return the geometric mean of the tokens/s of the blocks.

        A slow block with one client counts as much as a fast one.
        """
        speeds = [
            find_rate(await answer_all([server.url], block, count, cfg.max_tokens, captured=0.0))
            for count, block in zip(clients, asked, strict=True)
        ]
        return statistics.geometric_mean(speeds)

    with Progress(total=WARM_UP_STEPS, desc="warm-up", unit="step") as bar:
        while bar.n < WARM_UP_STEPS:
            await answer(LOADS["moving"], ask(LOADS["moving"]))
            status = await server.take("auto")
            bar.update(sum(cell["steps"] for cell in status["cells"]) - bar.n)
    with Progress(total=cfg.rounds * len(rates) * len(modes), desc="modes", unit="block") as bar:
        for number in range(cfg.rounds):
            for load, found in rates.items():
                asked, turn = ask(LOADS[load]), number % len(modes)
                for mode in (*modes[turn:], *modes[:turn]):
                    await server.take(mode)
                    found[mode].append(await answer(LOADS[load], asked))
                    bar.update()
    await server.take("auto")
    return rates, (await server.take("auto"))["line"]


def judge(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Compare every mode's speed with no drafts, and the speed of `auto` with the best number.

    The best fixed number may be 0.
    """

    def against(mode: str, other: str) -> tuple[float, tuple[float, float]]:
        return median_interval(
            [one / two for one, two in zip(rates[mode], rates[other], strict=True)]
        )

    speeds = {mode: against(mode, "0") for mode in rates if mode != "0"}
    fixed = {mode: speed for mode, (speed, _) in speeds.items() if mode != "auto"}
    best = max(["0", *fixed], key=lambda mode: fixed.get(mode, 1.0))
    of_best, interval = against("auto", best)
    low = speeds["auto"][1][0]
    words = ", ".join(
        f"{mode} {speed:.3f}x [{low:.3f}, {high:.3f}]"
        for mode, (speed, (low, high)) in speeds.items()
    )
    passed = "PASS" if (of_best >= OF_BEST if fixed else low >= OF_OFF) else "BELOW TARGET"
    line = f"against no drafts {words}; auto is {of_best:.3f} of the best ({best})  {passed}"
    return {
        "speeds": speeds,
        "best": best,
        "of_best": of_best,
        "of_best_interval": interval,
        "line": line,
    }


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
