"""Publication is all or nothing, and damage is named."""

import errno
import itertools
import json
import multiprocessing
import os
import random
import resource
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from redraft.files import artifact
from redraft.files.artifact import (
    MANIFEST,
    is_full,
    publish,
    require_free,
    require_space,
    safetensors_header,
    verify,
    write_whole,
)
from redraft.files.folder import fingerprint, read_json
from redraft.files.lock import own

FORK = multiprocessing.get_context("fork")


def write_files(folder: Path) -> None:
    (folder / "weights").mkdir()
    (folder / "weights" / "a.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "config.json").write_text("{}")


def publish_sample(folder: Path) -> Path:
    publish(folder, write_files, {"command": "train"})
    return folder


def make_model_folder(folder: Path, *, seed: int = 0, **config: object) -> Path:
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"layer.{i}": torch.randn(100, 100, generator=generator) for i in range(3)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 100, **config}))
    (folder / "tokenizer.json").write_text('{"vocab": 1}')
    return folder


def test_a_published_folder_verifies_and_says_where_it_comes_from(tmp_path):
    folder = publish_sample(tmp_path / "deep" / "run")
    assert set(verify(folder)) == {"config.json", "provenance.json", "weights/a.bin"}
    assert json.loads((folder / "provenance.json").read_text()) == {"command": "train"}
    assert [path.name for path in folder.parent.iterdir()] == ["run"]
    assert folder.stat().st_mode & 0o777 == 0o755


def test_the_manifest_is_what_sha256sum_says(tmp_path):
    folder = publish_sample(tmp_path / "run")
    line = subprocess.run(
        ["sha256sum", folder / "weights" / "a.bin"], capture_output=True, text=True, check=True
    ).stdout
    entry = json.loads((folder / MANIFEST).read_text())["files"]["weights/a.bin"]
    assert entry == {"bytes": 10240, "sha256": line.split()[0]}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"10239\b.*\b10240"),
        (lambda path: path.write_bytes(b"\x01" + path.read_bytes()[1:]), "corrupt"),
    ],
)
def test_verify_names_the_file_that_is_damaged(tmp_path, damage, said):
    folder = publish_sample(tmp_path / "run")
    damage(folder / "weights" / "a.bin")
    with pytest.raises(ValueError, match=rf"weights/a\.bin .*{said}"):
        verify(folder)


def test_verify_refuses_a_folder_without_a_readable_manifest(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"manifest\.json"):
        verify(tmp_path)
    (tmp_path / MANIFEST).write_text('{"files": ')
    with pytest.raises(ValueError, match=r"manifest\.json"):
        verify(tmp_path)


