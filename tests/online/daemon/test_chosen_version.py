"""A person chooses a version.

What was made from the one before gets no further, also after a kill.
"""

from __future__ import annotations

import asyncio
import shutil
import threading

import pytest
from fake_fleet import TOKEN
from learner_world import ANYTHING, World, make_records, ship
from waiting import PATIENCE_S, until

from redraft.files.folder import fingerprint
from redraft.online.daemon import control
from redraft.online.daemon.judging import Judge
from redraft.online.daemon.state import Phase, State, load, save
from redraft.online.fleet.registry import Registry
from redraft.online.fleet.rollout import Outcome
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.cursor import SERVED
from redraft.online.learning.trainer import Trainer


@pytest.fixture(scope="module")
def records(random_target):
    return make_records(random_target, 260)


@pytest.fixture
def world(random_target, noisy_draft, tmp_path, monkeypatch):
    """A registry of two versions. The second one is current."""
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)
    world = World.make(tmp_path, random_target, noisy_draft)
    for _ in range(2):
        world.registry.promote(publish(world))
    return world


def publish(world):
    return world.registry.publish(
        lambda folder: shutil.copytree(world.draft, folder, dirs_exist_ok=True),
        target_fingerprint=fingerprint(world.target), provenance={}, evaluation={},
    )  # fmt: skip


def play(world, script, **changes):
    async def main():
        async with world.fleet(), world.learner(gate=ANYTHING, **changes) as task:
            await until(lambda: world.entries("state"), task)
            await script(task)

    asyncio.run(main())


def hold(monkeypatch, owner, name, number=1):
    """(is reached, may go on) of the call of a method with this number."""
    is_reached, may_go_on = threading.Event(), threading.Event()
    work, calls = getattr(owner, name), []

    def held(*args, **kwargs):
        calls.append(name)
        if len(calls) == number:
            is_reached.set()
            assert may_go_on.wait(PATIENCE_S)
        return work(*args, **kwargs)

    monkeypatch.setattr(owner, name, held)
    return is_reached, may_go_on


async def roll_back(world, to="v000001"):
    reply = await control.ask(world.root / "learner", control.WentBack, do="rollback", to=to)
    assert reply == control.WentBack(version=to)
    assert {fake.version for fake in world.fakes} == {to}


def begins(world):
    """Indices of the states of the journal in which training began again."""
    return [
        i
        for i, entry in enumerate(world.journal)
        if "training begins again" in getattr(entry, "reason", "")
    ]


def commits(world):
    """Those of training, the newest first."""
    with Buffer(world.config().buffer_config, fingerprint(world.target)) as buffer:
        return buffer.commits()


def one_candidate(records):
    """Records enough for one candidate of 64, and not for a second one."""
    return records[:120]


@pytest.mark.parametrize(("owner", "name"), [(Judge, "judge_draft"), (Registry, "publish")])
def test_a_rollback_ends_a_candidate_that_is_judged_or_published(
    world, records, monkeypatch, owner, name
):
    is_reached, may_go_on = hold(monkeypatch, owner, name)

    async def script(task):
        ship(world.spool, one_candidate(records))
        await until(is_reached.is_set, task)
        await roll_back(world)
        may_go_on.set()
        await until(lambda: begins(world), task)

    play(world, script)
    assert {entry.phase for entry in world.entries("state")}.isdisjoint({"canary", "rolling"})
    assert world.registry.current() == "v000001"
    # A later checkpoint may be there already, of the training that began again.
    ids = [commit.checkpoint_id for commit in commits(world)]
    assert ids.index(SERVED) < ids.index("checkpoint-000001")


