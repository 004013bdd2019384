"""Measure lookups: V2 against V1, memory and time of live counts, and vLLM's suffix decoding.

$ python -m benchmarks.lookup --short                         # 12 minutes, with SmolLM2-135M-Instruct
$ python -m benchmarks.lookup                                 # two hours
$ python -m benchmarks.lookup --parts counts --answers 4000   # memory and time alone
$ pip install arctic-inference==0.1.1                         # for suffix decoding, which vLLM runs on V1

`v2_equals_v1` is the verdict of the tests that compare the runners token by token, and
`device_equals_host` that of the tests that compare a lookup on the GPU with the one on the host, in
Triton's interpreter. The counts come from synthetic answers made of phrases with a Zipf
distribution. The work of a lookup on a GPU is counted; no GPU has run it. `over_suffix` is the
speed with live counts divided by the speed with suffix decoding. Two servers of `redraft serve`
take turns and answer the same questions, each question once, after both have answered the same
warm-up questions. The server that begins alternates between rounds. tau is tokens per target step,
including steps without a draft.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import tracemalloc
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import torch

from benchmarks.demo.fleet import answer_all, find_rate
from benchmarks.demo.online_config import SMOLLM2
from benchmarks.demo.online_config import Config as SceneConfig
from benchmarks.demo.online_stage import count_kv_bytes, make_scene
from benchmarks.demo.up import serving
from benchmarks.fleet import run_tests
from benchmarks.results import write_results
from redraft.distill.data.day import choose_day
from redraft.distill.data.samples import held_out_prompts
from redraft.engine.counters import parse_counts
from redraft.engine.device_runs import CHANGE, DeviceRuns
from redraft.engine.prompts import Prompt
from redraft.eval.intervals import median_interval
from redraft.files.progress import Progress
from redraft.files.target_folder import TargetFolder
from redraft.heads.families.retrieval import Config as Options
from redraft.heads.families.retrieval import Live, Text
from redraft.heads.families.run_table import BUCKET_BYTES
from redraft.recipes.cli.run import run_recipe

TESTS = Path("tests/engine/test_lookup_on_v2.py")
DEVICE_TESTS = Path("tests/engine/test_lookup_on_device.py")
DRAFTS = {"live": 6, "suffix": 24}
"""Maximum number of draft tokens per step, as recommended for each kind of draft."""
PROBES = 2000
"""Number of timed lookups."""

SECTOR_BYTES = 32
"""Size of a GPU's smallest read in bytes; here, for one row."""

VOCABULARY, PHRASES, PHRASE = 30_000, 5_000, 8
BLOCK = 4096
"""Number of answers drawn at once."""

Part = Literal["tests", "counts", "suffix"]


@dataclass(frozen=True, kw_only=True)
class Config:
    target: Path = SMOLLM2
    """Folder of the target, or the word `smollm2` for SmolLM2-135M-Instruct."""
    parts: tuple[Part, ...] = ("tests", "counts", "suffix")
    """Parts to measure."""
    short: bool = False
    """Compare the runners without an engine, count answers of 8 tokens, and run only 6 rounds after
    32 questions.
    """
    answers: tuple[int, ...] = (4_000, 1_000_000)
    """Numbers of counted answers for which memory and time are measured."""
    answer_tokens: int = 16
    """Length of these answers, in tokens."""
    rounds: int = 12
    """Number of rounds per draft and load. An interval needs at least 6."""
    clients: tuple[int, ...] = (1, 8)
    """Requests in flight."""
    questions: int = 8
    """Number of questions per round and load."""
    learned: int = 64
    """Questions answered before."""
    max_tokens: int = 96
    """Maximum length of an answer, in tokens."""
    output: Path = Path("outputs/bench/lookup.json")
    """File for the results."""

    def __post_init__(self) -> None:
        if self.rounds < 6:
            raise ValueError(
                f"--rounds {self.rounds} is too few for a 95% interval: give at least 6"
            )


