"""`redraft fleet forget`.

Everything it reaches, what it tells, and the way back from drafts that learned.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
from dataclasses import replace

import msgspec
import pytest
from fake_fleet import TOKEN, FakeServer, Traffic, running
from learner_world import World, make_draft, make_records, ship
from recorded_heads import make_head
from starlette.datastructures import Headers
from waiting import until

from redraft.files.folder import fingerprint
from redraft.online.daemon import control
from redraft.online.daemon.opening import read_vocab_size
from redraft.online.fleet.discovery import FleetConfig
from redraft.online.learning.buffer import CLOCK_SLACK_S, Buffer
from redraft.online.learning.config import DraftConfig
from redraft.online.learning.cursor import SERVED
from redraft.online.learning.forget import Forgotten, Reach
from redraft.online.learning.intake import Spool
from redraft.online.records.origin import (
    MAX_LABEL_CHARS,
    read_origin_headers,
    stored_name,
    to_label,
)
from redraft.online.records.outlet import Recording
from redraft.online.records.record import encode_record, name_base
from redraft.recipes.cli.run import dispatch
from redraft.recipes.operate import forget, rollback, swap


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)


@pytest.fixture(scope="module")
def draft(random_target, tmp_path_factory):
    return make_draft(random_target, tmp_path_factory.mktemp("draft"))


@pytest.fixture
def world(random_target, draft, tmp_path):
    return World.make(tmp_path, random_target, draft)


@pytest.fixture(scope="module")
def some(random_target):
    return make_records(random_target, 12)


def of(tenant, records, **changes):
    """Copies of the records that belong to the tenant."""
    return [
        msgspec.structs.replace(record, tenant=tenant, server_id=f"boot-{tenant[:20]}", **changes)
        for record in records
    ]


def delete(world, tenant, **changes):
    cfg = world.config(fleet=FleetConfig(servers=("http://127.0.0.1:1",)), **changes)
    return asyncio.run(forget.delete_records(cfg, tenant))


def fill(world, records):
    config = world.config()
    with Buffer(config.buffer_config, fingerprint(world.target)) as buffer:
        buffer.append([(encode_record(record), record) for record in records], time.time())


def publish(world, *, through=None, copied=False):
    """A version that learned from the first `through` records of the buffer; None does not say."""
    says = (
        {}
        if through is None
        else {"trained_through": through, "trained_until_s": time.time() + 1e6}
    )
    provenance = {"copied_from": "somewhere"} if copied else {"trained_from": "v000001", **says}
    version = world.registry.publish(
        lambda folder: shutil.copytree(world.draft, folder, dirs_exist_ok=True),
        target_fingerprint=fingerprint(world.target),
        provenance=provenance,
        evaluation={},
    )
    world.registry.promote(version)
    return version


# --- names


@pytest.mark.parametrize(
    "name",
    [
        "acme",
        "Zürich AG",
        "株式会社",
        "t" * MAX_LABEL_CHARS,
        "tenant-" + 64 * "a",
        "ü" * 64,
        40 * "株",
    ],
)
def test_the_command_and_the_header_agree_on_a_name(name):
    header = name.encode().decode("latin-1")  # as HTTP libraries read the client's UTF-8
    label = read_origin_headers(Headers({"x-redraft-tenant": header})).tenant
    assert label == to_label(name)
    assert len(label) <= MAX_LABEL_CHARS
    assert stored_name(name) == label
    assert Recording(tenants=(name,)).find_skip_reason(label, b"") == ""


def test_two_long_names_with_one_beginning_are_two_tenants():
    first, second = ("tenant-" + 64 * "a" + end for end in "xy")
    assert to_label(first) != to_label(second)


# --- reach


def test_every_place_is_reached_without_a_learner(world, some):
    world.spool.mkdir()
    fill(world, of("acme", some[:4]) + of("other", some[4:6]))
    ship(world.spool, of("acme", some[6:9]) + of("other", some[9:10]))
    target = fingerprint(world.target)
    left = world.spool / ".00000000000000000001-x-00000000.records.partial"
    left.write_bytes(b"of anybody, left by a server that was killed")
    os.utime(left, (0, 0))
    (world.spool / "00000000000000000002-x-00000000.records").write_bytes(b"torn, of anybody")
    forgotten = delete(world, "acme")
    assert (forgotten.buffer, forgotten.arriving, forgotten.unattributed) == (4, 3, 1)
    assert not list(world.spool.iterdir())
    quarantine = world.root / "learner" / "buffer" / "quarantine"
    assert not list(quarantine.iterdir())
    frames = [encode_record(record) for record in of("acme", [*some[:4], *some[6:9]])]
    held = [path for path in world.root.rglob("*") if path.is_file()]
    assert not [path for path in held for frame in frames if frame[100:200] in path.read_bytes()]
    with Buffer(world.config().buffer_config, target) as buffer:
        assert len(buffer.fresh(0, 99)) + len(buffer.select_held_out(99)) == 3


def test_a_dry_run_counts_and_deletes_nothing(world, some):
    fill(world, of("acme", some[:4]))
    ship(world.spool, of("acme", some[6:9]))
    cfg = world.config(fleet=FleetConfig(servers=("http://127.0.0.1:1",)))
    for _ in range(2):
        forgotten = asyncio.run(forget.delete_records(cfg, "acme", is_dry=True))
        assert (forgotten.buffer, forgotten.arriving) == (4, 3)
    assert delete(world, "acme").num_records == 7


@pytest.mark.parametrize("ahead_s", [0.0, 61.0, CLOCK_SLACK_S - 60])
def test_a_server_whose_clock_is_ahead_brings_nothing_back(world, some, ahead_s):
    fill(world, of("acme", some[:1]))
    delete(world, "acme")
    late = of("acme", some[1:3], time_s=time.time() + ahead_s)
    with Buffer(world.config().buffer_config, fingerprint(world.target)) as buffer:
        assert buffer.append([(encode_record(record), record) for record in late], time.time()) == {
            "forgotten": 2
        }


def test_a_deletion_reaches_recent_records_while_the_clock_is_in_doubt(world, some):
    """After days without records, the learner's clock continues from the last one for ten minutes."""
    with Buffer(world.config().buffer_config, fingerprint(world.target)) as buffer:
        ship(world.spool, of("acme", some[:3]) + of("other", some[3:5]))
        reach = Reach(
            buffer=buffer,
            registry=world.registry,
            spool=Spool(world.spool, buffer, read_vocab_size(world.target)),
            now_s=lambda: time.time() - 4 * 86400,
        )
        assert asyncio.run(reach.forget("acme")).arriving == 3
        assert buffer.find_tenant("acme").num_records == 0
        assert buffer.find_tenant("other").num_records == 2


