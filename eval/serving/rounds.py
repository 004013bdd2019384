"""Measure several servers of one target in interleaved rounds, by number of concurrent requests.

    round ─► requests in flight ─► every server in turn, on the same prompts     each round starts with the next server

On a shared machine, other tenants' memory traffic affects a step more than a draft does, so speeds
are ratios within a round. No measurement reuses another's text from a prefix cache (`measure`), so
every server starts a round's prompts with a cold cache.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from redraft.engine.counts import AcceptanceCounts
from redraft.engine.machine import ENGINE_IS_CPU
from redraft.engine.measure import MOST_REPEATS, Measurement, Output, changed_speed, measure
from redraft.engine.process import exiting_on_sigterm
from redraft.engine.prompts import Prompt
from redraft.engine.sampling import GREEDY, Sampling
from redraft.engine.server import IDLE_S, VllmServer, vllm_server
from redraft.eval.intervals import median_interval
from redraft.eval.served import count_steps
from redraft.files.kept import compute_once
from redraft.files.progress import Progress

PLAIN = "none"  # name of the server without a draft
MEMORY_SHARE = "--gpu-memory-utilization"
USED_MEMORY = 0.9  # share of a GPU's memory for all servers together; the rest is for CUDA contexts


@dataclass(frozen=True, kw_only=True)
class Plan:
    rounds: int
    prompts: Mapping[int, int]
    """Number of prompts per round, by number of concurrent requests."""
    max_tokens: int
    sampling: Sampling | None = GREEDY
    """Sampling parameters. If None, the target's generation_config.json decides."""
    first: int = 0
    """Index of the first round, which determines its prompts."""
    most_repeats: int = MOST_REPEATS
    """Maximum number of times a load is measured again because a server changed speed."""


@contextlib.contextmanager
def start_servers(
    target: str,
    drafts: Mapping[str, Mapping[str, Any] | None],
    logs: Path,
    *,
    on_cpu: bool = ENGINE_IS_CPU,
    **options: Any,
) -> Iterator[dict[str, VllmServer]]:
    """Start a server for each draft's --speculative-config, by name.

    `options` are passed to `vllm_server`. The servers compute in turns, so they share the cores,
    and they divide a GPU's memory equally. On a CPU, all start at the same time. On a GPU, they
    start one after the other, because until a server is ready, vLLM attributes all new use of the
    GPU's memory to that server. It raises the same errors as `vllm_server`, as soon as one server
    fails to start.
    """
    given_up = threading.Event()
    if not on_cpu:
        options["extra_args"] = share_memory(options.get("extra_args", ()), len(drafts))
    # A server stops with the thread that started it, so the threads stay until all servers are
    # stopped.
    with (
        exiting_on_sigterm(),
        ThreadPoolExecutor(len(drafts) if on_cpu else 1) as pool,
        contextlib.ExitStack() as stack,
    ):

        def start(name: str) -> VllmServer:
            # A draft's name may be a path.
            log = logs / f"vllm-{name.replace('/', '-')}.log"
            return stack.enter_context(
                vllm_server(
                    target, log=log, speculative_config=drafts[name], given_up=given_up, **options
                )
            )

        starts = {name: pool.submit(start, name) for name in drafts}
        try:
            for started in as_completed(starts.values()):
                started.result()
        except BaseException:
            # Every thread must finish before the stack closes, because a thread that entered it
            # later would leave a server running.
            given_up.set()
            for waiting in starts.values():
                waiting.cancel()
            wait(starts.values())
            raise
        yield {name: started.result() for name, started in starts.items()}


def share_memory(engine_args: Sequence[str], num_servers: int) -> tuple[str, ...]:
    """Return vLLM's arguments with a share of the GPU's memory that leaves room for all servers.

    Arguments that already set a share are left unchanged. By default, each server uses nearly the
    whole GPU.
    """
    # vLLM accepts both spellings, with the value after an equals sign or as the next argument.
    named = any(argument.replace("_", "-").startswith(MEMORY_SHARE) for argument in engine_args)
    if named or num_servers == 1:
        return tuple(engine_args)
    # Round down: 0.9 for four servers is 0.225 for each.
    return (f"{MEMORY_SHARE}={math.floor(1000 * USED_MEMORY / num_servers) / 1000}", *engine_args)


# Results by server and number of requests in flight.
Results = Mapping[tuple[str, int], Sequence[Measurement]]


