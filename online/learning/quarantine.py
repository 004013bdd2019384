"""The quarantine: examples of unusable records, kept for inspection.

    quarantine/<time in ns>-<reason>.frame        first line: the error; the rest: the bytes as they arrived
    $ head -qn1 learner/buffer/quarantine/*

The folder is a sample, not an archive: it is limited in files, bytes and age, each reason has a
share of the files, and a flood of one reason replaces nothing that is younger than a minute. It is
unknown whose text such bytes contain, so the whole folder is deleted when any tenant's data is
deleted.
"""

import errno
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from redraft.files.private import make_private
from redraft.online.records.record import CorruptRecordError

MAX_FILES = 256
MAX_FILES_PER_REASON = 16
MAX_BYTES = 64 << 20
MAX_FILE_BYTES = 1 << 20  # Longer frames are cut.
KEPT_S = 60.0  # minimum age in seconds before a newer example with the same reason replaces one
SUFFIX = ".frame"


class Quarantine:
    """Examples of bad records. Not thread-safe.

    A full or broken disk loses examples but nothing else: no method raises OSError.
    """

    def __init__(
        self, folder: Path, max_age_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self.folder, self.max_age_s, self._clock = folder, max_age_s, clock
        self._files: list[tuple[int, str, int]] = []
        """Time in ns, reason and size of every file, oldest first. Read once, because listing the
        folder for every bad record would take longer than reading the record.
        """
        with suppress(OSError):
            for path in sorted(folder.glob(f"*{SUFFIX}")):
                time_ns, _, reason = path.stem.partition("-")
                if time_ns.isdigit():
                    self._files.append((int(time_ns), reason, path.stat().st_size))

    def keep(self, frame: bytes, error: CorruptRecordError) -> None:
        """Set the frame aside, unless there are enough recent examples with its reason."""
        now_ns = int(1e9 * self._clock())
        same = [file for file in self._files if file[1] == error.reason]
        is_young = bool(same) and now_ns - same[0][0] < 1e9 * KEPT_S
        if len(same) >= MAX_FILES_PER_REASON and (is_young or not self._remove(same[0])):
            return
        # Names are unique and sorted by time, because two examples may arrive within one clock
        # tick.
        time_ns = max(now_ns, self._files[-1][0] + 1 if self._files else 0)
        # The error is joined into one line, because the frame begins after the first newline.
        content = (
            b" ".join(str(error).encode(errors="replace").split())[:500]
            + b"\n"
            + frame[:MAX_FILE_BYTES]
        )
        while self._files and self._is_full(len(content)):
            if not self._remove(self._files[0]):
                return
        with suppress(OSError):
            make_private(self.folder)  # it contains users' text
            path = self._path(time_ns, error.reason)
            try:
                path.write_bytes(content)
            except OSError:
                path.unlink(missing_ok=True)
                raise
            self._files.append((time_ns, error.reason, len(content)))

    def _is_full(self, num_bytes: int) -> bool:
        return (
            len(self._files) >= MAX_FILES
            or sum(size for _, _, size in self._files) + num_bytes > MAX_BYTES
        )

    def expire(self, now_s: float) -> None:
        for file in [file for file in self._files if now_s - file[0] / 1e9 >= self.max_age_s]:
            self._remove(file)

    def __len__(self) -> int:
        return len(self._files)

    def clear(self) -> None:
        for file in list(self._files):
            self._remove(file)

    def _remove(self, file: tuple[int, str, int]) -> bool:
        """Overwrite and delete a file; return whether it is gone.

        If it is not gone, the next call may succeed.
        """
        time_ns, reason, _ = file
        path = self._path(time_ns, reason)
        try:
            overwrite(path)
            path.unlink()
        except FileNotFoundError:  # deleted manually
            pass
        except OSError:
            return False
        self._files.remove(file)
        return True

    def _path(self, time_ns: int, reason: str) -> Path:
        return self.folder / f"{time_ns:020d}-{reason}{SUFFIX}"


def overwrite(path: Path) -> None:
    """Overwrite the file's bytes on the disk with zeros, as SQLite does with deleted content.

    A link, a file with several names, a pipe or a folder is left unchanged, because it may lead to
    any file of this user.

    Raises:
        OSError: the file cannot be opened or written.
    """
    try:
        # Without O_NONBLOCK, opening a pipe waits for its other end.
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            return
        raise
    # Overwrite in place: "wb" would truncate first, and the file system may then write the zeros to
    # other blocks.
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
            return
        left = found.st_size
        while left > 0:
            left -= file.write(bytes(min(left, 1 << 20)))
        os.fsync(descriptor)
