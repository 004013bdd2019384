"""The daemon from end to end, with a fake fleet and records of a small target."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from fake_fleet import TOKEN
from learner_world import ANYTHING, QUICK, World, make_draft, make_records, ship
from safetensors.torch import load_file, save_file
from waiting import PATIENCE_S, until

from benchmarks.soak import poison
from redraft.files.artifact import verify
from redraft.files.folder import fingerprint
from redraft.files.lock import AlreadyOwnedError, own
from redraft.online.daemon import control, cycle, rollouts
from redraft.online.daemon.inbox import Inbox
from redraft.online.daemon.judging import choose_judging
from redraft.online.daemon.learner import run
from redraft.online.daemon.opening import opened
from redraft.online.daemon.state import Event, load
from redraft.online.fleet import rollout
from redraft.online.fleet.discovery import FleetConfig
from redraft.online.fleet.registry import Registry
from redraft.online.fleet.rollout import Outcome
from redraft.online.fleet.server import Drafting
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import Judging
from redraft.online.learning.forget import Forgotten
from redraft.online.learning.gate import Decision
from redraft.online.records.record import MAGIC, Sampling, encode_record
from redraft.online.records.spool import is_in_memory


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)


@pytest.fixture(scope="session")
def records(random_target):
    return make_records(random_target, 600)


@pytest.fixture
def world(random_target, noisy_draft, tmp_path):
    return World.make(tmp_path, random_target, noisy_draft)


def play(world, script, **changes):
    """Run the script beside a learner and a fleet."""

    async def main():
        async with world.fleet(), world.learner(**changes) as task:
            await script(task)

    asyncio.run(main())


async def promoted(world, task):
    """The first version trained by the learner, once every server serves it and it is current."""
    await until(lambda: world.registry.current() not in (None, "v000001"), task)
    version = world.registry.current()
    await until(lambda: all(fake.version == version for fake in world.fakes), task)
    return version


def faults(world):
    return {entry.what for entry in world.entries("fault")}


def phases(world):
    return [entry.phase for entry in world.entries("state")]


# --- learning


def test_a_better_draft_reaches_every_server(world, records):
    async def script(task):
        # a trainer has moved the target of all servers
        moved = [
            msgspec.structs.replace(record, target_version="17@0123456789ab")
            for record in records[:300]
        ]
        ship(world.spool, moved)
        folder = world.registry.path(await promoted(world, task))
        verify(folder)
        assert (
            json.loads((folder / "provenance.json").read_text())["target_version"]
            == "@0123456789ab"
        )
        await until(lambda: world.entries("state")[-1].promoted, task)

    play(world, script)
    counted = [entry.promoted for entry in world.entries("state")]
    assert (counted[0], counted[-1]) == (0, 1)
    (verdict, *_) = [entry for entry in world.entries("gate") if entry.verdict == "promote"]
    assert verdict.low > 0.02
    assert verdict.domains["code"].gain > 0
    ways = ["idle", "training", "judging", "publishing", "canary", "rolling", "idle"]
    assert [phase for phase in phases(world) if phase != "idle"][:5] == ways[1:-1]


def test_a_single_server_is_measured_once_while_the_candidate_is_judged(
    random_target, noisy_draft, tmp_path, records, monkeypatch
):
    world = World.make(tmp_path, random_target, noisy_draft, servers=1)
    measure, measured, again = rollout.measure_alone, [], []

    async def note(*args):
        measured.append(phases(world)[-1])
        return await measure(*args)

    async def note_again(*args):
        again.append(phases(world)[-1])
        return await measure(*args)

    monkeypatch.setattr(rollouts, "measure_alone", note)
    monkeypatch.setattr(rollout, "measure_alone", note_again)

    async def script(task):
        ship(world.spool, records[:300])
        await promoted(world, task)

    play(world, script)
    assert set(measured) == {"judging"}
    assert again == []
    (passed,) = [entry for entry in world.entries("state") if entry.phase == "rolling"]
    assert "its own earlier results" in passed.reason


def test_the_gate_judges_with_the_servers_draft_tokens_and_sampling_method(world, records):
    assert world.config().judging.num_speculative_tokens == 3, (
        "the configured number is another one"
    )
    for fake in world.fakes:
        fake.drafting = {"num_speculative_tokens": 2, "draft_sample_method": "probabilistic"}

    async def script(task):
        ship(world.spool, records[:300])
        version = await promoted(world, task)
        told = json.loads((world.registry.path(version) / "evaluation.json").read_text())["judging"]
        assert (told["num_speculative_tokens"], told["draft_sample_method"]) == (2, "probabilistic")

    play(world, script)
    verdicts = world.entries("gate")
    assert all(
        entry.reason.rpartition("(")[2].startswith("2 draft tokens, probabilistic,")
        for entry in verdicts
    )
    assert all(entry.tau_candidate <= 3 for entry in verdicts if entry.requests)


FEW, MANY = Drafting(3, "greedy"), Drafting(5, "probabilistic")


@pytest.mark.parametrize(
    ("servers", "chosen", "told"),
    [
        (
            [],
            Drafting(4, "greedy"),
            "4 draft tokens, greedy, unchanged, because no server reports its drafting settings",
        ),
        ([MANY, MANY], MANY, "5 draft tokens, probabilistic, the servers' drafting settings"),
        (
            [MANY, FEW, MANY],
            MANY,
            "5 draft tokens, probabilistic, the drafting settings of 2 of 3 servers",
        ),
        ([MANY, FEW], FEW, "3 draft tokens, greedy, the drafting settings of 1 of 2 servers"),
    ],
)
def test_most_servers_decide_how_to_judge(servers, chosen, told):
    latest = Judging(num_speculative_tokens=4, held_out_per_domain=7)
    judging, words = choose_judging(latest, Counter(servers))
    assert Drafting(judging.num_speculative_tokens, judging.draft_sample_method) == chosen
    assert (words, judging.held_out_per_domain) == (told, 7)


def test_records_of_older_drafts_are_learned_from(world, random_target):
    old = make_records(random_target, 300, seed=5, draft_version="v000000")

    async def script(task):
        ship(world.spool, old)
        await promoted(world, task)

    play(world, script)


def test_the_learner_goes_on_where_it_ended(world, records):
    async def first(task):
        ship(world.spool, records[:300])
        await promoted(world, task)

    play(world, first)
    steps = world.last("training", "step")

    async def second(task):
        ship(world.spool, records[300:])
        await until(lambda: world.last("training", "step") > steps + 8, task)

    play(world, second)
    assert world.last("training", "records_seen") > 4 * steps
    assert any("checkpoint" in entry.reason for entry in world.entries("state"))


def test_a_draft_that_gains_nothing_is_rejected_and_training_begins_again(world, records):
    training = world.config().training
    quick = {**vars(training), "lr": 0.05, "records_per_candidate": 16, "patience": 1}

    async def script(task):
        ship(world.spool, records[:300])
        await until(lambda: any(e.verdict == "reject" for e in world.entries("gate")), task)
        await until(lambda: "begins again" in str(world.entries("state")), task)

    play(world, script, training=type(training)(**quick))
    assert world.registry.versions() == ["v000001"]
    assert all(fake.swaps in ([], ["v000001"]) for fake in world.fakes)
    looks = [entry for entry in world.entries("gate") if entry.requests]
    assert load(world.root / "learner" / "state.json").num_looks == len(looks) > 0


def test_canaries_that_are_worse_again_and_again_end_a_training_that_passes_the_gate(
    world, records
):
    world.traffic.tau = defaultdict(lambda: 1.5, {"start": 2.0, "v000001": 2.0})
    training = replace(world.config().training, records_per_candidate=16, patience=2)

    async def script(task):
        ship(world.spool, records[:300])
        await until(lambda: "begins again" in str(world.entries("state")), task)

    play(world, script, training=training, gate=ANYTHING)
    assert {entry.verdict for entry in world.entries("gate")} == {"promote"}
    assert sum(entry.outcome == "rolled_back" for entry in world.entries("swap")) >= 2
    assert world.registry.current() == "v000001"


def test_a_loss_that_is_not_finite_is_never_saved(world, records):
    training = world.config().training
    wild = {**vars(training), "lr": 1e30, "max_grad_norm": 1e30, "warmup_steps": 1}

    async def script(task):
        ship(world.spool, records[:300])
        await until(lambda: any("discarded" in e.reason for e in world.entries("state")), task)

    play(world, script, training=type(training)(**wild))
    assert "loss_not_finite" in faults(world)
    assert world.registry.versions() == ["v000001"]
    # After it, one more finite step of the candidate may be saved at the end.
    for weights in (world.root / "learner" / "checkpoints").rglob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(weights).values()), weights


def test_a_learner_slower_than_its_traffic_skips_the_oldest(world, records):
    training = world.config().training
    lagging = {**vars(training), "max_lag_records": 40}
    ship(world.spool, records[:300])

    async def script(task):
        await until(lambda: world.last("training", "skipped") > 50, task)

    play(world, script, training=type(training)(**lagging))
    assert 1 <= len(list((world.root / "learner" / "checkpoints").iterdir())) <= 2


@pytest.mark.slow
def test_training_outlives_many_promotions_of_a_draft_that_began_long_ago(world, random_target):
    """One version is kept.

    The one that training began from is the first to go at the third promotion.
    """
    quick = {
        "training": replace(world.config().training, records_per_candidate=16),
        "gate": ANYTHING,
    }

    async def first(task):
        ship(world.spool, make_records(random_target, 300))
        await until(lambda: world.registry.current() >= "v000004", task)
        last = world.last("training", "step")
        await until(lambda: world.last("training", "step") > last + 8, task)

    async def second(task):
        ship(world.spool, make_records(random_target, 100, seed=1))
        await until(lambda: len(world.entries("training")) > trained + 8, task)

    play(world, first, keep_versions=1, **quick)
    assert "v000002" not in world.registry.versions()
    trained, lives = len(world.entries("training")), len(world.entries("state"))
    play(world, second, keep_versions=1, **quick)
    assert "checkpoint" in world.entries("state")[lives].reason


def test_versions_that_are_never_promoted_do_not_fill_the_disk(world, records):
    """In light traffic, canary after canary ends without a result."""
    world.traffic.drafts_per_reading = 0
    quick = {
        "training": replace(world.config().training, records_per_candidate=16),
        "gate": ANYTHING,
        "rollout": replace(QUICK, window_timeout_s=0.1),
    }

    async def script(task):
        ship(world.spool, records[:300])
        await until(lambda: world.registry.latest() >= "v000005", task)
        await until(lambda: len(world.registry.versions()) <= 3, task)

    play(world, script, keep_versions=2, **quick)
    assert world.registry.current() == "v000001"


# --- what arrives


def test_what_is_torn_twice_or_of_another_target_is_counted_and_not_trained(world, records):
    foreign = [type(r)(**{f: getattr(r, f) for f in r.__struct_fields__} | {"target_fingerprint": "another"})
               for r in records[40:60]]  # fmt: skip
    wild = [type(r)(**{f: getattr(r, f) for f in r.__struct_fields__} | {"output": b"\xff\xff\xff\x7f" * 24})
            for r in records[60:70]]  # fmt: skip
    ship(world.spool, [*records[:40], *records[:10], *foreign, *wild])
    flipped = bytearray(encode_record(records[100]))
    flipped[-9] ^= 4
    (world.spool / "99999999999999999999-boot-00000000.records").write_bytes(
        flipped + encode_record(records[101])[:-20]
    )

    async def script(task):
        await until(lambda: not list(world.spool.glob("*.records")), task)
        await until(
            lambda: (world.last("buffer", "dropped") or {}).get("outside_vocabulary") == 10, task
        )
        await until(lambda: (world.last("buffer", "dropped") or {}).get("corrupt") == 2, task)

    play(world, script)
    status = world.entries("buffer")[-1]
    assert status.dropped["duplicate"] == 10
    assert status.dropped["foreign"] == 20
    assert status.records + status.held_out == 40


def test_hostile_records_among_good_ones_do_not_stop_learning(world, records):
    """Each ended or stopped the learner once.

    It ended at each of the first four of them, at every start, and the last ones stopped the gate.
    """
    odd = {
        "draft_version": "a b",
        "sampling": Sampling(temperature=1e-40),
        "hidden_shape": (2**62, 2**62),
    }
    good = {
        "target_fingerprint": records[0].target_fingerprint,
        "sampling": Sampling(temperature=0),
    }
    hostile = [
        poison.make_invalid_utf8(),
        poison.make_nested(100_000),
        poison.pack(poison.unpack(poison.make_record()) | {"row_positions": b"", "top_k": 2**62}),
        *(encode_record(poison.make_record(**good | {name: value})) for name, value in odd.items()),
        poison.make_bomb(),
        b"RDR1" * 100_000,
        poison.make_later(1),
    ]

    async def script(task):
        for number, frame in enumerate(hostile):
            (world.spool / f"{number:020d}-boot-00000000.records").write_bytes(frame)
        ship(world.spool, records[:300])
        await promoted(world, task)

    world.spool.mkdir()
    play(world, script)
    dropped = world.entries("buffer")[-1].dropped
    assert {name: dropped[name] for name in ("bad_identifier", "oversized", "corrupt")} == {
        "bad_identifier": 1,
        "oversized": 1,
        "corrupt": 6,
    }
    assert not list(world.spool.iterdir())


def test_the_spool_is_only_emptied_of_what_is_stored(world, records, tmp_path):
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        buffer = type(world.config().buffer)(folder=disk, held_out_fraction=0.3)

        async def script(task):
            await until(lambda: world.entries("buffer"), task)
            (disk / "ballast").write_bytes(bytes(7_400_000))
            ship(world.spool, records[:300])
            await until(lambda: "disk_full" in faults(world), task)
            assert list(world.spool.glob("*.records"))
            (disk / "ballast").unlink()
            await until(lambda: not list(world.spool.glob("*.records")), task)
            await until(lambda: world.last("buffer", "records") > 150, task)

        play(world, script, buffer=buffer)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_what_servers_lose_before_the_spool_is_counted_since_the_learner_began(world):
    first, second = world.fakes
    first.capture = {"dropped_steps_queue_full": 100, "records": 7}

    async def script(task):
        await until(lambda: world.entries("buffer"), task)
        first.capture = {"dropped_steps_queue_full": 103, "records": 9}
        second.capture = {"dropped_records_spool": 2}
        await until(lambda: (world.last("buffer", "dropped") or {}).get("spool_full") == 2, task)
        await first.restart()
        first.capture = {"dropped_steps_queue_full": 5}
        await until(lambda: world.last("buffer", "dropped").get("queue_full") == 8, task)

    play(world, script)


def test_a_buffer_that_is_locked_holds_up_neither_answers_nor_the_watch(world, monkeypatch):
    """A file that is rewritten without a tenant's excess locks it for as long as the disk takes."""
    read, is_free, waits = Buffer.status, threading.Event(), []

    def wait_and_read(buffer):
        waits.append(is_free.wait(30))
        return read(buffer)

    async def script(task):
        await until(lambda: world.entries("buffer"), task)
        monkeypatch.setattr(Buffer, "status", wait_and_read)
        try:
            for fake in world.fakes:
                fake.asked.clear()
            await until(lambda: all(len(fake.asked) > 8 for fake in world.fakes), task)
            folder = world.root / "learner"
            assert (await control.ask(folder, control.Standing, do="status")).current == "v000001"
            assert not waits
        finally:
            is_free.set()
        await until(lambda: waits, task)

    play(world, script)
    assert all(waits)


