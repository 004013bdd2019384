"""Scores of a draft on held-out requests, teacher-forced on the target's answers. The gate compares them.

R = rows of a text, N = rows of a chunk, K = kept top-k ids, V = vocabulary, W = draft vocabulary, J = draft tokens of a
block.

The records hold the target's distribution of every output token. One pass of a draft over the text gives the
acceptance probability a_r of the token for row r. Walking blocks over a_r as the engine does gives the expected
numbers of drafts and accepted tokens. At temperature 0 all a_r are 0 or 1, and the result is the engine's counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from redraft.eval.counts import AcceptanceCounts, expected_blocks
from redraft.eval.forecast.rows import ROWS_A_CHUNK, TargetRows, step_rates, take_draft_steps
from redraft.heads.catalog import Reads
from redraft.heads.draft import Draft, DraftStep, TargetSignal, TopKTarget
from redraft.online.learning.replay import RecordedBatch, make_batches
from redraft.online.records.record import Record, Sampling, training_sequences

Array = NDArray[np.float64]
Method = Literal["greedy", "probabilistic"]

LOG_ZERO = -1e30
"""Logarithm of a probability that counts as 0."""


def score(
    draft: Draft,
    records: Sequence[Record],
    *,
    num_speculative_tokens: int,
    method: Method,
    sequence_length: int,
    reads: Reads = "nothing",
) -> list[AcceptanceCounts]:
    """Expected drafts and accepted draft tokens of every record, had `draft` drafted for its request.

    Raises: ValueError if the draft has fewer draft steps than `num_speculative_tokens`.
    """
    scored = []
    for record in records:
        text = training_sequences(record, branches=False)[0]
        rows_R, accepted_JR = np.zeros(0, np.int64), np.zeros((num_speculative_tokens, 0))
        if len(text.rows_R):
            (batch,) = make_batches([text], num_batches=1, sequence_length=sequence_length, seed=0, reads=reads)
            rows_R, accepted_JR = score_rows(draft, batch, record.sampling, method, num_speculative_tokens)
        scored.append(walk_stretches(rows_R, accepted_JR))
    return scored


Request = tuple[str, str]
"""Server and request id."""


@dataclass(frozen=True)
class RequestScore:
    domain: str
    counts: AcceptanceCounts
    """Sum over the request's segments."""


def score_requests(draft: Draft, records: Iterable[Record], **settings: Any) -> dict[Request, RequestScore]:
    """The score of every request, in order of the first segments; `settings` are those of `score`.

    Holds one record at a time, because the held-out records may be larger than the memory.
    """
    found: dict[Request, RequestScore] = {}
    for record in records:
        key = (record.server_id, record.request_id)
        (counts,) = score(draft, [record], **settings)
        before = found.get(key, RequestScore(record.domain or "all", AcceptanceCounts.zero()))
        found[key] = RequestScore(before.domain, before.counts + counts)
    return found


def pair_scores(
    candidate: Mapping[Request, RequestScore], incumbent: Mapping[Request, RequestScore]
) -> tuple[list[AcceptanceCounts], list[AcceptanceCounts], list[str]]:
    """(candidate's counts, incumbent's counts, domains) of the requests that can be compared.

    A request is left out if its records expired between the two scorings, or if the incumbent's score is not finite:
    the served draft is known to be finite, so the record is to blame. A request whose score is not finite for the
    candidate only stays, as evidence against the candidate.
    """
    compared = [key for key, score in incumbent.items() if key in candidate and _is_finite(score.counts)]
    return (
        [candidate[key].counts for key in compared],
        [incumbent[key].counts for key in compared],
        [incumbent[key].domain for key in compared],
    )


def _is_finite(counts: AcceptanceCounts) -> bool:
    return math.isfinite(counts.num_drafts) and math.isfinite(counts.num_accepted)


@torch.no_grad()
def score_rows(
    draft: Draft, batch: RecordedBatch, sampling: Sampling, method: Method, num_speculative_tokens: int
) -> tuple[NDArray[np.int64], Array]:
    """(rows at which a block can begin [R], probabilities of acceptance [J, R]) for the one text in `batch`.

    Entry [j, r] is the acceptance probability of row r's token as the j-th of a block, if all before it were
    accepted. An autoregressive draft has the same probability for every j.
    """
    steps = take_draft_steps(draft, batch, batch.signal, num_speculative_tokens)
    by_step = [_alpha_by_row(step, batch.signal, sampling, method) for step in steps]
    rows_R = np.array(sorted(by_step[0]), np.int64)
    # 0 if a later step has no such row, because no block reaches there
    accepted_JR = np.array([[accepted.get(row, 0.0) for row in rows_R.tolist()] for accepted in by_step])
    return rows_R, np.broadcast_to(accepted_JR, (num_speculative_tokens, len(rows_R)))


