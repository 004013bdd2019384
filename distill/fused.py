"""The divergence of draft and target from their hidden states and heads, never holding [tokens, vocabulary] of either.

S = draft steps, M = labelled rows of a draft step, N = rows of the target, C = target rows of a chunk, D = hidden,
V = target vocabulary, W = draft vocabulary, K = kept top-k ids.

    for each chunk of target rows                    p_logits_CV = hidden @ head.T            one matmul
        for each draft step with rows in it          z_MW        = hidden @ head.T            one matmul
        for each block of target rows (cache-sized)  p, log p                                 once for all steps
            for each draft step                      z_MW       <- weight * dD/dz             closed form, float32
        for each draft step                          d_hidden    = z_MW @ head                one matmul
                                                     d_head     += z_MW.T @ hidden            one matmul, if trained

The gradient is computed on the way, so backward only scales it. Matmuls run in the dtype of the hidden states (or of
autocast); the softmax and all sums in float32, or float64 where the inputs are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distill.gradients import GRADIENTS, Compared, cross_entropy
from distill.losses import LOG_ZERO, Divergence, draft_columns, top_k_buckets
from eval.acceptance import alpha

CHUNK_TOKENS = 256
"""Target rows whose logits, and those of all steps, are held at once. Fewer make the matmuls slower (16 by 2-3x), more
only cost memory."""

BLOCK_ELEMENTS_CPU, BLOCK_ELEMENTS_GPU = 1 << 19, 1 << 26
"""Numbers worked on at once. On a CPU the block's few float32 temporaries stay in cache; a GPU wants large launches."""

FAR_BELOW = -1e30
"""Added to a logit, takes its outcome out of a softmax, and is finite, so that nothing left is still not NaN."""


# ------------------------------------------------------------------------------------------------------------ interface


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """The labelled rows of one draft step."""

    hidden_MD: Tensor
    head_WD: Tensor
    """The same tensor object in every step that shares a head, so that its gradient is accumulated once."""
    target_row_M: Tensor
    """int64, the target's row that each is compared with."""
    weight_M: Tensor
    draft_ids_W: Tensor | None = None
    """int64, the target id of every draft id, ascending, where the draft vocabulary is reduced."""


@dataclass(frozen=True, kw_only=True)
class ExactRows:
    """The target's last hidden states and head."""

    hidden_ND: Tensor
    head_VD: Tensor


@dataclass(frozen=True, kw_only=True)
class TopKRows:
    """The target's top-k ids and their log-probabilities under the full softmax at temperature 1."""

    ids_NK: Tensor
    log_probs_NK: Tensor


@dataclass(frozen=True, kw_only=True)
class FusedResult:
    loss: Tensor
    """Scalar with gradient: sum over steps and rows of weight * divergence / normaliser."""
    loss_S: Tensor
    """Unweighted sum of the divergence over each step's rows; this and the rest are detached."""
    alpha_S: Tensor
    """Sum of alpha, at the divergence's temperature; with a top-k target an upper bound, the tail being one outcome."""
    alpha_greedy_S: Tensor
    """Sum of p(argmax q); with a top-k target a lower bound, 0 where argmax q was not recorded."""
    count_S: Tensor
    """Rows of each step."""