def main(cfg: Config) -> None:
    if cfg.short:
        cfg = replace(cfg, answer_tokens=8, rounds=6, learned=32)
    results: dict[str, Any] = {"short": cfg.short}
    if "tests" in cfg.parts:
        chosen = "lookup_on_v2" + (" and not in_the_engine" if cfg.short else "")
        for name, file, words in (
            ("v2_equals_v1", TESTS, chosen),
            ("device_equals_host", DEVICE_TESTS, "lookup_on_the_device"),
        ):
            verdict = run_tests(file, words)
            results |= {name: verdict["v1_equals_v2"], f"{name}_tests": verdict}
    if "counts" in cfg.parts:
        results["counts"] = [
            measure_counts(number, cfg.answer_tokens) for number in sorted(cfg.answers)
        ]
    if "suffix" in cfg.parts:
        results |= compare_with_suffix(cfg)
    write_results(cfg.output, {"lookup": results})


def make_answers(num_answers: int, num_tokens: int) -> Iterator[Text]:
    rng = np.random.default_rng(0)
    phrases = rng.integers(1, VOCABULARY, (PHRASES, PHRASE)).astype(np.int32)
    chances = 1 / np.arange(1, PHRASES + 1)
    is_label = np.ones(num_tokens, bool)
    for begin in range(0, num_answers, BLOCK):
        size = min(BLOCK, num_answers - begin), -(-num_tokens // PHRASE)
        for chosen in rng.choice(PHRASES, size, p=chances / chances.sum()):
            yield Text(ids=phrases[chosen].ravel()[:num_tokens], is_label=is_label)


def measure_counts(num_answers: int, num_tokens: int) -> dict[str, Any]:
    """Measure the counts of these answers: bytes, and CPU time to count a token and to draft."""
    tracemalloc.start()
    draft = Live(Options(), window=2 * num_answers)  # all of them
    texts, count_s = make_answers(num_answers, num_tokens), 0.0
    base, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()  # it slows counting; nothing is allocated for a run
    for text in Progress(texts, total=num_answers, desc=f"count {num_answers}", unit="answer"):
        began_s = time.thread_time()
        for _ in draft.learn(text):
            pass
        count_s += time.thread_time() - began_s
    drafted, draft_s = 0, 0.0
    for text in make_answers(PROBES, num_tokens):
        began_s = time.thread_time()
        drafted += len(draft.propose(text.ids[: num_tokens // 2], DRAFTS["live"]))
        draft_s += time.thread_time() - began_s
    found: dict[str, Any] = {
        "answers": num_answers,
        "runs": draft.runs.num_runs,
        "bytes": base,
        "bytes_per_run_of_the_most": base / Options().max_entries,
        "count_us_per_token": 1e6 * count_s / (num_answers * num_tokens),
        # Each draft ends with a lookup that finds nothing.
        "draft_us_per_step": 1e6 * draft_s / PROBES,  # of one request
        "draft_us_per_lookup": 1e6 * draft_s / (drafted + PROBES),
        "device": count_device(draft, num_tokens),
    }
    print(
        f"{num_answers} answers: {found['runs']} runs in {base / 1e6:.1f} MB; "
        f"{found['count_us_per_token']:.1f} us to count a token, "
        f"{found['draft_us_per_lookup']:.1f} us for a lookup; on a GPU, counted: "
        f"{found['device']['bytes'] / 1e6:.1f} MB"
    )
    return found


def count_device(draft: Live, num_tokens: int) -> dict[str, Any]:
    """Count the memory and work that the same counts would need on a GPU, without running on one.

    A lookup reads one bucket of hashes and at most one row for each length. It reads the text once;
    there, a match of the longest length ends the search.
    """
    runs = DeviceRuns(draft, torch.device("cpu"))
    runs.update(1, [b""])  # the whole table
    for text in make_answers(1, num_tokens):
        deque(draft.learn(text), maxlen=0)
    changed = draft.runs.take_changes()
    assert changed is not None
    lengths = draft.config.max_run
    return {
        "bytes": runs.num_bytes,
        "bytes_per_run_of_the_most": runs.num_bytes / draft.config.max_entries,
        "bytes_up_per_step": 8 * len(runs.update(1, [b""])),
        "bytes_up_per_counted_token": 8 * CHANGE * len(changed) / num_tokens,
        "launches_per_step": 1,
        "launches_per_step_that_counts": 3,
        "waits_per_step": 0,
        "table_bytes_per_lookup": lengths * (BUCKET_BYTES + SECTOR_BYTES),
        "text_bytes_per_lookup_of_1000_tokens": 4 * 1000,
    }


@dataclass(frozen=True)
class Round:
    tokens_per_s: float
    tau: float
    """Number of answer tokens per target step."""


def compare_with_suffix(cfg: Config) -> dict[str, Any]:
    """Return speed and tau of both drafts, and their ratio by number of clients."""
    scene = make_scene(SceneConfig(target=cfg.target))
    opened = TargetFolder.open(scene.target)
    needed = cfg.learned + cfg.rounds * cfg.questions * len(cfg.clients)
    questions = held_out_prompts(
        [*scene.test["code"], *scene.traffic["code"]],
        opened.tokenizer,
        num_prompts=needed,
        max_length=160,
        day=choose_day(),
    )
    if len(questions) < needed:
        raise ValueError(
            f"each question is asked once: {needed} are needed, and there are {len(questions)}: lower "
            "--rounds, --questions or --learned"
        )
    kv_bytes = count_kv_bytes(opened.text_config, 1, scene.dtype)
    with contextlib.ExitStack() as stack:
        urls = {
            draft: stack.enter_context(
                serving(
                    scene.target,
                    ["--draft", draft, "--num-speculative-tokens", str(most)],
                    dtype=scene.dtype,
                    kv_bytes=kv_bytes,
                    log=cfg.output.absolute().parent / "lookup" / f"{draft}.log",
                    # vLLM runs suffix decoding only on V1.
                    env={"VLLM_USE_V2_MODEL_RUNNER": "0"},
                )
            )
            for draft, most in DRAFTS.items()
        }
        rounds = asyncio.run(ask_in_turns(cfg, urls, questions))
    ratios = {load: judge(of_load) for load, of_load in rounds.items()}
    for load, verdict in ratios.items():
        print(f"{load} clients: {verdict['line']}")
    first = ratios[str(cfg.clients[0])]
    return {
        "over_suffix": first["over_suffix"],
        "over_suffix_interval": first["over_suffix_interval"],
        "by_clients": ratios,
        "rounds": {
            load: {draft: [vars(each) for each in some] for draft, some in of_load.items()}
            for load, of_load in rounds.items()
        },
    }


Rounds = dict[str, dict[str, list[Round]]]
"""Rounds by number of clients and draft."""


async def ask_in_turns(cfg: Config, urls: dict[str, str], questions: Sequence[Prompt]) -> Rounds:
    waiting = iter(questions)
    learned = list(itertools.islice(waiting, cfg.learned))
    for url in urls.values():
        await ask(url, learned, max(cfg.clients), cfg.max_tokens)
    rounds: Rounds = {str(load): {draft: [] for draft in urls} for load in cfg.clients}
    for number in Progress(range(cfg.rounds), desc="rounds", unit="round"):
        for load in cfg.clients:
            block = list(itertools.islice(waiting, cfg.questions))
            order = list(urls) if number % 2 == 0 else list(urls)[::-1]
            for draft in order:
                found = await ask(urls[draft], block, load, cfg.max_tokens)
                rounds[str(load)][draft].append(found)
    return rounds


async def ask(url: str, prompts: Sequence[Prompt], clients: int, max_tokens: int) -> Round:
    async with httpx.AsyncClient(timeout=60) as http:
        before = parse_counts((await http.get(f"{url}/metrics")).text)
        # Captured, because a request that opts out is not counted.
        answers = await answer_all([url], prompts, clients, max_tokens, captured=1.0)
        await asyncio.sleep(1)  # the last step reaches /metrics after the client
        after = parse_counts((await http.get(f"{url}/metrics")).text)
    total = sum(len(answer.token_ids) for answer in answers)
    accepted = after.num_accepted - before.num_accepted
    return Round(find_rate(answers), total / (total - accepted))


def judge(rounds: dict[str, list[Round]]) -> dict[str, Any]:
    """Return the median ratio of live counts to suffix decoding with its interval, and both taus."""
    pairs = list(zip(rounds["live"], rounds["suffix"], strict=True))
    speed, interval = median_interval([one.tokens_per_s / two.tokens_per_s for one, two in pairs])
    tau = {draft: float(np.mean([each.tau for each in some])) for draft, some in rounds.items()}
    low, high = interval
    line = (
        f"live counts {speed:.3f}x [{low:.3f}, {high:.3f}] of suffix decoding; "
        f"tau {tau['live']:.2f}, {tau['suffix']:.2f}"
    )
    return {"over_suffix": speed, "over_suffix_interval": interval, "tau": tau, "line": line}


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
