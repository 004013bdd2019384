"""The registry on a real disk: publication, promotion, rollback, and kills in between."""

import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import time

import pytest
from other_user import call_as_other, needs_root, reachable_folder

from redraft.files import artifact
from redraft.files.lock import AlreadyOwnedError
from redraft.online.fleet.registry import Identity, Registry, read_id


def publish(registry, weights=b"weights", **evaluation):
    return registry.publish(
        lambda folder: (folder / "model.safetensors").write_bytes(weights),
        target_fingerprint="target",
        provenance={"checkpoint": "step-1"},
        evaluation=evaluation,
    )


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "draft")


def test_a_version_holds_everything_and_verifies(registry):
    assert publish(registry, tau=2.5) == "v000001"
    folder = registry.path("v000001")
    assert set(artifact.verify(folder)) == {
        "model.safetensors",
        "provenance.json",
        "evaluation.json",
        "STABLE",
    }
    provenance = json.loads((folder / "provenance.json").read_text())
    assert (provenance["target_fingerprint"], provenance["checkpoint"]) == ("target", "step-1")
    assert json.loads((folder / "evaluation.json").read_text()) == {"tau": 2.5}


def test_versions_count_up_and_publication_is_not_promotion(registry):
    assert [publish(registry) for _ in range(3)] == ["v000001", "v000002", "v000003"]
    assert registry.versions() == ["v000001", "v000002", "v000003"]
    assert registry.latest() == "v000003"
    assert registry.current() is None


def test_a_million_versions_still_sort(registry):
    for name in ("v999999", "v1000000"):
        (registry.folder / name).mkdir()
        (registry.folder / name / "STABLE").touch()
    assert registry.latest() == "v1000000"
    assert publish(registry) == "v1000001"


def test_a_folder_that_was_copied_in_part_is_no_version_and_keeps_its_number(registry):
    publish(registry)
    (registry.folder / "v000002").mkdir()
    assert registry.versions() == ["v000001"]
    assert publish(registry) == "v000003"


def promote_again_and_again(folder, version):
    for _ in range(100):
        Registry(folder)._point_current_at(version)


def test_two_processes_that_promote_do_not_meet(registry):
    versions = [publish(registry), publish(registry)]
    registry.promote(versions[0])
    work = [
        multiprocessing.Process(target=promote_again_and_again, args=(registry.folder, version))
        for version in versions
    ]
    for process in work:
        process.start()
    for process in work:
        process.join()
    assert [process.exitcode for process in work] == [0, 0]
    assert os.readlink(registry.folder / "current") in versions
    assert not list(registry.folder.glob(".current*"))


def test_promotion_moves_one_relative_link(registry, tmp_path):
    publish(registry)
    registry.promote("v000001")
    assert registry.current() == "v000001"
    (tmp_path / "draft").rename(tmp_path / "moved")
    assert (tmp_path / "moved" / "current" / "model.safetensors").read_bytes() == b"weights"


def test_a_damaged_version_is_not_promoted(registry):
    publish(registry)
    publish(registry)
    registry.promote("v000001")
    (registry.path("v000002") / "model.safetensors").write_bytes(b"weightz")
    with pytest.raises(ValueError, match="SHA-256"):
        registry.promote("v000002")
    assert registry.current() == "v000001"


def test_an_unknown_version_is_refused_with_what_there_is(registry):
    publish(registry)
    with pytest.raises(FileNotFoundError, match=r"v000009.*v000001"):
        registry.promote("v000009")
    with pytest.raises(FileNotFoundError):
        registry.path("../../etc")


def test_rollback_skips_versions_that_were_never_current(registry):
    for _ in range(4):
        publish(registry)
    for version in ("v000001", "v000002", "v000004"):
        registry.promote(version)
    assert registry.rollback() == "v000002"
    assert registry.rollback() == "v000001"
    with pytest.raises(FileNotFoundError, match="v000001"):
        registry.rollback()
    registry.promote("v000003")
    assert registry.previous() == "v000001", "what was rolled back is no way back"


def test_rollback_to_a_damaged_version_is_refused(registry):
    for version in (publish(registry), publish(registry)):
        registry.promote(version)
    (registry.path("v000001") / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="missing"):
        registry.rollback()
    assert registry.current() == "v000002"


