"""Divergences between the target p and the draft q, one row a position, with the maths visible and no reduction.

B = batch, T = tokens, M = rows, V = target vocabulary, W = draft vocabulary, K = kept top-k ids, X = outcomes compared.

Every divergence takes log-probabilities over the same X outcomes, prepared by one of two functions:

`exact_log_probs`   the whole vocabulary, or the ids that a reduced draft vocabulary keeps
`top_k_log_probs`   the target's top-k ids and one tail bucket for all others

The target's mass on these outcomes may be less than one: what is missing is on ids that the draft cannot propose. There
q = 0, so that mass counts as a certain rejection in alpha and never renormalises p.

These are the definitions. Training computes them in `distill.fused`, by the gradients of `distill.gradients`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.acceptance import alpha

LOG_ZERO = -1e4
"""Stands for log 0, as of a logit of -inf: its exp is 0 in every dtype, and 0 * LOG_ZERO is 0 where 0 * -inf is NaN."""


# ---------------------------------------------------------------------------------------------------- log-probabilities


def log_probs(logits_MV: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature), in nats, float32 or wider, [M, V]."""
    wide_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
    return (wide_MV / temperature).log_softmax(-1).clamp_min(LOG_ZERO)


def exact_log_probs(
    p_logits_MV: Tensor, q_logits_MW: Tensor, temperature: float = 1.0, draft_ids_W: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(log p, log q) over the draft's vocabulary, [M, W] each; p is the full softmax's, unrenormalised."""
    log_p_MV = log_probs(p_logits_MV, temperature)
    log_p_MW = log_p_MV if draft_ids_W is None else log_p_MV[:, draft_ids_W]
    return log_p_MW, log_probs(q_logits_MW, temperature)


def top_k_log_probs(
    ids_MK: Tensor, log_p_MK: Tensor, q_logits_MW: Tensor, draft_ids_W: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(log p, log q) over the K kept ids and the tail, [M, K + 1] each, at temperature 1.

    Merging the tail loses information, so every divergence is a lower bound of the exact one, and alpha an upper bound.
    """
    columns_MK, reachable_MK = draft_columns(ids_MK, draft_ids_W, q_logits_MW.shape[-1])
    log_q_MW = log_probs(q_logits_MW)
    # A tail bucket that sums its members cannot cancel; 1 - sum of the kept would, where the draft is nearly certain.
    kept_MW = torch.zeros_like(log_q_MW).scatter_add(1, columns_MK, reachable_MK.to(log_q_MW.dtype)) > 0
    log_q_tail_M1 = log_q_MW.masked_fill(kept_MW, LOG_ZERO).logsumexp(-1, keepdim=True)
    log_q_MK = log_q_MW.gather(1, columns_MK).masked_fill(~reachable_MK, LOG_ZERO)
    return top_k_buckets(log_p_MK, reachable_MK, kept_MW.shape[-1]), torch.cat([log_q_MK, log_q_tail_M1], -1)


def top_k_buckets(log_p_MK: Tensor, reachable_MK: Tensor, draft_vocabulary: int) -> Tensor:
    """log p over the kept ids within the draft's reach and the tail, [M, K + 1]."""
    # The log-probabilities carry rounding of this size, so a smaller tail cannot be told from none.
    rounding = torch.finfo(log_p_MK.dtype).eps
    log_p_tail_M1 = (1 - log_p_MK.exp().sum(-1, keepdim=True)).clamp_min(rounding).log()
    no_tail_M1 = reachable_MK.sum(-1, keepdim=True) == draft_vocabulary
    return torch.cat(
        [log_p_MK.masked_fill(~reachable_MK, LOG_ZERO), log_p_tail_M1.masked_fill(no_tail_M1, LOG_ZERO)], -1
    ).clamp_min(LOG_ZERO)


def draft_columns(ids: Tensor, draft_ids_W: Tensor | None, draft_vocabulary: int) -> tuple[Tensor, Tensor]:
    """(column of each target id in the draft's logits, whether it has one); column 0 where it has none."""
    if draft_ids_W is None:
        reachable = (ids >= 0) & (ids < draft_vocabulary)
        return ids * reachable, reachable
    columns = torch.searchsorted(draft_ids_W, ids).clamp(max=draft_vocabulary - 1)
    reachable = draft_ids_W[columns] == ids
    return columns * reachable, reachable


# ---------------------------------------------------------------------------------------------------------- divergences


def forward_kl(log_p_MX: Tensor, log_q_MX: Tensor) -> Tensor:
    """KL(p || q) = sum_v p (log p - log q), in nats, [M]. Mass-covering.

    Where p sums to P < 1, KL itself is infinite for every draft; then this is the part a draft can change, less its
    minimum: P KL(p / P || q) = sum_v p (log p - log q) - P log P.
    """
    p_MX = log_p_MX.exp()
    mass_M = p_MX.sum(-1)
    return (p_MX * (log_p_MX - log_q_MX)).sum(-1) - torch.xlogy(mass_M, mass_M)


def reverse_kl(log_p_MX: Tensor, log_q_MX: Tensor) -> Tensor:
    """KL(q || p) = sum_v q (log q - log p), in nats, [M]. Mode-seeking; at least -log P where p sums to P < 1."""
    return (log_q_MX.exp() * (log_q_MX - log_p_MX)).sum(-1)


def jensen_shannon(log_p_MX: Tensor, log_q_MX: Tensor, beta: float) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, in nats, [M].

    GKD's generalised form (arXiv 2306.13649): near KL(p || q) for small beta, near KL(q || p) for large, after scaling.
    Mass of p out of the draft's reach has m = beta p and contributes -log beta for each unit.
    """
    p_MX, q_MX = log_p_MX.exp(), log_q_MX.exp()
    log_m_MX = mixture(p_MX, q_MX, beta).log()
    kl_pm_M = (p_MX * (log_p_MX - log_m_MX)).sum(-1) - (1 - p_MX.sum(-1)) * math.log(beta)
    kl_qm_M = (q_MX * (log_q_MX - log_m_MX)).sum(-1)
    return beta * kl_pm_M + (1 - beta) * kl_qm_M


def mixture(p_MX: Tensor, q_MX: Tensor, beta: float) -> Tensor:
    """beta p + (1 - beta) q, kept above zero, so that outcomes of probability zero contribute nothing."""
    return (beta * p_MX + (1 - beta) * q_MX).clamp_min(torch.finfo(p_MX.dtype).tiny)


def total_variation(log_p_MX: Tensor, log_q_MX: Tensor) -> Tensor:
    """TV(p, q) = sum_v |p - q| / 2 = 1 - alpha, [M]: the rate of rejection itself."""
    return 1 - alpha(log_p_MX.exp(), log_q_MX.exp())


def neg_log_alpha(log_p_MX: Tensor, log_q_MX: Tensor) -> Tensor:
    """-log alpha = -log sum_v min(p, q), in nats, [M]: TV's aim without its vanishing gradient (arXiv 2602.23881)."""
    alpha_M = alpha(log_p_MX.exp(), log_q_MX.exp())
    return -alpha_M.clamp_min(torch.finfo(alpha_M.dtype).tiny).log()


def lk_hybrid(log_p_MX: Tensor, log_q_MX: Tensor, eta: float) -> Tensor:
    """w KL(p || q) + (1 - w) TV(p, q), [M], where w = exp(-eta alpha) is held constant (arXiv 2602.23881).

    KL leads while the draft is poor, TV once it is good.
    """
    tv_M = total_variation(log_p_MX, log_q_MX)
    kl_weight_M = torch.exp(-eta * (1 - tv_M)).detach()
    return kl_weight_M * forward_kl(log_p_MX, log_q_MX) + (1 - kl_weight_M) * tv_M


def cross_entropy(log_q_MW: Tensor, columns_M: Tensor, reachable_M: Tensor) -> Tensor:
    """-log q(label), in nats, [M]; 0 for a label out of the draft's reach, which teaches nothing but still counts."""
    return -log_q_MW.gather(1, columns_M[:, None]).squeeze(1) * reachable_M


# --------------------------------------------------------------------------------------------------------------- choice

DIVERGENCES = (
    "forward_kl",
    "reverse_kl",
    "jensen_shannon",
    "total_variation",
    "neg_log_alpha",
    "lk_hybrid",
    "cross_entropy",
)
"""All but the last learn from the target's distribution; the last from the text."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """What a draft minimises."""

    name: str = "forward_kl"
    """forward_kl, reverse_kl, jensen_shannon, total_variation, neg_log_alpha or lk_hybrid, all against the target's
    distribution, or cross_entropy, against the text."""
    temperature: float = 1.0
    """Divides both sides' logits. A top-k target allows 1 only."""
    beta: float = 0.5
    """Weight of the target in jensen_shannon's mixture, between 0 and 1."""
    eta: float = 3.0
    """How soon lk_hybrid turns from KL to total variation as alpha grows."""

    def __post_init__(self) -> None:
        if self.name not in DIVERGENCES:
            raise ValueError(f"unknown divergence {self.name!r}; known: {', '.join(DIVERGENCES)}")
        if not self.temperature > 0:
            raise ValueError(f"the divergence's temperature must be positive, not {self.temperature}")
        if not 0 < self.beta < 1:
            raise ValueError(
                f"beta must lie between 0 and 1, not {self.beta}; at the ends use forward_kl or reverse_kl"
            )
        if not self.eta >= 0:
            raise ValueError(f"eta must not be negative, and is {self.eta}")

    def __call__(self, log_p_MX: Tensor, log_q_MX: Tensor) -> Tensor:
        """The divergence of every row, [M]; not for cross_entropy, which asks for labels instead of p."""
        match self.name:
            case "forward_kl":
                return forward_kl(log_p_MX, log_q_MX)
            case "reverse_kl":
                return reverse_kl(log_p_MX, log_q_MX)
            case "jensen_shannon":
                return jensen_shannon(log_p_MX, log_q_MX, self.beta)
            case "total_variation":
                return total_variation(log_p_MX, log_q_MX)
            case "neg_log_alpha":
                return neg_log_alpha(log_p_MX, log_q_MX)
            case "lk_hybrid":
                return lk_hybrid(log_p_MX, log_q_MX, self.eta)
        raise ValueError(f"{self.name} takes labels: call it directly")
