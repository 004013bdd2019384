"""The learner's memory of traffic: records in rolling SQLite files, limited in bytes and age, sampled for training.

    append(read_frames(...)) ─► newest file ─ full or old ─► older files ─ over budget or age ─► unlinked
                                     └────────────┬─────────────┘
                    fresh(after)   replay(through)   read(select_held_out())   commit_trained(checkpoint, through)

A keyed hash of the prompt decides whether a record trains or is held out: see `prompt_key`. No tenant has more than its
share of what is replayed or judged: see `evidence`.

Every record gets a sequence number, which is never reused. The learner trains records in this order, and commits the
number it has reached together with a checkpoint's name. After a crash it resumes the checkpoint of the newest commit
and continues after this number. A checkpoint without a commit does not count: no record is trained twice by accident.

A record is usable if it is of the learner's target, by fingerprint. Foreign records are stored in the same files but
never returned. After an upgrade of the target the old records are the foreign ones, and stay until they expire.
"""

from __future__ import annotations

import hashlib
import math
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from redraft.heads.files.lock import acquire
from redraft.online.learning.buffer_file import (
    INDEX_DTYPE,
    LAYOUT,
    MIN_FILE_BYTES,
    BufferFile,
    BufferFullError,
    DamagedFileError,
    Index,
    LaterFileError,
    Row,
    estimate_bytes,
    is_damaged,
    named_disk_full,
    unlink,
)
from redraft.online.learning.cursor import Commit, Cursor
from redraft.online.learning.evidence import EvidenceLimits, choose_evidence, name_domains, take_fairly
from redraft.online.learning.penalties import is_undecided
from redraft.online.learning.prompt_key import Hashes, PromptKey, open_key
from redraft.online.learning.quarantine import Quarantine, overwrite
from redraft.online.records.origin import list_stored_names
from redraft.online.records.record import CorruptRecordError, Record, decode_record, encode_record, join_text

T = TypeVar("T")

Frames = Iterable[tuple[bytes, Record | CorruptRecordError]]
"""Frames with the decoded record, as `read_frames` yields them."""

NUM_FILES = 16
"""Number of files of a full buffer. Unlinking the oldest forgets about a sixteenth, in bytes or in age."""

MAX_LATER_RECORDS = 1 << 24
"""More records than a file holds: numbers after one of a later release, which this one cannot read, begin beyond."""

REHASHED_DTYPE = np.dtype([("seq", "i8"), ("prompt", "i8"), ("request", "i8")])

CLOCK_SLACK_S = 3600.0
"""Records of a forgotten tenant are not stored if they were made until this many seconds after the deletion: a server's
clock may be ahead, and an answer that had begun before goes on."""


