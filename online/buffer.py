"""The learner's memory of traffic: records in rolling SQLite files, bounded by bytes and age, sampled for training.

    append(read_frames(...)) ─► newest file ─ full or old ─► older files ─ over budget or age ─► unlinked
                                     └────────────┬─────────────┘
                    fresh(after)   replay(through)   held_out(per_domain)      commit_trained(checkpoint, through)

Every record gets a sequence number that is never used again. The learner trains records in that order and, together
with a checkpoint's name, commits how far it came: after a crash it takes up the checkpoint that the newest commit names
and goes on behind it. A checkpoint without a commit does not count, so no record is trained twice by accident.

A record is usable where its target's fingerprint is the learner's. Others are kept aside in the same files and never
returned, and after an upgrade of the target it is the old ones that wait there for their end.
"""

from __future__ import annotations

import hashlib
import math
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from online.buffer_file import (
    INDEX_DTYPE,
    BufferFile,
    BufferFullError,
    Index,
    Row,
    bytes_of,
    connect,
    is_damaged,
    named_disk_full,
    transaction,
    unlink,
)
from online.lock import acquire
from online.records import CorruptRecordError, Record, decode

T = TypeVar("T")

NUM_FILES = 16
"""A full buffer is about this many files: one unlink forgets a sixteenth of it, in bytes or in age."""

_CURSOR_SCHEMA = """
CREATE TABLE IF NOT EXISTS trained (number INTEGER PRIMARY KEY, checkpoint_id TEXT NOT NULL, through INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS forgotten (tenant_sha256 TEXT PRIMARY KEY, time_s REAL NOT NULL);
"""