def keep_rounds(folder: Path, key: object, run: Callable[[], Results]) -> Results:
    """Return the results of `run()`, or those that an earlier run with an equal `key` cached.

    Results are reused only as a whole, so that speeds from different days are not compared.
    """

    def listed() -> list[tuple[str, int, list[Measurement]]]:
        return [(name, concurrency, list(runs)) for (name, concurrency), runs in run().items()]

    kept = compute_once(folder, "rounds", key, list[tuple[str, int, list[Measurement]]], listed)
    return {(name, concurrency): runs for name, concurrency, runs in kept}


def measure_servers(
    target: str,
    drafts: Mapping[str, Mapping[str, Any] | None],
    prompts: Sequence[Prompt],
    plan: Plan,
    logs: Path,
    *,
    alone: Plan | None = None,
    is_together: bool = True,
    **options: Any,
) -> Results:
    """Start a server for each draft's --speculative-config, and measure all of them in rounds.

    `alone` contains additional loads for the target alone. `options` are passed to `vllm_server`.
    Unless `is_together`, only one server runs at a time, and each round restarts all of them; use
    this for a target that fills the machine. It raises the same errors as `start_servers` and
    `measure`.
    """
    if is_together:
        with start_servers(target, drafts, logs, **options) as servers:
            further = run_rounds({PLAIN: servers[PLAIN]}, prompts, alone) if alone else {}
            return {**run_rounds(servers, prompts, plan), **further}
    results: dict[tuple[str, int], list[Measurement]] = {}
    for number in range(plan.rounds):
        this_round = replace(plan, first=number, rounds=1)
        for name in _take_turns(list(drafts), number):
            with start_servers(target, {name: drafts[name]}, logs, **options) as servers:
                found = dict(run_rounds(servers, prompts, this_round))
                if alone and name == PLAIN and number == 0:
                    found |= run_rounds(servers, prompts, alone)
            for cell, runs in found.items():
                results.setdefault(cell, []).extend(runs)
    return results


def _take_turns(names: Sequence[str], number: int) -> list[str]:
    """The order of the servers in a round: each round starts with the next server."""
    turn = number % len(names)
    return [*names[turn:], *names[:turn]]


def run_rounds(servers: Mapping[str, VllmServer], prompts: Sequence[Prompt], plan: Plan) -> Results:
    """Measure every server in every round.

    A round starts with the prompt after the previous round's last prompt. A load in which a server
    changes speed by more than a third (`changed_speed`) is measured again on all servers, at most
    `plan.most_repeats` times.

    Raises:
        ValueError: the servers run in different modes, so a ratio of their speeds would measure
            the compiler.
    """
    if len(modes := {server.mode for server in servers.values()}) > 1:
        found = ", ".join(f"{name} is {server.mode}" for name, server in servers.items())
        raise ValueError(f"servers with {len(modes)} different modes cannot be compared: {found}")
    results: dict[tuple[str, int], list[Measurement]] = {
        (n, c): [] for n in servers for c in plan.prompts
    }
    with Progress(total=plan.rounds * len(results), desc="rounds", unit="load") as bar:
        for number in range(plan.first, plan.first + plan.rounds):
            order = _take_turns(list(servers), number)
            for concurrency, count in plan.prompts.items():
                # E.g. rounds of 8 use prompts 0 to 7, then 8 to 15, and start again from 0 after
                # the last prompt.
                some = [prompts[(number * count + i) % len(prompts)] for i in range(count)]
                runs = {name: _measure(servers[name], some, plan, concurrency) for name in order}
                repeats = 0
                while repeats < plan.most_repeats and any(
                    changed_speed(run.half_step_s) for run in runs.values()
                ):
                    runs = {
                        name: _measure(servers[name], some, plan, concurrency) for name in order
                    }
                    repeats += 1
                for name, run in runs.items():
                    results[name, concurrency].append(replace(run, repeats=repeats))
                bar.update(len(runs))
    return results


def _measure(
    server: VllmServer, prompts: Sequence[Prompt], plan: Plan, concurrency: int
) -> Measurement:
    # The servers share the cores, and the previous server's worker still spins.
    time.sleep(IDLE_S)
    return measure(
        server,
        prompts,
        max_tokens=plan.max_tokens,
        sampling=plan.sampling,
        concurrency=concurrency,
    )


