"""Load a recipe's target, data and training signal."""

import datetime
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState

from redraft.distill.data.conversations import (
    identify_conversations,
    load_conversations,
    remove_overlap,
    split_held_out,
    split_key,
)
from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import SampleStats, data_hash, held_out_prompts, stream_samples
from redraft.distill.data.tokens import Content as TokenContent
from redraft.distill.data.tokens import Origin, describe_tokenizer, keep_tokens, read_tokens
from redraft.distill.signal.ahead import OneAhead
from redraft.distill.signal.cache import CachedHiddenStates, CachedTarget, HiddenStates, TopK
from redraft.distill.signal.endpoint import Endpoint
from redraft.distill.signal.endpoints import Endpoints
from redraft.distill.signal.features import EndpointHiddenStates, load_skeleton
from redraft.distill.signal.sharded import is_sharded, leading, load_sharded
from redraft.distill.signal.shards import is_complete, write_cache
from redraft.distill.signal.sources import EndpointTarget, InProcessTarget
from redraft.distill.train.loop import LoadedData
from redraft.distill.train.run_config import Data, Loop, Signal
from redraft.distill.train.run_folder import TOKENS, RunFolder
from redraft.engine.hardware import Machine, this_machine
from redraft.engine.head_size import require_model_heads
from redraft.eval.forecast.greedy import SignalFunction
from redraft.files.checkpoint import load_causal_lm, refuse_quantised, require_finite
from redraft.files.served_target import require_served_alike, visible_length
from redraft.files.target_folder import TargetFolder
from redraft.heads.logits import LogitRule
from redraft.heads.target import LoadedTarget

TOKENS_A_WRITE = 32_768
"""Number of tokens per batch when states are computed for a cache."""

SERVERS = (
    "read it from vLLM servers (--signal.kind endpoint --signal.url URL), for a head started with "
    "`redraft serve-features`"
)


def load_target(
    target: TargetFolder,
    signal: Signal,
    device: torch.device,
    machine: Machine | None = None,
    *,
    cure: str = SERVERS,
) -> Any:
    """Load a target's model, frozen and in its dtype. `machine` is this machine by default.

    With a URL, only the embeddings, the final norm and the head are loaded here. `cure` ends the error
    for a target that this process cannot load.

    Raises:
        FileNotFoundError, ValueError: a file is missing or corrupt.
        ValueError: the target's attention would not launch on the GPU.
    """
    if not signal.url:
        refuse_quantised(target, f"{target.name} in this process", cure)
        target.fetch_and_check()  # fetched first, because the checks read the weights too
    require_served_alike(target)
    dtype = target.torch_dtype
    if signal.url:
        return load_skeleton(target, dtype, device)
    if device.type == "cuda":
        config, stored = target.text_config, dtype or target.text_config.dtype or torch.float32
        require_model_heads(f"the target {target.name}", config, stored, machine or this_machine())
    if signal.shard and PartialState().num_processes > 1:
        return load_sharded(target, device)
    model = load_causal_lm(target, dtype, cure=cure)
    require_finite(model, f"the target {target.name}")
    return model.to(device).requires_grad_(False).eval()