def test_pruning_keeps_the_newest_the_current_and_the_way_back(registry):
    for _ in range(8):
        publish(registry)
    for version in ("v000001", "v000002", "v000004"):
        registry.promote(version)
    assert registry.prune(keep=2) == ["v000001", "v000003", "v000005", "v000006"]
    assert registry.versions() == ["v000002", "v000004", "v000007", "v000008"]
    assert registry.rollback() == "v000002"
    assert [path.name for path in registry.folder.iterdir() if ".removed" in path.name] == []
    assert publish(registry) == "v000009"
    with pytest.raises(ValueError, match=r"\bkeep\b.*\b0\b"):
        registry.prune(keep=0)


def test_pruning_keeps_what_a_server_that_is_away_may_still_serve(registry):
    for _ in range(5):
        registry.promote(publish(registry))
    assert registry.prune(keep=1, in_use={"v000002", "a draft of its command line"}) == [
        "v000001",
        "v000003",
    ]
    assert registry.versions() == ["v000002", "v000004", "v000005"]


def test_a_second_learner_is_refused_with_the_first_ones_process(registry):
    with registry.owned():
        imports = (
            "import sys, pathlib\nfrom redraft.online.fleet.registry import Identity, "
            "Registry, read_id\n"
        )
        code = f"{imports}with Registry(pathlib.Path(sys.argv[1])).owned(): pass"
        second = subprocess.run(
            [sys.executable, "-c", code, registry.folder], capture_output=True, text=True
        )
        assert second.returncode != 0
        assert f"learner (process {os.getpid()} on {os.uname().nodename})" in second.stderr
    with registry.owned():
        pass


def own_and_wait(folder, ready):
    with Registry(folder).owned():
        ready.set()
        time.sleep(60)


def test_a_killed_learner_lets_go(registry):
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    first = fork.Process(target=own_and_wait, args=(registry.folder, ready))
    first.start()
    assert ready.wait(30)
    with pytest.raises(AlreadyOwnedError, match=f"process {first.pid} "), registry.owned():
        pass
    first.kill()
    first.join()
    with registry.owned():
        pass


def publish_and_promote_forever(folder):
    registry = Registry(folder)
    while True:
        registry.promote(publish(registry, weights=random.randbytes(200_000)))
        registry.prune(keep=2)


def test_kills_while_publishing_promoting_and_pruning_never_leave_a_bad_version(registry):
    registry.promote(publish(registry))
    rng = random.Random(0)
    for _ in range(15):
        writer = multiprocessing.get_context("fork").Process(
            target=publish_and_promote_forever, args=(registry.folder,)
        )
        writer.start()
        time.sleep(rng.uniform(0.02, 0.1))
        writer.kill()
        writer.join()
        assert registry.current() in registry.versions()
        for version in registry.versions():
            artifact.verify(registry.path(version))
    publish(registry)
    registry.prune(keep=1)
    assert not list(registry.folder.glob(".v*")), "what the killed ones left behind is cleared away"


# --- copies and damage


def copy_without_links(registry, folder):
    """A copy as object storage makes it: the files, and no link."""
    shutil.copytree(registry.folder, folder, ignore=shutil.ignore_patterns("current"))
    return Registry(folder)


def test_a_copy_without_links_is_on_the_promoted_version_not_on_the_newest(registry, tmp_path):
    for _ in range(3):
        publish(registry)
    registry.promote("v000001")
    registry.promote("v000002")  # v000003 was refused by its canary
    copied = copy_without_links(registry, tmp_path / "copy")
    assert copied.current() == "v000002"
    copied.repair()
    assert (copied.folder / "current").readlink().name == "v000002"
    assert copied.rollback() == "v000001", "the way back was copied too"


def test_a_copy_of_a_registry_that_was_rolled_back_stays_rolled_back(registry, tmp_path):
    for _ in range(2):
        registry.promote(publish(registry))
    registry.rollback()
    assert copy_without_links(registry, tmp_path / "copy").current() == "v000001"


def test_a_copy_that_made_a_folder_of_the_link_gets_its_link_back(registry, tmp_path):
    for _ in range(2):
        registry.promote(publish(registry))
    shutil.copytree(registry.folder, tmp_path / "copy")  # as `cp -rL`
    copied = Registry(tmp_path / "copy")
    assert not (copied.folder / "current").is_symlink()
    copied.repair()
    assert (copied.folder / "current").readlink().name == "v000002"
    assert copied.versions() == ["v000001", "v000002"]


