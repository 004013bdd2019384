"""Compute the divergence of draft and target from hidden states and heads.

The full logits [tokens, vocabulary] of draft or target never exist in memory.

S = draft steps, M = labelled rows of a draft step, N = rows of the target, C = target rows of a
chunk, R = target rows of a block, D = hidden, E = rank of a bias, V = target vocabulary, W = draft
vocabulary, K = kept top-k ids, X = outcomes compared (W, or K + a tail).

    for each chunk of target rows                    p_logits_CV = hidden @ head.T            one matmul
        for all draft steps with the same head       z_MW        = hidden @ head.T            one matmul
        for each block of target rows (cache-sized)  p, log p                                 once for all steps
            for each draft step                      z_MW       <- weight * dD/dz             closed form, float32
        for all draft steps with the same head       d_hidden    = z_MW @ head                one matmul
                                                     d_head     += z_MW.T @ hidden            one matmul, if trained

On a GPU, a kernel computes all blocks of a chunk at once (`distill.loss.rows`). On a CPU, and as
the kernel's oracle, a block is computed by a few PyTorch operations (`distill.loss.blocks`).

A draft with a low-rank bias adds a second product to the logits, whose gradients need two matmuls
as well. The forward pass also computes the gradient, so backward only scales it. Matmuls run in the
dtype of the hidden states (or of autocast), or in float32 if that is faster on this CPU
(`distill.loss.products`). The softmax and all sums are computed in float32, or in float64 if the
inputs are float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from redraft.distill.loss.blocks import ExactBlock, Scratch, TopKBlock, block_rows, softmax_and_log
from redraft.distill.loss.choice import Divergence
from redraft.distill.loss.compiled import compare_rows, log_sum_exp
from redraft.distill.loss.gradients import GRADIENTS, cross_entropy
from redraft.distill.loss.outcomes import draft_columns, top_k_buckets
from redraft.distill.loss.products import (
    Gradient,
    add_logits,
    as_operand,
    gradient_of_left,
    matmul_dtype,
)
from redraft.distill.loss.rows import (
    draft_rows,
    orders_memory,
    runs_kernels,
    target_rows,
    top_k_rows,
)
from redraft.heads.logits import PLAIN, LogitRule
from redraft.heads.nn.precision import autocast_kind

CHUNK_TOKENS_CPU, CHUNK_TOKENS_GPU = 256, 2048
"""Number of target rows per chunk. The logits of these rows and of the draft rows compared with
them are in memory at once. Fewer rows make the matmuls slower (on a CPU, 16 rows are 2-3x slower),
and every chunk reads and writes a head's whole gradient.
"""


# ------------------------------------------------------------------------------------------------------------
# interface


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """The labelled rows of one draft step."""

    hidden_MD: Tensor
    head_WD: Tensor
    """The head's weights. Steps with the same head must pass the same tensor object, so that its
    gradient is accumulated once.
    """
    target_row_M: Tensor
    """int64, index of the target row for each draft row, ascending and distinct."""
    weight_M: Tensor
    draft_ids_W: Tensor | None = None
    """int64, the target id of every draft id, in ascending order. None if both vocabularies are
    equal.
    """
    bias: tuple[Tensor, Tensor] | None = None
    """(code [M, E], head [W, E]); code @ head.T is added to the logits. All steps must pass the
    same tensor object as `head`.
    """
    cap: float | None = None
    """The logits become cap * tanh(logits / cap). All steps with the same head share one cap."""
    bounds: Sequence[int] | None = None
    """The first draft row of each chunk, then the number of rows. Without these bounds, the host must
    wait for the GPU to read the target rows.
    """

    @property
    def factors(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Pairs (left, right): the logits before a cap are the sum of left @ right.T over them."""
        main = (self.hidden_MD, self.head_WD)
        return (main,) if self.bias is None else (main, self.bias)


@dataclass(frozen=True, kw_only=True)
class ExactRows:
    """The target's last hidden states, its head, and the rule for its logits."""

    hidden_ND: Tensor
    head_VD: Tensor
    rule: LogitRule = PLAIN


@dataclass(frozen=True, kw_only=True)
class TopKRows:
    """The target's top-k ids and log-probabilities under the full softmax at temperature 1."""

    ids_NK: Tensor
    log_probs_NK: Tensor


