"""Compare rows of the fused divergence with PyTorch operations, compiled into a few loops.

The compiled operations run on CPUs with `--loop.compile`.

R = target rows of a block, M = draft rows compared with the block, W = draft vocabulary.

The operations of `distill.loss.blocks` make a dozen passes over [M, W], and each is too short to
use all cores well. Compiled, they need only four passes.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from redraft.distill.loss.blocks import ExactBlock
from redraft.distill.loss.choice import Divergence
from redraft.distill.loss.gradients import GRADIENTS, Compared
from redraft.distill.loss.outcomes import LOG_ZERO
from redraft.heads.nn.compilation import compile_here


def compare_rows(
    block: ExactBlock,
    place_M: Tensor | None,
    logits_MW: Tensor,
    scale_M: Tensor,
    divergence: Divergence,
    cap: float | None = None,
) -> Tensor:
    """Return divergence, alpha and alpha_greedy of every draft row compared with a block, [3, M].

    The block must contain its log sum exp. The logits are overwritten by `scale_M` times the
    gradient with respect to the logits before `cap`. `place_M` is None if draft row m is compared
    with row m of the block.
    """
    assert block.log_sum_exp_R1 is not None
    values_3M: Tensor = _compiled_rows(divergence, cap)(
        block.logits_RW, block.log_sum_exp_R1, place_M, logits_MW, scale_M / divergence.temperature
    )
    return values_3M


def log_sum_exp(logits_RV: Tensor, temperature: float) -> Tensor:
    """Return the log sum exp of logits / temperature, [R, 1]."""
    return _compiled_sums(temperature)(logits_RV)


def _compile(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # `fullgraph` is not set, because it would stop a training run at the ninth graph instead of
    # continuing uncompiled.
    return compile_here(function, dynamic=True)


@functools.cache
def _compiled_sums(temperature: float) -> Callable[[Tensor], Tensor]:
    def sums(logits_RW: Tensor) -> Tensor:
        return _wide(logits_RW, temperature).logsumexp(-1, keepdim=True)

    return _compile(sums)


@functools.cache
def _compiled_rows(divergence: Divergence, cap: float | None) -> Callable[..., Tensor]:
    def rows(
        p_logits_RW: Tensor,
        p_sum_R1: Tensor,
        place_M: Tensor | None,
        logits_MW: Tensor,
        scale_M: Tensor,
    ) -> Tensor:
        if place_M is not None:
            p_logits_RW, p_sum_R1 = p_logits_RW[place_M], p_sum_R1[place_M]
        log_p_MW = (_wide(p_logits_RW, divergence.temperature) - p_sum_R1).clamp_min(LOG_ZERO)
        p_MW = log_p_MW.exp()
        z_MW = _wide(logits_MW, divergence.temperature)
        most_M1 = z_MW.amax(-1, keepdim=True)
        exp_MW = (z_MW - most_M1).exp()
        sum_M1 = exp_MW.sum(-1, keepdim=True)
        log_q_MW = (z_MW - (most_M1 + sum_M1.log())).clamp_min(LOG_ZERO)
        q_MW = exp_MW / sum_M1
        alpha_M = torch.minimum(p_MW, q_MW).sum(-1)
        alpha_greedy_M = p_MW.gather(1, _first_argmax(z_MW, most_M1)).squeeze(1)
        loss_M, dz_MW = GRADIENTS[divergence.name](
            divergence, Compared(p_MW, log_p_MW, q_MW, log_q_MW, alpha_M)
        )
        if cap is not None:
            dz_MW = dz_MW * (1 - (z_MW * (divergence.temperature / cap)).square())
        logits_MW.copy_(dz_MW * scale_M[:, None])
        return torch.stack([loss_M, alpha_M, alpha_greedy_M])

    return _compile(rows)


def _wide(logits_MW: Tensor, temperature: float) -> Tensor:
    z_MW = logits_MW.to(torch.promote_types(logits_MW.dtype, torch.float32))
    return z_MW if temperature == 1 else z_MW / temperature


def _first_argmax(z_MW: Tensor, most_M1: Tensor) -> Tensor:
    """Return the first argmax of every row, [M, 1].

    It is computed as the smallest column that has the maximum, because a minimum is vectorised, but
    `argmax` is not.
    """
    places_W = torch.arange(z_MW.shape[1], dtype=torch.int32, device=z_MW.device)
    return torch.where(z_MW == most_M1, places_W, z_MW.shape[1] - 1).amin(-1, keepdim=True).long()
