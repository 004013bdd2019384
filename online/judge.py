"""How a draft does on held-out requests, teacher-forced on what the target answered: what the gate compares.

R = rows of a text, N = rows of a chunk, K = kept top-k ids, V = vocabulary, W = draft vocabulary, J = draft tokens of a
block.

The target's distribution of every output token was recorded. One pass of a draft over the text gives the probability
a_r that its token for row r is accepted, and walking blocks over a_r as the engine does gives the expected number of
drafts and of accepted tokens. At temperature 0 all a_r are 0 or 1, and these are the engine's own counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from eval.acceptance import alpha, expected_blocks, probabilities
from eval.rows import ROWS_A_CHUNK, draft_steps_of
from heads.draft import Draft, DraftStep, TargetSignal, TopKTarget
from online.gate import Scored
from online.records import Record, Sampling, training_sequences
from online.replay import Reads, RecordedBatch, batches_of

Array = NDArray[np.float64]
Method = Literal["greedy", "probabilistic"]


def score(
    draft: Draft,
    records: Sequence[Record],
    *,
    num_speculative_tokens: int,
    method: Method,
    sequence_length: int,
    reads: Reads = "nothing",
) -> list[Scored]:
    """Expected drafts and accepted draft tokens of every record, were its request drafted by `draft`.

    Raises: ValueError where the draft has fewer draft steps than `num_speculative_tokens`.
    """
    scored = []
    for record in records:
        text = training_sequences(record, branches=False)[0]
        rows_R, accepted_JR = np.zeros(0, np.int64), np.zeros((num_speculative_tokens, 0))
        if len(text.rows_R):
            (batch,) = batches_of([text], num_batches=1, sequence_length=sequence_length, seed=0, reads=reads)
            rows_R, accepted_JR = acceptance(draft, batch, record.sampling, method, num_speculative_tokens)
        scored.append(walk(rows_R, accepted_JR))
    return scored


def by_request(records: Sequence[Record], scored: Sequence[Scored]) -> dict[tuple[str, str], Scored]:
    """The sums over every request's segments, in the order of their first."""
    sums: dict[tuple[str, str], Scored] = {}
    for record, part in zip(records, scored, strict=True):
        key = (record.server_id, record.request_id)
        before = sums.get(key, Scored(drafts=0, accepted=0))
        sums[key] = Scored(drafts=before.drafts + part.drafts, accepted=before.accepted + part.accepted)
    return sums


@torch.no_grad()
def acceptance(
    draft: Draft, batch: RecordedBatch, sampling: Sampling, method: Method, num_speculative_tokens: int
) -> tuple[NDArray[np.int64], Array]:
    """The rows of the one text in `batch` that a block can begin with, [R], and how likely the draft is right there.

    Entry [j, r] is the probability that the j-th token of a block, where row r tells of it, is accepted, given that all
    before it were; [J, R]. An autoregressive draft's is the same for every j.
    """
    steps = draft_steps_of(draft, batch, batch.signal, num_speculative_tokens)
    by_step = [_accepted(step, batch.signal, sampling, method) for step in steps]
    rows_R = np.array(sorted(by_step[0]), np.int64)
    # 0 where a later step has no row: no block reaches there.
    accepted_JR = np.array([[accepted.get(row, 0.0) for row in rows_R.tolist()] for accepted in by_step])
    return rows_R, np.broadcast_to(accepted_JR, (num_speculative_tokens, len(rows_R)))


def _accepted(step: DraftStep, signal: TargetSignal, sampling: Sampling, method: Method) -> dict[int, float]:
    """Of one draft step, by the target's row."""
    target = signal.distribution
    assert isinstance(target, TopKTarget)
    accepted: dict[int, float] = {}
    num_ids = int(target.ids_BTK.max()) + 1
    for rows_N in torch.split(step.mask_BT.flatten().nonzero().squeeze(-1), ROWS_A_CHUNK):
        target_rows_N = rows_N + step.shift
        ids_NK = target.ids_BTK.flatten(0, 1)[target_rows_N]
        p_NK = served(target.log_probs_BTK.flatten(0, 1)[target_rows_N], sampling)
        hidden_ND = step.hidden_BTD.flatten(0, 1)[rows_N].to(step.head_WD.dtype)
        q_NW = probabilities(hidden_ND @ step.head_WD.T, sampling.temperature if method == "probabilistic" else 0.0)
        q_NK = _by_target_id(q_NW, step, num_ids).gather(1, ids_NK)
        accepted |= dict(zip(target_rows_N.tolist(), alpha(p_NK, q_NK).double().tolist(), strict=True))
    return accepted


def _by_target_id(q_NW: Tensor, step: DraftStep, num_ids: int) -> Tensor:
    """The draft's probabilities in the target's vocabulary: what a reduced one lacks is never drafted."""
    if step.draft_ids_W is None:
        return q_NW
    q_NV = q_NW.new_zeros(len(q_NW), max(num_ids, int(step.draft_ids_W[-1]) + 1))
    return q_NV.index_copy(1, step.draft_ids_W, q_NW)


def served(log_probs_NK: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that the request was sampled from, on the kept ids, [N, K]; they come by falling probability.

    At another temperature than 1 the mass of the ids that were not kept is unknown and taken as none. Penalties are
    left out: they move candidate and incumbent alike.
    """
    if sampling.temperature == 0:
        return F.one_hot(torch.zeros(len(log_probs_NK), dtype=torch.int64), log_probs_NK.shape[1]).to(log_probs_NK)
    is_plain = sampling.temperature == 1
    p_NK = log_probs_NK.exp() if is_plain else (log_probs_NK / sampling.temperature).softmax(-1)
    kept_NK = p_NK >= sampling.min_p * p_NK[:, :1]
    if sampling.top_k:
        kept_NK[:, sampling.top_k :] = False
    if sampling.top_k or sampling.min_p:
        p_NK = _renormalised(p_NK, kept_NK)
    if sampling.top_p < 1:
        before_NK = p_NK.cumsum(-1) - p_NK
        p_NK = _renormalised(p_NK, before_NK < sampling.top_p)
    return p_NK


def walk(rows_R: NDArray[np.int64], accepted_JR: Array) -> Scored:
    """Drafts and accepted draft tokens that are expected where each stretch of consecutive rows begins a block.

    A block that would reach beyond its stretch is left out: nobody recorded what the target says there.
    """
    stretches = np.split(accepted_JR, np.flatnonzero(np.diff(rows_R) != 1) + 1, axis=1)
    walked = np.array([_walk_stretch(stretch) for stretch in stretches])
    drafts, accepted = walked.sum(0).tolist()
    return Scored(drafts=drafts, accepted=accepted)


def _walk_stretch(accepted_JR: Array) -> tuple[float, float]:
    """Of one stretch: token j of the block that begins at row r is told of by row r + j."""
    num_blocks = max(0, accepted_JR.shape[1] - len(accepted_JR) + 1)
    accept_TK = np.stack([row_R[j : j + num_blocks] for j, row_R in enumerate(accepted_JR)], axis=1)
    counts = expected_blocks(accept_TK, num_blocks + 1)
    return counts.num_steps, counts.num_accepted


def _renormalised(p_NK: Tensor, kept_NK: Tensor) -> Tensor:
    p_NK = p_NK * kept_NK
    return p_NK / p_NK.sum(-1, keepdim=True)
