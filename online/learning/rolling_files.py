"""The buffer's files, a rolling set limited in bytes and age.

A damaged file is dropped, and work continues.

A file is always dropped as a whole. The newest file accepts records until it reaches its share of
the bytes or of the age. A file that consists mostly of records from tenants beyond their share is
rewritten without those records, so that a tenant that sends the most displaces its own records.
"""

import operator
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from redraft.online.learning.buffer_file import (
    INDEX_DTYPE,
    MIN_FILE_BYTES,
    BufferFile,
    BufferFullError,
    DamagedFileError,
    Index,
    Row,
    estimate_bytes,
    is_damaged,
    named_disk_full,
    unlink,
)
from redraft.online.learning.evidence import find_excess
from redraft.online.learning.prompt_key import Hashes, PromptKey, open_key
from redraft.online.records.record import CorruptRecordError, Record, decode_record

T = TypeVar("T")

NUM_FILES = 16
"""Number of files in a full buffer. Deleting the oldest one removes about a sixteenth of it."""

WRITTEN_AGAIN = "rewritten.db"
"""Name of a file while it is rewritten. A file with this name at the start is incomplete."""

REHASHED_DTYPE = np.dtype([("seq", "i8"), ("prompt", "i8"), ("request", "i8")])


class RollingFiles:
    """The files in a folder, or one file in memory.

    Not thread-safe. A file that proves damaged is deleted as a whole, because the rest of it cannot
    be trusted.
    """

    def __init__(
        self,
        folder: Path | None,
        max_bytes: int,
        max_age_s: float,
        tenant_share: float,
        counts: Counter[str],
        damage: list[str],
    ) -> None:
        """Open the files in `folder`.

        Dropped records are counted in `counts`, and the reasons are added to `damage`.
        """
        self.folder, self.max_bytes, self.max_age_s = folder, max_bytes, max_age_s
        self.tenant_share = tenant_share
        self._file_bytes, self._file_age_s = max_bytes / NUM_FILES, max_age_s / NUM_FILES
        self.counts, self.damage = counts, damage
        self.files: list[BufferFile] = []  # Oldest first.
        self._rehashed: NDArray[np.void] = np.empty(0, REHASHED_DTYPE)
        """New hashes of records that were hashed with a different key, by ascending number."""
        self._parts: list[Index] = []  # of which `_index` consists
        self._index: Index = np.empty(0, INDEX_DTYPE)
        paths = sorted(folder.glob("records-*.db")) if folder else []
        if folder:
            unlink(folder / WRITTEN_AGAIN)
        for path in paths:
            self._open(path, is_newest=path is paths[-1])
        # After a kill within `_write_again`, the previous file already contains the records of this
        # file.
        last = 0
        for file, seqs in self.each(lambda file: (file, file.index()["seq"])):
            if file.path is not None and last >= _first_number(file.path):
                self._remove(file)
            last = max(last, int(seqs.max(initial=0)))

    def _open(self, path: Path, *, is_newest: bool) -> None:
        try:
            # SQLite treats a file without a complete page as new; only the newest file can be such
            # a file.
            num_bytes = path.stat().st_size
            if num_bytes < MIN_FILE_BYTES and (num_bytes or not is_newest):
                raise DamagedFileError(f"{num_bytes} bytes")
            self.files.append(BufferFile(path))
        except sqlite3.DatabaseError as error:
            if not is_damaged(error):
                raise
            self._note_damage(path, error)
            unlink(path)

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __len__(self) -> int:
        return len(self.files)

    def num_bytes(self) -> int:
        return sum(file.num_bytes() for file in self.files)

    def last_number(self) -> int:
        """Return the highest sequence number in all files; 0 if there are no records."""
        return int(self.index()["seq"].max(initial=0))

    def index(self) -> Index:
        """Return the index of all files, INDEX_DTYPE [records], by ascending sequence number.

        Read-only, and the same array until the records change.
        """
        parts = list(self.each(BufferFile.index))
        if len(parts) != len(self._parts) or any(map(operator.is_not, parts, self._parts)):
            self._parts, self._index = parts, self._join(parts)
        return self._index

    def num_records(self) -> int:
        return sum(self.each(lambda file: len(file.index())))

    def _join(self, parts: list[Index]) -> Index:
        index: Index = np.concatenate([np.empty(0, INDEX_DTYPE), *parts])
        # `concatenate` has copied the arrays, so the cached index of each file stays unchanged.
        if len(self._rehashed):
            begins = index["conversation"] == index["prompt"]
            has_new = np.isin(index["seq"], self._rehashed["seq"])
            new = self._rehashed[np.searchsorted(self._rehashed["seq"], index["seq"][has_new])]
            index["prompt"][has_new], index["request"][has_new] = new["prompt"], new["request"]
            index["conversation"][begins] = index["prompt"][begins]
        index.flags.writeable = False
        return index

    def each(self, operation: Callable[[BufferFile], T]) -> Iterator[T]:
        """Return the result of `operation` on each file, oldest first, except for damaged files."""
        # Iterate over a copy, because damaged files are removed from the list.
        for file in list(self.files):
            yield from self.unless_damaged(file, lambda file: [operation(file)], list[T]())

    def unless_damaged(
        self, file: BufferFile, operation: Callable[[BufferFile], T], otherwise: T
    ) -> T:
        """Return `operation(file)`; if the file proves damaged, drop it and return `otherwise`."""
        try:
            return operation(file)
        except sqlite3.DatabaseError as error:
            self._drop_damaged(file, error)
            return otherwise

    def insert(self, rows: list[tuple[int, Row, bytes]], now_s: float) -> None:
        """Store all (seq, row, frame) tuples. If this raises an error, none of them is stored."""
        # Free space first, because this may drop the newest file as well, and `_newest` then starts
        # a new one.
        num_bytes = estimate_bytes(frame for _, _, frame in rows)
        while self.files and self.num_bytes() + num_bytes > self.max_bytes:
            self._make_room()
        # If `insert` finds that a file is damaged, the file is dropped, so this loop ends with a
        # new file at the latest.
        while not self.unless_damaged(
            self._newest(rows[0][0], now_s), lambda file: file.insert(rows), False
        ):
            pass

    def _make_room(self) -> None:
        """Free space by dropping records of a tenant above its share, or else the oldest file.

        A tenant's records are dropped only where they take up more than half of a file.
        """
        found = list(self.each(lambda file: (file, file.index()["tenant"], file.frame_sizes())))
        if not found:
            return
        files, tenants, sizes = zip(*found, strict=True)
        leaves = find_excess(np.concatenate(tenants), np.concatenate(sizes), self.tenant_share)
        ends = np.cumsum([len(part) for part in tenants])[:-1]
        for file, size, leaving in zip(files, sizes, np.split(leaves, ends), strict=True):
            if leaving.any() and leaving.all():
                self._drop(file, "evicted")
                return
            if 2 * size[leaving].sum() > size.sum() and self._write_again(file, ~leaving):
                self.counts["evicted"] += int(leaving.sum())
                return
        self._drop(self.files[0], "evicted")

    def _write_again(self, file: BufferFile, kept: NDArray[np.bool_]) -> bool:
        """Replace a file with one that contains only the kept records; return False if that fails.

        If little remains, it is appended to the preceding file, because otherwise a flood of
        records would leave more and more files.
        """
        at = self.files.index(file)
        before, index = self.files[max(0, at - 1)], file.index()[kept]
        is_small = before.num_bytes() + int(file.frame_sizes()[kept].sum()) < self._file_bytes
        is_short = index["time_s"].max(initial=0.0) - before.oldest_s() < self._file_age_s
        sources = [(file, index["seq"].tolist())]
        if at and is_small and is_short:
            sources.insert(0, (before, before.index()["seq"].tolist()))
        path = sources[0][0].path
        beside = path and path.with_name(WRITTEN_AGAIN)
        try:
            new = BufferFile(beside)
            for source, seqs in sources:
                new.copy(seqs, source)
        except sqlite3.Error:  # the disk is full, or a file is damaged
            if beside is not None:
                unlink(beside)
            return False
        self.files[at + 1 - len(sources) : at + 1] = [new]
        for source, _ in sources:
            source.close()
        if path is not None:
            new.move(path)
            # After a kill in between, the previous file also contains the records (`__init__`).
            if file.path is not None and file.path != path:
                unlink(file.path)
        return True

    def _newest(self, next_seq: int, now_s: float) -> BufferFile:
        """Return the file to write to: the last one, or a new one if that is full or too old."""
        if self.files:
            newest = self.files[-1]
            is_old = now_s - newest.oldest_s() >= self._file_age_s
            if not is_old and newest.num_bytes() < self._file_bytes:
                return newest
        # A file is named after the first number in it, so that sorting the names sorts the records.
        self.files.append(BufferFile(self.folder and self.folder / f"records-{next_seq:016d}.db"))
        return self.files[-1]

    def read(self, seq: int) -> Record | None:
        """Return the record with this number; None if it is no longer in the files.

        A corrupt record is counted and deleted.
        """
        file = self._find(seq)
        frame = (
            None
            if file is None
            else self.unless_damaged(file, lambda file: file.read_frame(seq), None)
        )
        if file is None or frame is None:
            return None
        try:
            return decode_record(frame)
        except CorruptRecordError:
            self.counts["corrupt_on_disk"] += 1
            with suppress(BufferFullError), named_disk_full():  # a full disk must not stop reading
                self.unless_damaged(file, lambda file: file.delete([seq]), 0)
            return None

    def _find(self, seq: int) -> BufferFile | None:
        # `holds` uses the cached index, so files without this record are not queried.
        found = self.each(lambda file: file if file.holds(seq) else None)
        return next(filter(None, found), None)

    def open_key(self, newest: int) -> PromptKey:
        """Open the folder's key.

        Held-out records that were hashed with a lost key are hashed again with the new one, and
        stay on the same side. `newest` is the highest sequence number assigned so far.
        """
        if self.folder is None:
            return PromptKey.make()
        has_hashes = any(len(file.index()) for file in self.files)
        opened = open_key(self.folder, newest=newest, has_hashes=has_hashes)
        self.damage += opened.damage
        rows = [
            (seq, *hashes)
            for file in self.files
            for seq, hashes in self._hash_held_out(file, opened.key, opened.rehash_through).items()
        ]
        self._rehashed, self._parts = np.array(rows, REHASHED_DTYPE), []
        return opened.key

    def _hash_held_out(self, file: BufferFile, key: PromptKey, through: int) -> dict[int, Hashes]:
        index = self.unless_damaged(file, BufferFile.index, np.empty(0, INDEX_DTYPE))
        seqs = index["seq"][index["held_out"] & (index["seq"] <= through)].tolist()
        return {seq: key.hash(record) for seq in seqs if (record := self.read(seq)) is not None}

    def expire(self, now_s: float) -> None:
        # A file is dropped as a whole when its oldest record is too old, which loses at most 1 /
        # NUM_FILES of the age.
        for file, oldest_s in self.each(lambda file: (file, file.oldest_s())):
            if now_s - oldest_s >= self.max_age_s:
                self._drop(file, "expired")

    def _drop(self, file: BufferFile, reason: str) -> None:
        self.counts[reason] += len(file.index())
        self._remove(file)

    def _drop_damaged(self, file: BufferFile, error: sqlite3.DatabaseError) -> None:
        """Drop a damaged file.

        Raises:
            sqlite3.DatabaseError: the given error, if it concerns anything but the file.
        """
        if not is_damaged(error):
            raise error
        self._note_damage(file.path, error)
        self._remove(file)

    def _remove(self, file: BufferFile) -> None:
        self.files.remove(file)
        file.remove()

    def _note_damage(self, path: Path | None, error: sqlite3.Error) -> None:
        self.counts["damaged_files"] += 1
        self.damage.append(f"{path} is damaged ({error}): its records are lost")


def _first_number(path: Path) -> int:
    return int(path.stem.removeprefix("records-"))
