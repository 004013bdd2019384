"""Sizes of well-known models, which can then be counted without access to the hub."""

import difflib
import json
import re
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from redraft.files.checkpoint import load_config, model_class
from redraft.files.folder import CONFIG, quantization_section


def _llama(
    hidden: int, inner: int, layers: int, heads: int, *, head_dim: int = 128, tied: bool = False
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=head_dim, tie_word_embeddings=tied,
        max_position_embeddings=131_072,
    )  # fmt: skip


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool = False) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, tie_word_embeddings=tied,
        max_position_embeddings=40_960,
    )  # fmt: skip


KNOWN = {
    "llama-3.2-1b": lambda: _llama(2048, 8192, 16, 32, head_dim=64, tied=True),
    "llama-3.2-3b": lambda: _llama(3072, 8192, 28, 24, tied=True),
    "llama-3.1-8b": lambda: _llama(4096, 14336, 32, 32),
    "llama-3.3-70b": lambda: _llama(8192, 28672, 80, 64),
    "qwen3-0.6b": lambda: _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-8b": lambda: _qwen3(4096, 12288, 36, 32),
    "qwen3-32b": lambda: _qwen3(5120, 25600, 64, 64),
    "qwen3-30b-a3b": lambda: Qwen3MoeConfig(
        vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
        max_position_embeddings=40_960,
    ),
    # transformers has no class for MiMo, which is a Qwen2 with an MTP layer.
    "mimo-7b": lambda: Qwen2Config(
        architectures=["MiMoForCausalLM"], vocab_size=151_680, hidden_size=4096, intermediate_size=11_008,
        num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, num_nextn_predict_layers=1,
    ),
}  # fmt: skip
"""Sizes by name, from each model's config.json on the hub."""


def find_sizes(name: str) -> Any:
    """Return the config for a known name, a folder, a config.json or a hub name.

    Raises:
        ValueError: there is no such config.
    """
    if name.lower() in KNOWN:
        return KNOWN[name.lower()]()
    path = Path(name)
    # For a config.json in a model folder, use the folder, which may have additional files.
    source = path.parent if path.name == CONFIG else path
    if path.exists():
        config = load_config(source)
        model_class(config)
        return config
    try:
        return load_config(name)
    except (OSError, ValueError) as error:
        close = difflib.get_close_matches(path.name.lower(), KNOWN, n=1)
        hint = (
            f"did you mean {close[0]}?" if close else f"known without the hub: {', '.join(KNOWN)}"
        )
        raise ValueError(
            f"the config of model {name} cannot be loaded ({error}): give a folder or a {CONFIG}; {hint}"
        ) from error


def stored_bits(config: Any) -> int | None:
    """Return the bits per weight of a target that is stored quantised.

    None for any other target.
    """
    section = quantization_section(config.to_dict())
    if not section:
        return None
    about = json.dumps(section)
    bits = re.search(r'"weights": {[^{}]*"num_bits": (\d+)|"bits": (\d+)', about)
    # mxfp4, NVFP4 and bitsandbytes do not state a number of bits.
    return int(bits[1] or bits[2]) if bits else 4 if re.search("(?i)fp4|4bit.: true", about) else 8
