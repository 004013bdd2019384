"""EAGLE-1: one decoder layer that predicts the target's next last hidden state.

See Li et al., arXiv 2401.15077.

    fc([embed(x[t+1]), f[t]]) -> layer without input norm -> f'[t+1], read by the target's head

f is the target's hidden state after the final norm. The layer's output is fed back unchanged.

B = batch, T = tokens, D = hidden, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redraft.files.folder import TRAINED_WITH, read_config
from redraft.files.tensors import load_into, read_tensors, write_head
from redraft.files.windows import target_window
from redraft.heads import options
from redraft.heads.draft import Batch, DraftStep, Dtype, TargetSignal, Weights, final_hidden
from redraft.heads.nn.attention import Memory
from redraft.heads.nn.layers import Attention, PreNormLayer, Rotary
from redraft.heads.nn.recurrent import unroll
from redraft.heads.shape import LlamaShape
from redraft.heads.target import EMBEDDINGS, HEAD, Target

Config = options.Eagle1


class Eagle1(nn.Module):
    is_autoregressive = False
    is_block = False
    recomputes = False
    aux_layer_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    engine_output = 0

    def __init__(self, config: Config, target: Target, shape: LlamaShape | None = None) -> None:
        super().__init__()
        self.config = config
        self.shape = shape or LlamaShape.of_head(config, target.config)
        self._embed_VD, self._head_VD = target.embed_VD, target.head_VD
        self._rotary = Rotary.from_shape(self.shape)
        self._windows = [target_window(target.config)]
        # There is no bias, because vLLM creates the layer without one.
        self.fc = nn.Linear(2 * self.shape.hidden_size, self.shape.hidden_size, bias=False)
        layer = PreNormLayer(self.shape, Attention(self.shape, self.shape.hidden_size))
        layer.input_layernorm = nn.Identity()  # there is no norm before attention
        # A list of one layer, because checkpoints name the tensors `layers.0`.
        self.layers = nn.ModuleList([layer])

    def step(
        self, ids_BT: Tensor, feature_BTD: Tensor, position_ids_BT: Tensor, memory: Memory
    ) -> tuple[Tensor, Tensor]:
        """Return the predicted feature, [B, T, D], twice: as the head's input and as feedback."""
        embed_BTD = F.embedding(ids_BT, self._embed_VD).to(self.fc.weight.dtype)
        x_BTD = self.fc(torch.cat([embed_BTD, feature_BTD.to(embed_BTD.dtype)], dim=-1))
        out_BTD = self.layers[0](x_BTD, self._rotary(position_ids_BT, x_BTD), memory)
        return out_BTD, out_BTD

    def feature(self, signal: TargetSignal) -> Tensor:
        """Return the target's last hidden state, [B, T, D]."""
        return final_hidden(signal)

    def draft_steps(
        self, batch: Batch, signal: TargetSignal, num_steps: int | None = None
    ) -> list[DraftStep]:
        """Return steps with shifts 1, 2, ..., each with its feature's distance to the target's."""
        target_BTD = final_hidden(signal)
        steps = unroll(
            self,
            batch,
            target_BTD,
            self._head_VD,
            num_steps,
            rule=self.shape.rule,
            windows=self._windows,
        )
        return [replace(step, extra_loss_BT=self._regression(step, target_BTD)) for step in steps]

    def _regression(self, step: DraftStep, target_BTD: Tensor) -> Tensor:
        """Return regression_weight * mean over D of SmoothL1(predicted, target's), [B, T]."""
        # The last rows of a document get features of other tokens, but the step's mask excludes
        # them.
        wanted_BTD = target_BTD.roll(-step.shift, dims=1).to(step.hidden_BTD.dtype)
        distance_BTD = F.smooth_l1_loss(step.hidden_BTD, wanted_BTD, reduction="none")
        return self.config.regression_weight * distance_BTD.mean(-1)

    def export(
        self,
        folder: Path,
        dtype: Dtype = None,
        *,
        weights: Weights = None,
        like: Path | None = None,
    ) -> None:
        """Write a folder for vLLM's `method: eagle`, which shares the embeddings and the head."""
        left_out = {field.name for field in fields(options.LayerSizes)}  # config.json has them
        kept = {name: value for name, value in asdict(self.config).items() if name not in left_out}
        training = {"family": "eagle1", **kept, TRAINED_WITH: self.shape.record()}
        # For the method eagle, vLLM itself adds the prefix "Eagle" to this name.
        config = {
            **self.shape.hf_config(),
            "architectures": ["LlamaForCausalLM"],
            "redraft": training,
        }
        tensors, stored = weights or self.state_dict(), dtype or self.fc.weight.dtype
        write_head(folder, tensors, config, stored, like=like)

    @staticmethod
    def load(folder: Path, target: Target) -> Eagle1:
        """Load a head from a folder written by redraft or another trainer.

        Copies of the target's embeddings and head in the folder are ignored.

        Raises:
            ValueError: a tensor does not fit, or a copy differs from the target's.
        """
        config = read_config(folder)
        recorded = Config(**options.read_record(Config, config))
        shape = LlamaShape.from_head_config(config, target.config, folder, qk_norm=False)
        head = Eagle1(recorded, target, shape)
        tensors = read_tensors(folder)
        if "fc.bias" in tensors and not tensors["fc.bias"].any():
            del tensors["fc.bias"]  # SGLang requires a bias, and a bias of zero changes nothing
        target.drop_copy(tensors, EMBEDDINGS, target.embed_VD, folder)
        target.drop_copy(tensors, HEAD, target.head_VD, folder)
        load_into(head, tensors, folder)
        return head
