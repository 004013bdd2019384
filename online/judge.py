"""How a draft does on held-out requests, teacher-forced on what the target answered: what the gate compares.

R = rows of a text, N = rows of a chunk, K = kept top-k ids, V = vocabulary.

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

from eval.acceptance import alpha, probabilities
from eval.rows import ROWS_A_CHUNK
from heads.draft import Draft, TopKTarget
from online.gate import Scored
from online.records import Record, Sampling, TrainingSequence, training_sequences
from online.replay import batches_of

Array = NDArray[np.float64]
Method = Literal["greedy", "probabilistic"]


def score(
    draft: Draft, records: Sequence[Record], *, num_speculative_tokens: int, method: Method, sequence_length: int
) -> list[Scored]:
    """Expected drafts and accepted draft tokens of every record, were its request drafted by `draft`."""
    scored = []
    for record in records:
        text = training_sequences(record, branches=False)[0]
        accepted_R = np.zeros(0)
        if len(text.rows_R):
            accepted_R = acceptance(draft, text, record.sampling, method, sequence_length)
        scored.append(
            expected_blocks(text.rows_R[len(text.rows_R) - len(accepted_R) :], accepted_R, num_speculative_tokens)
        )
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
def acceptance(draft: Draft, text: TrainingSequence, sampling: Sampling, method: Method, sequence_length: int) -> Array:
    """Probability that the draft's token is accepted, for every row of the text (of a longer one the last), [R]."""
    (batch,) = batches_of([text], num_batches=1, sequence_length=sequence_length, seed=0)
    (step,) = draft.draft_steps(batch, batch.signal)
    assert draft.is_autoregressive, "the one step tells of the j-th draft token at the row j further on"
    target = batch.signal.distribution
    assert isinstance(target, TopKTarget)
    accepted = []
    for rows_N in torch.split(step.mask_BT.flatten().nonzero().squeeze(-1), ROWS_A_CHUNK):
        ids_NK = target.ids_BTK.flatten(0, 1)[rows_N]
        p_NK = served(target.log_probs_BTK.flatten(0, 1)[rows_N], sampling)
        logits_NV = step.hidden_BTD.flatten(0, 1)[rows_N] @ step.head_WD.T
        q_NV = probabilities(logits_NV, sampling.temperature if method == "probabilistic" else 0.0)
        accepted.append(alpha(p_NK, q_NV.gather(1, ids_NK)))
    return torch.cat(accepted).double().cpu().numpy()


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


def expected_blocks(rows_R: NDArray[np.int64], accepted_R: Array, num_speculative_tokens: int) -> Scored:
    """Drafts and accepted draft tokens that are expected where each stretch of consecutive rows begins a block.

    A block that would reach beyond its stretch is left out: nobody recorded what the target says there.
    """
    stretches = np.split(accepted_R, np.flatnonzero(np.diff(rows_R) != 1) + 1)
    walked = np.array([_walk(stretch, num_speculative_tokens) for stretch in stretches])
    drafts, accepted = walked.sum(0).tolist()
    return Scored(drafts=drafts, accepted=accepted)


def _walk(accepted_R: Array, k: int) -> tuple[float, float]:
    """A block that begins at row r and accepts j tokens is followed by one at r + j + 1."""
    begins_R = np.zeros(len(accepted_R) + 2)
    begins_R[0] = 1.0
    drafts = accepted = 0.0
    for r in range(len(accepted_R) - k + 1):
        at_least_k = np.cumprod(accepted_R[r : r + k])
        exactly = -np.diff([1.0, *at_least_k, 0.0])
        drafts += begins_R[r]
        accepted += begins_R[r] * at_least_k.sum()
        begins_R[r + 1 : r + k + 2] += begins_R[r] * exactly
    return drafts, accepted


def _renormalised(p_NK: Tensor, kept_NK: Tensor) -> Tensor:
    p_NK = p_NK * kept_NK
    return p_NK / p_NK.sum(-1, keepdim=True)
