"""The daemon from end to end, with a fake fleet and records of a small target."""

from __future__ import annotations

import asyncio

import pytest
from fake_fleet import TOKEN
from learner_world import World, make_draft, make_records, ship, until

from online.journal import GateEntry


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)


@pytest.fixture(scope="session")
def noisy_draft(random_target, tmp_path_factory):
    return make_draft(random_target, tmp_path_factory.mktemp("noisy-draft"))


@pytest.fixture(scope="session")
def records(random_target):
    return make_records(random_target, 600)


@pytest.fixture
def world(random_target, noisy_draft, tmp_path):
    return World.make(tmp_path, random_target, noisy_draft)


def test_a_better_draft_reaches_every_server(world, records):
    async def main():
        async with world.fleet(), world.learner() as task:
            ship(world.spool, records[:300])
            await until(lambda: world.registry.current() not in (None, "v000001"), task)
            version = world.registry.current()
            await until(lambda: all(fake.version == version for fake in world.fakes), task)

    asyncio.run(main())
    (first, *_) = [entry for entry in world.entries("gate") if entry.verdict == "promote"]
    assert isinstance(first, GateEntry)
    assert first.low > 0.02
