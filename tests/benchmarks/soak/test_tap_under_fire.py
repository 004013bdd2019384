"""The real tap under the soak's clients, hostile requests and kills.

A small server without an engine is behind it.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time

import pytest
from fake_completions import served
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from waiting import until

from benchmarks.soak.attack import Attack, Door
from benchmarks.soak.clients import Clients
from benchmarks.soak.supervisor import Supervised
from redraft.engine.process import free_port
from redraft.engine.prompts import Prompt


def build_app():
    """Answers as an engine does.

    With a finish reason for every choice, and [DONE] at the end of a stream.
    """

    def choices(n, reason):
        return {"choices": [{"index": i, "text": "x", "finish_reason": reason} for i in range(n)]}

    async def stream(n):
        for reason in (*[None] * 14, "stop"):
            yield f"data: {json.dumps(choices(n, reason))}\n\n"
            await asyncio.sleep(0.02)
        yield "data: [DONE]\n\n"

    async def complete(request: Request) -> Response:
        try:
            body = json.loads(await request.body())
            n, is_stream = body.get("n", 1), body["stream"]
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            return JSONResponse({"error": {"message": "no request"}}, 400)
        if is_stream:
            return StreamingResponse(stream(n), media_type="text/event-stream")
        await asyncio.sleep(0.2)
        return JSONResponse(choices(n, "stop"))

    paths = ("/v1/completions", "/v1/chat/completions")
    return Starlette(
        routes=[
            Route("/health", lambda _: Response()),
            *(Route(p, complete, methods=["POST"]) for p in paths),
        ]
    )


@pytest.mark.slow
def test_every_failure_of_a_killed_tap_and_server_is_told_or_seen(tmp_path, random_target):
    async def main():
        tap = start_tap(tmp_path, random_target)
        clients = Clients(
            {f"http://127.0.0.1:{tap.port}": tap.was_up},
            [Prompt(token_ids=[1, 2])],
            random.Random(0),
            8,
            0.02,
        )
        is_over, server_port = asyncio.Event(), int((tmp_path / "port").read_text())
        keeping = asyncio.create_task(tap.supervise())
        tally = clients.tally
        try:
            async with served(build_app(), server_port) as server:
                await until(lambda: tap.was_up(time.monotonic()))
                talking = asyncio.create_task(clients.run(is_over))
                for _ in range(2):
                    before = tally.counts["answered"]
                    await until(lambda before=before: tally.counts["answered"] >= before + 20)
                    tap.kill()
                    await until(lambda: tap.was_up(time.monotonic()))
                before = tally.counts["answered"]
                await until(lambda before=before: tally.counts["answered"] >= before + 20)
                server.cut_off()  # in the middle of streams
                await until(lambda: tally.told["in the stream"])
                attack = Attack(
                    doors=[Door(process=tap, port=tap.port, paths=(b"/health",), generates=True)],
                    seed=1,
                )
                await attack.burst(attack.doors[0])
                tap.signal(signal.SIGSTOP)
                await asyncio.sleep(0.5)
                tap.signal(signal.SIGCONT)
                before = tally.counts["answered"]
                await until(lambda: tally.counts["answered"] >= before + 20)
            await until(lambda: tally.told["503"])  # the server is gone
            is_over.set()
            await talking
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        assert tally.untold == []
        assert attack.ended == 0
        assert not [problem for problem in attack.problems if "honest" not in problem], (
            "/health is no JSON here"
        )
        assert tally.counts["cut"] > 0
        assert all(run.is_wanted for run in tap.runs)

    asyncio.run(main())


def start_tap(folder, target):
    """The tap, not yet running, in front of a server on the port that the file `port` names."""
    port, server_port = free_port(), free_port()
    (folder / "port").write_text(str(server_port))
    command = [
        *(sys.executable, "-m", "redraft.recipes.cli", "tap", f"http://127.0.0.1:{server_port}"),
        *("--target", str(target), "--spool", str(folder / "spool")),
        *("--port", str(port), "--admin-port", "0"),
    ]
    return Supervised("tap", command, folder / "log", port=port)