def fused_linear_divergence(
    drafts: Sequence[DraftRows],
    target: ExactRows | TopKRows,
    divergence: Divergence,
    *,
    normaliser: float | Tensor,
    labels_N: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> FusedResult:
    """sum_S sum_M weight * D(target, draft) / normaliser, differentiable in every draft's hidden states and head.

    `normaliser` is the global count of valid tokens. `labels_N`, the text's next token at each target row, is what
    cross_entropy learns from.

    Raises:
        ValueError: the vocabularies do not fit, a top-k target with a temperature, or cross_entropy without labels.
    """
    _check(drafts, target, divergence, labels_N)
    heads = list({id(draft.head_WD): draft.head_WD for draft in drafts}.values())
    hiddens = [draft.hidden_MD for draft in drafts]
    request = _Request(drafts, target, divergence, normaliser, labels_N, chunk_tokens, torch.is_grad_enabled())
    loss, sums_S3 = _FusedLinearDivergence.apply(request, *hiddens, *heads)  # type: ignore[no-untyped-call]
    loss_S, alpha_S, alpha_greedy_S = sums_S3.unbind(1)
    count_S = torch.tensor([len(hidden_MD) for hidden_MD in hiddens], device=loss.device)
    return FusedResult(loss=loss, loss_S=loss_S, alpha_S=alpha_S, alpha_greedy_S=alpha_greedy_S, count_S=count_S)


def _check(
    drafts: Sequence[DraftRows], target: ExactRows | TopKRows, divergence: Divergence, labels_N: Tensor | None
) -> None:
    if divergence.name == "cross_entropy" and labels_N is None:
        raise ValueError("cross_entropy learns from the text: pass its labels")
    if isinstance(target, TopKRows) and divergence.temperature != 1:
        raise ValueError(
            f"temperature {divergence.temperature} needs the target's whole distribution: top-k log-probabilities were "
            "taken at temperature 1 and their tail cannot be rescaled; use temperature 1 or an exact target"
        )
    for draft in drafts:
        vocabulary = draft.head_WD.shape[0]
        if draft.draft_ids_W is not None and len(draft.draft_ids_W) != vocabulary:
            raise ValueError(f"the draft's head has {vocabulary} rows for {len(draft.draft_ids_W)} draft ids")
        if draft.draft_ids_W is None and isinstance(target, ExactRows) and vocabulary != target.head_VD.shape[0]:
            raise ValueError(
                f"the draft's head has {vocabulary} rows and the target's {target.head_VD.shape[0]}: "
                "pad or transplant the draft's vocabulary, or give the target id of every draft id"
            )


# ------------------------------------------------------------------------------------------------------------- the loop


class _Scratch:
    """Memory that all chunks and blocks use in turn.

    Freed, so large a tensor goes back to the kernel, and the page faults of the next cost a CPU more than its numbers.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised, and the same memory for the same name."""
        size = math.prod(shape)
        held = self._held.get((name, dtype))
        if held is None or held.numel() < size:
            held = self._held[name, dtype] = torch.empty(size, dtype=dtype, device=device)
        return held[:size].view(*shape)

    def product(self, name: str, left: Tensor, right: Tensor) -> Tensor:
        """left @ right."""
        out = self(name, (left.shape[0], right.shape[1]), left.dtype, left.device)
        return torch.mm(left, right, out=out)


@dataclass(frozen=True)
class _Request:
    drafts: Sequence[DraftRows]
    target: ExactRows | TopKRows
    divergence: Divergence
    normaliser: float | Tensor
    labels_N: Tensor | None
    chunk_tokens: int
    grad_enabled: bool
    scratch: _Scratch = field(default_factory=_Scratch)


class _FusedLinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: _Request, *leaves: Tensor) -> tuple[Tensor, Tensor]:
        needed = [request.grad_enabled and needs for needs in ctx.needs_input_grad[1:]]
        gradients = [_Gradient(leaf) if needs else None for leaf, needs in zip(leaves, needed, strict=True)]
        steps, target = _steps(request, leaves, gradients), _in_matmul_dtype(request.target)
        with torch.autocast(leaves[0].device.type, enabled=False):
            _run(request, target, steps)
        ctx.gradients = [None if gradient is None else gradient.finish() for gradient in gradients]
        sums_S3 = torch.stack([step.values_3M.sum(1) for step in steps])
        ctx.mark_non_differentiable(sums_S3)
        return torch.stack([(step.scale_M * step.values_3M[0]).sum() for step in steps]).sum(), sums_S3

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = ctx.gradients
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return None, *(None if gradient is None else gradient * d_loss for gradient in gradients)
        # Given away, not copied: a head's gradient is as large as the head.
        ctx.gradients = None
        return None, *(None if gradient is None else gradient.mul_(d_loss) for gradient in gradients)