CLOCK_SLACK_S = 60.0
"""A server's clock may be ahead of ours by so much: what it recorded of a forgotten tenant before is told by time."""


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    folder: Path | None = None
    """None: zero retention. Everything stays in this process's memory and ends with it."""
    max_bytes: int = 8 << 30
    """Of all files together."""
    max_age_s: float = 7 * 86400
    """No record is older than this, counted from its arrival: a server's clock is not ours."""
    held_out_fraction: float = 0.05
    """Of all prompts: these judge candidates and never train."""

    def __post_init__(self) -> None:
        if self.max_bytes <= 0 or self.max_age_s <= 0:
            raise ValueError("max_bytes and max_age_s must be above 0")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(f"held_out_fraction is {self.held_out_fraction}: it must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class Replay:
    """How `replay` weighs a record: 2^(-age / half_life) * (1 + surprise * r), r = (wrong + 1) / (drafted + 2).

    r is the share of verified draft tokens that the target refused; its 1 and 2 put a record without any in the middle.
    Surprise weighs and does not select: training on refused positions alone adapts more slowly.
    """

    half_life_s: float = 3600
    surprise: float = 4
    """A record that the draft got all wrong is drawn up to 1 + this times as often as one that it got all right."""
    anchor_share: float = 0.25
    """Of every draw: offline records, against forgetting."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    seq: int
    record: Record


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Everything up to `through` has gone into this checkpoint."""

    checkpoint_id: str
    through: int


@dataclass(frozen=True, kw_only=True)
class BufferStatus:
    num_bytes: int
    num_files: int
    num_training: dict[str, int]
    """Records to train on, by domain."""
    num_held_out: dict[str, int]
    """Records to judge by, by domain."""
    num_foreign: int
    """Records of another target, or stored for another domain."""
    oldest_s: float | None
    """When the oldest record arrived, seconds since the epoch."""
    counts: dict[str, int]
    """Since this process began: records stored, duplicate, foreign, corrupt, stateless, other_domain, forgotten,
    corrupt_on_disk, expired, evicted, deleted; and damaged_files."""


def is_held_out(record: Record, fraction: float) -> bool:
    """True for `fraction` of all prompts, by hash: every segment and every repetition of a request decides alike."""
    prompt = record.context[: 4 * record.num_prompt_tokens]
    return int.from_bytes(hashlib.sha256(prompt).digest()[:8], "big") < fraction * 2**64


class Buffer:
    """The one writer and reader of a folder. Methods may be called from several threads."""

    def __init__(
        self,
        config: BufferConfig,
        target_fingerprint: str,
        hidden_shape: tuple[int, int] | None = None,
        domain: str = "",
    ) -> None:
        """`hidden_shape`: the hidden states that the draft reads; the target's records without them are not kept, nor
        are those of another domain than `domain` where there is one.

        Raises: AlreadyOwnedError where another process has the folder open; BufferFullError.
        """
        self.config = config
        self.target_fingerprint, self.hidden_shape, self.domain = target_fingerprint, hidden_shape, domain
        self.counts: Counter[str] = Counter()
        self._lock = threading.RLock()
        with ExitStack() as opened:
            if config.folder is not None:
                config.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it holds users' text
                opened.callback(os.close, acquire(config.folder / "lock", "a learner's buffer"))
            with named_disk_full():
                self._cursor = connect(config.folder and config.folder / "cursor.db", _CURSOR_SCHEMA)
                opened.callback(self._cursor.close)
                self._files = self._open_files()
            self._opened = opened.pop_all()
        seqs = self._index()["seq"]
        self._next_seq = 1 + max([int(seqs.max(initial=0)), *(trained.through for trained in self.trained())])

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            for file in self._files:
                file.close()
            self._opened.close()

    def append(self, frames: Iterable[tuple[bytes, Record | CorruptRecordError]], now_s: float) -> Counter[str]:
        """How many of `frames`, as `read_frames` yields them, were stored, duplicate, foreign, corrupt, stateless, of
        another domain or of a tenant that was forgotten meanwhile.

        On return they are on the disk and the sender may forget them. A corrupt frame is not kept: whose text it holds
        is not known, so it could never be deleted by tenant; nor is one that the draft can not read.

        Raises: BufferFullError; nothing was stored then.
        """
        frames = list(frames)
        ids = [record.record_id for _, record in frames if isinstance(record, Record)]
        with self._lock:
            self.expire(now_s)
            known, forgotten = self._known(ids), self._forgotten()
            counts = Counter[str]()
            rows: list[tuple[Row, bytes]] = []
            for frame, record in frames:
                if isinstance(record, CorruptRecordError):
                    counts["corrupt"] += 1
                elif record.record_id in known:
                    counts["duplicate"] += 1
                elif record.tenant and record.time_s <= forgotten.get(_sha256(record.tenant), -math.inf):
                    counts["forgotten"] += 1
                elif self.domain not in ("", record.domain):
                    counts["other_domain"] += 1
                elif self._is_stateless(record):
                    counts["stateless"] += 1
                else:
                    known.add(record.record_id)
                    rows.append((self._row(record, now_s), frame))
                    is_foreign = record.target_fingerprint != self.target_fingerprint
                    counts["foreign" if is_foreign else "stored"] += 1
            if rows:
                with named_disk_full():
                    self._insert(rows, now_s)
            self.counts += counts
            return counts

    def expire(self, now_s: float) -> None:
        """Forget what is over age. `append` does so too; call it where no records arrive."""
        with self._lock:
            for file in list(self._files):
                oldest_s = self._unless_damaged(file, file.oldest_s, now_s)
                if now_s - oldest_s >= self.config.max_age_s:
                    self._drop(file, "expired")

    def fresh(self, after: int, limit: int) -> list[Stored]:
        """The oldest `limit` training records behind sequence number `after`, in order of arrival.

        Fewer only where there are no more, or where some turned out corrupt and were thrown away.
        """
        with self._lock:
            seqs = self._training()["seq"]
            return self._read(seqs[seqs > after][:limit])

    def bound_lag(self, after: int, max_records: int) -> tuple[int, int]:
        """(where to go on so that at most `max_records` fresh ones are left, how many that skips).

        A learner slower than its traffic would train ever older records. What it skips can still be replayed.
        """
        with self._lock:
            seqs = self._training()["seq"]
        seqs = seqs[seqs > after]
        num_skipped = len(seqs) - max_records
        return (int(seqs[num_skipped - 1]), num_skipped) if num_skipped > 0 else (after, 0)

    def replay(
        self, count: int, anchors: Sequence[Record], *, through: int, now_s: float, seed: int, policy: Replay
    ) -> list[Record]:
        """`count` records to train again: a share of `anchors`, then distinct ones up to `through`, drawn by weight.

        Fewer where the buffer holds fewer. The same contents and seed give the same records.
        """
        rng = np.random.default_rng(seed)
        num_anchors = min(len(anchors), round(count * policy.anchor_share))
        chosen = [anchors[i] for i in rng.choice(len(anchors), num_anchors, replace=False)] if num_anchors else []
        with self._lock:
            index = self._training()
            index = index[index["seq"] <= through]
            order = draw(log_weights(index, now_s, policy), count - num_anchors, rng)
            return chosen + [stored.record for stored in self._read(index["seq"][order])]

    def held_out(self, per_domain: int) -> list[Stored]:
        """The newest `per_domain` held-out records of every domain, those that traffic has left included."""
        with self._lock:
            index = self._usable()
            index = index[index["held_out"]]
            newest = [index["seq"][index["domain"] == domain][-per_domain:] for domain in set(index["domain"])]
            return self._read(np.concatenate([index["seq"][:0], *newest]))

    def delete_tenant(self, tenant: str, now_s: float) -> int:
        """How many records were deleted: all of this tenant's, foreign ones too, and overwritten on the disk.

        What was recorded until now and is still on its way will not be stored.
        """
        with self._lock, named_disk_full():
            with transaction(self._cursor):
                forgotten = (_sha256(tenant), now_s + CLOCK_SLACK_S)
                self._cursor.execute("INSERT OR REPLACE INTO forgotten VALUES (?, ?)", forgotten)
            deletions = [(file, partial(file.delete, "tenant", tenant)) for file in self._files]
            deleted = sum(self._unless_damaged(file, delete, 0) for file, delete in deletions)
            self.counts["deleted"] += deleted
            return deleted

    def commit_trained(self, checkpoint_id: str, through: int) -> None:
        """Make a complete checkpoint count, and everything up to `through` trained.

        Raises: BufferFullError; the checkpoint does not count then.
        """
        with self._lock, named_disk_full(), transaction(self._cursor):
            self._cursor.execute("INSERT INTO trained (checkpoint_id, through) VALUES (?, ?)", (checkpoint_id, through))

    def trained(self) -> list[Trained]:
        """What was committed, newest first: take up the first whose checkpoint is intact, and train what is behind."""
        with self._lock:
            rows = self._cursor.execute("SELECT checkpoint_id, through FROM trained ORDER BY number DESC").fetchall()
        return [Trained(checkpoint_id=checkpoint_id, through=through) for checkpoint_id, through in rows]

    def status(self) -> BufferStatus:
        with self._lock:
            index, usable = self._index(), self._usable()
            return BufferStatus(
                num_bytes=sum(file.num_bytes() for file in self._files),
                num_files=len(self._files),
                num_training=dict(Counter(usable["domain"][~usable["held_out"]].tolist())),
                num_held_out=dict(Counter(usable["domain"][usable["held_out"]].tolist())),
                num_foreign=len(index) - len(usable),
                oldest_s=float(index["time_s"].min()) if len(index) else None,
                counts=dict(self.counts),
            )

    def _is_stateless(self, record: Record) -> bool:
        is_ours = record.target_fingerprint == self.target_fingerprint
        is_readable = self.hidden_shape is None or (record.hidden and record.hidden_shape == self.hidden_shape)
        return is_ours and not is_readable

    def _known(self, record_ids: list[str]) -> set[str]:
        """Those of the ids that are stored."""
        nothing: set[str] = set()
        files = list(self._files)  # a damaged one leaves it
        return nothing.union(*(self._unless_damaged(file, partial(file.known, record_ids), nothing) for file in files))

    def _forgotten(self) -> dict[str, float]:
        """Until when nothing is stored of a tenant, by its SHA-256."""
        return dict(self._cursor.execute("SELECT tenant_sha256, time_s FROM forgotten").fetchall())

    def _row(self, record: Record, now_s: float) -> Row:
        # Rows behind a rejection hang on text that nobody verified: they do not tell how good the draft was.
        verified_R = (record.draft_ids >= 0) & (record.branches == 0)
        return Row(
            record_id=record.record_id,
            time_s=now_s,
            domain=record.domain,
            tenant=record.tenant,
            target_fingerprint=record.target_fingerprint,
            draft_version=record.draft_version,
            num_drafted=int(verified_R.sum()),
            num_wrong=int((verified_R & ~record.accepted).sum()),
            held_out=is_held_out(record, self.config.held_out_fraction),
        )

    def _insert(self, rows: list[tuple[Row, bytes]], now_s: float) -> None:
        self._make_room(bytes_of(frame for _, frame in rows))
        file = self._newest_file(now_s)
        numbered = [(self._next_seq + i, row, frame) for i, (row, frame) in enumerate(rows)]
        if self._unless_damaged(file, partial(file.insert, numbered), False):
            self._next_seq += len(rows)
        else:
            self._insert(rows, now_s)

    def _newest_file(self, now_s: float) -> BufferFile:
        """The file to write to: the last, until it holds its share of the bytes or of the age."""
        if self._files:
            newest = self._files[-1]
            is_old = now_s - newest.oldest_s() >= self.config.max_age_s / NUM_FILES
            if not is_old and newest.num_bytes() < self.config.max_bytes / NUM_FILES:
                return newest
        folder = self.config.folder
        self._files.append(BufferFile(folder and folder / f"records-{self._next_seq:016d}.db"))
        return self._files[-1]

    def _make_room(self, num_bytes: int) -> None:
        while self._files and sum(file.num_bytes() for file in self._files) + num_bytes > self.config.max_bytes:
            self._drop(self._files[0], "evicted")

    def _open_files(self) -> list[BufferFile]:
        """The folder's files, oldest first. A damaged one goes as a whole: the rest of it can not be trusted."""
        files = []
        for path in sorted(self.config.folder.glob("records-*.db")) if self.config.folder else []:
            try:
                files.append(BufferFile(path))
            except sqlite3.DatabaseError as error:
                if not is_damaged(error):
                    raise
                self.counts["damaged_files"] += 1
                unlink(path)
        return files

    def _drop(self, file: BufferFile, reason: str) -> None:
        self.counts[reason] += 1 if reason == "damaged_files" else len(file.index())
        self._files.remove(file)
        file.remove()

    def _index(self) -> Index:
        """INDEX_DTYPE [records] of all files, ascending."""
        empty = np.empty(0, INDEX_DTYPE)
        return np.concatenate([empty, *(self._unless_damaged(file, file.index, empty) for file in list(self._files))])

    def _usable(self) -> Index:
        index = self._index()
        is_usable = index["target_fingerprint"] == self.target_fingerprint
        if self.domain:  # it may have been another when these were stored
            is_usable &= index["domain"] == self.domain
        usable: Index = index[is_usable]
        return usable

    def _training(self) -> Index:
        usable = self._usable()
        training: Index = usable[~usable["held_out"]]
        return training

    def _read(self, seqs: NDArray[np.int64]) -> list[Stored]:
        """The records `seqs`, ascending, without the corrupt ones: these are counted and thrown away."""
        stored = []
        for file in list(self._files):
            wanted = np.intersect1d(seqs, file.index()["seq"]).tolist()
            found: list[tuple[int, bytes]] = self._unless_damaged(file, partial(file.frames, wanted), [])
            for seq, frame in found:
                try:
                    stored.append(Stored(seq=seq, record=decode(frame)))
                except CorruptRecordError:
                    self.counts["corrupt_on_disk"] += 1
                    with suppress(BufferFullError), named_disk_full():  # a full disk must not stop reading
                        file.delete("seq", seq)
        return stored

    def _unless_damaged(self, file: BufferFile, operation: Callable[[], T], otherwise: T) -> T:
        """What `operation` on `file` returns; `otherwise` where the file proves damaged, and then it is gone."""
        try:
            return operation()
        except sqlite3.DatabaseError as error:
            if not is_damaged(error):
                raise
            self._drop(file, "damaged_files")
            return otherwise


def _sha256(tenant: str) -> str:
    """Who was forgotten is not to be read either."""
    return hashlib.sha256(tenant.encode()).hexdigest()


def log_weights(index: Index, now_s: float, policy: Replay) -> NDArray[np.float64]:
    """Logarithm of the weight that `Replay` describes, for every record of the index."""
    refused = (index["num_wrong"] + 1) / (index["num_drafted"] + 2)
    half_lives = (now_s - index["time_s"]) / policy.half_life_s
    log_weight: NDArray[np.float64] = np.log1p(policy.surprise * refused) - np.log(2) * half_lives
    return log_weight


def draw(log_weight: NDArray[np.float64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`count` distinct positions, one after the other in proportion to weight (Gumbel top-k, arXiv 1903.06059)."""
    return np.argsort(-(log_weight + rng.gumbel(size=len(log_weight))))[:count]