def load_data(
    data: Data, target: TargetFolder, loop: Loop, run: RunFolder, *, is_head: bool = True
) -> LoadedData:
    """Return training and held-out rows, the held-out prompts and the target's end tokens.

    A row has `loop.sequence_length` tokens, packed from documents that fit into a draft's context
    in serving. The main process tokenises once. All processes memory-map the result, and so does a
    resumed run.

    Raises:
        ValueError: the source is empty, or nothing in it can be trained on.
    """
    day, tokenizer, ends = run.date, target.tokenizer, target.end_ids
    length = visible_length(target.text_config, loop.sequence_length, is_head=is_head)
    # A shared cache also keeps the tokens of other settings. A run's folder keeps only the latest.
    root = data.cache or run.folder / TOKENS

    def keep() -> Path:
        origin = _describe_origin(data, tokenizer, length, day) | {"the end ids": list(ends)}
        make = functools.partial(_tokenise, data, tokenizer, length, day, ends)
        return keep_tokens(root, origin, make, shared=data.cache is not None)

    tokens = read_tokens(run.on_main(keep))
    if run.accelerator.is_main_process:
        print("\n".join(tokens.said))
        if length < loop.sequence_length:
            print(
                f"conversations are cut at {length:,} tokens, because a draft sees at most this "
                "many in serving"
            )
    packed = functools.partial(PackedDataset, sequence_length=loop.sequence_length, seed=loop.seed)
    return LoadedData(
        train=packed(tokens.train),
        held_out=packed(tokens.held_out),
        prompts=tokens.prompts,
        stats=tokens.stats,
        hash=tokens.hash,
        end_ids=ends,
        date=day,
    )


def _describe_origin(data: Data, tokenizer: Any, length: int, day: datetime.date) -> Origin:
    settings = {
        name: getattr(data, name)
        for name in ("held_out", "num_prompts", "max_prompt_tokens", "strict", "cut_answers")
    }
    asked = (
        {"the prompts": [data.prompts, *identify_conversations(data.prompts, data.split)]}
        if data.prompts
        else {}
    )
    return {
        "the data": [data.source, *identify_conversations(data.source, data.split)],
        **asked,
        "the settings": {**settings, "sequence_length": length},
        **describe_tokenizer(tokenizer, day.isoformat()),
    }


def _tokenise(
    data: Data, tokenizer: Any, max_length: int, day: datetime.date, ends: tuple[int, ...]
) -> TokenContent:
    """Return the tokens of the training and held-out parts, generated while they are read."""
    conversations = load_conversations(data.source, split=data.split, strict=data.strict)
    train, held_out = split_held_out(conversations, data.held_out)
    # Do this after the split, which is by question, because the same answer may follow questions of
    # both parts.
    asked, unseen = held_out, held_out
    if data.prompts:
        asked = load_conversations(data.prompts, split=data.split, strict=data.strict)
        questions = set(map(split_key, asked))
        train = [conversation for conversation in train if split_key(conversation) not in questions]
        unseen = [*held_out, *asked]
    train, overlap = remove_overlap(train, unseen)
    if not train or not held_out:
        num_questions = len(set(map(split_key, conversations)))
        found = f"{len(train)} conversations to train on and {len(held_out)} held out"
        if num_questions == 1 and len(conversations) > 1:
            raise ValueError(
                f"{data.source}: all {len(conversations)} conversations have the same first "
                "question, so none can be held out: add conversations with different questions"
            )
        raise ValueError(
            f"{data.source}: {found}, of {num_questions} first questions: give more data or "
            f"change --data.held-out"
        )
    stats, held_out_stats = SampleStats(), SampleStats()
    stream = functools.partial(
        stream_samples,
        tokenizer=tokenizer,
        max_length=max_length,
        cuts_answers=data.cut_answers,
        day=day,
        ends=ends,
    )
    return TokenContent(
        train=stream(train, stats=stats),
        held_out=stream(
            held_out, stats=held_out_stats, progress=False, purpose="held out to evaluate on"
        ),
        prompts=lambda: held_out_prompts(
            asked,
            tokenizer,
            num_prompts=data.num_prompts,
            max_length=data.max_prompt_tokens,
            usual=stats.chosen_arguments(),
            day=day,
        ),
        stats=stats,
        say=lambda: [
            f"training: {stats}",
            f"held out: {held_out_stats}",
            f"duplicates: {overlap}",
            *filter(None, [stats.describe_arguments()]),
        ],
    )


