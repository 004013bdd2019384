"""The sizes of a head's Llama layer, and those to take from the target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, Qwen3Config

from redraft.heads.logits import LogitRule
from redraft.heads.options import LayerSizes

EPS = ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon", "layer_norm_eps")
"""Names of a norm's epsilon in configs."""

USUAL_HEAD_DIM, QUERY_HEADS_A_KEY = 128, 4


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Sizes and rotary frequencies of one Llama layer."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    max_position_embeddings: int
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    attention_bias: bool = False
    """Whether the projections have a bias, which occurs only in other trainers' heads."""
    qk_norm: bool = False
    """Whether queries and keys are normed, as in Qwen3. This occurs only in other trainers' heads.
    """
    logit_scale: float = 1.0
    """Scale factor of the head's logits, equal to the target's. vLLM applies it."""

    @property
    def rule(self) -> LogitRule:
        return LogitRule(scale=self.logit_scale)

    @staticmethod
    def from_config(config: Any) -> LlamaShape:
        """Derive the shape of a Llama layer for a model from its `transformers` text config.

        The sizes are those of the model's layers if these are like Llama's, and otherwise the usual
        sizes.

        Raises:
            ValueError: the config lacks a size that a head shares with the target.
        """

        differing: list[str] = []  # sizes that may differ between layers, according to transformers

        def read(name: str) -> Any:
            try:
                return getattr(config, name, None)
            except RuntimeError:
                differing.append(name)
                return None

        hidden, vocabulary, positions = map(
            read, ("hidden_size", "vocab_size", "max_position_embeddings")
        )
        if None in (hidden, vocabulary, positions):
            raise ValueError(
                f"no head can be created for {type(config).__name__}, because it does not specify hidden_size, "
                "vocab_size and max_position_embeddings"
            )
        heads, key_heads, head_dim = map(
            read, ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        # These are transformers' defaults for absent keys: one key head per query head, and a head
        # size of hidden / heads.
        head_dim = head_dim or (heads and hidden // heads)
        # The sizes of latent attention do not suit a layer that caches keys: with DeepSeek V3's 128
        # key heads, this one layer would cache half as much as all 61 layers of the target. Also,
        # engines read a Llama config for a head, in which the number of heads divides the hidden
        # size. Qwen 3.5's need not.
        if not heads or hidden % heads or read("kv_lora_rank") or differing:
            head_dim = math.gcd(hidden, USUAL_HEAD_DIM)
            heads = hidden // head_dim
            most = max(1, heads // QUERY_HEADS_A_KEY)
            key_heads = next(count for count in range(most, 0, -1) if heads % count == 0)
        return LlamaShape(
            hidden_size=hidden,
            # With 8/3 of the hidden size, SwiGLU's three matrices are as large as the usual two
            # with a factor of 4.
            intermediate_size=read("intermediate_size") or -(-hidden * 8 // 3 // 64) * 64,
            num_attention_heads=heads,
            num_key_value_heads=key_heads or heads,
            head_dim=head_dim,
            rms_norm_eps=next(filter(None, map(read, EPS)), 1e-6),
            vocab_size=vocabulary,
            max_position_embeddings=positions,
            rope_parameters=llama_rope(read("rope_parameters") or {}, read("rope_theta")),
            logit_scale=LogitRule.of(config).scale,
        )

    @staticmethod
    def of_head(sizes: LayerSizes, target_config: Any) -> LlamaShape:
        """Return the shape of an untrained head's layers.

        The sizes come from the options, or otherwise from `from_config`.

        Raises:
            ValueError: the query heads do not divide the hidden size or share the key heads evenly,
                or `from_config` fails.
        """
        chosen = {field.name: getattr(sizes, field.name) for field in fields(LayerSizes)}
        shape = LlamaShape.from_config(target_config)
        shape = replace(shape, **{name: size for name, size in chosen.items() if size is not None})
        if shape.hidden_size % shape.num_attention_heads:
            raise ValueError(
                f"{shape.num_attention_heads} query heads do not divide the hidden size, "
                f"{shape.hidden_size}: give --head.num-attention-heads"
            )
        if shape.num_attention_heads % shape.num_key_value_heads:
            raise ValueError(
                f"{shape.num_attention_heads} query heads do not share {shape.num_key_value_heads} "
                "key heads evenly: give --head.num-key-value-heads"
            )
        return shape

    @staticmethod
    def from_head_config(
        layer_config: Mapping[str, Any], target_config: Any, folder: Path, *, qk_norm: bool
    ) -> LlamaShape:
        """Read the shape of the trained head in `folder` from its config, as an engine does.

        Hidden size, vocabulary and positions are always the target's, because embeddings are
        shared. Whether queries and keys are normed depends on the engine's class for the head.

        Raises:
            ValueError: the config cannot be read, or the rotation or the activation is not
                supported.
        """
        config = read_layer_config(layer_config, folder)
        if (act := config.hidden_act) not in ("silu", "swish"):
            raise ValueError(
                f"{folder}: hidden_act is {act}, but only silu is supported, as in vLLM"
            )
        return replace(
            LlamaShape.from_config(target_config),
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters=_own_rope(config.rope_parameters, config.head_dim, folder),
            attention_bias=bool(config.attention_bias),
            qk_norm=qk_norm,
            # Of the keys that scale a model's logits, vLLM reads only this one from a head.
            logit_scale=getattr(config, "logit_scale", None) or 1.0,
        )

    def record(self) -> dict[str, Any]:
        """Return the sizes that change a layer's arithmetic but not its tensors' shapes."""
        kept = ("rms_norm_eps", "num_attention_heads", "num_key_value_heads", "head_dim")
        return {"hidden_act": "silu", **{name: getattr(self, name) for name in kept}}

    def hf_config(self) -> dict[str, Any]:
        # Write rope_theta as well as rope_parameters, because readers older than transformers 5
        # read only rope_theta, with a default of 10000.
        return {
            "model_type": "qwen3" if self.qk_norm else "llama",
            "num_hidden_layers": 1,
            "hidden_act": "silu",
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "rope_theta": self.rope_parameters["rope_theta"],
            **{
                name: value
                for name, value in asdict(self).items()
                if name not in ("qk_norm", "logit_scale")
            },
            **({} if self.logit_scale == 1 else {"logit_scale": self.logit_scale}),
        }


def read_layer_config(layer_config: Mapping[str, Any], folder: Path) -> Any:
    """The `transformers` config for the layer of the head in `folder`, either Llama's or Qwen3's.

    Missing keys get the engine's defaults.

    Raises:
        ValueError: transformers, and so the engine, refuses a value.
    """
    kind = Qwen3Config if layer_config.get("model_type") == "qwen3" else LlamaConfig
    try:
        return kind(**{key: value for key, value in layer_config.items() if key != "model_type"})
    except StrictDataclassError as error:
        raise ValueError(f"{folder}: config.json is invalid: {error.__cause__ or error}") from error


PARTIAL = "partial_rotary_factor"
"""Rotary parameter: the fraction of each attention head that is rotated, from its first element."""

LLAMA_RULES = ("default", "linear", "yarn", "longrope", "llama3")
"""Rotation rules for whole attention heads that engines and transformers share. `dynamic` is not
among them: only engines read Hunyuan's `alpha`, and without it, `dynamic` equals `default` up to
`max_position_embeddings`."""

ENGINE_ONLY = (
    PARTIAL,
    "rope_dim",
    "mrope_section",
    "mrope_interleaved",
    "use_fope",
    "short_mscale",
)
"""Rotary parameters that engines read, but not transformers' Llama, with which heads are trained.
"""


def llama_rope(
    rope_parameters: Mapping[str, Any], theta: float | None = None, *, is_own: bool = False
) -> dict[str, Any]:
    """RoPE parameters for a head's Llama layer, derived from the target's or (`is_own`) its own.

    If there are several sets, the one for full attention is used. The keys in ENGINE_ONLY are
    omitted, except that a trained head may rotate a part of each attention head, as in vLLM.
    """
    chosen = rope_parameters.get("full_attention", rope_parameters)
    kind, theta = chosen.get("rope_type", "default"), chosen.get("rope_theta") or theta or 10000.0
    part = chosen.get(PARTIAL) or 1.0
    kept = {PARTIAL: part} if is_own and part != 1 else {}
    # Phi-4-mini's longrope lists have one factor per rotated pair, fewer than the head has pairs.
    is_partial = kind == "longrope" and part != 1 and not is_own
    if kind not in LLAMA_RULES or is_partial:
        return {"rope_type": "default", "rope_theta": theta, **kept}
    return {
        "rope_type": kind,
        "rope_theta": theta,
        **{k: v for k, v in chosen.items() if k not in ENGINE_ONLY},
        **kept,
    }


def _own_rope(rope_parameters: Mapping[str, Any], head_dim: int, folder: Path) -> dict[str, Any]:
    """RoPE parameters of the trained head in `folder`, as vLLM reads them.

    Raises:
        ValueError: the rotation is of a kind that is not supported here.
    """
    chosen = rope_parameters.get("full_attention", rope_parameters)
    kind = chosen.get("rope_type", "default")
    if kind == "dynamic" and "max_trained_positions" not in chosen:
        # Hunyuan's `alpha` only raises theta. vLLM ignores `factor` here.
        rotated = int(head_dim * (chosen.get(PARTIAL) or 1.0))
        raised = chosen.get("alpha", 1.0) ** (rotated / (rotated - 2))
        chosen = {**chosen, "rope_theta": chosen["rope_theta"] * raised}
    # "mrope" is an older name for "default": the sections change nothing in a text.
    elif kind not in (*LLAMA_RULES, "mrope"):
        raise ValueError(f"{folder}: a rotation of the type {kind} is not supported here")
    return llama_rope(chosen, is_own=True)
