"""The two sides of the fused divergence for one block of rows, in PyTorch operations.

These operations run on CPUs, and are the reference implementation for the kernels.

R = target rows of a block, M = draft rows compared with the block, V = target vocabulary, W = draft
vocabulary, K = kept top-k ids, X = outcomes compared (W, or K + a tail).

A block is small enough for its few float32 temporaries to stay in a CPU's cache. These temporaries
live in scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from redraft.distill.loss.gradients import Compared
from redraft.distill.loss.outcomes import LOG_ZERO, draft_columns, top_k_buckets
from redraft.eval.acceptance import alpha

BLOCK_ELEMENTS_CPU, BLOCK_ELEMENTS_GPU = 1 << 19, 1 << 26
"""Number of logits per block. On a CPU, the block's few float32 temporaries must fit into the
cache; a GPU needs large launches.
"""

# Masks a logit; finite, because a row whose logits are all masked must not become NaN.
FAR_BELOW = -1e30


class Scratch:
    """Named buffers that all chunks and blocks reuse.

    On a CPU, the page faults for new memory would take longer than computing the values.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return an uninitialised tensor. Calls with the same name and dtype share its memory."""
        size = math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or held.numel() < size:
            del held
            self._held.pop((name, dtype), None)  # free a smaller buffer first
            held = self._held[name, dtype] = torch.empty(size, dtype=dtype, device=device)
        return held[:size].view(*shape)


def block_rows(columns: int, device: torch.device) -> int:
    elements = BLOCK_ELEMENTS_CPU if device.type == "cpu" else BLOCK_ELEMENTS_GPU
    # For the 128,256 columns of Llama 3: 4 rows (2 MiB in float32) on a CPU, 523 rows on a GPU.
    return max(1, elements // columns)


def blocks(matrix: Tensor) -> Iterator[slice]:
    rows = block_rows(matrix.shape[1], matrix.device)
    return (slice(first, first + rows) for first in range(0, len(matrix), rows))


def _softmax(scratch: Scratch, name: str, z_MV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (softmax [M, V], log sum exp [M, 1], argmax [M, 1]), with a single pass of exp."""
    p_MV = torch.softmax(z_MV, -1, out=scratch(name, z_MV.shape, z_MV.dtype, z_MV.device))
    best_M1 = _argmax(z_MV)
    # p = exp z / sum exp z, so log sum exp z = z - log p for every outcome. The most probable
    # outcome is used, because its p is never 0.
    return p_MV, z_MV.gather(1, best_M1) - p_MV.gather(1, best_M1).log(), best_M1


