"""What every draft family shares: a batch, the target's signal on it, and the draft steps that training sums over.

B = batch, T = tokens, V = target vocabulary, W = draft vocabulary, D = hidden, L = auxiliary layers,
K = kept top-k ids.

Row t of anything that predicts is what is known after tokens x[0..t]; the target's row t is its distribution of x[t+1].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed conversations. Attention never crosses from one document to another."""

    input_ids_BT: Tensor
    """int64; padding holds any valid id."""
    loss_mask_BT: Tensor
    """bool; token t is a label (text the assistant wrote), so the row that learns from it is t - 1."""
    document_BT: Tensor
    """int64, which of the row's documents a token belongs to, ascending from 0; -1 on padding."""
    position_ids_BT: Tensor
    """int64, from 0 in every document."""


@dataclass(frozen=True, kw_only=True)
class ExactTarget:
    """The target's whole distribution at every row: p = softmax(head @ hidden)."""

    hidden_BTD: Tensor
    """After the final norm, exactly what the target's head reads."""
    head_VD: Tensor


@dataclass(frozen=True, kw_only=True)
class TopKTarget:
    """The target's largest probabilities at every row; what is missing from 1 is one tail bucket."""

    ids_BTK: Tensor
    """int64, distinct within a row; a row that was not recorded (it labels nothing) holds -1."""
    log_probs_BTK: Tensor
    """float32, natural logarithms under the full softmax at temperature 1."""


@dataclass(frozen=True, kw_only=True)
class TargetSignal:
    """What a draft may learn from at each row."""

    distribution: ExactTarget | TopKTarget
    aux_BTLD: Tensor | None = None
    """Residual stream after the layers the head asked for, ascending (k = after k layers, before any final norm)."""
    hidden_BTD: Tensor | None = None
    """After the final norm, for heads that read it, where `distribution` is a `TopKTarget` and so does not hold it."""


@dataclass(frozen=True, kw_only=True)
class DraftStep:
    """One draft step over a batch: row t of `hidden` predicts what the target's row t + shift predicts.

    So a standalone draft has one step of shift 0, the first EAGLE step has shift 1, Medusa's head i has shift i.
    """

    hidden_BTD: Tensor
    """What the draft's head reads (after the draft's own final norm where it has one)."""
    head_WD: Tensor
    shift: int
    mask_BT: Tensor
    """bool, draft rows that train: x[t + 1 + shift] is a label, and of the same document as row t."""
    weight: float = 1.0
    draft_ids_W: Tensor | None = None
    """int64, the target id of every draft id, ascending, where the draft vocabulary is reduced."""
    extra_loss_BT: Tensor | None = None
    """A further unreduced loss per row (EAGLE-1's feature regression); masked and weighted like the divergence."""


class Draft(Protocol):
    """A draft family's module, as training and evaluation see it (an `nn.Module` besides)."""

    is_autoregressive: bool
    """True where one step serves for all: the j-th draft token is predicted by the step-0 row j further on."""

    def draft_steps(self, batch: Batch, signal: TargetSignal) -> list[DraftStep]:
        """Teacher-forced draft steps, the first draft token's first."""
        ...


def final_hidden(signal: TargetSignal) -> Tensor:
    """The target's last hidden state after its final norm, [B, T, D].

    Raises: ValueError where the signal holds none.
    """
    if isinstance(signal.distribution, ExactTarget):
        return signal.distribution.hidden_BTD
    if signal.hidden_BTD is None:
        raise ValueError("this head reads the target's last hidden state, which the signal lacks: capture it as well")
    return signal.hidden_BTD


def label_rows(batch: Batch, shift: int) -> Tensor:
    """Rows whose label x[t + 1 + shift] counts: in the loss mask, and of row t's document. bool [B, T]."""
    ahead = shift + 1
    mask_BT = torch.zeros_like(batch.loss_mask_BT)
    same_document_BT = batch.document_BT[:, ahead:] == batch.document_BT[:, :-ahead]
    mask_BT[:, :-ahead] = batch.loss_mask_BT[:, ahead:] & same_document_BT & (batch.document_BT[:, :-ahead] >= 0)
    return mask_BT


def attention_mask(batch: Batch) -> Tensor:
    """Causal within each document, bool [B, 1, T, T], True where a query may look; padding looks at itself only."""
    tokens = batch.document_BT.shape[1]
    causal_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=batch.document_BT.device).tril()
    same_BTT = batch.document_BT[:, :, None] == batch.document_BT[:, None, :]
    return (same_BTT & causal_TT)[:, None]


def draw(logits_V: Tensor, temperature: float, generator: torch.Generator | None = None) -> tuple[int, Tensor]:
    """A draft token and the distribution q [V] it was drawn from: one-hot at the first maximum for temperature 0."""
    if temperature == 0:
        best = int(logits_V.argmax())
        return best, torch.zeros_like(logits_V).index_fill_(0, torch.tensor([best], device=logits_V.device), 1)
    q_V = (logits_V / temperature).softmax(-1)
    return int(torch.multinomial(q_V, 1, generator=generator)), q_V
