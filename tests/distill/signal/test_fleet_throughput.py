"""Two real servers as one fleet, against the same two asked apart from each other.

Both are measured at the same time and side by side.

Both ways share the machine with one client, so the ratio is what choosing a server for each request
costs. Only a quiet machine says anything: pytest -m slow -s
tests/distill/signal/test_fleet_throughput.py
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from test_signals import make_batch

from redraft.distill.signal.endpoint import Endpoint
from redraft.distill.signal.endpoints import Endpoints
from redraft.distill.signal.sources import EndpointTarget
from redraft.engine.server import VllmServer, vllm_server
from redraft.heads.draft import Batch

ROUNDS = 5
LENGTHS = (120, 60, 200, 90, 30)


@pytest.fixture(scope="module")
def servers(
    tiny_target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[VllmServer]]:
    folder, cores = tmp_path_factory.mktemp("fleet"), max(2, os.cpu_count() or 2)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:

        def start(i: int) -> VllmServer:
            options = {"dtype": "float32", "max_model_len": 512, "cpu_cores": str(i % cores)}
            server = vllm_server(tiny_target, log=folder / f"{i}.log", **options)
            return stack.enter_context(server)

        yield list(pool.map(start, range(2)))


def make_source(servers: Sequence[VllmServer]) -> EndpointTarget:
    return EndpointTarget(
        Endpoints([Endpoint(server.url, attempts=1, concurrency=8) for server in servers]), k=20
    )


def make_work(num_rows: int, seed: int) -> Batch:
    rows = tuple(tuple(LENGTHS[(seed + i + j) % 5] for j in range(4)) for i in range(num_rows))
    return make_batch(4096, rows=rows, width=sum(LENGTHS))


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@pytest.mark.slow
@pytest.mark.vllm
def test_a_fleet_is_as_fast_as_its_servers_together(servers: list[VllmServer]) -> None:
    apart, together = [make_source([server]) for server in servers], make_source(servers)
    halves, whole = [make_work(20, 0), make_work(20, 1)], make_work(40, 0)
    ratios = []

    def half(i: int) -> None:
        apart[i](halves[i])

    with ThreadPoolExecutor() as pool:
        for round_index in range(ROUNDS + 1):
            alone_s = seconds(lambda: half(0)) + seconds(lambda: half(1))
            apart_s = seconds(lambda: list(pool.map(half, range(2))))
            together_s = seconds(lambda: together(whole))
            if round_index:  # the first warms up
                ratios.append(apart_s / together_s)
                print(
                    f"apart {apart_s:.2f} s, as a fleet {together_s:.2f} s, one after the other "
                    f"{alone_s:.2f} s"
                )
    print(
        f"throughput of the fleet / of its servers: {statistics.median(ratios):.3f} "
        f"{[f'{r:.3f}' for r in ratios]}"
    )
    assert statistics.median(ratios) >= 0.95
