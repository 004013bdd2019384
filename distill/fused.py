"""The divergence of draft and target from their hidden states and heads, never holding [tokens, vocabulary] of either.

S = draft steps, M = labelled rows of a draft step, N = rows of the target, C = target rows of a chunk, D = hidden,
V = target vocabulary, W = draft vocabulary, K = kept top-k ids.

    for each chunk of target rows                    p_logits_CV = hidden @ head.T            one matmul
        for each draft step with rows in it          z_MW        = hidden @ head.T            one matmul
            for each block of rows (cache-sized)     z_MW       <- weight * dD/dz             closed form, float32
            gradients                                d_hidden    = z_MW @ head                one matmul
                                                     d_head     += z_MW.T @ hidden            one matmul, if trained

The gradient is computed on the way, so backward only scales it. Matmuls run in the dtype of the hidden states (or of
autocast); the softmax and all sums in float32, or float64 where the inputs are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distill.gradients import GRADIENTS, Compared, cross_entropy
from distill.losses import LOG_ZERO, Divergence, draft_columns, top_k_buckets
from eval.acceptance import alpha

CHUNK_TOKENS = 256
"""Target rows whose logits are held at once. Fewer make the matmuls slower (16 by 2-3x), more only cost memory."""

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


@dataclass(frozen=True)
class _Request:
    drafts: Sequence[DraftRows]
    target: ExactRows | TopKRows
    divergence: Divergence
    normaliser: float | Tensor
    labels_N: Tensor | None
    chunk_tokens: int
    grad_enabled: bool


class _FusedLinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: _Request, *leaves: Tensor) -> tuple[Tensor, Tensor]:
        needed = [request.grad_enabled and needs for needs in ctx.needs_input_grad[1:]]
        gradients = [torch.zeros_like(leaf) if needs else None for leaf, needs in zip(leaves, needed, strict=True)]
        steps, target = _steps(request, leaves, gradients), _in_matmul_dtype(request.target)
        with torch.autocast(leaves[0].device.type, enabled=False):
            _run(request, target, steps)
        ctx.save_for_backward(*gradients)
        sums_S3 = torch.stack([step.values_3M.sum(1) for step in steps])
        ctx.mark_non_differentiable(sums_S3)
        return torch.stack([(step.scale_M * step.values_3M[0]).sum() for step in steps]).sum(), sums_S3

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, d_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if gradient is None else gradient * d_loss for gradient in ctx.saved_tensors)


@dataclass(frozen=True)
class _Step:
    """The operands of one draft step, in the dtype of the matmuls, and its results so far."""

    hidden_MD: Tensor
    head_WD: Tensor
    d_hidden_MD: Tensor | None
    d_head_WD: Tensor | None
    """Shared by the steps that share a head; in the head's own dtype, so a float32 master head sums in float32."""
    draft_ids_W: Tensor | None
    target_row_M: Tensor
    scale_M: Tensor
    values_3M: Tensor
    """Divergence, alpha, alpha_greedy of every row."""


