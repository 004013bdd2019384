"""Every file of the learner damaged, torn, empty, missing or of another release; every disk full.

Each row of the table ends in a learner that goes on and tells, or in one line with the cure.
"""

from __future__ import annotations

import asyncio
import errno
import io
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_fleet import TOKEN
from learner_world import World, make_records, ship
from waiting import PATIENCE_S, until, wait_until

from redraft.files.artifact import publish, verify
from redraft.files.folder import fingerprint
from redraft.files.sealed import write_sealed
from redraft.online.daemon import cycle
from redraft.online.daemon import learner as learner_module
from redraft.online.daemon.config import load_config
from redraft.online.daemon.opening import opened
from redraft.online.daemon.sleep import save_sleep
from redraft.online.daemon.state import Phase, State, load, save
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.buffer_file import BufferFullError
from redraft.online.learning.candidate import Candidate
from redraft.online.learning.clock import BELIEVED_AFTER_S, SteadyClock
from redraft.online.learning.config import Replay, Training
from redraft.online.learning.cursor import SERVED
from redraft.online.learning.staleness import Sleep
from redraft.online.learning.trainer import Trainer
from redraft.online.records.record import encode_record, read_frames


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("REDRAFT_TOKEN", TOKEN)
    monkeypatch.setattr(cycle, "DISK_RETRY_S", 0.1)


@pytest.fixture(scope="module")
def records(random_target):
    return make_records(random_target, 200)


@pytest.fixture(scope="module")
def used(random_target, noisy_draft, records, tmp_path_factory):
    """A world after some learning.

    Two promoted versions, a third one, records, and a committed checkpoint.
    """
    world = World.make(tmp_path_factory.mktemp("used"), random_target, noisy_draft)
    for number in range(3):
        version = world.registry.publish(
            lambda folder: shutil.copytree(noisy_draft, folder, dirs_exist_ok=True),
            target_fingerprint=fingerprint(random_target),
            provenance={"trained_from": f"v{number:06d}"},
            evaluation={},
        )
        if number < 2:
            world.registry.promote(version)

    async def script(task):
        ship(world.spool, records[:40])
        await until(lambda: world.last("training", "records_seen") >= 8, task)

    play(world, script)
    assert list((world.root / "learner" / "checkpoints").iterdir())
    return world


@pytest.fixture
def world(used, tmp_path):
    shutil.copytree(used.root, tmp_path, symlinks=True, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "learner" / "journal")
    return World.make(tmp_path, used.target, used.draft)


def play(world, script, **changes):
    async def main():
        async with world.fleet(), world.learner(**changes) as task:
            await script(task)

    asyncio.run(main())


def faults(world):
    return {entry.what: entry.reason for entry in world.entries("fault")}


def cut(path, size=20):
    path.write_bytes(path.read_bytes()[:size])


def flip(path, at=-100):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def in_phase(phase, candidate="v000003"):
    return lambda learner, registry: save(
        State(phase=phase, candidate=candidate), learner / "state.json"
    )


def publishing(learner, registry):
    """A candidate whose verdict was reached: a checkpoint with a draft."""
    publish(
        learner / "checkpoints" / "checkpoint-000009",
        lambda folder: shutil.copytree(registry / "v000001", folder / "draft"),
        {"progress": {"through": 20, "records": 20, "skipped": 0}, "began_from": "v000002"},
    )
    in_phase(Phase.PUBLISHING, "checkpoint-000009")(learner, registry)


def newest_checkpoint(learner):
    return sorted((learner / "checkpoints").iterdir())[-1]


def text_flipped(learner, registry):
    (path,) = (learner / "buffer").glob("records-*.db")
    content = path.read_bytes()
    at = content.index(b"code")  # the domain of a record, in the index
    path.write_bytes(content[:at] + b"\xff" + content[at + 1 :])


def column_flipped(learner, registry):
    (path,) = (learner / "buffer").glob("records-*.db")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE records SET held_out = 1 - held_out WHERE seq = 3")


def sleep_torn(learner, registry):
    save_sleep(Sleep(version="v000002", num_attempts=1), learner / "sleep.json")
    cut(learner / "sleep.json")


