"""The table of target families in docs/training.md, from tiny random models of each in the installed transformers.

    python -m tests.helpers.target_families        writes the table into the page

A family is supported if the signal of such a model passes the checks of training, and if an EAGLE-3 head makes draft
steps on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from redraft.distill.signal.sources import InProcessTarget
from redraft.heads.draft import Batch
from redraft.heads.families import eagle3
from redraft.heads.files.served_target import WITHOUT_AUX
from redraft.heads.target import Target, aux_layers

PAGE = Path(__file__).parents[2] / "docs/training.md"
MARKED = re.compile(r"(<!-- table targets -->\n).*?(<!-- end -->)", re.DOTALL)

TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
MOE = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
}  # fmt: skip
SPARSE = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama 2, 3", {}),
    "llama4_text": ("Llama 4", MOE),
    "qwen2": ("Qwen 2, 2.5", {}),
    "qwen3": ("Qwen 3", {}),
    "qwen3_moe": ("Qwen 3 MoE", MOE),
    "qwen3_next": ("Qwen3-Next", MOE),
    "qwen3_5_text": ("Qwen 3.5", {}),
    "qwen2_moe": ("Qwen 1.5 MoE, 2 MoE", MOE),
    "mistral": ("Mistral", {}),
    "mixtral": ("Mixtral", MOE),
    "ministral3": ("Ministral 3", {}),
    "gemma2": ("Gemma 2", {}),
    "gemma3_text": ("Gemma 3", {}),
    "gemma4_text": ("Gemma 4", {}),
    "phi3": ("Phi 3, 4", {}),
    "phimoe": ("Phi 3.5 MoE", MOE),
    "gpt_oss": ("gpt-oss", MOE),
    "deepseek_v3": ("DeepSeek V3, R1", {**MOE, **MLA}),
    "deepseek_v2": ("DeepSeek V2", {**MOE, **MLA}),
    "deepseek_v32": ("DeepSeek V3.2", {**MOE, **MLA, **SPARSE}),
    "kimi_linear": ("Kimi Linear", {**MOE, **MLA}),
    "glm4": ("GLM 4", {}),
    "glm4_moe": ("GLM 4.5, 4.6", MOE),
    "glm4_moe_lite": ("GLM 4.7 Flash", {**MOE, **MLA}),
    "glm_moe_dsa": ("GLM 5", {**MOE, **MLA, **SPARSE}),
    "minimax": ("MiniMax Text 1, M1", MOE),
    "minimax_m2": ("MiniMax M2", MOE),
    "smollm3": ("SmolLM 3", {}),
    "granite": ("Granite 3", {"logits_scaling": 8.0}),
    "olmo2": ("OLMo 2", {}),
    "olmo3": ("OLMo 3", {}),
    "olmoe": ("OLMoE", MOE),
    "exaone4": ("EXAONE 4", {}),
    "exaone_moe": ("K-EXAONE", MOE),
    "seed_oss": ("Seed-OSS", {}),
    "ernie4_5": ("ERNIE 4.5", {}),
    "ernie4_5_moe": ("ERNIE 4.5 MoE", MOE),
    "hunyuan_v1_dense": ("Hunyuan", {}),
    "hunyuan_v1_moe": ("Hunyuan MoE", MOE),
    "apertus": ("Apertus", {}),
    "lfm2": ("LFM 2", {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2}),
    "mimo_v2_flash": ("MiMo V2 Flash", MOE),
    "cohere2": ("Command R7B, A", {}),
    "falcon_h1": ("Falcon H1", {}),
    "nemotron": ("Nemotron 4", {}),
    "nemotron_h": ("Nemotron-H, Nano 2, 3", {}),
    "starcoder2": ("StarCoder 2", {}),
}
"""By model type: name for readers, and settings beside TINY, with the scale of the logits of released models."""

REASONS = {
    "are not head @ hidden": "logits are scaled or capped after the head",
    "packed documents see each other": "recurrent layers carry state from one packed document into the next",
    "scaled_dot_product_attention": "transformers has no SDPA attention for it",
    "no head can be made": "the config does not describe one Llama layer",
    "does not return the last hidden state": "transformers does not return the last hidden state",
}
"""In the table, by a part of the error."""


def rows() -> Iterator[str]:
    """The lines of the table."""
    yield "| target | model type | standalone draft | head |"
    yield "|---|---|---|---|"
    for model_type, (name, settings) in FAMILIES.items():
        standalone, head = verdicts(model_type, settings)
        yield f"| {name} | `{model_type}` | {standalone} | {head} |"


def verdicts(model_type: str, settings: dict[str, Any]) -> tuple[str, str]:
    """Whether a tiny random model of this type is a target for a standalone draft, and for a head."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**TINY, **settings})
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        InProcessTarget(model)
    except ValueError as error:
        return f"no: {_reason(error)}", "no"
    try:
        _draft_on(model)
    except ValueError as error:
        return "yes", f"no: {_reason(error)}"
    without_aux = type(model).__name__ in WITHOUT_AUX
    return "yes", "EAGLE-1 and Medusa: vLLM has no EAGLE-3 interface for it" if without_aux else "yes"


def _draft_on(model: Any) -> None:
    layers = aux_layers((), model.config.get_text_config().num_hidden_layers)
    head = eagle3.Eagle3(eagle3.Config(num_steps=2), Target.from_model(model))
    batch = Batch.padded([torch.arange(3, 15)] * 2)
    steps = head.draft_steps(batch, InProcessTarget(model, layers)(batch))
    assert all(step.hidden_BTD.isfinite().all() for step in steps)


def _reason(error: ValueError) -> str:
    return next(reason for part, reason in REASONS.items() if part in str(error))


def fill(page: str) -> str:
    """The page with the table of today."""
    return MARKED.sub(lambda m: m[1] + "\n".join(rows()) + "\n" + m[2], page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
    print(f"written by transformers {transformers.__version__}")
