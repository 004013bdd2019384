"""What breaks around a real server while clients use it: whatever it is, no request of theirs fails because of us."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import subprocess

import pytest
from conftest import NOISY, TOKEN
from learner_world import QUICK, World, until
from run_learner import start

from eval.prompts import Prompt
from online.config import DraftConfig, FleetConfig
from online.records import Record
from recipes.demo_fleet import Traffic

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def restored_registry(server):
    """The session's registry, without what a learner has put into it."""
    before = set(server.registry.iterdir())
    current = (server.registry / "current").readlink()
    (server.registry / "current").unlink()  # a learner begins with a version of its own
    yield server.registry
    for path in set(server.registry.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    (server.registry / "current").unlink(missing_ok=True)
    (server.registry / "current").symlink_to(current)


@pytest.fixture
def world(server, restored_registry, random_target, tmp_path, monkeypatch):
    """A learner's surroundings with the real server in the place of a fleet of fakes."""
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)
    server.swap(NOISY)
    return World.make(tmp_path, random_target, server.registry / NOISY, servers=0)


def settings(world, server):
    return world.config(
        registry=server.registry,
        spool=server.spool,
        draft=DraftConfig(initial=world.draft),
        fleet=FleetConfig(servers=(server.url,), poll_s=0.5),
        rollout=type(QUICK)(**{**vars(QUICK), "min_drafts": 200, "window_timeout_s": 60, "swap_timeout_s": 10}),
    )


@contextlib.asynccontextmanager
async def traffic(server):
    """Four streams without a pause while the block runs; none of them may fail."""
    rng = random.Random(0)
    prompts = [Prompt(token_ids=[rng.randrange(20, 400) for _ in range(8)], domain="code") for _ in range(2000)]
    clients = Traffic([server.url], {"code": prompts}, clients=4, max_tokens=24, pause_s=0.05)
    async with clients.flowing():
        yield clients
    assert clients.answers
    assert clients.failures == []


async def killed(process):
    await until(lambda: not process.is_alive())
    assert process.exitcode == -9


def test_serving_does_not_notice_a_learner_that_is_killed_and_killed_again(world, server):
    """While training, while publishing, and while its candidate is on its way to the server."""
    kills = ["before 6 online.candidate:Candidate.step", "before 1 online.registry:Registry.publish"]
    kills += ["after 1 online.cycle:try_canary"]

    async def main():
        cfg = settings(world, server)
        async with traffic(server):
            for kill_at in kills:
                await killed(start(cfg, kill_at))
            process = start(cfg)
            await until(lambda: (server.registry / "current").readlink().name not in ("v000001", "v000007"))
            current = (server.registry / "current").readlink().name
            await until(lambda: server.status()["draft_version"] == current)
            process.terminate()
            await until(lambda: not process.is_alive())
            assert process.exitcode == 0
        assert server.status()["target_intact"]

    asyncio.run(main())


def test_a_full_disk_under_the_spool_pauses_capture_and_nothing_else(server):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(server.spool)]
    server.spool.mkdir(exist_ok=True)
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    ballast = server.spool / "ballast"

    async def main():
        async with traffic(server) as clients:
            with contextlib.suppress(OSError):
                ballast.write_bytes(bytes(1 << 20))
            dropped = server.status()["capture"].get("dropped_records_spool", 0)
            await until(lambda: server.status()["capture"].get("dropped_records_spool", 0) > dropped, timeout_s=60)
            served = len(clients.answers)
            await until(lambda: len(clients.answers) > served + 8, timeout_s=60)
            for path in server.spool.iterdir():
                path.unlink(missing_ok=True)
            await until(lambda: list(server.spool.glob("*.records")), timeout_s=60)
        await until(lambda: not list(server.spool.glob(".*")), timeout_s=60)  # no torn rests
        assert all(isinstance(record, Record) for record in server.all_records())

    try:
        asyncio.run(main())
    finally:
        subprocess.run(["umount", "-l", str(server.spool)], check=True)
