"""MLPSpeculator: a chain of small MLPs over state and token (Wertheimer et al., arXiv 2404.19124).

    s[0] = the target's last hidden state h[t]   (scaled: h / rms(h) / sqrt 2)
    s[i+1] = gelu(ln_i(proj_i s[i] + (emb_w / state_w) * emb_i(x[t+1+i]))),   head_i s[i+1] predicts x[t+2+i]
    state_w = 0.5^(0.5 / n),   emb_w = sqrt((1 - state_w^2) * inner / 2)

With these weights half of the first state's weight is left after all n stages. vLLM has no
proposer for it. B = batch, T = tokens, D = hidden, I = inner, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
from redraft.heads.files.folder import read_config, tensor_files
from redraft.heads.files.tensors import load_into, read_tensors, write_head
from redraft.heads.target import Target

Config = options.MLPSpeculator


class ScaledNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight + bias: an RMSNorm with a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x_BTI: Tensor) -> Tensor:
        return F.rms_norm(x_BTI, (x_BTI.shape[-1],), eps=1e-6) * self.weight + self.bias


class MLPSpeculator(nn.Module):
    is_autoregressive = False
    is_block = False
    aux_layer_ids: tuple[int, ...] = ()
    engine_output = 0

    def __init__(self, config: Config, target: Target) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, self.hidden_size = target.head_VD.shape
        stages, inner = config.num_stages, config.inner_dim or self.hidden_size
        self.emb = nn.ModuleList(nn.Embedding(self.vocab_size, inner) for _ in range(stages))
        self.proj = nn.ModuleList(
            nn.Linear(inner if i else self.hidden_size, inner, bias=False) for i in range(stages)
        )
        self.head = nn.ModuleList(
            nn.Linear(inner, self.vocab_size, bias=False) for _ in range(stages)
        )
        self.ln = nn.ModuleList(ScaledNorm(inner) for _ in range(stages))
        # 3 stages: 0.891, and 0.891 ** (2 * 3) = 0.5 of the variance is left at the end.
        state_weight = 0.5 ** (0.5 / stages)
        # divided by state_w: the norm that follows takes out a common factor, so only the ratio of
        # the two matters
        self._emb_weight = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight
        for parameter in (*self.emb.parameters(), *self.proj.parameters(), *self.head.parameters()):
            nn.init.normal_(parameter, std=inner**-0.5)
        for i in range(1, stages if config.tie_weights else 1):
            self.emb[i], self.head[i], self.ln[i] = self.emb[0], self.head[0], self.ln[0]
            self.proj[i] = self.proj[1]  # the first reads the target's hidden size

    def _first_state(self, hidden_BTD: Tensor) -> Tensor:
        hidden_BTD = hidden_BTD.to(self._dtype)
        if not self.config.scale_input:
            return hidden_BTD
        return F.rms_norm(hidden_BTD, (self.hidden_size,), eps=1e-6) * math.sqrt(0.5)

    @property
    def max_tokens(self) -> int:
        return self.config.num_stages

    @property
    def _dtype(self) -> torch.dtype:
        return self.get_parameter("proj.0.weight").dtype

    def stage(self, i: int, state_BTI: Tensor, ids_BT: Tensor) -> Tensor:
        """The state s[i+1], which head i reads, [B, T, I]."""
        mixed_BTI: Tensor = self.proj[i](state_BTI) + self._emb_weight * self.emb[i](ids_BT)
        return F.gelu(self.ln[i](mixed_BTI))

    def feature(self, signal: TargetSignal) -> Tensor:
        """The target's last hidden state, [B, T, D]."""
        return final_hidden(signal)

    def draft_steps(
        self, batch: Batch, signal: TargetSignal, num_steps: int | None = None
    ) -> list[DraftStep]:
        """One step for each stage, of shifts 1, 2, ..., on the true tokens."""
        state_BTI = self._first_state(final_hidden(signal))
        steps = []
        for i in range(min(self.max_tokens, num_steps or self.max_tokens)):
            # Stage i reads the true token x[t + 1 + i], as an engine reads the one drafted or
            # sampled before.
            state_BTI = self.stage(i, state_BTI, batch.input_ids_BT.roll(-1 - i, dims=1))
            steps.append(
                DraftStep(
                    hidden_BTD=state_BTI,
                    head_WD=self.get_parameter(f"head.{i}.weight"),
                    shift=i + 1,
                    mask_BT=label_rows(batch, i + 1),
                    weight=self.config.step_decay**i,
                )
            )
        return steps

    def export(
        self,
        folder: Path,
        dtype: Dtype = None,
        *,
        weights: Weights = None,
        like: Path | None = None,
    ) -> None:
        """Write the published layout.

        The tensors of every stage under `speculator.`, tied ones repeated.
        """
        config = {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": self.vocab_size,
            "emb_dim": self.hidden_size,
            "inner_dim": self.config.inner_dim,
            "n_predict": self.config.num_stages,
            "n_candidates": self.config.num_stages,
            # readers want one number per stage, although they use them for trees only
            "top_k_tokens_per_head": [1] * self.config.num_stages,
            "tie_weights": self.config.tie_weights,
            "scale_input": self.config.scale_input,
            "redraft": {"family": "mlp_speculator", "step_decay": self.config.step_decay},
        }
        tensors = {
            f"speculator.{name}": tensor for name, tensor in (weights or self.state_dict()).items()
        }
        write_head(folder, tensors, config, dtype or self._dtype)

    @staticmethod
    def load(folder: Path, target: Target) -> MLPSpeculator:
        """A head from an exported folder.

        Raises:
            ValueError: its tensors are others.
        """
        head = MLPSpeculator(_read(read_config(folder)), target)
        tensors = read_tensors(folder, tensor_files(folder))
        load_into(
            head,
            {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()},
            folder,
        )
        return head


def _read(config: Mapping[str, Any]) -> Config:
    return Config(
        num_stages=config["n_predict"],
        inner_dim=config.get("inner_dim", 0),
        tie_weights=config.get("tie_weights", False),
        scale_input=config.get("scale_input", False),
        step_decay=config.get("redraft", {}).get("step_decay", Config.step_decay),
    )
