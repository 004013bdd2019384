"""Measure the cost of capture and swaps for a real vLLM server.

    $ python -m benchmarks.fleet --target tests/assets/tiny-target --head tests/assets/tiny-eagle3

    records   the tests that compare records of vLLM's V1 and V2 model runners, if they are here
    capture   tokens/s of one server with no, every and every tenth request recorded, in interleaved rounds
    bytes     bytes that a step of 256 requests leaves in the queue, at a vocabulary of 128k, by the real hook; and its
              work on GPUs by family, requests and vocabulary, counted
    swap      two versions of a draft in turn: the same function, but every key and value has the other sign

The last is the worst case of a swap. With consistent keys both versions propose the same tokens, so
acceptance before is what it should be afterwards. What the old draft left in the cache is as wrong
as it can be.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

import httpx
import torch
from safetensors.torch import load_file, save_file

from benchmarks.demo.fleet import Server, measure_rates, start_server
from benchmarks.demo.online_report import describe_cost, estimate_overhead
from benchmarks.results import write_results
from redraft.distill.data.corpus import stdlib_conversations
from redraft.engine.counters import parse_counts, parse_prefix_cache
from redraft.engine.machine import environment
from redraft.engine.process import free_port
from redraft.engine.prompts import Prompt
from redraft.engine.server import IDLE_S
from redraft.files.artifact import MANIFEST, publish
from redraft.files.checkpoint import load_tokenizer
from redraft.files.progress import Progress
from redraft.heads.catalog import detect_family
from redraft.online.engine.config import SwapCache
from redraft.online.engine.feed import Feed
from redraft.online.tokens import write_token
from redraft.recipes.cli.run import run_recipe
from redraft.recipes.plan.hook_work import count_work, format_work, make_step, open_capture

RUNNER_TESTS = Path("tests/online/engine/test_runners.py")

NUM_TOKENS = 3
BLOCK_SIZE = 32
"""Number of tokens per block of the KV cache."""

REQUIRED_KEPT = 0.9
REQUIRED_PAUSE_MS = 50.0
REQUIRED_ALPHA = 0.95

Part = Literal["records", "capture", "bytes", "swap"]


@dataclass(frozen=True, kw_only=True)
class Config:
    output: Path = Path("outputs/bench-fleet/report.json")
    """File for the results."""
    target: Path = Path("tests/assets/tiny-target")
    """Folder of the target. The standalone draft is a noisy copy of it."""
    head: Path = Path("tests/assets/tiny-eagle3")
    """Folder of a head for this target."""
    parts: tuple[Part, ...] = ("records", "capture", "bytes", "swap")
    """The parts to measure."""
    rounds: int = 12
    """Number of interleaved rounds for the cost of capture."""
    swaps: int = 4
    """Number of swaps for each draft and each --swap.cache setting."""
    clients: int = 4
    """Requests at once."""


def count_queued(*, num_requests: int, num_drafts: int, vocab_size: int) -> dict[str, Any]:
    """Return the bytes that a step's tensors hold in the queue if all requests are recorded.

    Logits are in bfloat16. `bytes_per_step` counts the tensors that the hook keeps on a GPU, and
    `bytes_by_reference` the tensors that it keeps on a CPU.
    """
    logits_RV = torch.zeros(num_requests * (num_drafts + 1), vocab_size, dtype=torch.bfloat16)
    with open_capture() as capture:
        sizes = [
            make_step(
                Feed(capture, max_model_len=4096, reduces=reduces),
                num_requests,
                num_drafts,
                logits_RV,
            )
            for reduces in (True, False)
        ]
    return {"bytes_per_step": sizes[0].num_bytes, "bytes_by_reference": sizes[1].num_bytes}


def main(cfg: Config) -> None:
    """Measure and print all parts.

    Raises:
        FileNotFoundError: the target or the head is missing.
    """
    for model in (cfg.target, cfg.head):
        if not (model / "config.json").is_file():
            raise FileNotFoundError(
                f"{model} does not exist: set --target, and set --head to a head for it"
            )
    report: dict[str, Any] = {"config": asdict(cfg), "environment": environment()}
    try:
        measure_parts(cfg, report)
        print("\n".join(lines(report)))
    finally:
        # If a part fails, the results of the others must not be lost, because each part takes
        # minutes.
        write_results(cfg.output, report)


def measure_parts(cfg: Config, report: dict[str, Any]) -> None:
    """Add the results of each part to the report."""
    if "records" in cfg.parts:
        report["records"] = compare_records()
    if "bytes" in cfg.parts:
        report["capture"] = count_queued(
            num_requests=256, num_drafts=NUM_TOKENS, vocab_size=128_256
        )
        report["capture"]["work"] = list(count_work(num_drafts=NUM_TOKENS))
    with tempfile.TemporaryDirectory() as folder, make_registry(cfg, Path(folder)) as drafts:
        if "capture" in cfg.parts:
            report.setdefault("capture", {}).update(
                asyncio.run(measure_capture(cfg, drafts["standalone"]))
            )
        if "swap" in cfg.parts:
            by_draft = {
                name: measure_caches(cfg, name, registry) for name, registry in drafts.items()
            }
            report["swap"] = by_draft["standalone"]["draft"] | {"by_draft": by_draft}


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the results as lines of text."""
    if records := report.get("records"):
        yield f"records of V1 and V2: {describe_records(records)}"
    capture = report.get("capture", {})
    if "bytes_per_step" in capture:
        yield (
            f"queue, 256 requests, vocabulary 128k: {capture['bytes_per_step'] / 1e6:.2f} MB a "
            f"step on a GPU, {capture['bytes_by_reference'] / 1e6:.0f} MB by reference"
        )
    if "work" in capture:
        yield from format_work(capture["work"])
    for name in ("all", "tenth"):
        if f"ratio_{name}" in capture:
            cost = describe_cost(1 - capture[f"ratio_{name}"], capture[f"interval_{name}"])
            yield (
                f"capture of {name} requests: {capture[f'ratio_{name}']:.3f} of tokens/s, cost "
                f"{cost}"
            )


