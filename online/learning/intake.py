"""Moves records from the spool into the buffer.

Removing a file acknowledges it: the records are on the buffer's disk by then.

    servers ─► spool file ─► read_frames ─► mark_unfit ─► Buffer.append (commits) ─► unlink
                                                              │ disk full
                                                              └─► the file stays and is tried again

A kill between commit and unlink delivers the file twice; the buffer recognises the records by id.

Nothing in the spool may stop or stall the learner, or fill its memory: records are read one by one
and stored in batches of bounded size, a bad record is counted and set aside, and a file that cannot
be read is skipped.

R = rows of a record
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from redraft.distill.data.modes import name_mode
from redraft.engine.counts import AcceptanceCounts
from redraft.files.plain import open_file
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.evidence import OTHER
from redraft.online.learning.quarantine import overwrite
from redraft.online.learning.segments import Frames
from redraft.online.records.checks import Fault
from redraft.online.records.origin import unpack_arguments
from redraft.online.records.record import (
    CorruptRecordError,
    Record,
    count_tenant,
    read_frames,
)
from redraft.online.records.spool import list_abandoned, spool_files

# Maximum number of records and bytes in one transaction, which are all in memory.
BATCH_RECORDS, BATCH_BYTES = 1024, 64 << 20

Sums = dict[tuple[str, str], AcceptanceCounts]  # keyed by (domain and thinking mode, draft version)

MAX_SUMS = 256


@dataclass(kw_only=True)
class Taken:
    counts: Counter[str] = field(default_factory=Counter)
    """Records by outcome, as in `Buffer.append`."""
    accepted: Sums = field(default_factory=dict)
    """Acceptance over all records of this learner's target, each counted once."""

    def __add__(self, other: Taken) -> Taken:
        accepted = dict(self.accepted)
        for key, acceptance in other.accepted.items():
            add_acceptance(accepted, key, acceptance)
        return Taken(counts=self.counts + other.counts, accepted=accepted)


class Spool:
    """The learner's end of a spool."""

    def __init__(self, folder: Path, buffer: Buffer, vocab_size: int) -> None:
        self.folder, self.buffer, self.vocab_size = folder, buffer, vocab_size
        self._passed_over: set[str] = set()
        """Names of the files that stay because they cannot be read. Reading them is not tried again
        until the learner restarts.
        """

    def take(self, now_s: float, max_files: int = 64) -> Taken:
        """Move the oldest `max_files` files in the spool into the buffer.

        The remaining files stay in the spool.

        Raises:
            BufferFullError: the buffer's disk is full.
            FileNotFoundError: there is no spool yet.
            OSError: the spool cannot be read, or a file cannot be removed.
        """
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"the spool {self.folder} does not exist: servers create it if started with "
                f"--capture.spool"
            )
        taken, paths = Taken(), spool_files(self.folder)
        # Names of files that no longer exist would accumulate.
        self._passed_over &= {path.name for path in paths}
        self._expire([path for path in paths if path.name in self._passed_over], now_s)
        for path in [path for path in paths if path.name not in self._passed_over][:max_files]:
            taken += self._take_file(path, now_s)
        return taken

    def _take_file(self, path: Path, now_s: float) -> Taken:
        stays = Counter[str]()  # Reasons why the file must stay; empty if it can be deleted.
        try:
            file = open_file(path)
        except (
            FileNotFoundError
        ):  # the server has removed the file in the meantime, to stay within the spool's budget
            return Taken()
        except (
            OSError
        ):  # another user's file, a pipe or a folder, which must not delay the files after it
            stays["spool_unreadable"] += 1
            taken = Taken()
        else:
            with file:
                # `_read` is a generator, so `stays` is complete only after `store` has read it to
                # the end.
                taken = store(_read(file, stays), self.buffer, self.vocab_size, now_s)
        if stays:
            self._passed_over.add(path.name)
            self.buffer.counts += stays
        else:
            try:
                # Overwritten only if a tenant was deleted, because this takes a write of the whole
                # file and a flush.
                if taken.counts["forgotten"]:
                    overwrite(path)
                path.unlink(missing_ok=True)
            except OSError:
                self._passed_over.add(
                    path.name
                )  # the records are stored, so the files after this one need not wait
                raise
        return taken + Taken(counts=stays)

    def erase_unattributed(self) -> int:
        """Overwrite and delete unreadable files and those left by killed servers.

        Return the number of deleted files. They may contain text of any tenant. Call this method
        after `take`.
        """
        paths = [self.folder / name for name in self._passed_over] + list_abandoned(self.folder)
        num_erased = 0
        for path in paths:
            with suppress(OSError):
                overwrite(path)
                path.unlink()
                num_erased += 1
        return num_erased

    def count_tenant(self, name: str) -> int:
        num_records = 0
        for path in spool_files(self.folder):
            with suppress(OSError), open_file(path) as file:
                num_records += count_tenant(file, name)
        return num_records

    def _expire(self, paths: Sequence[Path], now_s: float) -> None:
        """Delete files that have reached the maximum age of records: they contain users' text."""
        for path in paths:
            with suppress(OSError):
                if now_s - path.lstat().st_mtime >= self.buffer.config.max_age_s:
                    path.unlink()


