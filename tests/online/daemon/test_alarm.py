"""The alarm over the fleet's acceptance.

Servers' counters ask the question, held-out requests answer it.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from fake_fleet import TOKEN
from learner_world import World, make_draft, make_records, ship
from waiting import until, wait_until

from redraft.files import artifact
from redraft.files.folder import fingerprint
from redraft.online.daemon import alarm, control
from redraft.online.daemon.judging import RECENT_S, Judge
from redraft.online.daemon.rollouts import Rollouts
from redraft.online.daemon.state import Event, State, advance, load, save
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.candidate import Candidate
from redraft.online.learning.gate import Policy
from redraft.online.records.record import encode_record, read_frames

NOISY, GOOD, BAD = "v000001", "v000002", "v000003"


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)
    monkeypatch.setattr(alarm, "REST_S", 0.0)


@pytest.fixture(scope="module")
def drafts(random_target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts")
    return [
        make_draft(random_target, folder / "noisy"),
        random_target,
        make_draft(random_target, folder / "bad", noise=1.0),
    ]


@pytest.fixture(scope="module")
def records(random_target):
    return make_records(random_target, 120)


@pytest.fixture
def world(random_target, drafts, tmp_path):
    """A fleet whose registry has the three versions; nothing is trained."""
    world = World.make(tmp_path, random_target, drafts[0])
    for draft in drafts:
        version = world.registry.publish(
            lambda folder, draft=draft: shutil.copytree(draft, folder, dirs_exist_ok=True),
            target_fingerprint=fingerprint(random_target), provenance={}, evaluation={},
        )  # fmt: skip
        world.registry.promote(version)
    return world


def play(world, script):
    training = replace(world.config().training, records_per_candidate=100_000)

    async def main():
        async with (
            world.fleet(),
            world.learner(training=training, gate=Policy(min_requests=10)) as task,
        ):
            await script(task)

    asyncio.run(main())


async def start(world, records, task):
    """Wait until the learner has evidence."""
    ship(world.spool, records)
    await until(lambda: world.last("buffer", "held_out") > 20, task)
    await until(lambda: {fake.version for fake in world.fakes} == {world.registry.current()}, task)


def test_evidence_is_recent_by_the_learners_clock_not_by_the_machines(world, records, monkeypatch):
    """The clock jumps by a week.

    Today's requests still tell a bad draft from a good one.
    """
    cfg = world.config(gate=Policy(min_requests=10))
    with Buffer(cfg.buffer_config, fingerprint(world.target)) as buffer:
        now_s = time.time()
        buffer.append(read_frames(b"".join(map(encode_record, records))), now_s)
        buffer.expire(now_s + 60)
        judge = Judge(
            cfg, world.registry, buffer, Candidate(cfg.training, "standalone", cfg.target)
        )
        monkeypatch.setattr(time, "time", lambda: now_s + 8 * 86400)
        is_worse, why = judge.find_loss(BAD, GOOD, 1)
        assert is_worse, why
        buffer.expire(now_s + RECENT_S + 1)
        is_worse, why = judge.find_loss(BAD, GOOD, 2)
        assert (is_worse, bool(re.search(rf"\b{GOOD}: 0 .*\b10\b", why))) == (False, True), why


def test_requests_of_weights_of_before_do_not_decide_about_a_draft_for_those_of_now(
    world, records, drafts
):
    """After a fine-tune, most requests are the old target's, on which the draft of then wins."""
    moved = drafts[2]  # as different as a target can be, and `world` has a draft that equals it
    version = {"target_fingerprint": fingerprint(world.target), "target_version": "@0123456789ab"}
    new = make_records(moved, 40, seed=1, **version)
    cfg = world.config(gate=Policy(min_requests=10))
    with Buffer(
        replace(cfg.buffer_config, held_out_fraction=0.5), fingerprint(world.target)
    ) as buffer:
        judge = Judge(
            cfg, world.registry, buffer, Candidate(cfg.training, "standalone", cfg.target)
        )
        buffer.append(read_frames(b"".join(map(encode_record, records[:70]))), 0.0)
        is_worse, why = judge.find_loss(BAD, GOOD, 1)
        assert is_worse, why
        buffer.append(read_frames(b"".join(map(encode_record, new))), 1.0)
        assert not judge.find_loss(BAD, GOOD, 1)[0]
        is_worse, why = judge.find_loss(GOOD, BAD, 1)
        assert is_worse, why
        assert buffer.counts["past_target"] == 70
        stored = [one.record.target_version for one in buffer.read(buffer.select_held_out(999))]
        assert set(stored) == {"@0123456789ab"}


def told(world, words):
    return [entry.reason for entry in world.entries("state") if words in entry.reason]


def spoil_counters(world):
    """As by clients at temperature 2: no server accepts anything of any draft."""
    for version in (NOISY, GOOD, BAD):
        world.traffic.tau[version] = 1.0


def test_counters_alone_roll_nothing_back(world, records):
    """They rolled the fleet back to its first version, one version every six seconds."""
    world.registry.rollback()

    async def script(task):
        await start(world, records, task)
        spoil_counters(world)
        await until(lambda: len(told(world, f"stays on {GOOD}")) >= 3, task)
        assert {fake.version for fake in world.fakes} == {GOOD}

    play(world, script)
    assert world.registry.current() == GOOD
    assert world.registry.promoted() == [NOISY, GOOD]
    assert "acceptance_alarm" in {entry.what for entry in world.entries("fault")}
    assert re.search(r"v000001: tau 1\.", told(world, f"stays on {GOOD}")[0])


