"""The page's table of target families is true of the installed transformers and vLLM."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from redraft.distill.signal import sources
from redraft.distill.signal.sources import InProcessTarget
from redraft.heads.options import Eagle3
from redraft.heads.shape import LlamaShape
from tests.helpers.target_families import (
    EXACT,
    FAMILIES,
    MARKED,
    PAGE,
    WITH_IMAGES,
    largest_difference,
    make_config,
    make_model,
    served_by,
    verdicts,
)

PACKED = {
    "llama", "llama4_text", "qwen2", "qwen3", "qwen3_moe", "qwen2_moe", "mistral", "mixtral", "ministral3",
    "gemma3_text", "gemma4_text", "phi3", "phimoe", "deepseek_v3", "deepseek_v2", "glm4", "glm4_moe",
    "glm4_moe_lite", "minimax_m2", "smollm3", "granite", "olmo2", "olmo3", "olmoe", "exaone4",
    "exaone_moe", "seed_oss", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "apertus", "cohere2",
    "nemotron", "starcoder2", "qwen3_vl", "gemma3", "gemma4", "mistral3", "llama4",
}  # fmt: skip
"""Families whose documents may share a row. The others carry a state, compute all pairs of a row,
or index keys.
"""


@pytest.mark.parametrize("model_type", [*FAMILIES, *WITH_IMAGES])
def test_every_family_is_an_exact_target(model_type: str) -> None:
    assert verdicts(model_type) == ("yes", "yes")


@pytest.mark.parametrize("model_type", [*FAMILIES, *WITH_IMAGES])
def test_bfloat16_does_not_hide_a_state_that_is_carried_over(model_type: str) -> None:
    model = make_model(model_type, initializer_range=0.02).bfloat16()
    assert InProcessTarget(model).packs == (model_type in PACKED)


@pytest.mark.vllm
def test_the_page_lists_every_family_and_the_engines_of_the_installed_vllm() -> None:
    # if this fails: python -m tests.helpers.target_families
    written = MARKED.search(PAGE.read_text())
    assert written is not None
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in written[0].splitlines()[3:-1]
    ]
    assert {kind.strip("`"): engine for _, kind, engine in cells} == {
        model_type: served_by(model_type) for model_type in (*FAMILIES, *WITH_IMAGES)
    }


def test_latent_attention_leaves_the_head_the_usual_sizes() -> None:
    config = make_config(
        "deepseek_v3", hidden_size=7168, num_attention_heads=128, num_key_value_heads=128
    )
    shape = LlamaShape.from_config(config)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (56, 14, 128)


@pytest.mark.parametrize(
    ("model_type", "hidden", "heads", "sizes"),
    [
        ("gemma4_text", 256, 2, (2, 1, 128)),  # sizes by layer
        ("gemma4_text", 5376, 32, (42, 7, 128)),
        ("gemma4_text", 2880, 32, (45, 9, 64)),
        ("qwen3_5_text", 5120, 24, (40, 10, 128)),  # 24 heads do not divide the hidden size
        ("qwen3_5_text", 4096, 16, (16, 2, 8)),
    ],
)
def test_sizes_that_no_llama_layer_has_leave_the_head_the_usual_ones(
    model_type: str, hidden: int, heads: int, sizes: tuple[int, ...]
) -> None:
    config = make_config(model_type, hidden_size=hidden, num_attention_heads=heads)
    shape = LlamaShape.of_head(Eagle3(), config)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == sizes
    assert shape.logit_scale == 1.0
    assert LlamaConfig(**shape.hf_config())


def test_a_config_without_positions_makes_no_head() -> None:
    with pytest.raises(ValueError, match=r"FalconMambaConfig.*max_position_embeddings"):
        LlamaShape.from_config(AutoConfig.for_model("falcon_mamba"))


def test_large_rows_of_eager_attention_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    source = InProcessTarget(make_model("gpt_oss", torch.float64), (1,))
    seen: list[torch.Size] = []
    source._decoder.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["input_ids"].shape), with_kwargs=True
    )
    # four heads, float32: two documents of 20 tokens
    monkeypatch.setattr(sources, "SCORE_BYTES", 4 * 4 * 2 * 20**2)
    assert largest_difference(source) < EXACT
    assert all(b == 1 or b * t * t <= 800 for b, t in seen)
    assert max(b for b, _ in seen) > 1
