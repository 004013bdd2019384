"""EAGLE-1: one decoder layer that predicts the target's next last-hidden state (Li et al., arXiv 2401.15077).

    fc([embed(x[t+1]), f[t]]) -> layer without input norm -> f'[t+1], read by the target's own head

f is the target's hidden state after its final norm; what is fed back is the layer's output as it is.
B = batch, T = tokens, D = hidden, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.attention import Memory
from heads.draft import Batch, DraftStep, TargetSignal, final_hidden
from heads.layers import Attention, GatedMLP, LlamaShape, Rotary, norm
from heads.recurrent import decode, unroll
from heads.target import Target
from heads.tensors import load_into, read_config, read_tensors, tensor_files, write_head


@dataclass(frozen=True, kw_only=True)
class Config:
    num_steps: int = 1
    """Draft steps trained at once. The paper trains one; more let the head see its own features, as serving does."""
    step_decay: float = 0.8
    """Step k weighs step_decay^k."""
    regression_weight: float = 10.0
    """Of the SmoothL1 distance to the target's feature, beside the divergence. The paper's ratio is 1 to 0.1."""


class Layer(nn.Module):
    """A Llama layer that starts with attention on its unnormalised input."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = norm(shape)
        self.mlp = GatedMLP(shape)

    def forward(self, x_BTD: Tensor, cos_sin: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        x_BTD = x_BTD + self.self_attn(x_BTD, cos_sin, memory)
        out: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out


class Eagle1(nn.Module):
    is_autoregressive = False
    aux_layer_ids: tuple[int, ...] = ()

    def __init__(self, config: Config, target: Target, shape: LlamaShape | None = None) -> None:
        """`shape`: by default that of the target's layers."""
        super().__init__()
        self.config = config
        self.shape = shape or LlamaShape.of(target.config)
        self._embed_VD, self._head_VD = target.embed_VD, target.head_VD
        self._rotary = Rotary.of(self.shape)
        self.fc = nn.Linear(2 * self.shape.hidden_size, self.shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(self.shape)])

    def step(
        self, ids_BT: Tensor, feature_BTD: Tensor, position_ids_BT: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor]:
        """The predicted feature, [B, T, D], twice: it is read by the head and fed back."""
        embed_BTD = F.embedding(ids_BT, self._embed_VD).to(self.fc.weight.dtype)
        x_BTD = self.fc(torch.cat([embed_BTD, feature_BTD.to(embed_BTD.dtype)], dim=-1))
        out_BTD = self.layers[0](x_BTD, self._rotary(position_ids_BT, x_BTD), memory)
        return out_BTD, out_BTD

    def draft_steps(self, batch: Batch, signal: TargetSignal, num_steps: int | None = None) -> list[DraftStep]:
        """Steps of shifts 1, 2, ..., each with the distance of its feature to the target's `shift` rows further on."""
        target_BTD = final_hidden(signal)
        steps = unroll(
            self.step,
            batch,
            target_BTD,
            self._head_VD,
            num_steps=num_steps or self.config.num_steps,
            step_decay=self.config.step_decay,
        )
        return [replace(step, extra_loss_BT=self._regression(step, target_BTD)) for step in steps]

    def _regression(self, step: DraftStep, target_BTD: Tensor) -> Tensor:
        """regression_weight * mean_D SmoothL1(own feature, target's), [B, T]."""
        wanted_BTD = target_BTD.roll(-step.shift, dims=1).to(step.hidden_BTD.dtype)
        distance_BTD = F.smooth_l1_loss(step.hidden_BTD, wanted_BTD, reduction="none")
        return self.config.regression_weight * distance_BTD.mean(-1)

    def propose(
        self,
        prefix_ids: Sequence[int],
        signal: TargetSignal,
        num_tokens: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> list[tuple[int, Tensor]]:
        """`num_tokens` draft tokens after the prefix, each with the q [V] it was drawn from.

        `signal` holds what the target computed on all but the last token of the prefix.
        """
        feature_BTD = final_hidden(signal)
        return decode(self.step, self._logits, prefix_ids, feature_BTD, num_tokens, temperature, generator)

    def _logits(self, hidden_D: Tensor) -> Tensor:
        return F.linear(hidden_D, self._head_VD.to(hidden_D.dtype))

    def export(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write what vLLM loads with `method: eagle`; embeddings and head are absent, so it shares the target's."""
        training = {"family": "eagle1", **asdict(self.config)}
        config = {**self.shape.hf_config(), "architectures": ["LlamaForCausalLM"], "redraft": training}
        write_head(folder, self.state_dict(), config, dtype or self.fc.weight.dtype)

    @staticmethod
    def load(folder: Path, target: Target) -> Eagle1:
        """A head from an exported folder, or from one that others trained; copies of what it shares are left out.

        Raises: ValueError where a tensor is missing or of another shape, or such a copy is not the target's.
        """
        config = read_config(folder)
        training = {name: value for name, value in config.get("redraft", {}).items() if name != "family"}
        head = Eagle1(Config(**training), target, LlamaShape.of_head(config, target.config))
        tensors = read_tensors(folder, tensor_files(folder))
        for name, shared_VD in (("embed_tokens.weight", target.embed_VD), ("lm_head.weight", target.head_VD)):
            copy_VD = tensors.pop(name, shared_VD)
            if not torch.equal(copy_VD, shared_VD.to(copy_VD)):
                raise ValueError(f"{folder}: {name} is not the target's: a leftover, or another target's head")
        load_into(head, tensors, folder)
        return head
