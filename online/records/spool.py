"""The spool: a folder filled with records by servers and emptied by the learner, without a broker.

    server ─► .<name>.partial ─ rename ─► <time>-<server>-<number>.records ─► learner reads, commits, unlinks

A file appears complete or not at all, and survives restarts of servers and learner. A learner
killed between commit and unlink reads the file again, so every record arrives at least once. The
folder's size is bounded: if it exceeds its budget, the oldest files are deleted, whoever wrote
them.
"""

import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from redraft.files.lock import AlreadyOwnedError, find_mount, try_lock

SUFFIX, PARTIAL = ".records", ".partial"

ABANDONED_S = 600.0
"""Age in seconds after which a partial file is deleted, because its server was killed and the file
contains users' text.
"""


class SpoolWriter:
    """Writes one server's frames into the folder and keeps the folder within `budget_bytes`.

    Not thread-safe.
    """

    def __init__(self, folder: Path, server_id: str, budget_bytes: int) -> None:
        self.folder = folder
        self.server_id = server_id
        self.budget_bytes = budget_bytes
        self.num_files = 0
        self.num_evicted_files = 0

    def write(self, frames: Sequence[bytes]) -> None:
        """Write `frames` as one new file.

        Raises:
            OSError: the disk is full or the folder is not writable; no partial file remains.
        """
        # Token ids are users' text, so only the owner may read it. To allow a group, create the
        # folder beforehand and let the group write to it.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = 0o660 if self.folder.stat().st_mode & stat.S_IWGRP else 0o600
        # The time comes first, so that the files of many servers sort by age.
        name = f"{time.time_ns():020d}-{self.server_id}-{self.num_files:08d}"
        partial = self.folder / f".{name}{PARTIAL}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(partial, flags, 0o600), "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(b"".join(frames))
            # There is no fsync, so the host does not wait for a disk; the CRC of a frame shows a
            # torn file.
            partial.rename(self.folder / f"{name}{SUFFIX}")
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self.num_files += 1
        self._evict()

    def status(self) -> dict[str, Any]:
        return {"spool_files": self.num_files, "evicted_files_spool_budget": self.num_evicted_files}

    def close(self) -> None:
        """Do nothing, because a file is complete when `write` returns."""

    def _evict(self) -> None:
        files = sorted(_files(self.folder))
        for name, status in files:
            if name.endswith(PARTIAL) and time.time() - status.st_mtime > ABANDONED_S:
                (self.folder / name).unlink(missing_ok=True)
        complete = [(name, status.st_size) for name, status in files if name.endswith(SUFFIX)]
        excess = sum(size for _, size in complete) - self.budget_bytes
        for name, size in complete[
            :-1
        ]:  # keeps the newest file, so that records get through even if one file exceeds the budget
            if excess <= 0:
                return
            (self.folder / name).unlink(missing_ok=True)
            excess -= size
            self.num_evicted_files += 1


def spool_files(folder: Path) -> list[Path]:
    """List the complete files in the folder, oldest first; empty if there is no folder.

    To consume one, call `read_frames` on `open_file`, then unlink it. `Path.glob` is not used,
    because it would silently find nothing in a folder that cannot be read.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        with os.scandir(folder) as entries:
            names = [
                entry.name
                for entry in entries
                if entry.name.endswith(SUFFIX) and not entry.name.startswith(".")
            ]
    except FileNotFoundError:
        return []
    return [folder / name for name in sorted(names)]


def count_bytes(folder: Path) -> int:
    """Return the size of the complete files in the folder; 0 if there is no folder."""
    with suppress(FileNotFoundError):
        return sum(status.st_size for name, status in _files(folder) if name.endswith(SUFFIX))
    return 0


@contextmanager
def emptying(folder: Path | None) -> Iterator[None]:
    """Be the only process that empties the spool while the block runs.

    Two learners would each get a part of the records, and drop the records of the other's draft. A spool
    that cannot be opened yet is not locked.

    Raises:
        AlreadyOwnedError: another process empties the spool.
    """
    descriptor = -1
    if folder is not None:
        with suppress(OSError):  # missing, or not readable, which the learner reports later
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    if descriptor < 0:
        yield
        return
    try:
        # The folder itself is locked, so that it contains only the servers' files.
        if not try_lock(descriptor):
            raise AlreadyOwnedError(
                f"another learner reads the spool {folder}: give each learner and its servers a "
                "different spool, or stop the other learner"
            )
        yield
    finally:
        os.close(descriptor)


def list_abandoned(folder: Path) -> list[Path]:
    """List partial files left by killed servers, unchanged for `ABANDONED_S`."""
    found = list(_files(folder)) if folder.is_dir() else []
    return [
        folder / name
        for name, status in found
        if name.endswith(PARTIAL) and time.time() - status.st_mtime > ABANDONED_S
    ]


def is_in_memory(path: Path) -> bool:
    """Whether files below `path` would be kept in memory (tmpfs) rather than on a disk.

    The path need not exist yet.
    """
    return find_mount(path)[1] in ("tmpfs", "ramfs")


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the name and status of every file.

    This avoids `Path` objects, because the folder may contain many files and is read after every
    write.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # renamed or removed in the meantime
                yield entry.name, entry.stat()
