"""The parts of a soak that inject and watch.

The supervisor, the small disks, and the witness of the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import re
import signal
import sys
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import psutil
import pytest
import zstandard
from real_broker import running_broker
from waiting import in_event_loop, until

from benchmarks.soak import poison, supervisor
from benchmarks.soak.disks import mounted, unmount_below
from benchmarks.soak.faults import Fault, inject, shuffle
from benchmarks.soak.soak import Shipper, take_free
from benchmarks.soak.supervisor import Supervised
from benchmarks.soak.witness import Witness, is_acknowledgement
from redraft.engine.process import free_port
from redraft.online.records.nats_config import Nats, StreamLimits
from redraft.online.records.nats_link import connect
from redraft.online.records.publisher import Publisher
from redraft.online.records.record import (
    MAX_RECORD_BYTES,
    decode_record,
    encode_frame,
    encode_record,
    read_frames,
)

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture(autouse=True)
def quick_supervisor(monkeypatch):
    monkeypatch.setattr(supervisor, "POLL_S", 0.02)
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.02)
    monkeypatch.setattr(supervisor, "LIVENESS_PERIOD_S", 0.05)


@contextlib.asynccontextmanager
async def supervised(process):
    keeping = asyncio.create_task(process.supervise())
    try:
        await until(lambda: process.pid)
        yield process
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@in_event_loop
async def test_a_killed_process_is_started_again_and_its_end_was_wanted(tmp_path):
    async with supervised(Supervised("sleeper", SLEEP, tmp_path / "log")) as process:
        await until(lambda: process.run.ready_s)
        first, began_s = process.pid, time.monotonic()
        assert process.was_up(began_s)
        process.kill()
        await until(lambda: process.pid not in (None, first))
        assert process.runs[0].is_wanted
        assert process.runs[0].exit_status == -signal.SIGKILL
        assert not process.was_up(began_s)
    assert process.pid is None
    assert process.runs[-1].is_wanted


@in_event_loop
async def test_a_process_is_up_once_it_listens_on_its_port(tmp_path):
    port, may_listen = free_port(), tmp_path / "may-listen"
    server = (
        f"import pathlib, socket, time\nwhile not pathlib.Path({str(may_listen)!r}).exists(): "
        "time.sleep(0.05)\n"
        f"listening = socket.create_server(('127.0.0.1', {port}))\ntime.sleep(600)"
    )
    async with supervised(
        Supervised("late", [sys.executable, "-c", server], tmp_path / "log", port=port)
    ) as process:
        began_s = time.monotonic()
        assert not process.was_up(began_s)
        may_listen.touch()
        await until(lambda: process.was_up(time.monotonic()))
        assert not process.was_up(began_s)


@in_event_loop
async def test_a_process_that_ends_by_itself_was_not_wanted_to(tmp_path):
    async with supervised(
        Supervised("ender", [sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")
    ) as ender:
        await until(lambda: len(ender.runs) > 1)
        assert not ender.runs[0].is_wanted
        assert ender.runs[0].exit_status == 3


@in_event_loop
async def test_a_process_that_fails_its_liveness_probe_is_started_again(tmp_path):
    is_alive = True

    async def probe():
        if not is_alive:
            raise ConnectionError

    async with supervised(
        Supervised("sleeper", SLEEP, tmp_path / "log", liveness=probe)
    ) as process:
        first = process.pid
        os.killpg(first, signal.SIGSTOP)
        is_alive = False
        await until(lambda: process.num_liveness_kills)
        is_alive = True
        await until(lambda: process.pid not in (None, first))
        assert process.runs[0].is_wanted


@pytest.fixture
def disk(tmp_path):
    with mounted(tmp_path / "image", tmp_path / "disk", 16 << 20) as disk:
        if not disk.is_real:
            pytest.skip("mounting a small disk needs root")
        yield disk


def test_a_full_disk_refuses_the_next_byte_until_it_is_freed(disk):
    (disk.folder / "kept").write_bytes(b"kept")
    disk.fill()
    with pytest.raises(OSError, match=f"Errno {errno.ENOSPC}") as error:
        (disk.folder / "new").write_bytes(bytes(1 << 20))
    assert error.value.errno == errno.ENOSPC
    disk.free()
    (disk.folder / "new").write_bytes(bytes(1 << 20))
    assert (disk.folder / "kept").read_bytes() == b"kept"


def test_a_frozen_disk_lets_nobody_write_until_it_thaws(disk, tmp_path):
    longest_s = 0.0
    thawing = disk.freeze(2, tmp_path / "log")
    while thawing.poll() is None:
        began_s = time.monotonic()
        (disk.folder / "probe").write_bytes(b"waits")
        longest_s = max(longest_s, time.monotonic() - began_s)
    assert thawing.wait() == 0
    assert longest_s > 1


def test_disks_left_by_a_killed_soak_are_unmounted(disk, tmp_path):
    (disk.folder / "there").touch()
    unmount_below(tmp_path / "elsewhere")
    assert (disk.folder / "there").exists()
    unmount_below(tmp_path)
    assert not (disk.folder / "there").exists()


def test_a_bomb_unpacks_to_almost_as_much_as_a_record_may():
    bomb = poison.make_bomb()
    assert len(bomb) < 3000
    assert (
        60_000_000
        <= zstandard.frame_content_size(bomb[len(poison.frame_around(b"")) :])
        <= MAX_RECORD_BYTES
    )


def test_hostile_chains_states_and_floods_are_what_they_are_named():
    chain = poison.make_chain(1, (16 << 20) // 4, 100, 160_000)
    joined = sum(4 * decode_record(frame).num_tokens for frame in chain)
    assert joined > 1_600_000_000
    assert sum(map(len, chain)) < 320_000
    states = poison.make_float8(0, 40 << 20)
    assert len(states) < 1_000_000, "a message of the log"
    assert decode_record(states).num_bytes > 40_000_000
    flood = [record for _, record in read_frames(poison.make_flood(7, 20, poison.TARGET))]
    assert {record.tenant for record in flood} == {"flood"}
    assert len({record.record_id for record in flood}) == 20


@in_event_loop
async def test_the_witness_hears_what_is_acknowledged_and_nothing_else(tmp_path):
    config, heard = Nats(fleet="soak"), []
    with running_broker(tmp_path / "store") as broker:
        witness = Witness(broker.url, config, heard.append)
        listening = asyncio.create_task(witness.listen())
        client = await connect(broker.url, config)
        publisher = Publisher(broker.url, config)
        frames = [encode_frame(poison.make_record(number)) for number in range(20)]
        try:
            await until(lambda: witness.is_listening)
            headers = {
                "Nats-Msg-Id": "boot/early/0"
            }  # there is no stream yet: nobody acknowledges it
            await client.publish(
                config.subject(""), bytes(frames[0]), reply="_INBOX.servers.early", headers=headers
            )
            await client.flush()
            await client.jetstream().add_stream(
                name=config.stream,
                subjects=[config.subjects],
                max_bytes=StreamLimits.max_bytes >> 8,
            )
            publisher.write(frames)
            await until(lambda: len(witness.acked) == 20)
            assert set(witness.acked) == {frame.record_id for frame in frames}
            assert b"".join(sorted(heard)) == b"".join(sorted(map(bytes, frames)))
            # a message under the id of another record, and one that is no record
            headers = {"Nats-Msg-Id": "boot/other/0"}
            for data in (bytes(frames[0]), b"no record"):
                await client.jetstream().publish(config.subject(""), data, headers=headers)
            await client.flush()
            assert len(witness.acked) == 20
        finally:
            listening.cancel()
            publisher.close()
            await client.close()


@in_event_loop
async def test_the_witness_may_hear_an_answer_before_its_record():
    frame, heard = encode_frame(poison.make_record(0)), []
    witness = Witness("nats://127.0.0.1:1", Nats(fleet="soak"), heard.append)
    subject = "_INBOX.servers.7"
    record = SimpleNamespace(
        headers={"Nats-Msg-Id": frame.record_id}, reply=subject, data=bytes(frame)
    )
    await witness._on_answer(
        SimpleNamespace(subject=subject, data=b'{"stream": "redraft-soak", "seq": 3}')
    )
    assert not witness.acked
    await witness._on_record(record)
    assert set(witness.acked) == {frame.record_id}
    assert heard == [bytes(frame)]


def test_only_a_stored_message_is_acknowledged():
    assert is_acknowledgement(b'{"stream": "redraft-soak", "seq": 3}')
    assert is_acknowledgement(b'{"stream": "redraft-soak", "seq": 3, "duplicate": true}')
    assert not is_acknowledgement(b'{"error": {"code": 503}, "stream": "redraft-soak", "seq": 0}')
    assert not is_acknowledgement(b"")
    assert not is_acknowledgement(b"[]")


def test_each_fault_comes_before_any_comes_again_and_waits_for_its_target():
    async def act(world, target):
        raise AssertionError

    faults = [Fault("kill", name, act) for name in "abcd"]
    deck = shuffle(faults, 6, random.Random(3))
    assert sorted(fault.target for fault in deck[:4]) == list("abcd")
    assert deck == shuffle(faults, 6, random.Random(3))
    first = deck[0].target
    taken = take_free(deck, {first})
    assert taken is not None
    assert taken.target != first
    assert len(deck) == 5
    assert take_free(deck, set("abcd")) is None


def test_a_fault_whose_target_stays_down_or_that_fails_itself_is_not_survived(monkeypatch):
    async def unwell(world, target):
        return "connection refused"

    monkeypatch.setattr("benchmarks.soak.faults.find_problem", unwell)
    monkeypatch.setattr("benchmarks.soak.faults.until_well.__defaults__", (0.1,))

    async def harmless(world, target):
        pass

    async def failing(world, target):
        raise OSError(5, "broken")

    found = [asyncio.run(inject(None, Fault("kill", "tap-1", act))) for act in (harmless, failing)]
    assert re.search(r"tap-1\b.*\b0 s: .*refused", found[0].problem)
    assert "OSError(5, 'broken')" in found[1].problem


@in_event_loop
async def test_killing_a_process_and_its_engine_reaches_the_right_one(tmp_path):
    parent = "import subprocess, sys, time\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(600)"
    async with supervised(
        Supervised("parent", [sys.executable, "-c", parent], tmp_path / "log")
    ) as process:
        await until(lambda: psutil.Process(process.pid).children())
        child = psutil.Process(process.pid).children()[0]
        with pytest.raises(LookupError):
            process.kill(child="EngineCore")
        process.kill(child="sleep")
        await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        assert process.run.ended_s is None
        assert process.run.is_wanted


def test_a_record_whose_text_a_full_disk_refused_is_not_one_that_the_learner_lost():
    class Disk:
        is_full = True

        def write(self, frames):
            if self.is_full:
                raise OSError(errno.ENOSPC, "full")

    def segment(request, number):
        record = poison.make_record(7, request_id=request, sequence=number)
        if not number:
            return record
        begin = record.num_tokens + 6 * (number - 1)
        rows = np.frombuffer(record.row_positions, "i4") + begin - 4
        return msgspec.structs.replace(
            record, context=b"", context_begin=begin, row_positions=rows.tobytes()
        )

    refused = [segment("cut", number) for number in range(3)]
    whole = [segment("whole", number) for number in range(2)]
    self_contained = poison.make_record(7, request_id="cut", sequence=4)
    disk = Disk()
    shipper = Shipper(disk)
    shipper.ship(encode_record(refused[0]))
    disk.is_full = False
    for record in (*refused[1:], *whole, self_contained):
        shipper.ship(encode_record(record))
    assert shipper.dropped == {record.record_id for record in refused}
    assert shipper.shipped == {record.record_id for record in (*whole, self_contained)}
