"""Acceptance as the real engine counts it: start vLLM, send the prompts, read its own counters.

vllm_server ──► warm-up ──► counters ──► prompts, `concurrency` at a time ──► counters ──► Measurement
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from eval import engine_wait
from eval.acceptance import AcceptanceCounts
from eval.process import free_port, process_group
from eval.prompts import Prompt, domains
from eval.sampler import NextLogits

START_TIMEOUT_S = 600
"""A 70B target on network storage takes minutes to load; a dead engine is noticed at once."""

WARM_UP_TOKENS = 16

ONE_SPEED = "--no-async-scheduling"
"""Without it, vLLM's CPU build has two speeds, one a third of the other, more often than with it."""

IDLE_S = 1.2
"""A worker of vLLM spins for a second after its last step: on its core nothing else is measured meanwhile."""

PURE_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Temperature alone: a server takes the others from the target's generation_config.json, and then samples another p."""

TIE_LOGIT_GAP = 1e-3
"""Two tokens whose logits differ by less are a tie in a float32 engine: batching alone moves logits by 1e-5 or so."""

TIE_LOGIT_GAP_HALF = 0.25
"""The same in a 16-bit engine: bfloat16 rounds logits of size 16 to 32 to steps of 1/8."""


@dataclass(frozen=True, kw_only=True)
class Server:
    url: str
    model: str
    dtype: str
    num_speculative_tokens: int
    """0 where nothing is drafted."""


@contextlib.contextmanager
def vllm_server(
    model: str | Path,
    *,
    log: Path,
    speculative_config: Mapping[str, Any] | None = None,
    max_model_len: int = 1024,
    max_num_seqs: int = 16,
    dtype: str | None = None,
    kv_cache_bytes: int = 256 << 20,
    cpu_cores: str | None = None,
    extra_args: Sequence[str] = (),
    extra_env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A vLLM server of `model` on a free loopback port, healthy on entry and gone on exit, whatever happens between.

    float32 is the default on a CPU (greedy outputs can be compared token for token), the model's own dtype on a GPU.
    `cpu_cores` ("0-3") keeps two servers of one machine off each other's cores; vLLM's own choice is core 0 for both.

    Raises:
        ChildProcessError: the engine died; the message is its own.
        TimeoutError: it did not come up.
    """
    port = free_port()
    on_cpu = engine_is_cpu()
    dtype = dtype or ("float32" if on_cpu else "auto")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", dtype]
    command += ["--max-model-len", str(max_model_len), "--max-num-seqs", str(max_num_seqs)]
    # A cached prompt skips its prefill, and vLLM counts the first step after a full hit as a draft that failed.
    command += ["--no-enable-prefix-caching"]
    if on_cpu:
        command += ["--enforce-eager", "--kv-cache-memory-bytes", str(kv_cache_bytes), ONE_SPEED]
    if speculative_config is not None:
        command += ["--speculative-config", json.dumps(speculative_config)]
        command += ["--per-request-spec-decode-metrics", "detailed"]
    env = {"VLLM_NO_USAGE_STATS": "1", engine_wait.ENABLED: "1", **lookup_env(speculative_config), **(extra_env or {})}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": cpu_cores} if cpu_cores else {}
    with process_group([*command, *extra_args], log=log, env=env) as process:
        server = Server(
            url=f"http://127.0.0.1:{port}",
            model=str(model),
            dtype=dtype,
            num_speculative_tokens=int((speculative_config or {}).get("num_speculative_tokens", 0)),
        )
        wait_until_healthy(server.url, process, log)
        yield server


def measurable(speculative_config: Mapping[str, Any]) -> dict[str, Any]:
    """The same without what a server remembers of other requests: in a measurement the next prompt may be one that it
    has answered already."""
    forgets = {"suffix_decoding_max_cached_requests": 0} if speculative_config.get("method") == "suffix" else {}
    return {**speculative_config, **forgets}


def lookup_env(speculative_config: Mapping[str, Any] | None) -> dict[str, str]:
    """What n-grams need to be those that are forecast: vLLM's second model runner takes the last occurrence and not the
    first, and drafts where there is none."""
    is_lookup = (speculative_config or {}).get("method") == "ngram"
    return {"VLLM_USE_V2_MODEL_RUNNER": "0"} if is_lookup else {}


def engine_is_cpu() -> bool:
    """True where the installed engine is vLLM's CPU build (importing vllm to ask it takes seconds)."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm-cpu")
        return True
    return False


def wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path, *, what: str = "vLLM") -> None:
    """Return when `GET {url}/health` says so.

    Raises:
        ChildProcessError: the process ended; the message is its own.
        TimeoutError: it did not come up.
    """
    started = time.monotonic()
    with tqdm(desc=f"{what} starts", bar_format="{desc}: {elapsed}", leave=False, disable=None) as bar:
        while time.monotonic() - started < START_TIMEOUT_S:
            if process.poll() is not None:
                raise ChildProcessError(f"{what} did not start: {last_error(log)} (whole log: {log})")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", timeout=5).is_success:
                    return
            time.sleep(0.25)
            bar.refresh()
    raise TimeoutError(f"{what} was not ready after {START_TIMEOUT_S} s: see {log}")


