"""Medusa: independent heads on the target's last hidden state (Cai et al., arXiv 2401.10774).

    head i = 0, 1, ...:   h <- h + silu(W h + b), num_layers times;   logits = lm_heads[i] h,   predicts x[t+2+i]

B = batch, T = tokens, D = hidden, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.draft import Batch, DraftStep, TargetSignal, draw, final_hidden, label_rows
from heads.target import Target
from heads.tensors import TRAINED_WITH, load_into, read_config, read_tensors, tensor_files, write_head


@dataclass(frozen=True, kw_only=True)
class Config:
    num_heads: int = 3
    """Draft tokens per step; an engine may serve fewer, never more."""
    num_layers: int = 1
    """Residual blocks in each head."""
    bias: bool = True
    step_decay: float = 0.8
    """Head i weighs step_decay^i."""


class ResidualBlock(nn.Module):
    def __init__(self, hidden_size: int, num_layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=bias) for _ in range(num_layers))

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_BTD = hidden_BTD + F.silu(layer(hidden_BTD))
        return hidden_BTD


class Medusa(nn.Module):
    is_autoregressive = False
    aux_layer_ids: tuple[int, ...] = ()

    def __init__(self, config: Config, target: Target) -> None:
        """Every head begins as the target's own: blocks of zeros, `lm_heads` copied."""
        super().__init__()
        self.config = config
        self.vocab_size, self.hidden_size = target.head_VD.shape
        self.blocks = nn.ModuleList(
            ResidualBlock(self.hidden_size, config.num_layers, config.bias) for _ in range(config.num_heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(self.hidden_size, self.vocab_size, bias=False) for _ in range(config.num_heads)
        )
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)
        for parameter in self.lm_heads.parameters():
            parameter.data.copy_(target.head_VD)

    @property
    def _dtype(self) -> torch.dtype:
        return self.get_parameter("lm_heads.0.weight").dtype

    def draft_steps(self, batch: Batch, signal: TargetSignal) -> list[DraftStep]:
        """One step for each head, of shifts 1, 2, ..."""
        hidden_BTD = final_hidden(signal).to(self._dtype)
        return [
            DraftStep(
                hidden_BTD=block(hidden_BTD),
                head_WD=self.get_parameter(f"lm_heads.{i}.weight"),
                shift=i + 1,
                mask_BT=label_rows(batch, i + 1),
                weight=self.config.step_decay**i,
            )
            for i, block in enumerate(self.blocks)
        ]

    @torch.no_grad()
    def propose(
        self,
        prefix_ids: Sequence[int],
        signal: TargetSignal,
        num_tokens: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> list[tuple[int, Tensor]]:
        """`num_tokens` draft tokens after the prefix, each with the q [V] it was drawn from.

        `signal` holds what the target computed on all but the last token of the prefix; its last row is read.
        Raises: ValueError for more tokens than heads.
        """
        if num_tokens > self.config.num_heads:
            raise ValueError(f"{num_tokens} draft tokens asked of {self.config.num_heads} heads: ask for fewer")
        hidden_D = final_hidden(signal)[0, len(prefix_ids) - 2].to(self._dtype)
        heads = list(zip(self.blocks, self.lm_heads, strict=True))[:num_tokens]
        return [draw(lm_head(block(hidden_D)).float(), temperature, generator) for block, lm_head in heads]

    def export(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write what vLLM loads with `method: medusa`."""
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "num_heads": self.config.num_heads,
            "num_hidden_layers": self.config.num_layers,
            # without this key vLLM drops the biases, and says nothing
            "medusa_fc_bias": self.config.bias,
            "redraft": {
                "family": "medusa",
                "step_decay": self.config.step_decay,
                TRAINED_WITH: {"medusa_fc_bias": self.config.bias},
            },
        }
        write_head(folder, self.state_dict(), config, dtype or self._dtype)

    @staticmethod
    def load(folder: Path, target: Target) -> Medusa:
        """A head from an exported folder.

        Raises: ValueError where a tensor is missing, unknown (a bias the config denies) or of another shape.
        """
        head = Medusa(_read(read_config(folder)), target)
        load_into(head, read_tensors(folder, tensor_files(folder)), folder)
        return head


def _read(config: Mapping[str, Any]) -> Config:
    return Config(
        num_heads=config["num_heads"],
        num_layers=config["num_hidden_layers"],
        bias=config.get("medusa_fc_bias", False),
        step_decay=config.get("redraft", {}).get("step_decay", Config.step_decay),
    )
