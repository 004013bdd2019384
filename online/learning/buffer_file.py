"""One of the buffer's SQLite files, with records by sequence number.

Also classifies SQLite's errors.
"""

import errno
import sqlite3
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from redraft.files.artifact import is_full

LAYOUT = 2  # Layout of the files, in SQLite's `user_version`.
# Larger than SQLite's 4 KiB, because a frame spans many pages, and each page is a separate write.
PAGE_BYTES = 16 << 10
MIN_FILE_BYTES = 512  # The smallest page of SQLite.

# There are separate tables for rows and frames, because a scan of the index columns would read a page
# per record if they were stored next to the blobs. `conversations` lists the records whose prompt
# continues an earlier one. Files of earlier releases lack this table.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY, record_id TEXT NOT NULL UNIQUE, time_s REAL NOT NULL, domain TEXT NOT NULL,
    tenant TEXT NOT NULL, target_fingerprint TEXT NOT NULL, draft_version TEXT NOT NULL,
    num_drafted INTEGER NOT NULL, num_wrong INTEGER NOT NULL, held_out INTEGER NOT NULL,
    prompt INTEGER NOT NULL, request INTEGER NOT NULL, crc32 INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS conversations (seq INTEGER PRIMARY KEY, conversation INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS frames (seq INTEGER PRIMARY KEY, frame BLOB NOT NULL);
"""

_MARKS = {"records": ",".join("?" * 13), "frames": "?,?", "conversations": "?,?"}
# One page each for the schema, three tables and the unique index.
_EMPTY_FILE_BYTES = 5 * PAGE_BYTES

INDEX_DTYPE = np.dtype(
    [
        ("seq", "i8"),
        ("time_s", "f8"),
        ("domain", "O"),
        ("tenant", "O"),
        ("target", "i4"),
        ("num_drafted", "i8"),
        ("num_wrong", "i8"),
        ("held_out", "?"),
        ("prompt", "i8"),
        ("request", "i8"),
        ("conversation", "i8"),
    ]
)


# Numbers that stand for `Row.target`, because comparing numbers is faster.
TARGETS: dict[str, int] = {}
_ROW_COLUMNS = (INDEX_DTYPE.names or ())[1:]

Index = NDArray[np.void]


class BufferFullError(OSError):
    """The disk is full. The call stored nothing and can be repeated as soon as there is space."""


class DamagedFileError(sqlite3.DatabaseError):
    """The file is a database, but its content differs from what was written."""


class Row(NamedTuple):
    """The columns of a record, i.e. everything that is known without decoding it."""

    record_id: str
    time_s: float
    """Arrival time at the learner, in seconds since the epoch."""
    domain: str
    tenant: str
    target: str
    """`Record.target`. For targets without versions, this is a fingerprint, so that different
    weights are a different target.
    """
    draft_version: str
    num_drafted: int
    """Number of draft tokens that the target verified."""
    num_wrong: int
    """Number of verified draft tokens that the target rejected."""
    held_out: bool
    prompt: int
    """Keyed hash of the prompt."""
    request: int
    """Keyed hash of prompt and request id, equal in all segments of a request."""
    conversation: int
    """`prompt` of the conversation's first record. Not a column of the row: stored separately if
    it differs from `prompt`.
    """


class BufferFile:
    """Records in one file, or in memory if `path` is None. Not thread-safe."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.connection = connect(path)
        self._index: Index | None = None
        # Rows inserted since the cached index was built.
        self._inserted: list[tuple[int, Row]] = []
        self._oldest_s: float | None = None
        self._sizes: list[int] | None = None

    def _forget_cached(self) -> None:
        self._index = self._oldest_s = self._sizes = None

    def index(self) -> Index:
        """Return the index, INDEX_DTYPE [records], by ascending sequence number.

        It is read from the file once and then kept up to date.
        """
        if self._index is None:
            self._index = _build_index(self._read_rows())
        elif self._inserted:
            rows = (
                (seq, *(getattr(row, name) for name in _ROW_COLUMNS)) for seq, row in self._inserted
            )
            self._index = np.concatenate([self._index, _build_index(rows)])
        self._inserted = []
        return self._index

    def _read_rows(self) -> Iterator[tuple[Any, ...]]:
        """Yield the columns of INDEX_DTYPE, row by row.

        Raises:
            DamagedFileError: a row differs from what was written.
        """
        query = "SELECT * FROM records LEFT JOIN conversations USING (seq) ORDER BY seq"
        for seq, *columns, checksum, conversation in self.connection.execute(query):
            if checksum != _checksum(seq, columns):
                raise DamagedFileError(f"the checksum of record {seq} differs")
            row = Row._make([*columns, conversation])
            if conversation is None:
                row = row._replace(conversation=row.prompt)
            yield (seq, *(getattr(row, name) for name in _ROW_COLUMNS))

    def oldest_s(self) -> float:
        """Arrival of the oldest record, seconds since the epoch; infinity if the file is empty."""
        if self._oldest_s is None:
            self._oldest_s = float(self.index()["time_s"].min(initial=np.inf))
        return self._oldest_s

    def insert(self, rows: list[tuple[int, Row, bytes]]) -> bool:
        """Store all (seq, row, frame) tuples and return True once they are on disk.

        If this raises an exception, none of them is stored.
        """
        oldest_s = min(self.oldest_s(), *(row.time_s for _, row, _ in rows))
        with transaction(self.connection):
            self.connection.executemany(
                f"INSERT INTO records VALUES ({_MARKS['records']})",
                [(seq, *row[:-1], _checksum(seq, row[:-1])) for seq, row, _ in rows],
            )
            self.connection.executemany(
                f"INSERT INTO conversations VALUES ({_MARKS['conversations']})",
                [(seq, row.conversation) for seq, row, _ in rows if row.conversation != row.prompt],
            )
            self.connection.executemany(
                f"INSERT INTO frames VALUES ({_MARKS['frames']})",
                [(seq, frame) for seq, _, frame in rows],
            )
        # Extended after the commit, because a failed transaction must not leave rows in the cached
        # index.
        self._inserted += [(seq, row) for seq, row, _ in rows]
        self._oldest_s = oldest_s
        if self._sizes is not None:
            self._sizes += [len(frame) for _, _, frame in rows]
        return True

    def find_known(self, record_ids: list[str]) -> set[str]:
        """Return the record ids that are already in this file."""
        # SQLite accepts 32,766 placeholders by default. `intake` passes at most BATCH_RECORDS at a
        # time.
        marks = ",".join("?" * len(record_ids))
        found = self.connection.execute(
            f"SELECT record_id FROM records WHERE record_id IN ({marks})", record_ids
        )
        return {record_id for (record_id,) in found}

    def find_frame(self, record_id: str) -> tuple[int, int] | None:
        """Return the sequence number and the frame size in bytes of the record with this id.

        None if the record is not in this file.
        """
        query = "SELECT seq, length(frame) FROM records JOIN frames USING (seq) WHERE record_id = ?"
        found = self.connection.execute(query, (record_id,)).fetchone()
        return None if found is None else (int(found[0]), int(found[1]))

    def holds(self, seq: int) -> bool:
        seqs = self.index()["seq"]
        at = int(np.searchsorted(seqs, seq))
        return at < len(seqs) and int(seqs[at]) == seq

    def read_frame(self, seq: int) -> bytes | None:
        """Return the frame of a record; None if it is not in this file."""
        found = self.connection.execute("SELECT frame FROM frames WHERE seq = ?", (seq,)).fetchone()
        return None if found is None else bytes(found[0])

    def frame_sizes(self) -> NDArray[np.int64]:
        """Return the size of each frame in bytes, [records], in the order of the index.

        The sizes are kept up to date in the same way as the index.
        """
        if self._sizes is None:
            query = "SELECT length(frame) FROM records LEFT JOIN frames USING (seq) ORDER BY seq"
            self._sizes = [size or 0 for (size,) in self.connection.execute(query)]
        return np.array(self._sizes, np.int64)

    def copy(self, seqs: Iterable[int], source: "BufferFile") -> None:
        """Store records copied from another file.

        Their numbers must be higher than the numbers in this file.
        """
        self._forget_cached()
        with transaction(self.connection):
            for seq in seqs:
                for table, marks in _MARKS.items():
                    found = source.connection.execute(
                        f"SELECT * FROM {table} WHERE seq = ?", (seq,)
                    )
                    self.connection.executemany(f"INSERT INTO {table} VALUES ({marks})", found)

    def move(self, path: Path) -> None:
        """Move this file to `path`, replacing the file there."""
        assert self.path is not None
        self.close()
        self.path.replace(path)
        unlink(self.path)  # its journal
        self.path, self.connection = path, connect(path)

    def delete(self, seqs: Collection[int]) -> int:
        """Delete the records with these numbers and overwrite them on disk.

        Returns the number of records found.
        """
        # The cached index is dropped first: if the transaction fails, the index is read from the
        # file again, and is never wrong.
        self._forget_cached()
        with transaction(self.connection):
            values = [(seq,) for seq in seqs]
            self.connection.executemany("DELETE FROM frames WHERE seq = ?", values)
            self.connection.executemany("DELETE FROM conversations WHERE seq = ?", values)
            return self.connection.executemany("DELETE FROM records WHERE seq = ?", values).rowcount

    def delete_tenant(self, name: str) -> int:
        """Delete the records of a tenant; return the number of deleted records."""
        return self.delete([seq for seq, _, _ in self.find_tenant(name)])

    def find_tenant(self, name: str) -> list[tuple[int, float, bool]]:
        """Return the sequence number, arrival and `held_out` flag of each record of a tenant."""
        query = "SELECT seq, time_s, held_out FROM records WHERE tenant = ? ORDER BY seq"
        return [
            (seq, time_s, bool(held_out))
            for seq, time_s, held_out in self.connection.execute(query, (name,))
        ]

    def num_bytes(self) -> int:
        if self.path is None:
            (pages,) = self.connection.execute("PRAGMA page_count").fetchone()
            (page_bytes,) = self.connection.execute("PRAGMA page_size").fetchone()
            return int(pages) * int(page_bytes)
        return sum(path.stat().st_size for path in _paths(self.path) if path.exists())

    def close(self) -> None:
        self.connection.close()

    def remove(self) -> None:
        self.close()
        if self.path is not None:
            unlink(self.path)


def connect(path: Path | None) -> sqlite3.Connection:
    """Open a file, or create it.

    Every commit is written to the disk before it returns.

    Raises:
        ValueError: a different release wrote the file, with different columns.
    """
    # Python's transactions are off, because `transaction` begins and ends them. The buffer's lock
    # serialises the threads.
    connection = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
    try:
        # The page size applies only to a new file. An existing one keeps its size.
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        # There is no write-ahead log: records are only added, and would be written twice, once to
        # the log and once to the file. The rollback journal is truncated after each transaction, so
        # it keeps no deleted text.
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.execute("PRAGMA synchronous = FULL")
        # Without secure_delete, SQLite may only mark the pages as free, with the text in them.
        connection.execute("PRAGMA secure_delete = ON")
        (layout,) = connection.execute("PRAGMA user_version").fetchone()
        if layout not in (0, LAYOUT):
            raise ValueError(
                f"{path} has layout {layout}, and this release reads {LAYOUT}: move the file away"
            )
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if not tables.issuperset(_MARKS):
            # `user_version` is part of the same transaction, so a kill cannot leave tables of an
            # unknown layout.
            connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {LAYOUT}; COMMIT;")
    except (sqlite3.Error, ValueError):
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
        # After some errors, SQLite has already rolled the transaction back.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


_CANNOT_WRITE = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
)
"""If the journal cannot grow or be created, SQLite reports an I/O error or a failure to open a
file.
"""


