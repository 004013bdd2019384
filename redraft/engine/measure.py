"""Measure the acceptance and speed of a running vLLM server from its answers and counters.

warm-up ──► counters ──► prompts, `concurrency` at a time ──► counters ──► Measurement
"""

import asyncio
import itertools
import json
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx

from redraft.engine.counters import DecodeTime, find_counts, parse_decode_time
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.prompts import Prompt, domains
from redraft.engine.sampling import GREEDY, PENALTIES, Sampling
from redraft.engine.server import VllmServer, http_client
from redraft.files.progress import Progress

WARM_UP_TOKENS = 16
# /metrics includes the last step only shortly after the client has received its tokens.
STATISTICS_TIMEOUT_S = 5
CHANGED = 1.5  # factor between step times above which a server has changed speed
MOST_REPEATS = 2  # Maximum number of times a load is measured again because a server changed speed.
LEAST_STEPS = 8  # Minimum number of steps in half a measurement to determine its speed.
# Fraction of a half's steps, the fastest ones, that determine its speed: longer drafts take longer.
FAST_STEPS = 0.1


@dataclass(frozen=True, kw_only=True)
class Output:
    token_ids: list[int]
    counts: AcceptanceCounts | None
    """Counts of this request. None if nothing is drafted."""
    arrivals: tuple[tuple[float, int], ...] = ()
    """(time on the client's clock in seconds, number of tokens): first for the request itself, with
    0 tokens, then for every step.
    """


