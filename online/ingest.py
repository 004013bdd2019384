"""From the spool into the buffer: a file is removed, and so acknowledged, when its records are on the buffer's disk.

    servers ─► spool file ─► read_frames ─► fitting ─► Buffer.append (commits) ─► unlink
                                                            │ disk full
                                                            └─► the file stays, and is tried again

A kill between commit and unlink delivers the file twice; the buffer knows the records by their ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from online.buffer import Buffer
from online.metrics import Acceptance
from online.records import Record, read_frames
from online.replay import Frames, fitting
from online.spool import spool_files


@dataclass(kw_only=True)
class Taken:
    """What one look into the spool or the log brought."""

    num_files: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Records by what became of them: stored, duplicate, foreign, corrupt, stateless, other_domain."""
    accepted: dict[tuple[str, str], Acceptance] = field(default_factory=dict)
    """What the servers' drafts were accepted, by domain and draft version, of the records that are not foreign."""

    def __add__(self, other: Taken) -> Taken:
        accepted = dict(self.accepted)
        for key, acceptance in other.accepted.items():
            accepted[key] = accepted.get(key, Acceptance()) + acceptance
        return Taken(num_files=self.num_files + other.num_files, counts=self.counts + other.counts, accepted=accepted)


def take(spool: Path, buffer: Buffer, vocab_size: int, now_s: float, max_files: int = 64) -> Taken:
    """Move the oldest `max_files` files of the spool into the buffer.

    Raises: BufferFullError where the buffer's disk is full; the files not yet taken stay. OSError of the spool's disk.
    """
    taken = Taken()
    for path in spool_files(spool)[:max_files]:
        try:
            data = path.read_bytes()
        except FileNotFoundError:  # its writer made room meanwhile
            continue
        taken += store(read_frames(data), buffer, vocab_size, now_s)
        path.unlink(missing_ok=True)
        taken.num_files += 1
    return taken


def store(frames: Frames, buffer: Buffer, vocab_size: int, now_s: float) -> Taken:
    """Commit `frames`, as `read_frames` yields them, to the buffer in one transaction.

    Raises: BufferFullError; nothing was stored then.
    """
    frames = list(fitting(frames, vocab_size))
    taken = Taken(counts=buffer.append(frames, now_s))
    for record in _ours(frames, buffer.target_fingerprint):
        key = (record.domain or "all", record.draft_version)
        taken.accepted[key] = taken.accepted.get(key, Acceptance()) + acceptance_of(record)
    return taken


def acceptance_of(record: Record) -> Acceptance:
    """What this record's drafts were accepted. Every step has one bonus row, and it comes last."""
    is_bonus_R = record.draft_ids == -1
    if is_bonus_R.all():  # nothing was drafted, or a tap can not tell
        return Acceptance()
    steps = int(is_bonus_R.sum()) + int(not is_bonus_R[-1])  # the last step's is cut off where the request ended
    return Acceptance(drafts=steps, accepted=float(record.accepted.sum()), drafted=float(np.sum(~is_bonus_R)))


def _ours(frames: Frames, fingerprint: str) -> Iterator[Record]:
    for _, record in frames:
        if isinstance(record, Record) and record.target_fingerprint == fingerprint:
            yield record
