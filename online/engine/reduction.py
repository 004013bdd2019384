"""Reduce the target's logits to the top-k of every row and the log-sum-exp of the whole row.

Hidden states are reduced too.

R = logit rows of several steps, S = their draft tokens, V = vocabulary, K = kept top-k ids, G =
groups of logits, C = candidates for the top-k, H = tokens, L = hidden states per token, D = size of
a state.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redraft.online.engine.request_log import Rows
from redraft.online.engine.steps import EngineStep, Largest


@dataclass(frozen=True, kw_only=True)
class ReducedSteps:
    """The rows and draft tokens of several steps, concatenated in order."""

    rows: Rows
    draft_ids_S: NDArray[np.int32]
    draft_probs_S: NDArray[np.float32]


class ScratchMemory:
    """CPU memory for large temporaries, reused between calls.

    New memory from the operating system would arrive page by page, which would take longer than the
    whole reduction.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def get(self, name: str, logits: Sequence[Tensor]) -> Tensor | None:
        """Return a float32 buffer [R, V] for all `logits`.

        Return None on a GPU, where torch caches memory itself.
        """
        if not logits[0].is_cpu:
            return None
        num_rows, vocab_size = sum(map(len, logits)), logits[0].shape[1]
        if name not in self._kept or self._kept[name].numel() < num_rows * vocab_size:
            self._kept[name] = torch.empty(num_rows * vocab_size)
        return self._kept[name][: num_rows * vocab_size].view(num_rows, vocab_size)


def reduce_steps(
    steps: Sequence[EngineStep], top_k: int, scratch: ScratchMemory
) -> ReducedSteps | None:
    """Reduce the steps, with one copy to the host per kind of tensor. None if no step has rows."""
    largest = [step.largest for step in steps if step.largest is not None]
    logits = [step.logits_RV for step in steps if step.logits_RV is not None]
    ids = [step.draft_ids_S for step in steps if step.draft_ids_S is not None]
    if not (largest or logits):
        return None
    ids = ids or [torch.zeros(0, dtype=torch.int32)]
    probs_S = np.ones(sum(map(len, ids)), np.float32)
    if any(step.draft_probs_S is not None for step in steps):
        probs_S = (
            torch.cat([_get_draft_probs(step) for step in steps if step.draft_ids_S is not None])
            .cpu()
            .numpy()
        )
    return ReducedSteps(
        rows=_join(largest) if largest else reduce_logits(logits, top_k, scratch),
        draft_ids_S=torch.cat(ids).int().cpu().numpy(),
        draft_probs_S=probs_S,
    )


def copy_through(x: Tensor, pinned_N: Tensor) -> Tensor:
    """Copy a GPU tensor to host memory through a buffer of pinned bytes.

    The copy runs piece by piece, and is several times as fast as `cpu`, which copies to pageable
    memory.
    """
    made = torch.empty(x.shape, dtype=x.dtype)
    pieces = (
        torch.split(each.contiguous().view(-1).view(torch.uint8), len(pinned_N))
        for each in (x, made)
    )
    for source, piece in zip(*pieces, strict=True):
        pinned_N[: len(source)].copy_(source, non_blocking=True)
        if x.is_cuda:
            torch.cuda.current_stream(x.device).synchronize()
        piece.copy_(pinned_N[: len(source)])
    return made


def _join(largest: Sequence[Largest]) -> Rows:
    # Join them first, because each `.cpu()` waits for the GPU.
    ids_RK, logits_RK, log_sum_exp_R = (
        torch.cat(parts).cpu() for parts in zip(*largest, strict=True)
    )
    return Rows(
        topk_ids_RK=ids_RK.numpy(),
        topk_log_probs_RK=(logits_RK - log_sum_exp_R[:, None]).numpy(),
        log_sum_exp_R=log_sum_exp_R.numpy(),
    )


def _get_draft_probs(step: EngineStep) -> Tensor:
    assert step.draft_ids_S is not None
    if step.draft_probs_S is None:  # this step was drafted greedily, unlike others in the batch
        return torch.ones_like(step.draft_ids_S, dtype=torch.float32)
    return step.draft_probs_S.float()


