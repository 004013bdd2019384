"""The interface of all draft families.

It consists of a batch, the target's signal for it, and the draft steps over which training sums.

B = batch, T = tokens, V = target vocabulary, W = draft vocabulary, D = hidden, L = auxiliary
layers, K = kept top-k ids, N = rows, R = rank of a bias.

Row t always represents the state after tokens x[0..t]. Row t of the target is its distribution of
x[t+1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from redraft.heads.logits import PLAIN, LogitRule

if TYPE_CHECKING:
    from redraft.heads.target import Target

Tokens = Sequence[int] | NDArray[Any] | Tensor
"""One value per token of a document."""
Dtype = torch.dtype | None
Weights = Mapping[str, Tensor] | None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed conversations. Attention never crosses from one document to another."""

    input_ids_BT: Tensor
    """int64; padding has id 0."""
    loss_mask_BT: Tensor
    """bool; True if token t is a label, i.e. assistant text. Row t - 1 learns from it."""
    document_BT: Tensor
    """int64, index of the token's document within the row, ascending from 0; -1 on padding."""
    position_ids_BT: Tensor
    """int64, consecutive within every document. They start at 0, or later if the beginning was cut
    off.
    """
    salt: int = 0
    """Number that varies the selection of rows, for drafts that train on a subset of them: the
    epoch, or the learner's step number. 0 in evaluation.
    """
    shared: SharedRows | None = None
    """The rows that this batch contains, if ranks share the rows of a whole batch
    (`heads.nn.shares`).
    """

    @staticmethod
    def packed(
        rows: Sequence[Sequence[tuple[Tokens, Tokens]]],
        *,
        width: int,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """Concatenate the documents of each row, given as (token ids, loss mask).

        Rows are padded on the right to `width`.
        """
        # Padding is id 0, which every embedding table has. A tokenizer's padding token may have no
        # row.
        ids_BT = torch.zeros((len(rows), width), dtype=torch.long)
        mask_BT = torch.zeros((len(rows), width), dtype=torch.bool)
        document_BT = torch.full((len(rows), width), -1)
        position_BT = torch.zeros((len(rows), width), dtype=torch.long)
        for b, row in enumerate(rows):
            end = 0
            for document, (ids_T, mask_T) in enumerate(row):
                start, end = end, end + len(ids_T)
                ids_BT[b, start:end] = torch.as_tensor(ids_T)
                mask_BT[b, start:end] = torch.as_tensor(mask_T)
                document_BT[b, start:end] = document
                # Positions restart in every document, as a server counts them for each request.
                position_BT[b, start:end] = torch.arange(end - start)
        return Batch(
            input_ids_BT=ids_BT.to(device),
            loss_mask_BT=mask_BT.to(device),
            document_BT=document_BT.to(device),
            position_ids_BT=position_BT.to(device),
        )

    @staticmethod
    def padded(
        texts: Sequence[Tokens],
        num_prompt_tokens: int | Sequence[int] = 0,
        *,
        device: torch.device | str = "cpu",
    ) -> Batch:
        """Create one row per document, padded on the right to the longest document.

        The tokens after the prompt are labels. `num_prompt_tokens` is one number per row, or one
        number for all rows.
        """
        if isinstance(num_prompt_tokens, int):
            num_prompt_tokens = [num_prompt_tokens] * len(texts)
        pairs = zip(texts, num_prompt_tokens, strict=True)
        rows = [[(text, torch.arange(len(text)) >= num_prompt)] for text, num_prompt in pairs]
        return Batch.packed(rows, width=max(map(len, texts)), device=device)


@dataclass(frozen=True, kw_only=True)
class SharedRows:
    """The rows of a whole batch that one rank computes: t of T rows."""

    whole: Batch
    """The whole batch of all ranks."""
    group: Any
    """torch.distributed's process group of these ranks."""
    num_ranks: int
    starts: tuple[int, ...]
    """First row of each piece, as an index in the whole batch."""
    rows_t: Tensor
    """int64, each row's index in the whole batch."""
    is_own_t: Tensor
    """bool; True for the rows that this rank trains. Other ranks train the remaining rows."""


@dataclass(frozen=True, kw_only=True)
class ExactTarget:
    """The target's full distribution at every row: p = softmax(rule(head @ hidden))."""

    hidden_BTD: Tensor
    """States after the final norm, i.e. the input of the target's output head."""
    head_VD: Tensor
    rule: LogitRule = PLAIN

    def logits(self, rows_N: Tensor) -> Tensor:
        """Return the target's logits at `rows_N` of the flattened batch, [N, V].

        The logits have the target's dtype, as in serving.
        """
        return self.rule.apply_(F.linear(self.hidden_BTD.flatten(0, 1)[rows_N], self.head_VD))


@dataclass(frozen=True, kw_only=True)
class TopKTarget:
    """The target's largest probabilities at every row.

    The remaining probability forms one tail bucket.
    """

    ids_BTK: Tensor
    """int64, distinct within a row; -1 in a row that was not recorded, i.e. has no label."""
    log_probs_BTK: Tensor
    """float32, natural logarithms under the full softmax at temperature 1."""


@dataclass(frozen=True, kw_only=True)
class TargetSignal:
    """Everything that a draft can learn from at each row."""

    distribution: ExactTarget | TopKTarget
    aux_BTLD: Tensor | None = None
    """Residual streams after the layers that the head requested, ascending (k = after k layers,
    before any final norm).
    """
    hidden_BTD: Tensor | None = None
    """States after the final norm, for heads that read them. Set only with a `TopKTarget`, because
    an `ExactTarget` already contains them.
    """

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the distribution, without the target's head, and of the streams."""
        sent = self.distribution
        found = (
            [sent.hidden_BTD]
            if isinstance(sent, ExactTarget)
            else [sent.ids_BTK, sent.log_probs_BTK]
        )
        return found if self.aux_BTLD is None else [*found, self.aux_BTLD]


@dataclass(frozen=True, kw_only=True)
class Bias:
    """A low-rank term, code @ head.T, that is added to a draft's logits."""

    code_BTR: Tensor
    head_WR: Tensor


@dataclass(frozen=True, kw_only=True)
class DraftStep:
    """One draft step over a batch.

    Row t of `hidden` predicts the same token as the target's row t + shift. A standalone draft has
    one step with shift 0. The first step of a head has shift 1, and the second has shift 2.
    """

    hidden_BTD: Tensor
    """Input of the draft's output head, after the draft's final norm if it has one. With
    `place_BT`, it has only some rows, [B, A, D], and so do the bias's code and the confidence.
    """
    head_WD: Tensor
    shift: int
    mask_BT: Tensor
    """bool, the rows to train: x[t + 1 + shift] is a label and belongs to the same document as row
    t.
    """
    place_BT: Tensor | None = None
    """int64, the index of row t in the flattened `hidden_BTD`; -1 for rows that it does not have,
    which are masked. None if it has all of them, in order.
    """
    weight: float = 1.0
    draft_ids_W: Tensor | None = None
    """int64, the target id of every draft id, ascending. None if the draft has the target's whole
    vocabulary.
    """
    extra_loss_BT: Tensor | None = None
    """Additional unreduced loss per row (EAGLE-1's feature regression), masked and weighted like
    the divergence.
    """
    bias: Bias | None = None
    """Low-rank bias that is added to the logits (DSpark's Markov head)."""
    rule: LogitRule = PLAIN
    """Scale and cap of the logits, applied after the bias."""
    confidence_BT: Tensor | None = None
    """Logit of the draft's estimate of alpha (DSpark's confidence head). Training compares it with
    alpha by binary cross-entropy, masked and weighted like the divergence.
    """

    def places(self, rows_N: Tensor) -> Tensor:
        """The indices in `hidden_BTD` of rows of the flattened batch, [N]."""
        return rows_N if self.place_BT is None else self.place_BT.flatten()[rows_N]

    def states(self, rows_N: Tensor) -> Tensor:
        """`hidden_BTD` at rows of the flattened batch, [N, D]."""
        return self.hidden_BTD.flatten(0, 1)[self.places(rows_N)]

    def logits(self, rows_N: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the draft's logits at `rows_N` of the flattened batch, [N, W].

        The logits are computed in `dtype`, by default the head's dtype.
        """
        # The dtypes may differ: autocast casts hidden states to a narrower dtype, and a frozen head
        # may have a narrower dtype than a trained layer.
        dtype = dtype or self.head_WD.dtype
        logits_NW = self.states(rows_N).to(dtype) @ self.head_WD.to(dtype).T
        # The bias costs R / D of the product above: 1/16 for rank 256 and hidden size 4,096.
        if self.bias is not None:
            logits_NW = (
                logits_NW
                + self.bias.code_BTR.flatten(0, 1)[self.places(rows_N)].to(dtype)
                @ self.bias.head_WR.to(dtype).T
            )
        return self.rule.apply(logits_NW)


class Draft(Protocol):
    """The interface of a draft module.

    Training, forecast, doctor and learner use only these members. Every draft is also an
    `nn.Module`, which provides the last three methods.
    """

    is_autoregressive: bool
    """Whether one step yields all draft tokens: the j-th row of step 0, counted from the current
    row, predicts the j-th draft token.
    """

    is_block: bool
    """Whether all tokens come from one block whose length changes them, so that a forecast of K
    tokens needs a separate pass.
    """

    aux_layer_ids: tuple[int, ...]
    """Target layers whose residual stream the draft reads, ascending. They are in
    `TargetSignal.aux_BTLD`.
    """

    @property
    def max_tokens(self) -> int | None:
        """Return the maximum number of tokens that the draft can propose.

        None if there is no limit.
        """

    @property
    def engine_output(self) -> int:
        """Return the index of the vLLM drafter output that equals `DraftStep.hidden_BTD`."""

    def draft_steps(
        self, batch: Batch, signal: TargetSignal, num_steps: int | None = None
    ) -> list[DraftStep]:
        """Return teacher-forced draft steps, starting with the step for the first draft token.

        `num_steps` defaults to the number of trained steps. A draft with fewer steps returns all of
        them.

        Raises:
            ValueError: the signal, which must include the streams after `aux_layer_ids`, is
                incomplete for this draft.
        """

    def feature(self, signal: TargetSignal) -> Tensor | None:
        """Return the input from the target in an engine's first pass, [B, T, D].

        Return None for a draft that has no such input.
        """

    def export(
        self,
        folder: Path,
        dtype: Dtype = None,
        *,
        weights: Weights = None,
        like: Path | None = None,
    ) -> None:
        """Write a folder that an engine can load.

        `dtype` defaults to the module's dtype. `weights` is the state dict gathered from all ranks,
        if they shard it. `like` is an earlier export, whose layout and additional files are kept.
        """

    @staticmethod
    def load(folder: Path, target: Target) -> Draft:
        """Load the draft from an exported folder.

        Raises:
            ValueError: a tensor is missing, unknown or has the wrong shape.
        """

    def to(self, *args: Any, **kwargs: Any) -> Any: ...
    def float(self) -> Any: ...
    def eval(self) -> Any: ...


def final_hidden(signal: TargetSignal) -> Tensor:
    """Return the target's last hidden state after the final norm, [B, T, D].

    Raises:
        ValueError: the signal does not contain it.
    """
    if isinstance(signal.distribution, ExactTarget):
        return signal.distribution.hidden_BTD
    if signal.hidden_BTD is None:
        raise ValueError(
            "this head reads the target's last hidden state, which the signal does not contain: capture it as "
            "well"
        )
    return signal.hidden_BTD


def aux_streams(signal: TargetSignal, aux_layer_ids: Sequence[int]) -> Tensor:
    """Return the target's residual streams after these layers, [B, T, L, D].

    Raises:
        ValueError: the signal has a different number of layers, or none.
    """
    aux_BTLD = signal.aux_BTLD
    if aux_BTLD is None or aux_BTLD.shape[2] != len(aux_layer_ids):
        held = 0 if aux_BTLD is None else aux_BTLD.shape[2]
        raise ValueError(
            f"this head reads target layers {aux_layer_ids}, but the signal contains {held} layers"
        )
    return aux_BTLD


def token_rows(batch: Batch) -> Tensor:
    """Mark this rank's own tokens except padding, bool [B, T]."""
    is_token_BT = batch.document_BT >= 0
    return is_token_BT if batch.shared is None else is_token_BT & batch.shared.is_own_t


def label_rows(batch: Batch, shift: int) -> Tensor:
    """Mark the rows that have a label for a step with this shift, bool [B, T].

    In these rows, x[t + 1 + shift] is in the loss mask and belongs to the document of row t. If
    ranks share the batch, only this rank's own rows are marked.
    """
    # With shift 1, tokens [p, q, a, b] and labels a and b: row 0 learns a, row 1 learns b, and the
    # other rows learn nothing.
    ahead = shift + 1
    mask_BT = torch.zeros_like(batch.loss_mask_BT)
    same_document_BT = batch.document_BT[:, ahead:] == batch.document_BT[:, :-ahead]
    # Padding has document -1, which equals itself, so the last condition excludes it.
    mask_BT[:, :-ahead] = (
        batch.loss_mask_BT[:, ahead:] & same_document_BT & (batch.document_BT[:, :-ahead] >= 0)
    )
    return mask_BT if batch.shared is None else mask_BT & batch.shared.is_own_t


def attention_mask(batch: Batch) -> Tensor:
    """Create the causal mask within each document, bool [B, 1, T, T].

    True means that a query attends to a key. Padding attends only to padding.
    """
    tokens = batch.document_BT.shape[1]
    causal_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=batch.document_BT.device).tril()
    # Padding attends to padding, because a row without any key would be NaN.
    same_BTT = batch.document_BT[:, :, None] == batch.document_BT[:, None, :]
    return (same_BTT & causal_TT)[:, None]