def test_a_rollback_that_outlasts_the_publication_ends_the_candidate(world, records, monkeypatch):
    is_publishing, may_publish = hold(monkeypatch, Registry, "publish")
    is_going_back, may_go_back = hold(monkeypatch, Registry, "rollback")

    async def script(task):
        ship(world.spool, one_candidate(records))
        await until(is_publishing.is_set, task)
        asked = asyncio.ensure_future(roll_back(world))
        await until(is_going_back.is_set, task)
        may_publish.set()
        await until(lambda: "v000003" in world.registry.versions(), task)
        may_go_back.set()
        await asked
        await until(lambda: begins(world), task)

    play(world, script)
    assert {entry.phase for entry in world.entries("state")}.isdisjoint({"canary", "rolling"})
    assert world.registry.current() == "v000001"


@pytest.mark.parametrize("phase", [Phase.JUDGING, Phase.PUBLISHING])
def test_a_restart_after_a_rollback_goes_on_with_no_candidate_of_before(
    world, records, phase, monkeypatch
):
    is_judging, may_judge = hold(monkeypatch, Judge, "judge_draft")

    async def killed(task):
        ship(world.spool, one_candidate(records))
        await until(is_judging.is_set, task)
        await roll_back(world)
        asyncio.get_running_loop().call_soon(may_judge.set)  # when the learner is being ended

    play(world, killed)
    path = world.root / "learner" / "state.json"
    assert (load(path).phase, commits(world)[0].checkpoint_id) == (Phase.JUDGING, SERVED)
    save(State(phase=phase, candidate=load(path).candidate, num_looks=2), path)

    async def script(task):
        await until(lambda: load(path).phase in (Phase.IDLE, Phase.TRAINING), task)

    play(world, script)
    assert load(path).num_looks == 2
    assert not world.entries("gate")
    assert world.registry.versions() == ["v000001", "v000002"]


def test_after_a_rollback_a_candidate_is_judged_after_as_many_records_as_any(
    world, records, monkeypatch
):
    is_reached, may_go_on = hold(monkeypatch, Trainer, "step", number=14)

    async def script(task):
        ship(world.spool, records)
        await until(is_reached.is_set, task)
        await roll_back(world)
        may_go_on.set()
        await until(lambda: "judging" in {entry.phase for entry in world.entries("state")}, task)

    play(world, script)
    (began, *_), entries = begins(world), world.journal
    judged = next(i for i, entry in enumerate(entries) if getattr(entry, "phase", "") == "judging")
    seen = [entry.records_seen for entry in entries[began:judged] if hasattr(entry, "records_seen")]
    assert len(seen) == 64 // 4


def test_a_swap_that_a_person_asked_for_restarts_training_also_after_a_kill(world):
    publish(world)
    (world.root / "learner").mkdir(exist_ok=True)
    path = world.root / "learner" / "state.json"
    save(State(phase=Phase.CANARY, candidate="v000003", is_by_person=True), path)

    async def script(task):
        await until(lambda: begins(world), task)

    play(world, script)
    assert world.registry.current() == "v000003"
    assert commits(world)[0].checkpoint_id == SERVED
    assert load(path) == State(reason="training begins again from v000003")


def test_a_candidate_of_the_learner_restarts_nothing(world, records):
    async def script(task):
        ship(world.spool, one_candidate(records))
        await until(lambda: world.registry.current() == "v000003", task)
        steps = len(world.entries("training"))
        await until(lambda: len(world.entries("training")) > steps, task)

    play(world, script)
    assert not begins(world)
    assert commits(world)[0].checkpoint_id.startswith("checkpoint-")
    assert world.registry.previous() == "v000002"


def test_a_swap_in_the_canary_is_saved_as_a_persons(world, monkeypatch):
    version = publish(world)

    async def script(task):
        asked = asyncio.ensure_future(
            control.ask(world.root / "learner", Outcome, do="swap", version=version)
        )
        path = world.root / "learner" / "state.json"
        await until(lambda: load(path).phase is Phase.CANARY, task)
        assert load(path).is_by_person
        await asked
        await until(lambda: begins(world), task)
        assert not load(path).is_by_person

    play(world, script)