@dataclass(frozen=True, kw_only=True)
class BufferConfig:
    folder: Path | None = field(default=None, metadata={"listed": False})
    """Folder of the buffer's files. None: records stay in this process's memory and end with it."""
    max_bytes: int = 8 << 30
    """Total size of the buffer's files, in bytes. Beyond it the oldest records go."""
    max_age_s: float = 7 * 86400
    """Records are deleted at the latest this many seconds after they arrived at the learner."""
    max_read_bytes: int = 192 << 20
    """Size limit of the records that are in memory at once, in bytes: a step's new ones, and as much of replayed ones.
    Only records with hidden states come near it. If they do, a step has fewer records than `training` asks for: raise
    this to `training.replay_per_step` times the size of a record, at 2 bytes per number."""
    held_out_fraction: float = 0.2
    """Share of all prompts whose records judge candidates and are never trained. A secret key in the folder decides
    which, so that no client can choose. With 0.2, the gate can give its first verdict within 200 requests; a fleet of
    thousands of requests an hour can do with less."""
    tenant_share: float = 0.2
    """Largest share of one tenant (X-Redraft-Tenant) among the held-out requests that judge a candidate, and among
    replayed records. All requests without a tenant are one tenant's. If there are fewer than 1 / tenant_share tenants,
    each may have an equal part, so a single one has everything. Set this to 1 if you trust all your tenants."""

    def __post_init__(self) -> None:
        if not 0 < self.tenant_share <= 1:
            raise ValueError(f"tenant_share is {self.tenant_share}: it must be above 0 and at most 1")
        if min(self.max_bytes, self.max_age_s, self.max_read_bytes) <= 0:
            raise ValueError("max_bytes, max_age_s and max_read_bytes must be above 0")
        if not 0 <= self.held_out_fraction < 1:
            raise ValueError(f"held_out_fraction is {self.held_out_fraction}: it must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The weight of a record in `replay`: 2^(-age / half_life) * (1 + surprise * r), r = (wrong + 1) / (drafted + 2).

    r is the share of verified draft tokens the target refused, smoothed: a record without any gets 1/2. Surprise
    is a weight rather than a filter, because training only on refused positions adapts more slowly.
    """

    half_life_s: float = 3600
    """A record is drawn half as often once it is this many seconds older."""
    surprise: float = 4
    """Preference for records the draft got wrong: one whose draft tokens were all rejected is drawn up to
    (1 + this) times as often as one whose draft tokens were all accepted."""
    anchor_share: float = 0.25
    """Share of `anchors` records among the replayed ones, against forgetting."""


@dataclass(frozen=True, kw_only=True)
class Stored:
    seq: int
    record: Record


@dataclass(frozen=True, kw_only=True)
class BufferStatus:
    num_bytes: int
    num_files: int
    num_training: dict[str, int]
    """Records to train on, by domain."""
    num_held_out: dict[str, int]
    """Records to judge by, by domain."""
    num_foreign: int
    """Records kept aside: they are of another target, or were stored for another domain."""
    oldest_s: float | None
    """Arrival of the oldest record, seconds since the epoch."""
    counts: dict[str, int]
    """Records since this process began, by fate: stored, duplicate, foreign, stateless, textless, other_domain,
    forgotten, corrupt_on_disk, expired, evicted, deleted, or the reason of a `CorruptRecordError`: corrupt, oversized,
    ... Plus the number of damaged_files."""


@dataclass(frozen=True, kw_only=True)
class TenantRecords:
    num_records: int
    first_seq: int | None
    """Number of the first record that trains; None if there is none."""
    first_s: float | None
    """The first arrival of a record that trains, in seconds since the epoch."""
    num_examples: int
    """Examples in the quarantine, whoever sent them."""
    num_later_files: int
    """Files of a later release, which may hold anybody's records."""


class Buffer:
    """The only writer and reader of a folder. Methods may be called from several threads."""

    def __init__(
        self,
        config: BufferConfig,
        target_fingerprint: str,
        hidden_shape: tuple[int, int] | None = None,
        domain: str = "",
    ) -> None:
        """Open the buffer.

        Args:
            config: The folder and the limits.
            target_fingerprint: Records of this target are usable; the others are foreign.
            hidden_shape: Shape of the hidden states the draft reads. The target's records without them are not
                stored.
            domain: If given, records of other domains are not stored.

        Raises:
            AlreadyOwnedError: if another process has the folder open.
            BufferFullError: if the disk is full.
        """
        self.config = config
        self.target_fingerprint, self.hidden_shape, self.domain = target_fingerprint, hidden_shape, domain
        self.counts: Counter[str] = Counter()
        self.damage: list[str] = []
        """A sentence for every damage found. Whoever reports it may empty the list."""
        self.now_s = 0.0
        """The caller's time at the last `expire`. Arrivals and ages are by that clock, not by the machine's."""
        # Without a folder, nothing of anybody's text may reach a disk: bad records are then only counted.
        self.quarantine = (
            Quarantine(config.folder / "quarantine", config.max_age_s, lambda: self.now_s) if config.folder else None
        )
        self.known_domains: frozenset[str] = frozenset({domain} - {""})
        """Domains that an operator named. Clients can send any name: see `name_domains`."""
        self.names: Mapping[str, str] = {}
        """The name under which each domain is judged and shown, as of the last `refresh_names`."""
        self.upgraded = ""
        """A sentence for people if the files were of an earlier release; else empty."""
        self._later_files: list[Path] = []
        """Files of a later release: they wait for it, until they are `max_age_s` old."""
        self._rehashed = np.empty(0, REHASHED_DTYPE)
        """By ascending number, the hashes of records that another key had hashed."""
        # Re-entrant, because public methods call one another: `append` expires, `delete_tenant` clears the quarantine.
        self._lock = threading.RLock()
        with ExitStack() as opened:
            if config.folder is not None:
                config.folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it holds users' text
                opened.callback(os.close, acquire(config.folder / "lock", "a learner's buffer"))
            with named_disk_full():
                # The order matters: the next number needs commits and files, the key the number, older files the key.
                self._cursor = Cursor(config.folder)
                self.damage += self._cursor.damage
                self._files = self._open_files()
                self._next_seq = self._find_next_seq()
                self._key = self._open_key()
                self._upgrade()
            self._opened = opened.pop_all()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            for file in self._files:
                file.close()
            self._opened.close()

    def append(self, frames: Frames, now_s: float) -> Counter[str]:
        """Store `frames`, as `read_frames` yields them; returns the number by fate.

        The fates are stored, duplicate, foreign (stored aside), stateless (without the hidden states the draft reads),
        textless (a later segment whose text before it was lost), other_domain, forgotten (of a deleted tenant),
        unknown_penalty (held out, but a penalty of its request cannot be applied, so it cannot judge), and the reason
        of each error. On return the records are on the disk and the sender may forget them. A bad frame is not stored:
        nobody knows whose text it holds, so it could never be deleted by tenant. An example of it goes to the
        quarantine.

        Raises:
            BufferFullError: if the disk is full. Nothing was stored then.
        """
        # Joining comes first: the key hashes the whole prompt, and a later segment arrives without it.
        frames = list(self._join_texts(frames))
        ids = [record.record_id for _, record in frames if isinstance(record, Record)]
        with self._lock:
            self.expire(now_s)
            # The order of the checks decides which fate is counted: the first reason not to store a record wins.
            known, forgotten = self._find_known(ids), self._cursor.forgotten
            counts = Counter[str]()
            rows: list[tuple[Row, bytes]] = []
            for frame, record in frames:
                if isinstance(record, CorruptRecordError):
                    counts[record.reason] += 1
                    if self.quarantine is not None:
                        self.quarantine.keep(frame, record)
                elif record.record_id in known:
                    counts["duplicate"] += 1
                elif record.tenant and record.time_s <= forgotten.get(_sha256(record.tenant), -math.inf):
                    counts["forgotten"] += 1
                elif self.domain not in ("", record.domain):
                    counts["other_domain"] += 1
                elif record.context_begin:
                    counts["textless"] += 1
                elif self._is_stateless(record):
                    counts["stateless"] += 1
                elif (row := self._row(record, now_s)).held_out and is_undecided(record):
                    counts["unknown_penalty"] += 1
                else:
                    known.add(record.record_id)  # one batch may hold a record twice
                    rows.append((row, frame))
                    is_foreign = record.target_fingerprint != self.target_fingerprint
                    counts["foreign" if is_foreign else "stored"] += 1
            if rows:
                with named_disk_full():
                    self._insert(rows, now_s)
            self.counts += counts
            return counts

    def expire(self, now_s: float) -> None:
        """Delete files past the maximal age. `append` does this too; call it in case no records arrive."""
        with self._lock:
            self.now_s = now_s
            for file in list(self._files):
                # A file goes as a whole when the oldest record is too old; it covers at most 1 / NUM_FILES of the age.
                # `now_s` gives a damaged file the age 0: `_unless_damaged` has removed it already.
                oldest_s = self._unless_damaged(file, file.oldest_s, now_s)
                if now_s - oldest_s >= self.config.max_age_s:
                    self._drop(file, "expired")
            if self.quarantine is not None:
                self.quarantine.expire(now_s)
            for path in list(self._later_files):
                with suppress(OSError):
                    if now_s - path.stat().st_mtime >= self.config.max_age_s:
                        self._remove_later_file(path)

    def fresh(self, after: int, limit: int) -> list[Stored]:
        """The oldest `limit` training records after sequence number `after`, in order of arrival.

        Fewer if there are no more, if together they would have more than `max_read_bytes`, or if some turned out to be
        corrupt and were thrown away.
        """
        with self._lock:
            seqs = self._training()["seq"]
            return self._read(seqs[seqs > after][:limit])

    def bound_lag(self, after: int, max_records: int) -> tuple[int, int]:
        """(new `after` with at most `max_records` fresh records left, number of skipped records).

        A learner slower than traffic would train ever older records. Skipped ones can still be replayed.
        """
        with self._lock:
            seqs = self._training()["seq"]
        # Numbers are not consecutive here: held-out and foreign records have some of them.
        seqs = seqs[seqs > after]
        # E.g. 3, 5, 8 and 9 wait, and 2 may: 3 and 5 are skipped, so the new `after` is 5.
        num_skipped = len(seqs) - max_records
        return (int(seqs[num_skipped - 1]), num_skipped) if num_skipped > 0 else (after, 0)

    def replay(
        self, count: int, anchors: Sequence[Record], *, through: int, now_s: float, seed: int, policy: Replay
    ) -> list[Record]:
        """`count` records to train again: a share of `anchors`, then distinct records up to `through`, by weight.

        No tenant has more than `tenant_share` of the latter while others have records left. Fewer if the buffer holds
        fewer, or if together they would have more than `max_read_bytes`. The same contents and seed give the same
        records.
        """
        rng = np.random.default_rng(seed)
        # Without anchors in the file, all of the draw is from traffic.
        num_anchors = min(len(anchors), round(count * policy.anchor_share))
        chosen = [anchors[i] for i in rng.choice(len(anchors), num_anchors, replace=False)] if num_anchors else []
        with self._lock:
            index = self._training()
            index = index[index["seq"] <= through]
            order = draw(log_weights(index, now_s, policy), rng)
            count -= num_anchors
            # `at_least` is `count`: the share of a tenant yields before a step gets fewer records.
            order = order[take_fairly(index["tenant"][order].tolist(), count, self.config.tenant_share, count)]
            return chosen + [stored.record for stored in self._read(index["seq"][order])]

    def select_held_out(self, per_domain: int, **limits: Any) -> list[int]:
        """Sequence numbers of the newest held-out requests of every domain, even one without traffic.

        Every prompt counts once, and no tenant has more than `tenant_share` of them. `limits` are other fields of
        EvidenceLimits.
        """
        with self._lock:
            index = self._usable()
        wanted = EvidenceLimits(per_domain=per_domain, tenant_share=self.config.tenant_share, **limits)
        return choose_evidence(index[index["held_out"]], name_domains(index, self.known_domains), wanted)

    def refresh_names(self) -> Mapping[str, str]:
        """Update `names` from the records, and return them."""
        with self._lock:
            index = self._usable()
        self.names = name_domains(index, self.known_domains)
        return self.names

    def read(self, seqs: Iterable[int]) -> Iterator[Stored]:
        """The records with these sequence numbers, in this order, one at a time: together they may not fit in memory.

        Those that are gone meanwhile are left out. So are corrupt ones, which are counted and deleted.
        """
        for seq in seqs:
            with self._lock:
                stored = self._read_one(seq)
            if stored is not None:
                yield stored

    def find_tenant(self, tenant: str) -> TenantRecords:
        """The records of a tenant, and what a deletion would take with them."""
        with self._lock:
            names, found = list_stored_names(tenant), list[tuple[int, float, bool]]()
            for file in list(self._files):
                found += self._unless_damaged(file, partial(file.find_tenant, names), [])
            trained = [(seq, time_s) for seq, time_s, held_out in found if not held_out]
            return TenantRecords(
                num_records=len(found),
                first_seq=trained[0][0] if trained else None,
                first_s=min((time_s for _, time_s in trained), default=None),
                num_examples=0 if self.quarantine is None else len(self.quarantine),
                num_later_files=len(self._later_files),
            )

    def delete_tenant(self, tenant: str, now_s: float) -> int:
        """Delete all records of a tenant, foreign ones too, and overwrite them on the disk; returns the number.

        So are the quarantine and files of a later release: some of it may be the tenant's. Records of the tenant made
        until now will not be stored if they arrive later.
        """
        names = list_stored_names(tenant)
        with self._lock, named_disk_full():
            # First the list, then the records: after a kill in between, `delete_tenant` can be repeated, and meanwhile
            # nothing new of the tenant is stored.
            self._cursor.forget([_sha256(name) for name in names], now_s + CLOCK_SLACK_S)

            def delete(file: BufferFile) -> int:
                return file.delete([seq for seq, _, _ in file.find_tenant(names)])

            deleted = sum(self._unless_damaged(file, partial(delete, file), 0) for file in list(self._files))
            self.clear_quarantine()
            for path in list(self._later_files):
                self._remove_later_file(path)
            self.counts["deleted"] += deleted
            return deleted

    def clear_quarantine(self) -> None:
        """Overwrite and delete the examples of bad records: nobody can tell whose text they hold."""
        with self._lock:
            if self.quarantine is not None:
                self.quarantine.clear()

    def commit_trained(self, checkpoint_id: str, through: int) -> None:
        """Make a complete checkpoint count: every record up to `through` was trained or skipped before it.

        Raises:
            BufferFullError: if the disk is full. The checkpoint does not count then.
        """
        with self._lock, named_disk_full():
            self._cursor.commit(Commit(checkpoint_id=checkpoint_id, through=through))

    def commits(self) -> list[Commit]:
        """The commits, newest first. Resume the first whose checkpoint is intact, and train the records after it."""
        return list(self._cursor.commits)

    def newest(self) -> int:
        """The highest sequence number given so far; 0 if there is none."""
        with self._lock:
            return self._next_seq - 1

    def last_arrival_s(self) -> float | None:
        """Arrival of the record with the highest number, seconds since the epoch; None if there is no record.

        Not the latest time of all: a clock that was ahead for a while may have given it to an earlier record.
        """
        with self._lock:
            index = self._index()
            return float(index["time_s"][-1]) if len(index) else None

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
        if self.hidden_shape is None or record.target_fingerprint != self.target_fingerprint:
            return False
        if not record.hidden or record.hidden_shape != self.hidden_shape:
            return True
        # A row is predicted from the state of the token before it: without that state nothing can be learned.
        # E.g. the row of position 10 reads token 9 on the text, and token 7 after 2 rejected tokens.
        read_R = record.positions - record.branches - 1 - record.hidden_begin
        return not ((read_R >= 0) & (read_R < record.num_hidden)).any()

    def _join_texts(self, frames: Frames) -> Iterator[tuple[bytes, Record | CorruptRecordError]]:
        """The frames, with a self-contained record in place of each that continues one of these, or a stored one."""
        texts: dict[str, bytes] = {}
        for frame, record in frames:
            if isinstance(record, Record) and record.context_begin:
                # A segment has one successor, so `pop` frees the text as soon as it is used.
                text = texts.pop(record.previous_id, None) or self._find_text(record.previous_id)
                if text is not None:
                    try:
                        record = join_text(record, text)
                        # Stored self-contained too: the segment before may expire first.
                        frame = encode_record(record)
                    except CorruptRecordError as error:
                        record = error
            if isinstance(record, Record) and not record.context_begin:
                texts[record.record_id] = record.context + record.output
            yield frame, record

    def _find_text(self, record_id: str) -> bytes | None:
        """The text of a stored record, int32; None if there is no such record."""
        with self._lock:
            for file in list(self._files):
                seq = self._unless_damaged(file, partial(file.find_seq, record_id), None)
                stored = None if seq is None else self._read_one(seq)
                if stored is not None:
                    return stored.record.context + stored.record.output
        return None

    def _find_known(self, record_ids: list[str]) -> set[str]:
        """The subset of stored ids."""
        known: set[str] = set()
        for file in list(self._files):  # a copy: a damaged file is removed from the list
            known |= self._unless_damaged(file, partial(file.find_known, record_ids), set())
        return known

    def _row(self, record: Record, now_s: float) -> Row:
        # Rows after a rejection continue a text the target refused: they say nothing about the draft's quality.
        verified_R = (record.draft_ids >= 0) & (record.branches == 0)
        hashes = self._key.hash(record)
        return Row(
            record_id=record.record_id,
            time_s=now_s,
            domain=record.domain,
            tenant=record.tenant,
            target_fingerprint=record.target_fingerprint,
            draft_version=record.draft_version,
            num_drafted=int(verified_R.sum()),
            num_wrong=int((verified_R & ~record.accepted).sum()),
            held_out=hashes.is_held_out(self.config.held_out_fraction),
            prompt=hashes.prompt,
            request=hashes.request,
        )

    def _insert(self, rows: list[tuple[Row, bytes]], now_s: float) -> None:
        # Room first: `_make_room` may drop the newest file as well, and then `_newest_file` begins another.
        self._make_room(estimate_bytes(frame for _, frame in rows))
        file = self._newest_file(now_s)
        numbered = [(self._next_seq + i, row, frame) for i, (row, frame) in enumerate(rows)]
        if self._unless_damaged(file, partial(file.insert, numbered), False):
            self._next_seq += len(rows)
        else:  # the damaged file is gone, so this ends with a new one
            self._insert(rows, now_s)

    def _newest_file(self, now_s: float) -> BufferFile:
        """The file to write to: the last one, until it holds one share of the bytes or covers one share of the age."""
        if self._files and self._files[-1].layout == LAYOUT:
            newest = self._files[-1]
            is_old = now_s - newest.oldest_s() >= self.config.max_age_s / NUM_FILES
            if not is_old and newest.num_bytes() < self.config.max_bytes / NUM_FILES:
                return newest
        folder = self.config.folder
        # Named after the first number in it, so that sorting the names sorts the records.
        self._files.append(BufferFile(folder and folder / f"records-{self._next_seq:016d}.db"))
        return self._files[-1]

    def _make_room(self, num_bytes: int) -> None:
        while self._files and sum(file.num_bytes() for file in self._files) + num_bytes > self.config.max_bytes:
            self._drop(self._files[0], "evicted")

    def _open_files(self) -> list[BufferFile]:
        """The folder's files, oldest first. A damaged one is deleted whole: the rest of it cannot be trusted."""
        paths = sorted(self.config.folder.glob("records-*.db")) if self.config.folder else []
        files = []
        for path in paths:
            try:
                # SQLite takes a file without a whole page for a new one. A kill can leave only the newest empty.
                if path.stat().st_size < MIN_FILE_BYTES and (path.stat().st_size or path is not paths[-1]):
                    raise DamagedFileError(f"{path.stat().st_size} bytes")
                files.append(BufferFile(path))
            except LaterFileError as error:  # it waits for that release
                self.counts["later_layout_files"] += 1
                self._later_files.append(path)
                self.damage.append(f"{error}, so the file waits for a later one")
            except sqlite3.DatabaseError as error:
                if not is_damaged(error):
                    raise
                self._tell_damaged(path, error)
                unlink(path)
        return files

    def _remove_later_file(self, path: Path) -> None:
        overwrite(path)
        unlink(path)
        self._later_files.remove(path)

    def _find_next_seq(self) -> int:
        seqs = self._index()["seq"]
        # Commits count too: the records with the highest numbers may have expired, and no number is used twice.
        later = [int(path.stem.removeprefix("records-")) + MAX_LATER_RECORDS for path in self._later_files]
        return 1 + max([int(seqs.max(initial=0)), *(trained.through for trained in self.commits()), *later])

    def _open_key(self) -> PromptKey:
        """The folder's key. Records that a lost one has hashed get hashes by the new one, and stay on the same side."""
        if self.config.folder is None:
            return PromptKey.make()
        files = [file for file in self._files if not file.is_older]
        # A key has hashed the records of later releases too, although this release cannot read them.
        has_hashes = bool(self._later_files) or any(len(file.index()) for file in files)
        opened = open_key(self.config.folder, newest=self._next_seq - 1, has_hashes=has_hashes)
        self.damage += opened.damage
        rows = [
            (seq, *hashes)
            for file in files
            for seq, hashes in self._hash_held_out(file, opened.key, opened.rehash_through).items()
        ]
        self._rehashed = np.array(rows, REHASHED_DTYPE)
        return opened.key

    def _hash_held_out(self, file: BufferFile, key: PromptKey, through: int) -> dict[int, Hashes]:
        """The hashes of the file's held-out records up to `through`, by ascending number."""
        index = self._unless_damaged(file, file.index, np.empty(0, INDEX_DTYPE))
        seqs = index["seq"][index["held_out"] & (index["seq"] <= through)].tolist()
        return {stored.seq: key.hash(stored.record) for stored in self.read(seqs)}

    def _upgrade(self) -> None:
        """Hash the prompts of held-out records from an earlier release, which knew no key.

        Every record stays on its side: nothing held out is trained, and nothing trained judges.
        """
        older = [file for file in self._files if file.is_older]
        for file in older:
            file.set_hashes(self._hash_held_out(file, self._key, self.newest()))
        if older:
            self.upgraded = (
                f"{sum(len(file.index()) for file in older if file in self._files)} records of an earlier release keep "
                f"their side; a key decides which new prompts are held out. Keep it: {self.config.folder}/held-out.key"
            )

    def _drop(self, file: BufferFile, reason: str) -> None:
        self.counts[reason] += len(file.index())
        self._remove(file)

    def _remove(self, file: BufferFile) -> None:
        self._files.remove(file)
        file.remove()

    def _tell_damaged(self, path: Path | None, error: sqlite3.Error) -> None:
        self.counts["damaged_files"] += 1
        self.damage.append(f"{path} is damaged ({error}): its records are gone")

    def _index(self) -> Index:
        """INDEX_DTYPE [records], over all files, by ascending sequence number."""
        empty = np.empty(0, INDEX_DTYPE)
        index = np.concatenate([empty, *(self._unless_damaged(file, file.index, empty) for file in list(self._files))])
        # `concatenate` has copied, so the assignments below leave the cached index of each file as it is.
        if len(self._rehashed):
            has_new = np.isin(index["seq"], self._rehashed["seq"])
            new = self._rehashed[np.searchsorted(self._rehashed["seq"], index["seq"][has_new])]
            index["prompt"][has_new], index["request"][has_new] = new["prompt"], new["request"]
        return index

    def _usable(self) -> Index:
        index = self._index()
        is_usable = index["target_fingerprint"] == self.target_fingerprint
        if self.domain:  # the files may be from a time when the learner had another domain
            is_usable &= index["domain"] == self.domain
        usable: Index = index[is_usable]
        return usable

    def _training(self) -> Index:
        usable = self._usable()
        training: Index = usable[~usable["held_out"]]
        return training

    def _read(self, seqs: NDArray[np.int64]) -> list[Stored]:
        """The first records of `seqs` within `max_read_bytes`, or the first one; by ascending number."""
        found: list[Stored] = []
        num_bytes = 0
        for stored in self.read(seqs.tolist()):
            num_bytes += stored.record.num_bytes
            # Cut in the order given, which for a replay is the order of the draw. Sorted only afterwards.
            if found and num_bytes > self.config.max_read_bytes:
                break
            found.append(stored)
        return sorted(found, key=lambda stored: stored.seq)

    def _read_one(self, seq: int) -> Stored | None:
        for file in list(self._files):  # a copy: a damaged file is removed from the list
            # `holds` looks into the cached index: no query to the files without this record.
            if not self._unless_damaged(file, partial(file.holds, seq), False):
                continue
            frame = self._unless_damaged(file, partial(file.read_frame, seq), None)
            if frame is None:
                return None
            try:
                return Stored(seq=seq, record=self._strip(decode_record(frame)))
            except CorruptRecordError:
                self.counts["corrupt_on_disk"] += 1
                with suppress(BufferFullError), named_disk_full():  # a full disk must not stop reading
                    self._unless_damaged(file, partial(file.delete, [seq]), 0)
                return None
        return None

    def _strip(self, record: Record) -> Record:
        """The record without the hidden states, if the draft reads none: they would be nearly all of its size."""
        is_needed = self.hidden_shape is not None or not record.hidden
        return record if is_needed else msgspec.structs.replace(record, hidden_begin=0, hidden_shape=(0, 0), hidden=b"")

    def _unless_damaged(self, file: BufferFile, operation: Callable[[], T], otherwise: T) -> T:
        """The result of `operation` on `file`. If the file proves damaged, it is dropped and `otherwise` returned."""
        try:
            return operation()
        except sqlite3.DatabaseError as error:
            if not is_damaged(error):
                raise
            self._tell_damaged(file.path, error)
            self._remove(file)
            return otherwise


def _sha256(tenant: str) -> str:
    """A hash, because the list of forgotten tenants should not name them either."""
    return hashlib.sha256(tenant.encode()).hexdigest()


def log_weights(index: Index, now_s: float, policy: Replay) -> NDArray[np.float64]:
    """Logarithm of the weight described by `Replay`, for every record of the index; [records]."""
    # In logarithms, because weights underflow: with a half-life of 5 minutes, 4 days give 2^-1152, and float64 ends
    # at 2^-1074.
    refused = (index["num_wrong"] + 1) / (index["num_drafted"] + 2)
    half_lives = (now_s - index["time_s"]) / policy.half_life_s
    log_weight: NDArray[np.float64] = np.log1p(policy.surprise * refused) - np.log(2) * half_lives
    return log_weight


def draw(log_weight: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """All positions in the order of a draw by weight, without replacement.

    This is Gumbel top-k (arXiv 1903.06059): sorting by log-weight plus Gumbel noise gives the same distribution.
    """
    return np.argsort(-(log_weight + rng.gumbel(size=len(log_weight))))
