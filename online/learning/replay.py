"""Turns records into training batches.

A batch contains texts with the rows labelled by the target, packed to one width.

B = batch, T = tokens, R = labelled rows of one text, N = labelled rows of a batch, K = kept top-k
ids, H = tokens with hidden states, L = hidden states per token, D = size of a hidden state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redraft.distill.data.packing import pack
from redraft.distill.signal.sources import recorded
from redraft.heads.draft import Batch, TargetSignal
from redraft.heads.family import Reads
from redraft.online.records.record import NO_HIDDEN, Record

FILLER = 0  # placeholder for the label after a text whose last row predicts the next token
WIDTH_STEP = 64  # widths are multiples of this, to limit the number of shapes


@dataclass(frozen=True, kw_only=True)
class TrainingSequence:
    """A text and the rows labelled by the target."""

    input_ids_T: NDArray[np.int32]
    rows_R: NDArray[np.int64]
    """Row t predicts token t + 1 after reading tokens 0..t."""
    topk_ids_RK: NDArray[np.int32]
    topk_log_probs_RK: NDArray[np.float32]
    position: int = 0
    """Position of the first token, which is not 0 if the beginning of the text was cut off."""
    hidden_begin: int = 0
    hidden_HLD: NDArray[np.uint16] = field(default_factory=lambda: NO_HIDDEN)
    """bfloat16 states of the tokens from `hidden_begin` on."""


def training_sequence(record: Record) -> TrainingSequence:
    """Return the text of a self-contained record, without the rows after rejected draft tokens."""
    assert not record.context_begin, "apply join_text first"
    rows = np.flatnonzero(record.branches == 0)
    return TrainingSequence(
        input_ids_T=np.concatenate([record.context_ids, record.output_ids]),
        rows_R=record.positions[rows].astype(np.int64) - 1,
        topk_ids_RK=record.topk_ids[rows],
        topk_log_probs_RK=record.topk_log_probs[rows],
        hidden_begin=record.hidden_begin,
        hidden_HLD=record.hidden_words,
    )


@dataclass(frozen=True, kw_only=True)
class RecordedBatch(Batch):
    """A batch with the target's distributions from the time it served these texts."""

    signal: TargetSignal


def read_signal(batch: Batch) -> TargetSignal:
    """Return the batch's recorded signal, for `Distillation`."""
    assert isinstance(batch, RecordedBatch)
    return batch.signal


def select_texts(records: Sequence[Record]) -> list[TrainingSequence]:
    return [text for text in map(training_sequence, records) if len(text.rows_R)]


