"""Find the largest logits of a row and its log-sum-exp in one pass over the logits, on a GPU.

    logits ─► kernel: maxima of groups, peaks and sums of chunks ─► the k groups with the largest maxima ─► k largest

These groups contain the k largest logits, or equal ones. Only these groups are read a second time:
2,048 of 128,000 logits. The float32 softmax of the whole row is never stored. There are few
kernels, because with one request, a step takes 5 ms and a launch 5 µs.

R = rows, V = vocabulary, K = kept ids, G = groups, C = chunks, M = members of the chosen groups, B
= requests, J = draft tokens of one request, N = draft tokens.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from redraft.online.engine.steps import Largest

GROUP, CHUNK = 64, 4096  # logits per group, and per program of the kernel
# Rows of float32 logits per block in `gather_probs` without Triton: 33 MB for a vocabulary of 128k.
ROWS_AT_ONCE = 64


def find_in_one_pass(logits_RV: Tensor, k: int) -> Largest:
    """Return the `k` largest logits of every row in float32, descending, with their ids.

    The result includes each row's log-sum-exp. The function queues its work and does not wait for
    it. Without Triton, or for a small vocabulary, PyTorch computes the result in more passes.
    """
    num_rows, vocab_size = logits_RV.shape
    k = min(k, vocab_size)
    kernels = find_kernels()
    # In a smaller vocabulary, the k groups would be more than half of the row, so reading only them
    # again would save little.
    if kernels is None or vocab_size < 2 * k * GROUP:
        values_RK, ids_RK = logits_RV.float().topk(k, dim=-1)
        return Largest(ids_RK.int(), values_RK, logits_RV.float().logsumexp(-1))
    # The kernels accept any stride between rows, but the logits of a row must be contiguous.
    logits_RV = logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()
    maxima_RG, log_sum_exp_R = _scan(kernels, logits_RV)
    # The last chunk may extend beyond the vocabulary. Its empty groups have a maximum of -inf, so
    # they are not chosen.
    groups_RK = maxima_RG.topk(k, dim=-1, sorted=False).indices
    logits_RM = maxima_RG.new_empty(num_rows, k * GROUP)
    kernels.read_groups[num_rows, k](
        logits_RV, logits_RV.stride(0), vocab_size, groups_RK, logits_RM, k, GROUP=GROUP
    )
    values_RK, places_RK = logits_RM.topk(k, dim=-1)
    ids_RK = torch.empty_like(places_RK, dtype=torch.int32)
    kernels.find_ids[(num_rows,)](
        groups_RK, places_RK, ids_RK, k, GROUP=GROUP, WIDTH=_next_power_of_two(k)
    )
    return Largest(ids_RK, values_RK, log_sum_exp_R)


def gather_probs(
    logits_BJV: Tensor, slots_N: Tensor, steps_N: Tensor, ids_N: Tensor, temperatures_N: Tensor
) -> Tensor:
    """Return softmax(logits[slot, step] / temperature)[id], [N]. A temperature of 0 counts as 1."""
    temperatures_N = torch.where(temperatures_N > 0, temperatures_N, 1.0)
    kernels = find_kernels()
    if kernels is not None and logits_BJV.stride(2) == 1:
        log_sum_exp_N = _scan_drafts(kernels, logits_BJV, slots_N, steps_N, temperatures_N)
        return (logits_BJV[slots_N, steps_N, ids_N].float() / temperatures_N - log_sum_exp_N).exp()
    found = []
    for part in torch.split(torch.arange(len(ids_N), device=ids_N.device), ROWS_AT_ONCE):
        logits_MV = logits_BJV[slots_N[part], steps_N[part]].float() / temperatures_N[part, None]
        chosen_M = logits_MV.gather(1, ids_N[part, None])[:, 0]
        found.append((chosen_M - logits_MV.logsumexp(-1)).exp())
    return torch.cat(found) if found else temperatures_N.new_zeros(0)


def _scan(kernels: Any, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum of every group, [R, G], and the log-sum-exp of every row."""
    num_rows, vocab_size = logits_RV.shape
    num_chunks = -(-vocab_size // CHUNK)
    maxima_RG = logits_RV.new_empty(num_rows, num_chunks * CHUNK // GROUP, dtype=torch.float32)
    peaks_RC, sums_RC = _allocate(logits_RV, num_rows, num_chunks)
    kernels.scan[num_rows, num_chunks](
        logits_RV,
        logits_RV.stride(0),
        vocab_size,
        maxima_RG,
        peaks_RC,
        sums_RC,
        num_chunks,
        GROUP=GROUP,
        CHUNK=CHUNK,
    )
    return maxima_RG, _join_chunks(kernels, peaks_RC, sums_RC)


def _scan_drafts(
    kernels: Any, logits_BJV: Tensor, slots_N: Tensor, steps_N: Tensor, temperatures_N: Tensor
) -> Tensor:
    num_drafts, vocab_size = len(slots_N), logits_BJV.shape[2]
    num_chunks = -(-vocab_size // CHUNK)
    peaks_NC, sums_NC = _allocate(temperatures_N, num_drafts, num_chunks)
    if num_drafts:  # Triton raises for an empty grid
        kernels.scan_drafts[num_drafts, num_chunks](
            logits_BJV, slots_N, steps_N, *logits_BJV.stride()[:2], temperatures_N, vocab_size, peaks_NC, sums_NC,
            num_chunks, CHUNK=CHUNK,
        )  # fmt: skip
    return _join_chunks(kernels, peaks_NC, sums_NC)


def _allocate(like: Tensor, num_rows: int, num_chunks: int) -> tuple[Tensor, Tensor]:
    """Allocate the peaks and sums of the chunks, both [R, C].

    They are separate, because Triton compiles a kernel again for an address that is not a multiple
    of 16.
    """
    shape = (num_rows, num_chunks)
    return (
        like.new_empty(shape, dtype=torch.float32),
        like.new_empty(shape, dtype=torch.float32),
    )


def _join_chunks(kernels: Any, peaks_RC: Tensor, sums_RC: Tensor) -> Tensor:
    """Return the log-sum-exp of every row, [R], from its chunks.

    Each chunk is given by its maximum and its sum of exp(logit - maximum).
    """
    num_rows, num_chunks = peaks_RC.shape
    totals_R = peaks_RC.new_empty(num_rows)
    if num_rows:
        kernels.join_chunks[(num_rows,)](
            peaks_RC, sums_RC, totals_R, num_chunks, WIDTH=_next_power_of_two(num_chunks)
        )
    return totals_R


def _next_power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


@functools.cache
def find_kernels() -> Any:
    if importlib.util.find_spec("triton") is None:
        return None
    from redraft.online.engine import scan_kernel

    return scan_kernel
