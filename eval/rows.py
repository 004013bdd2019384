"""Draft and target side by side, row by row: what the forecast and the training-time metrics are made of.

B = batch, T = tokens, N = rows, V = target vocabulary, W = draft vocabulary, D = hidden, K = num_speculative_tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.acceptance import alpha, alpha_greedy, probabilities
from heads.draft import Batch, Draft, DraftStep, ExactTarget, TargetSignal, TopKTarget

ROWS_A_CHUNK = 256
"""Rows whose distributions over the vocabulary are held at once; larger is no faster."""


@dataclass(frozen=True, kw_only=True)
class ComparedRows:
    """A draft step beside the target, in the draft's rows; 0 and False where the step's mask is False."""

    mask_BT: Tensor
    alpha_BT: Tensor
    alpha_greedy_BT: Tensor
    agree_BT: Tensor
    """bool, argmax q = argmax p."""


def compare_rows(step: DraftStep, distribution: ExactTarget | TopKTarget) -> ComparedRows:
    """alpha, alpha_greedy and agreement of one draft step in every row of its mask, at temperature 1.

    With a top-k target alpha counts the kept ids only (the tail is unknown), so it is a lower bound.
    """
    rows_N = step.mask_BT.flatten().nonzero().squeeze(-1)
    results_3N = torch.zeros(3, step.mask_BT.numel(), device=rows_N.device)
    for chunk_N in torch.split(rows_N, ROWS_A_CHUNK):
        results_3N[:, chunk_N] = _compare_chunk(step, distribution, chunk_N)
    alpha_BT, alpha_greedy_BT, agree_BT = results_3N.view(3, *step.mask_BT.shape)
    return ComparedRows(
        mask_BT=step.mask_BT, alpha_BT=alpha_BT, alpha_greedy_BT=alpha_greedy_BT, agree_BT=agree_BT.bool()
    )


def _compare_chunk(step: DraftStep, distribution: ExactTarget | TopKTarget, rows_N: Tensor) -> Tensor:
    # a head may be wider than what autocast left of its hidden states, or narrower than a trained layer
    hidden_ND = step.hidden_BTD.flatten(0, 1)[rows_N].to(step.head_WD.dtype)
    q_NW = probabilities(hidden_ND @ step.head_WD.T, 1.0)
    vocab = step.head_WD.shape[0] if step.draft_ids_W is None else int(step.draft_ids_W[-1]) + 1
    p_NV = _target_probabilities(distribution, rows_N + step.shift, vocab)
    p_NW = p_NV if step.draft_ids_W is None else p_NV[:, step.draft_ids_W]
    draft_token_N = q_NW.argmax(-1) if step.draft_ids_W is None else step.draft_ids_W[q_NW.argmax(-1)]
    return torch.stack([alpha(p_NW, q_NW), alpha_greedy(p_NW, q_NW), (draft_token_N == p_NV.argmax(-1)).float()])


def _target_probabilities(distribution: ExactTarget | TopKTarget, rows_N: Tensor, vocab: int) -> Tensor:
    """The target's probabilities in its own vocabulary, [N, V]; of a top-k target, 0 for what was not kept."""
    if isinstance(distribution, ExactTarget):
        return probabilities(distribution.hidden_BTD.flatten(0, 1)[rows_N] @ distribution.head_VD.T, 1.0)
    ids_NK = distribution.ids_BTK.flatten(0, 1)[rows_N]
    p_NK = distribution.log_probs_BTK.flatten(0, 1)[rows_N].exp()
    width = max(vocab, int(ids_NK.max()) + 1)
    return p_NK.new_zeros(len(rows_N), width).scatter_(1, ids_NK, p_NK)


def draft_steps_of(draft: Draft, batch: Batch, signal: TargetSignal, num_speculative_tokens: int) -> list[DraftStep]:
    """The draft steps that `num_speculative_tokens` need: one of an autoregressive draft, K of any other.

    Raises:
        ValueError: the draft has fewer.
    """
    steps = draft.draft_steps(batch, signal)
    needed = 1 if draft.is_autoregressive else num_speculative_tokens
    if len(steps) < needed:
        raise ValueError(
            f"the draft has {len(steps)} draft steps, so num_speculative_tokens can be at most that, "
            f"not {num_speculative_tokens}"
        )
    return steps[:needed]


def block_matches(
    compared: Sequence[ComparedRows], num_speculative_tokens: int, is_autoregressive: bool
) -> tuple[Tensor, Tensor]:
    """Whether the j-th token drafted in a row is the target's greedy one, and whether it has a label; bool [B, T, K].

    The text is the prefix of every later token, so entry j holds given that the earlier ones match.
    """
    if not is_autoregressive:
        return (
            torch.stack([rows.agree_BT for rows in compared], dim=-1),
            torch.stack([rows.mask_BT for rows in compared], dim=-1),
        )
    ahead = (0, num_speculative_tokens - 1)
    agree_BT = torch.nn.functional.pad(compared[0].agree_BT, ahead)
    mask_BT = torch.nn.functional.pad(compared[0].mask_BT, ahead)
    return agree_BT.unfold(1, num_speculative_tokens, 1), mask_BT.unfold(1, num_speculative_tokens, 1)
