"""The learner's memory of traffic.

The buffer keeps records in rolling SQLite files, limited in bytes and age, and samples them for
training.

    append(read_frames(...)) ─► newest file ─ full or old ─► older files ─ over budget or age ─► unlinked
                                     └────────────┬─────────────┘
                    fresh(after)   replay(through)   read(select_held_out())   commit_trained(checkpoint, through)

A keyed hash of the first prompt of its conversation decides whether a record is trained on or held
out (`prompt_key`, `conversations`). No tenant exceeds its share of the records for replay or
evaluation (`evidence`).

Every record gets a sequence number, which is never reused. The learner trains on records in this
order, and commits the number it has reached together with a checkpoint's name. After a crash, it
resumes the checkpoint of the newest commit and continues after that number. A checkpoint without a
commit does not count, so no record is trained on twice by accident.

A record is usable if it belongs to the learner's target, by fingerprint, and not to an abandoned
version. All other records are stored in the same files but never returned. After an upgrade of the
target, the old records are foreign, and stay until they expire.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from redraft.files.lock import own
from redraft.files.private import make_private
from redraft.online.learning.buffer_file import (
    TARGETS,
    BufferFullError,
    Index,
    Row,
    named_disk_full,
)
from redraft.online.learning.config import BufferConfig, Replay
from redraft.online.learning.conversations import Conversations
from redraft.online.learning.cursor import Commit, Cursor
from redraft.online.learning.evidence import (
    EvidenceLimits,
    choose_evidence,
    choose_replayed,
    name_domains,
)
from redraft.online.learning.penalties import is_undecided
from redraft.online.learning.prompt_key import NO_HEADERS, Headers, is_held_out
from redraft.online.learning.quarantine import Quarantine
from redraft.online.learning.rolling_files import RollingFiles
from redraft.online.learning.segments import Frames, Segments, Text
from redraft.online.records.origin import stored_name
from redraft.online.records.record import CorruptRecordError, Record

# Number of newest records; the most frequent target among them is assumed to be the served one.
RECENT = 32

CLOCK_SLACK_S = 3600.0
"""Records of a deleted tenant are not stored if they were made up to this many seconds after the
deletion, because a server's clock may be ahead, and answers may have been in progress.
"""


@dataclass(frozen=True, kw_only=True)
class Stored:
    seq: int
    record: Record
    conversation: int = 0
    """Hash of the conversation's first prompt; 0 if it is unknown."""

    @property
    def conversation_key(self) -> tuple[str, int] | None:
        """(tenant, conversation), because conversations of different tenants are never joined."""
        return (self.record.tenant, self.conversation) if self.conversation else None


@dataclass(frozen=True, kw_only=True)
class BufferStatus:
    num_bytes: int
    num_files: int
    num_training: dict[str, int]
    """Number of training records, by domain."""
    num_held_out: dict[str, int]
    """Number of held-out records, by domain."""
    num_foreign: int
    """Number of unused records: from a different target, from weights that are no longer valid, or
    from a different domain.
    """
    oldest_s: float | None
    """Arrival time of the oldest record, in seconds since the epoch."""
    counts: dict[str, int]
    """Records since this process started, by outcome: stored, duplicate, foreign, other_adapter,
    stateless, textless, forgotten, past_target, corrupt_on_disk, expired, evicted, deleted, or the
    reason of a `CorruptRecordError` (corrupt, oversized, ...). Also contains the numbers of
    damaged_files and of stored records with short_states.
    """


@dataclass(frozen=True, kw_only=True)
class TenantRecords:
    num_records: int
    first_seq: int | None
    """Number of the first training record; None if there is none."""
    num_examples: int
    """Number of examples in the quarantine, of all tenants."""


