"""Apply a request's penalties to its recorded distributions.

The penalties are applied as in vLLM (`apply_penalties`).

Records contain the target's distributions before all sampling parameters. Repetition, presence and
frequency penalties depend on the text before a row, so each row is changed according to the text
before it. They change only the target, because drafts are proposed without penalties.

R = rows, K = kept top-k ids, T = tokens.
"""

import msgspec
import numpy as np
from numpy.typing import NDArray

from redraft.online.records.record import Record

Array = NDArray[np.float64]


def is_undecided(record: Record) -> bool:
    """Whether the penalties of the record's request cannot be applied to it.

    A repetition penalty multiplies logits, but a record from a tap contains only log-probabilities.
    """
    if record.sampling.repetition_penalty == 1:
        return False
    return bool(np.isnan(record.log_sum_exp[record.branches == 0]).any())


def penalise(record: Record) -> Record:
    """Return the record, with penalties applied to the distributions of its text.

    Rows on rejected branches are unchanged. The result is exact for a record with the whole
    vocabulary. Otherwise the tokens that were not kept retain their combined mass, because it is
    not known which of them were seen; a repetition penalty would have reduced that mass.
    """
    sampling = record.sampling
    if (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        0,
        0,
        1,
    ):
        return record
    rows = np.flatnonzero(record.branches == 0)
    text_T = np.concatenate([record.context_ids, record.output_ids])
    prompt_T = text_T[: record.num_prompt_tokens]
    ids_RK = record.topk_ids[rows]
    log_probs_RK = record.topk_log_probs[rows].astype(np.float64)
    counts_RK = count_before(
        text_T[len(prompt_T) :], record.positions[rows] - len(prompt_T), ids_RK
    )
    # Only a repetition penalty needs the logits themselves: for the others, subtracting a constant
    # from all logits changes nothing.
    total_R = (
        record.log_sum_exp[rows].astype(np.float64)
        if sampling.repetition_penalty != 1
        else np.zeros(len(rows))
    )
    logits_RK = log_probs_RK + total_R[:, None]
    # As in vLLM, a repetition penalty applies to tokens of the prompt and the output, and divides
    # positive logits but multiplies negative ones. Then frequency and presence penalties are
    # subtracted, for tokens of the output only.
    factor = sampling.repetition_penalty
    is_seen_RK = (counts_RK > 0) | np.isin(ids_RK, prompt_T)
    repeated_RK = np.where(logits_RK > 0, logits_RK / factor, logits_RK * factor)
    logits_RK = np.where(is_seen_RK, repeated_RK, logits_RK)
    logits_RK -= sampling.frequency_penalty * counts_RK + sampling.presence_penalty * (
        counts_RK > 0
    )
    return _with_rows(record, rows, ids_RK, _normalise(logits_RK, log_probs_RK, total_R))


def count_before(
    tokens_T: NDArray[np.int32], position_R: NDArray[np.int32], ids_RK: NDArray[np.int32]
) -> Array:
    """Return how often each id in a row occurs in `tokens_T` before the row's position, [R, K]."""
    # One number encodes a token and its position. In sorted order, all positions of a token before
    # a given one form a range.
    width = len(tokens_T) + 1
    # E.g. tokens 7, 5, 7 with width 4 give 21, 28, 30. Token 7 before position 2 is the range [28,
    # 30), i.e. one occurrence.
    places_T = np.sort(tokens_T.astype(np.int64) * width + np.arange(len(tokens_T)))
    first_RK = ids_RK.astype(np.int64) * width
    last_RK = first_RK + np.clip(position_R, 0, len(tokens_T))[:, None]
    counts_RK: Array = (
        np.searchsorted(places_T, last_RK) - np.searchsorted(places_T, first_RK)
    ).astype(np.float64)
    return counts_RK


def _normalise(logits_RK: Array, log_probs_RK: Array, total_R: Array) -> Array:
    # Rounding can make the sum more than 1, and the logarithm of a negative remainder is NaN.
    rest_R = np.clip(1 - np.exp(log_probs_RK).sum(1), np.finfo(np.float64).tiny, 1)
    others_R = np.log(rest_R) + total_R
    normalised_RK: Array = (
        logits_RK - np.logaddexp(np.logaddexp.reduce(logits_RK, axis=1), others_R)[:, None]
    )
    return normalised_RK


def _with_rows(
    record: Record, rows: NDArray[np.int64], ids_RK: NDArray[np.int32], log_probs_RK: Array
) -> Record:
    order_RK = np.argsort(-log_probs_RK, axis=1, kind="stable")
    all_ids_RK, all_log_probs_RK = record.topk_ids.copy(), record.topk_log_probs.copy()
    all_ids_RK[rows] = np.take_along_axis(ids_RK, order_RK, 1)
    all_log_probs_RK[rows] = np.take_along_axis(log_probs_RK, order_RK, 1)
    return msgspec.structs.replace(
        record,
        row_topk_ids=all_ids_RK.astype("<i4").tobytes(),
        row_topk_log_probs=all_log_probs_RK.astype("<f4").tobytes(),
    )