def test_without_a_learner_the_records_of_others_arrive_as_in_the_learner(
    world, some, random_target
):
    """Only the adapter's records are stored, and a head needs hidden states in them."""
    base = name_base(fingerprint(world.target), "law")
    ship(world.spool, of("acme", some[:2], adapter="law") + of("other", some[2:6], adapter="law"))
    delete(world, "acme", draft=DraftConfig(adapter="law"))
    with Buffer(world.config().buffer_config, base) as buffer:
        assert len(buffer.fresh(0, 99)) + len(buffer.select_held_out(99)) == 4
    world.registry.publish(
        lambda folder: make_head("eagle1", random_target, folder),
        target_fingerprint=fingerprint(world.target),
        provenance={},
        evaluation={},
    )
    world.registry.promote("v000001")
    ship(world.spool, of("other", some[6:8]))
    delete(world, "acme", draft=DraftConfig(family="eagle1"))
    with Buffer(world.config().buffer_config, fingerprint(world.target)) as buffer:
        assert buffer.newest() == 4, "a record without states ends each step that contains it"


def test_through_a_learner_the_same_is_reached(world, some):
    async def main():
        async with world.fleet(), world.learner() as task:
            learner = world.root / "learner"
            await until(lambda: world.entries("state"), task)
            ship(world.spool, of("acme", some[3:6]) + of("other", some[6:8]))
            await until(lambda: not list(world.spool.glob("*.records")), task)
            ship(world.spool, of("acme", some[8:10]))
            dry = await control.ask(learner, Forgotten, do="forget", tenant="acme", dry_run=True)
            assert dry.buffer + dry.arriving == 5
            told = await control.ask(learner, Forgotten, do="forget", tenant="acme")
            assert told.buffer + told.arriving == told.num_records == 5
            again = await control.ask(learner, Forgotten, do="forget", tenant="acme")
            assert again.num_records == 0

    asyncio.run(main())


