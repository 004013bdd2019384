"""MTP: a target's multi-token-prediction layer, fine-tuned or new.

The layer is applied once for every draft token.

    combine([norm(embed(x[t+1])), norm(f[t])]) -> decoder layer -> final norm -> f'[t+1], read by the target's head

See DeepSeek-V3, arXiv 2412.19437, and MiMo, arXiv 2505.07608. The decoder layer is the target's
class in transformers with its attention replaced by ours; `mtp_layouts` has the other differences
between targets. Step 0 reads the target's feature, later steps the output of the step before, in
training as in serving.

B = batch, T = tokens, D = hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from redraft.files.checkpoint import load_text_config
from redraft.files.folder import TRAINED_WITH, read_config
from redraft.files.tensors import cast, load_into, write_head
from redraft.files.windows import target_window
from redraft.heads import options
from redraft.heads.draft import (
    Batch,
    DraftStep,
    Dtype,
    TargetSignal,
    Weights,
    aux_streams,
    final_hidden,
)
from redraft.heads.families.mtp_folder import read_layer
from redraft.heads.families.mtp_layouts import MEMORY_ATTENTION, detect_layout
from redraft.heads.nn.attention import Memory
from redraft.heads.nn.layers import Rotary
from redraft.heads.nn.recurrent import unroll
from redraft.heads.target import Target

Config = options.Mtp


def attend_memory(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    scaling: float,
    memory: Memory,
    **__: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers, [B, T, H, E].

    The memory determines which keys a query attends to.
    """
    return memory.attend(query, key, value, scaling).transpose(1, 2), None


# Layers find the function by the name that `Layout.block` writes into the config.
AttentionInterface.register(MEMORY_ATTENTION, attend_memory)


