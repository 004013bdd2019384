"""A record as training data: the text with the rows labelled by the target.

T = tokens, R = rows, K = kept top-k ids, H = tokens with hidden states, L = states per token, D = size of one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from redraft.online.records.record import NO_HIDDEN, Record


@dataclass(frozen=True, kw_only=True)
class TrainingSequence:
    """A text and the rows labelled by the target."""

    input_ids_T: NDArray[np.int32]
    rows_R: NDArray[np.int64]  # row t predicts token t + 1 after reading tokens 0..t
    topk_ids_RK: NDArray[np.int32]
    topk_log_probs_RK: NDArray[np.float32]
    position: int = 0  # of the first token; not 0 for the rest of a text that was cut
    hidden_begin: int = 0
    hidden_HLD: NDArray[np.uint16] = field(default_factory=lambda: NO_HIDDEN)
    """bfloat16 states of the tokens from `hidden_begin` on."""


def training_sequence(record: Record) -> TrainingSequence:
    """The text of a self-contained record, without the rows after refused draft tokens."""
    assert not record.context_begin, "first comes join_text"
    rows = np.flatnonzero(record.branches == 0)
    return TrainingSequence(
        input_ids_T=np.concatenate([record.context_ids, record.output_ids]),
        rows_R=record.positions[rows].astype(np.int64) - 1,
        topk_ids_RK=record.topk_ids[rows],
        topk_log_probs_RK=record.topk_log_probs[rows],
        hidden_begin=record.hidden_begin,
        hidden_HLD=record.hidden_words,
    )
