"""A small Llama as a GGUF file, as llama.cpp writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from redraft.files.checkpoint import load_text_config
from redraft.files.gguf_rope import ROPE_FACTORS, rope_factors


def write_gguf(
    path: Path,
    source: Path,
    tokenizer: PreTrainedTokenizerFast,
    architecture: str = "llama",
    matrices: str = "F32",
) -> Path:
    """The Llama of `source` in llama.cpp's layout, end of turn 3; `matrices` is their type."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    model, config = LlamaForCausalLM.from_pretrained(source), load_text_config(source)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    scaling = config.rope_parameters["rope_type"]
    if scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    elif scaling == "llama3":
        writer.add_tensor(ROPE_FACTORS, rope_factors(config.to_dict()).numpy())
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer, gguf, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        rows = interleave_halves(weight, heads.get(name.split(".")[-2], 0))
        stored = rows.float().contiguous().numpy()
        kind = gguf.GGMLQuantizationType[matrices if stored.ndim > 1 else "F32"]
        writer.add_tensor(
            names.get_name(name, (".weight",)), gguf.quantize(stored, kind), raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring rows of a query or key, transformers the two halves of a head."""
    if num_heads == 0:
        return weight
    return weight.view(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def add_tokenizer(writer: Any, gguf: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    kinds = [3 if token in tokenizer.all_special_tokens else 1 for token in tokens]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_eot_token_id(3)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
