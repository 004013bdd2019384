"""DSpark: DFlash with a bias that depends on the previous token, and an estimate of acceptance.

    base[k], h[k]   logits and hidden state of DFlash's slot for the draft token k = 1, 2, ...
    e[k]          = markov_w1[x[a + k - 1]]                     a is the anchor; the token before the one to predict
    logits[k]     = base[k] + markov_w2 e[k]                    trained on text, drafted one by one
    confidence[k] = sigmoid(proj [h[k]; e[k]])                  trained to be alpha = 1 - TV(target, draft)

The slots of a block attend to each other, but they do not depend on the token drawn in the previous
slot. The bias adds this dependence at the cost of two small products per token. An engine can
verify fewer tokens if the confidence is low.

A block has one of two layouts. With `sample_from_anchor`, the anchor's slot proposes the first
token, so a block has as many tokens as slots. Without it, the anchor's slot proposes no token, as
in DFlash.

B = batch, T = tokens, K = draft tokens, R = rank of the bias, D = hidden, V = target vocabulary, W
= draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from redraft.files import speculators
from redraft.files.windows import SECTION
from redraft.heads import options
from redraft.heads.draft import Batch, Bias, DraftStep
from redraft.heads.families.dflash import DFlash
from redraft.heads.families.dflash_layouts import read_options, require_keys
from redraft.heads.nn.precision import autocast_kind
from redraft.heads.shape import LlamaShape
from redraft.heads.target import Target

# Engines compute the confidence head in float32, so it is exported in float32.
CONFIDENCE_HEAD = "confidence_head."
INIT_STD = 0.01  # scale of the initial weights; small, so that the head starts like DFlash

Config = options.DSpark


class MarkovHead(nn.Module):
    """The bias on the logits that depends on the previous token.

    The module consists of a table of codes and an output head for codes.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        for weight in self.parameters():
            nn.init.normal_(weight, std=INIT_STD)


class ConfidenceHead(nn.Module):
    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self._hidden_size = hidden_size
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(self, hidden_BTD: Tensor, code_BTR: Tensor) -> Tensor:
        """Compute the logit of the estimated acceptance, in float32 as in engines, [B, T]."""
        wide = torch.promote_types(hidden_BTD.dtype, torch.float32)
        # Compute the two parts separately, because concatenated rows for every token and slot would
        # take gigabytes. The weight is [1, D + R], with the hidden state first, as in vLLM's
        # concatenation.
        of_hidden_D, of_code_R = self.proj.weight[0].to(wide).tensor_split([self._hidden_size])
        with torch.autocast(autocast_kind(hidden_BTD.device), enabled=False):
            out: Tensor = (
                hidden_BTD.to(wide) @ of_hidden_D
                + code_BTR.to(wide) @ of_code_R
                + self.proj.bias.to(wide)
            )
        return out


class DSpark(DFlash):
    family = "dspark"
    architecture = "Qwen3DSparkModel"
    speculators_architecture = "DSparkDraftModel"
    float32 = (CONFIDENCE_HEAD,)
    config: Config

    def __init__(
        self,
        config: Config,
        target: Target,
        draft_ids_W: Tensor | None = None,
        shape: LlamaShape | None = None,
    ) -> None:
        """Create an untrained head; arguments and errors are the same as for `DFlash`."""
        super().__init__(config, target, draft_ids_W, shape)
        rank = config.markov_rank
        self.markov_head = MarkovHead(self.shape.vocab_size, len(self._head_WD), rank)
        self.confidence_head = (
            ConfidenceHead(self.shape.hidden_size, rank) if config.confidence_head else None
        )

    def _draft_step(
        self, batch: Batch, hidden_BAD: Tensor, shift: int, rows_BA: Tensor, *places: Tensor
    ) -> DraftStep:
        # Row t belongs to the anchor t + 1, so x[t + shift] is the token before the one to predict.
        # For the first token (shift 1), it is the anchor itself. Rows at the end wrap around and
        # have no label.
        ids_BA = batch.input_ids_BT.roll(-shift, dims=1).gather(1, rows_BA)
        code_BAR = self.markov_head.markov_w1(ids_BA).to(hidden_BAD.dtype)
        return replace(
            super()._draft_step(batch, hidden_BAD, shift, rows_BA, *places),
            bias=Bias(code_BTR=code_BAR, head_WR=self.markov_head.markov_w2.weight),
            confidence_BT=None
            if self.confidence_head is None
            else self.confidence_head(hidden_BAD, code_BAR),
        )

    def _served(self) -> dict[str, Any]:
        of_dflash = cast(dict[str, Any], super()._served()[SECTION])
        is_causal = self._direction()
        return {
            "mask_token_id": of_dflash["mask_token_id"],
            "target_layer_ids": of_dflash["target_layer_ids"],
            **({} if is_causal is None else {"is_causal": is_causal}),
            "sample_from_anchor": self.config.sample_from_anchor,
            **self._heads(),
        }

    def _served_by_speculators(self) -> dict[str, Any]:
        return {**super()._served_by_speculators(), **self._heads()}

    def _heads(self) -> dict[str, Any]:
        return {
            "markov_rank": self.config.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": self.config.confidence_head,
            "confidence_head_with_markov": self.config.confidence_head,
        }

    @staticmethod
    def _read(config: Mapping[str, Any], folder: Path) -> Config:
        """Read the options of a checkpoint.

        Raises:
            ValueError: the attention, the Markov head or the confidence head is of an unsupported
                kind, or the config does not state the block layout or the rank.
        """
        if (kind := config.get("markov_head_type") or "vanilla") != "vanilla":
            raise ValueError(
                f"{folder}: a Markov head of type {kind} is not supported; only vanilla is"
            )
        has_confidence = bool(config.get("enable_confidence_head"))
        # vLLM assumes false if the key is absent, so an absent key is refused too.
        if has_confidence and not config.get("confidence_head_with_markov"):
            raise ValueError(
                f"{folder}: a confidence head that does not read the Markov head is not supported "
                "here"
            )
        if speculators.MARK in config and "sample_from_anchor" not in config:
            raise ValueError(
                f"{folder}: config.json does not specify whether the anchor proposes a token "
                '(default: true in speculators, false in vLLM): add the value of "sample_from_anchor" used in training'
            )
        require_keys(config, folder, "markov_rank")  # vLLM reads it only at the top level
        # Engines look there first.
        section = {**config, **(config.get(SECTION) or {})}
        return Config(
            **read_options(config, section, folder),
            sample_from_anchor=config.get("sample_from_anchor", True),
            markov_rank=config["markov_rank"],
            confidence_head=has_confidence,
        )
