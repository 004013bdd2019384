"""The divergences by definition: the oracle of the fused loss and of the gradients in closed form.

M = rows, V = target vocabulary, W = draft vocabulary, K = kept top-k ids, X = outcomes compared.

Every divergence takes log-probabilities over the same X outcomes (`redraft.distill.loss.outcomes`),
prepared by `exact_log_probs` or `top_k_log_probs`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from redraft.distill.loss.choice import Divergence
from redraft.distill.loss.gradients import mixture
from redraft.distill.loss.outcomes import LOG_ZERO, draft_columns, top_k_buckets
from redraft.eval.acceptance import alpha

# ----------------------------------------------------------------------------------------------------
# log-probabilities


def log_probs(logits_MV: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature), in nats, float32 or wider, [M, V]."""
    wide_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32))
    return (wide_MV / temperature).log_softmax(-1).clamp_min(LOG_ZERO)


def exact_log_probs(
    p_logits_MV: Tensor,
    q_logits_MW: Tensor,
    temperature: float = 1.0,
    draft_ids_W: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(log p, log q) over the draft's vocabulary, [M, W] each.

    p is the full softmax, not renormalised.
    """
    log_p_MV = log_probs(p_logits_MV, temperature)
    log_p_MW = log_p_MV if draft_ids_W is None else log_p_MV[:, draft_ids_W]
    return log_p_MW, log_probs(q_logits_MW, temperature)


def top_k_log_probs(
    ids_MK: Tensor, log_p_MK: Tensor, q_logits_MW: Tensor, draft_ids_W: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(log p, log q) over the K kept ids and the tail, [M, K + 1] each, at temperature 1.

    Merging the tail into one outcome loses information: every divergence is a lower bound of the
    exact one, and alpha an upper bound.
    """
    columns_MK, reachable_MK = draft_columns(ids_MK, draft_ids_W, q_logits_MW.shape[-1])
    log_q_MW = log_probs(q_logits_MW)
    # The tail is summed from all ids outside the top k: 1 - (sum of the kept) would cancel for a
    # nearly certain draft.
    kept_MW = (
        torch.zeros_like(log_q_MW).scatter_add(1, columns_MK, reachable_MK.to(log_q_MW.dtype)) > 0
    )
    log_q_tail_M1 = log_q_MW.masked_fill(kept_MW, LOG_ZERO).logsumexp(-1, keepdim=True)
    log_q_MK = log_q_MW.gather(1, columns_MK).masked_fill(~reachable_MK, LOG_ZERO)
    return top_k_buckets(log_p_MK, reachable_MK, kept_MW.shape[-1]), torch.cat(
        [log_q_MK, log_q_tail_M1], -1
    )


# ----------------------------------------------------------------------------------------------------------
# divergences


def forward_kl(log_p_MX: Tensor, log_q_MX: Tensor) -> Tensor:
    """KL(p || q) = sum_v p (log p - log q), in nats, [M].

    Mass-covering.

    If p sums to P < 1, KL itself is infinite for every draft. Then this is the part a draft can
    change, minus the smallest value of this part: P KL(p / P || q) = sum_v p (log p - log q) - P
    log P.
    """
    p_MX = log_p_MX.exp()
    mass_M = p_MX.sum(-1)
    # `xlogy`, because the mass may be 0, and 0 log 0 is 0.
    return (p_MX * (log_p_MX - log_q_MX)).sum(-1) - torch.xlogy(mass_M, mass_M)


def reverse_kl(log_p_MX: Tensor, log_q_MX: Tensor) -> Tensor:
    """KL(q || p) = sum_v q (log q - log p), in nats, [M].

    Mode-seeking. At least -log P if p sums to P < 1.
    """
    # An outcome with p = 0 costs 1e4 nats per unit of q (LOG_ZERO), not infinity.
    return (log_q_MX.exp() * (log_q_MX - log_p_MX)).sum(-1)


def jensen_shannon(log_p_MX: Tensor, log_q_MX: Tensor, beta: float) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, in nats, [M].

    The generalised form of GKD (arXiv 2306.13649): after scaling, close to KL(p || q) for small
    beta and to KL(q || p) for large beta. Outside the draft vocabulary m = beta p, so p's mass
    there contributes -log beta per unit.
    """
    p_MX, q_MX = log_p_MX.exp(), log_q_MX.exp()
    log_m_MX = mixture(p_MX, q_MX, beta).log()
    kl_pm_M = (p_MX * (log_p_MX - log_m_MX)).sum(-1) - (1 - p_MX.sum(-1)) * math.log(beta)
    kl_qm_M = (q_MX * (log_q_MX - log_m_MX)).sum(-1)
    return beta * kl_pm_M + (1 - beta) * kl_qm_M


def total_variation(log_p_MX: Tensor, log_q_MX: Tensor) -> Tensor:
    """TV(p, q) = sum_v |p - q| / 2 = 1 - alpha, [M]: the rate of rejection itself."""
    return 1 - alpha(log_p_MX.exp(), log_q_MX.exp())


def neg_log_alpha(log_p_MX: Tensor, log_q_MX: Tensor) -> Tensor:
    """-log alpha = -log sum_v min(p, q), in nats, [M].

    Same optimum as TV, no vanishing gradient (arXiv 2602.23881).
    """
    alpha_M = alpha(log_p_MX.exp(), log_q_MX.exp())
    return -alpha_M.clamp_min(torch.finfo(alpha_M.dtype).tiny).log()


def lk_hybrid(log_p_MX: Tensor, log_q_MX: Tensor, eta: float) -> Tensor:
    """w KL(p || q) + (1 - w) TV(p, q), [M], where w = exp(-eta alpha) is held constant.

    From arXiv 2602.23881. KL leads while the draft is poor, TV once it is good.
    """
    tv_M = total_variation(log_p_MX, log_q_MX)
    # eta = 3: KL weighs 1 at alpha 0, 0.22 at 0.5, 0.07 at 0.9.
    kl_weight_M = torch.exp(-eta * (1 - tv_M)).detach()
    return kl_weight_M * forward_kl(log_p_MX, log_q_MX) + (1 - kl_weight_M) * tv_M


def cross_entropy(log_q_MW: Tensor, columns_M: Tensor, reachable_M: Tensor) -> Tensor:
    """-log q(label), in nats, [M].

    0 for a label outside the draft vocabulary, which still counts as a row.
    """
    return -log_q_MW.gather(1, columns_M[:, None]).squeeze(1) * reachable_M


def define(divergence: Divergence, log_p_MX: Tensor, log_q_MX: Tensor) -> Tensor:
    """A divergence of every row by its definition, [M].

    Not for cross_entropy, which needs labels instead of p.
    """
    more = {"jensen_shannon": (divergence.beta,), "lk_hybrid": (divergence.eta,)}.get(
        divergence.name, ()
    )
    value_M: Tensor = globals()[divergence.name](log_p_MX, log_q_MX, *more)
    return value_M