class Mtp(nn.Module):
    is_autoregressive = False
    is_block = False
    recomputes = False
    max_tokens: int | None = None

    def __init__(self, config: Config, target: Target) -> None:
        """Create a layer with random weights.

        Raises:
            ValueError: the target's architecture has no MTP layout here.
        """
        super().__init__()
        self.config = config
        self.layout = detect_layout(target.config)
        self._target_config = target.config
        self._embed_VD, self._head_VD = target.embed_VD, target.head_VD
        # The state before the final norm is the stream after the last layer.
        self.aux_layer_ids: tuple[int, ...] = (
            () if self.layout.reads_normed else (target.config.num_hidden_layers,)
        )
        hidden = target.config.hidden_size
        self._windows = [target_window(target.config)]
        self._rotary = Rotary(self.layout.rotary(target.config))
        self.combine = nn.Linear(2 * hidden, hidden, bias=False)
        self.block: Any = self.layout.block(target.config)
        norm: Any = type(
            self.block.input_layernorm
        )  # the norms of some architectures multiply by 1 + weight
        self.embed_norm, self.hidden_norm, self.final_norm = (
            norm(hidden, eps=target.config.rms_norm_eps) for _ in range(3)
        )
        for parameter in self.parameters():
            # Norms keep the ones or zeros with which they were created.
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=target.config.initializer_range)

    @property
    def engine_output(self) -> int:
        return self.layout.engine_output

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Convert the layer, as `.to` does, but keep tensors in float32 that engines keep in it."""
        wide = {
            name: tensor
            for name, tensor in self.named_buffers()
            if any(part in name for part in self.layout.float32)
        }
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, tensor in wide.items():
            converted = self.get_buffer(name)
            if converted.dtype.itemsize < tensor.dtype.itemsize:
                converted.data = tensor.to(converted.device)
        return self

    def step(
        self, ids_BT: Tensor, feature_BTD: Tensor, position_ids_BT: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor]:
        """Return the normed output, [B, T, D], twice: as the head's input and as feedback."""
        dtype = self.combine.weight.dtype
        embed_BTD = F.embedding(ids_BT, self._embed_VD).to(dtype)
        # Check the position, not the row: a packed batch contains several documents, and vLLM
        # checks the position too.
        if self.layout.zero_at_start:
            embed_BTD = embed_BTD.masked_fill((position_ids_BT == 0)[..., None], 0)
        parts = [self.embed_norm(embed_BTD), self.hidden_norm(feature_BTD.to(dtype))]
        x_BTD = self.combine(
            torch.cat(parts if self.layout.embedding_first else parts[::-1], dim=-1)
        )
        cos_sin = self._rotary(position_ids_BT, x_BTD)
        # The layer passes `memory`, an argument that it does not use, on to `attend_memory`.
        out_BTD = self.final_norm(
            self.block(x_BTD, position_embeddings=cos_sin, attention_mask=None, memory=memory)
        )
        return out_BTD, out_BTD

    def feature(self, signal: TargetSignal) -> Tensor:
        """Return the target's feature for step 0, [B, T, D]."""
        if self.layout.reads_normed:
            return final_hidden(signal)
        return aux_streams(signal, self.aux_layer_ids)[:, :, 0]

    def draft_steps(
        self, batch: Batch, signal: TargetSignal, num_steps: int | None = None
    ) -> list[DraftStep]:
        """Return steps with shifts 1, 2, ..., which use the layer's features and true tokens."""
        return unroll(
            self, batch, self.feature(signal), self._head_VD, num_steps, windows=self._windows
        )

    def init_from_layers(self, layers: Sequence[nn.Module], final_norm: nn.Module) -> None:
        """Start from a layer of the target, with the feature as its input.

        The weights that read the embedding stay random.
        """
        (layer,) = layers
        mine = self.block.state_dict()
        same = {
            n: t for n, t in layer.state_dict().items() if n in mine and t.shape == mine[n].shape
        }
        # Tensors with different names or shapes keep their random weights.
        self.block.load_state_dict({**mine, **same})
        self.final_norm.load_state_dict(final_norm.state_dict())
        hidden = self.combine.out_features
        # The columns of `combine` that read the feature.
        start = hidden if self.layout.embedding_first else 0
        with torch.no_grad():
            self.combine.weight[:, start : start + hidden].copy_(torch.eye(hidden))

    def checkpoint_tensors(self, weights: Weights = None, dtype: Dtype = None) -> dict[str, Tensor]:
        """Return the layer's tensors, or `weights`, under the names of the target's checkpoint.

        They are in `dtype`, as the target's would be. None means their own dtypes.
        """
        tensors = self.layout.to_checkpoint(
            weights or self.state_dict(), self._target_config.num_hidden_layers
        )
        return tensors if dtype is None else cast(tensors, dtype, self.layout.float32)

    def export(
        self,
        folder: Path,
        dtype: Dtype = None,
        *,
        weights: Weights = None,
        like: Path | None = None,
    ) -> None:
        """Write only the layer, with the target's config.

        `mtp_folder.stitch` adds it to the target.
        """
        config = {
            **self._target_config.to_dict(),
            self.layout.count_key: 1,
            "redraft": self.record(),
        }
        stored = dtype or self.combine.weight.dtype
        write_head(folder, self.checkpoint_tensors(weights), config, stored, self.layout.float32)

    def record(self) -> dict[str, Any]:
        """Return the `redraft` section for config.json.

        It records how the layer was trained and which inputs it received.
        """
        given = {
            key: getattr(self.layout, key)
            for key in ("reads_normed", "zero_at_start", "embedding_first")
        }
        training = {"num_steps": self.config.num_steps, "step_decay": self.config.step_decay}
        return {"family": "mtp", **training, TRAINED_WITH: given}

    @staticmethod
    def load(folder: Path, target: Target) -> Mtp:
        """Load the layer from an exported folder, or from a target's folder in the target's layout.

        Raises:
            ValueError: there is no such layer, or a tensor is missing or has the wrong shape.
        """
        # A target may have been converted to make room for the layer. The converted config is here.
        target = replace(target, config=load_text_config(folder))
        head = Mtp(Config(**options.read_record(Config, read_config(folder))), target)
        load_into(head, read_layer(folder, head.layout, target.config.num_hidden_layers), folder)
        return head
