"""Faults around a real server while clients use it.

None of their requests may fail because of us.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
from dataclasses import replace

import pytest
from learner_world import ANYTHING, streams
from real_server import FIRST
from run_learner import start
from test_learner_kills import assert_every_record_was_trained_once, ended
from waiting import until

from redraft.files.artifact import verify
from redraft.online.fleet.registry import Registry
from redraft.online.records.record import Record
from redraft.online.records.spool import spool_files

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def world(served_world):
    return served_world


def settings(world, server, **training):
    changes = world.beside(server, records_per_candidate=32, **training)
    cfg = world.config(**changes, gate=ANYTHING)
    return replace(cfg, buffer=replace(cfg.buffer, held_out_fraction=0.4))


@contextlib.asynccontextmanager
async def traffic(server):
    """Keep streaming while the block runs; no stream may fail."""
    clients = streams([server.url])
    async with clients.flowing():
        yield clients
    assert clients.answers
    assert clients.failures == []


@contextlib.asynccontextmanager
async def learner(cfg, fault=""):
    """A learner's process while the block runs; SIGTERM must end it in good order."""
    process = start(cfg, fault)
    try:
        yield process
    finally:
        process.terminate()
        exit_code = await ended(process)
    assert exit_code == 0


def faults(world):
    return {entry.what for entry in world.entries("fault")}


def dropped(world, reason):
    return (world.last("buffer", "dropped") or {}).get(reason, 0)


KILLS = [
    # records stored, files not yet removed: they arrive twice
    "after 1 redraft.online.learning.buffer:Buffer.append",
    "before 6 redraft.online.learning.candidate:Candidate.step",  # while training
    # the checkpoint exists, but does not count yet
    "before 1 redraft.online.learning.buffer:Buffer.commit_trained",
    # while publishing: the version is written, but not yet durable
    "before 2 redraft.files.artifact:_flush",
    # the server has the candidate, and nobody knows
    "after 1 redraft.online.fleet.server:FleetServer.swap",
]


def test_serving_does_not_notice_a_learner_that_is_killed_at_every_turn(world, server):
    registry = Registry(server.registry)

    def has_adapted():
        return (
            registry.current() not in (None, FIRST)
            and server.status()["draft_version"] == registry.current()
        )

    async def main():
        cfg = settings(world, server)
        shipped_before = server.has_shipped().get("shipped_records", 0)
        async with contextlib.AsyncExitStack() as serving:
            await serving.enter_async_context(traffic(server))
            for kill in KILLS:
                assert await ended(start(cfg, kill)) == -9, kill
            async with learner(cfg):
                await until(has_adapted)
                await serving.aclose()
                capture = await until(server.has_shipped)
                await until(lambda: not spool_files(server.spool))
        assert server.status()["target_intact"]
        return cfg, capture["shipped_records"] - shipped_before

    cfg, shipped = asyncio.run(main())
    assert assert_every_record_was_trained_once(cfg) == shipped
    assert any(entry.dropped.get("duplicate") for entry in world.entries("buffer"))
    versions = [verify(registry.path(version)) for version in registry.versions()]
    weights = {files["model.safetensors"].sha256 for files in versions}
    assert len(weights) == len(versions), "one checkpoint was published twice"


def test_torn_and_flipped_records_are_counted_and_the_others_trained(world, server):
    async def main():
        async with traffic(server):
            flipped, torn = (
                await until(lambda: len(files := spool_files(server.spool)) > 2 and files)
            )[:2]
            content = bytearray(flipped.read_bytes())
            content[-9] ^= 4
            flipped.write_bytes(content)
            torn.write_bytes(torn.read_bytes()[:-20])
            async with learner(settings(world, server)):
                # The journal tells of the buffer at every poll, and of training after each step.
                await until(
                    lambda: world.last("training", "step") >= 4 and dropped(world, "corrupt")
                )
                assert dropped(world, "corrupt") == 2

    asyncio.run(main())


def test_a_loss_that_is_not_finite_reaches_no_server(world, server):
    async def main():
        wild = settings(world, server, lr=1e30, max_grad_norm=1e30, warmup_steps=1)
        async with traffic(server), learner(wild):
            await until(
                lambda: any("discarded" in entry.reason for entry in world.entries("state"))
            )
            assert "loss_not_finite" in faults(world)
            assert server.status()["draft_version"] == FIRST
        assert Registry(server.registry).versions() == [FIRST]

    asyncio.run(main())


def test_a_learner_slower_than_its_traffic_stays_close_behind_it(world, server):
    async def main():
        cfg = settings(world, server, max_lag_records=16)
        async with (
            traffic(server),
            learner(cfg, "slow 1.5 redraft.online.learning.candidate:Candidate.step"),
        ):
            await until(lambda: world.last("training", "skipped") >= 60)
        return statistics.median(entry.lag_records for entry in world.entries("buffer"))

    assert asyncio.run(main()) <= 16 + 30  # and records arriving during a step


@contextlib.contextmanager
def small_disk(folder, megabytes):
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk):
    with contextlib.suppress(OSError):
        (disk / "ballast").write_bytes(bytes(64 << 20))


def test_a_full_disk_under_the_buffer_leaves_records_in_the_spool_until_there_is_room(
    world, server, tmp_path
):
    async def main(disk):
        cfg = settings(world, server)
        async with traffic(server), learner(replace(cfg, buffer=replace(cfg.buffer, folder=disk))):
            await until(lambda: world.last("buffer", "records"))
            fill(disk)
            await until(lambda: "disk_full" in faults(world))
            waiting = await until(
                lambda: len(files := spool_files(server.spool)) > 2 and set(files)
            )
            (disk / "ballast").unlink()
            await until(lambda: not waiting & set(spool_files(server.spool)))

    with small_disk(tmp_path / "disk", 8) as disk:
        asyncio.run(main(disk))


def test_a_full_disk_under_the_spool_pauses_capture_and_nothing_else(server):
    def dropped_records():
        return server.status()["capture"].get("dropped_records_spool", 0)

    async def main():
        async with traffic(server) as clients:
            fill(server.spool)
            before = dropped_records()
            await until(lambda: dropped_records() > before, timeout_s=60)
            served = len(clients.answers)
            await until(lambda: len(clients.answers) > served + 8, timeout_s=60)
            for path in server.spool.iterdir():
                path.unlink(missing_ok=True)
            await until(lambda: spool_files(server.spool), timeout_s=60)
        await until(lambda: not list(server.spool.glob(".*")), timeout_s=60)  # no torn remains
        assert all(isinstance(record, Record) for record in server.all_records())

    with small_disk(server.spool, 1):
        asyncio.run(main())