@contextmanager
def named_disk_full() -> Iterator[None]:
    """Raise BufferFullError for each of the ways in which a full disk can be reported."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        if is_full(error) or _primary_code(error) in _CANNOT_WRITE:
            raise BufferFullError(
                errno.ENOSPC, f"the buffer cannot be written ({error}): free disk space"
            ) from error
        raise


def is_damaged(error: sqlite3.Error) -> bool:
    """Whether the file itself is broken, rather than the disk, the statement or a lock."""
    # An error raised by Python has no code.
    is_undecodable = str(error).startswith("Could not decode")
    is_corrupt = _primary_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    return is_corrupt or is_undecodable or isinstance(error, DamagedFileError)


def _build_index(rows: Iterable[Any]) -> Index:
    """Build INDEX_DTYPE [rows] from the columns, in order.

    There are few distinct names, so they are interned to share memory.

    Raises:
        DamagedFileError: a value has the wrong type.
    """
    values = []
    try:
        for seq, time_s, domain, tenant, target, *rest in rows:
            # `intern` raises a TypeError for anything but a string, so it checks the type as well.
            number = TARGETS.setdefault(sys.intern(target), len(TARGETS))
            values.append((seq, time_s, sys.intern(domain), sys.intern(tenant), number, *rest))
        return np.array(values, INDEX_DTYPE)
    except (TypeError, ValueError, OverflowError) as error:
        raise DamagedFileError(f"a column has a different type: {error}") from error


def _checksum(seq: int, row: Iterable[Any]) -> int:
    """Return the CRC-32 of a row, with each bool as a number, because SQLite stores it as one."""
    values = [int(value) if isinstance(value, bool) else value for value in row]
    return zlib.crc32(msgspec.msgpack.encode((seq, *values)))


def estimate_bytes(frames: Iterable[bytes]) -> int:
    """Return an upper bound on the bytes that the frames occupy on the disk.

    Each frame may end within a page, and the frames may open a new file.
    """
    return _EMPTY_FILE_BYTES + sum(len(frame) + PAGE_BYTES for frame in frames)


def unlink(path: Path) -> None:
    for file in _paths(path):
        file.unlink(missing_ok=True)


def _paths(path: Path) -> list[Path]:
    return [path, path.with_name(f"{path.name}-journal")]


def _primary_code(error: Exception) -> int:
    # The low byte is the error class: SQLITE_IOERR_WRITE is 778 = 3 << 8 | 10, and 10 is
    # SQLITE_IOERR.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
