"""From records to what a training step takes: texts with the rows that the target labelled, packed into batches.

B = batch, T = tokens, R = labelled rows of one text, N = of all texts of a batch, K = kept top-k ids,
H = tokens with hidden states, L = hidden states of one token, D = their size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distill.packing import collate, pack
from distill.samples import Sample
from distill.signals import recorded
from heads.draft import Batch, TargetSignal
from online.records import CorruptRecordError, Record, TrainingSequence, training_sequences

FILLER = 0
"""Stands behind a text whose last row predicts what came next: the row needs a place for its label, not the label."""

WIDTH_STEP = 64
"""Rows are a multiple of this long, so that few shapes occur."""

Reads = Literal["nothing", "layers", "last"]
"""What a draft reads of the target: nothing, the streams after some layers, or the last hidden state after the norm."""

Frames = Iterable[tuple[bytes, Record | CorruptRecordError]]


@dataclass(frozen=True, kw_only=True)
class RecordedBatch(Batch):
    """A batch with what the target said about it when it served it."""

    signal: TargetSignal


def signal_of(batch: Batch) -> TargetSignal:
    """The target of `Distillation` for batches of records."""
    assert isinstance(batch, RecordedBatch)
    return batch.signal


def fitting(frames: Frames, vocab_size: int) -> Iterator[tuple[bytes, Record | CorruptRecordError]]:
    """`frames`, with an error in the place of every record that can not be trained on.

    A CRC vouches for the way, not for the sender: one id beyond the vocabulary would end every training step for ever.
    """
    for frame, record in frames:
        unfit = isinstance(record, Record) and _unfit(record, vocab_size)
        yield frame, CorruptRecordError(unfit) if unfit else record


def texts_of(
    records: Sequence[Record], *, branches_per_record: int, rng: np.random.Generator
) -> list[TrainingSequence]:
    """Every record's text with its rows, and up to `branches_per_record` of its rejected branches, drawn at random."""
    texts = []
    for record in records:
        whole, *branches = training_sequences(record, branches=branches_per_record > 0)
        drawn = rng.permutation(len(branches))[:branches_per_record]
        texts += [whole, *(branches[i] for i in drawn)]
    return [text for text in texts if len(text.rows_R)]


