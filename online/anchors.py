"""Offline data in the form of records, for a share of every step against forgetting: a file of frames.

R = rows, K = kept top-k ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from distill.loop import to_device
from distill.packing import collate
from distill.samples import Sample
from distill.signals import InProcessTarget, top_k
from heads.artifact import sync
from heads.draft import ExactTarget, label_rows
from online.records import CorruptRecordError, Record, Sampling, encode, read_frames


def read_anchors(path: Path, target_fingerprint: str, hidden_shape: tuple[int, int] | None = None) -> list[Record]:
    """The records in the file.

    Raises: FileNotFoundError; ValueError where one is damaged, of another target, or lacks the hidden states that the
    draft reads.
    """
    records = []
    for _, record in read_frames(path.read_bytes()):
        if isinstance(record, CorruptRecordError):
            raise ValueError(f"{path} is damaged ({record}): make the anchors again (redraft anchors)")
        if record.target_fingerprint != target_fingerprint:
            raise ValueError(
                f"{path} is of target {record.target_fingerprint[:12]}, this one is {target_fingerprint[:12]}: "
                "make anchors for this target (redraft anchors)"
            )
        if hidden_shape not in (None, record.hidden_shape):
            raise ValueError(f"{path} holds no hidden states of the form {hidden_shape}: a head learns without anchors")
        records.append(record)
    return records


def write_anchors(
    path: Path, samples: Iterable[Sample], target: InProcessTarget, target_fingerprint: str, *, k: int = 32
) -> None:
    """What the target says about every label of the samples, as one record a sample."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        for record in anchor_records(samples, target, target_fingerprint, k=k):
            file.write(encode(record))
    sync(partial)
    partial.replace(path)


@torch.no_grad()
def anchor_records(
    samples: Iterable[Sample], target: InProcessTarget, target_fingerprint: str, *, k: int = 32
) -> Iterator[Record]:
    """One record a sample: its labels are the output, no draft proposed any of them."""
    for number, sample in enumerate(samples):
        batch = to_device(collate([[sample]], len(sample.input_ids), 0), target.model.device)
        rows_R = label_rows(batch, 0).flatten().nonzero().squeeze(1)
        exact = target(batch).distribution
        assert isinstance(exact, ExactTarget)
        ids_RK, log_probs_RK = top_k(exact, rows_R, k)
        first, count = int(rows_R[0]) + 1, len(rows_R)
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
            row_positions=(rows_R.cpu().numpy() + 1).astype("<i4").tobytes(),
            row_branches=bytes(4 * count),
            row_drafts=np.full(count, -1, "<i4").tobytes(),
            row_draft_probs=np.full(count, np.nan, "<f4").tobytes(),
            row_accepted=bytes(count),
            row_topk_ids=ids_RK.cpu().numpy().astype("<i4").tobytes(),
            row_topk_log_probs=log_probs_RK.cpu().numpy().astype("<f4").tobytes(),
            row_log_sum_exp=np.full(count, np.nan, "<f4").tobytes(),
        )
