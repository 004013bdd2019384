"""Medusa: independent heads on the target's last hidden state (Cai et al., arXiv 2401.10774).

    head i = 0, 1, ...:   h <- h + silu(W h + b), num_layers times;   logits = lm_heads[i] h,   predicts x[t+2+i]

B = batch, T = tokens, D = hidden, V = vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.files.folder import TRAINED_WITH, read_config
from redraft.files.tensors import load_into, read_tensors, write_head
from redraft.heads import options
from redraft.heads.draft import (
    Batch,
    DraftStep,
    Dtype,
    TargetSignal,
    Weights,
    final_hidden,
    label_rows,
)
from redraft.heads.logits import LogitRule
from redraft.heads.target import Target

Config = options.Medusa


class ResidualBlock(nn.Module):
    def __init__(self, hidden_size: int, num_layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(num_layers)
        )

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_BTD = hidden_BTD + F.silu(layer(hidden_BTD))
        return hidden_BTD


class Medusa(nn.Module):
    is_autoregressive = False
    is_block = False
    aux_layer_ids: tuple[int, ...] = ()
    engine_output = 0

    def __init__(self, config: Config, target: Target) -> None:
        """Initialise every head to the target's: zero blocks, and copies of its lm_head."""
        super().__init__()
        self.config = config
        self.vocab_size, self.hidden_size = target.head_VD.shape
        self.blocks = nn.ModuleList(
            ResidualBlock(self.hidden_size, config.num_layers, config.bias)
            for _ in range(config.num_heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(self.hidden_size, self.vocab_size, bias=False)
            for _ in range(config.num_heads)
        )
        # h + silu(0) = h, so with zero blocks, every head proposes the target's next token again.
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)
        for parameter in self.lm_heads.parameters():
            parameter.data.copy_(target.head_VD).mul_(LogitRule.of(target.config).scale)

    @property
    def max_tokens(self) -> int:
        return self.config.num_heads

    @property
    def _dtype(self) -> torch.dtype:
        return self.get_parameter("lm_heads.0.weight").dtype

    def feature(self, signal: TargetSignal) -> Tensor:
        """Return the target's last hidden state, [B, T, D]."""
        return final_hidden(signal)

    def draft_steps(
        self, batch: Batch, signal: TargetSignal, num_steps: int | None = None
    ) -> list[DraftStep]:
        """Return one step for each head, with shifts 1, 2, ..."""
        hidden_BTD = final_hidden(signal).to(self._dtype)
        return [
            DraftStep(
                hidden_BTD=block(hidden_BTD),
                head_WD=self.get_parameter(f"lm_heads.{i}.weight"),
                shift=i + 1,
                mask_BT=label_rows(batch, i + 1),
                weight=self.config.step_decay**i,
            )
            # `[:None]` selects all heads.
            for i, block in enumerate(self.blocks[:num_steps])
        ]

    def export(
        self,
        folder: Path,
        dtype: Dtype = None,
        *,
        weights: Weights = None,
        like: Path | None = None,
    ) -> None:
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "num_heads": self.config.num_heads,
            "num_hidden_layers": self.config.num_layers,
            # Without this key, vLLM silently drops the biases.
            "medusa_fc_bias": self.config.bias,
            "redraft": {
                "family": "medusa",
                "step_decay": self.config.step_decay,
                TRAINED_WITH: {"medusa_fc_bias": self.config.bias},
            },
        }
        write_head(folder, weights or self.state_dict(), config, dtype or self._dtype)

    @staticmethod
    def load(folder: Path, target: Target) -> Medusa:
        """Load a head from an exported folder, or from one in the layout of Medusa's authors.

        Raises:
            ValueError: a tensor is missing, unknown or has the wrong shape.
        """
        head = Medusa(_read(read_config(folder)), target)
        tensors = read_tensors(folder)
        load_into(head, {_our_name(name): tensor for name, tensor in tensors.items()}, folder)
        return head


def _our_name(name: str) -> str:
    """Translate a tensor name from the authors' layout, which numbers the modules of each head.

    `0.0.linear` is the first block of head 0, and `0.1` is its `lm_head`.
    """
    name = name.removeprefix("medusa_heads.")
    name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
    return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)


def _read(config: Mapping[str, Any]) -> Config:
    return Config(
        num_heads=config.get("num_heads") or config["medusa_num_heads"],
        num_layers=config.get("num_hidden_layers") or config["medusa_num_layers"],
        # This is vLLM's default. Without the key, vLLM drops the biases of a checkpoint, so such a
        # checkpoint is refused here.
        bias=config.get("medusa_fc_bias", False),
        **options.read_record(Config, config),
    )