def last_error(log: Path) -> str:
    """The line of an engine's log that says why it died: the last error that is not about another process's error."""
    lines = log.read_text(errors="replace").splitlines()
    # pydantic puts the whole input behind its message, after "[type=value_error, "
    pattern = r"\b((?:[A-Z]\w*(?:Error|Exception)|error|Value error)[:,] .+?)(?: \[type=.*)?$"
    errors = (re.search(pattern, line) for line in lines)
    causes = [found[1] for found in errors if found and "Engine core initialization failed" not in found[1]]
    return causes[-1].strip() if causes else (lines[-1].strip() if lines else "it wrote nothing")


@dataclass(frozen=True, kw_only=True)
class Output:
    token_ids: list[int]
    counts: AcceptanceCounts | None
    """Of this request; None where nothing is drafted."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    prompts: Sequence[Prompt]
    outputs: list[Output]
    duration_s: float
    dtype: str
    counts: AcceptanceCounts | None
    """The engine's own counters over the whole run; equal to the sum of the requests'."""

    @property
    def num_output_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.duration_s

    @property
    def counts_by_domain(self) -> dict[str, AcceptanceCounts]:
        return {
            name: _total([o for p, o in zip(self.prompts, self.outputs, strict=True) if p.domain == name])
            for name in domains(self.prompts)
        }


def _total(outputs: Sequence[Output]) -> AcceptanceCounts:
    counts = [output.counts for output in outputs if output.counts is not None]
    return sum(counts[1:], counts[0])


def measure(
    server: Server,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    concurrency: int = 4,
) -> Measurement:
    """Every prompt's output, output tokens per second, and the engine's counts, after a warm-up.

    Raises:
        ValueError: no prompts; the engine refuses one; another client used the server meanwhile.
        ConnectionError: the server went away; the message says how far it got.
    """
    if not prompts:
        raise ValueError("there is no prompt to measure: every one was filtered out, or the data set is empty")
    asyncio.run(complete_all(server, prompts[:concurrency], WARM_UP_TOKENS, temperature, concurrency, "warm-up"))
    before = read_counters(server)
    started = time.perf_counter()
    outputs = asyncio.run(complete_all(server, prompts, max_tokens, temperature, concurrency, "prompts"))
    duration_s = time.perf_counter() - started
    counts = None
    if server.num_speculative_tokens:
        counts = _total(outputs)
        _require_equal_counters(server, before, counts)
    return Measurement(prompts=prompts, outputs=outputs, duration_s=duration_s, dtype=server.dtype, counts=counts)


async def complete_all(
    server: Server, prompts: Sequence[Prompt], max_tokens: int, temperature: float, concurrency: int, what: str
) -> list[Output]:
    """Every prompt's output. Raises: ValueError, ConnectionError, as `measure`."""
    slots = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=concurrency)) as client:
        with tqdm(total=len(prompts), desc=what, unit="prompt") as bar:

            async def one(prompt: Prompt) -> Output:
                async with slots:
                    output = await _complete(client, server, prompt, max_tokens, temperature)
                bar.update()
                return output

            try:
                return list(await asyncio.gather(*map(one, prompts)))
            except httpx.TransportError as error:
                raise ConnectionError(
                    f"{server.url} went away after {bar.n} of {len(prompts)} prompts: {error!r}"
                ) from error


async def _complete(
    client: httpx.AsyncClient, server: Server, prompt: Prompt, max_tokens: int, temperature: float
) -> Output:
    request = {
        "model": server.model,
        "prompt": prompt.token_ids,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "return_token_ids": True,
        **PURE_SAMPLING,
    }
    response = await client.post(f"{server.url}/v1/completions", json=request)
    if response.is_error:
        raise ValueError(f"the engine refused a prompt of {len(prompt.token_ids)} tokens: {_message(response)}")
    answer = response.json()
    metrics = (answer.get("metrics") or {}).get("speculative_decoding")
    return Output(
        token_ids=answer["choices"][0]["token_ids"],
        counts=_request_counts(metrics, server.num_speculative_tokens) if server.num_speculative_tokens else None,
    )


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"


