"""The largest logits of a row and its log-sum-exp in one pass over the logits, on a GPU.

    logits ─► kernel: maxima of groups, peaks and sums of chunks ─► the k groups with the largest maxima ─► k largest

These groups hold the k largest logits, or equal ones. Only they are read a second time: 2,048 logits of 128,000. The
float32 softmax of the whole row is never stored.

R = rows, V = vocabulary, K = kept ids, G = groups, C = chunks, M = members of the chosen groups.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from redraft.online.engine.steps import Largest

GROUP, CHUNK = 64, 4096
"""Logits of a group, and of one program of the kernel."""


def find_in_one_pass(logits_RV: Tensor, k: int) -> Largest:
    """The `k` largest logits of every row in float32, descending, with ids and the row's log-sum-exp.

    Queues work and waits for nothing. Without Triton, or for a small vocabulary, PyTorch does it in more passes.
    """
    vocab_size = logits_RV.shape[1]
    k = min(k, vocab_size)
    kernel = _find_kernel()
    # In a smaller vocabulary the k groups are more than half of the row, and the second read saves little.
    if kernel is None or vocab_size < 2 * k * GROUP:
        values_RK, ids_RK = logits_RV.float().topk(k, dim=-1)
        return Largest(ids_RK.int(), values_RK, logits_RV.float().logsumexp(-1))
    maxima_RG, log_sum_exp_R = _scan(kernel, logits_RV)
    # The last chunk may reach past the vocabulary. Its empty groups have the maximum -inf and lose.
    groups_RK = maxima_RG.topk(k, dim=-1, sorted=False).indices
    members_RM = (groups_RK[:, :, None] * GROUP + torch.arange(GROUP, device=logits_RV.device)).flatten(1)
    inside_RM = members_RM < vocab_size  # the last group may be shorter
    logits_RM = logits_RV.gather(1, members_RM.clamp(max=vocab_size - 1)).float()
    values_RK, places_RK = logits_RM.masked_fill(~inside_RM, -torch.inf).topk(k, dim=-1)
    return Largest(members_RM.gather(1, places_RK).int(), values_RK, log_sum_exp_R)


def _scan(kernel: Any, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of every group, [R, G], and the log-sum-exp of every row."""
    # The kernel takes any distance between rows, but the logits of one row side by side.
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    num_rows, vocab_size = logits_RV.shape
    num_chunks = -(-vocab_size // CHUNK)
    maxima_RG = logits_RV.new_empty(num_rows, num_chunks * CHUNK // GROUP, dtype=torch.float32)
    peaks_RC, sums_RC = logits_RV.new_empty(2, num_rows, num_chunks, dtype=torch.float32)
    kernel[num_rows, num_chunks](
        logits_RV, logits_RV.stride(0), vocab_size, maxima_RG, peaks_RC, sums_RC, num_chunks, GROUP=GROUP, CHUNK=CHUNK
    )
    # peak + log(sum) is the log-sum-exp of a chunk, [R, C]. An all -inf chunk has the sum 0 and adds nothing.
    return maxima_RG, (peaks_RC + sums_RC.log()).logsumexp(-1)


@functools.cache
def _find_kernel() -> Any:
    """The kernel; None where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    from redraft.online.engine.scan_kernel import scan

    return scan