class _Gradient:
    """The sum of a leaf's gradients, in its own dtype, so that a float32 master head sums in float32."""

    def __init__(self, leaf: Tensor) -> None:
        self.total = torch.empty_like(leaf)
        self.is_begun = False

    def set_rows(self, rows_M: Tensor, value_MD: Tensor) -> None:
        """Each row once at most."""
        if not self.is_begun:
            self.total.zero_()
        self.is_begun = True
        self.total[rows_M] = value_MD.to(self.total.dtype)

    def add_product(self, dz_WM: Tensor, hidden_MD: Tensor) -> None:
        """total += dz @ hidden, where the total may be wider than the matmul."""
        if self.total.dtype == dz_WM.dtype:
            torch.addmm(self.total, dz_WM, hidden_MD, beta=int(self.is_begun), out=self.total)
        else:
            for block in _blocks(self.total):  # a sum of two types makes a copy of one: let it be small
                product = dz_WM[block] @ hidden_MD
                _ = self.total[block].add_(product) if self.is_begun else self.total[block].copy_(product)
        self.is_begun = True

    def finish(self) -> Tensor:
        return self.total if self.is_begun else self.total.zero_()


@dataclass(frozen=True)
class _Step:
    """The operands of one draft step, in the dtype of the matmuls, and its results so far."""

    hidden_MD: Tensor
    head_WD: Tensor
    d_hidden: _Gradient | None
    d_head: _Gradient | None
    """Shared by the steps that share a head."""
    draft_ids_W: Tensor | None
    target_row_M: Tensor
    scale_M: Tensor
    values_3M: Tensor
    """Divergence, alpha, alpha_greedy of every row."""


def _steps(request: _Request, leaves: Sequence[Tensor], gradients: Sequence[_Gradient | None]) -> list[_Step]:
    num_steps = len(request.drafts)
    dtype = _matmul_dtype(leaves[0])
    head_of = {id(draft.head_WD): draft.head_WD.to(dtype) for draft in request.drafts}
    d_head_of = dict(zip(head_of, gradients[num_steps:], strict=True))
    wide = torch.promote_types(dtype, torch.float32)
    return [
        _Step(
            hidden_MD=draft.hidden_MD.to(dtype),
            head_WD=head_of[id(draft.head_WD)],
            d_hidden=d_hidden,
            d_head=d_head_of[id(draft.head_WD)],
            draft_ids_W=draft.draft_ids_W,
            target_row_M=draft.target_row_M,
            scale_M=draft.weight_M.to(wide) / request.normaliser,
            values_3M=torch.zeros(3, len(draft.hidden_MD), dtype=wide, device=draft.hidden_MD.device),
        )
        for draft, d_hidden in zip(request.drafts, gradients[:num_steps], strict=True)
    ]


def _matmul_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _in_matmul_dtype(target: ExactRows | TopKRows) -> ExactRows | TopKRows:
    if isinstance(target, TopKRows):
        return target
    dtype = _matmul_dtype(target.hidden_ND)
    return ExactRows(hidden_ND=target.hidden_ND.to(dtype), head_VD=target.head_VD.to(dtype))


def _run(request: _Request, target: ExactRows | TopKRows, steps: Sequence[_Step]) -> None:
    needed_N = torch.unique(torch.cat([step.target_row_M for step in steps]))
    plans = [_parts_by_chunk(step, needed_N, request.chunk_tokens) for step in steps]
    for index, rows_C in enumerate(torch.split(needed_N, request.chunk_tokens) if len(needed_N) else ()):
        chunk = _chunk(request, target, rows_C)
        for parts in zip_longest(*(plan[index] for plan in plans)):
            _run_parts(request, chunk, [part for part in parts if part is not None])


@dataclass(frozen=True)
class _Part:
    """At most a chunk's number of rows of one draft step, all of which point into the same chunk."""

    step: _Step
    rows_M: Tensor
    place_M: Tensor
    """Where in the chunk each row points, ascending."""
    is_distinct: bool
    """No two rows point at the same place."""

    def bounds(self, block_rows: int, num_rows: int) -> list[int]:
        """Where the rows that point into each block of the chunk begin, and the end of the last."""
        if block_rows >= num_rows:
            return [0, len(self.rows_M)]
        starts = torch.arange(0, num_rows, block_rows, device=self.place_M.device)
        return [*torch.searchsorted(self.place_M, starts).tolist(), len(self.rows_M)]


