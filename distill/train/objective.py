"""The loss of a training step: draft steps -> labelled rows -> the target's rows -> divergence.

B = batch, T = tokens, D = hidden, V = target vocabulary, K = kept top-k ids, S = draft steps,
M = labelled rows of a draft step, N = rows of the target."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from redraft.distill.loss.choice import Divergence
from redraft.distill.loss.fused import (
    DraftRows,
    ExactRows,
    TopKRows,
    default_chunk_tokens,
    fused_linear_divergence,
)
from redraft.heads.draft import Batch, DraftStep, ExactTarget, TargetSignal


@dataclass(frozen=True)
class StepResult:
    loss: Tensor
    """Scalar with gradient: scale * sum over draft steps of (weight * sum over labelled rows of the
    losses)."""
    sums_S3: Tensor
    """Sums of alpha, alpha_greedy and labelled rows for each draft step, detached."""


def distill_loss(
    steps: Sequence[DraftStep],
    batch: Batch,
    signal: TargetSignal,
    divergence: Divergence,
    scale: float | Tensor,
) -> StepResult:
    """Return scale * sum_k weight_k * sum_rows (D(target, draft) + other losses of the step).

    It is computed in blocks, so the full [rows, V] logits never exist in memory.
    """
    chunk_tokens = default_chunk_tokens(steps[0].head_WD.device)
    rows = find_rows(steps, chunk_tokens)
    # The target's row n predicts token n + 1.
    labels_N = batch.input_ids_BT.flatten()[
        (rows.kept_N + 1).clamp(max=batch.input_ids_BT.numel() - 1)
    ]
    drafts = [
        DraftRows(
            hidden_MD=step.rule.scaled(step.states(row.place_M)),
            head_WD=step.head_WD,
            target_row_M=row.target_row_M,
            weight_M=scale
            * torch.full((len(row.place_M),), step.weight, device=row.place_M.device),
            draft_ids_W=step.draft_ids_W,
            bias=None
            if step.bias is None
            else (
                step.rule.scaled(step.bias.code_BTR.flatten(0, 1)[step.places(row.place_M)]),
                step.bias.head_WR,
            ),
            cap=step.rule.cap,
            bounds=row.bounds,
        )
        for step, row in zip(steps, rows.of_steps, strict=True)
    ]
    result = fused_linear_divergence(
        drafts,
        select_rows(signal, rows.kept_N),
        divergence,
        labels_N=labels_N,
        normaliser=1.0,
        chunk_tokens=chunk_tokens,
    )
    loss = result.loss
    # Compare dtypes explicitly, because two tensors without dimensions would be promoted to the
    # wider dtype.
    if isinstance(scale, Tensor):
        scale = scale.to(loss.dtype)
    for step, row, alpha_M in zip(steps, rows.of_steps, result.alpha_SM, strict=True):
        place_M = row.place_M
        if step.extra_loss_BT is not None:
            loss = loss + scale * step.weight * step.extra_loss_BT.flatten()[place_M].sum()
        if step.confidence_BT is not None:
            # alpha carries no gradient (`mark_non_differentiable`): the estimate learns from alpha,
            # not the reverse. alpha is clamped because a sum of rounded minima may exceed 1.
            confidence_M = step.confidence_BT.flatten()[step.places(place_M)].to(alpha_M.dtype)
            loss = loss + scale * step.weight * binary_cross_entropy_with_logits(
                confidence_M, alpha_M.clamp(0, 1), reduction="sum"
            )
    sums = torch.stack(
        [result.alpha_S, result.alpha_greedy_S, result.count_S.to(result.alpha_S.dtype)], dim=1
    )
    return StepResult(loss=loss, sums_S3=sums)


@dataclass(frozen=True)
class StepRows:
    """The labelled rows of a draft step, in ascending order."""

    place_M: Tensor
    """Row indices in the flattened batch."""
    target_row_M: Tensor
    """Index of the kept target row for each draft row, ascending and distinct."""
    bounds: Sequence[int]
    """First draft row of each chunk of target rows, then the number of rows."""


@dataclass(frozen=True)
class Rows:
    kept_N: Tensor
    """Flattened indices of the target rows that at least one step uses."""
    of_steps: Sequence[StepRows]


def find_rows(steps: Sequence[DraftStep], chunk_tokens: int) -> Rows:
    """Find the labelled rows of every step, and the target's rows for them.

    On a GPU, this synchronises once.
    """
    # Row t of a step is compared with the target's row t + shift. Both belong to the same document.
    masks = [step.mask_BT.flatten() for step in steps]
    compared = [_moved(mask, step.shift) for mask, step in zip(masks, steps, strict=True)]
    needed = torch.stack(compared).any(0)
    # E.g. of the mask 0101, rows 1 and 3 are kept, and row 3 becomes row 1 of the kept rows.
    new_index = needed.cumsum(0) - 1
    size = needed.numel()
    # For each chunk of kept rows, its end, including chunks that turn out to be empty.
    ends = torch.arange(0, size + chunk_tokens, chunk_tokens, device=needed.device)
    behind = torch.searchsorted(new_index + 1, ends, right=True)
    counts = [
        torch.cat([one.new_zeros(1, dtype=torch.long), one.cumsum(0)])[behind] for one in compared
    ]
    (num_kept, *_), *bounds = torch.stack([needed.sum().expand(len(ends)), *counts]).tolist()
    num_chunks = -(-num_kept // chunk_tokens)
    found = []
    for mask, step, bound in zip(masks, steps, bounds, strict=True):
        place_M = _places(mask, bound[-1])
        found.append(StepRows(place_M, new_index[place_M + step.shift], bound[: num_chunks + 1]))
    return Rows(_places(needed, num_kept), found)


def _moved(mask_N: Tensor, shift: int) -> Tensor:
    return torch.cat([mask_N.new_zeros(shift), mask_N[: len(mask_N) - shift]])


def _places(mask_N: Tensor, count: int) -> Tensor:
    """Return the `count` indices at which the mask is true.

    `nonzero` would compute the count again, and the host would wait for a GPU.
    """
    # All false entries are written to the position after the last true one.
    slots_N = torch.where(mask_N, mask_N.cumsum(0) - 1, count)
    places = slots_N.new_empty(count + 1)
    return places.scatter_(0, slots_N, torch.arange(len(mask_N), device=mask_N.device))[:count]


def select_rows(signal: TargetSignal, kept_N: Tensor) -> ExactRows | TopKRows:
    """Return the target's distribution for the given flat rows."""
    distribution = signal.distribution
    if isinstance(distribution, ExactTarget):
        return ExactRows(
            hidden_ND=distribution.hidden_BTD.flatten(0, 1)[kept_N],
            head_VD=distribution.head_VD,
            rule=distribution.rule,
        )
    return TopKRows(
        ids_NK=distribution.ids_BTK.flatten(0, 1)[kept_N],
        log_probs_NK=distribution.log_probs_BTK.flatten(0, 1)[kept_N],
    )
