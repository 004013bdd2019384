"""The whole learner with the ingest log instead of the spool."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fake_fleet import TOKEN
from learner_world import World, make_records
from real_broker import running_broker
from run_learner import start
from test_learner_kills import assert_every_record_is_there_and_was_trained_once, ended
from waiting import until

from redraft.online.daemon.config import load_config
from redraft.online.records.nats_config import Nats
from redraft.online.records.publisher import Publisher
from redraft.online.records.record import encode_frame


@pytest.fixture(scope="module")
def records(random_target):
    return make_records(random_target, 200)


@pytest.fixture
def world(random_target, noisy_draft, tmp_path, monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)
    return World.make(tmp_path, random_target, noisy_draft)


def over_the_log(world, broker):
    return replace(world.config(), spool=None, ingest=broker.url)


def stored(world):
    """Records in the buffer, as the journal has them."""
    return world.last("buffer", "records") + world.last("buffer", "held_out")


async def ship(broker, records):
    publisher = Publisher(broker.url, Nats())
    publisher.write([encode_frame(record) for record in records])
    await until(lambda: publisher.counts["published_records"] == len(records))
    await asyncio.to_thread(publisher.close)


def test_a_learner_killed_before_it_acknowledges_trains_every_record_once(world, records, tmp_path):
    """The broker is killed too, between the two learners."""

    async def main():
        with running_broker(tmp_path / "nats") as broker:
            async with world.fleet():
                config = over_the_log(world, broker)  # the fleet has taken its ports
                process = start(config, "after 2 redraft.online.learning.buffer:Buffer.append")
                await ship(broker, records[:100])
                await until(lambda: stored(world) or not process.is_alive())
                await ship(broker, records[100:120])  # by now it is a second batch
                assert await ended(process) == -9
                broker.restart()
                process = start(config)
                await ship(broker, records[120:])
                await until(lambda: stored(world) == len(records))
                await until(lambda: world.last("buffer", "lag_records") < 4)
                process.terminate()
                assert await ended(process) == 0

    asyncio.run(main())
    assert_every_record_is_there_and_was_trained_once(world, records)


def test_a_broker_that_goes_away_is_a_fault_that_heals(world, records, tmp_path):
    async def main():
        with running_broker(tmp_path / "nats") as broker:
            async with world.fleet(), world.learner(spool=None, ingest=broker.url) as task:
                await ship(broker, records[:10])
                await until(lambda: stored(world) == 10, task)
                broker.kill()
                await until(
                    lambda: "broker_unreachable" in [f.what for f in world.entries("fault")], task
                )
                broker.start()
                await ship(broker, records[10:20])
                await until(lambda: stored(world) == 20, task)
        assert [f.what for f in world.entries("fault")].count("broker_unreachable") == 1

    asyncio.run(main())


def test_no_fault_of_the_broker_shows_the_password_of_its_address(world, tmp_path, monkeypatch):
    monkeypatch.setattr("redraft.online.learning.stream.SAFE_BROKER", (99, 1))
    rights = "authorization { users: [ {user: learner, password: secret} ] }"

    async def main():
        with running_broker(tmp_path / "nats", rights) as broker:
            url = broker.url.replace("nats://", "nats://learner:secret@")
            async with world.fleet(), world.learner(spool=None, ingest=url) as task:
                await until(lambda: world.entries("fault"), task)

    asyncio.run(main())
    (fault,) = world.entries("fault")
    assert fault.what == "log_may_lose_records"
    assert "nats://127.0.0.1" in fault.reason
    assert "secret" not in fault.reason


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "spool.*ingest"),
        ('spool = "s"\ningest = "nats://host:4222"', "spool.*ingest"),
        ('ingest = "host:4222"', "nats://HOST:4222"),
        ('ingest = "nats://host:4222"\n[nats]\nfleet = "a b"', "nats.fleet"),
        ('ingest = "nats://host:4222"\n[stream]\nmax_bytes = 0', "stream.max_bytes"),
        ('ingest = "nats://host:4222"\n[nats]\ncredentials = "absent"', "absent"),
    ],
)
def test_a_mistake_about_the_log_is_told(tmp_path, lines, message):
    path = tmp_path / "learner.toml"
    path.write_text(f'target = "t"\nregistry = "r"\n{lines}\n')
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_config(path)
