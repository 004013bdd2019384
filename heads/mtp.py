"""MTP: a target's own multi-token-prediction layer, finetuned or begun anew, applied again for every draft token.

    combine([norm(embed(x[t+1])), norm(f[t])]) -> decoder layer -> final norm -> f'[t+1], read by the target's own head

(DeepSeek-V3, arXiv 2412.19437; MiMo, arXiv 2505.07608.) The decoder layer is the target's class from transformers with
its attention over our memory; what else differs between targets is in `heads.mtp_layouts`. Step 0 reads the target's
feature, later ones what the layer fed back: training goes through both. B = batch, T = tokens, D = hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from heads.attention import Memory
from heads.draft import Batch, DraftStep, TargetSignal, final_hidden
from heads.layers import Rotary
from heads.mtp_folder import read_layer
from heads.mtp_layouts import MEMORY_ATTENTION, layout_of
from heads.recurrent import decode, unroll
from heads.target import Target
from heads.tensors import TRAINED_WITH, load_into, read_config, write_head


@dataclass(frozen=True, kw_only=True)
class Config:
    num_steps: int = 3
    """Draft steps trained at once, each on what the one before fed back."""
    step_decay: float = 0.8
    """Step k weighs step_decay^k."""


def attend_memory(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, memory: Memory, **__: Any
) -> tuple[Tensor, None]:
    """An attention implementation of transformers, [B, T, H, E]: what is seen is the memory's to decide."""
    return memory.attend(query, key, value, scaling).transpose(1, 2), None


AttentionInterface.register(MEMORY_ATTENTION, attend_memory)


class Mtp(nn.Module):
    is_autoregressive = False

    def __init__(self, config: Config, target: Target) -> None:
        """A layer with random weights; `load` reads a target's own.

        Raises: ValueError for an architecture without an MTP layout.
        """
        super().__init__()
        self.config = config
        self.layout = layout_of(target.config)
        self._target_config = target.config
        self._embed_VD, self._head_VD = target.embed_VD, target.head_VD
        self.aux_layer_ids: tuple[int, ...] = () if self.layout.reads_normed else (target.config.num_hidden_layers,)
        hidden = target.config.hidden_size
        self._rotary = Rotary(self.layout.rotary(target.config))
        self.combine = nn.Linear(2 * hidden, hidden, bias=False)
        self.block: Any = self.layout.block(target.config)
        norm: Any = type(self.block.input_layernorm)  # some architectures' norms multiply by 1 + weight
        self.embed_norm, self.hidden_norm, self.final_norm = (
            norm(hidden, eps=target.config.rms_norm_eps) for _ in range(3)
        )
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=target.config.initializer_range)

    def step(
        self, ids_BT: Tensor, feature_BTD: Tensor, position_ids_BT: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor]:
        """The normed output, [B, T, D], twice: it is read by the head and fed back."""
        dtype = self.combine.weight.dtype
        embed_BTD = F.embedding(ids_BT, self._embed_VD).to(dtype)
        if self.layout.zero_at_start:
            embed_BTD = embed_BTD.masked_fill((position_ids_BT == 0)[..., None], 0)
        parts = [self.embed_norm(embed_BTD), self.hidden_norm(feature_BTD.to(dtype))]
        x_BTD = self.combine(torch.cat(parts if self.layout.embedding_first else parts[::-1], dim=-1))
        cos_sin = self._rotary(position_ids_BT, x_BTD)
        out_BTD = self.final_norm(self.block(x_BTD, position_embeddings=cos_sin, attention_mask=None, memory=memory))
        return out_BTD, out_BTD

    def _feature(self, signal: TargetSignal) -> Tensor:
        """The target's feature of step 0, [B, T, D]."""
        if self.layout.reads_normed:
            return final_hidden(signal)
        if signal.aux_BTLD is None or signal.aux_BTLD.shape[2] != 1:
            raise ValueError(f"this MTP layer reads the target's layer {self.aux_layer_ids[0]}: capture it alone")
        return signal.aux_BTLD[:, :, 0]

    def draft_steps(self, batch: Batch, signal: TargetSignal, num_steps: int | None = None) -> list[DraftStep]:
        """Steps of shifts 1, 2, ...: what the layer fed back, the true tokens."""
        return unroll(
            self.step,
            batch,
            self._feature(signal),
            self._head_VD,
            num_steps=num_steps or self.config.num_steps,
            step_decay=self.config.step_decay,
        )

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
        return decode(self.step, self._logits, prefix_ids, self._feature(signal), num_tokens, temperature, generator)

    def _logits(self, hidden_D: Tensor) -> Tensor:
        return F.linear(hidden_D, self._head_VD.to(hidden_D.dtype))

    def init_from_layer(self, layer: nn.Module, final_norm: nn.Module) -> None:
        """Begin as a layer of the target that reads the feature; the embedding's half keeps its random start."""
        own = self.block.state_dict()
        same = {n: t for n, t in layer.state_dict().items() if n in own and t.shape == own[n].shape}
        self.block.load_state_dict({**own, **same})
        self.final_norm.load_state_dict(final_norm.state_dict())
        hidden = self.combine.out_features
        start = hidden if self.layout.embedding_first else 0
        with torch.no_grad():
            self.combine.weight[:, start : start + hidden].copy_(torch.eye(hidden))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """The layer's tensors under the names that the target's checkpoint gives them."""
        return self.layout.to_checkpoint(self.state_dict(), self._target_config.num_hidden_layers)

    def export(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write the layer alone, with the target's config; `heads.mtp_folder.stitch` puts it into the target."""
        config = {**self._target_config.to_dict(), self.layout.count_key: 1, "redraft": self.record()}
        write_head(folder, self.checkpoint_tensors(), config, dtype or self.combine.weight.dtype)

    def record(self) -> dict[str, Any]:
        """The `redraft` section of a config.json: how the layer was trained, and what it was given."""
        given = {key: getattr(self.layout, key) for key in ("reads_normed", "zero_at_start", "embedding_first")}
        return {"family": "mtp", **asdict(self.config), TRAINED_WITH: given}

    @staticmethod
    def load(folder: Path, target: Target) -> Mtp:
        """The layer of an exported folder, or of a target's own.

        Raises: ValueError where the folder has no MTP layer, or a tensor is missing or of another shape.
        """
        training = read_config(folder).get("redraft", {})
        head = Mtp(Config(**{k: v for k, v in training.items() if k not in ("family", TRAINED_WITH)}), target)
        load_into(head, read_layer(folder, head.layout, target.config.num_hidden_layers), folder)
        return head
