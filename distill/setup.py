"""What a recipe begins with: the target, the data, and the signal, from their parts of the config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from distill.data import load_conversations, split_held_out
from distill.loop import Loop
from distill.packing import PackedDataset
from distill.samples import SampleStats, build_samples, data_hash, held_out_prompts
from eval.prompts import Prompt
from heads.checkpoint import load_causal_lm, load_tokenizer

TargetDtype = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Data:
    source: str = "HuggingFaceH4/ultrachat_200k"
    """Hub name, .jsonl, .parquet, folder of text, or `stdlib`. Best: the target's own answers (`redraft regenerate`)."""
    split: str = "train_sft"
    held_out: float = 0.01
    """Share of the conversations, chosen by their hash, that is never trained on and judges the draft."""
    num_prompts: int = 64
    """Held-out prompts that forecast and engine answer."""
    max_prompt_tokens: int = 1024


@dataclass(frozen=True, kw_only=True)
class LoadedData:
    train: PackedDataset
    held_out: PackedDataset
    prompts: list[Prompt]
    stats: SampleStats
    hash: str


def load_data(data: Data, tokenizer: Any, loop: Loop) -> LoadedData:
    """Train and held-out rows of `loop.sequence_length` tokens, and held-out prompts with every domain alike.

    Raises: ValueError where the source is empty or nothing of it can be trained on.
    """
    train, held_out = split_held_out(load_conversations(data.source, split=data.split), data.held_out)
    if not held_out:
        raise ValueError(f"{data.source}: no conversation of {len(train)} is held out; raise --data.held-out")
    train_samples, stats = build_samples(train, tokenizer, max_length=loop.sequence_length)
    held_out_samples, _ = build_samples(held_out, tokenizer, max_length=loop.sequence_length, progress=False)
    print(f"train: {stats}")
    return LoadedData(
        train=_packed(train_samples, tokenizer, loop),
        held_out=_packed(held_out_samples, tokenizer, loop),
        prompts=held_out_prompts(held_out, tokenizer, num_prompts=data.num_prompts, max_length=data.max_prompt_tokens),
        stats=stats,
        hash=data_hash(train_samples),
    )


def _packed(samples: Any, tokenizer: Any, loop: Loop) -> PackedDataset:
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return PackedDataset(samples, sequence_length=loop.sequence_length, pad_id=pad_id, seed=loop.seed)