def _parts_by_chunk(step: _Step, needed_N: Tensor, chunk_tokens: int) -> list[list[_Part]]:
    """For each chunk of `needed_N`, the draft rows that point into it."""
    place_M, order_M = torch.searchsorted(needed_N, step.target_row_M).sort(stable=True)
    starts = torch.arange(0, len(needed_N) + chunk_tokens, chunk_tokens, device=place_M.device)
    bounds = torch.searchsorted(place_M, starts).tolist()
    is_distinct = bool((place_M.diff() > 0).all())
    place_M = place_M % chunk_tokens
    parts_by_chunk = []
    for low, high in pairwise(bounds):
        pieces = [slice(i, min(i + chunk_tokens, high)) for i in range(low, high, chunk_tokens)]
        parts_by_chunk.append([_Part(step, order_M[rows], place_M[rows], is_distinct) for rows in pieces])
    return parts_by_chunk


def _run_parts(request: _Request, chunk: _ExactChunk | _TopKChunk, parts: Sequence[_Part]) -> None:
    """Values and gradients of parts of different steps."""
    hidden = [part.step.hidden_MD[part.rows_M] for part in parts]
    logits = [
        request.scratch.product(f"draft logits {index}", hidden_MD, part.step.head_WD.T)
        for index, (hidden_MD, part) in enumerate(zip(hidden, parts, strict=True))
    ]
    block_rows = _block_rows(max(chunk.width, *(z.shape[1] for z in logits)), logits[0].device)
    bounds = [part.bounds(block_rows, chunk.num_rows) for part in parts]
    for index, first in enumerate(range(0, chunk.num_rows, block_rows)):
        block = chunk.block(slice(first, first + block_rows))
        for part, logits_MW, bound in zip(parts, logits, bounds, strict=True):
            here = slice(bound[index], bound[index + 1])
            if here.start < here.stop:
                _run_block(request, block, part, here, first, logits_MW[here])
    for part, hidden_MD, dz_MW in zip(parts, hidden, logits, strict=True):
        if part.step.d_hidden is not None:
            part.step.d_hidden.set_rows(part.rows_M, dz_MW @ part.step.head_WD)
        if part.step.d_head is not None:
            part.step.d_head.add_product(dz_MW.T, hidden_MD)


def _run_block(
    request: _Request, block: _ExactBlock | _TopKBlock, part: _Part, here: slice, first: int, logits_MW: Tensor
) -> None:
    """Values of a part's rows `here`; the gradient takes the place of their logits."""
    step, rows_M = part.step, part.rows_M[here]
    # None: row for row
    place_M = None if part.is_distinct and len(rows_M) == block.num_rows else part.place_M[here] - first
    values_3M, dz_MW = _divergence(request, block, step, rows_M, place_M, logits_MW)
    step.values_3M[:, rows_M] = values_3M
    logits_MW.copy_(dz_MW.mul_(step.scale_M[rows_M, None] / request.divergence.temperature))


def _divergence(
    request: _Request,
    block: _ExactBlock | _TopKBlock,
    step: _Step,
    rows_M: Tensor,
    place_M: Tensor | None,
    logits_MW: Tensor,
) -> tuple[Tensor, Tensor]:
    """(divergence, alpha and alpha_greedy [3, M], its gradient at logits / temperature [M, W]) of draft rows."""
    divergence = request.divergence
    compared, alpha_greedy_M, at_logits = block.compare(place_M, logits_MW, step.draft_ids_W)
    if divergence.name == "cross_entropy":  # alpha above is against the target all the same
        assert request.labels_N is not None
        label_M = request.labels_N[step.target_row_M[rows_M]]
        columns = draft_columns(label_M, step.draft_ids_W, logits_MW.shape[1])
        loss_M, dz_MW = cross_entropy(*_softmax_and_log(request, "q", logits_MW)[:2], *columns)
    else:
        loss_M, dz_MX = GRADIENTS[divergence.name](divergence, compared)
        dz_MW = at_logits(dz_MX)
    return torch.stack([loss_M, compared.alpha_M, alpha_greedy_M]), dz_MW


