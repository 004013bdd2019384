"""What a recipe begins with: the target, the data, and the signal, from their parts of the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

from distill.data import load_conversations, split_held_out
from distill.endpoint import Endpoint
from distill.loop import LoadedData, Loop
from distill.packing import PackedDataset
from distill.samples import Sample, build_samples, data_hash, held_out_prompts
from distill.signal_cache import CachedTarget, write_cache
from distill.signals import EndpointTarget, InProcessTarget
from eval.forecast import SignalFunction
from heads.artifact import fingerprint
from heads.checkpoint import load_causal_lm, load_tokenizer, model_folder


@dataclass(frozen=True, kw_only=True)
class Data:
    source: str = "HuggingFaceH4/ultrachat_200k"
    """Hub name, .jsonl, .parquet, folder of text, or `stdlib`; best the target's own answers (redraft regenerate)."""
    split: str = "train_sft"
    """Split of a hub data set."""
    held_out: float = 0.01
    """Share of the conversations, chosen by their hash, that is never trained on and judges the draft."""
    num_prompts: int = 64
    """Held-out prompts that forecast and engine answer, from every domain alike."""
    max_prompt_tokens: int = 1024


@dataclass(frozen=True, kw_only=True)
class Signal:
    kind: Literal["model", "cache", "endpoint"] = "model"
    """model: the target runs in this process, exact. cache: its top-k, written to disk before the first step.
    endpoint: its top-k, read live from a vLLM server."""
    k: int = 32
    """Ids kept at each row by cache and endpoint; the rest of the mass is one bucket."""
    url: str | None = None
    """The vLLM server of `endpoint`, started with --max-logprobs of at least k."""

    def __post_init__(self) -> None:
        if self.kind == "endpoint" and self.url is None:
            raise ValueError("--signal.kind endpoint needs --signal.url, the address of the target's vLLM server")


def load_target(target: str, signal: Signal, device: torch.device) -> tuple[Any, Any]:
    """The target, frozen, and its tokenizer: on a CPU in float32, as the engine serves it there; behind an endpoint
    without its weights, which stay on the server.

    Raises: FileNotFoundError or ValueError naming what is missing or corrupt in the folder.
    """
    tokenizer = load_tokenizer(target)
    if signal.kind == "endpoint":
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(target)), tokenizer
    dtype = torch.float32 if device.type == "cpu" else None
    return load_causal_lm(target, dtype).to(device).requires_grad_(False).eval(), tokenizer


def load_data(data: Data, tokenizer: Any, loop: Loop) -> LoadedData:
    """Train and held-out rows of `loop.sequence_length` tokens, and held-out prompts.

    Raises: ValueError where the source is empty or nothing of it can be trained on.
    """
    train, held_out = split_held_out(load_conversations(data.source, split=data.split), data.held_out)
    if not train or not held_out:
        raise ValueError(
            f"{data.source}: {len(train)} conversations to train on and {len(held_out)} held out; "
            "give more data or change --data.held-out"
        )
    train_samples, stats = build_samples(train, tokenizer, max_length=loop.sequence_length)
    held_out_samples, _ = build_samples(held_out, tokenizer, max_length=loop.sequence_length, progress=False)
    print(f"data: {stats}; {len(held_out):,} conversations held out")
    return LoadedData(
        train=_packed(train_samples, tokenizer, loop),
        held_out=_packed(held_out_samples, tokenizer, loop),
        prompts=held_out_prompts(held_out, tokenizer, num_prompts=data.num_prompts, max_length=data.max_prompt_tokens),
        stats=stats,
        hash=data_hash(train_samples),
        end_id=tokenizer.eos_token_id,
    )


def _packed(samples: list[Sample], tokenizer: Any, loop: Loop) -> PackedDataset:
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return PackedDataset(samples, sequence_length=loop.sequence_length, pad_id=pad_id, seed=loop.seed)


def target_signal(
    signal: Signal,
    target: Any,
    name: str,
    data: LoadedData,
    folder: Path,
    accelerator: Accelerator,
    aux_layers: Sequence[int] | None = None,
) -> SignalFunction:
    """The source of the training signal.

    `aux_layers`: None for a draft that reads the text alone; for a head, the target layers it reads beside the last
    hidden state, which may be none.
    Raises: ValueError where the config does not fit; OSError where the disk has no room for a cache.
    """
    if signal.kind == "model":
        return InProcessTarget(target, aux_layers or ())
    if aux_layers is not None:
        raise ValueError(f"signal {signal.kind} holds no hidden states for a head to read: use --signal.kind model")
    if signal.kind == "endpoint":
        assert signal.url is not None
        return EndpointTarget(Endpoint(signal.url), k=signal.k)
    samples = [*data.train.samples, *data.held_out.samples]
    cache, fingerprint_of_target = folder / "target-cache", fingerprint(model_folder(name))
    if accelerator.is_main_process:
        write_cache(
            samples,
            InProcessTarget(target),
            cache,
            target=fingerprint_of_target,
            k=signal.k,
            sequence_length=data.train.sequence_length,
            batch_size=8,
            device=accelerator.device,
        )
    accelerator.wait_for_everyone()
    return CachedTarget(cache, target=fingerprint_of_target, data=data_hash(samples))
