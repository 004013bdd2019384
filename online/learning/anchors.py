"""Anchors: offline data as records, mixed into every step so that the draft does not forget.

They are stored in one file of frames.

R = rows, K = kept top-k ids.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from redraft.distill.data.packing import collate
from redraft.distill.data.samples import Sample
from redraft.distill.signal.sources import InProcessTarget, top_k
from redraft.distill.signal.transfer import to_device
from redraft.files.artifact import sync, write_whole
from redraft.heads.draft import ExactTarget, label_rows
from redraft.online.learning.quarantine import overwrite
from redraft.online.records.record import (
    MAGIC,
    CorruptRecordError,
    Record,
    Sampling,
    count_tenant,
    encode_record,
    read_frames,
    text_rows,
)


def read_anchors(
    path: Path, target_fingerprint: str, hidden_shape: tuple[int, int] | None = None
) -> list[Record]:
    """Return the records in the file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file contains no record, or if a record is damaged, belongs to a
            different target, or lacks the hidden states that the draft reads.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no anchors file {path}: create it (redraft data anchors), or remove `anchors`"
        )
    records = []
    for _, record in read_frames(path.read_bytes()):
        if isinstance(record, CorruptRecordError):
            raise ValueError(
                f"{path} is damaged ({record}): create the anchors again (redraft data anchors)"
            )
        if record.target_fingerprint != target_fingerprint:
            raise ValueError(
                f"{path} belongs to target {record.target_fingerprint[:12]}, not to "
                f"{target_fingerprint[:12]}: create anchors for this target (redraft data anchors)"
            )
        if hidden_shape not in (None, record.hidden_shape):
            raise ValueError(
                f"{path} contains no hidden states of shape {hidden_shape}, which this head reads: "
                "remove `anchors`, because heads learn without them"
            )
        records.append(record)
    if not records:
        raise ValueError(
            f"{path} contains no records: create the anchors again (redraft data anchors)"
        )
    return records


def is_record_file(path: Path) -> bool:
    """Whether a file begins with a record, or is empty."""
    with path.open("rb") as file:
        return file.read(3) in (b"", MAGIC[:3])


def forget_in_anchors(path: Path, name: str) -> int:
    """Rewrite the file without a tenant's records, and overwrite the old file.

    Returns the number of those records.
    """
    num_records = count_tenant(path.read_bytes(), name)
    if num_records:
        frames = read_frames(path.read_bytes())
        kept = [
            frame
            for frame, record in frames
            if not (isinstance(record, Record) and record.tenant == name)
        ]
        former = path.with_name(f".{path.name}.former")
        former.unlink(missing_ok=True)
        # The old bytes keep a file name until they are overwritten: replacing the file would leave
        # them on the disk.
        os.link(path, former)
        write_whole(path, b"".join(kept))
        overwrite(former)
        former.unlink()
    return num_records


def write_anchors(
    path: Path,
    samples: Iterable[Sample],
    target: InProcessTarget,
    target_fingerprint: str,
    *,
    k: int = 32,
) -> None:
    """Write one record per sample, with the target's distribution at every label.

    The file appears complete or not at all.
    """
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        for record in make_anchors(samples, target, target_fingerprint, k=k):
            file.write(encode_record(record))
    sync(partial)
    partial.replace(path)


@torch.no_grad()
def make_anchors(
    samples: Iterable[Sample], target: InProcessTarget, target_fingerprint: str, *, k: int = 32
) -> Iterator[Record]:
    """Make one record per sample.

    Its labels are the record's output, none of which was proposed by a draft.
    """
    for number, sample in enumerate(samples):
        batch = to_device(collate([[sample]], len(sample.input_ids)), target.model.device)
        rows_R = label_rows(batch, 0).flatten().nonzero().squeeze(1)
        exact = target(batch).distribution
        assert isinstance(exact, ExactTarget)
        ids_RK, log_probs_RK = top_k(exact, rows_R, k)
        first = int(rows_R[0]) + 1
        yield Record(
            server_id="offline",
            request_id=f"{sample.conversation[:32]}-{number}",
            sequence=0,
            time_s=0.0,
            domain=sample.domain,
            target_fingerprint=target_fingerprint,
            sampling=Sampling(),
            num_prompt_tokens=first,
            top_k=k,
            context=sample.input_ids[:first].astype("<i4").tobytes(),
            output=sample.input_ids[first:].astype("<i4").tobytes(),
            # Row t contains the distribution of token t + 1, and the record's rows are numbered by
            # that token.
            **text_rows(rows_R.cpu().numpy() + 1, ids_RK.cpu().numpy(), log_probs_RK.cpu().numpy()),
        )