def test_every_alarm_of_a_server_is_told_once(world, records):
    world.registry.rollback()

    def alarms():
        return [entry for entry in world.entries("fault") if entry.what == "acceptance_alarm"]

    async def look():
        before = [len(fake.asked) for fake in world.fakes]
        await until(
            lambda: all(len(f.asked) > n + 8 for f, n in zip(world.fakes, before, strict=True))
        )

    async def script(task):
        await start(world, records, task)
        for number in (1, 2):
            spoil_counters(world)
            await until(lambda number=number: len(alarms()) == 2 * number, task)
            await look()
            assert len(alarms()) == 2 * number, "it lasts"
            world.traffic.tau.clear()
            await look()

    play(world, script)
    assert len(alarms()) == 4


def test_a_bad_version_is_rolled_back_once_and_no_further(world, records):
    async def script(task):
        await start(world, records, task)
        spoil_counters(world)
        await until(lambda: {fake.version for fake in world.fakes} == {GOOD}, task)
        await until(lambda: told(world, f"went back to {GOOD}"), task)
        await until(
            lambda: told(world, f"stays on {GOOD}: the fleet was already rolled back"), task
        )

    async def again(task):
        await until(
            lambda: len(told(world, f"stays on {GOOD}: the fleet was already rolled back")) == 2,
            task,
        )

    play(world, script)
    assert load(world.root / "learner" / "state.json").has_gone_back
    play(world, again)
    assert world.registry.current() == GOOD


def test_an_alarm_does_not_roll_back_further_than_a_person_who_was_faster(
    world, records, monkeypatch
):
    """A rollback reads the whole version first, and in the meantime the alarm decides too."""
    asked, answered = [], []
    go_back, verify = Rollouts.go_back, artifact.verify

    async def note(self, reason, *args, **kwargs):
        asked.append(reason)
        back = await go_back(self, reason, *args, **kwargs)
        answered.append(back.version)
        return back

    def read_slowly(folder):
        if asked and folder.name == GOOD:
            wait_until(lambda: len(asked) == 2)
        return verify(folder)

    monkeypatch.setattr(Rollouts, "go_back", note)
    monkeypatch.setattr(artifact, "verify", read_slowly)

    async def script(task):
        await start(world, records, task)
        folder = world.config().folder
        person = asyncio.ensure_future(control.ask(folder, control.WentBack, do="rollback", to=""))
        await until(lambda: asked, task)
        spoil_counters(world)
        assert (await person).version == GOOD
        await until(lambda: len(answered) == 2, task)

    play(world, script)
    assert "hardly any" in asked[1]
    assert answered == [GOOD, GOOD]
    assert world.registry.current() == GOOD


@pytest.mark.parametrize("line", ["pace auto: 0 tokens at 1", "pace 3", ""])
def test_a_first_version_alarms_unless_the_server_leaves_it_off(world, records, line):
    """A new head is hardly accepted; with `--pace auto` it costs nothing."""
    world.registry.rollback()
    world.registry.rollback()
    for fake in world.fakes:
        fake.drafting = {"pace": {"line": line}} if line else {}

    async def script(task):
        await start(world, records, task)
        spoil_counters(world)
        before = [len(fake.asked) for fake in world.fakes]
        await until(
            lambda: all(len(f.asked) > n + 10 for f, n in zip(world.fakes, before, strict=True)),
            task,
        )

    play(world, script)
    alarms = {"acceptance_alarm", "nothing_to_go_back_to"}
    seen = {entry.what for entry in world.entries("fault")} & alarms
    assert seen == (set() if line.startswith("pace auto") else alarms)


def test_without_enough_held_out_requests_the_fleet_stays_and_says_so(world, records):
    async def script(task):
        ship(world.spool, records[:3])
        await until(lambda: {fake.version for fake in world.fakes} == {BAD}, task)
        spoil_counters(world)
        await until(lambda: told(world, "held-out requests with drafts, 10 needed"), task)

    play(world, script)
    assert world.registry.current() == BAD


def test_a_draft_that_the_engine_refuses_is_rolled_back_although_its_weights_are_good(
    world, records
):
    world.registry.rollback()
    rows = len(records[0].positions)
    refused = {
        "draft_version": GOOD,
        "row_drafts": np.array([5, -1] * (rows // 2), "<i4").tobytes(),
        "row_accepted": bytes(rows),
    }

    async def script(task):
        await start(world, [msgspec.structs.replace(record, **refused) for record in records], task)
        spoil_counters(world)
        await until(lambda: {fake.version for fake in world.fakes} == {NOISY}, task)
        await until(lambda: told(world, "on held-out requests the engine accepts hardly any"), task)

    play(world, script)


def test_a_version_before_that_is_damaged_is_told_and_ends_nothing(world, records):
    weights = world.registry.path(GOOD) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])

    async def script(task):
        await start(world, records, task)
        spoil_counters(world)
        await until(
            lambda: "nothing_to_go_back_to" in {entry.what for entry in world.entries("fault")},
            task,
        )

    play(world, script)
    assert world.registry.current() == BAD


def test_the_one_rollback_is_remembered_until_the_next_promotion(tmp_path):
    state = replace(State(), has_gone_back=True)
    save(state, tmp_path / "state.json")
    state = load(tmp_path / "state.json")
    for event in (Event.BEGIN, Event.TRAINED, Event.PROMOTED, Event.PUBLISHED, Event.PASSED):
        state = advance(state, event, candidate="v000009")
        assert state.has_gone_back
    assert not advance(state, Event.ROLLED_OUT).has_gone_back