# --- the fleet


def with_other_tokenizer(source, folder):
    """The same model with one merge fewer in the tokenizer."""
    changed = shutil.copytree(source, folder)
    tokenizer = json.loads((changed / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:-1]
    (changed / "tokenizer.json").write_text(json.dumps(tokenizer))
    return changed


@pytest.mark.parametrize("change", [make_draft, with_other_tokenizer], ids=["weights", "tokenizer"])
def test_a_target_changed_under_the_same_address_is_kept_aside_and_nothing_is_swapped(
    world, records, change, tmp_path
):
    other = fingerprint(change(world.target, tmp_path / "other"))

    async def script(task):
        ours = world.fakes[0].target_fingerprint
        await until(lambda: all(fake.version == "v000001" for fake in world.fakes), task)
        swaps = [list(fake.swaps) for fake in world.fakes]
        world.fakes[0].target_fingerprint = other
        await until(lambda: world.last("state", "phase") == "halted", task)
        ship(
            world.spool,
            [
                msgspec.structs.replace(record, target_fingerprint=other)
                for record in records[300:320]
            ],
        )
        ship(world.spool, records[:300])
        await until(
            lambda: world.last("buffer", "records") + world.last("buffer", "held_out") == 300, task
        )
        world.fakes[1].version = "start"  # the halted learner does not reconcile either
        world.fakes[1].asked.clear()
        await until(lambda: world.fakes[1].asked.count("/redraft/status") > 4, task)
        assert not world.entries("training")
        assert [list(fake.swaps) for fake in world.fakes] == swaps
        assert world.last("buffer", "dropped")["foreign"] == 20
        world.fakes[0].target_fingerprint = ours
        await promoted(world, task)

    play(world, script)
    assert "target_changed" in faults(world)


def test_a_server_that_restarts_with_its_old_draft_is_brought_back(world, records):
    async def script(task):
        ship(world.spool, records[:300])
        version = await promoted(world, task)
        await world.fakes[1].restart()
        assert world.fakes[1].version == "start"
        await until(lambda: world.fakes[1].version == version, task)

    play(world, script)


def test_the_fleet_stays_on_one_version_where_a_server_refuses_the_new_one(world, records):
    world.fakes[1].refuses = {"v000002"}

    async def script(task):
        ship(world.spool, records[:300])
        await until(lambda: any(e.outcome == "refused" for e in world.entries("swap")), task)
        await until(lambda: world.last("state", "phase") in ("idle", "training"), task)
        assert [fake.version for fake in world.fakes] == ["v000001", "v000001"]

    play(world, script)
    assert world.registry.current() == "v000001"


# --- a person


def test_a_bad_version_that_a_person_forces_is_taken_back_by_the_canary(world, records):
    async def script(task):
        await until(lambda: all(fake.version == "v000001" for fake in world.fakes), task)
        await until(
            lambda: world.entries("state"), task
        )  # it answers after the first look at the fleet
        bad = world.registry.publish(
            lambda folder: (folder / "weights").touch(),
            target_fingerprint="",
            provenance={},
            evaluation={},
        )
        world.traffic.tau[bad] = 1.0
        reply = await control.ask(world.root / "learner", Outcome, do="swap", version=bad)
        assert not reply.passed
        assert "hardly" in reply.reason
        assert [fake.version for fake in world.fakes] == ["v000001", "v000001"]
        with pytest.raises(ValueError, match="v000099"):
            await control.ask(world.root / "learner", Outcome, do="swap", version="v000099")

    play(world, script)


def test_a_person_swaps_rolls_back_and_is_told_where_there_is_nothing_before(world, records):
    async def script(task):
        learner = world.root / "learner"
        await until(lambda: world.entries("state"), task)
        with pytest.raises(ValueError, match="v000001"):
            await control.ask(learner, control.WentBack, do="rollback")
        good = world.registry.publish(
            lambda folder: shutil.copytree(world.draft, folder, dirs_exist_ok=True),
            target_fingerprint=fingerprint(world.target), provenance={}, evaluation={},
        )  # fmt: skip
        reply = await control.ask(learner, Outcome, do="swap", version=good)
        assert reply.passed, reply
        assert [fake.version for fake in world.fakes] == [good, good]
        assert await control.ask(learner, control.WentBack, do="rollback") == control.WentBack(
            version="v000001"
        )
        assert [fake.version for fake in world.fakes] == ["v000001", "v000001"]

    play(world, script)


def test_a_canary_can_be_recalled(world, records):
    rollout = type(world.config().rollout)(**{**vars(world.config().rollout), "warm_up_s": 20})

    async def script(task):
        ship(world.spool, records[:300])
        await until(lambda: world.last("state", "phase") == "canary", task)
        await until(lambda: world.fakes[0].version == "v000002", task)
        assert await control.ask(
            world.root / "learner", control.WentBack, do="rollback"
        ) == control.WentBack(version="v000001")
        assert [fake.version for fake in world.fakes] == ["v000001", "v000001"]

    play(world, script, rollout=rollout)


def test_a_recall_that_comes_too_late_goes_back_behind_the_rollout_and_recalls_no_other(
    world, records, monkeypatch
):
    is_promoting, may_promote = threading.Event(), threading.Event()
    promote, post_to = Registry.promote, Inbox.post

    def promote_slowly(registry, version):  # as when a version of gigabytes is read once more
        if version == "v000002":
            is_promoting.set()
            assert may_promote.wait(PATIENCE_S)
        promote(registry, version)

    def post(inbox, move):
        posted = post_to(inbox, move)
        if move.event is Event.RECALLED:
            may_promote.set()
        return posted

    monkeypatch.setattr(Registry, "promote", promote_slowly)
    monkeypatch.setattr(Inbox, "post", post)

    async def script(task):
        learner = world.root / "learner"
        ship(world.spool, records[:300])
        await until(is_promoting.is_set, task)
        assert await control.ask(learner, control.WentBack, do="rollback") == control.WentBack(
            version="v000001"
        )
        assert [fake.version for fake in world.fakes] == ["v000001", "v000001"]
        reply = await control.ask(learner, Outcome, do="swap", version="v000002")
        assert reply.passed, reply

    play(world, script)


def test_a_rollout_that_waits_for_a_full_disk_can_be_recalled(world, records, monkeypatch):
    promote = Registry.promote

    def find_no_space(registry, version):
        if version != "v000001":
            raise OSError(errno.ENOSPC, "No space left on device")
        promote(registry, version)

    monkeypatch.setattr(Registry, "promote", find_no_space)
    monkeypatch.setattr(cycle, "DISK_RETRY_S", 0.1)

    async def script(task):
        ship(world.spool, records[:300])
        await until(lambda: "disk_full" in faults(world), task)
        assert [fake.version for fake in world.fakes] == ["v000002", "v000002"]
        back = control.ask(world.root / "learner", control.WentBack, do="rollback")
        assert await asyncio.wait_for(back, 60) == control.WentBack(version="v000001")
        assert [fake.version for fake in world.fakes] == ["v000001", "v000001"]

    play(world, script)


def test_the_gate_judges_a_draft_that_is_offered(world, records, random_target, tmp_path):
    worse = make_draft(random_target, tmp_path / "worse", noise=0.5)
    ship(world.spool, records[:100])

    async def script(task):
        await until(lambda: world.last("buffer", "held_out") > 20, task)
        verdict = await control.ask(
            world.root / "learner", control.Judged, do="judge", draft=str(worse)
        )
        assert verdict.decision is Decision.REJECT
        better = await control.ask(
            world.root / "learner", control.Judged, do="judge", draft=str(random_target)
        )
        assert better.decision is Decision.PROMOTE

    play(world, script, training=type(world.config().training)(records_per_candidate=10_000))


def test_a_tenant_is_forgotten_also_where_its_records_are_still_on_their_way(world, random_target):
    ship(
        world.spool,
        make_records(random_target, 8, tenant="acme") + make_records(random_target, 8, seed=3),
    )

    async def script(task):
        await until(lambda: not list(world.spool.glob("*.records")), task)
        ship(world.spool, make_records(random_target, 8, seed=4, tenant="acme"))
        told = await control.ask(world.root / "learner", Forgotten, do="forget", tenant="acme")
        assert told.buffer + told.arriving == 16

    play(world, script)


def test_without_retention_a_learner_writes_no_text_and_a_restart_begins_at_the_served_version(
    world, records
):
    async def first(task):
        ship(world.spool, records[:300])
        await promoted(world, task)

    play(world, first, zero_retention=True)
    held = [path for path in world.root.rglob("*") if path.is_file() and MAGIC in path.read_bytes()]
    assert held == []
    assert not (world.root / "learner" / "buffer").exists()

    async def second(task):
        await until(lambda: "continues from v0" in str(world.entries("state")[-1:]), task)

    play(world, second, zero_retention=True)


def test_zero_retention_with_a_spool_on_a_disk_is_refused(world):
    if is_in_memory(world.spool):
        pytest.skip("temporary files lie in memory here")
    with pytest.raises(ValueError, match="/dev/shm/spool"):
        run(world.config(zero_retention=True, fleet=FleetConfig(servers=("http://127.0.0.1:1",))))
    log = {"spool": None, "ingest": "nats://127.0.0.1:1"}
    with pytest.raises(ValueError, match="/dev/shm/spool"):
        run(
            world.config(
                zero_retention=True, fleet=FleetConfig(servers=("http://127.0.0.1:1",)), **log
            )
        )
    assert is_in_memory(Path("/dev/shm/not/there/yet"))


def test_sigterm_ends_a_learner_that_is_still_starting(world, monkeypatch):
    """Linux ignores a signal without a handler if it is for the first process of a container."""

    @contextmanager
    def start_slowly(cfg):
        os.kill(os.getpid(), signal.SIGTERM)
        yield time.sleep(PATIENCE_S)

    monkeypatch.setattr("redraft.online.daemon.learner.opened", start_slowly)
    with pytest.raises(SystemExit) as ended:
        run(world.config(fleet=FleetConfig(servers=("http://127.0.0.1:1",))))
    assert ended.value.code == 128 + signal.SIGTERM


# --- who may run


def test_a_second_learner_of_the_same_draft_is_refused(world):
    async def script(task):
        with pytest.raises(AlreadyOwnedError, match=rf"learner\b.*\(process {os.getpid()} on "):
            async with world.learner():
                pass

    play(world, script)


@pytest.mark.parametrize("zero_retention", [False, True])
def test_a_second_learner_on_the_same_folder_is_refused_also_with_another_registry(
    world, zero_retention
):
    spool = Path("/dev/shm/redraft-never-made") if zero_retention else world.spool
    cfg = world.config(
        zero_retention=zero_retention, spool=spool, fleet=FleetConfig(servers=("http://127.0.0.1:1",)),
        registry=world.root / "another",
    )  # fmt: skip
    cfg.folder.mkdir()
    with (
        own(cfg.folder / "learner.lock", "a learner"),
        pytest.raises(AlreadyOwnedError, match=rf"{cfg.folder} .*\(process {os.getpid()} on .*\)"),
    ):
        run(cfg)


def test_a_second_learner_on_the_same_spool_is_refused(world):
    world.spool.mkdir()
    other = world.config(registry=world.root / "another", folder=world.root / "another learner")
    with (
        opened(world.config()),
        pytest.raises(AlreadyOwnedError, match=re.escape(str(world.spool))),
        opened(other),
    ):
        pass
    with opened(other):  # the first one has ended
        pass


def test_a_target_or_tokenizer_that_changed_is_refused_at_the_start(world, tmp_path):
    async def script(task):
        await until(lambda: world.entries("buffer"), task)

    play(world, script)
    with pytest.raises(ValueError, match=r"registry/v\d+ .*\bchanged\b"):
        play(world, script, target=with_other_tokenizer(world.target, tmp_path / "changed"))


def test_the_learner_continues_with_a_later_checkpoint_of_the_target(world, tmp_path):
    async def script(task):
        await until(lambda: world.entries("buffer"), task)

    play(world, script)
    later = shutil.copytree(world.target, tmp_path / "later")
    weights = load_file(later / "model.safetensors")
    save_file(
        {name: 1.01 * tensor for name, tensor in weights.items()},
        later / "model.safetensors",
        {"format": "pt"},
    )
    assert fingerprint(later) != fingerprint(world.target)
    for fake in world.fakes:
        fake.target_fingerprint = fingerprint(later)
    play(world, script, target=later)
    assert not [entry for entry in world.entries("fault") if entry.what == "target_changed"]


def test_a_draft_of_another_tokenizer_does_not_become_the_first_version(world, tmp_path):
    changed = shutil.copytree(world.draft, tmp_path / "changed")
    tokenizer = json.loads((changed / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token, number in vocabulary.items() if number in (300, 301)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (changed / "tokenizer.json").write_text(json.dumps(tokenizer))
    world.draft = changed

    async def script(task):
        raise AssertionError

    with pytest.raises(ValueError, match="token"):
        play(world, script)
    assert world.registry.versions() == []


def test_nothing_of_any_text_is_logged(world, records, capfd):
    async def script(task):
        ship(world.spool, records[:300])
        await promoted(world, task)

    play(world, script)
    logged = capfd.readouterr().err
    assert '"kind":"gate"' in logged
    for record in records[:20]:
        ids = record.output_ids.tolist()
        assert ", ".join(map(str, ids[:4])) not in logged
        assert ",".join(map(str, ids[:4])) not in logged