def _alpha_by_row(step: DraftStep, signal: TargetSignal, sampling: Sampling, method: Method) -> dict[int, float]:
    """Acceptance of one draft step by row of the target."""
    target = signal.distribution
    assert isinstance(target, TopKTarget)
    # sum_v min(p, q) of a one-hot q is p(argmax q): the acceptance of a greedy draft
    temperature = sampling.served_temperature if method == "probabilistic" else 0.0
    alphas: dict[int, float] = {}
    for rows_N in torch.split(step.mask_BT.flatten().nonzero().squeeze(-1), ROWS_A_CHUNK):
        target_rows_N = rows_N + step.shift
        p_NK = sampled_distribution(target.log_probs_BTK.flatten(0, 1)[target_rows_N], sampling)
        kept = TargetRows(p_NM=p_NK, ids_NM=target.ids_BTK.flatten(0, 1)[target_rows_N])
        # A recorded distribution may add up to more than 1, by rounding or because its sender made it up.
        alpha_N = step_rates(step, rows_N, kept, temperature).alpha.clamp(0, 1)
        alphas.update(zip(target_rows_N.tolist(), alpha_N.double().tolist(), strict=True))
    return alphas


def sampled_distribution(log_probs_NK: Tensor, sampling: Sampling) -> Tensor:
    """The distribution of the request's samples over the kept ids, [N, K], most probable first.

    At temperatures other than 1 the mass of the other ids is unknown and taken as 0. Penalties are ignored: they shift
    candidate and incumbent equally.
    """
    temperature = sampling.served_temperature
    if temperature == 0:
        return F.one_hot(torch.zeros(len(log_probs_NK), dtype=torch.int64), log_probs_NK.shape[1]).to(log_probs_NK)
    # Clamped because the division by 0.01 may overflow, and the softmax of a row of -inf is NaN.
    log_probs_NK = log_probs_NK.clamp_min(LOG_ZERO)
    p_NK = log_probs_NK.exp() if temperature == 1 else (log_probs_NK / temperature).softmax(-1)
    # vLLM applies min_p, then top_k, then top_p; the first column is the most probable token.
    kept_NK = p_NK >= sampling.min_p * p_NK[:, :1]
    has_top_k = sampling.top_k > 0
    if has_top_k:
        kept_NK[:, sampling.top_k :] = False
    if has_top_k or sampling.min_p:
        p_NK = _renormalised(p_NK, kept_NK)
    if sampling.top_p < 1:
        # a token stays if the mass before it has not reached top_p, so the first always stays
        before_NK = p_NK.cumsum(-1) - p_NK
        p_NK = _renormalised(p_NK, before_NK < sampling.top_p)
    return p_NK


def walk_stretches(rows_R: NDArray[np.int64], accepted_JR: Array) -> AcceptanceCounts:
    """Expected drafts and accepted tokens over all stretches of consecutive rows, each beginning with a block.

    A block that would reach beyond a stretch is left out, because the target was not recorded there.
    """
    stretches = np.split(accepted_JR, np.flatnonzero(np.diff(rows_R) != 1) + 1, axis=1)
    walked = np.array([_walk_stretch(stretch) for stretch in stretches])
    drafts, accepted = walked.sum(0).tolist()
    return AcceptanceCounts(num_drafts=drafts, num_accepted=accepted)


def _walk_stretch(accepted_JR: Array) -> tuple[float, float]:
    """(drafts, accepted tokens) of one stretch. Token j of a block that begins at row r is in row r + j."""
    num_blocks = max(0, accepted_JR.shape[1] - len(accepted_JR) + 1)
    accept_TK = np.stack([row_R[j : j + num_blocks] for j, row_R in enumerate(accepted_JR)], axis=1)
    counts = expected_blocks(accept_TK, num_blocks + 1)
    return counts.num_steps, counts.num_accepted


def _renormalised(p_NK: Tensor, kept_NK: Tensor) -> Tensor:
    p_NK = p_NK * kept_NK
    # Clamped because all kept ids of a made-up row may have probability 0.
    return p_NK / p_NK.sum(-1, keepdim=True).clamp_min(torch.finfo(p_NK.dtype).tiny)