@dataclass(frozen=True, kw_only=True)
class Measurement:
    prompts: Sequence[Prompt]
    outputs: list[Output]
    full_s: float
    """Time under full load in seconds: from the first request until a request ends and no new one
    follows.
    """
    full_tokens: int
    """Number of output tokens in the time under full load."""
    dtype: str
    counts: AcceptanceCounts | None
    """Counts over the whole run, from the engine's counters."""
    decode_s: float | None = None
    """Time after the first token, summed over all requests, in seconds by the engine's clock. None
    if other requests ran too.
    """
    prefill_s: float | None = None
    """Time before the first token, excluding the wait in the queue, summed in the same way as
    `decode_s`.
    """
    step_s: float | None = None
    """Median time of a step without a prefill, in seconds. None if there are too few such steps."""
    ttft_s: float | None = None
    """Mean time to the first token, in seconds."""
    half_step_s: tuple[float, float] | None = None
    """Time of the fast steps (`FAST_STEPS`) in the first and second half, in seconds. None if there
    are too few.
    """
    repeats: int = 0
    """Number of runs of this load that were discarded because a server changed speed."""

    @property
    def num_output_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second under full load.

        The end of the run is excluded, because fewer requests run then, and with a draft, different
        requests end first.
        """
        return self.full_tokens / self.full_s

    @property
    def counts_by_domain(self) -> dict[str, AcceptanceCounts]:
        by_domain: dict[str, list[Output]] = {name: [] for name in domains(self.prompts)}
        for prompt, output in zip(self.prompts, self.outputs, strict=True):
            by_domain[prompt.domain].append(output)
        return {name: _total(outputs) for name, outputs in by_domain.items()}


def _total(outputs: Sequence[Output]) -> AcceptanceCounts:
    return sum(
        (output.counts for output in outputs if output.counts is not None), AcceptanceCounts.zero()
    )


def measure(
    server: VllmServer,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    sampling: Sampling | None = GREEDY,
    concurrency: int = 4,
    ignore_eos: bool = False,
) -> Measurement:
    """Send every prompt after a warm-up. Return outputs, speed and the engine's counts.

    No request reuses prefix-cache entries from another call or from the warm-up. Requests within
    one call share the prefixes that their prompts have in common, as in production, but a repeated
    prompt is read in full every time.

    Without `sampling`, requests set no parameters, so the server uses those in the target's
    generation_config.json. With `ignore_eos`, every answer has `max_tokens` tokens.

    Raises:
        ValueError: there are no prompts, the engine refused a prompt, or another client used the
            server in the meantime.
        ConnectionError: the server stopped responding; the message says how many prompts were done.
    """
    if not prompts:
        raise ValueError(
            "there is no prompt to measure: every one was filtered out, or the data set is empty"
        )
    # The warm-up has as many concurrent requests as the measurement, so that no batch size is new
    # to the engine while time is measured.
    warm_up = prompts[:concurrency]
    num_before = wait_for_decode_time(server).requests
    asyncio.run(complete_all(server, warm_up, WARM_UP_TOKENS, sampling, concurrency, "warm-up"))
    # Otherwise, the warm-up's statistics would be attributed to the prompts.
    decode = wait_for_decode_time(server, num_before + len(warm_up))
    # Counters include the warm-up and everything before it, so only differences are used.
    before = read_counters(server)
    outputs = asyncio.run(
        complete_all(
            server, prompts, max_tokens, sampling, concurrency, "prompts", ignore_eos=ignore_eos
        )
    )
    counts = None
    if server.num_speculative_tokens:
        # The requests' metrics contain the counts per prompt. Check their sum with the engine's
        # counters.
        counts = _total(outputs)
        _require_equal_counters(server, before, counts)
    expected = decode.requests + len(prompts)
    now = wait_for_decode_time(server, expected)
    arrivals = [output.arrivals for output in outputs]
    full_s, full_tokens = find_full_load(arrivals)
    step_s, half_step_s = time_steps([[at_s for at_s, _ in request] for request in arrivals])
    return Measurement(
        prompts=prompts,
        # Keep only the sums and medians of the times.
        outputs=[replace(output, arrivals=()) for output in outputs],
        full_s=full_s,
        full_tokens=full_tokens,
        dtype=server.dtype,
        counts=counts,
        decode_s=now.seconds - decode.seconds if now.requests == expected else None,
        prefill_s=now.prefill_s - decode.prefill_s if now.requests == expected else None,
        step_s=step_s,
        ttft_s=statistics.fmean(
            request[min(1, len(request) - 1)][0] - request[0][0] for request in arrivals
        ),
        half_step_s=half_step_s,
    )


def changed_speed(half_step_s: tuple[float, float] | None) -> bool:
    """Whether step times differ by more than a factor of `CHANGED` between the halves of a run."""
    return half_step_s is not None and max(half_step_s) > CHANGED * min(half_step_s)


def find_full_load(requests: Sequence[Sequence[tuple[float, int]]]) -> tuple[float, int]:
    """Return (seconds, tokens) until a request ends and no new one follows, from the `arrivals`."""
    last_s = max(request[0][0] for request in requests)
    end_s = min(request[-1][0] for request in requests if request[-1][0] > last_s)
    num_tokens = sum(count for request in requests for at_s, count in request if at_s <= end_s)
    return end_s - min(request[0][0] for request in requests), num_tokens


def time_steps(
    requests: Sequence[Sequence[float]],
) -> tuple[float, tuple[float, float]] | tuple[None, None]:
    """Return `step_s` and `half_step_s` of a `Measurement`. None if there are too few steps.

    Steps with a prefill are excluded. Each request is a sequence of times in seconds: when it was
    sent, and when the tokens of each step arrived.
    """
    prefills = [(times_s[0], times_s[1]) for times_s in requests if len(times_s) > 1]
    steps: list[tuple[float, float]] = []
    for times_s in requests:
        for begin_s, end_s in itertools.pairwise(times_s[1:]):
            if not any(sent_s < end_s and first_s > begin_s for sent_s, first_s in prefills):
                steps.append((end_s, end_s - begin_s))
    steps.sort()
    half = len(steps) // 2
    if half < LEAST_STEPS:
        return None, None
    durations_s = [duration_s for _, duration_s in steps]
    fast = [
        sorted(part)[int(FAST_STEPS * len(part))]
        for part in (durations_s[:half], durations_s[half:])
    ]
    return statistics.median(durations_s), (fast[0], fast[1])


async def complete_all(
    server: VllmServer,
    prompts: Sequence[Prompt],
    max_tokens: int,
    sampling: Sampling | None,
    concurrency: int,
    label: str,
    *,
    ignore_eos: bool = False,
) -> list[Output]:
    """Return the output of every prompt, in order, with `concurrency` requests at a time.

    `label` is shown in the progress bar.

    Raises:
        ValueError, ConnectionError: for the same reasons as in `measure`.
    """
    slots = asyncio.Semaphore(concurrency)
    salt, seen = secrets.token_hex(8), Counter[tuple[int, ...]]()
    # There is no timeout, because the prefill of a long prompt can take minutes on a CPU.
    async with httpx.AsyncClient(
        timeout=None, limits=httpx.Limits(max_connections=concurrency), trust_env=False
    ) as client:
        with Progress(total=len(prompts), desc=label, unit="prompt") as bar:

            async def one(prompt: Prompt) -> Output:
                key = tuple(prompt.token_ids)
                # Users rarely repeat a whole prompt, so a repeated one reads no cached prefill.
                cache_salt, seen[key] = f"{salt}-{seen[key]}", seen[key] + 1
                async with slots:
                    output = await _complete(
                        client,
                        server,
                        prompt,
                        max_tokens,
                        sampling,
                        cache_salt,
                        ignore_eos=ignore_eos,
                    )
                bar.update()
                return output

            try:
                return list(await asyncio.gather(*map(one, prompts)))
            except httpx.TransportError as error:
                raise ConnectionError(
                    f"{server.url} stopped responding after {bar.n} of {len(prompts)} prompts: {error!r}"
                ) from error


async def _complete(
    client: httpx.AsyncClient,
    server: VllmServer,
    prompt: Prompt,
    max_tokens: int,
    sampling: Sampling | None,
    cache_salt: str,
    *,
    ignore_eos: bool,
) -> Output:
    request = {
        "model": server.model,
        "prompt": prompt.token_ids,
        "max_tokens": max_tokens,
        "ignore_eos": ignore_eos,
        "cache_salt": cache_salt,  # vLLM shares cached prefixes among requests with the same salt
        # Request ids, because decoded text may be tokenised differently when it is encoded again.
        "return_token_ids": True,
        # Stream, as users do, so that the arrivals show the time of each step. The usage chunk
        # contains the metrics.
        "stream": True,
        "stream_options": {"include_usage": True},
        # Send all parameters, because a server uses generation_config.json for those that are not
        # set.
        **({} if sampling is None else asdict(sampling) | PENALTIES),
    }
    token_ids: list[int] = []
    arrivals = [(time.perf_counter(), 0)]
    metrics: dict[str, Any] | None = None
    async with client.stream("POST", f"{server.url}/v1/completions", json=request) as response:
        if response.is_error:
            await response.aread()
            raise _refused(prompt, _error_message(response))
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise _refused(prompt, str(event["error"].get("message")))
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    arrivals.append((time.perf_counter(), len(choice["token_ids"])))
                    token_ids += choice["token_ids"]
            metrics = event.get("metrics") or metrics
    # Servers send these metrics with --per-request-spec-decode-metrics.
    drafted = (metrics or {}).get("speculative_decoding")
    return Output(
        token_ids=token_ids,
        counts=_request_counts(drafted, server.num_speculative_tokens)
        if server.num_speculative_tokens
        else None,
        arrivals=tuple(arrivals),
    )


def _refused(prompt: Prompt, reason: str) -> ValueError:
    return ValueError(f"the engine refused a prompt of {len(prompt.token_ids)} tokens: {reason}")


def _error_message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"


def _request_counts(
    metrics: dict[str, Any] | None, num_speculative_tokens: int
) -> AcceptanceCounts:
    if metrics is None:  # an answer of one token comes from the prefill, which uses no draft
        return AcceptanceCounts.zero(num_speculative_tokens)
    counts = AcceptanceCounts.from_blocks(
        metrics.get("per_step_accepted") or [], num_speculative_tokens
    )
    # Blocks may not be full: n-grams propose fewer tokens if little text follows the occurrence.
    return replace(counts, num_draft_tokens=metrics["num_draft_tokens"])


def read_counters(server: VllmServer) -> AcceptanceCounts:
    """Return the engine's speculation counters since its start, summed over all ranks.

    All counts are 0 if the engine does not speculate.
    """
    counted = find_counts(_read_metrics(server))
    return AcceptanceCounts.zero(server.num_speculative_tokens) + (
        counted or AcceptanceCounts.zero()
    )


def wait_for_decode_time(server: VllmServer, at_least: int = 0) -> DecodeTime:
    """Wait until the engine has counted `at_least` requests. Statistics arrive after the answers."""
    deadline = time.monotonic() + STATISTICS_TIMEOUT_S
    while True:
        total = parse_decode_time(_read_metrics(server))
        if total.requests >= at_least or time.monotonic() > deadline:
            return total
        time.sleep(0.05)


def _read_metrics(server: VllmServer) -> str:
    try:
        return http_client().get(f"{server.url}/metrics", timeout=30).text
    except httpx.TransportError as error:
        raise ConnectionError(f"{server.url} stopped responding: {error!r}") from error


def _require_equal_counters(
    server: VllmServer, before: AcceptanceCounts, requests: AcceptanceCounts
) -> None:
    """Raise ValueError unless the engine's counters grew by exactly the requests' counts."""
    deadline = time.monotonic() + STATISTICS_TIMEOUT_S
    while (now := read_counters(server)) != before + requests:
        if time.monotonic() > deadline:
            raise ValueError(
                f"{server.url} counted {now.num_drafts - before.num_drafts} drafts, but the "
                f"metrics of the individual prompts show {requests.num_drafts}: another client is "
                f"using this server; measure on a server without other clients"
            )
        time.sleep(0.1)