class Buffer(AbstractContextManager["Buffer"]):
    """The only writer and reader of a buffer folder. Methods may be called from several threads."""

    def __init__(
        self,
        config: BufferConfig,
        target_fingerprint: str,
        hidden_shape: tuple[int, int] | None = None,
        known_domains: frozenset[str] = frozenset(),
        needed_states: int = 0,
        headers: Headers = NO_HEADERS,
    ) -> None:
        """Open the buffer.

        Args:
            config: The folder and the limits.
            target_fingerprint: Records of this target, by `Record.base`, are usable; all others
                are foreign.
            hidden_shape: Shape of the hidden states that the draft reads. The target's records
                without them are not stored.
            known_domains: Domains that an operator configured. Clients can send any name
                (`name_domains`).
            needed_states: Number of states before a row that the draft's windows read
                (`Family.needed_states`). Records with rows that have fewer are counted.
            headers: The tokens that end the target's prompts. They identify the later turns of a
                conversation (`PromptKey.hash_earlier`).

        Raises:
            AlreadyOwnedError: another process has the folder open.
            BufferFullError: the disk is full.
        """
        self.config = config
        self.target_fingerprint, self.hidden_shape = target_fingerprint, hidden_shape
        self.known_domains, self.needed_states = known_domains, needed_states
        self.headers = headers
        self.counts: Counter[str] = Counter()
        # One message each; the code that reports them may clear the list.
        self.damage: list[str] = []
        self.now_s = 0.0  # the caller's time at the last `expire`; arrivals and ages refer to it
        # Without a folder, no client's text may reach a disk, so bad records are only counted.
        self.quarantine = (
            Quarantine(config.folder / "quarantine", config.max_age_s, lambda: self.now_s)
            if config.folder
            else None
        )
        self._dropped = ""  # the tenant of `dropping`
        # The name of each domain in evaluations and on the page (`refresh_names`).
        self.names: Mapping[str, str] = {}
        self._segments = Segments(self._find_text)
        # The arguments of the last `_select`, and its result.
        self._selected: tuple[Index, frozenset[str], Index, Index] | None = None
        # Re-entrant, because public methods call one another: `append` expires, `delete_tenant`
        # clears the quarantine.
        self._lock = threading.RLock()
        with ExitStack() as opened:
            if config.folder is not None:
                make_private(config.folder)  # it contains users' text
                opened.enter_context(own(config.folder / "lock", "a learner's buffer"))
            with named_disk_full():
                # The order matters: the next number depends on commits and files, and the key
                # depends on that number.
                self._cursor = Cursor(config.folder)
                self.damage += self._cursor.damage
                self._files = RollingFiles(
                    config.folder,
                    config.max_bytes,
                    config.max_age_s,
                    config.tenant_share,
                    self.counts,
                    self.damage,
                )
                # Include the commits, because the records with the highest numbers may have
                # expired, and no number may be used twice.
                through = max((trained.through for trained in self.commits()), default=0)
                self._next_seq = 1 + max(self._files.last_number(), through)
                self._key = self._files.open_key(self._next_seq - 1)
                self._conversations = Conversations(self._files.index())
            self._opened = opened.pop_all()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._files.close()
            self._opened.close()

    def append(self, frames: Frames, now_s: float) -> Counter[str]:
        """Store `frames`, as `read_frames` yields them; return the number of frames by outcome.

        The outcomes are stored, duplicate, foreign (stored separately), other_adapter (from our
        target, but made with an adapter other than the draft's, or without it), stateless (without
        the hidden states that the draft reads), textless (a later segment whose preceding text was
        lost), forgotten (from a deleted tenant), unknown_penalty (held out but unusable for
        evaluation, because a penalty of its request cannot be applied), and the reason for each
        error. On return, the records are on disk, and the sender may delete them. A bad frame is
        not stored, because it is unknown whose text it contains, so it could never be deleted by
        tenant. Examples of bad frames go to the quarantine.

        Raises:
            BufferFullError: the disk is full. Nothing was stored in this case.
        """
        frames = list(frames)
        ids = [record.record_id for _, record in frames if isinstance(record, Record)]
        with self._lock:
            self.expire(now_s)
            known = self.find_known(ids)
            forgotten = self._cursor.forgotten
            # The prompts of records that were deleted, or could not be stored, are forgotten.
            if self._conversations.num_records != self._files.num_records():
                self._conversations = Conversations(self._files.index())
            counts = Counter[str]()
            rows: list[tuple[int, Row, bytes]] = []
            # Segments are joined first, because the key hashes the whole prompt, which later
            # segments omit. Then the first reason not to store a record is counted.
            for frame, record in self._segments.join(frames, known):
                if isinstance(record, CorruptRecordError):
                    counts[record.reason] += 1
                    if self.quarantine is not None:
                        self.quarantine.keep(frame, record)
                elif record.record_id in known:
                    counts["duplicate"] += 1
                elif record.tenant and (
                    record.tenant == self._dropped
                    or record.time_s <= forgotten.get(_sha256(record.tenant), -math.inf)
                ):
                    counts["forgotten"] += 1
                elif self._is_of_other_adapter(record):
                    counts["other_adapter"] += 1
                elif record.context_begin:
                    counts["textless"] += 1
                elif self._is_stateless(record):
                    counts["stateless"] += 1
                elif (row := self._row(record, now_s)).held_out and is_undecided(record):
                    counts["unknown_penalty"] += 1
                else:
                    known.add(record.record_id)  # one batch may contain a record twice
                    self._conversations.add(row.prompt, row.conversation, row.tenant)
                    rows.append((self._next_seq + len(rows), row, frame))
                    is_foreign = record.base != self.target_fingerprint
                    counts["foreign" if is_foreign else "stored"] += 1
                    self.counts["short_states"] += not is_foreign and self._is_short(record)
            if rows:
                try:
                    with named_disk_full():
                        self._files.insert(rows, now_s)
                except BufferFullError:
                    self._segments.reset()  # records that are sent again are joined again
                    raise
                self._next_seq += len(rows)
                past = self._cursor.past
                if (
                    past.intersection(row.target for _, row, _ in rows)
                    and self.served_target() in past
                ):
                    self._leave_behind(frozenset())
            self.counts += counts
            return counts

    def find_known(self, record_ids: list[str]) -> set[str]:
        """Return the ids that belong to stored records."""
        with self._lock:
            return set[str]().union(*self._files.each(lambda file: file.find_known(record_ids)))

    def expire(self, now_s: float) -> None:
        """Delete files past the maximum age.

        `append` does this too; call this method for times when no records arrive.
        """
        with self._lock:
            self.now_s = now_s
            self._files.expire(now_s)
            if self.quarantine is not None:
                self.quarantine.expire(now_s)

    def fresh(self, after: int, limit: int) -> list[Stored]:
        """Return the oldest `limit` training records after number `after`, in order of arrival.

        Fewer are returned if no more exist, if together they would exceed `max_read_bytes`, or if
        some were corrupt and therefore deleted.
        """
        with self._lock:
            seqs = self._training()["seq"]
            return self._read(seqs[seqs > after][:limit])

    def bound_lag(self, after: int, max_records: int) -> tuple[int, int]:
        """Return an `after` with at most `max_records` fresh records left, and the number skipped.

        Without this limit, a learner that is slower than the traffic would train on ever older
        records. Skipped records may be replayed.
        """
        with self._lock:
            seqs = self._training()["seq"]
        # Numbers of training records are not consecutive, because held-out and foreign records use
        # numbers too.
        seqs = seqs[seqs > after]
        # E.g. if 3, 5, 8 and 9 wait and at most 2 may, 3 and 5 are skipped, so the new `after` is
        # 5.
        num_skipped = len(seqs) - max_records
        return (int(seqs[num_skipped - 1]), num_skipped) if num_skipped > 0 else (after, 0)

    def replay(
        self,
        count: int,
        *,
        through: int,
        now_s: float,
        seed: int,
        policy: Replay,
    ) -> list[Record]:
        """Choose `count` records to train on again.

        They are distinct records up to sequence number `through`, drawn by weight. No tenant has
        more than `tenant_share` of them while others have records left. Fewer records are returned
        if the buffer contains fewer, or if together they would exceed `max_read_bytes`. The same
        contents and seed give the same records.
        """
        rng = np.random.default_rng(seed)
        with self._lock:
            index = self._training()
            index = index[index["seq"] <= through]
            seqs = choose_replayed(
                index,
                count,
                policy,
                now_s=now_s,
                rng=rng,
                tenant_share=self.config.tenant_share,
            )
            return [stored.record for stored in self._read(seqs)]

    def select_held_out(self, per_domain: int, **limits: Any) -> list[int]:
        """Return the sequence numbers of the newest held-out requests in every domain.

        A domain without recent traffic is included too. Each conversation counts once, and no
        tenant has more than `tenant_share` of them. `limits` are other fields of EvidenceLimits.
        """
        with self._lock:
            index = self._usable()
        # After a change of `held_out_fraction`, a prompt or a conversation may be both trained on
        # and held out, and then counts as trained on.
        trained = index[~index["held_out"]]
        is_trained = [np.isin(index[name], trained[name]) for name in ("prompt", "conversation")]
        held_out = index[~np.any(is_trained, axis=0)]
        wanted = EvidenceLimits(
            per_domain=per_domain, tenant_share=self.config.tenant_share, **limits
        )
        return choose_evidence(held_out, name_domains(index, self.known_domains), wanted)

    def refresh_names(self) -> Mapping[str, str]:
        """Update the domain names in `names` from the records, and return them."""
        with self._lock:
            index = self._usable()
        self.names = name_domains(index, self.known_domains)
        return self.names

    def served_target(self) -> str:
        """Return the target weights that verify drafts now, in the form of `Record.target`."""
        with self._lock:
            numbers, names = self._files.index()["target"][-RECENT:].tolist(), list(TARGETS)
        # Take the majority of many records, so that a late record or an outdated server has no
        # influence.
        counts = Counter(names[number] for number in numbers if self._is_ours(names[number]))
        return max(counts, key=counts.__getitem__, default=self.target_fingerprint)

    def leave_behind(self, targets: Collection[str]) -> None:
        """Exclude the records of these target weights until the weights are served again."""
        with self._lock:
            stored, names = self._files.index()["target"], list(TARGETS)
            counts = {
                names[number]: int(count)
                for number, count in enumerate(np.bincount(stored))
                if count
            }
            new = counts.keys() & set(targets) - self._cursor.past
            self._leave_behind(frozenset(counts.keys() & self._cursor.past | new))
            self.counts["past_target"] += sum(counts[target] for target in new)

    def _leave_behind(self, past: frozenset[str]) -> None:
        with (
            suppress(BufferFullError),
            named_disk_full(),
        ):  # saved, so that the comparison has the same result after a restart
            self._cursor.leave_behind(past)

    def read(self, seqs: Iterable[int]) -> Iterator[Stored]:
        """Yield the records with these sequence numbers, in order, one at a time.

        Missing records are skipped. Corrupt records are skipped too, and are counted and deleted.
        """
        seqs = list(seqs)
        with self._lock:
            index = self._files.index()
        # A binary search, because a step of the training reads twice, and the index may be long.
        at = np.searchsorted(index["seq"], seqs)
        found = index[at[at < len(index)]]
        conversations = dict(
            zip(found["seq"].tolist(), found["conversation"].tolist(), strict=True)
        )
        for seq in seqs:
            with self._lock:
                record = self._read_one(seq)
            if record is not None:
                yield Stored(seq=seq, record=record, conversation=conversations.get(seq, 0))

    def find_tenant(self, tenant: str) -> TenantRecords:
        """Return the records of a tenant, and what a deletion would remove along with them."""
        with self._lock:
            name = stored_name(tenant)
            found = list(chain.from_iterable(self._files.each(lambda file: file.find_tenant(name))))
            trained = [seq for seq, _, held_out in found if not held_out]
            return TenantRecords(
                num_records=len(found),
                first_seq=min(trained, default=None),
                num_examples=0 if self.quarantine is None else len(self.quarantine),
            )

    def delete_tenant(self, tenant: str, now_s: float) -> int:
        """Delete all records of a tenant, including foreign ones, and overwrite them on disk.

        Return the number of deleted records. The quarantine is overwritten and deleted too, because
        some of its content may be the tenant's. Records of the tenant made until now will not be
        stored if they arrive later.
        """
        name = stored_name(tenant)
        with self._lock, named_disk_full():
            # The list is written before the records are deleted: after a kill in between,
            # `delete_tenant` can be repeated, and until then, no new record of the tenant is
            # stored.
            self._cursor.forget(_sha256(name), now_s + CLOCK_SLACK_S)
            deleted = sum(self._files.each(lambda file: file.delete_tenant(name)))
            self.clear_quarantine()
            self.counts["deleted"] += deleted
            return deleted

    @contextmanager
    def dropping(self, tenant: str) -> Iterator[None]:
        """Drop this tenant's records that arrive while the block runs, whatever their time is.

        A deletion empties the spool or the log in this block. Its records are older than the deletion,
        but after a jump of the clock, their times may be far later than the learner's.
        """
        self._dropped = stored_name(tenant)
        try:
            yield
        finally:
            self._dropped = ""

    def clear_quarantine(self) -> None:
        """Overwrite and delete the examples of bad records.

        The examples may contain text of any tenant.
        """
        with self._lock:
            if self.quarantine is not None:
                self.quarantine.clear()

    def commit_trained(self, checkpoint_id: str, through: int) -> None:
        """Commit a checkpoint: every record up to `through` was trained on or skipped before it.

        Raises:
            BufferFullError: the disk is full. The checkpoint does not count then.
        """
        with self._lock, named_disk_full():
            self._cursor.commit(Commit(checkpoint_id=checkpoint_id, through=through))

    def commits(self) -> list[Commit]:
        """Return the commits, newest first.

        Resume from the first one whose checkpoint is intact, and train on the records after it.
        """
        return list(self._cursor.commits)

    def newest(self) -> int:
        """The highest sequence number assigned so far; 0 if there is none."""
        with self._lock:
            return self._next_seq - 1

    def last_arrival_s(self) -> float | None:
        """Arrival time of the record with the highest number, in seconds since the epoch, or None.

        An earlier record may have a later arrival time if the clock was ahead then.
        """
        with self._lock:
            index = self._files.index()
            return float(index["time_s"][-1]) if len(index) else None

    def status(self) -> BufferStatus:
        with self._lock:
            index, usable = self._files.index(), self._usable()
            return BufferStatus(
                num_bytes=self._files.num_bytes(),
                num_files=len(self._files),
                num_training=dict(Counter(usable["domain"][~usable["held_out"]].tolist())),
                num_held_out=dict(Counter(usable["domain"][usable["held_out"]].tolist())),
                num_foreign=len(index) - len(usable),
                oldest_s=float(index["time_s"].min()) if len(index) else None,
                counts=dict(self.counts),
            )

    def _is_stateless(self, record: Record) -> bool:
        if self.hidden_shape is None or record.base != self.target_fingerprint:
            return False
        if not record.hidden or record.hidden_shape != self.hidden_shape:
            return True
        # A row is predicted from the state of the token before it. Without that state, nothing can
        # be learned.
        read_R = _find_states(record)
        return not ((read_R >= 0) & (read_R < record.num_hidden)).any()

    def _is_short(self, record: Record) -> bool:
        """Whether the draft's windows read states from before the record's first for some rows."""
        read_R = _find_states(record)
        return record.hidden_begin > 0 and bool(
            ((read_R >= 0) & (read_R < self.needed_states)).any()
        )

    def _is_of_other_adapter(self, record: Record) -> bool:
        """Whether the record is from our target's folder, but not made with our adapter."""
        is_of_folder = record.target_fingerprint == self.target_fingerprint.partition("#")[0]
        return is_of_folder and record.base != self.target_fingerprint

    def _find_text(self, record_id: str) -> Text | None:
        """Return the text of a stored record, or None if the record does not exist."""
        for found in self._files.each(lambda file: file.find_frame(record_id)):
            record = None if found is None else self._read_one(found[0])
            if found is not None and record is not None:
                return Text(record.context + record.output, found[1])
        return None

    def _row(self, record: Record, now_s: float) -> Row:
        # Rows after a rejection continue a text that the target rejected, so they are no measure of
        # the draft's quality.
        verified_R = (record.draft_ids >= 0) & (record.branches == 0) & record.is_own
        hashes = self._key.hash(record)
        earlier = self._key.hash_earlier(record.prompt, self.headers)
        conversation = self._conversations.find(hashes.prompt, earlier, record.tenant)
        return Row(
            record_id=record.record_id,
            time_s=now_s,
            domain=record.domain,
            tenant=record.tenant,
            target=record.target,
            draft_version=record.draft_version,
            num_drafted=int(verified_R.sum()),
            num_wrong=int((verified_R & ~record.accepted).sum()),
            held_out=is_held_out(conversation, self.config.held_out_fraction),
            prompt=hashes.prompt,
            request=hashes.request,
            conversation=conversation,
        )

    def _usable(self) -> Index:
        return self._select()[0]

    def _training(self) -> Index:
        return self._select()[1]

    def _select(self) -> tuple[Index, Index]:
        """Return the index of the usable records, and of those that are trained on.

        Both are kept until they change, because an idle learner asks for them ten times per second.
        """
        index, past = self._files.index(), self._cursor.past
        if (
            self._selected is None
            or self._selected[0] is not index
            or self._selected[1] is not past
        ):
            is_counted = [self._is_ours(target) and target not in past for target in TARGETS]
            usable = index[np.array(is_counted, bool)[index["target"]]]
            self._selected = index, past, usable, usable[~usable["held_out"]]
        return self._selected[2:]

    def _is_ours(self, target: str) -> bool:
        return target.partition("@")[0] == self.target_fingerprint

    def _read(self, seqs: NDArray[np.int64]) -> list[Stored]:
        """Return the first records in `seqs` that fit into `max_read_bytes`, but at least one.

        They are sorted by ascending number.
        """
        found: list[Stored] = []
        num_bytes = 0
        for stored in self.read(seqs.tolist()):
            num_bytes += stored.record.num_bytes
            # The list is cut in the order given, which for a replay is the order of the draw, and
            # sorted only afterwards.
            if found and num_bytes > self.config.max_read_bytes:
                break
            found.append(stored)
        return sorted(found, key=lambda stored: stored.seq)

    def _read_one(self, seq: int) -> Record | None:
        record = self._files.read(seq)
        return None if record is None else self._strip(record)

    def _strip(self, record: Record) -> Record:
        """Return the record, without its hidden states if the draft reads none.

        Hidden states make up nearly all of its size.
        """
        is_needed = self.hidden_shape is not None or not record.hidden
        return (
            record
            if is_needed
            else msgspec.structs.replace(record, hidden_begin=0, hidden_shape=(0, 0), hidden=b"")
        )


def _find_states(record: Record) -> NDArray[np.int64]:
    """For each row, find the state of the token before it, as an index into the record's states."""
    # E.g. the row of position 10 reads token 9 on the text, and token 7 after 2 rejected tokens.
    index_R: NDArray[np.int64] = record.positions - record.branches - 1 - record.hidden_begin
    return index_R


def _sha256(tenant: str) -> str:
    """Hash a tenant's name, so that the list of deleted tenants does not contain their names."""
    return hashlib.sha256(tenant.encode()).hexdigest()