def _softmax(scratch: _Scratch, name: str, z_MV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(softmax [M, V], log sum exp [M, 1], argmax [M, 1]) with one pass of exp."""
    p_MV = torch.softmax(z_MV, -1, out=scratch(name, z_MV.shape, z_MV.dtype, z_MV.device))
    best_M1 = _argmax(z_MV)
    return p_MV, z_MV.gather(1, best_M1) - p_MV.gather(1, best_M1).log(), best_M1  # p = exp z / sum exp z


def _softmax_and_log(request: _Request, name: str, logits_MV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(softmax of logits / temperature, its logarithm, its argmax), the first two in the scratch memory of `name`."""
    z_MV = _wide(request, name, logits_MV)
    p_MV, log_sum_exp_M1, best_M1 = _softmax(request.scratch, name, z_MV)
    return p_MV, z_MV.sub_(log_sum_exp_M1).clamp_min_(LOG_ZERO), best_M1


def _argmax(z_MV: Tensor, group: int = 64) -> Tensor:
    """First argmax of every row, [M, 1]; in two levels, because on a CPU `amax` is vectorised and `argmax` is not."""
    if z_MV.shape[1] % group:
        return z_MV.argmax(-1, keepdim=True)
    z_MGv = z_MV.view(len(z_MV), -1, group)
    best_M1 = z_MGv.amax(-1).argmax(-1, keepdim=True)
    z_M1v = z_MGv.gather(1, best_M1[..., None].expand(-1, 1, group))
    return z_M1v.argmax(-1).add_(best_M1, alpha=group)


def _wide(request: _Request, name: str, logits_MV: Tensor) -> Tensor:
    """A copy of logits / temperature in float32 or wider."""
    dtype = torch.promote_types(logits_MV.dtype, torch.float32)
    z_MV = request.scratch(f"log {name}", logits_MV.shape, dtype, logits_MV.device).copy_(logits_MV)
    return z_MV if request.divergence.temperature == 1 else z_MV.div_(request.divergence.temperature)


def _block_rows(columns: int, device: torch.device) -> int:
    """Rows to work on at once."""
    elements = BLOCK_ELEMENTS_CPU if device.type == "cpu" else BLOCK_ELEMENTS_GPU
    return max(1, elements // columns)


def _blocks(matrix: Tensor) -> Iterator[slice]:
    rows = _block_rows(matrix.shape[1], matrix.device)
    return (slice(first, first + rows) for first in range(0, len(matrix), rows))


# ---------------------------------------------------------------------------------------------------- the target's side

AtLogits = Callable[[Tensor], Tensor]
"""From the gradient at the outcomes compared [M, X] to the gradient at all of the draft's logits [M, W]."""


def _chunk(request: _Request, target: ExactRows | TopKRows, rows_C: Tensor) -> _ExactChunk | _TopKChunk:
    return _TopKChunk(request, target, rows_C) if isinstance(target, TopKRows) else _ExactChunk(request, target, rows_C)


class _ExactChunk:
    """The target's logits on one chunk of its rows."""

    def __init__(self, request: _Request, target: ExactRows, rows_C: Tensor) -> None:
        self._request = request
        self._logits_CV = request.scratch.product("target logits", target.hidden_ND[rows_C], target.head_VD.T)
        self.num_rows, self.width = self._logits_CV.shape

    def block(self, rows: slice) -> _ExactBlock:
        return _ExactBlock(self._request, self._logits_CV[rows])


class _ExactBlock:
    """The target's distribution on a few of its rows, computed once for all the steps that are compared with it."""

    def __init__(self, request: _Request, logits_RV: Tensor) -> None:
        self._request, self._logits_RV, self.num_rows = request, logits_RV, len(logits_RV)
        self._over_all: tuple[Tensor, Tensor] | None = None
        self._over_some: dict[int, tuple[Tensor, Tensor]] = {}

    def compare(
        self, place_M: Tensor | None, logits_MW: Tensor, draft_ids_W: Tensor | None
    ) -> tuple[Compared, Tensor, AtLogits]:
        p_RW, log_p_RW = self._p(draft_ids_W)
        p_MW, log_p_MW = (p_RW, log_p_RW) if place_M is None else (p_RW[place_M], log_p_RW[place_M])
        q_MW, log_q_MW, best_M1 = _softmax_and_log(self._request, "q", logits_MW)
        least_MW = self._request.scratch("least", q_MW.shape, q_MW.dtype, q_MW.device)
        compared = Compared(p_MW, log_p_MW, q_MW, log_q_MW, alpha(p_MW, q_MW, out=least_MW))
        return compared, p_MW.gather(1, best_M1).squeeze(1), lambda dz_MW: dz_MW

    def _p(self, draft_ids_W: Tensor | None) -> tuple[Tensor, Tensor]:
        """(p, log p) over the draft's vocabulary, [R, W] each."""
        if self._over_all is None:
            self._over_all = _softmax_and_log(self._request, "p", self._logits_RV)[:2]
        if draft_ids_W is None:
            return self._over_all
        if id(draft_ids_W) not in self._over_some:
            p_RV, log_p_RV = self._over_all
            self._over_some[id(draft_ids_W)] = p_RV[:, draft_ids_W], log_p_RV[:, draft_ids_W]
        return self._over_some[id(draft_ids_W)]


class _TopKChunk:
    """The target's kept ids on one chunk of its rows."""

    def __init__(self, request: _Request, target: TopKRows, rows_C: Tensor) -> None:
        self._request = request
        self.num_rows, self.width = len(rows_C), target.ids_NK.shape[1]
        self._ids_CK, self._log_probs_CK = target.ids_NK[rows_C], target.log_probs_NK[rows_C]

    def block(self, rows: slice) -> _TopKBlock:
        return _TopKBlock(self._request, self._ids_CK[rows], self._log_probs_CK[rows])


class _TopKBlock:
    def __init__(self, request: _Request, ids_RK: Tensor, log_probs_RK: Tensor) -> None:
        self._request = request
        self.ids_RK, self.log_probs_RK, self.num_rows = ids_RK, log_probs_RK, len(ids_RK)

    def compare(
        self, place_M: Tensor | None, logits_MW: Tensor, draft_ids_W: Tensor | None
    ) -> tuple[Compared, Tensor, AtLogits]:
        ids_MK, log_p_MK = self.ids_RK, self.log_probs_RK
        if place_M is not None:
            ids_MK, log_p_MK = ids_MK[place_M], log_p_MK[place_M]
        columns_MK, reachable_MK = draft_columns(ids_MK, draft_ids_W, logits_MW.shape[1])
        z_MW = _wide(self._request, "q", logits_MW)
        best_M1 = _argmax(z_MW)
        z_MK = z_MW.gather(1, columns_MK).masked_fill_(~reachable_MK, FAR_BELOW)
        # By addition, because an id out of reach has the column of another: it adds 0 there.
        z_MW.scatter_add_(1, columns_MK, reachable_MK * z_MW.new_tensor(FAR_BELOW))
        tail_MW, z_tail_M1, _ = _softmax(self._request.scratch, "q", z_MW)
        z_MX = torch.cat([z_MK, z_tail_M1], -1)
        log_q_MX = z_MX.log_softmax(-1).clamp_min_(LOG_ZERO)

        log_p_MX = top_k_buckets(log_p_MK.to(z_MW.dtype), reachable_MK, z_MW.shape[1])
        p_MX, q_MX = log_p_MX.exp(), log_q_MX.exp()
        alpha_greedy_M = (p_MX[:, :-1] * (columns_MK == best_M1)).sum(-1)

        def at_logits(dz_MX: Tensor) -> Tensor:
            return tail_MW.mul_(dz_MX[:, -1:]).scatter_add_(1, columns_MK, dz_MX[:, :-1])

        return Compared(p_MX, log_p_MX, q_MX, log_q_MX, alpha(p_MX, q_MX)), alpha_greedy_M, at_logits