def test_where_nothing_tells_the_current_version_a_person_chooses(registry):
    publish(registry)
    registry.repair()
    assert registry.current() == "v000001", "there is no choice"
    publish(registry)
    (registry.folder / "current").unlink()
    (registry.folder / "promoted.json").unlink()
    with pytest.raises(ValueError, match=r"2.*`current`.*promoted.json"):
        registry.repair()
    assert registry.current() is None


@pytest.mark.parametrize("lost", ["manifest.json", "model.safetensors"])
def test_a_repair_passes_over_every_damaged_version_to_an_intact_one(registry, lost):
    for _ in range(4):
        registry.promote(publish(registry))
    (registry.path("v000004") / "model.safetensors").unlink()
    for version in ("v000003", "v000002"):
        (registry.path(version) / lost).unlink()
    registry.repair()
    assert (registry.current(), registry.promoted()) == ("v000001", ["v000001"])
    assert re.match(r"v000004 .*\bv000001\b", registry.mended[0])


@pytest.mark.parametrize("was_promoted", [True, False])
def test_a_deleted_version_does_not_give_its_number_again(registry, was_promoted):
    registry.promote(publish(registry))
    publish(registry)
    if was_promoted:
        registry.promote("v000002")
        registry.rollback()
    shutil.rmtree(registry.folder / "v000002")
    assert publish(registry) == "v000003"


def test_versions_are_told_apart_by_bytes_and_registry(registry, tmp_path):
    other = Registry(tmp_path / "other")
    with registry.owned(), other.owned():
        ours, theirs = (
            registry.identify(publish(registry)),
            other.identify(publish(other, weights=b"others")),
        )
    assert ours.manifest_sha256 != theirs.manifest_sha256
    assert ours.registry != theirs.registry
    assert len(ours.manifest_sha256) == 64
    with registry.owned():
        assert registry.identify("v000001") == ours, "the id stays"
    assert registry.identify("v000009") == Identity(registry=ours.registry)


def test_a_registry_without_an_id_is_no_obstacle(registry):
    publish(registry)
    (registry.folder / "registry.json").write_text('{"id": 3}')
    assert registry.identify("v000001").registry == ""
    assert publish(registry) == "v000002"
    assert registry.identify("v000002").registry


def test_a_server_of_another_user_may_read_a_version(registry):
    def write(folder):
        (folder / "part").mkdir(mode=0o700)
        for name in ("model.safetensors", "part/more.safetensors"):
            (folder / name).touch(0o600)  # as safetensors writes it

    version = registry.path(
        registry.publish(write, target_fingerprint="target", provenance={}, evaluation={})
    )
    modes = {
        path.relative_to(version).as_posix(): path.stat().st_mode & 0o777
        for path in version.rglob("*")
    }
    assert modes.pop("part") == 0o755
    assert set(modes.values()) == {0o644}
    assert (registry.folder / "registry.json").stat().st_mode & 0o777 == 0o644


@needs_root
@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_server_of_another_user_reads_the_registry_whatever_the_learners_umask(umask):
    """All that a server and a copy without links read.

    The link, the list, the id, and every byte of a version.
    """

    def read() -> str:
        seen = Registry(root / "drafts" / "llama")
        copied = json.loads((seen.folder / "promoted.json").read_text())["versions"]
        bad = [name for name in copied if not artifact.verify(seen.path(name))]
        return f"{seen.current()} {read_id(seen.folder)} {copied} {bad}"

    def publish_privately(folder) -> None:
        (folder / "part").mkdir(mode=0o700)
        for name in ("model.safetensors", "part/more.safetensors"):
            (folder / name).touch(0o600)  # as safetensors writes it

    with reachable_folder() as root:
        before = os.umask(umask)
        try:
            registry = Registry(root / "drafts" / "llama")
            with registry.owned():
                for _ in range(2):
                    version = registry.publish(
                        publish_privately, target_fingerprint="t", provenance={}, evaluation={}
                    )
                    registry.promote(version)
                promoted = call_as_other(read)
                registry.rollback()
                rolled_back = call_as_other(read)
        finally:
            os.umask(before)
        known = read_id(registry.folder)
    assert promoted == f"v000002 {known} ['v000001', 'v000002'] []"
    assert rolled_back == f"v000001 {known} ['v000001'] []"
    assert known


@needs_root
def test_a_registry_that_an_operator_closed_stays_closed():
    with reachable_folder() as root:
        (root / "drafts").mkdir(mode=0o700)
        registry = Registry(root / "drafts")
        with registry.owned():
            registry.promote(publish(registry))
        assert "PermissionError" in call_as_other(lambda: str(Registry(root / "drafts").current()))
