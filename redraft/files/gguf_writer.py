"""Write a draft as a GGUF file, with the tokenizer from its target's GGUF file.

llama.cpp checks the names and shapes of a file's tensors, but not their meaning. The names and keys
follow its loaders and its converter (b10605). A test serves the files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.files.artifact import sync
from redraft.files.gguf import open_gguf, read_header
from redraft.files.gguf_rope import rope

LAYER = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Names of a layer's parts in transformers and in llama.cpp."""

TOKENIZER = "tokenizer."
UNQUANTISED = frozenset({"F32", "F16", "BF16", "F64"})
Value = bool | int | float | str | Sequence[int] | Sequence[str]


@dataclass(frozen=True)
class GgufTarget:
    """The parts of a target's GGUF file on which its drafts depend."""

    path: Path

    @cached_property
    def _reader(self) -> Any:
        read_header(self.path)  # raises an error if the file is part of a model or an adapter
        return open_gguf(self.path)

    def _read(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            raise ValueError(f"{self.path} has no {key}: it is not the GGUF file of a model")
        return field.contents()

    @cached_property
    def architecture(self) -> str:
        """llama.cpp's name for the architecture, e.g. `llama`."""
        return str(self._read("general.architecture"))

    @cached_property
    def num_layers(self) -> int:
        return int(self._read(f"{self.architecture}.block_count"))

    @cached_property
    def hidden_size(self) -> int:
        return int(self._read(f"{self.architecture}.embedding_length"))

    @cached_property
    def tokens(self) -> list[str]:
        """Return the vocabulary, by id."""
        return list(self._read("tokenizer.ggml.tokens"))

    @cached_property
    def quantised(self) -> tuple[str, ...]:
        """Return the types of the quantised tensors, e.g.

        `Q4_K`. Empty if no weights are quantised.
        """
        types = {tensor.tensor_type.name for tensor in self._reader.tensors}
        return tuple(sorted(types - UNQUANTISED))

    @property
    def tokenizer(self) -> dict[str, Any]:
        """The tokenizer's fields, as returned by the reader."""
        fields = self._reader.fields
        return {key: field for key, field in fields.items() if key.startswith(TOKENIZER)}

    def rows(self, name: str, ids: Sequence[int]) -> Tensor | None:
        """Return rows `ids` of a matrix in float32, [len(ids), D].

        None if there is no such tensor.
        """
        from gguf.quants import dequantize

        found = next((t for t in self._reader.tensors if t.name == name), None)
        if found is None:
            return None
        return torch.from_numpy(dequantize(found.data[list(ids)], found.tensor_type).copy()).float()


def write_gguf(
    path: Path,
    architecture: str,
    keys: Mapping[str, Value],
    tensors: Mapping[str, Tensor],
    tokenizer: Mapping[str, Any],
) -> None:
    """Write a GGUF file with keys `ARCHITECTURE.NAME` and a target's tokenizer, and flush it.

    Matrices keep their dtype. Vectors are written in float32, because llama.cpp reads norms in
    float32. A key that starts with `tokenizer.` replaces the target's.
    """
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    for key, value in keys.items():
        name = key if key.startswith(TOKENIZER) else f"{architecture}.{key}"
        _add_key(writer, name, value)
    for key, field in tokenizer.items():
        if key not in keys:
            kinds = field.types
            inner = kinds[-1] if len(kinds) > 1 else None  # the type of an array's elements
            writer.add_key_value(key, field.contents(), kinds[0], inner)
    for name, tensor in tensors.items():
        _add_tensor(writer, name, tensor.detach().contiguous())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    sync(path)


def _add_key(writer: Any, name: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, list(value))


def _add_tensor(writer: Any, name: str, tensor: Tensor) -> None:
    from gguf import GGMLQuantizationType

    if tensor.dtype == torch.int64:
        writer.add_tensor(name, tensor.numpy(), raw_dtype=GGMLQuantizationType.I64)
    elif tensor.dtype == torch.bfloat16 and tensor.ndim > 1:  # numpy has no bfloat16
        raw = tensor.view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType.BF16)
    else:
        is_half = tensor.dtype == torch.float16 and tensor.ndim > 1
        writer.add_tensor(name, tensor.numpy() if is_half else tensor.float().numpy())


def layer_name(layer: int, part: str) -> str | None:
    """Return llama.cpp's name for a layer's tensor, e.g.

    `mlp.up_proj.weight`. Return None if it has none.
    """
    name, _, kind = part.rpartition(".")
    known = LAYER.get(name)
    return None if known is None else f"blk.{layer}.{known}.{kind}"


def interleave(rows: Tensor, num_heads: int) -> Tensor:
    """Reorder a projection so that rotated pairs are adjacent, as in llama.cpp's `llama`.

    In transformers, each pair has one row in each of the head's two halves.
    """
    halves = rows.reshape(num_heads, 2, len(rows) // num_heads // 2, -1)
    return halves.transpose(1, 2).reshape(rows.shape)


def layer_keys(config: Mapping[str, Any]) -> dict[str, Value]:
    """The keys for a model's sizes and rotary embeddings, from a transformers config.json."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": head_dim,
        "rope.freq_base": float(rope(config)["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
