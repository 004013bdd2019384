"""What verification accepts of a draft, row by row of a text that the target wrote: where the forecast is defined.

N = rows, V = target vocabulary, W = draft vocabulary. p = target, q = draft, x = the token of the text.

Speculative sampling (Leviathan et al., arXiv 2211.17192) draws v from the proposal r and accepts it with probability
min(1, p(v) / r(v)). The draft's token is the text's *and* accepted with probability min(p(x), r(x)), and the text
has x there with probability p(x). So, given the text,

    P(x was drafted and accepted) = min(1, r(x) / p(x))

r is what the engine draws from: q itself at the request's temperature where drafts are sampled (vLLM's
`draft_sample_method: probabilistic`), all its mass on argmax q where they are greedy (vLLM's default, and always at
temperature 0), on the one token looked up for an n-gram. The expected counts of whole answers follow from these
rows: `eval.acceptance.expected_blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.acceptance import alpha, alpha_greedy, probabilities
from eval.rows import ROWS_A_CHUNK
from heads.draft import DraftStep, ExactTarget

NOTHING = -1
"""In the place of a proposed token where none is."""


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The tokens of a text and where in a flattened [B, T] batch the target predicts each."""

    target_rows_N: Tensor
    ids_N: Tensor
    length: int
    """T, the rows of one sequence of the batch."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """One draft step at every label, float32 on the CPU, [N] each."""

    accept_N: Tensor
    """P(the label was drafted and accepted), given that it is the text's."""
    alpha_N: Tensor
    """sum_v min(p, q), at the temperature of the text."""
    alpha_greedy_N: Tensor
    """p(argmax q), at the temperature of the text."""


Proposals = DraftStep | Tensor
"""What proposes at the labels: a draft's step, or the token that was looked up for each, `NOTHING` where there is none.
"""


def verify_rows(
    proposals: Sequence[tuple[Proposals, bool]], distribution: ExactTarget, labels: Labels, temperature: float
) -> list[Verified]:
    """Each of `proposals` (with whether it is sampled from q) beside the target, whose logits are computed once a row.

    Never more than ROWS_A_CHUNK rows of the vocabulary are held.
    """
    results_S3N = torch.zeros(len(proposals), 3, len(labels.ids_N))
    for chunk_N in torch.split(torch.arange(len(labels.ids_N), device=labels.ids_N.device), ROWS_A_CHUNK):
        target_N, ids_N = labels.target_rows_N[chunk_N], labels.ids_N[chunk_N]
        p_NV = probabilities(distribution.hidden_BTD.flatten(0, 1)[target_N] @ distribution.head_VD.T, temperature)
        for row, (proposed, is_sampled) in enumerate(proposals):
            if isinstance(proposed, Tensor):
                rates_3N = _looked_up(proposed[chunk_N], p_NV, ids_N)
            else:
                rates_3N = _drafted(proposed, is_sampled, p_NV, target_N, ids_N, labels.length, temperature)
            results_S3N[row][:, chunk_N.cpu()] = rates_3N.cpu()
    return [Verified(accept_N=a, alpha_N=b, alpha_greedy_N=c) for a, b, c in results_S3N]


def _looked_up(tokens_N: Tensor, p_NV: Tensor, ids_N: Tensor) -> Tensor:
    """accept, alpha and alpha_greedy of one proposed token a row, [3, N]."""
    rate_N = p_NV.gather(-1, tokens_N.clamp(min=0)[:, None]).squeeze(-1).masked_fill(tokens_N == NOTHING, 0)
    return torch.stack([(tokens_N == ids_N).float(), rate_N, rate_N])


def _drafted(
    step: DraftStep,
    is_sampled: bool,
    p_NV: Tensor,
    target_N: Tensor,
    ids_N: Tensor,
    length: int,
    temperature: float,
) -> Tensor:
    """accept, alpha and alpha_greedy of a draft step, [3, N]; 0 where the sequence has no row that far back."""
    has_row_N = target_N % length >= step.shift
    hidden_ND = step.hidden_BTD.flatten(0, 1)[target_N - step.shift * has_row_N].to(step.head_WD.dtype)
    q_NW = probabilities(hidden_ND @ step.head_WD.T, temperature)
    best_N = q_NW.argmax(-1)
    if step.draft_ids_W is None:
        p_NW, token_N, q_of_label_N = p_NV, best_N, q_NW.gather(-1, ids_N[:, None]).squeeze(-1)
    else:
        p_NW, token_N = p_NV[:, step.draft_ids_W], step.draft_ids_W[best_N]
        q_of_label_N = _of_label(q_NW, step.draft_ids_W, ids_N)
    p_of_label_N = p_NV.gather(-1, ids_N[:, None]).squeeze(-1)
    is_sampled = is_sampled and temperature > 0
    accept_N = (q_of_label_N / p_of_label_N).nan_to_num(0).clamp(max=1) if is_sampled else (token_N == ids_N).float()
    return torch.stack([accept_N, alpha(p_NW, q_NW), alpha_greedy(p_NW, q_NW)]) * has_row_N


def _of_label(q_NW: Tensor, draft_ids_W: Tensor, ids_N: Tensor) -> Tensor:
    """q of each label, [N]; 0 where the draft's vocabulary lacks it."""
    at_N = torch.searchsorted(draft_ids_W, ids_N).clamp(max=len(draft_ids_W) - 1)
    known_N = draft_ids_W[at_N] == ids_N
    return q_NW.gather(-1, at_N[:, None]).squeeze(-1) * known_N
