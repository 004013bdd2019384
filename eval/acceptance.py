"""Acceptance of one draft token, computed from the draft's distribution and the target's.

N = rows, V = vocabulary. p = target, q = draft.

    alpha           acceptance probability of a draft token drawn from q:
                    sum_v min(p, q) = 1 - TV(p, q)
    alpha_greedy    the same for the most probable draft token: p(argmax q)
"""

import torch
from torch import Tensor


def probabilities(logits_NV: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature), float32 or wider, [N, V].

    At temperature 0, each row is one-hot at its first maximum.
    """
    if temperature == 0:
        # This is the limit of the softmax, computed explicitly because dividing by 0 would give
        # NaN.
        return torch.nn.functional.one_hot(logits_NV.argmax(-1), logits_NV.shape[-1]).to(
            torch.float32
        )
    # bfloat16 has 8 significant bits, so each probability would be off by up to 0.4%.
    wide_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return (wide_NV / temperature).softmax(-1)


def alpha(p_NV: Tensor, q_NV: Tensor, out: Tensor | None = None) -> Tensor:
    """sum_v min(p, q), [N]: the acceptance rate of speculative sampling.

    See Leviathan et al., arXiv 2211.17192. `out`, [N, V], is scratch memory that can be reused
    across calls.
    """
    return torch.minimum(p_NV, q_NV, out=out).sum(-1)


def alpha_greedy(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """p(argmax q), [N]: the acceptance rate of greedy drafting.

    This is the definition. The forecast and the fused loss already have argmax q and look up p
    there. Tests compare both with this function.
    """
    return p_NV.gather(-1, q_NV.argmax(-1, keepdim=True)).squeeze(-1)
