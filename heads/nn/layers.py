"""The building blocks of a Llama layer, for heads made of such layers.

B = batch, T = tokens, D = hidden, H = query heads, G = key heads, E = head size,
R = rotated part of E."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from redraft.heads.nn.attention import Memory
from redraft.heads.nn.precision import autocast_kind
from redraft.heads.shape import PARTIAL, LlamaShape


class Rotary:
    """Cosines and sines at given positions, for any rule of `transformers`.

    It is not a module, because a cast to bfloat16 would also round the frequencies.
    """

    def __init__(self, embedding: Any) -> None:
        self._embedding = embedding

    @staticmethod
    def from_shape(shape: LlamaShape) -> Rotary:
        # transformers' Llama always rotates whole heads, so a part is a smaller head here.
        rope = dict(shape.rope_parameters)
        rotated = int(shape.head_dim * rope.pop(PARTIAL, 1.0))
        # Llama's class also serves Qwen3 layers, because both rotate in the same way.
        config = LlamaConfig(
            hidden_size=rotated,
            num_attention_heads=1,
            head_dim=rotated,
            max_position_embeddings=shape.max_position_embeddings,
            rope_parameters=rope,
        )
        return Rotary(LlamaRotaryEmbedding(config))

    def __call__(self, position_ids_BT: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cos and sin, [B, T, R], in the dtype and on the device of `like`.

        The second half of R repeats the first.
        """
        # `like` only gives device and dtype. The angles are computed in float32 and then rounded.
        cos, sin = self._embedding.to(like.device)(like, position_ids_BT)
        return cos, sin


def rotate(x_BHTE: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x by position, with the two halves of R as real and imaginary parts."""
    cos_B1TR, sin_B1TR = (table[:, None] for table in cos_sin)
    if (size := cos_B1TR.shape[-1]) < x_BHTE.shape[-1]:
        part_BHTR = rotate(x_BHTE[..., :size], cos_sin)
        return torch.cat([part_BHTR, x_BHTE[..., size:]], dim=-1)
    # Element i is paired with i + R / 2 (vLLM: `is_neox_style`). Pairs of neighbours would load
    # without an error but be wrong.
    real, imaginary = x_BHTE.chunk(2, dim=-1)
    return x_BHTE * cos_B1TR + torch.cat([-imaginary, real], dim=-1) * sin_B1TR


class Projections(nn.Module):
    """The projections of grouped-query attention.

    The input may be wider than the output. With `qk_norm`, q and k are normed as in Qwen3.
    """

    def __init__(self, shape: LlamaShape, input_size: int, *, output_bias: bool) -> None:
        super().__init__()
        self._head_dim = shape.head_dim
        query_size, key_size = (
            n * shape.head_dim for n in (shape.num_attention_heads, shape.num_key_value_heads)
        )
        self.q_proj = nn.Linear(input_size, query_size, bias=shape.attention_bias)
        self.k_proj = nn.Linear(input_size, key_size, bias=shape.attention_bias)
        self.v_proj = nn.Linear(input_size, key_size, bias=shape.attention_bias)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=output_bias)
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
            self.k_norm = RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self._qk_norm = shape.qk_norm

    def _heads(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.view(*x_BTD.shape[:2], -1, self._head_dim).transpose(1, 2)


class Attention(Projections):
    """Grouped-query attention over a memory."""

    def __init__(self, shape: LlamaShape, input_size: int) -> None:
        # In engines, a Llama layer's output projection has the bias too, but a Qwen3 layer's does
        # not.
        super().__init__(shape, input_size, output_bias=shape.attention_bias and not shape.qk_norm)

    def forward(self, x_BTD: Tensor, cos_sin: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        # [B, H, T, E] for queries, [B, G, T, E] for keys and values.
        q, k, v = (
            self._heads(project(x_BTD)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        # The norms come before the rotation, as in Qwen3. Their weights differ by element, so the
        # two steps do not commute.
        if self._qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        out_BHTE = memory.attend(rotate(q, cos_sin), rotate(k, cos_sin), v, self._head_dim**-0.5)
        out: Tensor = self.o_proj(out_BHTE.transpose(1, 2).flatten(2))
        return out


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out


class PreNormLayer(nn.Module):
    """A Llama layer, with one norm before attention and one before the MLP."""

    def __init__(self, shape: LlamaShape, attention: nn.Module) -> None:
        super().__init__()
        self.input_layernorm: nn.Module = norm(shape)
        self.self_attn = attention
        self.post_attention_layernorm = norm(shape)
        self.mlp = GatedMLP(shape)

    def forward(self, x_BTD: Tensor, *attended: Any) -> Tensor:
        """Apply the layer. `attended` contains additional arguments for attention."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), *attended)
        out: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, in the dtype of x, as in the server and on a CPU.

    On a GPU, autocast would make input, output and residual stream float32, with twice the bytes.
    Also, PyTorch cannot use its fused norm kernel if the weight's dtype differs from x's.
    """

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(autocast_kind(x.device), enabled=False):
            return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def norm(shape: LlamaShape) -> RMSNorm:
    return RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
