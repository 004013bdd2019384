"""Faults in the middle of a swap, in real servers.

They answer or end, never hang, and say which draft they serve.
"""

import asyncio
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from real_server import COPY, NOISY, TOKEN, running_server

from redraft.online.fleet.server import FleetServer, UnreachableError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

FAULTS = Path(__file__).parents[2] / "helpers/faults_in_swaps"
PROMPT = np.random.default_rng(0).integers(8, 500, 40).tolist()
ENDED_S = 60


@pytest.fixture(scope="module")
def fault(tmp_path_factory):
    return tmp_path_factory.mktemp("fault") / "next"


@pytest.fixture(scope="module")
def environment(fault):
    return {
        "PYTHONPATH": ":".join([str(FAULTS), os.environ.get("PYTHONPATH", "")]),
        "VLLM_PLUGINS": "faults_in_swaps",
        "NEXT_FAULT": str(fault),
        "PAUSE_TIMEOUT_S": "5",
    }


def start_replicas(target, registry, environment, folder):
    arguments = ["--data-parallel-size", "2"]
    return running_server(
        target, registry, folder, [], arguments=arguments, environment=environment
    )


@pytest.fixture(scope="module")
def replicas(random_target, registry, environment, tmp_path_factory):
    with start_replicas(
        random_target, registry, environment, tmp_path_factory.mktemp("replicas")
    ) as server:
        yield server


def find_process(url):
    """The API process of the server."""
    port = url.rsplit(":", 1)[1]
    (found,) = (
        process
        for process in psutil.process_iter(["cmdline"])
        if {"--port", port} <= set(process.info["cmdline"] or ())
        and "vllm" in " ".join(process.info["cmdline"])
    )
    return found


def ask(server, replica):
    response = server.complete(
        PROMPT, ignore_eos=True, headers={"X-data-parallel-rank": str(replica)}
    )
    accepted = response["metrics"]["speculative_decoding"]["mean_acceptance_length"] - 1
    return response["choices"][0]["token_ids"], accepted


def served(server):
    status = server.status()
    return status["draft_version"], status["draft_intact"], status["target_intact"]


def test_a_rank_out_of_memory_leaves_the_last_good_draft_on_all(replicas, fault):
    replicas.swap(COPY)
    before = [ask(replicas, replica) for replica in (0, 1)]
    assert min(accepted for _, accepted in before) > 2.8
    fault.write_text("memory")
    answer = replicas.http.post("/redraft/swap", json={"version": NOISY})
    assert not fault.exists(), "no memory was asked for"
    assert (answer.status_code, f"{COPY} was restored" in answer.text) == (500, True), answer.text
    assert "memory" in answer.text
    assert served(replicas) == (COPY, True, True)
    assert [ask(replicas, replica) for replica in (0, 1)] == before


def test_a_pause_that_never_ends_is_given_up_and_generation_goes_on(replicas, fault):
    replicas.swap(COPY)
    before = [ask(replicas, replica) for replica in (0, 1)]
    fault.write_text("pause")
    began_s = time.monotonic()
    answer = replicas.http.post("/redraft/swap", json={"version": NOISY})
    assert not fault.exists()
    assert 5 <= time.monotonic() - began_s < 30
    assert (answer.status_code, "generation" in answer.text) == (504, True), answer.text
    assert served(replicas) == (COPY, True, True)
    assert [ask(replicas, replica) for replica in (0, 1)] == before
    replicas.swap(NOISY)
    assert served(replicas) == (NOISY, True, True)


@pytest.mark.parametrize("killed", ["kill", "read"])
def test_a_replica_killed_in_a_swap_ends_the_server_and_no_request_hangs(
    random_target, registry, environment, fault, killed, tmp_path, monkeypatch
):
    """Killed while it loads the draft, or while it reads it.

    Whoever watches the server sees none, and not the new version.
    """
    with start_replicas(random_target, registry, environment, tmp_path) as replicas:
        kill_in_swap(replicas, fault, killed, monkeypatch)


def kill_in_swap(replicas, fault, killed, monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)
    replicas.swap(COPY)
    process = find_process(replicas.url)
    answers = []

    def go_on():
        with suppress(httpx.HTTPError, AssertionError):
            while True:
                answers.append(ask(replicas, 0))

    client = threading.Thread(target=go_on)
    client.start()
    fault.write_text(killed)
    began_s = time.monotonic()
    with suppress(httpx.NetworkError, httpx.RemoteProtocolError):  # it may end before it answers
        answer = replicas.http.post("/redraft/swap", json={"version": NOISY}, timeout=ENDED_S)
        assert answer.status_code in (500, 503), answer.text
    process.wait(timeout=ENDED_S)
    client.join(timeout=ENDED_S)
    assert not client.is_alive()
    assert not fault.exists()
    assert time.monotonic() - began_s < ENDED_S
    assert len(set(map(str, answers))) <= 1, "an answer with half of a swap"

    async def look():
        server = FleetServer(replicas.url, TOKEN, httpx.AsyncClient())
        with pytest.raises(UnreachableError):
            await server.status()

    asyncio.run(look())
