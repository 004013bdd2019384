"""The daemon beside real vLLM servers: it learns from what they capture, and no fault of ours fails a request."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from contextlib import ExitStack, asynccontextmanager

import pytest
from fake_fleet import TOKEN
from learner_world import QUICK, World, make_draft, until

from eval.prompts import Prompt
from heads.artifact import fingerprint
from online.config import FleetConfig, Training
from online.fleet import connected
from online.learner import provide_first_version
from recipes.demo_fleet import Traffic, free_port, served


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)


@pytest.fixture
def world(random_target, tmp_path):
    world = World.make(tmp_path, random_target, make_draft(random_target, tmp_path / "draft"), servers=0)
    (tmp_path / "token").write_text(TOKEN)
    provide_first_version(world.config(), world.registry, fingerprint(random_target))
    return world


def server(world, core=0, registry=None, port=None):
    return served(
        world.target,
        registry or world.registry.folder,
        spool=world.spool,
        token_file=world.root / "token",
        num_speculative_tokens=3,
        max_model_len=256,
        core=core,
        port=port or free_port(),
        log=world.root / f"server-{core}.log",
    )


def traffic_to(servers, clients=4):
    rng = random.Random(0)
    prompts = [Prompt(token_ids=[rng.randrange(20, 400) for _ in range(8)], domain="code") for _ in range(4000)]
    return Traffic([server.url for server in servers], {"code": prompts}, clients=clients, max_tokens=24, pause_s=0.05)


@asynccontextmanager
async def learning(world, servers):
    training = Training(
        lr=1e-3, warmup_steps=2, fresh_per_step=4, replay_per_step=12, records_per_candidate=64, sequence_length=128
    )
    fleet = FleetConfig(servers=tuple(server.url for server in servers), poll_s=0.5)
    rollout = type(QUICK)(**{**vars(QUICK), "min_drafts": 200, "window_timeout_s": 60, "swap_timeout_s": 10})
    async with world.learner(fleet=fleet, rollout=rollout, training=training) as task:
        yield task


async def versions_of(servers):
    async with connected({server.url: TOKEN for server in servers}) as fleet:
        return [(await one.status()).draft_version for one in fleet]


@pytest.mark.vllm
def test_a_real_server_ends_with_a_draft_that_was_trained_on_its_own_traffic(world):
    async def main():
        with server(world) as one:
            await one.ready()
            traffic = traffic_to([one])
            async with learning(world, [one]) as task, traffic.flowing():
                await until(lambda: world.registry.current() != "v000001", task, timeout_s=300)
            assert await versions_of([one]) == [world.registry.current()]
            assert traffic.answers
            assert traffic.failures == []

    asyncio.run(main())
    assert all(entry.dropped.get("corrupt", 0) == 0 for entry in world.entries("buffer"))


@pytest.mark.vllm
@pytest.mark.slow
def test_a_killed_server_comes_back_to_the_current_version_and_a_refusing_one_keeps_the_fleet_together(world):
    async def main():
        elsewhere = shutil.copytree(world.registry.folder, world.root / "elsewhere", symlinks=True)
        with ExitStack() as running:
            # The second server has a registry of its own, where no new version ever appears: it must refuse.
            servers = [running.enter_context(server(world)), running.enter_context(server(world, 1, elsewhere))]
            await asyncio.gather(*(each.ready() for each in servers))
            traffic = traffic_to(servers)
            async with learning(world, servers) as task:
                async with traffic.flowing():
                    await until(lambda: any(e.outcome == "refused" for e in world.entries("swap")), task, 300)
                    await until(lambda: world.last("state", "phase") in ("idle", "training"), task)
                    assert await versions_of(servers) == ["v000001", "v000001"]
                    assert traffic.failures == []
                for version in world.registry.versions():
                    shutil.copytree(world.registry.path(version), elsewhere / version, dirs_exist_ok=True)
                elsewhere.rename(world.root / "gone")
                (world.root / "elsewhere").symlink_to(world.registry.folder)
                rest = traffic_to(servers)
                async with rest.flowing():
                    await until(lambda: world.registry.current() != "v000001", task, 300)
                    assert rest.failures == []
                # kill -9 in the middle of capture; what the first server serves goes on
                kept = traffic_to(servers[:1])
                async with kept.flowing():
                    os.killpg(servers[1].process.pid, signal.SIGKILL)
                    port = int(servers[1].url.rsplit(":", 1)[1])
                    old = shutil.copytree(world.registry.folder, world.root / "old", symlinks=True)
                    (old / "current").unlink()
                    (old / "current").symlink_to("v000001")
                    again = running.enter_context(server(world, 1, old, port))
                    await again.ready()
                    await until(lambda: "server_unreachable" in {e.what for e in world.entries("fault")}, task)
                assert kept.failures == []
                deadline = asyncio.timeout(120)
                async with deadline:
                    while await versions_of(servers) != [world.registry.current()] * 2:
                        await asyncio.sleep(0.5)

    asyncio.run(main())