def _request_counts(metrics: dict[str, Any] | None, num_speculative_tokens: int) -> AcceptanceCounts:
    if metrics is None:  # an answer of one token: the prefill gave it, nothing was drafted
        return AcceptanceCounts.zero(num_speculative_tokens)
    counts = AcceptanceCounts.of_blocks(metrics.get("per_step_accepted") or [], num_speculative_tokens)
    return replace(counts, num_draft_tokens=metrics["num_draft_tokens"])


_COUNTER = re.compile(r'^vllm:spec_decode_num_(\w+)_total\{(?:.*?position="(\d+)")?.*\} (\S+)$', re.MULTILINE)


def read_counters(server: Server) -> AcceptanceCounts:
    """The engine's speculation counters since it started, over all its ranks."""
    return parse_counters(httpx.get(f"{server.url}/metrics", timeout=30).text, server.num_speculative_tokens)


def parse_counters(metrics: str, num_speculative_tokens: int) -> AcceptanceCounts:
    """The speculation counters in a page of Prometheus text, summed over engines; all 0 where there are none."""
    totals: dict[tuple[str, str], int] = {}
    for name, position, value in _COUNTER.findall(metrics):
        totals[name, position] = totals.get((name, position), 0) + int(float(value))
    return AcceptanceCounts(
        num_drafts=totals.get(("drafts", ""), 0),
        num_draft_tokens=totals.get(("draft_tokens", ""), 0),
        accepted_per_position=tuple(
            totals.get(("accepted_tokens_per_pos", str(j)), 0) for j in range(num_speculative_tokens)
        ),
    )


def _require_equal_counters(server: Server, before: AcceptanceCounts, requests: AcceptanceCounts) -> None:
    """The engine's counters moved by exactly what the requests report, or somebody else's requests are in them."""
    deadline = time.monotonic() + 5  # the last step's statistics reach /metrics after its tokens reached us
    while (now := read_counters(server)) != before + requests:
        if time.monotonic() > deadline:
            raise ValueError(
                f"{server.url} counted {now.num_drafts - before.num_drafts} drafts but the prompts' own metrics say "
                f"{requests.num_drafts}: another client uses this server, measure on one of your own"
            )
        time.sleep(0.1)


@dataclass(frozen=True, kw_only=True)
class Difference:
    prompt: int
    domain: str
    position: int
    """First output token that differs."""
    token_with: int | None
    """None where the output had ended."""
    token_without: int | None
    logit_gap: float | None
    """How far the worse of the two tokens is below the target's best logit there; None where it is not known."""
    is_tie: bool
    """The gap is within what floating point leaves open."""


@dataclass(frozen=True, kw_only=True)
class Lossless:
    num_prompts: int
    differences: list[Difference]

    @property
    def lossless(self) -> bool:
        """Every output is equal, but for ties that floating point decides either way."""
        return all(difference.is_tie for difference in self.differences)


def compare_lossless(
    with_draft: Measurement, without_draft: Measurement, target_logits: NextLogits | None = None
) -> Lossless:
    """Where greedy outputs with a draft first differ from those without, prompt by prompt."""
    tie_gap = TIE_LOGIT_GAP if with_draft.dtype == "float32" else TIE_LOGIT_GAP_HALF
    assert [p.token_ids for p in with_draft.prompts] == [p.token_ids for p in without_draft.prompts]
    rows = zip(with_draft.prompts, with_draft.outputs, without_draft.outputs, strict=True)
    differences = [
        _difference(index, prompt, mine.token_ids, its.token_ids, target_logits, tie_gap)
        for index, (prompt, mine, its) in enumerate(rows)
        if mine.token_ids != its.token_ids
    ]
    return Lossless(num_prompts=len(with_draft.prompts), differences=differences)


def _difference(
    index: int, prompt: Prompt, mine: list[int], its: list[int], target_logits: NextLogits | None, tie_gap: float
) -> Difference:
    position = next((i for i, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b), min(len(mine), len(its)))
    pair = [ids[position] if position < len(ids) else None for ids in (mine, its)]
    gap = None
    if target_logits is not None and None not in pair:
        logits_V = target_logits([*prompt.token_ids, *mine[:position]])
        gap = float(logits_V.max() - logits_V[pair].min())
    return Difference(
        prompt=index,
        domain=prompt.domain,
        position=position,
        token_with=pair[0],
        token_without=pair[1],
        logit_gap=gap,
        is_tie=gap is not None and gap <= tie_gap,
    )
