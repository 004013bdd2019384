"""A folder that servers fill with records and the learner empties: the transport that needs no broker.

    server ─► .<name>.partial ─ rename ─► <time>-<server>-<number>.records ─► learner reads, commits, unlinks

A file appears complete or not at all, it outlives both sides, and a learner that dies between commit and unlink reads
it again: every record arrives at least once. The folder is bounded: above its budget the oldest files go, whoever
wrote them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

SUFFIX, PARTIAL = ".records", ".partial"

ABANDONED_S = 600.0
"""A file that is not complete after this long never will be: its server was killed, and it holds users' text."""


class SpoolWriter:
    """Writes one server's frames into the folder and keeps the folder within `budget_bytes`. Not thread-safe."""

    def __init__(self, folder: Path, server_id: str, budget_bytes: int) -> None:
        self.folder = folder
        self.server_id = server_id
        self.budget_bytes = budget_bytes
        self.num_files = 0
        self.num_evicted_files = 0

    def write(self, frames: Sequence[bytes]) -> None:
        """One new file of `frames`.

        Raises: OSError where the disk is full or the folder can not be written; what was written of the file is gone.
        """
        # Token ids are users' text. Whoever wants other readers makes the folder first.
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The time leads, so that the files of many servers sort by age.
        name = f"{time.time_ns():020d}-{self.server_id}-{self.num_files:08d}"
        partial = self.folder / f".{name}{PARTIAL}"
        try:
            partial.write_bytes(b"".join(frames))
            partial.rename(self.folder / f"{name}{SUFFIX}")
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self.num_files += 1
        self._evict()

    def status(self) -> dict[str, Any]:
        return {"spool_files": self.num_files, "evicted_files_spool_budget": self.num_evicted_files}

    def close(self) -> None:
        """Nothing: a file is complete when `write` returns."""

    def _evict(self) -> None:
        files = sorted(_files(self.folder))
        for name, status in files:
            if name.endswith(PARTIAL) and time.time() - status.st_mtime > ABANDONED_S:
                (self.folder / name).unlink(missing_ok=True)
        complete = [(name, status.st_size) for name, status in files if name.endswith(SUFFIX)]
        excess = sum(size for _, size in complete) - self.budget_bytes
        for name, size in complete[:-1]:  # never the newest, so that a budget below one file still lets records through
            if excess <= 0:
                return
            (self.folder / name).unlink(missing_ok=True)
            excess -= size
            self.num_evicted_files += 1


def spool_files(folder: Path) -> list[Path]:
    """The complete files of the folder, the oldest first. Reading: `read_frames(path.read_bytes())`, then unlink."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def is_in_memory(path: Path) -> bool:
    """Whether files below `path`, which need not be there yet, are kept in memory and on no disk."""
    found = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists()).resolve()
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    return mounts[next(parent for parent in (found, *found.parents) if parent in mounts)] in ("tmpfs", "ramfs")


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """What is in the folder, without `Path`s: it is read after every write, and may be long."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # complete or taken by now
                yield entry.name, entry.stat()
