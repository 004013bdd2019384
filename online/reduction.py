"""What is kept of the target's logits: the largest of every row, and the log-sum-exp of all.

R = logit rows of several steps, S = their draft tokens, V = vocabulary, K = kept top-k ids, G = groups of logits,
C = candidates for the top-k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from online.request_log import Rows
from online.steps import Step


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is kept of several steps, one after the other."""

    rows: Rows
    draft_ids_S: NDArray[np.int32]
    draft_probs_S: NDArray[np.float32]


class Room:
    """Memory of the CPU for what is large and short-lived, kept from call to call.

    Fresh memory would come from the kernel page by page, and take longer than all that is done with it.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def of(self, name: str, logits: Sequence[Tensor]) -> Tensor | None:
        """Float32 [R, V] for all `logits` together; None for a GPU, whose memory torch keeps itself."""
        if not logits[0].is_cpu:
            return None
        num_rows, vocab_size = sum(map(len, logits)), logits[0].shape[1]
        if name not in self._kept or self._kept[name].numel() < num_rows * vocab_size:
            self._kept[name] = torch.empty(num_rows * vocab_size)
        return self._kept[name][: num_rows * vocab_size].view(num_rows, vocab_size)


def seen(steps: Sequence[Step], top_k: int, room: Room) -> Seen | None:
    """What is kept of the steps that verified drafts, None where none did; every tensor is fetched in one call."""
    logits = [step.logits_RV for step in steps if step.logits_RV is not None]
    ids = [step.draft_ids_S for step in steps if step.draft_ids_S is not None]
    if not logits:
        return None
    probs_S = np.ones(sum(map(len, ids)), np.float32)
    if any(step.draft_probs_S is not None for step in steps):
        probs_S = torch.cat([_draft_probs(step) for step in steps if step.draft_ids_S is not None]).cpu().numpy()
    return Seen(
        rows=reduce(logits, top_k, room),
        draft_ids_S=torch.cat(ids).int().cpu().numpy(),
        draft_probs_S=probs_S,
    )


def _draft_probs(step: Step) -> Tensor:
    assert step.draft_ids_S is not None
    if step.draft_probs_S is None:  # drafted greedily, while others of these steps were not
        return torch.ones_like(step.draft_ids_S, dtype=torch.float32)
    return step.draft_probs_S.float()


@torch.inference_mode()
def reduce(logits: Sequence[Tensor], top_k: int, room: Room) -> Rows:
    """Of all rows: the largest `top_k` as log-probabilities at temperature 1, and the log-sum-exp."""
    logits_RV = torch.cat(list(logits), out=room.of("logits", logits)).float()
    logits_RK, ids_RK = largest(logits_RV, min(top_k, logits_RV.shape[-1]))
    # On a CPU `softmax` takes half the time of `logsumexp`.
    probs_RV = torch.softmax(logits_RV, -1, out=room.of("probs", logits))
    log_sum_exp_R = logits_RK[:, 0] - probs_RV.gather(1, ids_RK[:, :1]).squeeze(1).log()
    return Rows(
        topk_ids_RK=ids_RK.int().cpu().numpy(),
        topk_log_probs_RK=(logits_RK - log_sum_exp_R[:, None]).cpu().numpy(),
        log_sum_exp_R=log_sum_exp_R.cpu().numpy(),
    )


def largest(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest of every row, falling, and their ids; float32.

    On a CPU in a quarter of `topk`'s time. The logits are divided into groups: the k groups with the largest maxima
    hold the k largest logits, or equal ones.
    """
    vocab_size = logits_RV.shape[1]
    group_size = math.isqrt(vocab_size // (2 * k))  # about as many maxima to select from as candidates
    if group_size < 2 or not logits_RV.is_cpu:
        found = logits_RV.topk(k, dim=-1)
        return found.values, found.indices
    num_groups = vocab_size // group_size
    num_grouped = group_size * num_groups
    # Every num_groups-th logit is of one group, so that maxima are taken of whole vectors.
    maxima_RG = logits_RV[:, :num_grouped].view(-1, group_size, num_groups).amax(1)
    groups_RK = _ids_of_largest(maxima_RG, torch.arange(num_groups), k)
    candidates_RC = (groups_RK[:, None] + torch.arange(0, num_grouped, num_groups)[:, None]).flatten(1)
    ungrouped_RC = torch.arange(num_grouped, vocab_size).expand(len(logits_RV), -1)
    candidates_RC = torch.cat([candidates_RC, ungrouped_RC], dim=1)
    ids_RK = _ids_of_largest(logits_RV.gather(1, candidates_RC), candidates_RC, k)
    return logits_RV.gather(1, ids_RK), ids_RK


def _ids_of_largest(values_RC: Tensor, ids_RC: Tensor, k: int) -> Tensor:
    """The ids of the `k` largest of every row, by falling value, equal ones by rising id.

    numpy sorts integers with vector instructions, so value and id become one.
    """
    bits_RC = values_RC.numpy().view(np.int32)
    falling_RC = ~(bits_RC ^ ((bits_RC >> 31) & 0x7FFFFFFF))  # negative floats are ordered by falling bits
    keys_RC = (falling_RC.astype(np.int64) << 32) | ids_RC.numpy()
    keys_RK = np.sort(np.partition(keys_RC, k - 1, axis=1)[:, :k], axis=1)
    return torch.from_numpy(keys_RK & 0xFFFFFFFF)
