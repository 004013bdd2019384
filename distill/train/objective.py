"""The loss of a training step: draft steps -> labelled rows -> the target's rows -> divergence.

B = batch, T = tokens, D = hidden, V = target vocabulary, K = kept top-k ids, S = draft steps,
M = labelled rows of a draft step, N = rows of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from redraft.distill.loss.choice import Divergence
from redraft.distill.loss.fused import DraftRows, ExactRows, TopKRows, fused_linear_divergence
from redraft.heads.draft import Batch, DraftStep, ExactTarget, TargetSignal


@dataclass(frozen=True)
class StepResult:
    loss: Tensor
    """Scalar with gradient: scale * sum over draft steps of weight * sum over labelled rows of the
    losses."""
    sums_S3: Tensor
    """For each draft step: sum of alpha, sum of alpha_greedy, labelled rows. Detached."""


def distill_loss(
    steps: Sequence[DraftStep],
    batch: Batch,
    signal: TargetSignal,
    divergence: Divergence,
    scale: float,
) -> StepResult:
    """scale * sum_k weight_k * sum_rows (D(target, draft) + further losses of the draft step).

    Never holds [rows, V] of both target and draft: `fused_linear_divergence` computes it in blocks.
    """
    rows = labelled_rows(steps)
    target, labels_N, target_rows = gather_target(steps, rows, batch, signal)
    drafts = [
        DraftRows(
            hidden_MD=step.hidden_BTD.flatten(0, 1)[row],
            head_WD=step.head_WD,
            target_row_M=target_row,
            weight_M=scale * step.weights(row),
            draft_ids_W=step.draft_ids_W,
            bias=None if step.bias is None else (step.bias.code_BTR.flatten(0, 1)[row], step.bias.head_WR),
        )
        for step, row, target_row in zip(steps, rows, target_rows, strict=True)
    ]
    result = fused_linear_divergence(drafts, target, divergence, labels_N=labels_N, normaliser=1.0)
    loss = result.loss
    for step, row, alpha_M in zip(steps, rows, result.alpha_SM, strict=True):
        if step.extra_loss_BT is not None:
            loss = loss + scale * (step.weights(row) * step.extra_loss_BT.flatten()[row]).sum()
        if step.confidence_BT is not None:
            # alpha carries no gradient (`mark_non_differentiable`): the estimate learns from it,
            # not the other way round. A sum of rounded minima may pass 1, hence the clamp.
            confidence_M = step.confidence_BT.flatten()[row].to(alpha_M.dtype)
            loss = loss + scale * binary_cross_entropy_with_logits(
                confidence_M, alpha_M.clamp(0, 1), weight=step.weights(row), reduction="sum"
            )
    sums = torch.stack([result.alpha_S, result.alpha_greedy_S, result.count_S.to(result.alpha_S.dtype)], dim=1)
    return StepResult(loss=loss, sums_S3=sums)


def labelled_rows(steps: Sequence[DraftStep]) -> list[Tensor]:
    """The labelled flat rows of each step. A GPU waits twice, for any number of steps."""
    sizes = [step.mask_BT.numel() for step in steps]
    ends = list(accumulate(sizes))
    # The masks end to end: a step's rows begin behind those of the steps before.
    found = torch.cat([step.mask_BT.flatten() for step in steps]).nonzero().squeeze(1)
    bounds = torch.searchsorted(found, torch.tensor(ends[:-1], device=found.device)).tolist()
    pieces = found.tensor_split(bounds)
    return [piece - (end - size) for piece, end, size in zip(pieces, ends, sizes, strict=True)]


def gather_target(
    steps: Sequence[DraftStep], rows: Sequence[Tensor], batch: Batch, signal: TargetSignal
) -> tuple[ExactRows | TopKRows, Tensor, list[Tensor]]:
    """The target's rows that the steps need, the text's token of each, and by step the indices of
    its target rows.

    `rows` are the labelled flat rows of each step. Target rows are dense: at least one step points
    at each.
    """
    # A flat row plus the shift stays in the document: for a row t of the mask, token t + 1 + shift
    # is in it.
    places = [row + step.shift for row, step in zip(rows, steps, strict=True)]
    # Several draft steps compare with the same target rows. Each needed row is selected once:
    # new_index maps a flat row to a place among the kept ones. E.g. rows 1 and 3 of 4: needed =
    # 0101, kept = [1, 3], new_index = [-1, 0, 0, 1].
    needed = torch.zeros(batch.input_ids_BT.numel(), dtype=torch.bool, device=batch.input_ids_BT.device)
    for place in places:
        needed[place] = True
    kept, new_index = needed.nonzero().squeeze(1), needed.cumsum(0) - 1
    # The target's row n is about token n + 1.
    labels_N = batch.input_ids_BT.flatten()[(kept + 1).clamp(max=needed.numel() - 1)]
    return select_rows(signal, kept), labels_N, [new_index[place] for place in places]


def select_rows(signal: TargetSignal, kept_N: Tensor) -> ExactRows | TopKRows:
    """The target's distribution on the given flat rows."""
    distribution = signal.distribution
    if isinstance(distribution, ExactTarget):
        return ExactRows(hidden_ND=distribution.hidden_BTD.flatten(0, 1)[kept_N], head_VD=distribution.head_VD)
    return TopKRows(
        ids_NK=distribution.ids_BTK.flatten(0, 1)[kept_N],
        log_probs_NK=distribution.log_probs_BTK.flatten(0, 1)[kept_N],
    )