@pytest.mark.parametrize("content", ['{"layout": 1, "files": {}}', '{"files": ' + 100_000 * "["])
def test_a_manifest_that_lists_nothing_or_cannot_be_read_is_damage(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        verify(tmp_path)


def test_another_run_is_refused_until_overwriting_is_asked_for(tmp_path):
    folder = publish_sample(tmp_path / "run")
    with pytest.raises(FileExistsError, match="--overwrite"):
        publish(folder, write_files, {})
    publish(folder, write_files, {"command": "again"}, overwrite=True)
    verify(folder)
    assert json.loads((folder / "provenance.json").read_text()) == {"command": "again"}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_overwriting_spares_files_that_were_never_published(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=rf"{tmp_path}/home\b"):
        publish(tmp_path / "home", write_files, {}, overwrite=True)
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_an_empty_folder_is_free_and_a_file_is_not(tmp_path):
    (tmp_path / "empty").mkdir()
    require_free(tmp_path / "empty")
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="is a file"):
        require_free(tmp_path / "file", overwrite=True)


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    def fail(folder: Path) -> None:
        write_files(folder)
        raise RuntimeError("half")

    with pytest.raises(RuntimeError, match="half"):
        publish(tmp_path / "run", fail, {})
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_fails_leaves_the_previous_run(tmp_path):
    folder = publish_sample(tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        publish(folder, lambda _: 1 / 0, {}, overwrite=True)
    verify(folder)


def test_a_full_disk_is_reported_as_one(tmp_path):
    def fill_disk(_: Path) -> None:
        with open("/dev/full", "w") as file:
            file.write("x")
            file.flush()

    with pytest.raises(OSError, match=rf"Errno {errno.ENOSPC}.*{tmp_path}/run\b"):
        publish(tmp_path / "run", fill_disk, {})
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_under_torchs_own_writer_is_reported_as_one(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        with pytest.raises(OSError, match=rf"Errno {errno.ENOSPC}.*{disk}/run\b"):
            publish(
                disk / "run",
                lambda folder: torch.save(torch.ones(2 << 20), folder / "optimizer.bin"),
                {},
            )
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_require_space_compares_with_the_disk_of_a_path_that_does_not_exist_yet(tmp_path):
    require_space(tmp_path / "a" / "b", 1)
    with pytest.raises(OSError, match=r"1000000000\.0 GB"):
        require_space(tmp_path / "a" / "b", 10**18)


def test_the_second_of_two_writers_does_not_win(tmp_path):
    def publish_meanwhile(folder: Path) -> None:
        write_files(folder)
        publish(tmp_path / "run", write_files, {"who": "first"})

    with pytest.raises(FileExistsError, match=rf"{tmp_path}/run .*process"):
        publish(tmp_path / "run", publish_meanwhile, {"who": "second"})
    assert json.loads((tmp_path / "run" / "provenance.json").read_text()) == {"who": "first"}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_living_writers_folder_is_left_alone(tmp_path):
    def publish_and_look(partial: Path) -> None:
        write_files(partial)
        with pytest.raises(ZeroDivisionError):  # another writer of the same folder comes and goes
            publish(tmp_path / "run", lambda _: 1 / 0, {})
        assert (partial / "config.json").exists()

    publish(tmp_path / "run", publish_and_look, {})
    verify(tmp_path / "run")


def test_a_folder_that_is_published_while_others_look_for_abandoned_ones_is_no_error(
    tmp_path, monkeypatch
):
    gone = tmp_path / ".run.abc.partial"
    monkeypatch.setattr(
        artifact, "_siblings", lambda folder, kind: [gone] if kind == "partial" else []
    )
    verify(publish_sample(tmp_path / "run"))


@pytest.mark.parametrize("call", ["os.open", "fcntl.flock"])
def test_a_folder_removed_before_its_writer_locks_it_is_made_again(call, tmp_path, monkeypatch):
    module, name = getattr(artifact, call.split(".")[0]), call.split(".")[1]
    original, removed = getattr(module, name), []

    def remove_first(*args):
        for partial in tmp_path.glob(".run.*.partial"):
            if not removed:
                removed.append(partial)
                partial.rmdir()
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, remove_first)
        publish_sample(tmp_path / "run")
    verify(tmp_path / "run")
    assert removed
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_publishing_leaves_the_mode_of_files_that_others_share(tmp_path):
    target = tmp_path / "shard"
    target.write_text("theirs")
    target.chmod(0o600)

    def write(folder: Path) -> None:
        os.link(target, folder / "shard")
        (folder / "mine").touch(0o600)

    publish(tmp_path / "run", write, {})
    assert [(tmp_path / "run" / name).stat().st_mode & 0o777 for name in ("shard", "mine")] == [
        0o600,
        0o644,
    ]


def publish_for_ever(folder: Path, told: Connection) -> None:
    def write(new: Path) -> None:
        for i in range(8):
            (new / f"part-{i}").write_bytes(bytes([i]) * 300_000)

    for step in itertools.count():
        publish(folder, write, {"step": step}, overwrite=True)
        told.send(step)


def test_kill_9_at_any_moment_leaves_the_folder_absent_or_complete(tmp_path):
    folder = tmp_path / "run"
    choose = random.Random(7)
    found_complete = 0
    for _ in range(20):
        mine, its = FORK.Pipe(duplex=False)
        writer = FORK.Process(target=publish_for_ever, args=(folder, its))
        writer.start()
        its.close()
        mine.recv()  # it is in its loop now
        time.sleep(choose.uniform(0, 0.06))
        writer.kill()
        writer.join()
        if folder.exists():
            assert len(verify(folder)) == 9
            found_complete += 1
    assert found_complete >= 15
    publish(folder, write_files, {}, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"], (
        "what killed writers left is cleared"
    )


def test_the_fingerprint_is_the_models_not_the_folders(tmp_path):
    first = fingerprint(make_model_folder(tmp_path / "a"))
    assert first == fingerprint(
        make_model_folder(tmp_path / "b", transformers_version="9", dtype="bfloat16")
    )
    assert len(first) == 64
    assert first != fingerprint(make_model_folder(tmp_path / "c", seed=1))
    assert first != fingerprint(make_model_folder(tmp_path / "d", hidden_act="gelu"))
    folder = make_model_folder(tmp_path / "e")
    (folder / "tokenizer.json").write_text('{"vocab": 2}')
    assert first != fingerprint(folder)


@pytest.mark.parametrize("element", [0, 5_000, 9_999])
def test_the_fingerprint_sees_one_small_change_in_any_tensor(tmp_path, element):
    folder = make_model_folder(tmp_path / "a")
    before = fingerprint(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    start = 8 + struct.unpack("<Q", data[:8])[0]
    data[start + 100 * 100 * 4 + element * 4] ^= 1  # the second tensor
    (folder / "model.safetensors").write_bytes(data)
    assert fingerprint(folder) != before


def test_a_cut_or_foreign_safetensors_file_is_named(tmp_path):
    path = make_model_folder(tmp_path / "a") / "model.safetensors"
    assert safetensors_header(path)["layer.0"]["shape"] == [100, 100]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(
        ValueError, match=rf"model\.safetensors\b.*\b{len(whole) - 1}\b.*\b{len(whole)}\b"
    ):
        fingerprint(path.parent)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match=rf"{path} is a Git LFS pointer.*git lfs pull"):
        safetensors_header(path)
    config = path.with_name("config.json")
    config.write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=rf"{config} is a Git LFS pointer"):
        read_json(config)
    path.write_bytes(b"<!doctype html>\n")
    with pytest.raises(ValueError, match=rf"{path} .*\({path.stat().st_size} bytes\)"):
        safetensors_header(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=rf"{path} .*\({path.stat().st_size} bytes\)"):
        safetensors_header(path)
    path.write_bytes(whole[:8] + b"x" + whole[9:])
    with pytest.raises(ValueError, match=rf"{path} .*header"):
        safetensors_header(path)


