"""MTP layers of released targets: their tensor names, and the differences in their arithmetic.

            concatenated         embedding at position 0   the target's feature        decoder layer
MiMo        [hidden, embedding]  zero                      before its final norm       Qwen2's
Qwen3-Next  [embedding, hidden]  as it is                  after its final norm        its own, full attention
DeepSeek    [embedding, hidden]  zero                      after its final norm        its own

In all of them, the output of the layer's final norm is fed back, and is the input of the target's
output head.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Layout:
    model: str
    """"module:Prefix": a module in `transformers.models` and the prefix of its class names."""
    prefix: str
    """Prefix of the layer's tensor names. {n} stands for the target's number of layers."""
    names: Mapping[str, str]
    """Checkpoint names by the names of redraft's modules."""
    embedding_first: bool
    """Whether the embedding comes before the hidden state in the concatenation."""
    zero_at_start: bool
    """Whether the embedding of the second token, at position 0, is set to zero."""
    reads_normed: bool
    """Whether the first feature is the state after the target's final norm."""
    count_key: str = "num_nextn_predict_layers"
    """Config key for the number of MTP layers."""
    engine_output: int = 0
    """Index of the vLLM drafter output that follows the final norm."""

    def block(self, config: Any) -> nn.Module:
        """Build the decoder layer, which uses a `Memory` for attention."""
        module, prefix = self._module()
        config = copy.deepcopy(config)
        config._attn_implementation = MEMORY_ATTENTION
        config._experts_implementation = config._experts_implementation or "grouped_mm"
        # For DeepSeek, use an index past `first_k_dense_replace`, so that the layer has experts, as
        # in the checkpoint.
        index = config.num_hidden_layers
        if getattr(config, "layer_types", None):
            # Engines build it as layer 0 with full attention, whatever the target's first layer is.
            config.layer_types, index = ["full_attention"], 0
        block: nn.Module = getattr(module, f"{prefix}DecoderLayer")(config, index)
        return block

    @property
    def float32(self) -> tuple[str, ...]:
        """Parts of the names of tensors that transformers and engines keep in float32."""
        module, prefix = self._module()
        kept = getattr(module, f"{prefix}PreTrainedModel")._keep_in_fp32_modules_strict
        return tuple(kept or ())

    def rotary(self, config: Any) -> nn.Module:
        module, prefix = self._module()
        name = next(
            n
            for n in (f"{prefix}RotaryEmbedding", f"{prefix}TextRotaryEmbedding")
            if hasattr(module, n)
        )
        rotary: nn.Module = getattr(module, name)(config)
        return rotary

    def _module(self) -> tuple[Any, str]:
        name, prefix = self.model.split(":")
        return import_module(f"transformers.models.{name}.modeling_{name}"), prefix

    def to_checkpoint(self, tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
        prefix = self.prefix.format(n=num_layers)
        return {
            prefix + self._outer(name): tensor for name, tensor in split_experts(tensors).items()
        }

    def from_checkpoint(self, tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
        """Return the checkpoint's tensors for this layer, under redraft's names.

        Copies of the embeddings and the head are omitted.
        """
        prefix = self.prefix.format(n=num_layers)
        mine = {
            name.removeprefix(prefix): t
            for name, t in tensors.items()
            if self.holds(name, num_layers)
        }
        return join_experts({self._inner(name): tensor for name, tensor in mine.items()})

    def holds(self, name: str, num_layers: int) -> bool:
        """Whether a tensor belongs to the MTP layer and is not a copy of embeddings or head."""
        shared = name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
        return name.startswith(self.prefix.format(n=num_layers)) and not shared

    def _outer(self, name: str) -> str:
        module = next(m for m in self.names if name.startswith(f"{m}."))
        return self.names[module] + name.removeprefix(f"{module}.")

    def _inner(self, name: str) -> str:
        # "block" comes last: its prefix may be "", with which every name starts.
        module = next(m for m, theirs in self.names.items() if name.startswith(theirs))
        return f"{module}.{name.removeprefix(self.names[module])}"


MEMORY_ATTENTION = "redraft_memory"  # transformers' name for `heads.nn.attention.Memory`

MIMO = Layout(
    model="qwen2:Qwen2",
    prefix="model.mtp_layers.0.",
    names={
        "combine": "input_proj.",
        "embed_norm": "token_layernorm.",
        "hidden_norm": "hidden_layernorm.",
        "final_norm": "final_layernorm.",
        "block": "",
    },
    embedding_first=False,
    zero_at_start=True,
    reads_normed=False,
)
QWEN3_NEXT = Layout(
    model="qwen3_next:Qwen3Next",
    prefix="mtp.",
    names={
        "combine": "fc.",
        "embed_norm": "pre_fc_norm_embedding.",
        "hidden_norm": "pre_fc_norm_hidden.",
        "final_norm": "norm.",
        "block": "layers.0.",
    },
    embedding_first=True,
    zero_at_start=False,
    reads_normed=True,
)
QWEN3_5 = replace(QWEN3_NEXT, model="qwen3_5:Qwen3_5", count_key="mtp_num_hidden_layers")
DEEPSEEK = Layout(
    model="deepseek_v3:DeepseekV3",
    prefix="model.layers.{n}.",
    names={
        "combine": "eh_proj.",
        "embed_norm": "enorm.",
        "hidden_norm": "hnorm.",
        "final_norm": "shared_head.norm.",
        "block": "",
    },
    embedding_first=True,
    zero_at_start=True,
    reads_normed=True,
    engine_output=1,  # vLLM's first output is the state before the final norm
)
BY_MODEL_TYPE = {
    "mimo": MIMO,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "deepseek_v3": DEEPSEEK,
}


def detect_layout(config: Any) -> Layout:
    """Return the layout of a target.

    Raises:
        ValueError: the target has no layout here, or has several MTP layers.
    """
    is_mimo = "MiMoForCausalLM" in (getattr(config, "architectures", None) or [])
    layout = MIMO if is_mimo else BY_MODEL_TYPE.get(config.model_type)
    if layout is None:
        known = ", ".join(BY_MODEL_TYPE)
        raise ValueError(
            f"redraft has no MTP layout for the model type {config.model_type} (only for "
            f"{known}); --head.as-mimo converts a Llama"
        )
    if (getattr(config, layout.count_key, None) or 1) > 1:
        raise ValueError(
            f"the target has {getattr(config, layout.count_key)} MTP layers: only one is supported"
        )
    return layout


def split_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split stacked experts as in checkpoints, with one gate, up and down projection each.

    The transformers library stacks them in one tensor.
    """
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for i, expert in enumerate(tensor):
                # [2 I, D] with the gate first, where I is the size of an expert.
                gate, up = expert.chunk(2)
                stem = f"{name.removesuffix('gate_up_proj')}{i}."
                split |= {f"{stem}gate_proj.weight": gate, f"{stem}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            stem = name.removesuffix("down_proj")
            split |= {f"{stem}{i}.down_proj.weight": expert for i, expert in enumerate(tensor)}
        else:
            split[name] = tensor
    return split


def join_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Invert `split_experts`. Experts that are already stacked stay unchanged."""
    joined = dict(tensors)
    for first in [name for name in tensors if name.endswith("experts.0.gate_proj.weight")]:
        stem = first.removesuffix("0.gate_proj.weight")
        count = sum(name.startswith(stem) and name.endswith("gate_proj.weight") for name in tensors)
        gate, up, down = (
            torch.stack([joined.pop(f"{stem}{i}.{kind}_proj.weight") for i in range(count)])
            for kind in ("gate", "up", "down")
        )
        # gate and up [experts, I, D] become [experts, 2 I, D]; down is [experts, D, I].
        joined |= {f"{stem}gate_up_proj": torch.cat([gate, up], dim=1), f"{stem}down_proj": down}
    return joined
