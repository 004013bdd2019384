"""The table of target families in docs/engines.md.

It is made from tiny random models of each in the installed transformers.

    python -m tests.helpers.target_families        writes the table into the page

A column of training says yes if the signal of such a model is what the model says of each document
alone, and if an EAGLE-3 head makes draft steps on it. The last column is read from the installed
vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from redraft.distill.signal.apart import documents
from redraft.distill.signal.sources import InProcessTarget
from redraft.files.checkpoint import new_model
from redraft.heads.draft import Batch, ExactTarget
from redraft.heads.families import eagle3
from redraft.heads.target import Target, aux_layers
from tests.helpers.vllm_models import passes_inner_layers

PAGE = Path(__file__).parents[2] / "docs/engines.md"
MARKED = re.compile(r"(<!-- table targets -->\n).*?(<!-- end -->)", re.DOTALL)

TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.15,
}  # fmt: skip
"""Weights are larger than transformers' 0.02, so that a state carried over, a cap or a scale shows.
"""

MOE = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
}  # fmt: skip
SPARSE = {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 16}
"""Fewer keys than a document has. With two heads a fourth of the scores would be 0, and which of
them are among the largest would depend on the length of the row; released models have 64 and 32.
"""
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SHARED = {"shared_expert_intermediate_size": 16}
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 16, "mamba_chunk_size": 16,
    "mamba_n_groups": 1,
}  # fmt: skip
MAMBA_LAYERS = {
    "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"] * 2,
}  # fmt: skip
ZAMBA = {
    "num_key_value_heads": 4, "n_mamba_heads": 8, "mamba_d_state": 16, "chunk_size": 16, "num_mem_blocks": 1,
    "adapter_rank": 4, "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention"] * 2,
}  # fmt: skip
RECURRENT = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
    * 2
}
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention", "conv"] * 2}
WINDOW = {"sliding_window": 16}
CHUNKS = {**MOE, "intermediate_size_mlp": 48, "attention_chunk_size": 32}
GEMMA_4 = {
    **WINDOW, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8,
    "global_head_dim": 16, "final_logit_softcapping": 30.0,
}  # fmt: skip

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama 2, 3", {}),
    "llama4_text": ("Llama 4", CHUNKS),
    "qwen2": ("Qwen 2, 2.5", {}),
    "qwen3": ("Qwen 3", {}),
    "qwen3_moe": ("Qwen 3 MoE", MOE),
    "qwen3_next": ("Qwen3-Next", {**MOE, **DELTA, **SHARED}),
    "qwen3_5_text": ("Qwen 3.5, 3.6", DELTA),
    "qwen3_5_moe_text": ("Qwen 3.5 MoE, 3.6 MoE", {**MOE, **DELTA, **SHARED}),
    "qwen2_moe": ("Qwen 1.5 MoE, 2 MoE", MOE),
    "mistral": ("Mistral", {}),
    "mixtral": ("Mixtral", MOE),
    "ministral3": ("Ministral 3", {}),
    "gemma2": ("Gemma 2", WINDOW),
    "gemma3_text": ("Gemma 3", WINDOW),
    "gemma4_text": ("Gemma 4", GEMMA_4),
    "phi3": ("Phi 3, 4", {}),
    "phimoe": ("Phi 3.5 MoE", MOE),
    "gpt_oss": ("gpt-oss", {**MOE, **WINDOW}),
    "deepseek_v3": ("DeepSeek V3, R1, Kimi K2", {**MOE, **MLA}),
    "deepseek_v2": ("DeepSeek V2", {**MOE, **MLA}),
    "deepseek_v32": ("DeepSeek V3.2", {**MOE, **MLA, **SPARSE}),
    "kimi_linear": ("Kimi Linear", {**MOE, **MLA, "linear_head_dim": 8, "linear_num_heads": 4}),
    "glm4": ("GLM 4", {}),
    "glm4_moe": ("GLM 4.5, 4.6", MOE),
    "glm4_moe_lite": ("GLM 4.7 Flash", {**MOE, **MLA}),
    "glm_moe_dsa": ("GLM 5", {**MOE, **MLA, **SPARSE}),
    "minimax_m2": ("MiniMax M2", MOE),
    "smollm3": ("SmolLM 3", {}),
    "granite": ("Granite 3", {"logits_scaling": 8.0}),
    "granitemoehybrid": (
        "Granite 4",
        {**MOE, **MAMBA2, **RECURRENT, "shared_intermediate_size": 16, "logits_scaling": 6.0},
    ),
    "olmo2": ("OLMo 2", {}),
    "olmo3": ("OLMo 3", WINDOW),
    "olmoe": ("OLMoE", MOE),
    "olmo_hybrid": ("OLMo Hybrid", DELTA),
    "exaone4": ("EXAONE 4", WINDOW),
    "exaone_moe": ("K-EXAONE", {**MOE, **WINDOW}),
    "seed_oss": ("Seed-OSS", {}),
    "ernie4_5": ("ERNIE 4.5", {}),
    "ernie4_5_moe": ("ERNIE 4.5 MoE", MOE),
    "hunyuan_v1_dense": ("Hunyuan", {}),
    "hunyuan_v1_moe": ("Hunyuan MoE", MOE),
    "apertus": ("Apertus", {}),
    "lfm2": ("LFM 2", CONVOLUTIONS),
    "lfm2_moe": ("LFM 2 MoE", {**MOE, **CONVOLUTIONS, "num_dense_layers": 2}),
    "mimo_v2_flash": ("MiMo V2 Flash", {**MOE, **WINDOW}),
    "cohere2": ("Command R7B, A", {**WINDOW, "logit_scale": 0.25}),
    "falcon_h1": ("Falcon H1", {**MAMBA2, "lm_head_multiplier": 0.04}),
    "jamba": ("Jamba", {**MOE, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8}),
    "zamba2": ("Zamba 2", ZAMBA),
    "nemotron": ("Nemotron 4", {}),
    "nemotron_h": ("Nemotron-H, Nano 2, 3", {**MOE, **MAMBA_LAYERS}),
    "starcoder2": ("StarCoder 2", {}),
}
"""By model type: name for readers, and settings beside TINY, with the caps, scales and layer types
of released models. Windows, chunks and the layers of each kind are shorter than the rows of the
check.
"""

VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_heads": 2, "num_hidden_layers": 2,
    "depth": 2, "out_hidden_size": 32, "patch_size": 4, "image_size": 16, "spatial_merge_size": 2,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [1], "window_size": 16,
    "head_dim": 8,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
PROJECTOR = {"projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16}
IMAGE_TOKENS = {
    "image_token_id": 90, "image_token_index": 90, "video_token_id": 91, "vision_start_token_id": 92,
    "vision_end_token_id": 93, "boi_token_index": 92, "eoi_token_index": 93, "boi_token_id": 92, "eoi_token_id": 93,
}  # fmt: skip

WITH_IMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": ("Qwen2.5-VL", {"rope_parameters": MROPE}, {}),
    "qwen3_vl": ("Qwen3-VL", {"rope_parameters": {**MROPE, "mrope_interleaved": True}}, {}),
    "qwen3_5": ("Qwen 3.5, 3.6", {**DELTA, "head_dim": 16}, {}),
    "qwen3_5_moe": ("Qwen 3.5 MoE, 3.6 MoE", {**DELTA, **MOE, **SHARED, "head_dim": 16}, {}),
    "gemma3": ("Gemma 3", WINDOW, {"model_type": "siglip_vision_model"}),
    "gemma4": ("Gemma 4", GEMMA_4, {}),
    "mistral3": (
        "Mistral Small 3, Ministral 3",
        {"model_type": "mistral"},
        {"model_type": "pixtral"},
    ),
    "llama4": ("Llama 4", CHUNKS, PROJECTOR),
}
"""Models of text and images, by model type: name, settings of the text config, and of the vision
config.
"""

ROWS = ((5, 40, 11), (33, 3, 1, 19), (60,))
"""Lengths of the documents in rows of 64 tokens, twice the chunks of Llama 4."""

EXACT = 1e-6
"""Largest difference of a state or a logit from the document alone, as a share of the largest one,
in float64: 1e-15 in most families, 1e-7 in those whose classes rotate, route or scan in float32.
In float32 it is 2e-5.
"""


def make_config(model_type: str, **more: Any) -> Any:
    """The config of a tiny model."""
    if model_type in WITH_IMAGES:
        _, text, vision = WITH_IMAGES[model_type]
        whole = {"mm_tokens_per_image": 4} if model_type == "gemma3" else {}
        return AutoConfig.for_model(
            model_type,
            text_config={**TINY, **text, **more},
            vision_config={**VISION, **vision},
            **whole,
            **IMAGE_TOKENS,
        )
    settings = {**TINY, **FAMILIES[model_type][1], **more}
    if model_type == "nemotron_h":  # it counts `layers_block_type`
        settings.pop("num_hidden_layers")
    return AutoConfig.for_model(model_type, **settings)


def make_model(model_type: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A tiny random model of this type; the same one at every call."""
    torch.manual_seed(0)
    config = make_config(model_type, **more)
    if dtype == torch.float64:  # which grouped products of experts do not take
        config._experts_implementation = config.get_text_config()._experts_implementation = "eager"
    return new_model(config, torch.float32).eval().to(dtype)


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    rows = [
        [(torch.randint(3, 90, (n,), generator=generator), torch.ones(n)) for n in row]
        for row in ROWS
    ]
    return Batch.packed(rows, width=64)


