"""Recurrent heads, which read the previous step's output.

They are unrolled for training, and decoded as in an engine.

    row t, step k   reads token x[t+1+k] at position t+k, and a feature: the target's at k = 0, later the output
                    of step k-1; predicts x[t+2+k]

Training feeds the true tokens (Li et al., EAGLE-3, arXiv 2503.01840, "training-time test"),
decoding feeds the drafted ones. If the target's answers to rejected drafts are known, training
feeds these drafts too.

B = batch, T = tokens, N = rejected drafts, D = hidden, V = target vocabulary, W = draft vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from redraft.heads.draft import Batch, DraftStep, label_rows
from redraft.heads.logits import PLAIN, LogitRule
from redraft.heads.nn.attention import Memory, StepMemory, compute_again


class Step(Protocol):
    """One pass of a head over rows."""

    def __call__(
        self, ids_BT: Tensor, feature_BTD: Tensor, position_ids_BT: Tensor, *memories: Memory
    ) -> tuple[Tensor, Tensor]:
        """Return the draft head's input and the feature to feed back, both [B, T, D].

        `memories` has one entry per layer.
        """


def unroll(
    draft: Any,
    batch: Batch,
    feature_BTD: Tensor,
    head_WD: Tensor,
    num_steps: int | None,
    *,
    draft_ids_W: Tensor | None = None,
    rule: LogitRule = PLAIN,
    windows: Sequence[int | None] = (None,),
) -> list[DraftStep]:
    """Return teacher-forced draft steps with shifts 1..num_steps, by default all trained steps.

    Step k, counted from 0, has weight step_decay^k. `draft.step` is a `Step`, and `draft.config`
    has the options of `Unrolled`. If `draft.recomputes`, the backward pass computes each step's
    activations again. `windows` has one entry per layer.
    """
    memories, step = [StepMemory(batch, window=window) for window in windows], draft.step
    run: Step = partial(_run_again, step) if draft.recomputes and torch.is_grad_enabled() else step
    steps = []
    for k in range(num_steps or draft.config.num_steps):
        # The last rows of a document get tokens of the next document. The labels of these rows are
        # masked, and no other row attends to them.
        ids_BT = batch.input_ids_BT.roll(-1 - k, dims=1)
        # The feature is fed back into the next step without detaching it, so the loss of step k
        # trains all earlier passes.
        hidden_BTD, feature_BTD = run(ids_BT, feature_BTD, batch.position_ids_BT + k, *memories)
        steps.append(
            DraftStep(
                hidden_BTD=hidden_BTD,
                head_WD=head_WD,
                # Step 0 has read x[t + 1] and predicts x[t + 2], as the target's row t + 1 does.
                shift=k + 1,
                mask_BT=label_rows(batch, k + 1),
                weight=draft.config.step_decay**k,
                draft_ids_W=draft_ids_W,
                rule=rule,
            )
        )
    return steps


def _run_again(
    step: Step, ids_BT: Tensor, feature_BTD: Tensor, position_ids_BT: Tensor, *memories: StepMemory
) -> tuple[Tensor, Tensor]:
    """Run the step, and keep only its input, its output, and its keys and values."""

    def once(feature_BTD: Tensor, *memories: StepMemory) -> tuple[Tensor, Tensor]:
        return step(ids_BT, feature_BTD, position_ids_BT, *memories)

    hidden_BTD, feature_BTD = compute_again(once, memories, feature_BTD)
    return hidden_BTD, feature_BTD
