"""Measure what a router adds to a request, beside the same request made directly, in one interleaved run.

    $ redraft bench-router

    direct   client ─► server             a server that answers at once: nothing hides what the way takes
    router   client ─► router ─► server   which tells the domain by the prompt's text

Each in a process of its own. Whole answers are timed, and streams until their first event.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
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
from tqdm import tqdm

from distill.corpus import stdlib_conversations
from eval.engine import wait_until_healthy
from eval.process import free_port, process_group
from eval.report import write_results
from heads.artifact import publish
from online.domains import Clusters
from recipes.cli import run_recipe

REQUIRED_MS = 2.0
NUM_EVENTS = 3


@dataclass(frozen=True, kw_only=True)
class Config:
    output: Path = Path("outputs/bench/router.json")
    requests: int = 500
    """Of each kind, directly and through the router in turn."""
    prompt_chars: int = 2000
    """Of every prompt, of which the router reads the beginning."""


def main(cfg: Config) -> None:
    texts = sample_texts()
    with tempfile.TemporaryDirectory() as folder, running_pair(Path(folder), texts) as (direct, router):
        results = overhead(direct, router, "\n".join(texts)[: cfg.prompt_chars], cfg.requests)
    for kind, result in results.items():
        print(line(kind, result))
    write_results(cfg.output, {"config": asdict(cfg), "results": results})


def sample_texts() -> list[str]:
    """Some texts of the standard library."""
    return [str(conversation["messages"][1]["content"]) for conversation in islice(stdlib_conversations(), 200)]  # type: ignore[index]


@contextmanager
def running_pair(folder: Path, texts: list[str]) -> Iterator[tuple[str, str]]:
    """Addresses of a server that answers at once, and of a router in front of it that learned domains from `texts`."""
    clusters = Clusters.fit(texts, 2)
    publish(folder / "domains", clusters.write, {})
    ports = free_port(), free_port()
    direct, router = (f"http://127.0.0.1:{port}" for port in ports)
    fleet = (f'[[servers]]\nurl = "{direct}"\ndomain = "{name}"\n' for name in clusters.names)
    (folder / "fleet.toml").write_text("".join(fleet))
    (folder / "router.toml").write_text(f'fleet = "fleet.toml"\nclusters = "domains"\nport = {ports[1]}\n')
    server = ["-m", "uvicorn", "recipes.bench_router:instant_server", "--factory", "--port", str(ports[0])]
    commands = {
        "server": [*server, "--log-level", "warning", "--no-access-log"],
        "router": ["-m", "recipes.router", "--config", str(folder / "router.toml")],
    }
    with ExitStack() as running:
        for name, command in commands.items():
            log = folder / f"{name}.log"
            process = running.enter_context(process_group([sys.executable, *command], log=log))
        wait_until_healthy(router, process, log, what="the router")
        yield direct, router


def instant_server() -> Starlette:
    """What answers a completion at once, whole or in events."""
    choice = {"index": 0, "text": " and so on", "finish_reason": None}
    answer = {"id": "cmpl-0", "object": "text_completion", "model": "m", "choices": [choice]}

    async def complete(request: Request) -> Response:
        is_streamed = (await request.json()).get("stream")
        return StreamingResponse(events(), media_type="text/event-stream") if is_streamed else JSONResponse(answer)

    async def events() -> AsyncIterator[bytes]:
        for _ in range(NUM_EVENTS):
            yield b"data: " + json.dumps(answer).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def health(request: Request) -> Response:
        return Response()

    return Starlette(routes=[Route("/v1/completions", complete, methods=["POST"]), Route("/health", health)])


def overhead(direct: str, router: str, prompt: str, requests: int) -> dict[str, dict[str, Any]]:
    """Milliseconds that the router adds to an answer and to a stream's first event, at the median and at the 95th of
    100, from requests that take turns; a tenth of them more come first and do not count."""
    results = {}
    with httpx.Client(timeout=60) as http:
        for kind in ("answer", "stream"):
            body = {"model": "m", "prompt": prompt, "stream": kind == "stream"}
            taken_ms: dict[str, list[float]] = {"direct": [], "router": []}
            for number in tqdm(range(-requests // 10, requests), desc=kind, unit="request"):
                for side, url in (("direct", direct), ("router", router))[:: 1 if number % 2 else -1]:
                    took_ms = 1e3 * seconds(http, f"{url}/v1/completions", body)
                    taken_ms[side] += [took_ms] if number >= 0 else []
            at = {side: np.percentile(times, [50, 95]).round(3).tolist() for side, times in taken_ms.items()}
            results[kind] = {
                "direct_ms_p50": at["direct"][0],
                "overhead_ms_p50": round(at["router"][0] - at["direct"][0], 3),
                "overhead_ms_p95": round(at["router"][1] - at["direct"][1], 3),
            }
    return results


def seconds(http: httpx.Client, url: str, body: dict[str, Any]) -> float:
    """Until the first bytes of a stream, or the last of an answer."""
    began_s = time.perf_counter()
    with http.stream("POST", url, json=body) as answer:
        chunks = answer.iter_raw()
        next(chunks)
        first_s = time.perf_counter()
        for _ in chunks:  # to its end, so that the connection is kept for the next
            pass
        answer.raise_for_status()
    return (first_s if body["stream"] else time.perf_counter()) - began_s


def line(kind: str, result: dict[str, Any]) -> str:
    verdict = "PASS" if result["overhead_ms_p50"] < REQUIRED_MS else "BELOW TARGET"
    return (
        f"    {kind:<8} {result['direct_ms_p50']:.2f} ms directly; the router adds {result['overhead_ms_p50']:.2f} ms"
        f" at the median, {result['overhead_ms_p95']:.2f} ms at p95  {verdict} (below {REQUIRED_MS} ms)"
    )


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
