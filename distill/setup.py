"""What a recipe begins with: the target, the data, and the signal, from their parts of the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator

from distill.data import load_conversations, split_held_out
from distill.endpoint import Endpoint
from distill.endpoints import Endpoints
from distill.features import EndpointHiddenStates, load_skeleton
from distill.loop import LoadedData, Loop
from distill.packing import PackedDataset
from distill.samples import Sample, build_samples, data_hash, held_out_prompts
from distill.shards import Content, is_complete, write_cache
from distill.signal_cache import CachedHiddenStates, CachedTarget, HiddenDtype, HiddenStates, TopK
from distill.signals import EndpointTarget, InProcessTarget
from eval.forecast import SignalFunction
from heads.artifact import fingerprint
from heads.checkpoint import end_ids, load_causal_lm, load_tokenizer, model_folder


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
    """Longer held-out prompts are left out."""

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"--data.held-out is {self.held_out}: a share that judges lies between 0 and 1")
        if self.num_prompts < 1:
            raise ValueError("--data.num-prompts must be at least 1: held-out prompts judge the draft")


@dataclass(frozen=True, kw_only=True)
class Signal:
    kind: Literal["model", "cache", "endpoint"] = "model"
    """Where training reads what the target says.
    model: from the target in this process, exact.
    endpoint: live from its vLLM servers at `url`, whose weights are then not loaded here. A draft of its own reads the
    top k (any server); a head reads hidden states, which make the distribution exact (redraft serve-features).
    cache: from disk, written before the first step by the target in this process, or by its servers where there is an
    `url`. A draft of its own caches the top k, a head its layers and the last hidden state."""
    k: int = 32
    """Ids kept at each row for a draft of its own; the rest of the mass is one bucket."""
    url: tuple[str, ...] = ()
    """The target's vLLM servers, one or more: a request goes to the one with the least to do, and one that dies is
    passed over until it is back. Started with --max-logprobs of at least k, or for a head by redraft serve-features."""
    cache: Path | None = None
    """Folder of the cache, to be used by several runs; unset: in the run's own folder."""
    cache_dtype: HiddenDtype = "bfloat16"
    """Of cached hidden states: bfloat16 loses nothing of a bfloat16 target."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"--signal.k is {self.k}: a row keeps at least 1 id")
        if self.kind == "endpoint" and not self.url:
            raise ValueError("--signal.kind endpoint needs --signal.url, the address of the target's vLLM server")
        if self.kind == "model" and self.url:
            raise ValueError("--signal.url is not read with --signal.kind model: choose endpoint or cache")


def load_target(target: str, signal: Signal, device: torch.device) -> tuple[Any, Any]:
    """The target, frozen, and its tokenizer: on a CPU in float32, as the engine serves it there; behind a server
    without the weights of its layers, which stay there.

    Raises: FileNotFoundError or ValueError naming what is missing or corrupt in the folder.
    """
    tokenizer = load_tokenizer(target)
    dtype = torch.float32 if device.type == "cpu" else None
    if signal.url:
        return load_skeleton(target, dtype, device), tokenizer
    return load_causal_lm(target, dtype).to(device).requires_grad_(False).eval(), tokenizer


def load_data(data: Data, target: str, tokenizer: Any, loop: Loop) -> LoadedData:
    """Train and held-out rows of `loop.sequence_length` tokens, and held-out prompts; what ends an answer, by `target`.

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
        end_ids=end_ids(target, tokenizer),
    )


def _packed(samples: list[Sample], tokenizer: Any, loop: Loop) -> PackedDataset:
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return PackedDataset(samples, sequence_length=loop.sequence_length, pad_id=pad_id, seed=loop.seed)


def live_signal(
    signal: Signal, target: Any, aux_layers: Sequence[int] | None = None
) -> InProcessTarget | EndpointTarget:
    """What the target says of any batch: in this process, or from its server where there is an url.

    `aux_layers`: None for a draft that reads the text alone; for a head, the target layers it reads beside the last
    hidden state, which may be none.
    Raises: ValueError where the target, or what its server holds, does not fit.
    """
    if not signal.url:
        return InProcessTarget(target, aux_layers or ())
    servers = Endpoints([Endpoint(url, attempts=1) for url in signal.url])
    if aux_layers is None:
        return EndpointTarget(servers, k=signal.k)
    states = EndpointHiddenStates(servers, target, aux_layers)
    states.require_target()
    return states


def target_signal(
    signal: Signal,
    target: Any,
    name: str,
    data: LoadedData,
    folder: Path,
    accelerator: Accelerator,
    aux_layers: Sequence[int] | None = None,
) -> SignalFunction:
    """The source of the training signal; `aux_layers` as for `live_signal`.

    Raises: ValueError where the config does not fit; OSError where the disk has no room for a cache.
    """
    if signal.kind != "cache":
        return live_signal(signal, target, aux_layers)
    samples = [*data.train.samples, *data.held_out.samples]
    cache, of = signal.cache or folder / "target-cache", fingerprint(model_folder(name))
    if accelerator.is_main_process and not is_complete(cache):
        write_cache(
            samples,
            live_signal(signal, target, aux_layers),
            cache,
            _content(signal, target, aux_layers),
            target=of,
            sequence_length=data.train.sequence_length,
            batch_size=8,
            device=accelerator.device,
        )
    accelerator.wait_for_everyone()
    if aux_layers is None:
        return CachedTarget(cache, target=of, data=data_hash(samples))
    head_VD = target.get_output_embeddings().weight.detach()
    return CachedHiddenStates(cache, target=of, data=data_hash(samples), layers=aux_layers, head_VD=head_VD)


def _content(signal: Signal, target: Any, aux_layers: Sequence[int] | None) -> Content:
    if aux_layers is None:
        return TopK(signal.k)
    hidden_size = target.config.get_text_config().hidden_size
    return HiddenStates(layers=tuple(sorted(aux_layers)), hidden_size=hidden_size, dtype=signal.cache_dtype)
