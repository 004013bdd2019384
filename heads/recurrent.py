"""Heads that feed on their own features: unrolled for training, decoded token by token as an engine does.

    row t, step k   token x[t+1+k], position t+k, feature: the target's at k = 0, what step k-1 fed back after that
                    -> what the draft's head reads to predict x[t+2+k]

In training the tokens are the true ones (Li et al., EAGLE-3, arXiv 2503.01840, "training-time test"), in decoding the
draft's own. B = batch, T = tokens, D = hidden, V = target vocabulary, W = draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from heads.attention import KeyCache, Memory, StepMemory
from heads.draft import Batch, DraftStep, draw, label_rows


class Step(Protocol):
    """One pass of a head over rows."""

    def __call__(
        self, ids_BT: Tensor, feature_BTD: Tensor, position_ids_BT: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor]:
        """What the draft's head reads, and what is fed back, both [B, T, D]."""
        ...


def unroll(
    step: Step,
    batch: Batch,
    feature_BTD: Tensor,
    head_WD: Tensor,
    *,
    num_steps: int,
    step_decay: float,
    draft_ids_W: Tensor | None = None,
) -> list[DraftStep]:
    """Teacher-forced draft steps with shifts 1..num_steps, step k weighing step_decay^k."""
    memory = StepMemory(batch)
    steps = []
    for k in range(num_steps):
        # the last rows of a document read what follows it; their labels are masked and no other row sees them
        ids_BT = batch.input_ids_BT.roll(-1 - k, dims=1)
        hidden_BTD, feature_BTD = step(ids_BT, feature_BTD, batch.position_ids_BT + k, memory)
        steps.append(
            DraftStep(
                hidden_BTD=hidden_BTD,
                head_WD=head_WD,
                shift=k + 1,
                mask_BT=label_rows(batch, k + 1),
                weight=step_decay**k,
                draft_ids_W=draft_ids_W,
            )
        )
    return steps


@torch.no_grad()
def decode(
    step: Step,
    logits: Callable[[Tensor], Tensor],
    prefix_ids: Sequence[int],
    feature_BTD: Tensor,
    num_tokens: int,
    temperature: float,
    generator: torch.Generator | None,
) -> list[tuple[int, Tensor]]:
    """`num_tokens` draft tokens after the prefix, each with the q [V] it was drawn from.

    The target has sampled the prefix's last token but not read it, so its features (B = 1) are one row fewer.
    Raises: ValueError where they are not.
    """
    num_rows = len(prefix_ids) - 1
    if feature_BTD.shape[:2] != (1, num_rows):
        raise ValueError(f"{num_rows + 1} tokens need {num_rows} rows of features, not {tuple(feature_BTD.shape[:2])}")
    device = feature_BTD.device
    memory, drafted = KeyCache(), []
    ids_BT = torch.tensor([list(prefix_ids[1:])], device=device)
    position_ids_BT = torch.arange(num_rows, device=device)[None]
    for _ in range(num_tokens):
        hidden_BTD, feature_BTD = step(ids_BT, feature_BTD, position_ids_BT, memory)
        drafted.append(draw(logits(hidden_BTD[0, -1]).float(), temperature, generator))
        ids_BT, position_ids_BT = torch.tensor([[drafted[-1][0]]], device=device), position_ids_BT[:, -1:] + 1
        feature_BTD = feature_BTD[:, -1:]
    return drafted


def over_target_vocabulary(logits_W: Tensor, draft_ids_W: Tensor | None, vocab_size: int) -> Tensor:
    """Logits [V], -inf at ids that the draft's vocabulary lacks."""
    if draft_ids_W is None:
        return logits_W
    return logits_W.new_full((vocab_size,), -torch.inf).index_copy(0, draft_ids_W, logits_W)
