"""Small random targets of the architectures that have a layer for multi-token prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from make_heads import HIDDEN, VOCAB, make_target
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from redraft.heads.families.mtp_folder import as_mimo

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "initializer_range": 0.15,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
}


def make_native_target(layout: str, folder: Path) -> Any:
    torch.manual_seed(0)
    if layout == "mimo":
        make_target().save_pretrained(folder / "llama")
        as_mimo(folder / "llama", folder / "mimo")
        return AutoModelForCausalLM.from_pretrained(folder / "mimo").eval()
    if layout == "qwen3_next":
        moe = {**MOE, "num_experts": 4, "shared_expert_intermediate_size": 16}
        config = Qwen3NextConfig(**SIZES, **LINEAR, **moe, num_key_value_heads=2, head_dim=8)
        return Qwen3NextForCausalLM(config).eval()
    if layout == "qwen3_5":
        return Qwen3_5ForCausalLM(
            Qwen3_5TextConfig(**SIZES, **LINEAR, num_key_value_heads=2, head_dim=16)
        ).eval()
    moe = {**MOE, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**SIZES, **LATENT, **moe, num_key_value_heads=4)
    ).eval()
