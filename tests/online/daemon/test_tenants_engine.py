"""Clients that try to steer a learner beside a real server.

Wild answers, opt-outs, repetition, invented domains.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter
from dataclasses import replace

import httpx
import pytest
from real_server import COPY, FIRST, RANDOM
from waiting import until

from redraft.files.folder import fingerprint
from redraft.files.target_folder import TargetFolder
from redraft.online.daemon import alarm
from redraft.online.daemon.opening import provide_first_version
from redraft.online.fleet.registry import Registry, copy_model
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.gate import Policy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HOSTILE = {"temperature": 2, "allowed_token_ids": [300, 301, 302, 303]}
OPTED_OUT = {"X-Redraft-Opt-Out": "1"}
GATE = Policy(min_requests=20, min_domain_requests=10)


@pytest.fixture
def world(served_world, monkeypatch):
    monkeypatch.setattr(alarm, "REST_S", 0.0)
    return served_world


@contextlib.asynccontextmanager
async def clients(server, count, make_request):
    """Send requests while the block runs.

    `make_request(n)` returns prompt, headers and parameters.
    """
    numbers = itertools.count()

    async def client(http):
        while True:
            prompt, headers, parameters = make_request(next(numbers))
            body = {
                "model": "m",
                "prompt": prompt,
                "max_tokens": 24,
                "temperature": 0,
                **parameters,
            }
            (
                await http.post(f"{server.url}/v1/completions", json=body, headers=headers)
            ).raise_for_status()

    async with httpx.AsyncClient(timeout=60) as http:
        running = [asyncio.create_task(client(http)) for _ in range(count)]
        try:
            yield
            assert not any(task.done() for task in running), "a request failed"
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def make_prompt(seed):
    rng = random.Random(seed)
    return [rng.randrange(20, 400) for _ in range(8)]


def ask_honestly(number):
    return make_prompt(f"honest {number}"), {"X-Redraft-Tenant": f"honest-{number % 5}"}, {}


def ask_in_invented_domains(number):
    prompt = make_prompt(f"flood {number % 400}")
    return prompt, {"X-Redraft-Tenant": "flood", "X-Redraft-Domain": f"invented-{number}"}, {}


def ask_wildly(number):
    """Answers that no draft predicts, and that are recorded."""
    return make_prompt(f"wild {number}"), {"X-Redraft-Tenant": "wild"}, {"temperature": 2}


def promote_copy(world, registry, version):
    name = registry.publish(
        lambda folder: copy_model(registry.folder / version, folder),
        target_fingerprint=fingerprint(world.target), provenance={}, evaluation={},
    )  # fmt: skip
    registry.promote(name)
    return name


def settings(world, server):
    changes = world.beside(server, records_per_candidate=100_000)
    return {
        **changes,
        "gate": GATE,
        "buffer": replace(world.config().buffer, held_out_fraction=0.4),
    }


def told(world, words):
    return [entry.reason for entry in world.entries("state") if words in entry.reason]


def count_judges(world, settings):
    """Requests of the gate's evidence by tenant."""
    cfg = world.config(**settings)
    with Buffer(cfg.buffer_config, fingerprint(world.target)) as buffer:
        limits = {"at_least": GATE.min_requests, "at_least_of_domain": GATE.min_domain_requests}
        stored = list(
            buffer.read(buffer.select_held_out(cfg.judging.held_out_per_domain, **limits))
        )
    return Counter({one.record.request_id: one.record.tenant for one in stored}.values())


def test_no_client_rolls_the_fleet_back_or_owns_the_evidence_and_a_bad_draft_still_goes(
    world, server
):
    registry = Registry(server.registry)
    provide_first_version(
        world.config(**settings(world, server)), registry, TargetFolder.open(world.target)
    )
    good = promote_copy(world, registry, COPY)

    async def attack():
        async with world.learner(**settings(world, server)) as task:
            await until(lambda: server.status()["draft_version"] == good, task)
            async with clients(server, 6, ask_honestly):
                await until(lambda: world.last("buffer", "held_out") >= 60, task)
            async with clients(server, 6, ask_in_invented_domains):
                before = world.last("buffer", "held_out")
                await until(lambda: world.last("buffer", "held_out") >= before + 100, task)
            async with clients(server, 6, ask_wildly):
                # its share of the evidence is full long before
                before = world.last("buffer", "records")
                await until(lambda: world.last("buffer", "records") >= before + 1000, task)
            so_far = len(told(world, f"stays on {good}"))
            async with clients(server, 6, lambda n: (make_prompt(n), OPTED_OUT, HOSTILE)):
                await until(lambda: len(told(world, f"stays on {good}")) >= so_far + 4, task)
            assert server.status()["draft_version"] == good

    asyncio.run(attack())
    assert registry.promoted() == [FIRST, good]
    assert "acceptance_alarm" in {entry.what for entry in world.entries("fault")}
    assert [entry for entry in world.entries("swap") if entry.outcome == "rolled_back"] == []
    judges = count_judges(world, settings(world, server))
    assert max(judges["flood"], judges["wild"]) <= 0.2 * judges.total()
    assert judges["wild"] > 0
    assert judges.total() >= GATE.min_requests

    bad = promote_copy(world, registry, RANDOM)

    async def serve_bad():
        async with world.learner(**settings(world, server)) as task:
            await until(lambda: server.status()["draft_version"] == bad, task)
            async with clients(server, 6, ask_honestly):
                await until(lambda: server.status()["draft_version"] == good, task)
                await until(lambda: told(world, f"went back to {good}"), task)

    asyncio.run(serve_bad())
    assert registry.current() == good