def describe_records(records: Mapping[str, Any]) -> str:
    if records["v1_equals_v2"] is None:
        return f"not compared: {records['reason']}"
    return f"{'equal' if records['v1_equals_v2'] else 'NOT EQUAL'} in {records['tests']} tests"


def describe_swap(result: Mapping[str, Any]) -> str:
    """Describe a swap and its requirements in one line."""
    passed = (
        result["blocks_kept"] >= REQUIRED_KEPT
        and result["pause_over_step_ms"] <= REQUIRED_PAUSE_MS
        and result["alpha_after"] >= REQUIRED_ALPHA * result["alpha_before"]
    )
    by_age = ", ".join(f"{name} {value:.3f}" for name, value in result["alpha_running"].items())
    return (
        f"blocks kept {result['blocks_kept']:.1%}, pause {result['pause_over_step_ms']:.0f} ms "
        "over a step of"
        f" {result['step_ms']:.0f} ms, cached prompts accepted {result['alpha_before']:.3f} before,"
        f" {result['alpha_after']:.3f} after, running requests {by_age}: "
        f"{'PASS' if passed else 'BELOW TARGET'}"
    )


# -------------------------------------------------------------------------------------------------------
# records


def compare_records() -> dict[str, Any]:
    """Run the tests that compare records of both model runners bit for bit."""
    return run_tests(RUNNER_TESTS, "same_records or count_the_same")


def run_tests(file: Path, chosen: str) -> dict[str, Any]:
    """Run the selected tests of a file that compares V1 and V2, and return their verdict.

    The verdict is None if one of the tests did not run.
    """
    if not file.is_file():
        return {"v1_equals_v2": None, "reason": f"no {file} in this folder", "tests": 0}
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
        subprocess.run([*command, "-k", chosen, "--junitxml", report.name], check=False)
        return judge_tests(ET.parse(report.name).getroot())


def judge_tests(suite: ET.Element) -> dict[str, Any]:
    """Read the verdict of a pytest run from its JUnit file.

    The runners are equal if all tests passed and none was skipped.
    """
    cases = list(suite.iter("testcase"))
    failed = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = [
        skip.get("message", "") for case in cases if (skip := case.find("skipped")) is not None
    ]
    reason = "" if cases else "no test was found"
    if skipped:
        reason = (
            f"{len(skipped)} of {len(cases)} tests were skipped: {'; '.join(sorted(set(skipped)))}"
        )
    is_known = bool(failed) or not reason
    return {
        "v1_equals_v2": not failed if is_known else None,
        "reason": reason,
        "tests": len(cases) - len(skipped),
    }