def rows() -> Iterator[str]:
    """The lines of the table."""
    yield "| target | model type | a head on inner layers is served by |"
    yield "|---|---|---|"
    for model_type, (name, *_) in {**FAMILIES, **WITH_IMAGES}.items():
        images = ", with images" if model_type in WITH_IMAGES else ""
        yield f"| {name}{images} | `{model_type}` | {served_by(model_type)} |"


def served_by(model_type: str) -> str:
    """The engine that serves a head on inner layers of a family.

    It depends on the architecture in the released configs.
    """
    of_text, of_images = (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    names = of_images if model_type in WITH_IMAGES else of_text
    return "vLLM" if passes_inner_layers(names[model_type]) else "-"


def verdicts(model_type: str) -> tuple[str, str]:
    """Whether a tiny random model of this type is an exact target.

    There is a verdict for a standalone draft, and one for a head.
    """
    model = make_model(model_type, torch.float64)
    count = model.config.get_text_config().num_hidden_layers
    try:
        source = InProcessTarget(model, (0, count // 2, count))
    except ValueError as error:
        return f"no: {error}", "no"
    if (difference := largest_difference(source)) > EXACT:
        return f"no: {difference:.1e} off", "no"
    layers, model = aux_layers((), count), model.float()
    head = eagle3.Eagle3(eagle3.Config(num_steps=2), Target.from_model(model))
    batch = Batch.padded([torch.arange(3, 15)] * 2)
    steps = head.draft_steps(batch, InProcessTarget(model, layers)(batch))
    return "yes", "yes" if all(
        step.hidden_BTD.isfinite().all() for step in steps
    ) else "no: not finite"


@torch.no_grad()
def largest_difference(source: InProcessTarget) -> float:
    """The largest difference of states, streams and logits in packed rows.

    They are compared with those of each document alone, which the class computes.
    """
    batch = make_batch()
    signal = source(batch)
    exact, aux_BTLD = signal.distribution, signal.aux_BTLD
    assert isinstance(exact, ExactTarget)
    assert aux_BTLD is not None
    found = 0.0
    for at_T in documents(batch.document_BT):
        row, first, last = int(at_T[0]) // 64, int(at_T[0]) % 64, int(at_T[-1]) % 64 + 1
        ids_1T = batch.input_ids_BT[row : row + 1, first:last]
        one = source(Batch.padded([ids_1T[0]]))
        assert isinstance(one.distribution, ExactTarget)
        assert one.aux_BTLD is not None
        logits_TV = source.model(input_ids=ids_1T, use_cache=False).logits[0]
        pairs = [
            (exact.logits(at_T), logits_TV),
            (exact.hidden_BTD[row, first:last], one.distribution.hidden_BTD[0]),
            (aux_BTLD[row, first:last], one.aux_BTLD[0]),
        ]
        found = max(
            found, *(float((mine - alone).abs().max() / alone.abs().max()) for mine, alone in pairs)
        )
    return found


def fill(page: str) -> str:
    """The page with the table of today."""
    return MARKED.sub(lambda m: m[1] + "\n".join(rows()) + "\n" + m[2], page)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
    print(f"written by transformers {transformers.__version__}")