# --- drafts that learned


def test_versions_that_may_have_learned_are_named_with_the_way_back(world, some, capsys):
    """By numbers of records.

    The clock was set back after `before`, whose training ended later than `after`'s.
    """
    publish(world, copied=True)
    fill(world, of("other", some[:3]))
    before = publish(world, through=3)
    fill(world, of("acme", some[3:]))
    after = [publish(world, through=len(some)), publish(world)]  # the last one does not say
    forgotten = delete(world, "acme")
    assert forgotten.learned == tuple(after)
    assert (forgotten.clean, forgotten.current) == (before, after[-1])
    assert not forgotten.is_in_training
    lines = forget.describe(
        forgotten, forget.ForgetConfig(tenant="acme", config=world.root / "learner.toml")
    )
    assert any(
        f"redraft fleet rollback --to {before} --config {world.root}/learner.toml" in line
        for line in lines
    )
    assert delete(world, "acme").learned == (), "the records are gone, and nobody knows any more"


@pytest.mark.parametrize("is_in_training", [False, True])
def test_no_rollback_to_the_current_version_is_proposed_unless_training_starts_again(
    world, is_in_training
):
    """The version that learned was never current, or no longer is."""
    forgotten = Forgotten(
        buffer=4, arriving=0, unattributed=0, learned=("v000002",), is_in_training=is_in_training,
        clean="v000001", current="v000001",
    )  # fmt: skip
    cfg = forget.ForgetConfig(tenant="acme", config=world.root / "learner.toml")
    _, _, learned, *rest = forget.describe(forgotten, cfg)
    assert "v000002" in learned
    assert rest[0] == "the current version, v000001, has not learned from them"
    command = f"redraft fleet rollback --to v000001 --config {cfg.config}"
    assert rest[1:] == ([f"to start training again from it: {command}"] if is_in_training else [])


@pytest.mark.parametrize("name", ["", " "])
def test_no_name_deletes_nothing(world, some, name):
    """An unset variable in a script: in a fleet without tenants every record has this name."""
    fill(world, of("", some[:3]))
    with pytest.raises(ValueError, match="name"):
        delete(world, name)
    with Buffer(world.config().buffer_config, fingerprint(world.target)) as buffer:
        assert buffer.find_tenant("acme").num_records == 0
        assert (
            sum(buffer.status().num_training.values()) + sum(buffer.status().num_held_out.values())
            == 3
        )


def test_records_that_only_judge_taught_nothing(world, some):
    publish(world, through=100)
    nearly_all_held_out = replace(world.config().buffer_config, held_out_fraction=1 - 1e-12)
    with Buffer(nearly_all_held_out, fingerprint(world.target)) as buffer:
        buffer.append([(encode_record(record), record) for record in of("acme", some)], time.time())
        assert buffer.find_tenant("acme").num_records == 12
        assert buffer.find_tenant("acme").first_seq is None


def test_the_printed_command_serves_the_version_before_and_trains_on_from_it(world, some):
    async def main():
        async with world.fleet(), world.learner() as task:
            learner = world.root / "learner"
            await until(lambda: world.entries("state"), task)
            ship(world.spool, of("acme", make_records(world.target, 40, seed=3)))
            await until(lambda: world.last("training", "records_seen") >= 8, task)
            told = await control.ask(learner, Forgotten, do="forget", tenant="acme")
            assert (told.is_in_training, list(told.learned), told.clean) == (True, [], "v000001")
            await control.ask(learner, control.WentBack, do="rollback", to=told.clean)
            await until(
                lambda: "training begins again from v000001" in str(world.entries("state")), task
            )

    asyncio.run(main())
    trained = json.loads((world.root / "learner/buffer/cursor.json").read_text())["trained"]
    assert SERVED in [commit["checkpoint_id"] for commit in trained]


def test_without_a_learner_a_rollback_makes_the_next_one_begin_again(world):
    async def main():
        async with world.fleet():
            await learn_some(world)
            for _ in range(2):
                publish(world, through=0)
            cfg = world.config()
            with pytest.raises(FileNotFoundError, match=r"v000009.*v000003.*v000001"):
                await rollback.roll_back(cfg, "v000009")
            assert await rollback.roll_back(cfg, "v000001") == "v000001"
            assert [fake.version for fake in world.fakes] == ["v000001", "v000001"]
        assert begins_again(world)

    asyncio.run(main())