# -------------------------------------------------------------------------------------------------------
# drafts


@contextlib.contextmanager
def make_registry(cfg: Config, folder: Path) -> Iterator[dict[str, Path]]:
    """Make a registry with two versions of the draft; servers start with v000001."""
    write_token(folder / "token")
    (folder / "spool").mkdir(mode=0o700)
    weights = load_file(cfg.target / "model.safetensors")
    sources = {
        "standalone": (cfg.target, add_noise(weights)),
        detect_family(cfg.head).name: (cfg.head, load_file(cfg.head / "model.safetensors")),
    }
    registries = {}
    for name, (source, tensors) in sources.items():
        registries[name] = folder / name
        for version, values in (("v000001", tensors), ("v000002", turn_keys(tensors))):
            publish(folder / name / version, _writer(source, values), {})
        # A relative link, like those that the registry makes.
        (folder / name / "current").symlink_to("v000001")
    yield registries


def _writer(source: Path, tensors: Mapping[str, torch.Tensor]) -> Any:
    def write(folder: Path) -> None:
        for path in source.iterdir():
            # A published head has its own manifest, which the new manifest must not list.
            if path.suffix == ".json" and path.name != MANIFEST:
                shutil.copy(path, folder)
        save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})

    return write


def add_noise(tensors: Mapping[str, torch.Tensor], scale: float = 0.1) -> dict[str, torch.Tensor]:
    """Copy a model, adding noise of `scale` standard deviations to every matrix.

    Such a draft is accepted only sometimes.
    """
    generator = torch.Generator().manual_seed(0)
    return {
        name: (t + scale * t.float().std() * torch.randn(t.shape, generator=generator)).to(t.dtype)
        if t.ndim == 2
        else t
        for name, t in tensors.items()
    }


