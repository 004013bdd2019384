"""One of the buffer's SQLite files: records with consecutive sequence numbers, and what SQLite's errors mean."""

from __future__ import annotations

import errno
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LOG_BYTES = 4 << 20
"""What the write-ahead log is cut back to; also SQLite's own default before it is copied into the file."""

# Two tables: scanning one that holds the blobs too would read a page for every record.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY, record_id TEXT NOT NULL UNIQUE, time_s REAL NOT NULL, domain TEXT NOT NULL,
    tenant TEXT NOT NULL, target_fingerprint TEXT NOT NULL, draft_version TEXT NOT NULL,
    num_drafted INTEGER NOT NULL, num_wrong INTEGER NOT NULL, held_out INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS frames (seq INTEGER PRIMARY KEY, frame BLOB NOT NULL);
"""

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

    def index(self) -> Index:
        """INDEX_DTYPE [records], ascending; kept until the file changes."""
        if self._index is None:
            rows = self.connection.execute(f"SELECT {', '.join(INDEX_DTYPE.names or ())} FROM records ORDER BY seq")
            interned = [(s, t, sys.intern(domain), sys.intern(target), *rest) for s, t, domain, target, *rest in rows]
            self._index = np.array(interned, INDEX_DTYPE)
        return self._index

    @property
    def oldest_s(self) -> float:
        """Arrival of its oldest record; infinity when it is empty."""
        return float(self.index()["time_s"].min(initial=np.inf))

    def insert(self, rows: list[tuple[int, Row, bytes]]) -> bool:
        """True: all (seq, row, frame) are on the disk; after an exception none is."""
        self._index = None
        with transaction(self.connection):
            self.connection.executemany(
                "INSERT INTO records VALUES (?,?,?,?,?,?,?,?,?,?)", [(seq, *row) for seq, row, _ in rows]
            )
            self.connection.executemany("INSERT INTO frames VALUES (?,?)", [(seq, frame) for seq, _, frame in rows])
        return True

    def has(self, record_id: str) -> bool:
        return bool(self.connection.execute("SELECT 1 FROM records WHERE record_id = ?", (record_id,)).fetchone())

    def frames(self, seqs: list[int]) -> list[tuple[int, bytes]]:
        """(seq, frame) of those of `seqs` that lie here, ascending."""
        marks = ",".join("?" * len(seqs))
        return self.connection.execute(f"SELECT seq, frame FROM frames WHERE seq IN ({marks})", seqs).fetchall()

    def delete(self, column: str, value: object) -> int:
        """How many records with this value were deleted and overwritten on the disk."""
        self._index = None
        with transaction(self.connection):
            where = f"SELECT seq FROM records WHERE {column} = ?"
            self.connection.execute(f"DELETE FROM frames WHERE seq IN ({where})", (value,))
            deleted = self.connection.execute(f"DELETE FROM records WHERE {column} = ?", (value,)).rowcount
        self.truncate_log()  # it still holds what was deleted
        return deleted

    def truncate_log(self) -> None:
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

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
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")  # WAL's default loses the newest commits at a power cut
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
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
        # A log or shared-memory file that can not grow is reported as an I/O error or a file that can not be opened.
        if _primary_code(error) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
            raise BufferFullError(errno.ENOSPC, f"the buffer can not write ({error}): free disk space") from error
        raise


def is_damaged(error: sqlite3.Error) -> bool:
    """Whether the file itself is broken, as opposed to the disk, the statement or a lock."""
    return _primary_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def unlink(path: Path) -> None:
    for file in _paths(path):
        file.unlink(missing_ok=True)


def _paths(path: Path) -> list[Path]:
    return [path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")]


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