@dataclass(frozen=True, kw_only=True)
class FusedResult:
    """The loss, and sums over rows. Gradients flow only through `loss`."""

    loss: Tensor
    """The loss, a scalar: the sum over steps and rows of weight * divergence / normaliser."""
    loss_S: Tensor
    """Unweighted sum of the divergence over the rows of each step."""
    alpha_S: Tensor
    """Sum of alpha at the divergence's temperature, per step. With a top-k target, it is an upper
    bound, because the tail counts as one outcome.
    """
    alpha_greedy_S: Tensor
    """Sum of p(argmax q) per step. With a top-k target, it is a lower bound: rows whose argmax q
    was not recorded count as 0.
    """
    count_S: Tensor
    alpha_SM: Sequence[Tensor]
    """alpha of every row: one tensor [M] per step."""


def default_chunk_tokens(device: torch.device) -> int:
    """Return the number of target rows per chunk. A GPU needs more rows than a CPU to stay busy."""
    return CHUNK_TOKENS_CPU if device.type == "cpu" else CHUNK_TOKENS_GPU


def fused_linear_divergence(
    drafts: Sequence[DraftRows],
    target: ExactRows | TopKRows,
    divergence: Divergence,
    *,
    normaliser: float | Tensor,
    labels_N: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> FusedResult:
    """Return sum_S sum_M weight * D(target, draft) / normaliser.

    The sum is differentiable with respect to the factors of every draft's logits. A target row
    costs the same whether or not a step uses it, so pass only rows that at least one step uses.
    `normaliser` is the global count of valid tokens. `labels_N` are the text's next tokens; only
    cross_entropy reads them.

    Raises:
        ValueError: the vocabularies differ in size, a top-k target is used with a temperature other
            than 1, or cross_entropy gets no labels.
    """
    _check(drafts, target, divergence, labels_N)
    factors = [pair for draft in drafts for pair in draft.factors]
    heads = list({id(head): head for _, head in factors}.values())
    if chunk_tokens is None:
        chunk_tokens = default_chunk_tokens(heads[0].device)
    request = _Request(
        drafts, target, divergence, normaliser, labels_N, chunk_tokens, torch.is_grad_enabled()
    )
    lefts = (left for left, _ in factors)
    loss, *values = _FusedLinearDivergence.apply(request, *lefts, *heads)  # type: ignore[no-untyped-call]
    loss_S, alpha_S, alpha_greedy_S = torch.stack([values_3M.sum(1) for values_3M in values], dim=1)
    return FusedResult(
        loss=loss,
        loss_S=loss_S,
        alpha_S=alpha_S,
        alpha_greedy_S=alpha_greedy_S,
        count_S=torch.stack(
            [values_3M.new_full((), values_3M.shape[1], dtype=torch.long) for values_3M in values]
        ),
        alpha_SM=[values_3M[1] for values_3M in values],
    )


def _check(
    drafts: Sequence[DraftRows],
    target: ExactRows | TopKRows,
    divergence: Divergence,
    labels_N: Tensor | None,
) -> None:
    if divergence.name == "cross_entropy" and labels_N is None:
        raise ValueError("cross_entropy learns from the text: pass labels_N")
    if isinstance(target, TopKRows) and divergence.temperature != 1:
        raise ValueError(
            f"temperature {divergence.temperature} needs the target's full distribution, because "
            "the tail of top-k log-probabilities cannot be rescaled: use temperature 1 or an exact "
            "target"
        )
    for draft in drafts:
        vocabulary = draft.head_WD.shape[0]
        if draft.draft_ids_W is not None and len(draft.draft_ids_W) != vocabulary:
            raise ValueError(
                f"the draft's head has {vocabulary} rows for {len(draft.draft_ids_W)} draft ids"
            )
        if (
            draft.draft_ids_W is None
            and isinstance(target, ExactRows)
            and vocabulary != target.head_VD.shape[0]
        ):
            raise ValueError(
                f"the draft's head has {vocabulary} rows and the target's "
                f"{target.head_VD.shape[0]}: "
                "pad the draft's vocabulary, or give the target id of every draft id"
            )


# -------------------------------------------------------------------------------------------------------------
# the loop


@dataclass(frozen=True)
class _Request:
    drafts: Sequence[DraftRows]
    target: ExactRows | TopKRows
    divergence: Divergence
    normaliser: float | Tensor
    labels_N: Tensor | None
    chunk_tokens: int
    grad_enabled: bool
    """Whether the caller runs under autograd. `Function.forward` cannot detect this itself."""
    scratch: Scratch = field(default_factory=Scratch)

    def logits(self, name: str, lefts: Sequence[Tensor], heads: Sequence[Tensor]) -> Tensor:
        """Return the sum of left @ head.T over the pairs, in the scratch memory named `name`."""
        logits_MW = self.scratch(
            name, (len(lefts[0]), len(heads[0])), lefts[0].dtype, lefts[0].device
        )
        for index, (left_MD, head_WD) in enumerate(zip(lefts, heads, strict=True)):
            add_logits(self.scratch, logits_MW, left_MD, head_WD, is_begun=index > 0)
        return logits_MW

    def runs_kernels(self, logits_MW: Tensor) -> bool:
        form = self.divergence.form
        if isinstance(self.target, TopKRows) and not orders_memory():
            return False
        return form == "kernel" or (
            form == "auto" and runs_kernels(logits_MW.dtype, logits_MW.device)
        )

    @property
    def is_compiled(self) -> bool:
        """Whether compiled operations compare the rows. They need both full distributions."""
        d = self.divergence
        return (
            d.form == "compiled"
            and d.name != "cross_entropy"
            and isinstance(self.target, ExactRows)
        )


class _FusedLinearDivergence(torch.autograd.Function):
    """Autograd function that returns (loss, values [3, M] for every step) of a request.

    `leaves` are the left factors of all steps, followed by the distinct heads. Autograd tracks only
    tensors that are passed as arguments, so the leaves are passed in addition to the request.
    """

    @staticmethod
    def forward(ctx: Any, request: _Request, *leaves: Tensor) -> tuple[Tensor, ...]:
        # The first input is the request, which is not a tensor.
        needed = [request.grad_enabled and needs for needs in ctx.needs_input_grad[1:]]
        gradients = [
            Gradient(leaf) if needs else None for leaf, needs in zip(leaves, needed, strict=True)
        ]
        steps, target = _make_steps(request, leaves, gradients), _in_matmul_dtype(request.target)
        # The operands already have the dtype of the matmuls; autocast must not change any other
        # dtype.
        with torch.autocast(autocast_kind(leaves[0].device), enabled=False):
            _run_chunks(request, target, steps)
        # `save_for_backward` cannot be used: `backward` scales these tensors in place, and autograd
        # does not accept changed tensors.
        ctx.gradients = [None if gradient is None else gradient.finish() for gradient in gradients]
        values = [step.values_3M for step in steps]
        ctx.mark_non_differentiable(*values)
        return torch.stack(
            [(step.scale_M * step.values_3M[0]).sum() for step in steps]
        ).sum(), *values

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = ctx.gradients
        # With retain_graph, a second backward pass reads the gradients again, so they must not be
        # changed in place.
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return None, *(
                None if gradient is None else gradient * d_loss for gradient in gradients
            )
        # Otherwise, the gradients are scaled in place, because a copy of a head's gradient would be
        # as large as the head.
        ctx.gradients = None
        return None, *(
            None if gradient is None else gradient.mul_(d_loss) for gradient in gradients
        )


@dataclass(frozen=True)
class _Factors:
    """One pair from `DraftRows.factors`, in the dtype of the matmuls."""

    left_MD: Tensor
    head_WD: Tensor
    d_left: Gradient | None
    d_head: Gradient | None
    """Shared by all steps with the same head."""


@dataclass(frozen=True)
class _Step:
    draft: DraftRows
    factors: Sequence[_Factors]
    scale_M: Tensor
    values_3M: Tensor
    """Divergence, alpha and alpha_greedy of every row, [3, M]."""


def _make_steps(
    request: _Request, leaves: Sequence[Tensor], gradients: Sequence[Gradient | None]
) -> list[_Step]:
    dtype = matmul_dtype(leaves[0])
    pairs = [pair for draft in request.drafts for pair in draft.factors]
    # Heads are compared by identity. Under autocast, a shared head is converted once, and all steps
    # add to the same gradient.
    heads = {id(head): as_operand(head, dtype) for head in leaves[len(pairs) :]}
    d_heads = dict(zip(heads, gradients[len(pairs) :], strict=True))
    # A single iterator for all steps: each step takes its next pair or two from it.
    factors = (
        _Factors(left.to(dtype), heads[id(head)], d_left, d_heads[id(head)])
        for (left, head), d_left in zip(pairs, gradients[: len(pairs)], strict=True)
    )
    wide = torch.promote_types(dtype, torch.float32)
    return [
        _Step(
            draft=draft,
            factors=list(islice(factors, len(draft.factors))),
            scale_M=draft.weight_M.to(wide) / request.normaliser,
            values_3M=torch.zeros(
                3, len(draft.hidden_MD), dtype=wide, device=draft.hidden_MD.device
            ),
        )
        for draft in request.drafts
    ]


def _in_matmul_dtype(target: ExactRows | TopKRows) -> ExactRows | TopKRows:
    if isinstance(target, TopKRows):
        return target
    dtype = matmul_dtype(target.hidden_ND)
    return replace(
        target, hidden_ND=target.hidden_ND.to(dtype), head_VD=as_operand(target.head_VD, dtype)
    )


# ---------------------------------------------------------------------------------------- from rows
# to chunks and parts
#
# An example: five target rows in two chunks (chunk_tokens = 3), and two draft steps.
#
#     step 0 is compared with target rows    0 1 2 3 4
#     step 1 is compared with target rows    1 2 4
#
#     target row                             0 1 2 3 4
#     its chunk                              0 0 0 1 1           two matmuls, of 3 rows and of 2 rows
#     its place in the chunk                 0 1 2 0 1
#
#     part of step 0 in chunk 0              draft rows 0 1 2    at places 0 1 2
#     part of step 0 in chunk 1              draft rows 3 4      at places 0 1
#     part of step 1 in chunk 0              draft rows 0 1      at places 1 2       (target rows 1 and 2)
#     part of step 1 in chunk 1              draft row  2        at place  1         (target row 4)
#
# Each chunk runs its parts of both steps together. A block is a few consecutive places, so the draft
# rows compared with it are consecutive too, and a slice selects them. With blocks of two places,
# `bounds` of the first part is [0, 2, 3]: block 0 takes the rows 0:2 of the part, block 1 takes 2:3.


def _run_chunks(request: _Request, target: ExactRows | TopKRows, steps: Sequence[_Step]) -> None:
    """Write all steps' values into `values_3M`, and the gradients into `d_left` and `d_head`."""
    num_rows = len(target.ids_NK if isinstance(target, TopKRows) else target.hidden_ND)
    bounds_of = [_find_bounds(step.draft, num_rows, request.chunk_tokens) for step in steps]
    for index, first in enumerate(range(0, num_rows, request.chunk_tokens)):
        rows_C = slice(first, min(first + request.chunk_tokens, num_rows))
        chunk = _select_target(request, target, rows_C, steps[0].factors[0].left_MD)
        parts = []
        for step, bounds in zip(steps, bounds_of, strict=True):
            rows = slice(bounds[index], bounds[index + 1])
            if rows.start < rows.stop:
                parts.append(_Part(step, rows, step.draft.target_row_M[rows] - first))
        _run_parts(request, chunk, parts)


def _find_bounds(draft: DraftRows, num_rows: int, chunk_tokens: int) -> Sequence[int]:
    """Return `DraftRows.bounds`, computed from the target rows if they are not given.

    In the example above, the bounds of step 1 are [0, 2, 3].

    Raises:
        ValueError: the target rows are not ascending and distinct, and there are no bounds.
    """
    if draft.bounds is not None:
        return draft.bounds
    if (draft.target_row_M.diff() <= 0).any():
        raise ValueError("the target rows of a draft step must be ascending and distinct")
    starts = torch.arange(
        0, num_rows + chunk_tokens, chunk_tokens, device=draft.target_row_M.device
    )
    bounds: list[int] = torch.searchsorted(draft.target_row_M, starts).tolist()
    return bounds


@dataclass(frozen=True)
class _Part:
    """The rows of one draft step that are compared with rows of one chunk."""

    step: _Step
    rows: slice
    place_M: Tensor
    """Row of the chunk that each draft row is compared with, ascending and distinct."""

    def bounds(self, block_rows: int, num_rows: int) -> list[int]:
        """Return the part's first row in each block of the chunk's `num_rows` rows.

        The last entry is the part's number of rows.
        """
        if block_rows >= num_rows:
            return [0, len(self.place_M)]
        starts = torch.arange(0, num_rows, block_rows, device=self.place_M.device)
        return [*torch.searchsorted(self.place_M, starts).tolist(), len(self.place_M)]


# ------------------------------------------------------------------------------------------------
# values and gradients


def _run_parts(
    request: _Request, chunk: ExactBlock | TopKBlock | _KernelChunk, parts: Sequence[_Part]
) -> None:
    by_head = _by_head(parts)
    # PyTorch operations compute a block's p once for all heads, so the logits of all heads are in
    # memory. A kernel or a compiled graph computes p on the fly, so the heads take turns.
    take_turns = isinstance(chunk, _KernelChunk) or request.is_compiled
    for heads in [[same] for same in by_head] if take_turns else [by_head]:
        groups = [_make_group(request, index, same) for index, same in enumerate(heads)]
        if isinstance(chunk, _KernelChunk):
            for group in groups:
                chunk.run(request, group)
        else:
            _run_blocks(request, chunk, groups)
        # All rows have been compared, and their logits were overwritten by the gradient.
        for group in groups:
            group.add_gradients(request.scratch)


def _by_head(parts: Sequence[_Part]) -> list[list[_Part]]:
    found: dict[tuple[int, ...], list[_Part]] = {}
    for part in parts:
        # Compare by identity, because steps with equal but separate heads need separate gradients.
        found.setdefault(tuple(id(each.head_WD) for each in part.step.factors), []).append(part)
    return list(found.values())


@dataclass(frozen=True)
class _Group:
    """Parts of draft steps with the same head.

    One matmul computes the logits of all parts. Each gradient takes one more.
    """

    parts: Sequence[_Part]
    lefts: Sequence[Tensor]
    """Left factors, concatenated over the rows of all parts."""
    logits_MW: Tensor
    """Capped logits in scratch memory. Later, they are overwritten by the gradient with respect to
    the logits before the cap.
    """
    draft_ids_W: Tensor | None

    @property
    def slices(self) -> list[slice]:
        ends = [0, *accumulate(len(part.place_M) for part in self.parts)]
        return [slice(*bounds) for bounds in pairwise(ends)]

    def add_gradients(self, scratch: Scratch) -> None:
        for index, left_MD in enumerate(self.lefts):
            factors = [part.step.factors[index] for part in self.parts]
            if any(each.d_left is not None for each in factors):
                # [M, W] @ [W, D] over all parts. Parts without a gradient are included, although
                # their part of the work is unnecessary.
                d_left_MD = gradient_of_left(scratch, self.logits_MW, factors[0].head_WD)
                for part, each, here in zip(self.parts, factors, self.slices, strict=True):
                    if each.d_left is not None:
                        each.d_left.set_rows(part.rows, d_left_MD[here])
            if factors[0].d_head is not None:
                factors[0].d_head.add_product(scratch, self.logits_MW.T, left_MD)  # [W, M] @ [M, D]


def _make_group(request: _Request, index: int, parts: Sequence[_Part]) -> _Group:
    """Group the parts for one head and compute the draft's logits.

    Groups that are in memory at the same time must have different indices.
    """
    per_factor = zip(
        *([each.left_MD[part.rows] for each in part.step.factors] for part in parts), strict=True
    )
    lefts = [torch.cat(pieces) if len(pieces) > 1 else pieces[0] for pieces in per_factor]
    heads = [each.head_WD for each in parts[0].step.factors]
    logits_MW = LogitRule(cap=parts[0].step.draft.cap).apply_(
        request.logits(f"draft logits {index}", lefts, heads)
    )
    return _Group(parts, lefts, logits_MW, parts[0].step.draft.draft_ids_W)


def _run_blocks(request: _Request, chunk: ExactBlock | TopKBlock, groups: Sequence[_Group]) -> None:
    by_ids: dict[int, list[_Group]] = {}
    for group in groups:
        by_ids.setdefault(id(group.draft_ids_W), []).append(group)
    for same in by_ids.values():
        rows_of = [
            (part, group.logits_MW[here])
            for group in same
            for part, here in zip(group.parts, group.slices, strict=True)
        ]
        _compare_blocks(request, chunk.on(same[0].draft_ids_W), rows_of)


def _compare_blocks(
    request: _Request, chunk: ExactBlock | TopKBlock, rows_of: Sequence[tuple[_Part, Tensor]]
) -> None:
    """Compare the rows block by block.

    The outer loop is over blocks and the inner one over steps, so a block's p stays in cache for
    every step.
    """
    rows = block_rows(
        max(chunk.width, *(z_MW.shape[1] for _, z_MW in rows_of)), rows_of[0][1].device
    )
    bounds = [part.bounds(rows, chunk.num_rows) for part, _ in rows_of]
    for index, first in enumerate(range(0, chunk.num_rows, rows)):
        block = chunk.select_rows(slice(first, first + rows))
        for (part, logits_MW), bound in zip(rows_of, bounds, strict=True):
            here = slice(bound[index], bound[index + 1])
            if here.start < here.stop:
                _run_block(request, block, part, here, first, logits_MW[here])


def _run_block(
    request: _Request,
    block: ExactBlock | TopKBlock,
    part: _Part,
    here: slice,
    first: int,
    logits_MW: Tensor,
) -> None:
    """Compare the part's rows `here` with the block that starts at row `first` of the chunk.

    Their values are written into `values_3M`, and the logits are overwritten by their gradient.
    """
    step, start, num_rows = part.step, part.rows.start, here.stop - here.start
    cap, rows = step.draft.cap, slice(start + here.start, start + here.stop)
    # The rows are distinct and ascending. If the block has the same number of rows, row m belongs to
    # target row m, and p need not be gathered.
    place_M = None if num_rows == block.num_rows else part.place_M[here] - first
    # A single row would need a separate graph, because sizes of 1 are not dynamic.
    if request.is_compiled and num_rows > 1:
        assert isinstance(block, ExactBlock)
        step.values_3M[:, rows] = compare_rows(
            block, place_M, logits_MW, step.scale_M[rows], request.divergence, cap
        )
        return
    step.values_3M[:, rows], dz_MW = _divergence(
        request, block, step.draft, rows, place_M, logits_MW
    )
    if cap is not None:  # multiply by the slope of cap * tanh(z / cap) at the capped logits
        dz_MW.mul_(1 - (logits_MW.to(dz_MW.dtype) / cap).square_())
    # dz is the gradient with respect to logits / temperature; divide once more for the gradient
    # with respect to the logits. `logits_MW` is a slice of the group's matrix, so the copy rounds
    # to the dtype of the matmuls.
    logits_MW.copy_(dz_MW.mul_(step.scale_M[rows, None] / request.divergence.temperature))


def _divergence(
    request: _Request,
    block: ExactBlock | TopKBlock,
    draft: DraftRows,
    rows: slice,
    place_M: Tensor | None,
    logits_MW: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the divergence, and its gradient with respect to logits / temperature.

    Returns ([divergence, alpha, alpha_greedy], [3, M]; gradient [M, W]).
    """
    divergence = request.divergence
    compared, alpha_greedy_M, at_logits = block.compare(place_M, logits_MW, draft.draft_ids_W)
    if divergence.name == "cross_entropy":  # alpha still compares with the target
        assert request.labels_N is not None
        label_M = request.labels_N[draft.target_row_M[rows]]
        columns = draft_columns(label_M, draft.draft_ids_W, logits_MW.shape[1])
        # q is computed again, because for a top-k target, `compared` has only the kept ids and a
        # tail. The new q uses the same scratch memory, so from here on, only alpha may be read from
        # `compared`.
        q_and_log_q = softmax_and_log(request.scratch, divergence.temperature, "q", logits_MW)[:2]
        loss_M, dz_MW = cross_entropy(*q_and_log_q, *columns)
    else:
        loss_M, dz_MX = GRADIENTS[divergence.name](divergence, compared)
        dz_MW = at_logits(dz_MX)
    return torch.stack([loss_M, compared.alpha_M, alpha_greedy_M]), dz_MW


# ----------------------------------------------------------------------------------------------------
# the target's side


def _select_target(
    request: _Request, target: ExactRows | TopKRows, rows_C: slice, like: Tensor
) -> ExactBlock | TopKBlock | _KernelChunk:
    """Return the target's rows of one chunk. `like` gives dtype and device."""
    runs = request.runs_kernels(like)
    if isinstance(target, TopKRows):
        ids_CK, log_probs_CK = target.ids_NK[rows_C], target.log_probs_NK[rows_C]
        return (
            _KernelChunk(rows_C, top_k=(ids_CK, log_probs_CK))
            if runs
            else TopKBlock(request.scratch, ids_CK, log_probs_CK)
        )
    logits_CV = target.rule.apply_(
        request.logits("target logits", [target.hidden_ND[rows_C]], [target.head_VD])
    )
    if runs:
        return _KernelChunk(rows_C, logits_CV=logits_CV)
    temperature = request.divergence.temperature
    sums_C1 = log_sum_exp(logits_CV, temperature) if request.is_compiled else None
    return ExactBlock(request.scratch, temperature, logits_CV, sums_C1)


@dataclass(frozen=True)
class _KernelChunk:
    """The target's rows of one chunk, for the kernels in `distill.loss.rows`.

    It contains either the logits, or the top-k ids and log-probabilities.
    """

    rows_C: slice
    logits_CV: Tensor | None = None
    top_k: tuple[Tensor, Tensor] | None = None
    _on_ids: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def run(self, request: _Request, group: _Group) -> None:
        """Compare all rows of a group.

        The values are written into `values_3M`, and the group's logits are overwritten by their
        gradient.
        """
        d, draft_ids_W, width = request.divergence, group.draft_ids_W, group.logits_MW.shape[1]
        place_M = torch.cat([part.place_M for part in group.parts])
        scale_M = torch.cat([part.step.scale_M[part.rows] for part in group.parts]) / d.temperature
        label_C = None
        if d.name == "cross_entropy":
            assert request.labels_N is not None
            label_C = _or_minus_one(
                *draft_columns(request.labels_N[self.rows_C], draft_ids_W, width)
            )
        inverse_cap = 1 / (group.parts[0].step.draft.cap or math.inf)
        if self.logits_CV is not None:
            kept_CW, sums_2C = self._select(draft_ids_W, d.temperature)
            values_3M = draft_rows(
                group.logits_MW,
                kept_CW,
                sums_2C,
                place_M,
                scale_M,
                label_C,
                d.name,
                d.temperature,
                d.beta,
                d.eta,
                inverse_cap,
            )
        else:
            assert self.top_k is not None
            ids_CK, log_p_CK = self.top_k
            columns_CK, reachable_CK = draft_columns(ids_CK, draft_ids_W, width)
            log_p_CX = top_k_buckets(log_p_CK.float(), reachable_CK, width)
            columns_CK = _or_minus_one(columns_CK, reachable_CK)
            values_3M = top_k_rows(
                group.logits_MW,
                columns_CK,
                log_p_CX,
                place_M,
                scale_M,
                label_C,
                d.name,
                d.beta,
                d.eta,
                inverse_cap,
            )
        for part, here in zip(group.parts, group.slices, strict=True):
            part.step.values_3M[:, part.rows] = values_3M[:, here]

    def _select(self, draft_ids_W: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
        """Return (logits on the draft's ids, sums), as `target_rows` does.

        They are computed once for all groups with the same ids.
        """
        assert self.logits_CV is not None
        if id(draft_ids_W) not in self._on_ids:
            # Without draft ids, the kernel makes no copy: the chunk's own logits are compared.
            kept_CW, sums_2C = target_rows(self.logits_CV, draft_ids_W, temperature)
            self._on_ids[id(draft_ids_W)] = (
                self.logits_CV if draft_ids_W is None else kept_CW,
                sums_2C,
            )
        return self._on_ids[id(draft_ids_W)]


def _or_minus_one(columns: Tensor, reachable: Tensor) -> Tensor:
    return torch.where(reachable, columns, -1).int()
