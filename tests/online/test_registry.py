"""The registry on a real disk: publication, promotion, rollback, and kills in between."""

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time

import pytest

from heads import artifact
from online.lock import AlreadyOwnedError
from online.registry import Registry


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
    assert set(artifact.verify(folder)) == {"model.safetensors", "provenance.json", "evaluation.json", "STABLE"}
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
    with pytest.raises(FileNotFoundError, match="no version v000009: the newest are v000001"):
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
    with pytest.raises(FileNotFoundError, match="no version before v000001"):
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
    with pytest.raises(ValueError, match="keep is 0"):
        registry.prune(keep=0)


def test_pruning_keeps_what_a_server_that_is_away_may_still_serve(registry):
    for _ in range(5):
        registry.promote(publish(registry))
    assert registry.prune(keep=1, serving={"v000002", "a draft of its command line"}) == ["v000001", "v000003"]
    assert registry.versions() == ["v000002", "v000004", "v000005"]


def test_a_second_learner_is_refused_with_the_first_ones_process(registry):
    with registry.owned():
        code = "import sys, pathlib, online.registry as r\nwith r.Registry(pathlib.Path(sys.argv[1])).owned(): pass"
        second = subprocess.run([sys.executable, "-c", code, registry.folder], capture_output=True, text=True)
        assert second.returncode != 0
        assert f"already has a learner (process {os.getpid()} on {os.uname().nodename}): stop it first" in second.stderr
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


def publish_and_promote_for_ever(folder):
    registry = Registry(folder)
    while True:
        registry.promote(publish(registry, weights=random.randbytes(200_000)))
        registry.prune(keep=2)


def test_kills_while_publishing_promoting_and_pruning_never_leave_a_bad_version(registry):
    registry.promote(publish(registry))
    rng = random.Random(0)
    for _ in range(15):
        writer = multiprocessing.get_context("fork").Process(
            target=publish_and_promote_for_ever, args=(registry.folder,)
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
