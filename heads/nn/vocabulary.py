"""A reduced draft vocabulary.

The module defines which of the target's ids a head proposes, and how a checkpoint stores them.

V = target vocabulary, W = draft vocabulary.
"""

from pathlib import Path

import torch
from torch import Tensor


def check_ids(draft_ids_W: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless a draft vocabulary's ids ascend within the target's vocabulary."""
    if len(draft_ids_W) > vocab_size:
        raise ValueError(
            f"a draft vocabulary of {len(draft_ids_W)} ids is larger than the target's {vocab_size}"
        )
    # They must ascend, because the loss and the metrics find a label's draft id with
    # `searchsorted`.
    if (
        not bool((draft_ids_W.diff() > 0).all())
        or draft_ids_W[0] < 0
        or draft_ids_W[-1] >= vocab_size
    ):
        raise ValueError(
            f"draft ids must ascend within 0..{vocab_size - 1}: d2t must hold offsets, not "
            f"target ids"
        )


def read_ids(tensors: dict[str, Tensor], vocab_size: int, source: Path) -> Tensor | None:
    """Take the maps out of a checkpoint's tensors, and read the target id of every draft id.

    None means all ids. t2d stores the same ids as d2t, as a mask. If it is present, the two must
    agree.
    """
    offset_W, kept_V = tensors.pop("d2t", None), tensors.pop("t2d", None)
    # Some trainers also write maps for the whole vocabulary.
    if offset_W is None or (len(offset_W) == vocab_size and not offset_W.any()):
        return None
    # E.g. d2t [0, 0, 3] stands for the target's ids [0, 1, 5].
    ids_W = offset_W + torch.arange(len(offset_W))
    if kept_V is not None and not torch.equal(kept_V.nonzero().flatten(), ids_W):
        raise ValueError(
            f"{source}: d2t and t2d contain different ids: d2t must be the target's id minus the "
            "draft's"
        )
    return ids_W


def id_maps(draft_ids_W: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """The checkpoint tensors for a reduced vocabulary.

    d2t, int64 [W], is the difference between target id and draft id, not the target id itself. t2d,
    bool [V], is true for the target ids that the head proposes.
    """
    ids_W = draft_ids_W.cpu()
    kept_V = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids_W, True)
    return {"d2t": ids_W - torch.arange(len(ids_W)), "t2d": kept_V}