def turn_keys(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Flip the sign of every query, key and value without changing the function.

    For this, the sign of the matrix that reads the values is flipped too.
    """
    # (-q) (-k) = q k, and -o cancels -v. RoPE only rotates, so it preserves signs.
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return {
        name: -tensor if name.endswith(tuple(f"{n}.weight" for n in names)) else tensor.clone()
        for name, tensor in tensors.items()
    }


@contextlib.contextmanager
def serve(cfg: Config, registry: Path, *options: str) -> Iterator[Server]:
    """Start a server with a prefix cache and this registry's draft.

    `options` are passed to `redraft serve`.
    """
    with start_server(
        cfg.target,
        registry,
        spool=registry.parent / "spool",
        token_file=registry.parent / "token",
        num_speculative_tokens=NUM_TOKENS,
        max_model_len=1024,
        core=0,
        port=free_port(),
        log=cfg.output.parent / "logs" / f"{registry.name}-{len(options)}.log",
        options=options,
        arguments=("--enable-prefix-caching", "--block-size", str(BLOCK_SIZE)),
    ) as server:
        asyncio.run(server.ready())
        yield server


def list_prompts(cfg: Config, count: int, length: int) -> list[Prompt]:
    """Return prompts of `length` tokens from the standard library; all begin differently."""
    tokenizer = load_tokenizer(cfg.target)
    texts = (str(conversation["messages"]) for conversation in stdlib_conversations())
    # The texts are cut here, so the tokenizer's warning about their length would be misleading.
    tokens = (tokenizer(text, verbose=False)["input_ids"] for text in texts)
    long = (ids[:length] for ids in tokens if len(ids) >= length)
    return [Prompt(token_ids=list(ids)) for ids in islice(long, count)]


# -------------------------------------------------------------------------------------------------------
# capture


async def measure_capture(cfg: Config, registry: Path) -> dict[str, Any]:
    """Return tokens/s with capture over tokens/s without: medians over rounds."""
    prompts = list_prompts(cfg, 6 * cfg.clients, 64)
    with contextlib.ExitStack() as stack:
        server = await asyncio.to_thread(stack.enter_context, serve(cfg, registry))
        await asyncio.to_thread(time.sleep, IDLE_S)
        rates = await measure_rates(
            [server.url], prompts, rounds=cfg.rounds, clients=cfg.clients, max_tokens=96
        )
    results: dict[str, Any] = {"tokens_per_s": {str(share): some for share, some in rates.items()}}
    for name, share in (("all", 1.0), ("tenth", 0.1)):
        cost, interval = estimate_overhead(rates[share], rates[0.0])
        results |= {f"ratio_{name}": 1 - cost, f"interval_{name}": interval}
    return results


# -------------------------------------------------------------------------------------------------------
# swap


def measure_caches(cfg: Config, draft: str, registry: Path) -> dict[str, Any]:
    """Return the figures of a swap for each --swap.cache setting."""
    settings: tuple[SwapCache, ...] = (
        ("clear", "keep", "draft") if draft == "standalone" else ("clear", "keep")
    )
    results: dict[str, Any] = {}
    for cache in settings:
        results[cache] = asyncio.run(measure_swaps(cfg, registry, "--swap.cache", cache))
        print(f"swap, {draft}, {cache}: {describe_swap(results[cache])}", flush=True)
    return results


@dataclass(frozen=True)
class Stream:
    """One streamed answer: the times and token counts of its chunks, one per engine step."""

    times_s: list[float]
    token_ids: list[list[int]]


def choose_texts(cfg: Config) -> tuple[list[Prompt], list[Prompt]]:
    """Return prompts to compare, and shorter prompts from other texts for the running requests."""
    # All texts come from one list, because a running request that begins like a compared prompt
    # would refill cache blocks, which would then count as kept.
    texts = list_prompts(cfg, 8 + cfg.clients, 400)
    return texts[:8], [Prompt(token_ids=text.token_ids[:100]) for text in texts[8:]]


async def measure_swaps(cfg: Config, registry: Path, *options: str) -> dict[str, Any]:
    """Swap between the two versions, back and forth, under load.

    The same prompts are sent before and after each swap.
    """
    prompts, running = choose_texts(cfg)
    with contextlib.ExitStack() as stack:
        server = await asyncio.to_thread(stack.enter_context, serve(cfg, registry, *options))
        token = (registry.parent / "token").read_text().strip()
        bench = SwapBench(cfg, server, token, prompts, running)
        await bench.send_all()
        # The second call counts, because the first one fills the prefix cache.
        before = await bench.send_all()
        swaps = []
        for version in Progress(
            list(islice(itertools.cycle(("v000002", "v000001")), cfg.swaps)), desc="swaps"
        ):
            swaps.append(await bench.swap(version))
        await bench.http.aclose()
    return summarize(before, swaps)


@dataclass(frozen=True)
class Sent:
    """Answers to the compared prompts.

    With them come the share of draft tokens that were accepted, and the share of prompt tokens
    found in the cache.
    """

    answers: list[list[int]]
    alpha: float
    hits: float


@dataclass(frozen=True)
class Swapped:
    """One swap under load."""

    report: dict[str, Any]
    began_s: float
    ended_s: float
    streams: list[Stream]
    after: Sent
    """Results for the same prompts as before the swap, sent directly after it."""
    texts_equal: bool
    """Whether every answer that ran during the swap equals the answer without a swap."""


class SwapBench:
    """One server, and the requests sent to it."""

    def __init__(
        self,
        cfg: Config,
        server: Server,
        token: str,
        prompts: Sequence[Prompt],
        running: Sequence[Prompt],
    ) -> None:
        self.server, self.prompts, self.running = server, prompts, running
        self.http = httpx.AsyncClient(
            base_url=server.url, timeout=120, headers={"Authorization": f"Bearer {token}"}
        )
        self.wanted: list[list[int]] = []

    async def send_all(self) -> Sent:
        """Send all prompts one after the other, so that no other request is counted."""
        before = (await self.http.get("/metrics")).text
        answers = []
        for prompt in self.prompts:
            body = {
                "model": "m",
                "prompt": prompt.token_ids,
                "max_tokens": 32,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = (
                await self.http.post("/v1/completions", json=body | {"return_token_ids": True})
            ).json()
            answers.append(answer["choices"][0]["token_ids"])
        after = (await self.http.get("/metrics")).text
        counts = parse_counts(after).since(parse_counts(before))
        assert counts is not None
        earlier, later = parse_prefix_cache(before), parse_prefix_cache(after)
        hits = (later.hits - earlier.hits) / (later.queries - earlier.queries)
        return Sent(answers, counts.draft_acceptance_rate, hits)

    async def swap(self, version: str) -> Swapped:
        """Swap during running requests, and send the prompts again when these are complete."""
        if not self.wanted:
            # The reference answers need only one run without a swap: both versions propose the same
            # tokens, and the target decides.
            self.wanted = [
                list(itertools.chain(*(await self.stream(p)).token_ids)) for p in self.running
            ]
        tasks = [asyncio.create_task(self.stream(prompt)) for prompt in self.running]
        # Give all requests time to finish the prefill, because the swap must hit running requests.
        await asyncio.sleep(1.0)
        began_s = time.monotonic()
        answer = await self.http.post("/redraft/swap", json={"version": version})
        ended_s = time.monotonic()
        if not answer.is_success:
            raise ValueError(f"the swap failed: {answer.text}")
        streams = await asyncio.gather(*tasks)
        texts = [list(itertools.chain(*stream.token_ids)) for stream in streams]
        return Swapped(
            answer.json(), began_s, ended_s, streams, await self.send_all(), texts == self.wanted
        )

    async def stream(self, prompt: Prompt) -> Stream:
        body = {
            "model": "m",
            "prompt": prompt.token_ids,
            "max_tokens": 300,
            "temperature": 0,
            "ignore_eos": True,
        }
        times_s, tokens = [], []
        body |= {"stream": True, "return_token_ids": True}
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    times_s.append(time.monotonic())
                    tokens.append(
                        json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"] or []
                    )
        return Stream(times_s, tokens)


AGES = {"before": None, "steps 1 to 8": (0, 8), "9 to 32": (8, 32), "later": (32, 10**9)}
"""Ranges of steps after a swap, for running requests."""


def summarize(before: Sent, swaps: Sequence[Swapped]) -> dict[str, Any]:
    """Return medians over the swaps, and the running requests' acceptance by steps since the swap."""
    steps_ms, gaps_ms = [], []
    by_age: dict[str, list[int]] = {name: [] for name in AGES}
    for swap in swaps:
        gaps = [
            (later, 1e3 * (later - earlier))
            for s in swap.streams
            for earlier, later in pairwise(s.times_s)
        ]
        steps_ms.append(statistics.median(gap for later, gap in gaps if later < swap.began_s))
        # Wait a second longer than the request, because streams show the pause only with the next
        # chunk.
        gaps_ms.append(max(gap for later, gap in gaps if swap.began_s < later < swap.ended_s + 1))
        for stream in swap.streams:
            earlier = [
                len(t)
                for at, t in zip(stream.times_s, stream.token_ids, strict=True)
                if at < swap.began_s
            ]
            later = [
                len(t)
                for at, t in zip(stream.times_s, stream.token_ids, strict=True)
                if at > swap.ended_s
            ]
            # The first chunk holds the prefill's token, for which no draft was made.
            by_age["before"] += earlier[1:]
            for name, ages in AGES.items():
                if ages:
                    # The first chunk after the swap may come from a step before it, and the last
                    # chunk is cut at max_tokens.
                    by_age[name] += later[1:-1][slice(*ages)]
    return {
        "blocks_kept": statistics.median(swap.after.hits / before.hits for swap in swaps),
        "pause_over_step_ms": statistics.median(
            g - s for g, s in zip(gaps_ms, steps_ms, strict=True)
        ),
        "pause_ms": statistics.median(swap.report["pause_ms"] for swap in swaps),
        "load_ms": statistics.median(swap.report["load_ms"] for swap in swaps),
        "step_ms": statistics.median(steps_ms),
        "alpha_before": before.alpha,
        "alpha_after": statistics.median(swap.after.alpha for swap in swaps),
        # A chunk of s tokens holds s - 1 accepted draft tokens and the bonus token.
        "alpha_running": {
            n: statistics.mean(s - 1 for s in sizes) / NUM_TOKENS
            for n, sizes in by_age.items()
            if sizes
        },
        "lossless": all(
            swap.texts_equal and swap.after.answers == before.answers for swap in swaps
        ),
        "swaps": len(swaps),
    }


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
