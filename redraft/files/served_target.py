"""Check that vLLM serves a target exactly as training computes it, and refuse to train if not."""

from pathlib import Path
from typing import Any

from safetensors import safe_open

from redraft.files.folder import tensor_files
from redraft.files.target_folder import TargetFolder, count_ids
from redraft.files.windows import target_window

# fmt: off
WITH_AUX = frozenset({
    "AfmoeForCausalLM", "ApertusForCausalLM", "ArceeForCausalLM", "Cohere2MoeForCausalLM",
    "CohereCompassForConditionalGeneration", "CwmForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM", "Emu3ForConditionalGeneration", "Ernie4_5ForCausalLM",
    "Exaone4_5_ForConditionalGeneration", "FlexOlmoForCausalLM", "GPTBigCodeForCausalLM", "GPTNeoXForCausalLM",
    "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    "Glm5NextForConditionalGeneration", "GlmForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM",
    "GraniteForCausalLM", "GraniteSWAForCausalLM", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM",
    "HunYuanVLForConditionalGeneration", "Jais2ForCausalLM", "KimiLinearForCausalLM", "LagunaForCausalLM",
    "Llama4ForCausalLM", "Llama4ForConditionalGeneration", "LlamaForCausalLM", "LlavaForConditionalGeneration",
    "MellumForCausalLM", "MiMoForCausalLM", "MiMoV2FlashForCausalLM", "MiniCPM3ForCausalLM",
    "MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration", "MiniMaxM2ForCausalLM",
    "MiniMaxM3SparseForConditionalGeneration", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration",
    "MistralForCausalLM", "MuseGlimmerForConditionalGeneration", "NemotronHForCausalLM", "NemotronH_Omni_Reasoning_V3",
    "Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoForCausalLM", "Phi3ForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration", "SeedOssForCausalLM", "SmolLM3ForCausalLM", "Starcoder2ForCausalLM",
    "VaultGemmaForCausalLM",
})
# fmt: on
"""Architectures whose inner layers vLLM 0.32 passes to a head (`supports_eagle3`), under
transformers' names.
"""

NUM_ROWS = 64  # number of rows to compare between two tables that should be equal


def require_aux(target: TargetFolder, family: str) -> None:
    """Raise ValueError if vLLM cannot serve a head that uses inner layers of this target."""
    architecture = next(iter(target.config.architectures or []), "")
    if architecture and architecture not in WITH_AUX:
        raise ValueError(
            f"vLLM has no EAGLE-3 interface for {architecture}, so it cannot serve "
            f"{target.name} with "
            f"a head of the family {family}: train eagle1, medusa, mtp or a standalone draft, "
            f"or use --prove.no-engine to train for a different engine"
        )


def require_served_alike(target: TargetFolder) -> None:
    """Raise ValueError if vLLM would use different positions or ids, or a different output head."""
    _require_one_rope(target.text_config, target.name)
    require_rows(target)
    # In a model for text and images, the wrapper's setting decides whether embeddings are tied. The
    # text section's setting is often a default.
    if all(
        getattr(config, "tie_word_embeddings", False)
        for config in (target.config, target.text_config)
    ):
        _require_tied(target.folder)


def _require_one_rope(config: Any, name: str) -> None:
    """Refuse longrope beyond the original length.

    In that case, vLLM uses the long factors for all texts, but transformers only for long texts.

    Raises:
        ValueError: the target has more positions than its original length.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return
    original = (
        rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
    )
    if config.max_position_embeddings > original:
        raise ValueError(
            f"{name} uses longrope, for which vLLM and training use different factors if more than "
            f"{original} tokens are served: copy the target, set max_position_embeddings to "
            f"{original} in the copy's config.json, and train for and serve the copy"
        )


def visible_length(config: Any, asked: int | None = None, *, is_head: bool = True) -> int:
    """Return the maximum text length, up to `asked`, at which training matches serving.

    If all of the target's layers have a window, vLLM also applies it to the draft's layers. In
    training, heads do the same, but a standalone draft does not, so its texts end at the window.

    Raises:
        ValueError: the target's config does not state the length.
    """
    lengths: list[int | None] = [asked, getattr(config, "max_position_embeddings", None)]
    lengths.append(None if is_head else target_window(config))
    if not any(lengths):
        raise ValueError(
            f"the config.json of this {config.model_type} has no max_position_embeddings: add it"
        )
    return min(filter(None, lengths))


def require_positions(config: Any, sequence_length: int, flag: str, name: str) -> None:
    """Raise ValueError if a training row is longer than the target's number of positions."""
    positions = getattr(config, "max_position_embeddings", None) or sequence_length
    if sequence_length > positions:
        raise ValueError(
            f"{flag} is {sequence_length}, but {name} has only {positions:,} positions: choose at "
            f"most {positions}"
        )


def require_rows(target: TargetFolder) -> None:
    """Raise ValueError if the tokenizer has ids without a row in the target's embeddings.

    A special token that is not in the chat template, such as padding, needs no row, because it
    never occurs in text.
    """
    tokenizer, rows = target.tokenizer, target.text_config.vocab_size
    late = sorted(token for token, token_id in tokenizer.get_vocab().items() if token_id >= rows)
    special, template = set(tokenizer.all_special_tokens), str(tokenizer.chat_template)
    if written := [token for token in late if token not in special or token in template]:
        raise ValueError(
            f"the tokenizer has {count_ids(tokenizer):,} ids, including {written[0]!r}, but "
            f"{target.name} has only {rows:,} embeddings: remove the added tokens from the "
            "tokenizer, or add rows for them to the target (resize_token_embeddings)"
        )


def _require_tied(folder: Path) -> None:
    """Refuse a model with tied embeddings whose files contain two different tables.

    transformers and vLLM may choose different tables.

    Raises:
        ValueError: the tables differ.
    """
    try:
        files = tensor_files(folder)
        names = [
            name
            for end in ("embed_tokens.weight", "lm_head.weight")
            for name in files
            if name.endswith(end)
        ]
        tables = [_some_rows(files[name], name) for name in names]
    except FileNotFoundError:  # weights in a different format, or on a different machine
        return
    if len(tables) == 2 and (tables[0].shape != tables[1].shape or not tables[0].equal(tables[1])):
        raise ValueError(
            f"{folder} has tie_word_embeddings, but {names[1]} differs from {names[0]}: set "
            "tie_word_embeddings "
            f"to false in config.json if the head was trained, or remove {names[1]}"
        )


def _some_rows(path: Path, name: str) -> Any:
    with safe_open(path, "pt") as file:
        rows = file.get_slice(name)
        step = max(1, rows.get_shape()[0] // NUM_ROWS)
        return rows[::step]
