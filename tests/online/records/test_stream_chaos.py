"""kill -9 of both ends of the ingest log and of the broker between them.

A lost broker, and a broker with a full disk.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import time
from contextlib import suppress

import pytest
from real_broker import running_broker
from run_stream import Ends, make_record
from test_stream import make_source, take_all, until_left
from waiting import PATIENCE_S, in_event_loop, until

from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig
from redraft.online.records.nats_config import Nats
from redraft.online.records.nats_link import BrokerError, probe
from redraft.online.records.publisher import Publisher
from redraft.online.records.record import encode_frame

FRAME_BYTES = len(encode_frame(make_record(0)))


@pytest.fixture
def own_broker(tmp_path):
    with running_broker(tmp_path / "store") as broker:
        yield broker


@pytest.mark.parametrize(
    ("count", "rows", "per_s", "kills"),
    [(240, 60, 60, 3), pytest.param(6000, 200, 150, 24, marks=pytest.mark.slow)],
)
@in_event_loop
async def test_whatever_is_killed_no_acknowledged_record_is_lost_and_none_is_stored_twice(
    own_broker, tmp_path, count, rows, per_s, kills
):
    rng = random.Random(0)
    ends = Ends(own_broker.url, tmp_path, count=count, rows=rows, per_s=per_s)
    try:
        strikes = [own_broker.restart, ends.restart_consumer, ends.restart_publisher]
        for number in range(kills):
            before = len(ends.acknowledged())
            # Working again. The publisher may have caught up in one batch, before this looked.
            await until(lambda before=before: len(ends.acknowledged()) > before or before == count)
            time.sleep(rng.random() * 0.3)
            strikes[number % 3]()
        await until(
            lambda: len(ends.acknowledged()) == count,
            timeout_s=600,
            about=lambda: len(ends.acknowledged()),
        )
        await until_left(own_broker, Nats(), 0)
    finally:
        ends.close()
    stored = ends.stored()
    assert ends.acknowledged() - set(stored) == set()
    assert len(stored) == len(set(stored)) == count


@pytest.mark.parametrize(
    ("sent", "gone_s"), [(200, 0), pytest.param(3000, 60, marks=pytest.mark.slow)]
)
@in_event_loop
async def test_while_the_broker_is_gone_memory_is_bounded_and_the_newest_records_are_kept(
    own_broker, sent, gone_s
):
    kept = 30
    publisher = Publisher(own_broker.url, Nats(), max_waiting_bytes=kept * (FRAME_BYTES + 200))
    with Buffer(BufferConfig(held_out_fraction=0), "target") as buffer:
        source = make_source(own_broker, Nats(), buffer)
        await source.take()
        publisher.write([encode_frame(make_record(0))])
        assert await take_all(source, 1) == {"stored": 1}
        await until_left(own_broker, Nats(), 0)
        own_broker.kill()
        took_s = []
        for number in range(1, sent + 1):
            began_s = time.monotonic()
            publisher.write([encode_frame(make_record(number))])
            took_s.append(time.monotonic() - began_s)
            assert publisher.status()["waiting_bytes"] <= publisher.max_waiting_bytes
            await asyncio.sleep(gone_s / sent)
        assert statistics.median(took_s) < 0.1, "serving waits for nothing"
        await until(lambda: "127.0.0.1" in publisher.last_error, about=publisher.status)
        dropped = publisher.status()["dropped_records_broker"]
        assert sent - kept - 2 <= dropped <= sent - kept + 2
        own_broker.start()
        with pytest.raises(BrokerError):
            await source.take()
        assert await take_all(source, sent - dropped) == {"stored": sent - dropped}
        numbers = [int(s.record.request_id.removeprefix("cmpl-")) for s in buffer.fresh(1, 1000)]
        assert sorted(numbers) == list(range(dropped + 1, sent + 1)), "the oldest were dropped"
        # counted after the broker's receipt, which may follow the delivery
        await until(
            lambda: publisher.counts["published_records"] >= 1 + sent - dropped,
            about=publisher.status,
        )
        assert publisher.status()["published_records"] == 1 + sent - dropped
        await source.close()
    publisher.close()


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 24 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@in_event_loop
async def test_a_full_disk_costs_records_and_capture_resumes_with_the_space(small_disk):
    """The broker falls silent and stays silent when there is space again.

    The probe says to restart it.
    """
    with (
        running_broker(small_disk / "store") as broker,
        Buffer(BufferConfig(held_out_fraction=0), "target") as buffer,
    ):
        source = make_source(broker, Nats(), buffer, max_bytes=16 << 20)
        publisher = Publisher(broker.url, Nats(), max_waiting_bytes=20 * FRAME_BYTES)
        await source.take()
        publisher.write([encode_frame(make_record(0))])
        assert await take_all(source, 1) == {"stored": 1}
        await probe(broker.url, Nats())

        fill(small_disk / "filler")
        number, deadline_s = 0, time.monotonic() + 600
        while not publisher.status().get("dropped_records_broker"):
            for _ in range(10):
                number += 1
                began_s = time.monotonic()
                publisher.write([encode_frame(make_record(number))])
                assert time.monotonic() - began_s < 0.2, "serving waits for nothing"
            assert time.monotonic() < deadline_s, publisher.status()
            await source_survives(source)
        with pytest.raises(BrokerError):
            await probe(broker.url, Nats(), timeout_s=1)

        (small_disk / "filler").unlink()
        while True:  # what an orchestrator does
            try:
                await probe(broker.url, Nats(), timeout_s=2)
                break
            except BrokerError:
                broker.restart()
        publisher.write([encode_frame(make_record(number + 1))])
        await until(lambda: publisher.status()["waiting_bytes"] == 0, about=publisher.status)
        await until_stored(source, buffer, f"cmpl-{number + 1}")
        assert len(buffer.fresh(0, 1000)) == publisher.counts["published_records"], (
            "acknowledged, and not stored"
        )
        await source.close()
        publisher.close()


def fill(path):
    with path.open("wb") as file, suppress(OSError):
        while True:
            file.write(os.urandom(1 << 16))
            file.flush()


async def source_survives(source):
    """The learner's end may find no records, or no broker; it continues."""
    with suppress(BrokerError):
        await source.take()


async def until_stored(source, buffer, request_id):
    async with asyncio.timeout(PATIENCE_S):
        while request_id not in {s.record.request_id for s in buffer.fresh(0, 1000)}:
            await source_survives(source)