def make_batches(
    texts: Sequence[TrainingSequence],
    *,
    num_batches: int,
    sequence_length: int,
    seed: int,
    salt: int = 0,
    reads: Reads = "nothing",
    needed_states: int = 0,
) -> list[RecordedBatch]:
    """Pack all texts into `num_batches` batches of one shape.

    If there are too few rows, some batches contain only padding. If the draft reads hidden states,
    each text starts at its first token with hidden states, and rows after the last such token are
    dropped, as are the first rows that have fewer than `needed_states` states before them. The
    packing depends on `seed`; `salt` is copied into every batch.
    """
    top_k = min(
        text.topk_ids_RK.shape[1] for text in texts
    )  # records from a tap have fewer top-k ids than records from the plugin
    if reads != "nothing":
        texts = [_from_first_state(text) for text in texts]
    cut = [_without_short(_cut(text, sequence_length, top_k), needed_states) for text in texts]
    # Rounded up, e.g. 130 tokens give a width of 192.
    width = -(-max(len(text.input_ids_T) for text in cut) // WIDTH_STEP) * WIDTH_STEP
    # Indices of the texts in each row, e.g. [[2, 0], [1]]. Every rank computes the same ones from
    # the seed.
    rows = pack([len(text.input_ids_T) for text in cut], width, seed)
    # Every rank must take the same number of rows, because otherwise the collective operations of a
    # step would not match.
    rows += [[]] * (-len(rows) % num_batches)
    # Rows are distributed round-robin: with 6 rows, the first of 2 batches gets rows 0, 2 and 4.
    shares = [
        [[cut[i] for i in row] for row in rows[first::num_batches]] for first in range(num_batches)
    ]
    batches = [replace(_make_batch(share, width, top_k), salt=salt) for share in shares]
    if reads == "nothing":
        return batches
    with_states = []
    for batch, share in zip(batches, shares, strict=True):
        states_BTLD = _lay_out_states(share, width, cut[0].hidden_HLD.shape[1:])
        if reads == "layers":
            signal = replace(batch.signal, aux_BTLD=states_BTLD)
        else:  # with "last", records contain one state per token
            signal = replace(batch.signal, hidden_BTD=states_BTLD[:, :, 0])
        with_states.append(replace(batch, signal=signal))
    return with_states


def _from_first_state(text: TrainingSequence) -> TrainingSequence:
    """Return the text from its first token with hidden states, with only the rows of such tokens.

    The last token has no hidden states. A row without hidden states can be neither a prediction's
    input nor its label.
    """
    begin = text.hidden_begin
    end = begin + len(text.hidden_HLD)
    kept = (text.rows_R >= begin) & (text.rows_R < end)
    return replace(_with_rows(text, kept, begin), hidden_begin=0)


def _cut(text: TrainingSequence, sequence_length: int, top_k: int) -> TrainingSequence:
    """Return the last `sequence_length` tokens.

    A filler token is added if the last row predicts the token after them.
    """
    ids_T = text.input_ids_T
    # A record may have a row after its last token. That row's token is unknown.
    if len(text.rows_R) and text.rows_R.max() + 1 == len(ids_T):
        ids_T = np.append(ids_T, np.int32(FILLER))
    begin = max(0, len(ids_T) - sequence_length)
    cut = _with_rows(replace(text, input_ids_T=ids_T), text.rows_R >= begin, begin)
    return replace(
        cut,
        topk_ids_RK=cut.topk_ids_RK[:, :top_k],
        topk_log_probs_RK=cut.topk_log_probs_RK[:, :top_k],
        # State `begin` belongs to token `begin`, because `_from_first_state` has aligned them.
        hidden_HLD=text.hidden_HLD[begin:],
    )


def _without_short(text: TrainingSequence, needed_states: int) -> TrainingSequence:
    """Return the text without the rows for which a head's windows need states before its first.

    If this applies to all rows, because the windows read more states than a record has, all rows
    stay: training a head with less context than in serving is better than not training it.
    """
    are_enough_R = text.rows_R >= needed_states
    if text.position == 0 or not are_enough_R.any():
        return text
    return _with_rows(text, are_enough_R, 0)


def _with_rows(text: TrainingSequence, kept_R: NDArray[np.bool_], begin: int) -> TrainingSequence:
    return replace(
        text,
        input_ids_T=text.input_ids_T[begin:],
        position=text.position + begin,
        rows_R=text.rows_R[kept_R] - begin,
        topk_ids_RK=text.topk_ids_RK[kept_R],
        topk_log_probs_RK=text.topk_log_probs_RK[kept_R],
    )


def _lay_out_states(
    rows: Sequence[Sequence[TrainingSequence]], width: int, shape: tuple[int, ...]
) -> Tensor:
    """Return the texts' hidden states, bfloat16 [B, T, L, D], with 0 for tokens that have none."""
    states_BTLD = torch.zeros(len(rows), width, *shape, dtype=torch.bfloat16)
    for b, row in enumerate(rows):
        start = 0
        for text in row:
            # Records contain bfloat16 as uint16, because numpy has no such type; torch views only
            # int16 as bfloat16.
            words_HLD = torch.from_numpy(text.hidden_HLD.astype(np.uint16).view(np.int16))
            states_BTLD[b, start : start + len(words_HLD)] = words_HLD.view(torch.bfloat16)
            start += len(text.input_ids_T)
    return states_BTLD


def _make_batch(
    rows: Sequence[Sequence[TrainingSequence]], width: int, top_k: int
) -> RecordedBatch:
    batch = Batch.packed([[_document(text) for text in row] for row in rows], width=width)
    # The empty arrays come first, because a batch of padding would otherwise have nothing to
    # concatenate.
    rows_N = [np.empty(0, np.int64)]
    ids_NK, log_probs_NK = [np.empty((0, top_k), np.int32)], [np.empty((0, top_k), np.float32)]
    for b, row in enumerate(rows):
        start = 0
        for text in row:
            end = start + len(text.input_ids_T)
            # Use the tokens' positions when they were served, because some heads treat position 0
            # differently. `Batch.packed` has counted every text from 0, so the offset is added.
            batch.position_ids_BT[b, start:end] += text.position
            rows_N.append(b * width + start + text.rows_R)  # in the flattened batch
            ids_NK.append(text.topk_ids_RK)
            log_probs_NK.append(text.topk_log_probs_RK)
            start = end
    known = (torch.from_numpy(np.concatenate(parts)) for parts in (rows_N, ids_NK, log_probs_NK))
    return RecordedBatch(**vars(batch), signal=recorded(batch, *known))


def _document(text: TrainingSequence) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    loss_mask = np.zeros(len(text.input_ids_T), bool)
    loss_mask[text.rows_R + 1] = True  # the mask marks labels, and row t learns from label t + 1
    return text.input_ids_T, loss_mask
