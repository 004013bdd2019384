"""Divergences between target p and draft q, with their gradients in closed form.

The gradients are with respect to the draft's logits.

M = rows, X = outcomes compared (see `distill.loss.outcomes`). The draft's logits z give q =
softmax(z).

A divergence D(q) has dD/dz = q (g - sum_v q g) with g = dD/dq. Each function below computes it in a
form in which no large terms cancel. Autograd would make a dozen more passes over [M, X]. To save
memory, the functions may overwrite q and log q, but not p and log p, which other draft steps share.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from redraft.distill.loss.choice import Divergence


class Compared(NamedTuple):
    """Both distributions for the rows of a block, and alpha."""

    p_MX: Tensor
    log_p_MX: Tensor
    q_MX: Tensor
    log_q_MX: Tensor
    alpha_M: Tensor


Gradient = tuple[Tensor, Tensor]  # (divergence [M], gradient at the draft's logits [M, X])


def forward_kl(c: Compared) -> Gradient:
    """KL(p || q) = sum_v p (log p - log q), in nats.

    It is mass-covering. dz = P q - p. If p sums to P < 1, KL itself is infinite for every draft.
    The value is then the part that depends on the draft, minus its minimum: P KL(p / P || q) =
    sum_v p (log p - log q) - P log P.
    """
    # g = -p / q, so q g = -p and sum q g = -P.
    mass_M = c.p_MX.sum(-1)
    # log q is no longer needed: reuse its memory for p (log q - log p)
    cross_M = c.log_q_MX.sub_(c.log_p_MX).mul_(c.p_MX).sum(-1)
    return -cross_M - torch.xlogy(mass_M, mass_M), c.q_MX.mul_(mass_M[:, None]).sub_(c.p_MX)


def reverse_kl(c: Compared) -> Gradient:
    """KL(q || p) = sum_v q (log q - log p), in nats.

    It is mode-seeking. dz = q (log q - log p - KL(q || p)).
    """
    # g = log q - log p + 1. The 1 cancels out, because sum q g contains it too.
    log_ratio_MX = c.log_q_MX.sub_(c.log_p_MX)
    kl_M = (c.q_MX * log_ratio_MX).sum(-1)
    return kl_M, log_ratio_MX.sub_(kl_M[:, None]).mul_(c.q_MX)


def jensen_shannon(c: Compared, beta: float) -> Gradient:
    """beta KL(p || m) + (1 - beta) KL(q || m), with m = beta p + (1 - beta) q.

    It comes from GKD (arXiv 2306.13649). dz = (1 - beta) q (log q - log m - KL(q || m)); the
    derivatives of m in the two KLs cancel. Outside the draft vocabulary, m = beta p, so every unit
    of p's mass there contributes -log beta.
    """
    # g = (1 - beta) (log q - log m + 1) - (1 - beta), because (beta p + (1 - beta) q) / m = 1
    log_m_MX = mixture(c.p_MX, c.q_MX, beta).log_()
    kl_pm_M = (c.log_p_MX - log_m_MX).mul_(c.p_MX).sum(-1) - (1 - c.p_MX.sum(-1)) * math.log(beta)
    # log m is no longer needed: reuse its memory for the ratio
    log_ratio_MX = torch.sub(c.log_q_MX, log_m_MX, out=log_m_MX)
    kl_qm_M = (c.q_MX * log_ratio_MX).sum(-1)
    dz_MX = log_ratio_MX.sub_(kl_qm_M[:, None]).mul_(c.q_MX).mul_(1 - beta)
    return beta * kl_pm_M + (1 - beta) * kl_qm_M, dz_MX


def mixture(p_MX: Tensor, q_MX: Tensor, beta: float) -> Tensor:
    """beta p + (1 - beta) q, clamped above zero.

    The clamp keeps the log finite for an outcome with probability zero.
    """
    return (beta * p_MX + (1 - beta) * q_MX).clamp_min(torch.finfo(p_MX.dtype).tiny)


def total_variation(c: Compared) -> Gradient:
    """TV(p, q) = sum_v |p - q| / 2 = 1 - alpha, the rejection rate itself. dz = -d alpha."""
    return 1 - c.alpha_M, alpha_gradient(c).neg_()


def neg_log_alpha(c: Compared) -> Gradient:
    """-log alpha, in nats.

    It has the same optimum as TV, but its gradient does not vanish (arXiv 2602.23881).
    dz = -d alpha / alpha.
    """
    alpha_M = c.alpha_M.clamp_min(torch.finfo(c.alpha_M.dtype).tiny)
    return -alpha_M.log(), alpha_gradient(c).div_(-alpha_M[:, None])


def lk_hybrid(c: Compared, eta: float) -> Gradient:
    """w KL(p || q) + (1 - w) TV(p, q), where w = exp(-eta alpha) is held constant.

    It comes from arXiv 2602.23881. KL dominates while the draft is poor, and TV once it is good.
    dz = w dKL - (1 - w) d alpha.
    """
    weight_M = torch.exp(-eta * c.alpha_M)
    d_tv_MX = alpha_gradient(c).mul_(
        weight_M[:, None] - 1
    )  # computed before `forward_kl`, which overwrites q
    kl_M, d_kl_MX = forward_kl(c)
    return weight_M * kl_M + (1 - weight_M) * (1 - c.alpha_M), d_kl_MX.mul_(weight_M[:, None]).add_(
        d_tv_MX
    )


def alpha_gradient(c: Compared) -> Tensor:
    """d alpha / dz = q (below - sum_v q below), [M, X].

    `below` is 1 if q < p, 0 if q > p, and 1/2 if they are equal. All terms have the order of
    magnitude of alpha, so neg_log_alpha can divide by alpha even if it is tiny.
    """
    # The factor is 1, 1/2 or 0, because autograd and the oracle also halve the gradient of `minimum`
    # at a tie.
    below_q_MX = torch.sub(c.p_MX, c.q_MX).sign_().add_(1).mul_(0.5).mul_(c.q_MX)
    return below_q_MX.sub_(c.q_MX * below_q_MX.sum(-1, keepdim=True))


def cross_entropy(
    q_MW: Tensor, log_q_MW: Tensor, columns_M: Tensor, reachable_M: Tensor
) -> Gradient:
    """-log q(label), in nats. dz = q - one_hot(label).

    Value and gradient are 0 for a label outside the draft vocabulary.
    """
    loss_M = -log_q_MW.gather(1, columns_M[:, None]).squeeze(1) * reachable_M
    minus_one_M1 = -torch.ones_like(loss_M)[:, None]
    return loss_M, q_MW.scatter_add_(1, columns_M[:, None], minus_one_M1).mul_(reachable_M[:, None])


GRADIENTS: dict[str, Callable[[Divergence, Compared], Gradient]] = {
    "forward_kl": lambda _, compared: forward_kl(compared),
    "reverse_kl": lambda _, compared: reverse_kl(compared),
    "jensen_shannon": lambda d, compared: jensen_shannon(compared, d.beta),
    "total_variation": lambda _, compared: total_variation(compared),
    "neg_log_alpha": lambda _, compared: neg_log_alpha(compared),
    "lk_hybrid": lambda d, compared: lk_hybrid(compared, d.eta),
}