def merge(runs: Sequence[Measurement]) -> Measurement:
    """Merge the rounds of one server into one measurement.

    A prompt that occurs in several rounds counts once, as first measured. The result has no
    duration and no speed.
    """
    outputs: dict[tuple[int, ...], tuple[Prompt, Output]] = {}
    for run in runs:
        for prompt, output in zip(run.prompts, run.outputs, strict=True):
            outputs.setdefault(tuple(prompt.token_ids), (prompt, output))
    # Sort by tokens, so that the merged runs of two servers pair up prompt by prompt.
    outputs = dict(sorted(outputs.items()))
    counted = [output.counts for _, output in outputs.values() if output.counts is not None]
    return Measurement(
        prompts=[prompt for prompt, _ in outputs.values()],
        outputs=[output for _, output in outputs.values()],
        full_s=math.nan,
        full_tokens=0,
        dtype=runs[0].dtype,
        counts=sum(counted, AcceptanceCounts.zero()) if counted else None,
    )


def select_prompts(run: Measurement, like: Measurement) -> Measurement:
    """Return the part of a merged measurement that covers the prompts of another measurement."""
    outputs = {
        tuple(p.token_ids): output for p, output in zip(run.prompts, run.outputs, strict=True)
    }
    return replace(
        run, prompts=like.prompts, outputs=[outputs[tuple(p.token_ids)] for p in like.prompts]
    )


def plain_runs(groups: Iterable[Results]) -> dict[int, list[Measurement]]:
    loads: dict[int, list[Measurement]] = {}
    for group in groups:
        for (name, load), runs in group.items():
            if name == PLAIN:
                loads.setdefault(load, []).extend(runs)
    return loads


def count(results: Results, name: str, concurrency: int) -> AcceptanceCounts:
    """Return counts over all rounds, including target steps without a draft."""
    outputs = [output for run in results[name, concurrency] for output in run.outputs]
    return sum(map(count_steps, outputs), AcceptanceCounts.zero())


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A server's speed-up over the server without a draft, and its causes.

    Tokens/s = requests in flight * tau / step, so the speed-up is tau divided by the ratio of the
    step times.
    """

    ratio: float
    interval: tuple[float, float] | None
    """95% interval over rounds. None if there are fewer than 6 rounds."""
    ratios: list[float]
    ideal: float
    """Speed-up if every proposed draft token were accepted and steps took the same time."""
    tokens_per_s: float
    ttft_ms: float | None
    """Mean time to first token."""
    tau: float
    acceptance_per_position: list[float]
    accepted_per_s: float
    """Accepted draft tokens per second, over all requests."""
    rows_per_token: float
    """Rows that the target verified per output token, which is 1 without a draft. With adaptive
    verification, this is the cost of a token.
    """
    step_ms: float
    """Mean step time, including prefills."""
    tokens_per_request: float


def compare(results: Results, name: str, concurrency: int) -> Compared:
    ours, plain = results[name, concurrency], results[PLAIN, concurrency]
    ratios = [run.tokens_per_s / alone.tokens_per_s for run, alone in zip(ours, plain, strict=True)]
    ratio, interval = median_interval(ratios)
    counts = count(results, name, concurrency)
    rate = float(np.median([run.tokens_per_s for run in ours]))
    outputs = [len(output.token_ids) for run in ours for output in run.outputs]
    waits_s = [run.ttft_s for run in ours if run.ttft_s is not None]
    rows_per_token = (1 + counts.num_draft_tokens / max(1, counts.num_drafts)) / counts.tau
    return Compared(
        ratio=ratio,
        # With fewer rounds, the interval is infinite, which JSON cannot express.
        interval=interval if len(ratios) >= 6 else None,
        ratios=ratios,
        ideal=ratio * rows_per_token,  # then, a step would emit a token for each verified row
        tokens_per_s=rate,
        ttft_ms=1000 * float(np.mean(waits_s)) if waits_s else None,
        tau=counts.tau,
        acceptance_per_position=counts.acceptance_per_position,
        accepted_per_s=rate * (1 - 1 / counts.tau),
        rows_per_token=rows_per_token,
        step_ms=1000 * concurrency * counts.tau / rate,
        tokens_per_request=float(np.mean(outputs)),
    )


def measure_prefill(results: Results, name: str) -> float:
    """Return the seconds before an answer starts to decode, with one request in flight.

    It is the median over the rounds, and 0 if the engine's times are unknown or if no round had a
    single request in flight.
    """
    # With one request in flight, decode times do not overlap. The remaining time precedes decoding.
    before_s = [
        (run.full_s - run.decode_s) / len(run.outputs)
        for run in results.get((name, 1), ())
        if run.decode_s is not None
    ]
    return float(np.median(before_s)) if before_s else 0.0
