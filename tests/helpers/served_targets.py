"""Tiny random targets of other architectures than Llama, with sharp distributions.

vLLM serves them on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from redraft.files.checkpoint import new_model

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.15,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MULTIPLIERS = {
    "logits_scaling": 8.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
    "initializer_range": 0.3,
}  # fmt: skip
EXPERTS = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "sliding_window": 16, "head_dim": 64,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "head_dim": 64, "initializer_range": 0.06, "num_hidden_layers": 5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
"""Delta nets, whose CPU kernels take heads of 64 or 128, in bfloat16 only."""
SERVED: dict[str, dict[str, Any]] = {"granite": MULTIPLIERS, "gpt_oss": EXPERTS}
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
CAPPED = {
    "global_head_dim": 64, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 0,
    "final_logit_softcapping": 30.0,
}  # fmt: skip
SETTINGS = {**SERVED, "gemma3_text": WINDOW, "gemma4_text": {**WINDOW, **CAPPED}}


def make_served_target(model_type: str, vocab_size: int, **more: Any) -> Any:
    """The model, in float32; the same one at every call."""
    torch.manual_seed(0)
    settings = {**SIZES, **SETTINGS[model_type], "vocab_size": vocab_size, **more}
    if model_type == "gemma4_text":
        settings["vocab_size_per_layer_input"] = vocab_size
    return new_model(AutoConfig.for_model(model_type, **settings), torch.float32).eval()


def save_served_target(model_type: str, folder: Path, tokenizer: Any) -> Path:
    """Its folder, with a tokenizer."""
    make_served_target(model_type, len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
