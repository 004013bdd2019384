"""One of the buffer's SQLite files: records with consecutive sequence numbers, and what SQLite's errors mean."""

from __future__ import annotations

import errno
import sqlite3
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 16 << 10
"""A frame is far larger than SQLite's own 4 KiB, and every page costs a write of its own."""

# Two tables: scanning one that holds the blobs too would read a page for every record.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY, record_id TEXT NOT NULL UNIQUE, time_s REAL NOT NULL, domain TEXT NOT NULL,
    tenant TEXT NOT NULL, target_fingerprint TEXT NOT NULL, draft_version TEXT NOT NULL,
    num_drafted INTEGER NOT NULL, num_wrong INTEGER NOT NULL, held_out INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS frames (seq INTEGER PRIMARY KEY, frame BLOB NOT NULL);
"""

_EMPTY_FILE_BYTES = 4 * PAGE_BYTES
"""The schema, two tables, and an index."""

INDEX_DTYPE = np.dtype(
    [
        ("seq", "i8"),
        ("time_s", "f8"),
        ("domain", "O"),
        ("target_fingerprint", "O"),
        ("num_drafted", "i8"),
        ("num_wrong", "i8"),
        ("held_out", "?"),
    ]
)


_OF_A_ROW = (INDEX_DTYPE.names or ())[1:]

Index = NDArray[np.void]


class BufferFullError(OSError):
    """The disk is full. Nothing of the call was stored; the same call works as soon as there is space."""


class Row(NamedTuple):
    """What is known of a record without decoding it."""

    record_id: str
    time_s: float
    """Arrival."""
    domain: str
    tenant: str
    target_fingerprint: str
    draft_version: str
    num_drafted: int
    """Draft tokens that the target verified."""
    num_wrong: int
    """Of these, the ones it refused."""
    held_out: bool


class BufferFile:
    """Records in one file, or in memory where `path` is None. Not thread-safe."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.connection = connect(path, _SCHEMA)
        self._index: Index | None = None
        self._inserted: list[tuple[int, Row]] = []
        """Not in the index yet: it is asked for less often than records arrive."""
        self._oldest_s: float | None = None

    def index(self) -> Index:
        """INDEX_DTYPE [records], ascending; read from the file once."""
        if self._index is None:
            names = ", ".join(INDEX_DTYPE.names or ())
            self._index = _index_of(self.connection.execute(f"SELECT {names} FROM records ORDER BY seq"))
        elif self._inserted:
            rows = ((seq, *(getattr(row, name) for name in _OF_A_ROW)) for seq, row in self._inserted)
            self._index = np.concatenate([self._index, _index_of(rows)])
        self._inserted = []
        return self._index

    def oldest_s(self) -> float:
        """Arrival of its oldest record; infinity when it is empty."""
        if self._oldest_s is None:
            self._oldest_s = float(self.index()["time_s"].min(initial=np.inf))
        return self._oldest_s

    def insert(self, rows: list[tuple[int, Row, bytes]]) -> bool:
        """True: all (seq, row, frame) are on the disk; after an exception none is."""
        oldest_s = min(self.oldest_s(), *(row.time_s for _, row, _ in rows))
        with transaction(self.connection):
            self.connection.executemany(
                "INSERT INTO records VALUES (?,?,?,?,?,?,?,?,?,?)", [(seq, *row) for seq, row, _ in rows]
            )
            self.connection.executemany("INSERT INTO frames VALUES (?,?)", [(seq, frame) for seq, _, frame in rows])
        self._inserted += [(seq, row) for seq, row, _ in rows]
        self._oldest_s = oldest_s
        return True

    def known(self, record_ids: list[str]) -> set[str]:
        """Those of the ids that lie here."""
        marks = ",".join("?" * len(record_ids))
        found = self.connection.execute(f"SELECT record_id FROM records WHERE record_id IN ({marks})", record_ids)
        return {record_id for (record_id,) in found}

    def frames(self, seqs: list[int]) -> list[tuple[int, bytes]]:
        """(seq, frame) of those of `seqs` that lie here, ascending."""
        marks = ",".join("?" * len(seqs))
        return self.connection.execute(f"SELECT seq, frame FROM frames WHERE seq IN ({marks})", seqs).fetchall()

    def delete(self, column: str, value: object) -> int:
        """How many records with this value were deleted and overwritten on the disk."""
        self._index = self._oldest_s = None
        with transaction(self.connection):
            where = f"SELECT seq FROM records WHERE {column} = ?"
            self.connection.execute(f"DELETE FROM frames WHERE seq IN ({where})", (value,))
            return self.connection.execute(f"DELETE FROM records WHERE {column} = ?", (value,)).rowcount

    def num_bytes(self) -> int:
        if self.path is None:
            (pages,), (size,) = (
                self.connection.execute(f"PRAGMA page_{what}").fetchone() for what in ("count", "size")
            )
            return int(pages) * int(size)
        return sum(path.stat().st_size for path in _paths(self.path) if path.exists())

    def close(self) -> None:
        self.connection.close()

    def remove(self) -> None:
        self.close()
        if self.path is not None:
            unlink(self.path)


def connect(path: Path | None, schema: str) -> sqlite3.Connection:
    """A connection whose commits are on the disk when they return, to a file that is made where it is missing."""
    connection = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        # No write-ahead log: records are only ever added, and what it would hold first is then written once instead of
        # twice. A truncated journal keeps nothing of what was deleted.
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")
        connection.executescript(f"BEGIN; {schema} COMMIT;")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # SQLite has rolled back by itself after some errors
            connection.execute("ROLLBACK")
        raise


@contextmanager
def named_disk_full() -> Iterator[None]:
    """Raises: BufferFullError where SQLite says in one of its many ways that the disk is full."""
    try:
        yield
    except sqlite3.OperationalError as error:
        # A journal that can not grow or be made is reported as an I/O error or a file that can not be opened.
        if _primary_code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            raise BufferFullError(errno.ENOSPC, f"the buffer can not write ({error}): free disk space") from error
        raise


def is_damaged(error: sqlite3.Error) -> bool:
    """Whether the file itself is broken, as opposed to the disk, the statement or a lock."""
    return _primary_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _index_of(rows: Iterable[Any]) -> Index:
    """INDEX_DTYPE of its fields in order; the few names there are, held once."""
    return np.array(
        [(s, t, sys.intern(domain), sys.intern(of), *rest) for s, t, domain, of, *rest in rows], INDEX_DTYPE
    )


def bytes_of(frames: Iterable[bytes]) -> int:
    """At most what these take on the disk: each may end within a page, and they may open a file."""
    return _EMPTY_FILE_BYTES + sum(len(frame) + PAGE_BYTES for frame in frames)


def unlink(path: Path) -> None:
    for file in _paths(path):
        file.unlink(missing_ok=True)


def _paths(path: Path) -> list[Path]:
    return [path, path.with_name(f"{path.name}-journal")]


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