def _steps(request: _Request, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[_Step]:
    num_steps = len(request.drafts)
    dtype = _matmul_dtype(leaves[0])
    head_of = {id(draft.head_WD): draft.head_WD.to(dtype) for draft in request.drafts}
    d_head_of = dict(zip(head_of, gradients[num_steps:], strict=True))
    wide = torch.promote_types(dtype, torch.float32)
    return [
        _Step(
            hidden_MD=draft.hidden_MD.to(dtype),
            head_WD=head_of[id(draft.head_WD)],
            d_hidden_MD=d_hidden_MD,
            d_head_WD=d_head_of[id(draft.head_WD)],
            draft_ids_W=draft.draft_ids_W,
            target_row_M=draft.target_row_M,
            scale_M=draft.weight_M.to(wide) / request.normaliser,
            values_3M=torch.zeros(3, len(draft.hidden_MD), dtype=wide, device=draft.hidden_MD.device),
        )
        for draft, d_hidden_MD in zip(request.drafts, gradients[:num_steps], strict=True)
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
    plans = [_rows_by_chunk(step.target_row_M, needed_N, request.chunk_tokens) for step in steps]
    for index, rows_C in enumerate(torch.split(needed_N, request.chunk_tokens) if len(needed_N) else ()):
        chunk = _chunk(target, rows_C, request.divergence.temperature)
        for step, plan in zip(steps, plans, strict=True):
            for part_M2 in plan[index]:
                _run_rows(request, chunk, step, *part_M2.unbind(1))
        del chunk  # its logits, before the next chunk's are made


def _rows_by_chunk(target_row_M: Tensor, needed_N: Tensor, chunk_tokens: int) -> list[Sequence[Tensor]]:
    """For each chunk of `needed_N`, the draft rows that point into it and where, [M, 2], in parts of a chunk's size."""
    place_M, order_M = torch.searchsorted(needed_N, target_row_M).sort(stable=True)
    starts = torch.arange(0, len(needed_N) + chunk_tokens, chunk_tokens, device=place_M.device)
    bounds = torch.searchsorted(place_M, starts).tolist()
    both_M2 = torch.stack([order_M, place_M % chunk_tokens], dim=1)
    return [torch.split(both_M2[low:high], chunk_tokens) if low < high else () for low, high in pairwise(bounds)]


def _run_rows(request: _Request, chunk: _ExactChunk | _TopKChunk, step: _Step, rows_M: Tensor, place_M: Tensor) -> None:
    """Values and gradients of at most a chunk's number of draft rows."""
    hidden_MD = step.hidden_MD[rows_M]
    logits_MW = hidden_MD @ step.head_WD.T
    scale_M1 = step.scale_M[rows_M, None] / request.divergence.temperature
    values = []
    for block in _blocks(logits_MW):
        value_3M, dz_MW = _divergence(request, chunk, step, rows_M[block], place_M[block], logits_MW[block])
        values.append(value_3M)
        logits_MW[block] = dz_MW.mul_(scale_M1[block])  # the gradient takes the logits' place
    step.values_3M[:, rows_M] = torch.cat(values, dim=1)
    if step.d_hidden_MD is not None:
        step.d_hidden_MD[rows_M] = (logits_MW @ step.head_WD).to(step.d_hidden_MD.dtype)
    if step.d_head_WD is not None:
        _add_product(step.d_head_WD, logits_MW.T, hidden_MD)


def _add_product(total_WD: Tensor, dz_WM: Tensor, hidden_MD: Tensor) -> None:
    """total += dz @ hidden, where the total may be wider than the matmul."""
    if total_WD.dtype == dz_WM.dtype:
        total_WD.addmm_(dz_WM, hidden_MD)
        return
    for block in _blocks(total_WD):  # a sum of two types makes a copy of one: let it be small
        total_WD[block] += dz_WM[block] @ hidden_MD


def _divergence(
    request: _Request, chunk: _ExactChunk | _TopKChunk, step: _Step, rows_M: Tensor, place_M: Tensor, logits_MW: Tensor
) -> tuple[Tensor, Tensor]:
    """(divergence, alpha and alpha_greedy [3, M], its gradient at logits / temperature [M, W]) of a block."""
    divergence = request.divergence
    compared, alpha_greedy_M, at_logits = chunk.compare(place_M, logits_MW, step.draft_ids_W)
    if divergence.name == "cross_entropy":  # alpha above is against the target all the same
        assert request.labels_N is not None
        label_M = request.labels_N[step.target_row_M[rows_M]]
        columns = draft_columns(label_M, step.draft_ids_W, logits_MW.shape[1])
        loss_M, dz_MW = cross_entropy(*_softmax_and_log(logits_MW, divergence.temperature)[:2], *columns)
    else:
        loss_M, dz_MX = GRADIENTS[divergence.name](divergence, compared)
        dz_MW = at_logits(dz_MX)
    return torch.stack([loss_M, compared.alpha_M, alpha_greedy_M]), dz_MW


def _softmax(z_MV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(softmax [M, V], log sum exp [M, 1], argmax [M, 1]) with one pass of exp."""
    p_MV = z_MV.softmax(-1)
    best_M1 = _argmax(z_MV)
    return p_MV, z_MV.gather(1, best_M1) - p_MV.gather(1, best_M1).log(), best_M1  # p = exp z / sum exp z


def _softmax_and_log(logits_MV: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """(softmax of logits / temperature, its logarithm, its argmax)."""
    z_MV = _wide(logits_MV, temperature)
    p_MV, log_sum_exp_M1, best_M1 = _softmax(z_MV)
    return p_MV, z_MV.sub_(log_sum_exp_M1).clamp_min_(LOG_ZERO), best_M1


def _argmax(z_MV: Tensor, group: int = 64) -> Tensor:
    """First argmax of every row, [M, 1]; in two levels, because on a CPU `amax` is vectorised and `argmax` is not."""
    if z_MV.shape[1] % group:
        return z_MV.argmax(-1, keepdim=True)
    z_MGv = z_MV.view(len(z_MV), -1, group)
    best_M1 = z_MGv.amax(-1).argmax(-1, keepdim=True)
    z_M1v = z_MGv.gather(1, best_M1[..., None].expand(-1, 1, group))
    return z_M1v.argmax(-1).add_(best_M1, alpha=group)


def _wide(logits_MV: Tensor, temperature: float) -> Tensor:
    """A copy of logits / temperature in float32 or wider."""
    z_MV = logits_MV.to(torch.promote_types(logits_MV.dtype, torch.float32), copy=True)
    return z_MV if temperature == 1 else z_MV.div_(temperature)


def _blocks(matrix: Tensor) -> Iterator[slice]:
    """Rows to work on at once."""
    elements = BLOCK_ELEMENTS_CPU if matrix.device.type == "cpu" else BLOCK_ELEMENTS_GPU
    rows = max(1, elements // matrix.shape[1])
    return (slice(first, first + rows) for first in range(0, len(matrix), rows))


# ---------------------------------------------------------------------------------------------------- the target's side

AtLogits = Callable[[Tensor], Tensor]
"""From the gradient at the outcomes compared [M, X] to the gradient at all of the draft's logits [M, W]."""


def _chunk(target: ExactRows | TopKRows, rows_C: Tensor, temperature: float) -> _ExactChunk | _TopKChunk:
    return _TopKChunk(target, rows_C) if isinstance(target, TopKRows) else _ExactChunk(target, rows_C, temperature)


class _ExactChunk:
    """The target's logits on one chunk of its rows."""

    def __init__(self, target: ExactRows, rows_C: Tensor, temperature: float) -> None:
        self.temperature = temperature
        self.logits_CV = target.hidden_ND[rows_C] @ target.head_VD.T
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def compare(
        self, place_M: Tensor, logits_MW: Tensor, draft_ids_W: Tensor | None
    ) -> tuple[Compared, Tensor, AtLogits]:
        p_MW, log_p_MW = self._p(place_M, draft_ids_W)
        q_MW, log_q_MW, best_M1 = _softmax_and_log(logits_MW, self.temperature)
        compared = Compared(p_MW, log_p_MW, q_MW, log_q_MW, alpha(p_MW, q_MW))
        return compared, p_MW.gather(1, best_M1).squeeze(1), lambda dz_MW: dz_MW

    def _p(self, place_M: Tensor, draft_ids_W: Tensor | None) -> tuple[Tensor, Tensor]:
        if draft_ids_W is None:
            return _softmax_and_log(self.logits_CV.index_select(0, place_M), self.temperature)[:2]
        if id(draft_ids_W) not in self.kept:
            self.kept[id(draft_ids_W)] = self.logits_CV[:, draft_ids_W], self._log_sum_exp()
        kept_CW, log_sum_exp_C1 = self.kept[id(draft_ids_W)]
        z_MW = _wide(kept_CW.index_select(0, place_M), self.temperature)
        log_p_MW = z_MW.sub_(log_sum_exp_C1[place_M]).clamp_min_(LOG_ZERO)
        return log_p_MW.exp(), log_p_MW

    def _log_sum_exp(self) -> Tensor:
        z_CV = self.logits_CV
        return torch.cat([_softmax(_wide(z_CV[block], self.temperature))[1] for block in _blocks(z_CV)])


class _TopKChunk:
    """The target's kept ids on one chunk of its rows."""

    def __init__(self, target: TopKRows, rows_C: Tensor) -> None:
        self.ids_CK, self.log_probs_CK = target.ids_NK[rows_C], target.log_probs_NK[rows_C]

    def compare(
        self, place_M: Tensor, logits_MW: Tensor, draft_ids_W: Tensor | None
    ) -> tuple[Compared, Tensor, AtLogits]:
        columns_MK, reachable_MK = draft_columns(self.ids_CK[place_M], draft_ids_W, logits_MW.shape[1])
        z_MW = _wide(logits_MW, temperature=1)
        best_M1 = _argmax(z_MW)
        z_MK = z_MW.gather(1, columns_MK).masked_fill_(~reachable_MK, FAR_BELOW)
        # By addition, because an id out of reach has the column of another: it adds 0 there.
        tail_MW, z_tail_M1, _ = _softmax(z_MW.scatter_add_(1, columns_MK, reachable_MK * z_MW.new_tensor(FAR_BELOW)))
        z_MX = torch.cat([z_MK, z_tail_M1], -1)
        log_q_MX = z_MX.log_softmax(-1).clamp_min_(LOG_ZERO)

        log_p_MK = self.log_probs_CK[place_M].to(z_MW.dtype)
        log_p_MX = top_k_buckets(log_p_MK, reachable_MK, z_MW.shape[1])
        p_MX, q_MX = log_p_MX.exp(), log_q_MX.exp()
        alpha_greedy_M = (p_MX[:, :-1] * (columns_MK == best_M1)).sum(-1)

        def at_logits(dz_MX: Tensor) -> Tensor:
            return tail_MW.mul_(dz_MX[:, -1:]).scatter_add_(1, columns_MK, dz_MX[:, :-1])

        return Compared(p_MX, log_p_MX, q_MX, log_q_MX, alpha(p_MX, q_MX)), alpha_greedy_M, at_logits