def _read(file: BinaryIO, stays: Counter[str]) -> Frames:
    """Yield the file's frames. If the disk cannot read them, the file is counted in `stays`."""
    try:
        if not os.fstat(file.fileno()).st_size:  # a power failure may leave an empty file
            yield b"", CorruptRecordError("an empty file")
        yield from read_frames(file)
    except OSError:  # the disk cannot read the rest
        stays["spool_unreadable"] += 1


def add_acceptance(sums: Sums, key: tuple[str, str], acceptance: AcceptanceCounts) -> None:
    """Add acceptance to the sum for (domain, draft version).

    If there are already MAX_SUMS sums, a new key is added to the sum for OTHER, because senders
    choose both names and each sum becomes a line in the journal.
    """
    key = key if key in sums or len(sums) < MAX_SUMS else (OTHER, OTHER)
    sums[key] = sums.get(key, AcceptanceCounts.zero()) + acceptance


def store(frames: Frames, buffer: Buffer, vocab_size: int, now_s: float) -> Taken:
    """Commit `frames` to the buffer in transactions of bounded size.

    Raises:
        BufferFullError: the buffer's disk is full. In this case, the last records were not
            stored, and all records can be sent again.
    """
    taken = Taken()
    for batch in _batches(mark_unfit(frames, vocab_size)):
        ids = [record.record_id for _, record in batch if isinstance(record, Record)]
        known = buffer.find_known(ids)
        taken += Taken(counts=buffer.append(batch, now_s))
        for _, record in batch:
            if not isinstance(record, Record) or record.record_id in known:
                continue
            known.add(record.record_id)
            if record.base == buffer.target_fingerprint:
                # Before the first `refresh_names`, `buffer.names` is empty, and every domain is
                # shown under its own name.
                domain = (
                    buffer.names.get(record.domain, OTHER)
                    if buffer.names
                    else record.domain or "all"
                )
                mode = name_mode(unpack_arguments(record.template_arguments))
                shown = f"{domain}, {mode}" if mode else domain
                add_acceptance(
                    taken.accepted, (shown, record.draft_version), count_acceptance(record)
                )
    return taken


def _batches(frames: Frames) -> Iterator[list[tuple[bytes, Record | CorruptRecordError]]]:
    """Yield lists of frames, limited to BATCH_RECORDS and BATCH_BYTES, or a single larger frame.

    The text that a segment omits also counts towards the bytes, because `Buffer.append` puts it
    into the record and its frame.
    """
    batch: list[tuple[bytes, Record | CorruptRecordError]] = []
    num_bytes = 0
    for frame, record in frames:
        size = len(frame)
        if isinstance(record, Record):
            size += record.num_bytes + 2 * 4 * record.context_begin
        if batch and (len(batch) >= BATCH_RECORDS or num_bytes + size > BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append((frame, record))
        num_bytes += size
    if batch:
        yield batch


def mark_unfit(
    frames: Frames, vocab_size: int
) -> Iterator[tuple[bytes, Record | CorruptRecordError]]:
    """Yield the same frames, with an error in place of every record that is unfit for training.

    A token id outside the vocabulary would crash every step that contains it.
    """
    for frame, record in frames:
        fault = _find_unfit(record, vocab_size) if isinstance(record, Record) else None
        yield frame, CorruptRecordError(fault.sentence, fault.reason) if fault else record


def count_acceptance(record: Record) -> AcceptanceCounts:
    """Return the acceptance of the version's drafts in one record.

    Every step ends with a bonus row, whose draft id is -1. A step without a draft has no other row.
    """
    is_own_R = record.is_own
    is_bonus_R, is_accepted_R = (record.draft_ids == -1)[is_own_R], record.accepted[is_own_R]
    # A draft begins after a bonus row. The last draft has no bonus row if the request ended within
    # it. E.g. draft ids 5, 7, -1, -1, 4 with K = 2 are two drafts with three tokens, and a step
    # without a draft between them.
    begins_R = ~is_bonus_R & np.append(True, is_bonus_R)[:-1]
    return AcceptanceCounts(
        num_drafts=int(begins_R.sum()),
        num_accepted=int(is_accepted_R.sum()),
        num_draft_tokens=int(np.sum(~is_bonus_R)),
    )


def _find_unfit(record: Record, vocab_size: int) -> Fault | None:
    """Return why an intact record is unfit for training; None if it is fit."""
    # Checked first, because without rows the other columns have no shape.
    if not len(record.positions):
        return Fault("no_rows", "no row")
    draft_ids = record.draft_ids[record.draft_ids != -1]
    for ids in (record.context_ids, record.output_ids, record.topk_ids, draft_ids):
        if ids.min(initial=0) < 0 or ids.max(initial=0) >= vocab_size:
            return Fault("outside_vocabulary", f"token ids outside the vocabulary of {vocab_size}")
    # Rounding may raise the log-probability of a certain token slightly above 0.
    if (record.topk_log_probs > 1e-3).any():
        return Fault("bad_probabilities", "log-probabilities that are positive")
    return None
