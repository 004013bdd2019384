"""kill -9 of the learner at every point that matters, and the recovery by the next one."""

from __future__ import annotations

import asyncio
import json

import pytest
from fake_fleet import TOKEN
from learner_world import ANYTHING, World, make_records, ship
from run_learner import start
from waiting import until

from redraft.files.artifact import PROVENANCE, manifest, verify
from redraft.files.folder import fingerprint
from redraft.online.learning.buffer import Buffer


@pytest.fixture(scope="module")
def records(random_target):
    return make_records(random_target, 260)


@pytest.fixture
def world(random_target, noisy_draft, tmp_path, monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)
    return World.make(tmp_path, random_target, noisy_draft)


async def ended(process):
    await until(lambda: not process.is_alive())
    return process.exitcode


KILLS = [
    "before 6 redraft.online.learning.candidate:Candidate.step",  # while training
    # the checkpoint exists, but does not count yet
    "before 1 redraft.online.learning.buffer:Buffer.commit_trained",
    # published, but the state does not say so
    "after 2 redraft.online.fleet.registry:Registry.publish",
]
RARER_KILLS = [
    # records stored, their file not yet removed
    "after 1 redraft.online.learning.buffer:Buffer.append",
    # the checkpoint is written, but not yet durable
    "before 2 redraft.files.artifact:_flush",
    # it counts, but the state does not say so
    "after 1 redraft.online.learning.buffer:Buffer.commit_trained",
    "before 3 redraft.files.artifact:_flush",  # while publishing
    "before 1 redraft.online.daemon.rollouts:try_canary",
    "before 1 redraft.online.daemon.cycle:roll_waves",
    "before 2 redraft.online.fleet.registry:Registry._point_current_at",  # while promoting
]


@pytest.mark.parametrize(
    "kill_at", [*KILLS, *(pytest.param(kill, marks=pytest.mark.slow) for kill in RARER_KILLS)]
)
def test_a_killed_learner_goes_on_and_neither_loses_nor_repeats_a_record(world, records, kill_at):
    async def main():
        async with world.fleet():
            for first in range(0, 180, 30):
                ship(world.spool, records[first : first + 30])
            process = start(world.config(gate=ANYTHING), kill_at)
            assert await ended(process) == -9
            process = start(world.config(gate=ANYTHING))
            ship(world.spool, records[180:])
            await until(lambda: world.registry.current() not in (None, "v000001"))
            await until(
                lambda: (
                    len({fake.version for fake in world.fakes} | {world.registry.current()}) == 1
                )
            )
            await until(lambda: not list(world.spool.glob("*.records")))
            await until(lambda: world.last("buffer", "lag_records") < 4)
            process.terminate()
            assert await ended(process) == 0

    asyncio.run(main())
    assert_every_record_is_there_and_was_trained_once(world, records)
    versions = [world.registry.path(version) for version in world.registry.versions()]
    for version in versions:
        verify(version)
    weights = [manifest(version)["model.safetensors"].sha256 for version in versions]
    assert len(set(weights)) == len(weights), "one checkpoint was published twice"


def assert_every_record_is_there_and_was_trained_once(world, records):
    config = world.config()
    assert assert_every_record_was_trained_once(config) == len(records)
    with Buffer(config.buffer_config, fingerprint(config.target)) as buffer:
        stored = {
            s.record.record_id
            for s in [*buffer.fresh(0, 10_000), *buffer.read(buffer.select_held_out(10_000))]
        }
    assert stored == {record.record_id for record in records}


def assert_every_record_was_trained_once(config):
    """The number of records that the learner has.

    The checkpoint must have trained on each exactly once as fresh.
    """
    with Buffer(config.buffer_config, fingerprint(config.target)) as buffer:
        training, num_held_out = buffer.fresh(0, 10_000), len(buffer.select_held_out(10_000))
        newest = buffer.commits()[0]
    checkpoint = config.folder / "checkpoints" / newest.checkpoint_id
    progress = json.loads((checkpoint / PROVENANCE).read_text())["progress"]
    assert progress["through"] == newest.through
    assert progress["records"] == sum(s.seq <= newest.through for s in training)
    return len(training) + num_held_out