def live_signal(
    signal: Signal, target: LoadedTarget, aux_layers: Sequence[int] | None
) -> InProcessTarget | EndpointTarget:
    """Return a function from any batch to the target's predictions.

    They are computed here, or on servers if there is a URL. `aux_layers` is None for a standalone
    draft, which reads only the text. For a head, it lists the target layers to read in addition to
    the last hidden state. The list may be empty. The servers are compared with the target's files.

    Raises:
        ValueError: the target, or the model on its server, does not fit.
    """
    if not signal.url:
        return InProcessTarget(target.model, aux_layers or ())
    # Make one attempt per server, because `Endpoints` then tries the next one.
    servers = Endpoints([Endpoint(url, attempts=1) for url in signal.url])
    if aux_layers is None and not signal.exact:
        if signal.kept:
            raise ValueError(
                "--signal.kept contains hidden states, but a standalone draft reads top-k "
                "probabilities: add --signal.exact"
            )
        source = EndpointTarget(servers, signal.k, target.files)
    else:
        source = EndpointHiddenStates(
            servers, target.model, aux_layers or (), signal.storage, target.files, signal.kept
        )
    source.require_target()
    return source


def target_signal(
    signal: Signal,
    target: LoadedTarget,
    data: LoadedData,
    folder: Path,
    accelerator: Accelerator,
    aux_layers: Sequence[int] | None = None,
) -> SignalFunction:
    """Return the source of the training signal.

    It is `live_signal`, or a cache, which is written here if it does not exist. Signals from
    servers and caches are fetched one batch ahead.

    Raises:
        ValueError: the config, the cache or a server does not fit.
        OSError: the disk is full.
    """
    if not signal.url and signal.kind != "cache":
        return live_signal(signal, target, aux_layers)
    # As for a head that reads no auxiliary layers, only the last hidden state is read.
    if signal.exact:
        aux_layers = aux_layers or ()
    device, model = accelerator.device, target.model
    if signal.kind != "cache":
        return OneAhead(live_signal(signal, target, aux_layers), device)
    # Cache held-out samples too, because evaluations read the signal from the same source.
    parts = (data.train.samples, data.held_out.samples)
    cache, content = signal.cache or folder / "target-cache", _content(signal, model, aux_layers)
    # Include the target's compute dtype, because it rounds the cached values.
    computed = f"{str(model.dtype).removeprefix('torch.')} {target.files.fingerprint}"
    # With an unsharded target or with servers, every rank writes its own shards. A sharded target
    # runs every pass on all ranks, so only rank 0 writes. All ranks wait below, for up to
    # LONGEST_WAIT.
    alone = is_sharded(model)
    with leading(model) as leads:
        if (leads or not alone) and not is_complete(cache):
            write_cache(
                list(itertools.chain(*parts)),
                live_signal(signal, target, aux_layers),
                cache,
                content,
                target=computed,
                sequence_length=data.train.sequence_length,
                # Do not use the training batch size: the batch size is in the header, and an
                # interrupted cache continues only with an equal header. Long rows are written one
                # by one.
                batch_size=max(1, TOKENS_A_WRITE // data.train.sequence_length),
                device=accelerator.device,
                rank=0 if alone else accelerator.process_index,
                num_ranks=1 if alone else accelerator.num_processes,
            )
    accelerator.wait_for_everyone()
    identity = {"target": computed, "data": data_hash(itertools.chain(*parts))}
    if isinstance(content, TopK):
        return OneAhead(CachedTarget(cache, content, **identity), device)
    head_VD, rule = target.borrowed.head_VD, LogitRule.of(model.config)
    return OneAhead(
        CachedHiddenStates(cache, content, head_VD=head_VD, rule=rule, **identity), device
    )


def _content(signal: Signal, model: Any, aux_layers: Sequence[int] | None) -> TopK | HiddenStates:
    if aux_layers is None:
        return TopK(signal.k)
    hidden_size = model.config.get_text_config().hidden_size
    return HiddenStates(
        layers=tuple(sorted(aux_layers)), hidden_size=hidden_size, dtype=signal.cache_dtype
    )
