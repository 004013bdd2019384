"""Several replicas in one server (data parallelism), in a real vLLM.

All of them swap, or none, and all can sleep.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from real_server import COPY, NOISY, RANDOM, running_server

FAULTS = Path(__file__).parents[2] / "helpers/planted_faults"


@pytest.fixture(scope="module")
def marker(tmp_path_factory):
    return tmp_path_factory.mktemp("marker") / "fail"


@pytest.fixture(scope="module")
def replicas(random_target, registry, marker, tmp_path_factory):
    """A server of two replicas, with planted faults, and with vLLM's routes for sleep."""
    environment = {
        "PYTHONPATH": ":".join([str(FAULTS), os.environ.get("PYTHONPATH", "")]),
        "VLLM_PLUGINS": "planted_faults",
        "VLLM_SERVER_DEV_MODE": "1",
        "FAIL_NEXT_LOAD": str(marker),
        "FORGET_FOR": str(registry / RANDOM),
    }
    folder = tmp_path_factory.mktemp("replicas")
    arguments = ["--data-parallel-size", "2"]
    with running_server(
        random_target, registry, folder, [], arguments=arguments, environment=environment
    ) as server:
        yield server


def make_prompts(seed, count):
    return np.random.default_rng(seed).integers(8, 500, (count, 40)).tolist()


def ask(server, replica, prompt):
    return server.complete(prompt, ignore_eos=True, headers={"X-data-parallel-rank": str(replica)})


def accepted(responses):
    """Accepted tokens per step, of 3, of each response."""
    return [
        response["metrics"]["speculative_decoding"]["mean_acceptance_length"] - 1
        for response in responses
    ]


def texts(responses):
    return [response["choices"][0]["token_ids"] for response in responses]


class Clients:
    """A client for each replica, which asks the same again and again."""

    def __init__(self, server):
        self.server = server
        self.prompts = make_prompts(0, 2)
        self.responses = [
            [ask(server, replica, prompt)] for replica, prompt in enumerate(self.prompts)
        ]

    @contextmanager
    def busy(self):
        """Ask while the block runs.

        Every answer is right, and at least one to each client ended meanwhile.
        """
        is_over = threading.Event()

        def go_on(replica):
            begin = len(self.responses[replica])
            while not is_over.is_set():
                self.responses[replica].append(ask(self.server, replica, self.prompts[replica]))
            return len(self.responses[replica]) - begin

        with ThreadPoolExecutor(2) as pool:
            asking = [pool.submit(go_on, replica) for replica in (0, 1)]
            try:
                yield
            finally:
                is_over.set()
            assert all(future.result() for future in asking)
        for responses in self.responses:
            assert len(set(map(tuple, texts(responses)))) == 1


@pytest.mark.vllm
@pytest.mark.slow
def test_a_swap_is_done_in_all_replicas_or_in_none(replicas, marker):
    clients, asked = Clients(replicas), []

    def measure(seed):
        """The lowest and the highest acceptance in each replica; the second one is asked more."""
        found = []
        for replica, count in ((0, 2), (1, 3)):
            responses = [ask(replicas, replica, prompt) for prompt in make_prompts(seed, count)]
            asked.extend(responses)
            found.append((min(accepted(responses)), max(accepted(responses))))
        return found

    status = replicas.status()
    assert (status["num_ranks"], status["draft_version"]) == (2, RANDOM)
    assert max(high for _, high in measure(1)) < 0.5

    with clients.busy():
        replicas.swap(COPY)
    assert min(low for low, _ in measure(2)) > 2.8, "both replicas have the new draft"

    marker.touch()
    with clients.busy():
        answer = replicas.http.post("/redraft/swap", json={"version": NOISY})
    assert not marker.exists(), "the load did not fail"
    assert (answer.status_code, f"the disk went away; {COPY} was restored" in answer.text) == (
        500,
        True,
    ), answer.text
    status = replicas.status()
    assert (status["draft_version"], status["draft_intact"], status["target_intact"]) == (
        COPY,
        True,
        True,
    )
    assert status["num_swaps"] == 1
    assert min(low for low, _ in measure(3)) > 2.8, "both replicas have the last good draft"

    with clients.busy():
        replicas.swap(NOISY)
    assert replicas.status()["num_swaps"] == 2
    for low, high in measure(4):
        assert low < 2.8
        assert high > 0.1

    asked += [response for responses in clients.responses for response in responses]
    records = replicas.records(asked, may_lack_last=True)
    assert len({record.server_id for record in records}) == 2, "both replicas record"
    assert {record.draft_version for record in records} == {RANDOM, COPY, NOISY}
    assert replicas.status()["capture"]["captured_requests"] == len(asked), "the sum of both"


@pytest.mark.vllm
@pytest.mark.slow
def test_a_server_that_sleeps_is_not_swapped_and_wakes_up_with_its_draft(replicas):
    """Level 2 drops the draft's parameters.

    20 times, because a push that is late would fail now and then.
    """
    replicas.swap(COPY)
    for number, (level, is_intact) in enumerate([(1, True), *[(2, False)] * 20]):
        assert replicas.http.post("/sleep", params={"level": level}).status_code == 200
        status = replicas.status()
        assert (status["asleep"], status["draft_intact"]) == (True, is_intact)
        answer = replicas.http.post("/redraft/swap", json={"version": NOISY})
        assert (answer.status_code, "sleeping" in answer.text) == (409, True), answer.text
        assert replicas.http.get("/is_sleeping").json() == {"is_sleeping": True}, (
            "the swap resumed it"
        )
        replicas.http.post("/wake_up").raise_for_status()
        status = replicas.status()
        assert (status["asleep"], status["draft_intact"], status["draft_version"]) == (
            False,
            True,
            COPY,
        )
        for replica, prompt in enumerate(make_prompts(5 + number, 2)):
            assert accepted([ask(replicas, replica, prompt)])[0] > 2.8
    replicas.http.post("/pause", params={"mode": "keep"}).raise_for_status()
    replicas.swap(NOISY)
    assert replicas.http.get("/is_paused").json() == {"is_paused": True}, "the swap resumed it"
    replicas.http.post("/resume").raise_for_status()
    assert (
        min(
            accepted([ask(replicas, i % 2, prompt) for i, prompt in enumerate(make_prompts(40, 4))])
        )
        < 2.8
    )
