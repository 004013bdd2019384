"""A record as training data: the text with the rows labelled by the target, and the drafts that it refused.

T = tokens, R = rows, K = kept top-k ids, H = tokens with hidden states, L = states per token, D = size of one,
Q = tokens of a draft from the refused one on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from redraft.online.records.record import NO_HIDDEN, Record


@dataclass(frozen=True, kw_only=True)
class RefusedDraft:
    """A draft with a refused token, and the record's rows after this token.
    E.g. a step at 11 with drafts a, b, c, of which a is accepted: one token is accepted, and the
    rows predict 13 and 14, with branches 1 and 2."""

    begin: int  # Index into the text: the place of the refused token.
    tokens_Q: NDArray[np.int32]  # The refused token and the draft tokens after it.
    rows_Q: NDArray[np.int64]  # Indices of the rows in the record.


@dataclass(frozen=True, kw_only=True)
class TrainingSequence:
    """A text and the rows labelled by the target."""

    input_ids_T: NDArray[np.int32]
    rows_R: NDArray[np.int64]  # row t predicts token t + 1 after reading tokens 0..t
    topk_ids_RK: NDArray[np.int32]
    topk_log_probs_RK: NDArray[np.float32]
    draft_ids_R: NDArray[np.int32]
    accepted_R: NDArray[np.bool_]
    is_branch: bool
    position: int = 0  # of the first token; not 0 for the rest of a text that was cut
    hidden_begin: int = 0
    hidden_HLD: NDArray[np.uint16] = field(default_factory=lambda: NO_HIDDEN)
    """bfloat16 states of the tokens from `hidden_begin` on; a branch has none."""


def training_sequences(record: Record, *, branches: bool = True) -> list[TrainingSequence]:
    """The segment's text with all its rows, then a branch for each refused draft: the text before
    it, and the draft. The rows of a branch are those after the refused token."""
    assert not record.context_begin, "first comes join_text"
    text_T = np.concatenate([record.context_ids, record.output_ids])
    whole = _sequence(record, text_T, np.flatnonzero(record.branches == 0), is_branch=False)
    sequences = [replace(whole, hidden_begin=record.hidden_begin, hidden_HLD=record.hidden_words)]
    if branches:
        for draft in refused_drafts(record):
            branch_T = np.concatenate([text_T[: draft.begin], draft.tokens_Q])
            sequences.append(_sequence(record, branch_T, draft.rows_Q, is_branch=True))
    return sequences


def refused_drafts(record: Record) -> Iterator[RefusedDraft]:
    """The refused drafts of a self-contained record, in the order of the text; only if the version drafted them."""
    hanging_R, is_own_R = record.branches, record.is_own
    # If a step refuses draft token a of 0..k-1, the rows a+1..k follow refused tokens: branches 1, 2, ..., k - a.
    for begin in np.flatnonzero((hanging_R == 1) & is_own_R):
        end = begin + 1
        while end < len(hanging_R) and hanging_R[end] == hanging_R[end - 1] + 1:
            end += 1
        # Row `begin - 1` predicted the refused token.
        yield RefusedDraft(
            begin=int(record.positions[begin - 1]),
            tokens_Q=record.draft_ids[begin - 1 : end - 1],
            rows_Q=np.arange(begin, end),
        )


def _sequence(record: Record, text_T: NDArray[np.int32], rows: NDArray[Any], *, is_branch: bool) -> TrainingSequence:
    return TrainingSequence(
        input_ids_T=text_T,
        rows_R=record.positions[rows].astype(np.int64) - 1,
        topk_ids_RK=record.topk_ids[rows],
        topk_log_probs_RK=record.topk_log_probs[rows],
        draft_ids_R=record.draft_ids[rows],
        accepted_R=record.accepted[rows],
        is_branch=is_branch,
    )
