"""Locks and folders in places that other users can write to."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from redraft.files.lock import AlreadyOwnedError, own
from redraft.files.private import make_private, require_own


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_only_a_lock_is_taken_for_one_and_everything_else_stays_as_it_is(tmp_path):
    mine, lock = tmp_path / "mine", tmp_path / "lock"
    mine.write_text("text\n" * 50)

    def refuse():
        with pytest.raises(OSError, match=r"\block\b"), own(lock, "a learner"):
            pass
        assert mine.read_text() == "text\n" * 50
        lock.unlink()

    lock.symlink_to(mine)
    refuse()
    os.link(mine, lock)
    refuse()
    lock.write_text("text")
    refuse()
    os.mkfifo(lock)  # opened for reading, it would wait
    refuse()
    with own(lock, "a learner"):
        assert lock.read_text().startswith(f"process {os.getpid()} on ")
        with pytest.raises(AlreadyOwnedError, match=f"process {os.getpid()} on"), own(lock, "x"):
            pass
    with own(lock, "a learner"):  # of an earlier owner
        pass


def test_an_interrupted_owner_leaves_the_lock_free(tmp_path, monkeypatch):
    flock, lock = fcntl.flock, tmp_path / "lock"

    def interrupted(*arguments: int) -> None:
        flock(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", interrupted)
        with pytest.raises(KeyboardInterrupt), own(lock, "a learner"):
            pass
    with own(lock, "a learner"):
        pass


def test_a_folder_for_text_is_for_its_owner_whatever_it_was_before(tmp_path):
    make_private(new := tmp_path / "a" / "new")
    (old := tmp_path / "old").mkdir()
    old.chmod(0o777)
    make_private(old)
    assert (mode_of(new), mode_of(old)) == (0o700, 0o700)


def test_a_folder_of_another_user_is_refused_and_so_is_one_with_a_file_of_another(tmp_path):
    require_own(tmp_path / "none")
    (folder := tmp_path / "folder").mkdir()
    (folder / "token").touch()
    (folder / "link").symlink_to("/")
    require_own(folder)
    if os.geteuid():
        with pytest.raises(PermissionError, match=r"^/ belongs to user 0\b"):
            require_own(Path("/"))
        return
    for path in (folder / "token", folder):
        os.chown(path, 65534, 65534)
        with pytest.raises(PermissionError, match=f"^{path} belongs to user 65534"):
            require_own(folder)
        os.chown(path, 0, 0)
