"""The daemon beside real vLLM servers.

It learns from captured traffic, and no fault of ours fails a request.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import model_runners
import pytest
from fake_fleet import TOKEN
from learner_world import ANYTHING, ON_AN_ENGINE, World, make_draft, served_by, streams
from real_server import FIRST, running_server
from test_learner import with_other_tokenizer
from waiting import until

from benchmarks.demo.fleet import start_server
from redraft.engine.process import free_port
from redraft.files.target_folder import TargetFolder
from redraft.online.daemon.opening import provide_first_version
from redraft.online.fleet.discovery import FleetConfig
from redraft.online.fleet.registry import Registry
from redraft.online.fleet.server import connected
from redraft.online.learning.gate import Policy


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)


@pytest.fixture
def world(random_target, tmp_path):
    world = World.make(
        tmp_path, random_target, make_draft(random_target, tmp_path / "draft"), servers=0
    )
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    provide_first_version(world.config(), world.registry, TargetFolder.open(random_target))
    return world


def serving(world, core=0, registry=None, port=None, target=None):
    return start_server(
        target or world.target,
        registry or world.registry.folder,
        spool=world.spool,
        token_file=world.root / "token",
        num_speculative_tokens=3,
        max_model_len=256,
        mode="eager",
        core=core,
        port=port or free_port(),
        log=world.root / f"server-{core}.log",
    )


@asynccontextmanager
async def learning(world, servers, **changes):
    fleet = FleetConfig(servers=tuple(server.url for server in servers), poll_s=0.5)
    async with world.learner(fleet=fleet, rollout=ON_AN_ENGINE, gate=ANYTHING, **changes) as task:
        yield task


async def all_serve(servers, version, timeout_s=300):
    """Return once every server serves the version returned by `version()`."""
    async with (
        asyncio.timeout(timeout_s),
        connected({server.url: TOKEN for server in servers}) as fleet,
    ):
        while {(await one.status()).draft_version for one in fleet} != {version()}:
            await asyncio.sleep(0.5)


def replace_by_link(folder, registry):
    folder.rename(folder.with_name(f"{folder.name}-before"))
    folder.symlink_to(registry)


def learn_from_its_traffic(world, server):
    """Wait until the server has a version that a learner trained on its traffic."""
    registry = Registry(server.registry)

    async def main():
        traffic = streams([server.url])
        changes = world.beside(server, records_per_candidate=48)
        # So few requests prove little: any gain will do, as long as it is proven.
        gate = Policy(min_gain=0, confidence=0.6, min_requests=10, min_domain_requests=10)
        async with world.learner(**changes, gate=gate) as task, traffic.flowing():
            await until(lambda: registry.current() not in (None, FIRST), task)
        assert server.status()["draft_version"] == registry.current()
        assert traffic.answers
        assert traffic.failures == []

    asyncio.run(main())
    assert all(entry.dropped.get("corrupt", 0) == 0 for entry in world.entries("buffer"))


@pytest.mark.vllm
def test_a_real_server_ends_with_a_draft_that_was_trained_on_its_own_traffic(served_world, server):
    learn_from_its_traffic(served_world, server)


@pytest.mark.vllm
@pytest.mark.slow
def test_so_does_a_server_with_the_v2_runner(random_target, registry, tmp_path):
    versions = Path(shutil.copytree(registry, tmp_path / "registry", symlinks=True))
    environment, options = (
        model_runners.environment("v2"),
        ["--draft-sample-method", "probabilistic"],
    )
    with running_server(
        random_target, versions, tmp_path, options, environment=environment
    ) as server:
        assert server.status()["runner"].startswith("V2 model runner")
        with served_by(server, random_target, tmp_path / "world") as world:
            learn_from_its_traffic(world, server)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_killed_server_comes_back_to_the_current_version_and_a_refusing_one_keeps_the_fleet_together(
    world,
):
    async def main():
        elsewhere = shutil.copytree(world.registry.folder, world.root / "elsewhere", symlinks=True)
        with ExitStack() as running:
            # The second server has a separate registry, in which no new version ever appears: it
            # must refuse.
            servers = [
                running.enter_context(serving(world)),
                running.enter_context(serving(world, 1, elsewhere)),
            ]
            await asyncio.gather(*(each.ready() for each in servers))
            traffic = streams([each.url for each in servers])
            async with learning(world, servers) as task:
                async with traffic.flowing():
                    await until(
                        lambda: any(e.outcome == "refused" for e in world.entries("swap")),
                        task,
                        300,
                    )
                    await all_serve(servers, lambda: "v000001")
                    replace_by_link(elsewhere, world.registry.folder)
                    await until(lambda: world.registry.current() != "v000001", task, 300)
                assert traffic.failures == []
                # kill -9 in the middle of capture; the first server keeps serving its draft
                kept = streams([servers[0].url])
                async with kept.flowing():
                    os.killpg(servers[1].process.pid, signal.SIGKILL)
                    port = int(servers[1].url.rsplit(":", 1)[1])
                    old = world.root / "old"
                    shutil.copytree(world.registry.path("v000001"), old / "v000001")
                    (old / "current").symlink_to("v000001")
                    again = running.enter_context(serving(world, 1, old, port))
                    await again.ready()
                    replace_by_link(old, world.registry.folder)
                    await until(
                        lambda: "server_unreachable" in {e.what for e in world.entries("fault")},
                        task,
                    )
                assert kept.failures == []
                # A canary may be under way. It ends only with traffic.
                async with streams([each.url for each in servers]).flowing():
                    await all_serve(servers, world.registry.current)

    asyncio.run(main())


@pytest.mark.vllm
@pytest.mark.slow
def test_a_server_that_comes_back_with_another_target_is_left_alone_until_it_has_ours_again(
    world, tmp_path
):
    others = [
        make_draft(world.target, tmp_path / "weights"),
        with_other_tokenizer(world.target, tmp_path / "tokenizer"),
    ]

    def num_foreign():
        return (world.last("buffer", "dropped") or {}).get("foreign", 0)

    async def main():
        port = free_port()
        with serving(world, port=port) as first:
            await first.ready()
            training = replace(
                world.config().training, records_per_candidate=100_000
            )  # nothing is swapped meanwhile
            async with learning(world, [first], training=training) as task:
                async with streams([first.url]).flowing():
                    await until(lambda: world.last("training", "step") >= 4, task)
                os.killpg(first.process.pid, signal.SIGKILL)
                first.process.wait()
                for other in others:
                    with serving(world, port=port, target=other) as changed:
                        await changed.ready()
                        await until(lambda: world.last("state", "phase") == "halted", task)
                        swaps, known = len(world.entries("swap")), num_foreign()
                        traffic = streams([changed.url])
                        async with traffic.flowing():
                            await until(lambda known=known: num_foreign() > known + 8, task)
                        assert traffic.failures == []
                        assert len(world.entries("swap")) == swaps
                        steps = world.last("training", "step")
                with serving(world, port=port) as again:
                    await again.ready()
                    async with streams([again.url]).flowing():
                        await until(lambda: world.last("training", "step") > steps + 4, task)
        assert "target_changed" in {entry.what for entry in world.entries("fault")}

    asyncio.run(main())