def softmax_and_log(
    scratch: Scratch, temperature: float, name: str, logits_MV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (softmax of logits / temperature, its logarithm, the argmax).

    The first two use the scratch memory named `name` and `log name`.
    """
    z_MV = _wide(scratch, temperature, name, logits_MV)
    p_MV, log_sum_exp_M1, best_M1 = _softmax(scratch, name, z_MV)
    # log p reuses the memory of z, so each side needs two buffers: `name` and `log name`.
    return p_MV, z_MV.sub_(log_sum_exp_M1).clamp_min_(LOG_ZERO), best_M1


def _argmax(z_MV: Tensor, group: int = 64) -> Tensor:
    """Return the first argmax of every row, [M, 1].

    The result is computed in two levels, because on a CPU `amax` is vectorised but `argmax` is not.
    """
    if z_MV.shape[1] % group:
        return z_MV.argmax(-1, keepdim=True)
    # Find the first group (v = 64 columns) with the largest logit, then the first position in it,
    # as `argmax` does.
    z_MGv = z_MV.view(len(z_MV), -1, group)
    best_M1 = z_MGv.amax(-1).argmax(-1, keepdim=True)
    z_M1v = z_MGv.gather(1, best_M1[..., None].expand(-1, 1, group))
    return z_M1v.argmax(-1).add_(best_M1, alpha=group)


def _wide(scratch: Scratch, temperature: float, name: str, logits_MV: Tensor) -> Tensor:
    dtype = torch.promote_types(logits_MV.dtype, torch.float32)
    z_MV = scratch(f"log {name}", logits_MV.shape, dtype, logits_MV.device).copy_(logits_MV)
    return z_MV if temperature == 1 else z_MV.div_(temperature)


# ----------------------------------------------------------------------------------------------------
# the target's side

# Maps the gradient at the outcomes [M, X] to the gradient at the logits [M, W].
AtLogits = Callable[[Tensor], Tensor]


class ExactBlock:
    """The target's logits for the rows of a chunk or a block.

    They cover the target's vocabulary or, after `on`, only the ids in the draft's vocabulary. The
    first `compare` computes p and log p, in scratch memory.
    """

    def __init__(
        self,
        scratch: Scratch,
        temperature: float,
        logits_RW: Tensor,
        log_sum_exp_R1: Tensor | None = None,
    ) -> None:
        """Store the logits, and `log_sum_exp_R1` if they do not cover the whole vocabulary."""
        self._scratch, self._temperature = scratch, temperature
        self.logits_RW, self.log_sum_exp_R1 = logits_RW, log_sum_exp_R1
        self.num_rows, self.width = logits_RW.shape
        self._probabilities: tuple[Tensor, Tensor] | None = None

    def on(self, draft_ids_W: Tensor | None) -> ExactBlock:
        """Return the same rows restricted to the draft's ids.

        Blocks can then have more rows, because the rows are shorter.
        """
        if draft_ids_W is None:
            return self
        logits_RV, sums_R1 = self.logits_RW, self.log_sum_exp_R1
        if sums_R1 is None:
            sums_R1 = torch.cat([self._sum_exp(logits_RV[rows]) for rows in blocks(logits_RV)])
        kept_RW = self._scratch(
            "kept", (len(logits_RV), len(draft_ids_W)), logits_RV.dtype, logits_RV.device
        )
        torch.index_select(logits_RV, 1, draft_ids_W, out=kept_RW)
        return ExactBlock(self._scratch, self._temperature, kept_RW, sums_R1)

    def _sum_exp(self, logits_RV: Tensor) -> Tensor:
        """Return the log sum exp of logits / temperature, [R, 1]."""
        z_RV = _wide(self._scratch, self._temperature, "p", logits_RV)
        largest_R1 = z_RV.amax(-1, keepdim=True)
        return z_RV.sub_(largest_R1).exp_().sum(-1, keepdim=True).log_().add_(largest_R1)

    def select_rows(self, rows: slice) -> ExactBlock:
        sums_R1 = None if self.log_sum_exp_R1 is None else self.log_sum_exp_R1[rows]
        return ExactBlock(self._scratch, self._temperature, self.logits_RW[rows], sums_R1)

    def compare(
        self, place_M: Tensor | None, logits_MW: Tensor, draft_ids_W: Tensor | None
    ) -> tuple[Compared, Tensor, AtLogits]:
        """Return (distributions over the draft's vocabulary, alpha_greedy [M], map to the logits).

        The map takes a gradient [M, X] to [M, W]; here, it is the identity. Draft row m is compared
        with target row `place_M[m]`, or with target row m if `place_M` is None.
        """
        p_RW, log_p_RW = self._probabilities = self._probabilities or self._compute()
        # Without a gather, all draft steps share p and log p. A gradient may overwrite q, but not
        # p.
        p_MW, log_p_MW = (p_RW, log_p_RW) if place_M is None else (p_RW[place_M], log_p_RW[place_M])
        q_MW, log_q_MW, best_M1 = softmax_and_log(self._scratch, self._temperature, "q", logits_MW)
        least_MW = self._scratch("least", q_MW.shape, q_MW.dtype, q_MW.device)
        compared = Compared(p_MW, log_p_MW, q_MW, log_q_MW, alpha(p_MW, q_MW, out=least_MW))
        return compared, p_MW.gather(1, best_M1).squeeze(1), lambda dz_MW: dz_MW

    def _compute(self) -> tuple[Tensor, Tensor]:
        """Return (p, log p), [R, W] each.

        Over the draft's ids, p is not renormalised and may sum to less than 1.
        """
        if self.log_sum_exp_R1 is None:
            return softmax_and_log(self._scratch, self._temperature, "p", self.logits_RW)[:2]
        log_p_RW = _wide(self._scratch, self._temperature, "p", self.logits_RW)
        log_p_RW.sub_(self.log_sum_exp_R1).clamp_min_(LOG_ZERO)
        p_RW = self._scratch("p", log_p_RW.shape, log_p_RW.dtype, log_p_RW.device)
        return torch.exp(log_p_RW, out=p_RW), log_p_RW


class TopKBlock:
    """The target's kept ids and their log-probabilities for the rows of a chunk or a block."""

    def __init__(self, scratch: Scratch, ids_RK: Tensor, log_probs_RK: Tensor) -> None:
        self._scratch, self._ids_RK, self._log_probs_RK = scratch, ids_RK, log_probs_RK
        self.num_rows, self.width = ids_RK.shape

    def on(self, draft_ids_W: Tensor | None) -> TopKBlock:
        """Return the block itself: `compare` looks up the kept ids among the draft's ids."""
        return self

    def select_rows(self, rows: slice) -> TopKBlock:
        return TopKBlock(self._scratch, self._ids_RK[rows], self._log_probs_RK[rows])

    def compare(
        self, place_M: Tensor | None, logits_MW: Tensor, draft_ids_W: Tensor | None
    ) -> tuple[Compared, Tensor, AtLogits]:
        """Return (distributions over the kept ids and a tail, alpha_greedy [M], map to the logits).

        The map takes a gradient [M, X], X = K + 1, to [M, W]. Draft row m is compared with target
        row `place_M[m]`, or with target row m if `place_M` is None.
        """
        ids_MK, log_p_MK = self._ids_RK, self._log_probs_RK
        if place_M is not None:
            ids_MK, log_p_MK = ids_MK[place_M], log_p_MK[place_M]
        # An id outside the draft vocabulary gets column 0 and p = q = 0, so it adds nothing there.
        columns_MK, reachable_MK = draft_columns(ids_MK, draft_ids_W, logits_MW.shape[1])

        # Gather the draft's logit of each kept id. The tail's logit is the log sum exp of all other
        # logits, so mask the kept ids' logits.
        z_MW = _wide(self._scratch, 1.0, "q", logits_MW)
        best_M1 = _argmax(z_MW)
        z_MK = z_MW.gather(1, columns_MK).masked_fill_(~reachable_MK, FAR_BELOW)
        # The mask is added: an id outside the draft vocabulary has another id's column, and adds 0
        # there.
        z_MW.scatter_add_(1, columns_MK, reachable_MK * z_MW.new_tensor(FAR_BELOW))
        tail_MW, z_tail_M1, _ = _softmax(self._scratch, "q", z_MW)
        z_MX = torch.cat([z_MK, z_tail_M1], -1)
        log_q_MX = z_MX.log_softmax(-1).clamp_min_(LOG_ZERO)

        log_p_MX = top_k_buckets(log_p_MK.to(z_MW.dtype), reachable_MK, z_MW.shape[1])
        p_MX, q_MX = log_p_MX.exp(), log_q_MX.exp()
        # If the draft's token is in the tail, its p is unknown and counts as 0.
        alpha_greedy_M = (p_MX[:, :-1] * (columns_MK == best_M1)).sum(-1)

        def at_logits(dz_MX: Tensor) -> Tensor:
            # The tail's gradient is distributed over the ids by their share of the tail, which is 0
            # for a kept id. The result overwrites `tail_MW`, so this function can be called only
            # once.
            return tail_MW.mul_(dz_MX[:, -1:]).scatter_add_(1, columns_MK, dz_MX[:, :-1])

        return (
            Compared(p_MX, log_p_MX, q_MX, log_q_MX, alpha(p_MX, q_MX)),
            alpha_greedy_M,
            at_logits,
        )