def test_a_folder_without_a_model_has_no_fingerprint(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} .*config\.json"):
        fingerprint(tmp_path)


def test_importing_it_loads_no_torch():
    code = (
        "import sys, redraft.files.artifact; assert not {'torch', 'transformers', "
        "'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    left, fresh, other = (
        tmp_path / name
        for name in (".state.json.7.partial", ".state.json.8.partial", ".b.7.partial")
    )
    for file in (left, fresh, other):
        file.write_text("half")
    for file in (left, other):
        os.utime(file, (1, 1))
    write_whole(path, "whole")
    assert path.read_text() == "whole"
    assert [file.exists() for file in (left, fresh, other)] == [False, True, True]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_quota_or_a_file_limit_is_a_full_disk(number: int, tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise RuntimeError(f"I/O error: no more (os error {number})")  # as of safetensors

    assert is_full(OSError(number, "no more"))
    assert not is_full(ValueError(f"os error {number}0"))
    with pytest.raises(OSError, match=rf"Errno {errno.ENOSPC}.*{tmp_path}/run\b.*quota"):
        publish(tmp_path / "run", fail, {})


def fail_to_write(folder: Path, weights: torch.Tensor, told: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    for write in (
        lambda: write_whole(folder / "one.json", "x" * (2 << 20)),
        lambda: publish(folder / "two", lambda new: torch.save(weights, new / "a"), {}),
    ):
        try:
            write()
        except OSError as error:
            told.send(f"{is_full(error)} {error}")


def test_a_failed_write_names_its_file(tmp_path: Path) -> None:
    mine, its = FORK.Pipe(duplex=False)
    writer = FORK.Process(target=fail_to_write, args=(tmp_path, torch.ones(1 << 20), its))
    writer.start()
    its.close()
    one, two = mine.recv(), mine.recv()
    writer.join()
    assert one.startswith("True ")
    assert f"{tmp_path}/one.json" in one
    assert two.startswith("True ")
    assert f"{tmp_path}/two" in two


def test_a_folder_is_published_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", without)
    for text in ("old", "new"):
        publish(
            tmp_path / "run",
            lambda new, text=text: (new / "a").write_text(text),
            {},
            overwrite=True,
        )
    assert (tmp_path / "run" / "a").read_text() == "new"
    with (
        pytest.raises(OSError, match=rf"{tmp_path}/lock .*locks.*local disk"),
        own(tmp_path / "lock", "a learner"),
    ):
        pass