def batches_of(
    texts: Sequence[TrainingSequence], *, num_batches: int, sequence_length: int, seed: int, reads: Reads = "nothing"
) -> list[RecordedBatch]:
    """All texts in `num_batches` batches of one shape; where there are fewer rows than that, some hold padding only.

    For a draft that reads hidden states a text begins with the first that it has, and rows behind the last go.
    """
    top_k = min(text.topk_ids_RK.shape[1] for text in texts)  # a tap's records have fewer than a plugin's
    if reads != "nothing":
        texts = [_from_first_state(text) for text in texts]
    cut = [_cut(text, sequence_length, top_k) for text in texts]
    width = -(-max(len(text.input_ids_T) for text in cut) // WIDTH_STEP) * WIDTH_STEP
    rows = pack([len(text.input_ids_T) for text in cut], width, seed)
    rows += [[]] * (-len(rows) % num_batches)
    shares = [[[cut[i] for i in row] for row in rows[first::num_batches]] for first in range(num_batches)]
    batches = [_batch(share, width, top_k) for share in shares]
    if reads == "nothing":
        return batches
    states = [_states(share, width, cut[0].hidden_HLD.shape[1:]) for share in shares]
    signals = [_reading(batch.signal, its, reads) for batch, its in zip(batches, states, strict=True)]
    return [replace(batch, signal=signal) for batch, signal in zip(batches, signals, strict=True)]


def _from_first_state(text: TrainingSequence) -> TrainingSequence:
    """The text from the first token with hidden states on, and the rows whose token has some; its last token has none.

    A row without could neither be predicted from nor be compared with.
    """
    begin = text.hidden_begin
    kept = (text.rows_R >= begin) & (text.rows_R < begin + len(text.hidden_HLD))
    return replace(_with_rows(text, kept, begin), hidden_begin=0)


def _cut(text: TrainingSequence, sequence_length: int, top_k: int) -> TrainingSequence:
    """The last `sequence_length` tokens, with a filler where the last row predicts the token behind them."""
    ids_T = text.input_ids_T
    if len(text.rows_R) and text.rows_R.max() + 1 == len(ids_T):
        ids_T = np.append(ids_T, np.int32(FILLER))
    begin = max(0, len(ids_T) - sequence_length)
    cut = _with_rows(replace(text, input_ids_T=ids_T), text.rows_R >= begin, begin)
    return replace(
        cut,
        topk_ids_RK=cut.topk_ids_RK[:, :top_k],
        topk_log_probs_RK=cut.topk_log_probs_RK[:, :top_k],
        hidden_HLD=text.hidden_HLD[begin:],
    )


def _with_rows(text: TrainingSequence, kept_R: NDArray[np.bool_], begin: int) -> TrainingSequence:
    """The text from token `begin` on, with the rows that are kept."""
    return replace(
        text,
        input_ids_T=text.input_ids_T[begin:],
        rows_R=text.rows_R[kept_R] - begin,
        topk_ids_RK=text.topk_ids_RK[kept_R],
        topk_log_probs_RK=text.topk_log_probs_RK[kept_R],
        draft_ids_R=text.draft_ids_R[kept_R],
        accepted_R=text.accepted_R[kept_R],
    )


def _states(rows: Sequence[Sequence[TrainingSequence]], width: int, shape: tuple[int, ...]) -> Tensor:
    """The hidden states of the texts, bfloat16 [B, T, L, D], 0 where a token has none."""
    states_BTLD = torch.zeros(len(rows), width, *shape, dtype=torch.bfloat16)
    for b, row in enumerate(rows):
        start = 0
        for text in row:
            words_HLD = torch.from_numpy(text.hidden_HLD.astype(np.uint16).view(np.int16))
            states_BTLD[b, start : start + len(words_HLD)] = words_HLD.view(torch.bfloat16)
            start += len(text.input_ids_T)
    return states_BTLD


def _reading(signal: TargetSignal, states_BTLD: Tensor, reads: Reads) -> TargetSignal:
    if reads == "layers":
        return replace(signal, aux_BTLD=states_BTLD)
    return replace(signal, hidden_BTD=states_BTLD[:, :, 0])


def _batch(rows: Sequence[Sequence[TrainingSequence]], width: int, top_k: int) -> RecordedBatch:
    batch = collate([[_sample(text) for text in row] for row in rows], width, FILLER)
    rows_N = [np.empty(0, np.int64)]
    ids_NK, log_probs_NK = [np.empty((0, top_k), np.int32)], [np.empty((0, top_k), np.float32)]
    for b, row in enumerate(rows):
        start = b * width
        for text in row:
            rows_N.append(start + text.rows_R)
            ids_NK.append(text.topk_ids_RK)
            log_probs_NK.append(text.topk_log_probs_RK)
            start += len(text.input_ids_T)
    known = (torch.from_numpy(np.concatenate(parts)) for parts in (rows_N, ids_NK, log_probs_NK))
    return RecordedBatch(**vars(batch), signal=recorded(batch, *known))


def _sample(text: TrainingSequence) -> Sample:
    loss_mask = np.zeros(len(text.input_ids_T), bool)
    loss_mask[text.rows_R + 1] = True  # the mask is of labels, and row t learns from the label t + 1
    return Sample(input_ids=text.input_ids_T, loss_mask=loss_mask, conversation="", domain="")


def _unfit(record: Record, vocab_size: int) -> str:
    """Why a record whose bytes are whole can not be trained on; empty where it can."""
    ids = np.concatenate([record.context_ids, record.output_ids, record.topk_ids.ravel()])
    hanging = record.draft_ids[record.draft_ids != -1]
    if not len(record.positions):
        return "no row"
    if min(ids.min(), hanging.min(initial=0)) < 0 or max(ids.max(), hanging.max(initial=0)) >= vocab_size:
        return f"token ids outside the vocabulary of {vocab_size}"
    if not (np.isfinite(record.topk_log_probs).all() and (record.topk_log_probs <= 1e-3).all()):
        return "log-probabilities that are none"
    return ""