def test_without_a_learner_a_swap_makes_the_next_one_begin_again(world):
    async def main():
        async with world.fleet():
            await learn_some(world)
            chosen = publish(world, through=0)
            world.registry.rollback("v000001")
            assert (await swap.roll_out(world.config(), chosen)).passed
        assert begins_again(world)

    asyncio.run(main())


async def learn_some(world):
    """A learner that trains on some records, and ends."""
    async with world.learner() as task:
        await until(lambda: world.entries("state"), task)
        ship(world.spool, make_records(world.target, 40, seed=3))
        await until(lambda: world.last("training", "records_seen") >= 8, task)


def begins_again(world):
    """True if the next learner begins from the served version and passes over the records so far."""
    with Buffer(world.config().buffer_config, fingerprint(world.target)) as buffer:
        newest, former, *_ = buffer.commits()
    return (newest.checkpoint_id, newest.through) == (SERVED, former.through)


# --- the command


def test_the_command_tells_and_ends_with_1_if_there_was_nothing(world, some, capsys, monkeypatch):
    monkeypatch.chdir(world.root)
    publish(world, through=0)
    config = f'target = "{world.target}"\nregistry = "registry"\nspool = "spool"\n'
    (world.root / "learner.toml").write_text(config + '[fleet]\nservers = ["http://127.0.0.1:1"]\n')
    fill(world, of("acme", some[:4]))
    assert dispatch(["fleet", "forget", "acme", "--dry-run"]) == 0
    assert "4 records of acme would be deleted: 4 in the buffer" in capsys.readouterr().out
    assert dispatch(["fleet", "forget", "acme"]) == 0
    assert re.match(
        r"4 records of acme were deleted: 4 in the buffer\nrecords that are still on",
        capsys.readouterr().out,
    )
    with pytest.raises(SystemExit) as ended:
        dispatch(["fleet", "forget", "acme"])
    assert ended.value.code == 1
    assert "nothing of this tenant was found: check the spelling" in capsys.readouterr().out

    async def forget_live(*_):
        return ["a server deleted 12 token runs"], True

    monkeypatch.setattr(forget, "forget_live", forget_live)
    assert dispatch(["fleet", "forget", "acme"]) == 0
    assert "spelling" not in capsys.readouterr().out, "live counts had text of the tenant"


def test_the_servers_memory_is_forgotten_too_and_who_did_not_is_named(world):
    path = "/redraft/forget"
    fakes = [
        FakeServer(Traffic(), answers={path: b'{"live_runs": 12}'}),
        FakeServer(Traffic(), answers={path: b'{"live_runs": 0}'}),
        FakeServer(Traffic()),  # without the route
        FakeServer(Traffic(), answers={path: b'{"live_runs": -1}'}),
        FakeServer(Traffic()),
    ]

    async def main(shown):
        async with running(*fakes):
            fakes[-1].stop()
            fleet = FleetConfig(servers=tuple(fake.url for fake in shown))
            return await forget.forget_live(world.config(fleet=fleet), "acme")

    lines, is_held = asyncio.run(main(fakes))
    assert is_held
    assert lines[0].startswith(f"{fakes[0].url} deleted 12 ")
    assert len(lines) == 4
    for fake, line in zip(fakes[2:], lines[1:], strict=True):
        assert line.startswith(f"{fake.url} did not delete the text, {forget.UNTIL_IT_ENDS}: ")
    assert asyncio.run(main(fakes[1:2])) == (
        ["no server had text of the tenant in its live counts"],
        False,
    )


def test_without_a_token_the_records_are_deleted_and_no_server_is_asked(world, monkeypatch):
    monkeypatch.delenv("REDRAFT_TOKEN")
    fleet = FleetConfig(servers=("http://127.0.0.1:1",))
    (line,), is_held = asyncio.run(forget.forget_live(world.config(fleet=fleet), "acme"))
    prefix = f"no server was asked to delete the text, {forget.UNTIL_IT_ENDS}: "
    assert line.startswith(f"{prefix}there is no token")
    assert "set fleet.token_file in learner.toml (--config), or " in line
    assert not is_held
