"""The divergence of draft and target from hidden states and heads, never holding [tokens, vocabulary] of either.

S = draft steps, M = labelled rows of a draft step, N = rows of the target, C = target rows of a chunk, R = of a block,
D = hidden, E = rank of a bias, V = target vocabulary, W = draft vocabulary, K = kept top-k ids, X = outcomes compared
(W, or K + a tail).

    for each chunk of target rows                    p_logits_CV = hidden @ head.T            one matmul
        for all draft steps with the same head       z_MW        = hidden @ head.T            one matmul
        for each block of target rows (cache-sized)  p, log p                                 once for all steps
            for each draft step                      z_MW       <- weight * dD/dz             closed form, float32
        for all draft steps with the same head       d_hidden    = z_MW @ head                one matmul
                                                     d_head     += z_MW.T @ hidden            one matmul, if trained

A draft with a low-rank bias has a second product in the logits, and the same two matmuls for the gradients of that one.
The gradient is computed on the way, so backward only scales it. Matmuls run in the dtype of the hidden states (or of
autocast); the softmax and all sums in float32, or in float64 if the inputs are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redraft.distill.loss.divergences import LOG_ZERO, Divergence, draft_columns, top_k_buckets
from redraft.distill.loss.gradients import GRADIENTS, Compared, cross_entropy
from redraft.eval.acceptance import alpha
from redraft.heads.nn.precision import autocast_kind, product_dtype

CHUNK_TOKENS = 256
"""Target rows per chunk: the logits of these rows, and of the draft rows compared with them, are in memory at once.
Fewer rows make the matmuls slower (16 rows by 2-3x); more rows only cost memory."""

BLOCK_ELEMENTS_CPU, BLOCK_ELEMENTS_GPU = 1 << 19, 1 << 26
"""Logits per block. On a CPU the block's few float32 temporaries stay in cache; a GPU wants large launches."""

FAR_BELOW = -1e30
"""Added to a logit to mask it. Finite, because a row with every logit masked must not become NaN."""


