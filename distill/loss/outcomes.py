"""The outcomes over which target and draft are compared, and the logarithm of zero.

    exact signal    the whole vocabulary, or the ids kept by a reduced draft vocabulary
    top-k signal    the target's top-k ids and one tail bucket for all others

Over these outcomes, p may sum to less than one. The rest of p lies on ids outside the draft
vocabulary, where q = 0. alpha counts this mass as certain rejection; p is never renormalised.

M = rows, W = draft vocabulary, K = kept top-k ids.
"""

import torch
from torch import Tensor

LOG_ZERO = -1e4
"""Replaces log 0, e.g. for a logit of -inf. exp(LOG_ZERO) is 0 in every dtype, and so is 0 *
LOG_ZERO, while 0 * -inf is NaN.
"""


def top_k_buckets(log_p_MK: Tensor, reachable_MK: Tensor, draft_vocabulary: int) -> Tensor:
    """Return log p of the kept ids and of the tail, [M, K + 1].

    A kept id outside the draft vocabulary gets LOG_ZERO, and so does the tail if the kept ids cover
    the whole draft vocabulary.
    """
    # Log-probabilities are rounded by this much, so a smaller tail cannot be distinguished from
    # none.
    rounding = torch.finfo(log_p_MK.dtype).eps
    log_p_tail_M1 = (1 - log_p_MK.exp().sum(-1, keepdim=True)).clamp_min(rounding).log()
    no_tail_M1 = reachable_MK.sum(-1, keepdim=True) == draft_vocabulary
    return torch.cat(
        [
            log_p_MK.masked_fill(~reachable_MK, LOG_ZERO),
            log_p_tail_M1.masked_fill(no_tail_M1, LOG_ZERO),
        ],
        -1,
    ).clamp_min(LOG_ZERO)


def draft_columns(
    ids: Tensor, draft_ids_W: Tensor | None, draft_vocabulary: int
) -> tuple[Tensor, Tensor]:
    """Return (column of each target id in the draft's logits, whether it has a column).

    An id without a column gets column 0.
    """
    if draft_ids_W is None:
        reachable = (ids >= 0) & (ids < draft_vocabulary)
        # -1 marks an entry without a recorded token.
        return ids * reachable, reachable
    # Draft ids [3, 5, 9] and ids [5, 4, 12]: insertion points [1, 1, 3], clamped to [1, 1, 2]. Only
    # 5 is a draft id, so the columns are [1, 0, 0]. Without the clamp, 12 would index past the end.
    columns = torch.searchsorted(draft_ids_W, ids).clamp(max=draft_vocabulary - 1)
    reachable = draft_ids_W[columns] == ids
    return columns * reachable, reachable