GOES_ON = {
    # name: (damage, the fault told, words of its reason)
    "promoted torn": (lambda learner, registry: cut(registry / "promoted.json"), "registry_damaged", "are now v0"),
    "promoted empty": (lambda learner, registry: cut(registry / "promoted.json", 0), "registry_damaged", "to roll"),
    "promoted flipped": (lambda learner, registry: flip(registry / "promoted.json", -5), "registry_damaged", "to roll"),
    "promoted missing": (
        lambda learner, registry: (registry / "promoted.json").unlink(), "registry_damaged", "was missing",
    ),
    "registry.json torn": (lambda learner, registry: cut(registry / "registry.json"), "registry_damaged", "id is"),
    "state torn": (lambda learner, registry: cut(learner / "state.json"), "state_damaged", "in the idle phase"),
    "state empty": (lambda learner, registry: cut(learner / "state.json", 0), "state_damaged", "in the idle phase"),
    "state flipped": (lambda learner, registry: flip(learner / "state.json", 50), "state_damaged", "checksum differs"),
    "sleep torn": (sleep_torn, "state_damaged", "awake and measures a new reference"),
    "cursor torn": (lambda learner, registry: cut(learner / "buffer/cursor.json"), "buffer_damaged", "checkpoints"),
    "cursor empty": (lambda learner, registry: cut(learner / "buffer/cursor.json", 0), "buffer_damaged", "checkpoints"),
    "cursor missing": (
        lambda learner, registry: (learner / "buffer/cursor.json").unlink(), "buffer_damaged", "checkpoints",
    ),
    "forgotten torn": (
        lambda learner, registry: cut(learner / "buffer/forgotten.json"), "buffer_damaged", "tenants were read",
    ),
    "key missing": (
        lambda learner, registry: (learner / "buffer/held-out.key").unlink(), "buffer_damaged", "key was missing",
    ),
    "key flipped": (
        lambda learner, registry: flip(learner / "buffer/held-out.key", 5), "buffer_damaged", "was not the key",
    ),
    "key short": (
        lambda learner, registry: cut(learner / "buffer/held-out.key"), "buffer_damaged", "did not contain a key",
    ),
    "buffer text": (text_flipped, "buffer_damaged", "its records are lost"),
    "buffer column": (column_flipped, "buffer_damaged", "the checksum of record 3 differs"),
    "buffer cut": (
        lambda learner, registry: cut(next((learner / "buffer").glob("records-*"))), "buffer_damaged", "are lost",
    ),
    "checkpoint flipped": (
        lambda learner, registry: flip(next(newest_checkpoint(learner).rglob("*.safetensors"))),
        "checkpoint_damaged", "SHA-256",
    ),
    "checkpoint without manifest": (
        lambda learner, registry: (newest_checkpoint(learner) / "manifest.json").unlink(),
        "checkpoint_damaged", "manifest",
    ),
    "checkpoints missing": (
        lambda learner, registry: shutil.rmtree(learner / "checkpoints"), "checkpoint_damaged", "cannot continue",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOES_ON)
def test_the_learner_goes_on_and_tells(world, records, name):
    damage, fault, words = GOES_ON[name]
    learner, registry = world.root / "learner", world.root / "registry"
    damage(learner, registry)

    async def script(task):
        await until(lambda: fault in faults(world) and world.entries("state"), task)
        ship(world.spool, records[100:140])
        await until(lambda: not list(world.spool.glob("*.records")), task)
        await until(lambda: [fake.version for fake in world.fakes] == ["v000002", "v000002"], task)
        await until(lambda: world.last("buffer", "records") > 0, task)

    play(world, script)
    assert words in faults(world)[fault]
    with opened(world.config()) as (_, again, buffer):  # the next start finds nothing to mend
        assert not again.mended
        assert not buffer.damage


@pytest.mark.parametrize(
    ("ends", "through"), [([], 0), ([10, 20], 20), ([10, 999], 28), ([10, None], 10)]
)
def test_without_commits_and_checkpoints_training_goes_on_behind_the_versions(
    new_world, records, ends, through
):
    world, (cfg, draft) = new_world, (new_world.config(), new_world.draft)
    for provenance in ({"copied_from": str(draft)}, *({"trained_through": end} for end in ends)):
        version = world.registry.publish(
            lambda folder: shutil.copytree(draft, folder, dirs_exist_ok=True),
            target_fingerprint=fingerprint(world.target),
            provenance={name: value for name, value in provenance.items() if value},
            evaluation={},
        )
        world.registry.promote(version)
    candidate = Candidate(cfg.training, "standalone", cfg.target)
    with Buffer(
        replace(cfg.buffer_config, held_out_fraction=0), fingerprint(world.target)
    ) as buffer:
        buffer.append(read_frames(b"".join(map(encode_record, records[:28]))), time.time())
        trainer = Trainer(
            cfg.training, cfg.replay, buffer, world.registry, candidate, cfg.folder / "checkpoints"
        )
        assert trainer.start() == SERVED
        assert trainer.progress.through == through
        assert trainer.find_waiting() == (28, 28 - through)


PHASES = {
    # name: (state, damage)
    "rolling, a bit flips": (in_phase(Phase.ROLLING), lambda registry: flip(registry / "v000003/model.safetensors")),
    "rolling, promoted torn": (in_phase(Phase.ROLLING), lambda registry: cut(registry / "promoted.json")),
    "rolling, version missing": (in_phase(Phase.ROLLING), lambda registry: shutil.rmtree(registry / "v000003")),
    "canary, version missing": (in_phase(Phase.CANARY), lambda registry: shutil.rmtree(registry / "v000003")),
    "publishing, manifest torn": (publishing, lambda registry: cut(registry / "v000003/manifest.json")),
    "publishing, checkpoint missing": (
        publishing, lambda registry: shutil.rmtree(registry.parent / "learner/checkpoints/checkpoint-000009"),
    ),
    "publishing, checkpoint flipped": (
        publishing,
        lambda registry: flip(registry.parent / "learner/checkpoints/checkpoint-000009/draft/model.safetensors"),
    ),
    "judging, checkpoint missing": (in_phase(Phase.JUDGING, "checkpoint-000077"), lambda registry: None),
    "idle, current flips": (in_phase(Phase.IDLE), lambda registry: flip(registry / "v000002/model.safetensors")),
    "idle, current missing": (in_phase(Phase.IDLE), lambda registry: shutil.rmtree(registry / "v000002")),
}  # fmt: skip


@pytest.mark.parametrize("name", PHASES)
def test_damage_in_the_middle_of_a_phase_ends_on_one_intact_version(world, name):
    """Each of these was a crash loop, or left the fleet on two versions."""
    prepare, damage = PHASES[name]
    registry = world.root / "registry"
    prepare(world.root / "learner", registry)
    damage(registry)

    async def script(task):
        for fake in world.fakes:
            fake.version = "v000003"
        await until(lambda: world.entries("state"), task)
        await until(lambda: world.last("state", "phase") in ("idle", "training"), task)
        await until(
            lambda: {fake.version for fake in world.fakes} == {world.registry.current()}, task
        )

    play(world, script)
    verify(world.registry.path(world.registry.current()))
    if name.startswith("idle"):
        assert world.registry.current() == "v000001"
        assert re.search(r"\bv000002\b.*\bv000001\b", faults(world)["registry_damaged"])
    if name == "publishing, manifest torn":
        assert "v000004" in world.registry.versions(), (
            "the candidate was published under another number"
        )


def torn_learner_toml(world):
    (world.root / "learner.toml").write_text("target = [")
    load_config(world.root / "learner.toml")


def binary_learner_toml(world):
    (world.root / "learner.toml").write_bytes(b'target = "\xff"')
    load_config(world.root / "learner.toml")


def empty_learner_toml(world):
    (world.root / "learner.toml").touch()
    load_config(world.root / "learner.toml")


def start(world, **changes):
    with opened(world.config(**changes)):
        pass


def torn_target(world):
    target = shutil.copytree(world.target, world.root / "target")
    cut(target / "config.json")
    start(world, target=target)


def no_intact_version(world):
    for version in ("v000001", "v000002"):
        flip(world.root / "registry" / version / "model.safetensors")
    start(world)


def later_buffer(world):
    (path,) = (world.root / "learner" / "buffer").glob("records-*.db")
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA user_version = 99")
    start(world)


def later_state(world):
    write_sealed(world.root / "learner/state.json", {"phase": "idle"}, layout=2)
    load(world.root / "learner/state.json")


def later_registry(world):
    write_sealed(world.root / "registry/promoted.json", {"versions": []}, layout=2)
    start(world)


ONE_LINE = {
    "settings torn": (torn_learner_toml, r"learner\.toml .*\bTOML \("),
    "settings binary": (binary_learner_toml, r"learner\.toml .*\bTOML: byte 10 "),
    "settings empty": (empty_learner_toml, "target is missing"),
    "target torn": (torn_target, r"config\.json\b"),
    "no intact version": (no_intact_version, "v000002"),
    "state of a later release": (later_state, r"state\.json .*\(layout \d+\)"),
    "buffer of another release": (later_buffer, r"records-\d+\.db has layout 99\b"),
    "registry of a later release": (later_registry, r"\.json .*\(layout \d+\)"),
}


@pytest.mark.parametrize("name", ONE_LINE)
def test_a_damage_that_only_a_person_can_mend_is_one_line_with_the_cure(world, name):
    act, words = ONE_LINE[name]
    with pytest.raises((ValueError, OSError), match=words) as error:
        act(world)
    assert "\n" not in str(error.value)


def test_a_damaged_id_is_found_again_because_servers_refuse_another(world):
    before = world.registry.identify("v000002")
    assert before.registry
    cut(world.root / "registry" / "registry.json")
    assert world.registry.identify("v000002") == before
    start(world)
    assert world.registry.identify("v000002") == before


def test_forgotten_tenants_stay_forgotten_if_one_of_the_two_files_is_lost(world, random_target):
    config = world.config().buffer_config
    late = make_records(random_target, 2, seed=9, tenant="acme")
    from redraft.online.records.record import encode_record

    frames = [(encode_record(record), record) for record in late]
    with Buffer(config, fingerprint(world.target)) as buffer:
        buffer.delete_tenant("acme", time.time())
    for lost in ("cursor.json", "forgotten.json"):
        (config.folder / lost).unlink()
        with Buffer(config, fingerprint(world.target)) as buffer:
            assert buffer.append(frames, time.time()) == {"forgotten": 2}
    for lost in ("cursor.json", "forgotten.json"):
        (config.folder / lost).unlink()
    with Buffer(config, fingerprint(world.target)) as buffer:
        assert "`redraft fleet forget`" in " ".join(buffer.damage)


# --- a clock that jumps


def test_a_clock_that_jumps_deletes_no_record_until_it_has_stayed_so(world, records, monkeypatch):
    shift_s, passed_s = [0.0], [0.0]

    def make_clock(**fields):
        return SteadyClock(
            wall=lambda: time.time() + shift_s[0],
            elapsed=lambda: time.monotonic() + passed_s[0],
            **fields,
        )

    monkeypatch.setattr(learner_module, "SteadyClock", make_clock)

    async def script(task):
        await until(lambda: world.last("buffer", "records"), task)
        stored = world.last("buffer", "records")
        shift_s[0] = 8 * 86400.0
        ship(world.spool, records[100:140])
        await until(lambda: world.last("buffer", "records") > stored, task)
        await until(lambda: "clock_jumped" in faults(world), task)
        assert world.last("buffer", "oldest_s") < 3600
        passed_s[0] = BELIEVED_AFTER_S + 1
        await until(lambda: world.last("buffer", "records") == 0, task)

    play(world, script)
    assert "192.0 hours" in faults(world)["clock_jumped"]


# --- full disks


@contextmanager
def small_disk(folder, megabytes):
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk):
    """Fill the disk to the last byte."""
    with (disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


@pytest.fixture
def new_world(random_target, noisy_draft, tmp_path):
    return World.make(tmp_path, random_target, noisy_draft)


@pytest.mark.parametrize("place", ["learner", "registry"])
def test_a_full_disk_pauses_the_learner_and_it_resumes_with_the_space(
    new_world, records, place, capsys
):
    """State, checkpoints, journal and buffer are in the learner's folder, versions in the registry."""
    world, told = new_world, []

    def is_told():  # on stderr: the journal may be on the full disk
        told.append(capsys.readouterr().err)
        return '"disk_full"' in "".join(told)

    async def script(task):
        await until(lambda: all(fake.version == "v000001" for fake in world.fakes), task)
        fill(disk)
        ship(world.spool, records)
        await until(is_told, task)
        assert world.registry.current() == "v000001"
        (disk / "ballast").unlink()
        await until(lambda: world.registry.current() not in (None, "v000001"), task)
        version = world.registry.current()
        await until(lambda: {fake.version for fake in world.fakes} == {version}, task)

    with small_disk(world.root / place, 64) as disk:
        play(world, script)
        verify(world.registry.path(world.registry.current()))


def test_while_the_buffers_disk_is_full_no_checkpoints_pile_up_on_another(tmp_path):
    """Each attempt writes a whole checkpoint before the commit fails."""

    def refuse(*_):
        raise BufferFullError(errno.ENOSPC, "full")

    buffer = SimpleNamespace(commits=list, commit_trained=refuse)
    one_rank = SimpleNamespace(num_processes=1)
    candidate = SimpleNamespace(accelerator=one_rank, version=Path("v000001"))
    trainer = Trainer(Training(), Replay(), buffer, None, candidate, tmp_path)
    trainer.ranks = SimpleNamespace(do=lambda write, folder: (folder / "state").mkdir())
    for _ in range(3):
        with pytest.raises(BufferFullError):
            trainer.checkpoint()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["learner", "registry"])
def test_a_learner_that_starts_on_a_full_disk_waits_for_space(new_world, place, monkeypatch):
    # capsys.readouterr loses what a thread writes between its read and its truncation.
    monkeypatch.setattr(sys, "stderr", said := io.StringIO())
    with small_disk(new_world.root / place, 8) as disk:
        fill(disk)
        started = threading.Event()

        def begin():
            with opened(new_world.config()):
                started.set()

        thread = threading.Thread(target=begin)
        thread.start()
        wait_until(lambda: "disk is full" in said.getvalue())
        assert not started.is_set()
        (disk / "ballast").unlink()
        thread.join(PATIENCE_S)
        assert started.is_set()
        assert new_world.registry.current() == "v000001"
        assert replace(new_world.config()).folder.is_dir()
