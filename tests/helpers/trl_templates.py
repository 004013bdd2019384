"""Public chat templates from TRL's package.

Each comes with a small tokenizer that has its special tokens.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import trl
from make_tokenizers import make_byte_tokenizer
from transformers import PreTrainedTokenizerFast

FOLDER = Path(trl.__file__).parent / "chat_templates"

SPECIAL = re.compile(
    r"<\|[^|<>{}]*\|>|<｜[^｜]*｜>|<SPECIAL_\d+>|</?s>|<(?:start|end)_of_(?:turn|utterance)>|<turn\|>|<tool_response\|>"
)
"""Tokens in the text of a template."""

ENDS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>", "<end>"),
    "gemma": ("<end_of_turn>",),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>"),
    "idefics3": ("<end_of_utterance>",),
    "lfm2": ("<|im_end|>",),
    "llama3": ("<|eot_id|>", "<|eom_id|>"),
    "llava_next": ("<end>", "</s>"),
    "muse_glimmer": ("<|eot|>",),
    "nemotron": ("<|im_end|>",),
    "phi3": ("<|end|>",),
    "qwen": ("<|im_end|>",),
    "smolvlm": ("<end_of_utterance>",),
}
"""Stop tokens, by the beginning of a template's name: those of the families' generation configs."""


def template_names() -> list[str]:
    return sorted(
        path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training")
    )


def training_names() -> list[str]:
    """The templates of which TRL has a version with the assistant's text marked."""
    return [name for name in template_names() if (FOLDER / f"{name}_training.jinja").exists()]


@functools.cache
def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    template = (FOLDER / f"{name}.jinja").read_text()
    tokenizer = make_byte_tokenizer(bos_token="<begin>", eos_token="<end>")
    special = sorted({*SPECIAL.findall(template), *find_ends(name)} - {"<end>"})
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.chat_template = template
    return tokenizer


def find_ends(name: str) -> tuple[str, ...]:
    family = max((family for family in ENDS if name.startswith(family)), key=len)
    return ENDS[family]


def training_template(name: str) -> str:
    return (FOLDER / f"{name}_training.jinja").read_text()
