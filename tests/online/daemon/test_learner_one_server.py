"""A learner beside one server of three that hangs or lies.

It sees the others at every poll, and rolls back at once.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from fake_fleet import TOKEN
from learner_world import QUICK, World, make_draft
from waiting import until

from redraft.files.folder import fingerprint
from redraft.online.daemon import control, learner
from redraft.online.fleet import reconciler, server
from redraft.online.fleet.discovery import FleetConfig
from redraft.online.fleet.rollout import Outcome
from redraft.online.fleet.server import SWAP_TIMEOUT_S
from redraft.online.fleet.watch import Watch

FIRST, SECOND = "v000001", "v000002"
POLL_S = 0.2
PATIENT = replace(QUICK, swap_timeout_s=300, rollback_timeout_s=300)
"""Whoever waits for a server that hangs waits far longer than a busy machine needs."""

STATUS, SWAP = "/redraft/status", "/redraft/swap"


@pytest.fixture(scope="module")
def draft(random_target, tmp_path_factory):
    return make_draft(random_target, tmp_path_factory.mktemp("noisy-draft"))


@pytest.fixture
def world(random_target, draft, tmp_path, monkeypatch):
    """Three servers and two promoted versions."""
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)
    monkeypatch.setattr(reconciler, "PATIENCE_S", 0.5)
    world = World.make(tmp_path, random_target, draft, servers=3)
    for _ in range(2):
        version = world.registry.publish(
            lambda folder: shutil.copytree(draft, folder, dirs_exist_ok=True),
            target_fingerprint=fingerprint(random_target), provenance={}, evaluation={},
        )  # fmt: skip
        world.registry.promote(version)
    return world


def fleet(world, poll_s=POLL_S):
    return FleetConfig(servers=tuple(fake.url for fake in world.fakes), poll_s=poll_s)


def looks(world, fake):
    return [entry.time_s for entry in world.entries("acceptance") if entry.server == fake.url]


@pytest.mark.parametrize("trouble", [
    {SWAP: "hang"}, {STATUS: "hang", SWAP: "hang"},  # the last as after SIGSTOP
    pytest.param({STATUS: "hang"}, marks=pytest.mark.slow),
    *(pytest.param({path: "drip"}, marks=pytest.mark.slow) for path in (STATUS, SWAP)),
], ids=str)  # fmt: skip
def test_one_server_that_hangs_neither_blinds_the_learner_nor_blocks_a_rollback(
    world, trouble, monkeypatch
):
    monkeypatch.setattr(
        server, "STATUS_TIMEOUT_S", 300
    )  # whoever waits for the answer waits as long
    monkeypatch.setattr(learner, "Watch", lambda servers, _: Watch(servers, 0.3))
    hung, *well = world.fakes
    hung.trouble = trouble

    async def main():
        async with world.fleet(), world.learner(fleet=fleet(world), rollout=PATIENT) as task:
            await until(lambda: all(fake.version == SECOND for fake in well), task)
            await until(lambda: world.entries("state"), task)
            await until(lambda: len(looks(world, well[0])) >= 3, task)
            began_s = time.monotonic()
            rollback = asyncio.create_task(
                control.ask(world.root / "learner", control.WentBack, do="rollback")
            )
            await until(lambda: all(fake.version == FIRST for fake in well), task)
            assert time.monotonic() - began_s < SWAP_TIMEOUT_S / 10
            reply = await rollback
            assert time.monotonic() - began_s < SWAP_TIMEOUT_S / 10
            assert reply.version == FIRST
            assert world.registry.current() == FIRST
            seen = len(looks(world, well[0]))
            await until(lambda: len(looks(world, well[0])) >= seen + 2, task)

    asyncio.run(main())
    for fake in well:
        seen_s = looks(world, fake)
        assert max(later - earlier for earlier, later in pairwise(seen_s)) < 60


@pytest.mark.parametrize("number", range(3))
def test_a_rollback_in_the_middle_of_a_rollout_does_not_wait_for_a_server_that_hangs(
    world, draft, number
):
    """One of the three is the canary: then the rollout hangs on it, otherwise later."""
    third = world.registry.publish(
        lambda folder: shutil.copytree(draft, folder, dirs_exist_ok=True),
        target_fingerprint=fingerprint(world.target), provenance={}, evaluation={},
    )  # fmt: skip
    well = [fake for fake in world.fakes if fake is not world.fakes[number]]

    def phase():
        return world.entries("state")[-1].phase

    async def main():
        async with world.fleet(), world.learner(fleet=fleet(world), rollout=PATIENT) as task:
            await until(lambda: all(fake.version == SECOND for fake in world.fakes), task)
            await until(lambda: world.entries("state"), task)
            world.fakes[number].trouble = {SWAP: "hang"}
            world.fakes[number].asked.clear()
            swap = asyncio.create_task(
                control.ask(world.root / "learner", Outcome, do="swap", version=third)
            )
            await until(lambda: SWAP in world.fakes[number].asked, task)
            assert phase() in ("canary", "rolling")
            began_s = time.monotonic()
            reply = await control.ask(world.root / "learner", control.WentBack, do="rollback")
            await until(lambda: all(fake.version == SECOND for fake in well) and swap.done(), task)
            assert time.monotonic() - began_s < SWAP_TIMEOUT_S / 10
            assert reply.version == SECOND, "a rollout ends with the version before it"
            world.fakes[number].trouble = {}
            await until(lambda: world.fakes[number].version == SECOND, task)
            assert world.registry.current() == SECOND

    asyncio.run(main())


def test_a_server_that_lies_is_told_and_the_learner_goes_on(world):
    lying, *well = world.fakes
    good = {
        "server_id": "boot", "draft_version": SECOND, "draft_intact": True, "target_intact": True,
        "target_fingerprint": fingerprint(world.target), "capture": None,
    }  # fmt: skip
    statuses = [{"draft_version": "a b"}, {"draft_version": 3}, {"draft_version": []}, {"target_fingerprint": None},
                {"capture": []}, {"capture": {"dropped_records_spool": float("nan")}}, {"drafts": [-1, 1]}]  # fmt: skip

    async def main():
        async with world.fleet(), world.learner(fleet=fleet(world, 0.1)) as task:
            await until(lambda: all(fake.version == SECOND for fake in world.fakes), task)
            for change in statuses:
                before = len(faults(world))
                lying.answers = {STATUS: json.dumps(good | change).encode()}
                await until(lambda before=before: len(faults(world)) > before, task)
                lying.answers = {}
                seen = len(looks(world, lying))
                await until(lambda seen=seen: len(looks(world, lying)) > seen + 1, task)
            assert len(faults(world)) == len(statuses)
            assert not task.done()

    def faults(world):
        return [entry for entry in world.entries("fault") if entry.what == "server_nonsense"]

    asyncio.run(main())
    assert {entry.detail for entry in faults(world)} == {lying.url}
    assert all(lying.url in entry.reason for entry in faults(world))
    assert len(looks(world, well[0])) >= len(looks(world, lying))


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("capture_off", "s3://bucket/target is not a model folder"),
        ("swap_off", "the target's weights are not those of its start"),
        ("server_note", ["--disable-log-stats"]),
    ],
)
def test_what_does_not_work_on_a_server_is_told_once_with_the_reason(world, what, told):
    world.fakes[1].drafting = {"notes" if what == "server_note" else what: told}

    def faults():
        return [entry for entry in world.entries("fault") if entry.what == what]

    async def main():
        async with world.fleet(), world.learner(fleet=fleet(world)) as task:
            await until(faults, task)
            seen = len(looks(world, world.fakes[1]))
            await until(lambda: len(looks(world, world.fakes[1])) > seen + 1, task)

    asyncio.run(main())
    (fault,) = faults()
    assert fault.detail == world.fakes[1].url
    assert fault.reason.endswith(told if isinstance(told, str) else told[0])
