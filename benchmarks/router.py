"""Measure the delay that the router adds to a request, compared with the same request made
directly.

    $ python -m benchmarks.router --streams 600

    direct   client ─► server             the server answers at once, so that the delay is not hidden
    router   client ─► router ─► server   the router finds the domain from the prompt's text

Each part runs in a separate process, and requests take turns. Whole answers are timed, and streams
to the first event. Then many streams run at once, directly and through the router in turn: the gaps
between chunks show whether one stream waits for others. It all takes less than two minutes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks import streams
from benchmarks.results import write_results
from redraft.distill.data.corpus import stdlib_conversations
from redraft.eval.engine.process import free_port, process_group
from redraft.eval.engine.server import wait_until_healthy
from redraft.heads.files.artifact import publish
from redraft.heads.progress import Progress
from redraft.online.traffic.domains import Clusters
from redraft.online.traffic.front import raise_file_limit
from redraft.recipes.cli.run import run_recipe

REQUIRED_MS = 2.0
REQUIRED_GAP_RATIO = 1.3
"""The longest gap of a thousand through the router may be this many times the one without it."""

NUM_EVENTS = 3


@dataclass(frozen=True, kw_only=True)
class Config:
    output: Path = Path("outputs/bench/router.json")
    """File that receives the results."""
    requests: int = 500
    """Requests of each kind, sent directly and through the router in turn."""
    prompt_chars: int = 2000
    """Length of every prompt in characters. The router reads only the beginning."""
    streams: int = 600
    """Streams at once, of 2 events per second each; 0 leaves this part out."""
    stream_rounds: int = 3
    """Rounds of streams, directly and through the router each. A round takes 10 s, and 45 s at
    most.
    """


def main(cfg: Config) -> None:
    texts = sample_texts()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_pair(Path(folder), texts) as (direct, router),
    ):
        results = overhead(direct, router, "\n".join(texts)[: cfg.prompt_chars], cfg.requests)
    for kind, result in results.items():
        print(line(kind, result))
    gaps = measure_streams(cfg.streams, cfg.stream_rounds) if cfg.streams else None
    if gaps:
        print("\n".join(stream_lines(cfg.streams, gaps)))
    write_results(cfg.output, {"config": asdict(cfg), "results": results, "streams": gaps})


def sample_texts() -> list[str]:
    """200 texts from the standard library."""
    return [
        str(conversation["messages"][1]["content"])  # type: ignore[index]
        for conversation in islice(stdlib_conversations(), 200)
    ]


@contextmanager
def running_pair(folder: Path, texts: list[str]) -> Iterator[tuple[str, str]]:
    """Start a server that answers at once, and a router with domains learned from `texts`.

    Yield both addresses.
    """
    clusters = Clusters.fit(texts, 2)
    publish(folder / "domains", clusters.write, {})
    server = ["-m", "uvicorn", "benchmarks.router:instant_server", "--factory"]
    server += ["--log-level", "warning", "--no-access-log", "--port"]
    with running_router(folder, server, clusters.names, 'clusters = "domains"') as pair:
        yield pair


@contextmanager
def running_router(
    folder: Path, server: Sequence[str], domains: Sequence[str], setting: str = ""
) -> Iterator[tuple[str, str]]:
    """Start `python SERVER PORT`, and a router that lists it once for each of `domains`.

    Yield both addresses.
    """
    ports = free_port(), free_port()
    direct, router = (f"http://127.0.0.1:{port}" for port in ports)
    fleet = (f'[[servers]]\nurl = "{direct}"\ndomain = "{name}"\n' for name in domains)
    (folder / "fleet.toml").write_text("".join(fleet))
    (folder / "router.toml").write_text(
        f'fleet = "fleet.toml"\n{setting}\nport = {ports[1]}\nadmin_port = 0\n'
    )
    commands = {
        "server": [*server, str(ports[0])],
        "router": ["-m", "redraft.recipes.cli", "router", "--config", str(folder / "router.toml")],
    }
    with ExitStack() as running:
        for name, command in commands.items():
            log = folder / f"{name}.log"
            process = running.enter_context(process_group([sys.executable, *command], log=log))
        # After the loop `process` and `log` are the router's. It answers 503 until it reaches a
        # server, so this waits for both.
        wait_until_healthy(router, process, log, name="the router")
        yield direct, router


def instant_server() -> Starlette:
    """A server that answers completions at once, whole or as a stream."""
    choice = {"index": 0, "text": " and so on", "finish_reason": None}
    answer = {"id": "cmpl-0", "object": "text_completion", "model": "m", "choices": [choice]}

    async def complete(request: Request) -> Response:
        is_streamed = (await request.json()).get("stream")
        return (
            StreamingResponse(events(), media_type="text/event-stream")
            if is_streamed
            else JSONResponse(answer)
        )

    async def events() -> AsyncIterator[bytes]:
        for _ in range(NUM_EVENTS):
            yield b"data: " + json.dumps(answer).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def health(request: Request) -> Response:
        return Response()

    return Starlette(
        routes=[Route("/v1/completions", complete, methods=["POST"]), Route("/health", health)]
    )


def overhead(direct: str, router: str, prompt: str, requests: int) -> dict[str, dict[str, Any]]:
    """Delay added by the router to an answer and to a stream's first event, in ms, at p50 and p95.

    Requests take turns. The first tenth is a warm-up and does not count.
    """
    results = {}
    with httpx.Client(timeout=60) as http:
        for kind in ("answer", "stream"):
            body = {"model": "m", "prompt": prompt, "stream": kind == "stream"}
            taken_ms: dict[str, list[float]] = {"direct": [], "router": []}
            for number in Progress(range(-requests // 10, requests), desc=kind, unit="request"):
                # The order alternates: neither side always runs in caches warmed by the other.
                for side, url in (("direct", direct), ("router", router))[
                    :: 1 if number % 2 else -1
                ]:
                    took_ms = 1e3 * seconds(http, f"{url}/v1/completions", body)
                    if number >= 0:
                        taken_ms[side].append(took_ms)
            at = {
                side: np.percentile(times, [50, 95]).round(3).tolist()
                for side, times in taken_ms.items()
            }
            results[kind] = {
                "direct_ms_p50": at["direct"][0],
                "overhead_ms_p50": round(at["router"][0] - at["direct"][0], 3),
                "overhead_ms_p95": round(at["router"][1] - at["direct"][1], 3),
            }
    return results


def seconds(http: httpx.Client, url: str, body: dict[str, Any]) -> float:
    """Time to the first bytes of a stream, or to the end of an answer."""
    began_s = time.perf_counter()
    with http.stream("POST", url, json=body) as answer:
        chunks = answer.iter_raw()
        next(chunks)
        first_s = time.perf_counter()
        for _ in chunks:  # read to the end, so that the connection can be reused
            pass
        answer.raise_for_status()
    return (first_s if body["stream"] else time.perf_counter()) - began_s


def measure_streams(num_streams: int, rounds: int) -> dict[str, Any]:
    """Gaps between chunks of `num_streams` streams at once, by side, and how many times longer the
    router's are.
    """
    raise_file_limit()  # for the connections of the load
    server = ["-m", "benchmarks.streams"]
    with (
        tempfile.TemporaryDirectory() as folder,
        running_router(Path(folder), server, [""]) as (direct, router),
    ):
        sides = streams.compare({"direct": direct, "router": router}, num_streams, rounds)
    return {
        **sides,
        "gap_ratio_p99_9": round(
            sides["router"]["gap_ms_p99_9"] / sides["direct"]["gap_ms_p99_9"], 3
        ),
    }


def stream_lines(num_streams: int, result: dict[str, Any]) -> list[str]:
    """A line for each side, and the verdict."""
    lines = [f"    {num_streams} streams at once, gap between chunks in ms:"]
    for side in ("direct", "router"):
        at = result[side]
        lines.append(
            f"    {side:<8} p50 {at['gap_ms_p50']:.0f}, p99 {at['gap_ms_p99']:.0f}, p99.9 "
            f"{at['gap_ms_p99_9']:.0f}; "
            f"first event p50 {at['first_event_ms_p50']:.0f}; failed {at['failed']}"
        )
    ratio = result["gap_ratio_p99_9"]
    verdict = (
        "PASS" if ratio <= REQUIRED_GAP_RATIO and not result["router"]["failed"] else "BELOW TARGET"
    )
    return [
        *lines,
        f"    p99.9 through the router is {ratio:.2f} of direct  {verdict} (at most "
        f"{REQUIRED_GAP_RATIO})",
    ]


def line(kind: str, result: dict[str, Any]) -> str:
    verdict = "PASS" if result["overhead_ms_p50"] < REQUIRED_MS else "BELOW TARGET"
    return (
        f"    {kind:<8} {result['direct_ms_p50']:.2f} ms directly; the router adds "
        f"{result['overhead_ms_p50']:.2f} ms"
        f" at the median, {result['overhead_ms_p95']:.2f} ms at p95  {verdict} (below "
        f"{REQUIRED_MS} ms)"
    )


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
