"""Drafts read into memory.

Compared with the manifest, given up, freed, and never in the way of the engine's thread.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from redraft.files.artifact import publish
from redraft.online.engine import worker as plugin_worker
from redraft.online.engine.slices import Slice
from redraft.online.engine.staging import HostMemory, Share, Staging, count_bytes, plan_folder
from redraft.online.engine.swap import Layout
from redraft.online.engine.target_watch import TargetWatch
from redraft.online.fleet.registry import hash_manifest

TENSORS = {
    "a.weight": torch.randn(8, 4),
    "embed.weight": torch.randn(16, 4),
    "b": torch.randn(3).to(torch.bfloat16),
}


def write_draft(folder, tensors=TENSORS):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4}))


@pytest.fixture
def folders(tmp_path):
    """The served draft, and one with other weights in the same layout."""
    publish(tmp_path / "v000001", write_draft, {})
    publish(
        tmp_path / "v000002",
        lambda folder: write_draft(folder, TENSORS | {"a.weight": torch.ones(8, 4)}),
        {},
    )
    return tmp_path / "v000001", tmp_path / "v000002"


MEMORY = HostMemory()


def stage(folder, current, shared=frozenset(), memory=MEMORY, share=Share()):  # noqa: B008
    staging = Staging(folder, Layout.read(current), set(shared), memory, share)
    deadline_s = time.monotonic() + 300
    while not staging.is_done:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return staging


def test_what_is_in_memory_is_the_version_and_is_freed(folders):
    current, folder = folders
    before = MEMORY.num_lent
    staging = stage(folder, current, {"embed"})
    assert staging.error == ""
    assert staging.manifest_sha256 == hash_manifest(folder)
    for path in folder.iterdir():
        path.unlink()  # nothing is read from the storage any more
    tensors = staging.tensors
    assert tensors.keys() == {"a.weight", "b"}
    assert torch.equal(tensors["a.weight"], torch.ones(8, 4))
    assert torch.equal(tensors["b"], TENSORS["b"])
    assert MEMORY.num_lent == before + 1
    staging.discard()
    assert MEMORY.num_lent == before


def test_a_draft_of_the_command_line_needs_no_manifest(folders, tmp_path):
    (tmp_path / "start").mkdir()
    write_draft(tmp_path / "start")
    staging = stage(tmp_path / "start", folders[0])
    assert (staging.error, staging.manifest_sha256, len(staging.tensors)) == ("", "", 3)
    staging.discard()


def test_for_a_gpu_one_buffer_is_pinned_once_and_used_by_every_swap(folders):
    pinned = []
    memory = HostMemory(pinned.append)
    current, folder = folders
    # 8 x 4 floats, then 3 numbers of 2 bytes at a multiple of 64.
    memory.reserve(count_bytes(plan_folder(current, {}, {"embed"})))
    assert [len(buffer) for buffer in pinned] == [128 + 6]
    for version, value in ((folder, torch.ones(8, 4)), (current, TENSORS["a.weight"])):
        staging = stage(version, current, {"embed"}, memory)
        assert staging.error == ""
        assert staging.tensors.keys() == {"a.weight", "b"}, (
            "the target's embedding stays on the disk"
        )
        assert torch.equal(staging.tensors["a.weight"], value)
        for tensor in staging.tensors.values():
            assert 0 <= tensor.data_ptr() - pinned[0].data_ptr() < len(pinned[0])
        staging.discard()
        assert (staging.tensors, memory.num_lent) == ({}, 0)
    assert len(pinned) == 1


def test_a_second_draft_in_memory_pins_nothing_more(folders):
    """Its thread hangs in the storage, or it has not ended yet."""
    pinned = []
    memory = HostMemory(pinned.append)
    memory.reserve(1000)
    first, second = (stage(folders[1], folders[0], memory=memory) for _ in range(2))
    assert torch.equal(first.tensors["a.weight"], second.tensors["a.weight"])
    assert first.tensors["a.weight"].data_ptr() != second.tensors["a.weight"].data_ptr()
    assert (len(pinned), memory.num_lent) == (1, 2)


def test_too_little_pinned_memory_makes_a_swap_slower_and_not_impossible(folders, caplog):
    def refuse(buffer):
        raise RuntimeError("CUDA error: out of memory")

    memory = HostMemory(refuse)
    memory.reserve(100)
    assert "a swap pauses longer" in caplog.text
    current, folder = folders
    staging = stage(folder, current, memory=memory)
    assert (staging.error, memory.pinned_bytes) == ("", 0)
    assert torch.equal(staging.tensors["a.weight"], torch.ones(8, 4))
    staging.discard()


@pytest.mark.parametrize(
    ("part", "rows", "columns"),
    [(Slice(0, 2, 3), slice(2, 5), slice(None)), (Slice(1, 1, 2), slice(None), slice(1, 3))],
)
def test_a_rank_reads_its_own_slice_and_compares_its_own_files(folders, part, rows, columns):
    current, folder = folders
    share = Share(slices={"a.weight": part}, rank=1, num_ranks=2)
    staging = stage(folder, current, share=share)
    assert staging.error == ""
    # The only file is compared by rank 0. The embedding has 256 bytes, the bias 6.
    values = torch.ones(8, 4)[rows, columns]
    assert staging.bytes_read == values.numel() * 4 + 256 + 6
    tensor = staging.tensors["a.weight"]
    assert tensor.shape == (8, 4)
    assert torch.equal(tensor[rows, columns].clone(), values)
    assert torch.equal(torch.empty(values.shape).copy_(tensor[rows, columns]), values)
    with pytest.raises(ValueError, match="staged"):
        tensor.clone()
    first = stage(folder, current, share=replace(share, rank=0))
    assert torch.equal(first.tensors["a.weight"][rows, columns].clone(), values)
    assert first.bytes_read == (folder / "model.safetensors").stat().st_size
    flip(folder / "model.safetensors")
    assert not stage(folder, current, share=share).is_damaged, "another rank's file"
    assert stage(folder, current, share=replace(share, rank=0)).is_damaged


def flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (
            lambda folder: flip(folder / "model.safetensors"),
            "model.safetensors is corrupt (its SHA-256 differs)",
        ),
        (
            lambda folder: flip(folder / "config.json"),
            "config.json is corrupt (its SHA-256 differs)",
        ),
        (lambda folder: os.truncate(folder / "model.safetensors", 100), "100 bytes instead of"),
        (lambda folder: (folder / "model.safetensors").unlink(), "is missing"),
        (
            lambda folder: save_file({"x": torch.ones(1)}, folder / "more.safetensors"),
            "is not in the manifest",
        ),
        (lambda folder: (folder / "manifest.json").write_text("{"), "is corrupt"),
    ],
)
def test_damage_is_told_and_holds_no_memory(folders, damage, told):
    current, folder = folders
    damage(folder)
    before = MEMORY.num_lent
    staging = stage(folder, current)
    assert staging.is_damaged
    assert told in staging.error
    assert staging.tensors == {}
    assert MEMORY.num_lent == before


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError("no memory")]
)
def test_too_little_memory_is_told_and_is_no_damage(folders, monkeypatch, error):
    def refuse(*args):
        raise error

    current, folder = folders
    before = MEMORY.num_lent
    monkeypatch.setattr("redraft.online.engine.staging.mmap.mmap", refuse)
    staging = stage(folder, current)
    assert (staging.is_damaged, "memory" in staging.error, staging.tensors) == (False, True, {})
    assert MEMORY.num_lent == before


def test_another_layout_or_other_shared_tensors_are_told(folders, tmp_path):
    current, _ = folders
    publish(
        tmp_path / "v000003", lambda folder: write_draft(folder, TENSORS | {"b": torch.ones(4)}), {}
    )
    publish(
        tmp_path / "v000004",
        lambda folder: write_draft(folder, TENSORS | {"embed.weight": torch.ones(16, 4)}),
        {},
    )
    publish(
        tmp_path / "v000005",
        lambda folder: write_draft(folder, TENSORS | {"b": torch.ones(3).long()}),
        {},
    )
    publish(
        tmp_path / "v000006",
        lambda folder: write_draft(folder, TENSORS | {"b": torch.ones(3).bfloat16()}),
        {},
    )
    assert re.search(r"\bb .*\[3\].*\bI64\b.*\[3\]", stage(tmp_path / "v000005", current).error)
    assert stage(tmp_path / "v000006", current).error == "", "a load turns one float into another"
    wider = stage(tmp_path / "v000003", current)
    assert (wider.is_damaged, bool(re.search(r"\bb .*\[4\].*\[3\]", wider.error))) == (False, True)
    other = stage(tmp_path / "v000004", current, {"embed"})
    assert re.search(r"\bv000004 .*\bembed\.weight\b", other.error)
    assert stage(tmp_path / "v000004", current).error == "", "not shared"


def test_a_storage_that_hangs_stops_only_the_thread_and_frees_all_when_it_ends(folders, tmp_path):
    current, _ = folders
    folder = tmp_path / "hung"
    folder.mkdir()
    write_draft(folder)
    os.mkfifo(folder / "z.safetensors")  # opened after the first file, and nobody writes
    before, began_s = MEMORY.num_lent, time.monotonic()
    staging = Staging(folder, Layout.read(current), set(), MEMORY, Share())
    assert not staging.is_done
    staging.discard()
    assert time.monotonic() - began_s < 5
    writer = threading.Thread(target=lambda: (folder / "z.safetensors").open("wb").close())
    writer.start()
    writer.join()
    while not staging.is_done:
        time.sleep(0.01)
    assert MEMORY.num_lent == before


# --- the worker's methods, without an engine


@pytest.fixture
def worker(folders):
    state = plugin_worker.WorkerState(
        server_id="id",
        target_fingerprint="f",
        target_checksum="c",
        draft_version="v000001",
        draft=Layout.read(folders[0]),
    )
    target, draft = nn.Linear(2, 2), nn.Linear(2, 2)
    runner = SimpleNamespace(get_model=lambda: target, get_draft_model=lambda: draft)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(method="draft_model", parallel_drafting=False)
    )
    return SimpleNamespace(
        redraft=state,
        model_runner=runner,
        vllm_config=config,
        device=torch.device("cpu"),
        _weight_update_active=False,
    )


def wait(worker):
    while not (read := plugin_worker.redraft_staged(worker))["done"]:
        time.sleep(0.01)
    return read


def test_only_a_draft_that_is_whole_in_memory_is_loaded(worker, folders, monkeypatch):
    loaded = []
    monkeypatch.setattr(plugin_worker, "load_draft", lambda worker, tensors: loaded.append(tensors))
    folder = folders[1]
    assert "memory" in plugin_worker.redraft_load(worker, str(folder))["error"]
    assert plugin_worker.redraft_stage(worker, str(folder), "me") == {"ok": True}
    assert wait(worker)["error"] == ""
    assert not plugin_worker.redraft_load(worker, str(folders[0]))["ok"], "another one was read"
    assert plugin_worker.redraft_load(worker, str(folder))["ok"]
    assert not worker.redraft.is_draft_intact, "another rank may fail"
    plugin_worker.redraft_commit(worker, "v000002")
    state = worker.redraft
    assert (state.is_draft_intact, state.draft_version) == (True, "v000002")
    assert state.manifest_sha256 == hash_manifest(folder)
    plugin_worker.redraft_discard(worker, "me")
    assert (len(loaded), state.staging, state.stuck) == (1, None, [])
    assert state.is_target_intact, (
        "compared with itself before the load: replicas move experts since the start"
    )
    assert state.target_checksum == plugin_worker.checksum(worker.model_runner.get_model()) != "c"


def test_a_stage_of_a_pipeline_without_the_draft_takes_part_in_nothing_but_the_version(
    worker, folders, monkeypatch
):
    group = SimpleNamespace(is_last_rank=False)
    monkeypatch.setattr("vllm.distributed.get_pp_group", lambda: group)
    worker.model_runner.get_draft_model = lambda: None
    folder = str(folders[1])
    assert plugin_worker.redraft_stage(worker, folder, "me") is None
    assert plugin_worker.redraft_staged(worker) is None
    assert plugin_worker.redraft_load(worker, folder) is None
    assert plugin_worker.redraft_restore(worker) is None
    assert worker.redraft.is_draft_intact
    plugin_worker.redraft_commit(worker, "v000002")
    plugin_worker.redraft_discard(worker, "me")
    assert worker.redraft.draft_version == "v000002", "or the ranks' versions would differ"
    group.is_last_rank = True
    assert "draft model" in plugin_worker.redraft_stage(worker, folder, "me")["error"]


@pytest.mark.parametrize("has_moved", [False, True])
def test_a_target_that_changes_in_a_load_stays_marked(worker, folders, monkeypatch, has_moved):
    target = worker.model_runner.get_model()
    worker.redraft.target_watch = TargetWatch(target)
    for load in (lambda *args: nn.init.ones_(target.weight), lambda *args: None):
        monkeypatch.setattr(plugin_worker, "load_draft", load)
        while plugin_worker.redraft_stage(worker, str(folders[1]), "me").get("is_busy"):
            time.sleep(0.01)
        wait(worker)
        assert plugin_worker.redraft_load(worker, str(folders[1]), has_moved)["ok"]
        assert not worker.redraft.is_target_intact
    plugin_worker.redraft_discard(worker, "me")


def test_after_a_failed_load_the_last_good_draft_is_read_and_restored(worker, folders, monkeypatch):
    monkeypatch.setattr(plugin_worker, "load_draft", lambda *args: 1 / 0)
    plugin_worker.redraft_stage(worker, str(folders[1]), "me")
    wait(worker)
    assert plugin_worker.redraft_load(worker, str(folders[1]))["error"].startswith(
        "ZeroDivisionError"
    )
    monkeypatch.setattr(plugin_worker, "load_draft", lambda *args: None)
    plugin_worker.redraft_stage(worker, None, "me")
    wait(worker)
    assert not worker.redraft.is_draft_intact
    assert plugin_worker.redraft_restore(worker)["ok"]
    assert worker.redraft.is_draft_intact
    plugin_worker.redraft_discard(worker, "me")


def test_reads_that_hang_are_bounded_and_forgotten_when_they_end(worker, tmp_path):
    hung = [tmp_path / f"hung-{number}" for number in range(plugin_worker.MAX_STUCK_READS)]
    for folder in hung:
        folder.mkdir()
        os.mkfifo(folder / "z.safetensors")
    for _ in range(6):  # the same one leaves room for others
        plugin_worker.redraft_stage(worker, str(hung[0]), "me")
    plugin_worker.redraft_discard(worker, "me")
    assert len(worker.redraft.stuck) == 1
    for folder in hung[1:]:
        assert plugin_worker.redraft_stage(worker, str(folder), "me") == {"ok": True}
    plugin_worker.redraft_discard(worker, "me")
    refused = plugin_worker.redraft_stage(worker, str(tmp_path / "one-more"), "me")
    assert (refused["ok"], len(worker.redraft.stuck)) == (False, plugin_worker.MAX_STUCK_READS)
    for folder in hung:
        (folder / "z.safetensors").open("wb").close()
    deadline_s = time.monotonic() + 300
    while plugin_worker.redraft_stage(worker, None, "me") != {"ok": True}:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    plugin_worker.redraft_discard(worker, "me")


def test_an_open_update_of_the_target_takes_no_draft(worker, folders):
    assert plugin_worker.redraft_stage(worker, str(folders[1]), "me") == {"ok": True}
    wait(worker)
    worker._weight_update_active = True  # some layers have no values now
    loaded = plugin_worker.redraft_load(worker, str(folders[1]))
    assert (loaded["ok"], loaded["touched"], loaded["error"]) == (
        False,
        False,
        plugin_worker.UPDATING,
    )
    refused = plugin_worker.redraft_stage(worker, str(folders[0]), "me")
    assert (refused["ok"], refused["error"]) == (False, plugin_worker.UPDATING)
    plugin_worker.redraft_discard(worker, "me")


def test_a_trainer_that_holds_the_engine_has_all_of_it_in_one_call(worker, folders, monkeypatch):
    loaded = []
    monkeypatch.setattr(
        plugin_worker, "load_draft", lambda worker, tensors: loaded.append(sorted(tensors))
    )
    monkeypatch.setattr(
        plugin_worker, "load_target", lambda worker, folder: loaded.append(folder) or {"ok": True}
    )
    monkeypatch.setattr(plugin_worker, "name_target", lambda worker, label: loaded.append(label))
    moved = plugin_worker.redraft_move(worker, "17", "/new", str(folders[1]))
    assert moved == {"error": "", "target_version": "", "draft_version": folders[1].name}
    assert loaded[:2] == ["/new", "17"]
    assert len(loaded) == 3
    assert (worker.redraft.staging, worker.redraft.swapper, worker.redraft.is_draft_intact) == (
        None,
        "",
        True,
    )
    monkeypatch.setattr(
        plugin_worker, "load_target", lambda worker, folder: {"ok": False, "error": "no disk"}
    )
    for asked, error in (
        (("18", "/new", str(folders[0])), "no disk"),
        (("", "", "/nowhere"), "/nowhere"),
    ):
        moved = plugin_worker.redraft_move(worker, *asked)
        assert (error in moved["error"], moved["draft_version"], len(loaded)) == (
            True,
            folders[1].name,
            3,
        )
    assert worker.redraft.staging is None


def test_a_draft_whose_folder_has_left_the_registry_can_still_be_replaced(
    worker, folders, tmp_path, monkeypatch
):
    monkeypatch.setattr(plugin_worker, "load_draft", lambda worker, tensors: None)
    monkeypatch.setattr(plugin_worker, "shared_modules", lambda draft, target: {"embed"})
    served, second = folders
    publish(
        tmp_path / "v000003",
        lambda folder: write_draft(folder, TENSORS | {"embed.weight": torch.ones(16, 4)}),
        {},
    )
    publish(tmp_path / "v000004", write_draft, {})

    def swap(folder):
        plugin_worker.redraft_stage(worker, str(folder), "me")
        if told := wait(worker)["error"]:
            return told
        assert plugin_worker.redraft_load(worker, str(folder))["ok"]
        plugin_worker.redraft_commit(worker, folder.name)
        plugin_worker.redraft_discard(worker, "me")
        return worker.redraft.draft_version

    aside = served.rename(tmp_path / "aside")
    assert "was deleted with its embeddings" in swap(second), (
        "the shared embeddings were never read"
    )
    aside.rename(served)
    assert swap(second) == "v000002"
    shutil.rmtree(second)
    assert "embed.weight" in swap(tmp_path / "v000003")
    assert swap(tmp_path / "v000004") == "v000004"


def test_one_api_process_swaps_at_a_time(worker, folders, monkeypatch):
    monkeypatch.setattr(plugin_worker, "load_draft", lambda worker, tensors: None)
    folder = str(folders[1])
    assert plugin_worker.redraft_stage(worker, folder, "one") == {"ok": True}
    refused = plugin_worker.redraft_stage(worker, str(folders[0]), "two")
    assert "API process" in refused["error"]
    plugin_worker.redraft_discard(worker, "two")  # as after every refused swap
    wait(worker)
    assert plugin_worker.redraft_load(worker, folder)["ok"]
    plugin_worker.redraft_discard(worker, "one")
    assert plugin_worker.redraft_stage(worker, folder, "two") == {"ok": True}
    monkeypatch.setattr(plugin_worker, "SWAP_LEASE_S", 0.0)
    while (answer := plugin_worker.redraft_stage(worker, folder, "one")).get("is_busy"):
        time.sleep(0.01)
    assert answer == {"ok": True}, "the other one must have been killed"
    plugin_worker.redraft_discard(worker, "one")


def test_a_layer_that_is_served_from_the_targets_folder_cannot_be_swapped(worker, folders):
    target, alone = map(str, folders)
    worker.vllm_config.model_config = SimpleNamespace(model=target, revision=None)
    speculative = worker.vllm_config.speculative_config
    speculative.draft_model_config = SimpleNamespace(model=target, revision=None)
    plugin_worker._identify_draft(worker, None)  # a standalone draft may be the target itself
    speculative.method = "mtp"
    with pytest.raises(ValueError, match="MTP"):
        plugin_worker._identify_draft(worker, None)
    speculative.draft_model_config = SimpleNamespace(model=alone, revision=None)
    plugin_worker._identify_draft(worker, None)
