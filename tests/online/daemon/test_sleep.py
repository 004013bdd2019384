"""The learner sleeps when there is nothing to gain, and wakes when its traffic changes.

With a fake fleet.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_fleet import TOKEN
from learner_world import World, make_draft, make_records, ship
from waiting import until

from redraft.online.daemon import control
from redraft.online.daemon.account import Account
from redraft.online.daemon.sleep import Sleeper, save_sleep
from redraft.online.journal import Journal
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig, Judging
from redraft.online.learning.gate import Policy
from redraft.online.learning.staleness import Row, Sleep, SleepPolicy
from redraft.recipes.operate.versions import live_lines

GATE = Policy(min_requests=5, min_domain_requests=5)


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)


@pytest.fixture
def world(random_target: Path, tmp_path: Path) -> World:
    """The draft is the target itself, so nothing can be gained."""
    return World.make(
        tmp_path, random_target, make_draft(random_target, tmp_path / "copy", noise=0.0)
    )


def settings(world: World, **changes: Any) -> dict[str, Any]:
    training = replace(
        world.config().training, records_per_candidate=16, replay_per_step=4, patience=2
    )
    return {"training": training, "gate": GATE, **changes}


def test_a_perfect_draft_puts_the_learner_to_sleep_and_a_new_domain_wakes_it(
    world: World, random_target: Path
) -> None:
    code = make_records(random_target, 160)
    prose = make_records(random_target, 60, seed=9, domain="prose")

    def is_asleep() -> bool:
        return bool(world.last("staleness", "is_asleep"))

    async def main() -> None:
        for fake in world.fakes:  # not the number of the settings, with which a restart begins
            fake.drafting = {"num_speculative_tokens": 5, "draft_sample_method": "greedy"}
        async with world.fleet():
            async with world.learner(**settings(world)) as task:
                ship(world.spool, code[:80])
                await until(is_asleep, task)
                assert world.last("staleness", "steps_saved") == 0
                status = await control.ask(world.config().folder, control.Standing, do="status")
                assert status.is_asleep
                assert "asleep" in (await live_lines(world.config()))[0]
                steps = len(world.entries("training"))
                ship(
                    world.spool, code[80:110]
                )  # a candidate's worth of training records, of the same traffic
                await until(lambda: world.last("staleness", "steps_saved"), task)
                assert len(world.entries("training")) == steps, "passed over, not trained"
                assert is_asleep()
            saved = world.last("staleness", "steps_saved")
            async with world.learner(**settings(world)) as task:  # a restart does not wake it
                await until(
                    lambda: world.entries("state")[-1].reason.startswith("training continues"), task
                )
                assert (
                    await control.ask(world.config().folder, control.Standing, do="status")
                ).is_asleep
                ship(world.spool, prose)
                await until(lambda: len(world.entries("training")) > steps, task)
                woken = next(
                    entry for entry in world.entries("staleness") if "begins again" in entry.reason
                )
                assert re.search(r"\bprose\b.*\bnew\b", woken.reason)
                assert woken.tau_then == woken.tau_now == 6, (
                    "the servers draft 5 tokens, all accepted"
                )
                assert world.last("staleness", "steps_saved") >= saved

    asyncio.run(main())


def test_a_learner_that_may_not_sleep_trains_on(world: World, random_target: Path) -> None:
    records = make_records(random_target, 160)

    async def main() -> None:
        async with (
            world.fleet(),
            world.learner(**settings(world, sleep=SleepPolicy(enabled=False))) as task,
        ):
            ship(world.spool, records[:60])
            await until(lambda: len(world.entries("gate")) >= 2, task)
            ship(world.spool, records[60:])
            await until(lambda: len(world.entries("gate")) >= 4, task)
            assert not any(entry.is_asleep for entry in world.entries("staleness"))
            await until(
                lambda: world.last("staleness", "tau_then"), task
            )  # it still tells how stale the draft is

    asyncio.run(main())


def test_records_in_a_new_buffer_are_newer_than_the_reference(world: World) -> None:
    """After a restart without retention, the buffer numbers its records from 1 again."""
    cfg, rows, after = world.config(), [("code", 10.0, 20.0)] * 30, list[int]()
    asleep = Sleep().refer("v000001", 5000, rows, "3 greedy").fall_asleep(rows)
    save_sleep(asleep, cfg.folder / "sleep.json")

    def score_since(version: str, through: int) -> tuple[int, list[Row]]:
        after.append(through)
        return through, []

    with Buffer(BufferConfig(), "target") as buffer:
        judge: Any = SimpleNamespace(judging=Judging(), buffer=buffer, score_since=score_since)
        sleeper = Sleeper(cfg, judge, Account(Journal(cfg.folder / "journal")))
        sleeper.measure("v000001")
    assert after == [0]
    assert sleeper.sleep == replace(asleep, through=0)