@torch.inference_mode()
def reduce_logits(logits: Sequence[Tensor], top_k: int, scratch: ScratchMemory) -> Rows:
    """Return each row's `top_k` log-probabilities at temperature 1, and its log-sum-exp."""
    # On a CPU, the scratch memory is float32, and `cat` converts. Nothing returned below is a view
    # of it.
    logits_RV = torch.cat(list(logits), out=scratch.get("logits", logits)).float()
    logits_RK, ids_RK = find_largest(logits_RV, min(top_k, logits_RV.shape[-1]))
    # On a CPU, `softmax` takes half the time of `logsumexp`. The log-sum-exp is then logit -
    # log(probability) of any entry; the largest is used, because its probability is at least 1 / V
    # and its logarithm is finite.
    probs_RV = torch.softmax(logits_RV, -1, out=scratch.get("probs", logits))
    log_sum_exp_R = logits_RK[:, 0] - probs_RV.gather(1, ids_RK[:, :1]).squeeze(1).log()
    return Rows(
        topk_ids_RK=ids_RK.int().cpu().numpy(),
        topk_log_probs_RK=(logits_RK - log_sum_exp_R[:, None]).cpu().numpy(),
        log_sum_exp_R=log_sum_exp_R.cpu().numpy(),
    )


def find_largest(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the `k` largest values of every row in descending order, in float32, and their ids.

    On a CPU, this takes a quarter of the time of `topk`. The logits are divided into groups: the k
    groups with the largest maxima contain the k largest logits (or equal ones), so only members of
    these groups are sorted.
    """
    vocab_size = logits_RV.shape[1]
    # The group size balances the two selections: first V / group_size maxima, then k * group_size
    # candidates. E.g. V = 128,256 and k = 32 gives groups of 44, 2,914 maxima, then 1,408
    # candidates plus a remainder of 40.
    group_size = math.isqrt(vocab_size // (2 * k))
    if group_size < 2 or not logits_RV.is_cpu:
        found = logits_RV.topk(k, dim=-1)
        return found.values, found.indices
    num_groups = vocab_size // group_size
    num_grouped = group_size * num_groups
    # A group is every num_groups-th logit instead of a contiguous run, so that maxima are taken
    # over whole vectors.
    maxima_RG = logits_RV[:, :num_grouped].view(-1, group_size, num_groups).amax(1)
    groups_RK = _find_largest_ids(maxima_RG, torch.arange(num_groups), k)
    candidates_RC = (
        groups_RK[:, None] + torch.arange(0, num_grouped, num_groups)[:, None]
    ).flatten(1)
    ungrouped_RC = torch.arange(num_grouped, vocab_size).expand(len(logits_RV), -1)
    candidates_RC = torch.cat([candidates_RC, ungrouped_RC], dim=1)
    ids_RK = _find_largest_ids(logits_RV.gather(1, candidates_RC), candidates_RC, k)
    return logits_RV.gather(1, ids_RK), ids_RK


def _find_largest_ids(values_RC: Tensor, ids_RC: Tensor, k: int) -> Tensor:
    """Return the ids of the `k` largest values in every row.

    They are ordered by descending value, and by ascending id among equal values. Value and id are
    packed into one integer, because numpy sorts integers with vector instructions.
    """
    bits_RC = values_RC.numpy().view(np.int32)
    # The bit patterns of negative floats decrease as the value rises. Flipping these bits gives all
    # floats the same order, and ~ reverses it.
    falling_RC = ~(bits_RC ^ ((bits_RC >> 31) & 0x7FFFFFFF))
    keys_RC = (falling_RC.astype(np.int64) << 32) | ids_RC.numpy()
    keys_RK = np.sort(np.partition(keys_RC, k - 1, axis=1)[:, :k], axis=1)
    return torch.from_numpy(keys_RK & 0xFFFFFFFF)