# ------------------------------------------------------------------------------------------------------------ interface


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """The labelled rows of one draft step."""

    hidden_MD: Tensor
    head_WD: Tensor
    """The same tensor object in every step with the same head, so that the head's gradient is accumulated once."""
    target_row_M: Tensor
    """int64, index of the target row to compare each draft row with. In any order; rows may repeat."""
    weight_M: Tensor
    draft_ids_W: Tensor | None = None
    """int64, the target id of every draft id, ascending; None if both vocabularies are the same."""
    bias: tuple[Tensor, Tensor] | None = None
    """(code [M, E], head [W, E]): code @ head.T is added to the logits. The head as above, one object for all steps."""

    @property
    def factors(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The logits are the sum of left @ right.T over these pairs."""
        main = (self.hidden_MD, self.head_WD)
        return (main,) if self.bias is None else (main, self.bias)


@dataclass(frozen=True, kw_only=True)
class ExactRows:
    """The target's last hidden states and head."""

    hidden_ND: Tensor
    head_VD: Tensor


@dataclass(frozen=True, kw_only=True)
class TopKRows:
    """The target's top-k ids and log-probabilities under the full softmax at temperature 1."""

    ids_NK: Tensor
    log_probs_NK: Tensor


@dataclass(frozen=True, kw_only=True)
class FusedResult:
    """The loss and sums over rows. Only `loss` carries a gradient."""

    loss: Tensor
    """Scalar: sum over steps and rows of weight * divergence / normaliser."""
    loss_S: Tensor
    """Unweighted sum of the divergence over each step's rows."""
    alpha_S: Tensor
    """Sum of alpha at the divergence's temperature. With a top-k target an upper bound: the tail is one outcome."""
    alpha_greedy_S: Tensor
    """Sum of p(argmax q). With a top-k target a lower bound: 0 for a row whose argmax q was not recorded."""
    count_S: Tensor
    """Rows of each step."""
    alpha_SM: Sequence[Tensor]
    """alpha of every row, [M] for each step."""


def fused_linear_divergence(
    drafts: Sequence[DraftRows],
    target: ExactRows | TopKRows,
    divergence: Divergence,
    *,
    normaliser: float | Tensor,
    labels_N: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> FusedResult:
    """sum_S sum_M weight * D(target, draft) / normaliser, differentiable in the factors of every draft's logits.

    Args:
        drafts: One entry per draft step.
        target: The other side of the comparison, for all steps.
        divergence: D, with a temperature.
        normaliser: The global count of valid tokens.
        labels_N: The text's next token at each target row; only cross_entropy reads it.
        chunk_tokens: Target rows per chunk.

    Raises:
        ValueError: if the sizes of the vocabularies differ, if a top-k target is given with a temperature other than 1,
            or if cross_entropy is given no labels.
    """
    _check(drafts, target, divergence, labels_N)
    factors = [pair for draft in drafts for pair in draft.factors]
    heads = list({id(head): head for _, head in factors}.values())
    request = _Request(drafts, target, divergence, normaliser, labels_N, chunk_tokens, torch.is_grad_enabled())
    lefts = (left for left, _ in factors)
    loss, *values = _FusedLinearDivergence.apply(request, *lefts, *heads)  # type: ignore[no-untyped-call]
    loss_S, alpha_S, alpha_greedy_S = torch.stack([values_3M.sum(1) for values_3M in values], dim=1)
    return FusedResult(
        loss=loss,
        loss_S=loss_S,
        alpha_S=alpha_S,
        alpha_greedy_S=alpha_greedy_S,
        count_S=torch.tensor([values_3M.shape[1] for values_3M in values], device=loss.device),
        alpha_SM=[values_3M[1] for values_3M in values],
    )


def _check(
    drafts: Sequence[DraftRows], target: ExactRows | TopKRows, divergence: Divergence, labels_N: Tensor | None
) -> None:
    if divergence.name == "cross_entropy" and labels_N is None:
        raise ValueError("cross_entropy learns from the text: pass labels_N")
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
    """Memory reused by all chunks and blocks, by name.

    Tensors this large go back to the kernel when freed, and on a CPU the page faults of the next allocation take longer
    than computing the values.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialised tensor; the same memory for the same name."""
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
    """The arguments of one call, and the scratch memory shared by all chunks."""

    drafts: Sequence[DraftRows]
    target: ExactRows | TopKRows
    divergence: Divergence
    normaliser: float | Tensor
    labels_N: Tensor | None
    chunk_tokens: int
    grad_enabled: bool
    """Whether the caller runs under autograd: inside `Function.forward` it always reads as disabled."""
    scratch: _Scratch = field(default_factory=_Scratch)


class _FusedLinearDivergence(torch.autograd.Function):
    """(loss, values [3, M] of every step) of the request. `leaves` are the left factors of all steps, then the distinct
    heads.

    Autograd only tracks tensors among the arguments themselves, so the leaves are passed again beside the request.
    """

    @staticmethod
    def forward(ctx: Any, request: _Request, *leaves: Tensor) -> tuple[Tensor, ...]:
        needed = [request.grad_enabled and needs for needs in ctx.needs_input_grad[1:]]
        gradients = [_Gradient(leaf) if needs else None for leaf, needs in zip(leaves, needed, strict=True)]
        steps, target = _make_steps(request, leaves, gradients), _in_matmul_dtype(request.target)
        # The operands already have the dtype of the matmuls; autocast must not change any other dtype.
        with torch.autocast(autocast_kind(leaves[0].device), enabled=False):
            _run_chunks(request, target, steps)
        ctx.gradients = [None if gradient is None else gradient.finish() for gradient in gradients]
        values = [step.values_3M for step in steps]
        ctx.mark_non_differentiable(*values)
        return torch.stack([(step.scale_M * step.values_3M[0]).sum() for step in steps]).sum(), *values

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = ctx.gradients
        # With retain_graph a second backward will read the gradients again, so they are not changed in place.
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return None, *(None if gradient is None else gradient * d_loss for gradient in gradients)
        # Otherwise they are handed over, not copied: a head's gradient is as large as the head.
        ctx.gradients = None
        return None, *(None if gradient is None else gradient.mul_(d_loss) for gradient in gradients)


class _Gradient:
    """The sum of a leaf's gradients, in the leaf's dtype: a float32 master head sums in float32."""

    def __init__(self, leaf: Tensor) -> None:
        # Not zeros: the first product of a head overwrites the memory, which saves a pass over it.
        self.total = torch.empty_like(leaf)
        self.is_begun = False

    def set_rows(self, rows_M: Tensor, value_MD: Tensor) -> None:
        """Set the gradient of these rows; each row is set at most once."""
        if not self.is_begun:
            self.total.zero_()
        self.is_begun = True
        self.total[rows_M] = value_MD.to(self.total.dtype)

    def add_product(self, dz_WM: Tensor, hidden_MD: Tensor) -> None:
        """total += dz @ hidden; the total may be wider than the product."""
        if self.total.dtype == dz_WM.dtype:
            # beta = 0 ignores the old memory, even NaN
            torch.addmm(self.total, dz_WM, hidden_MD, beta=int(self.is_begun), out=self.total)
        else:
            # A sum of two dtypes copies one operand, so it is made block by block.
            for block in _blocks(self.total):
                product = dz_WM[block] @ hidden_MD
                if self.is_begun:
                    self.total[block].add_(product)
                else:
                    self.total[block].copy_(product)
        self.is_begun = True

    def finish(self) -> Tensor:
        """The sum; zero if nothing was added."""
        return self.total if self.is_begun else self.total.zero_()


@dataclass(frozen=True)
class _Factors:
    """A pair of `DraftRows.factors`, in the dtype of the matmuls."""

    left_MD: Tensor
    head_WD: Tensor
    d_left: _Gradient | None
    d_head: _Gradient | None
    """Shared by all steps with the same head."""


@dataclass(frozen=True)
class _Step:
    """The operands of one draft step, and the results so far."""

    factors: Sequence[_Factors]
    draft_ids_W: Tensor | None
    target_row_M: Tensor
    scale_M: Tensor
    values_3M: Tensor
    """Divergence, alpha and alpha_greedy of every row."""


def _make_steps(request: _Request, leaves: Sequence[Tensor], gradients: Sequence[_Gradient | None]) -> list[_Step]:
    dtype = product_dtype(leaves[0])
    pairs = [pair for draft in request.drafts for pair in draft.factors]
    # By identity: under autocast a shared head is converted once, and all steps add to one gradient.
    heads = {id(head): head.to(dtype) for _, head in pairs}
    d_heads = dict(zip(heads, gradients[len(pairs) :], strict=True))
    factors = (
        _Factors(left.to(dtype), heads[id(head)], d_left, d_heads[id(head)])
        for (left, head), d_left in zip(pairs, gradients[: len(pairs)], strict=True)
    )
    wide = torch.promote_types(dtype, torch.float32)
    return [
        _Step(
            factors=list(islice(factors, len(draft.factors))),
            draft_ids_W=draft.draft_ids_W,
            target_row_M=draft.target_row_M,
            scale_M=draft.weight_M.to(wide) / request.normaliser,
            values_3M=torch.zeros(3, len(draft.hidden_MD), dtype=wide, device=draft.hidden_MD.device),
        )
        for draft in request.drafts
    ]


def _in_matmul_dtype(target: ExactRows | TopKRows) -> ExactRows | TopKRows:
    if isinstance(target, TopKRows):
        return target
    dtype = product_dtype(target.hidden_ND)
    return ExactRows(hidden_ND=target.hidden_ND.to(dtype), head_VD=target.head_VD.to(dtype))


# ---------------------------------------------------------------------------------------- from rows to chunks and parts
#
# An example: five target rows in two chunks (chunk_tokens = 3), and two draft steps.
#
#     step 0 is compared with target rows    2 3 5 8 9
#     step 1 is compared with target rows    9 3 5
#
#     target rows needed by any step         2 3 5 8 9
#     chunk of each                          0 0 0 1 1           two matmuls, of 3 rows and of 2 rows
#     place in the chunk                     0 1 2 0 1
#
#     part of step 0 in chunk 0              draft rows 0 1 2    at places 0 1 2
#     part of step 0 in chunk 1              draft rows 3 4      at places 0 1
#     part of step 1 in chunk 0              draft rows 1 2      at places 1 2       (target rows 3 and 5)
#     part of step 1 in chunk 1              draft row  0        at place  1         (target row 9)
#
# Each chunk runs its parts of both steps together. Within a part the draft rows are sorted by place. A block is a few
# consecutive places, so the draft rows compared with it are consecutive too, and a slice selects them. With blocks of
# two places, `bounds` of the first part is [0, 2, 3]: block 0 takes the rows 0:2 of the part, block 1 takes 2:3.


def _run_chunks(request: _Request, target: ExactRows | TopKRows, steps: Sequence[_Step]) -> None:
    """Values of every step's rows into `values_3M`, and gradients into `d_hidden` and `d_head`."""
    needed_N = torch.unique(torch.cat([step.target_row_M for step in steps]))
    if not len(needed_N):  # `torch.split` would give one chunk without rows
        return
    parts_by_chunk = [_split_into_parts(step, needed_N, request.chunk_tokens) for step in steps]
    for index, rows_C in enumerate(torch.split(needed_N, request.chunk_tokens)):
        chunk = _select_target(request, target, rows_C)
        # One part of each step at a time. A step has several in a chunk only if many rows point at the same target row.
        for parts in zip_longest(*(step_parts[index] for step_parts in parts_by_chunk)):
            _run_parts(request, chunk, [part for part in parts if part is not None])


@dataclass(frozen=True)
class _Part:
    """Rows of one draft step, at most `chunk_tokens` of them, to be compared with rows of one chunk."""

    step: _Step
    rows_M: Tensor
    place_M: Tensor
    """The row of the chunk to compare each with, ascending."""
    is_distinct: bool
    """No two rows of the step are compared with the same row of the target."""

    def bounds(self, block_rows: int, num_rows: int) -> list[int]:
        """For each block of the chunk's `num_rows` rows, the part's first row in it; then the number of rows."""
        if block_rows >= num_rows:
            return [0, len(self.rows_M)]
        starts = torch.arange(0, num_rows, block_rows, device=self.place_M.device)
        return [*torch.searchsorted(self.place_M, starts).tolist(), len(self.rows_M)]


def _split_into_parts(step: _Step, needed_N: Tensor, chunk_tokens: int) -> list[list[_Part]]:
    """The parts of a step in each chunk of `needed_N`.

    Step 1 of the example above has target rows [9, 3, 5], at places [4, 1, 2] of `needed_N`. Sorted, the places are
    [1, 2, 4] and the draft rows [1, 2, 0]. Chunks start at places 0 and 3 (and end at 6), so the bounds are [0, 2, 3].
    """
    place_M, order_M = torch.searchsorted(needed_N, step.target_row_M).sort(stable=True)
    starts = torch.arange(0, len(needed_N) + chunk_tokens, chunk_tokens, device=place_M.device)
    bounds = torch.searchsorted(place_M, starts).tolist()  # a GPU waits here: once per step, not once per chunk
    is_distinct = bool((place_M.diff() > 0).all())
    place_M = place_M % chunk_tokens
    parts_by_chunk = []
    for low, high in pairwise(bounds):
        # If target rows repeat, a chunk may have more draft rows than target rows: cut, to limit the logits in memory.
        pieces = [slice(first, min(first + chunk_tokens, high)) for first in range(low, high, chunk_tokens)]
        parts_by_chunk.append([_Part(step, order_M[rows], place_M[rows], is_distinct) for rows in pieces])
    return parts_by_chunk


# ------------------------------------------------------------------------------------------------ values and gradients


def _run_parts(request: _Request, chunk: _ExactTarget | _TopKTarget, parts: Sequence[_Part]) -> None:
    """Values and gradients of parts of different steps in one chunk."""
    sets = _group_by_heads(request.scratch, parts)
    parts, logits = (
        [part for each in sets for part in each.parts],
        [z for each in sets for z in each.split(each.logits_MW)],
    )
    # Blocks outside, steps inside: a block's p stays in cache while every step is compared with it.
    block_rows = _block_rows(max(chunk.width, *(z.shape[1] for z in logits)), logits[0].device)
    bounds = [part.bounds(block_rows, chunk.num_rows) for part in parts]
    for index, first in enumerate(range(0, chunk.num_rows, block_rows)):
        block = chunk.select_rows(slice(first, first + block_rows))
        for part, logits_MW, bound in zip(parts, logits, bounds, strict=True):
            here = slice(bound[index], bound[index + 1])
            if here.start < here.stop:
                _run_block(request, block, part, here, first, logits_MW[here])
    # Every row has passed through a block: `logits` now hold the gradient at the logits.
    for each in sets:
        each.add_gradients()


@dataclass(frozen=True)
class _Set:
    """Parts of steps with the same heads. Their products are made at once: few rows at a time would be slow."""

    parts: Sequence[_Part]
    lefts: Sequence[Tensor]
    """The left factors in the rows of all parts, one part below the other, for each head."""
    logits_MW: Tensor
    """In the same rows."""

    def split(self, values_MX: Tensor) -> Sequence[Tensor]:
        """The rows of every part: views."""
        return torch.split(values_MX, [len(part.rows_M) for part in self.parts])

    def add_gradients(self) -> None:
        """Gradients of the factors, from those at the logits, which have taken the logits' place."""
        for index, (left_MD, shared) in enumerate(zip(self.lefts, self.parts[0].step.factors, strict=True)):
            d_lefts = [part.step.factors[index].d_left for part in self.parts]
            if any(d_left is not None for d_left in d_lefts):
                values = self.split(self.logits_MW @ shared.head_WD)
                for part, d_left, value_MD in zip(self.parts, d_lefts, values, strict=True):
                    if d_left is not None:
                        d_left.set_rows(part.rows_M, value_MD)
            if shared.d_head is not None:
                shared.d_head.add_product(self.logits_MW.T, left_MD)


def _group_by_heads(scratch: _Scratch, parts: Sequence[_Part]) -> list[_Set]:
    """The parts by heads, with logits in the scratch memory."""
    groups: dict[tuple[int, ...], list[_Part]] = {}
    for part in parts:
        groups.setdefault(tuple(id(each.head_WD) for each in part.step.factors), []).append(part)
    sets = []
    for number, group in enumerate(groups.values()):
        heads = [each.head_WD for each in group[0].step.factors]
        lefts = [torch.cat([part.step.factors[i].left_MD[part.rows_M] for part in group]) for i in range(len(heads))]
        logits_MW = scratch.product(f"draft logits {number}", lefts[0], heads[0].T)
        for left_MD, head_WD in zip(lefts[1:], heads[1:], strict=True):
            logits_MW.addmm_(left_MD, head_WD.T)
        sets.append(_Set(group, lefts, logits_MW))
    return sets


def _run_block(
    request: _Request, block: _ExactTarget | _TopKTarget, part: _Part, here: slice, first: int, logits_MW: Tensor
) -> None:
    """Values of a part's rows `here`, compared with the block starting at row `first` of the chunk.

    The gradient at the logits takes the place of the logits.
    """
    step, rows_M = part.step, part.rows_M[here]
    # Distinct, ascending and as many as the block has: row for row, so p need not be gathered.
    is_row_for_row = part.is_distinct and len(rows_M) == block.num_rows
    place_M = None if is_row_for_row else part.place_M[here] - first
    values_3M, dz_MW = _divergence(request, block, step, rows_M, place_M, logits_MW)
    step.values_3M[:, rows_M] = values_3M
    # dz is the gradient at logits / temperature
    logits_MW.copy_(dz_MW.mul_(step.scale_M[rows_M, None] / request.divergence.temperature))


def _divergence(
    request: _Request,
    block: _ExactTarget | _TopKTarget,
    step: _Step,
    rows_M: Tensor,
    place_M: Tensor | None,
    logits_MW: Tensor,
) -> tuple[Tensor, Tensor]:
    """(divergence, alpha and alpha_greedy [3, M]; gradient of the divergence at logits / temperature [M, W])."""
    divergence = request.divergence
    compared, alpha_greedy_M, at_logits = block.compare(place_M, logits_MW, step.draft_ids_W)
    if divergence.name == "cross_entropy":  # alpha is against the target all the same
        assert request.labels_N is not None
        label_M = request.labels_N[step.target_row_M[rows_M]]
        columns = draft_columns(label_M, step.draft_ids_W, logits_MW.shape[1])
        # q is computed again: for a top-k target `compared` holds the kept ids and a tail, not all of q.
        loss_M, dz_MW = cross_entropy(*_softmax_and_log(request, "q", logits_MW)[:2], *columns)
    else:
        loss_M, dz_MX = GRADIENTS[divergence.name](divergence, compared)
        dz_MW = at_logits(dz_MX)
    return torch.stack([loss_M, compared.alpha_M, alpha_greedy_M]), dz_MW


def _softmax(scratch: _Scratch, name: str, z_MV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(softmax [M, V], log sum exp [M, 1], argmax [M, 1]) with one pass of exp."""
    p_MV = torch.softmax(z_MV, -1, out=scratch(name, z_MV.shape, z_MV.dtype, z_MV.device))
    best_M1 = _argmax(z_MV)
    # p = exp z / sum exp z, so log sum exp z = z - log p at any outcome; at the best one p is never 0
    return p_MV, z_MV.gather(1, best_M1) - p_MV.gather(1, best_M1).log(), best_M1


def _softmax_and_log(request: _Request, name: str, logits_MV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(softmax of logits / temperature, the logarithm, the argmax), the first two in the scratch memory of `name`."""
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
    """Rows of a block whose rows have this many columns."""
    elements = BLOCK_ELEMENTS_CPU if device.type == "cpu" else BLOCK_ELEMENTS_GPU
    return max(1, elements // columns)


def _blocks(matrix: Tensor) -> Iterator[slice]:
    """The rows of a matrix, block by block."""
    rows = _block_rows(matrix.shape[1], matrix.device)
    return (slice(first, first + rows) for first in range(0, len(matrix), rows))


# ---------------------------------------------------------------------------------------------------- the target's side

AtLogits = Callable[[Tensor], Tensor]
"""Turns the gradient at the outcomes compared [M, X] into the gradient at all of the draft's logits [M, W]."""


def _select_target(request: _Request, target: ExactRows | TopKRows, rows_C: Tensor) -> _ExactTarget | _TopKTarget:
    """The target on one chunk of rows."""
    if isinstance(target, TopKRows):
        return _TopKTarget(request, target.ids_NK[rows_C], target.log_probs_NK[rows_C])
    logits_CV = request.scratch.product("target logits", target.hidden_ND[rows_C], target.head_VD.T)
    return _ExactTarget(request, logits_CV)


class _ExactTarget:
    """The target's logits on a chunk, or on a block of it.

    p and log p are computed at the first `compare`: once per block for all steps, and never for a whole chunk.
    They live in scratch memory: the next block overwrites them.
    """

    def __init__(self, request: _Request, logits_RV: Tensor) -> None:
        self._request, self._logits_RV = request, logits_RV
        self.num_rows, self.width = logits_RV.shape
        self._over_all: tuple[Tensor, Tensor] | None = None
        self._over_some: dict[int, tuple[Tensor, Tensor]] = {}

    def select_rows(self, rows: slice) -> _ExactTarget:
        return _ExactTarget(self._request, self._logits_RV[rows])

    def compare(
        self, place_M: Tensor | None, logits_MW: Tensor, draft_ids_W: Tensor | None
    ) -> tuple[Compared, Tensor, AtLogits]:
        """(both distributions over the draft's vocabulary, alpha_greedy [M], X = W to W) of the rows at `place_M`.

        `place_M` is None if draft row m is compared with row m.
        """
        p_RW, log_p_RW = self._probabilities(draft_ids_W)
        p_MW, log_p_MW = (p_RW, log_p_RW) if place_M is None else (p_RW[place_M], log_p_RW[place_M])
        q_MW, log_q_MW, best_M1 = _softmax_and_log(self._request, "q", logits_MW)
        least_MW = self._request.scratch("least", q_MW.shape, q_MW.dtype, q_MW.device)
        compared = Compared(p_MW, log_p_MW, q_MW, log_q_MW, alpha(p_MW, q_MW, out=least_MW))
        return compared, p_MW.gather(1, best_M1).squeeze(1), lambda dz_MW: dz_MW

    def _probabilities(self, draft_ids_W: Tensor | None) -> tuple[Tensor, Tensor]:
        """(p, log p) over the draft's vocabulary, [R, W] each. Not renormalised: p may sum to less than 1."""
        if self._over_all is None:
            self._over_all = _softmax_and_log(self._request, "p", self._logits_RV)[:2]
        if draft_ids_W is None:
            return self._over_all
        if id(draft_ids_W) not in self._over_some:
            p_RV, log_p_RV = self._over_all
            self._over_some[id(draft_ids_W)] = p_RV[:, draft_ids_W], log_p_RV[:, draft_ids_W]
        return self._over_some[id(draft_ids_W)]


class _TopKTarget:
    """The target's kept ids and log-probabilities on a chunk, or on a block of it."""

    def __init__(self, request: _Request, ids_RK: Tensor, log_probs_RK: Tensor) -> None:
        self._request, self._ids_RK, self._log_probs_RK = request, ids_RK, log_probs_RK
        self.num_rows, self.width = ids_RK.shape

    def select_rows(self, rows: slice) -> _TopKTarget:
        return _TopKTarget(self._request, self._ids_RK[rows], self._log_probs_RK[rows])

    def compare(
        self, place_M: Tensor | None, logits_MW: Tensor, draft_ids_W: Tensor | None
    ) -> tuple[Compared, Tensor, AtLogits]:
        """(both distributions over the kept ids and a tail, alpha_greedy [M], X = K + 1 to W) of the rows at `place_M`.

        `place_M` is None if draft row m is compared with row m.
        """
        ids_MK, log_p_MK = self._ids_RK, self._log_probs_RK
        if place_M is not None:
            ids_MK, log_p_MK = ids_MK[place_M], log_p_MK[place_M]
        columns_MK, reachable_MK = draft_columns(ids_MK, draft_ids_W, logits_MW.shape[1])

        # The draft's logit of each kept id; the tail's is the log sum exp of all other logits, so mask the kept ones.
        z_MW = _wide(self._request, "q", logits_MW)
        best_M1 = _argmax(z_MW)
        z_MK = z_MW.gather(1, columns_MK).masked_fill_(~reachable_MK, FAR_BELOW)
        # Masked by addition: an id out of reach has the column of another id, and adds 0 there.
        z_MW.scatter_add_(1, columns_MK, reachable_MK * z_MW.new_tensor(FAR_BELOW))
        tail_MW, z_tail_M1, _ = _softmax(self._request.scratch, "q", z_MW)
        z_MX = torch.cat([z_MK, z_tail_M1], -1)
        log_q_MX = z_MX.log_softmax(-1).clamp_min_(LOG_ZERO)

        log_p_MX = top_k_buckets(log_p_MK.to(z_MW.dtype), reachable_MK, z_MW.shape[1])
        p_MX, q_MX = log_p_MX.exp(), log_q_MX.exp()
        alpha_greedy_M = (p_MX[:, :-1] * (columns_MK == best_M1)).sum(-1)

        def at_logits(dz_MX: Tensor) -> Tensor:
            # The tail's gradient is shared out by each outcome's part of the tail, which is 0 for a kept id.
            return tail_MW.mul_(dz_MX[:, -1:]).scatter_add_(1, columns_MK, dz_MX[:, :-1])

        return Compared(p_MX, log_p_MX, q_MX, log_q_MX, alpha(p_MX, q_MX)), alpha_greedy_M, at_logits
