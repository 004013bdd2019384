"""The soak's attacker against the real tap and page, and the plugin's routes.

The routes run on a server without an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from pathlib import Path

import pytest
from waiting import until

from benchmarks.soak.attack import BURST, MAX_LOG_BYTES, Attack, Door
from benchmarks.soak.supervisor import Supervised
from redraft.engine.process import free_port

HELPER = str(Path(__file__).parents[2] / "helpers" / "attacked.py")
API = (b"/v1/completions", b"/v1/models", b"/health", b"/redraft/status")
STREAMS = "/v1/completions"


@contextlib.asynccontextmanager
async def supervised(folder, **commands):
    """Processes by name, each given its port, all of them well."""
    processes = {
        name: Supervised(
            name, [sys.executable, *map(str, command)], folder / f"{name}.log", port=port
        )
        for name, (port, command) in commands.items()
    }
    keeping = [asyncio.create_task(process.supervise()) for process in processes.values()]
    try:
        await until(
            lambda: all(process.was_up(time.monotonic()) for process in processes.values()),
            timeout_s=120,
        )
        yield processes
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [20261127])
def test_two_thousand_mutated_requests_end_nothing_cut_nothing_and_fill_no_log(
    tmp_path, random_target, seed
):
    async def main():
        server, page, tap = (free_port() for _ in range(3))
        run = ("-m", "redraft.recipes.cli")
        tapped = (
            f"http://127.0.0.1:{server}",
            "--target",
            random_target,
            "--spool",
            tmp_path / "spool",
        )
        async with supervised(
            tmp_path,
            server=(server, [HELPER, "server", server]),
            page=(page, [HELPER, "page", page]),
            tap=(tap, [*run, "tap", *tapped, "--port", tap, "--admin-port", 0]),
        ) as processes:
            doors = [
                Door(
                    process=processes["tap"], port=tap, paths=API, generates=True, streams=STREAMS
                ),
                Door(
                    process=processes["page"],
                    port=page,
                    paths=(b"/overview.json", b"/metrics", b"/page.js"),
                ),
                Door(
                    process=processes["server"],
                    port=server,
                    paths=(b"/redraft/status", b"/redraft/swap"),
                    streams=STREAMS,
                ),
            ]
            attack = Attack(doors=doors, seed=seed)
            for number in range(2000 // BURST):
                await attack.burst(doors[number % len(doors)])
        return attack.describe()

    found = asyncio.run(main())
    assert found["problems"] == []
    assert found["requests"] == 2000
    assert (found["ended"], found["honest_streams_cut"]) == (0, 0)
    assert found["honest_streams"] == 2000 // BURST
    assert found["most_log_bytes"] < MAX_LOG_BYTES


WEAK = """
import asyncio, os, sys

async def handle(reader, writer):
    sent = await reader.read(1 << 16)
    if {condition}:
        {act}
    writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 8\\r\\n\\r\\n" + b'{{"a": 1}}')
    await writer.drain()
    writer.close()

async def main():
    server = await asyncio.start_server(handle, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("condition", "act", "found"),
    [
        ("False", "pass", {"ended": 0, "problems": 0}),
        ("b'Upgrade' in sent", "os._exit(1)", {"ended": 1}),
        ("b'Upgrade' in sent", "print('x' * 5000, flush=True)", {"ended": 0, "problems": 1}),
        (
            "b'python-httpx' in sent",
            "await asyncio.sleep(1); return writer.close()",
            {"honest_streams_cut": 1},
        ),
        ("b'redraft/swap' in sent", "writer.write(b'draft_version')", {"ended": 0, "problems": 20}),
    ],
)
def test_each_weakness_of_a_server_is_found(tmp_path, condition, act, found):
    async def main():
        port = free_port()
        code = WEAK.format(condition=condition, act=act)
        async with supervised(tmp_path, weak=(port, ["-c", code, port])) as processes:
            attack = Attack(
                doors=[Door(process=processes["weak"], port=port, paths=(b"/redraft/swap",))],
                seed=3,
            )
            await attack.burst(attack.doors[0])
        return attack.describe()

    seen = asyncio.run(main())
    assert seen["requests"] == BURST
    seen["problems"] = len(seen["problems"])
    assert {name: seen[name] for name in found} == found
