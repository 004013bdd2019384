"""Drafts for llama.cpp: a GGUF file of a draft, beside the GGUF file of its target.

    standalone      a Llama, Qwen 2 or Qwen 3
    EAGLE-3         one layer, three of the target's inner streams
    DFlash, DSpark  layers that see everything, both ways within a block

llama.cpp reads some drafts wrongly without an error, and then only acceptance falls: the stream
after the last layer, norms of EAGLE-3.1, windows, a block that attends one way, long-context
rotation in DFlash. All are refused here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.files.checkpoint import load_tokenizer
from redraft.files.folder import read_config, read_dtype, tensor_files
from redraft.files.gguf_writer import (
    LLAMA3,
    PLAIN,
    ROPE_FACTORS,
    GgufTarget,
    Value,
    interleave,
    layer_keys,
    layer_name,
    rope,
    rope_factors,
    write_gguf,
)
from redraft.files.target_folder import TargetFolder
from redraft.files.tensors import read_tensors
from redraft.files.tokenizers import check_same_tokenizer
from redraft.files.windows import beside_target, served_views
from redraft.heads.doctor.pair import Pair
from redraft.heads.draft import Draft
from redraft.heads.target import HEAD, Target

VERSION = "b11549"
"""The newest release of llama.cpp in which the files were served (`xllamacpp` 2026.10.11549)."""

TYPES = {
    "standalone": "draft-simple",
    "eagle3": "draft-eagle3",
    "dflash": "draft-dflash",
    "dspark": "draft-dspark",
}
"""llama.cpp's `--spec-type`, by family."""

GIVE_STREAMS = frozenset(
    {
        *("llama", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "gemma4", "gpt-oss"),
        *("deepseek4", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe", "minimax-01"),
        *("minimax-m2", "bailingmoe3", "muse-glimmer"),
    }
)
"""Architectures of targets whose inner streams llama.cpp hands to a head (`t_layer_inp`, b10605);
beside another, the server aborts.
"""

CONVERTER = "convert it with llama.cpp's convert_hf_to_gguf.py"

SAME_TOKENS = 0.99
"""Least share of equal tokens; llama.cpp's converter renames padding and a few special ones."""

SAMPLED_ROWS, SAME_ROWS = 256, 0.98
"""Embeddings to compare, and their least mean cosine: 4 bits keep 0.995, a fine-tune 0.999."""

OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",  # of DFlash's context
    "input_norm.weight": "enc.output_norm.weight",  # of EAGLE-3 with norm_before_fc
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}


@dataclass(frozen=True)
class Rotation:
    """How an architecture of llama.cpp turns queries and keys."""

    neighbours: bool
    """Pairs of neighbours instead of halves."""
    kinds: tuple[str, ...] = (PLAIN,)


STANDALONE = {
    "llama": Rotation(True, (PLAIN, LLAMA3)),
    "qwen2": Rotation(False),
    "qwen3": Rotation(False),
}
"""`model_type` of standalone drafts, which is llama.cpp's architecture too."""

EAGLE3, DFLASH = Rotation(True, (PLAIN, LLAMA3)), Rotation(False)


def write_draft(pair: Pair, gguf: GgufTarget, path: Path) -> None:
    """Write the draft of a pair as a GGUF file for the target in `gguf`.

    Raises:
        FileNotFoundError
        ValueError: llama.cpp does not serve this draft, or reads it wrongly; `gguf` holds another
            target; or a file is corrupt.
    """
    require_served(pair, gguf)
    require_same_target(pair.target, gguf)
    tokenizer = gguf.tokenizer
    if not pair.family.is_head:
        architecture, keys, tensors = _standalone(pair)
        write_gguf(path, architecture, keys, tensors, tokenizer)
        return
    draft = pair.family.load(pair.draft, lambda: Target.from_folder(pair.target.folder))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # In one layout, whichever it has, and complete: loading has checked it.
        dtype = getattr(torch, read_dtype(pair.draft) or "float32")
        draft.export(Path(folder), dtype)  # type: ignore[attr-defined]  # every head has it
        config, stored = read_config(Path(folder)), _read_all(Path(folder))
    keys = layer_keys(config) | _keys(pair.family.name, draft)
    rotation = EAGLE3 if pair.family.name == "eagle3" else DFLASH
    architecture = "eagle3" if pair.family.name == "eagle3" else "dflash"
    write_gguf(path, architecture, keys, _tensors(config, stored, rotation, pair.draft), tokenizer)


def describe_command(pair: Pair, target: Path, path: Path, num_tokens: int) -> str:
    """The command that serves a written draft."""
    kind = TYPES[pair.family.name]
    return f"llama-server -m {target} -md {path} --spec-type {kind} --spec-draft-n-max {num_tokens}"


def require_served(pair: Pair, gguf: GgufTarget) -> None:
    """Raise ValueError unless llama.cpp serves this draft beside this target, and reads it as meant."""
    family, draft = pair.family, pair.draft
    if family.name not in TYPES:
        raise ValueError(
            f"llama.cpp serves no {family.title} draft: it serves standalone, EAGLE-3, DFlash and "
            "DSpark drafts"
        )
    if not family.is_head:
        _require_standalone(pair)
        return
    if gguf.architecture not in GIVE_STREAMS:
        raise ValueError(
            f"llama.cpp gives no inner streams of a {gguf.architecture} target ({gguf.path}) to a "
            "head, and aborts: serve a standalone draft there, or this head in vLLM"
        )
    layers, last = family.read_layers(pair.config), pair.target_config.num_hidden_layers
    if last in layers:
        raise ValueError(
            f"{draft} reads the stream after the last layer ({last}), which llama.cpp takes after "
            "the final norm, so the head would propose worse without an error: train with layers "
            f"below {last}, e.g. --head.aux-layer-ids {_below(last)}"
        )
    _require_views(pair)
    if family.name == "eagle3":
        _require_eagle3(pair, layers)
    elif family.name == "dspark" and not pair.config.get("enable_confidence_head"):
        raise ValueError(
            f"{draft} has no confidence head, without which llama.cpp loads no DSpark head: train "
            "with --head.confidence-head"
        )
    rotation = EAGLE3 if family.name == "eagle3" else DFLASH
    _require_rotation(pair.layer_config, rotation, draft)


def _below(last: int) -> str:
    return " ".join(map(str, sorted({min(2, last - 1), last // 2, last - 1})))


def _require_eagle3(pair: Pair, layers: list[int]) -> None:
    if len(layers) != 3:
        raise ValueError(
            f"{pair.draft} reads {len(layers)} layers of the target, {layers}: llama.cpp's EAGLE-3 "
            "reads exactly 3"
        )
    if (count := pair.layer_config.get("num_hidden_layers", 1)) != 1:
        raise ValueError(f"{pair.draft} has {count} layers: llama.cpp's EAGLE-3 has one")
    for option in ("fc_norm", "norm_output"):
        if pair.config.get(option):
            raise ValueError(
                f"{pair.draft} was trained with {option} (EAGLE-3.1), which llama.cpp does not "
                f"compute: train with --head.no-{option.replace('_', '-')}"
            )


def _require_views(pair: Pair) -> None:
    is_block = pair.family.name != "eagle3"
    views = beside_target(served_views(pair.config), pair.target_config)
    for layer, view in enumerate(views):
        if view.window:
            raise ValueError(
                f"layer {layer} of {pair.draft} has a window of {view.window}, and llama.cpp's "
                f"{pair.family.title} would see everything: train without --head.window"
            )
        if is_block and view.is_causal:
            raise ValueError(
                f"layer {layer} of {pair.draft} attends one way within a block, llama.cpp both "
                "ways: train without --head.is-causal"
            )


def _require_rotation(config: Mapping[str, Any], rotation: Rotation, draft: Path) -> None:
    found = rope(config)
    if found["rope_type"] not in rotation.kinds or found.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"{draft} rotates by {found['rope_type']}, and llama.cpp's reader of such a draft only "
            f"by {' or '.join(rotation.kinds)}: it would load, and propose worse far into a text"
        )


def _require_standalone(pair: Pair) -> None:
    kind = pair.config.get("model_type")
    if kind not in STANDALONE:
        raise ValueError(
            f"{pair.draft} is a {kind} model, and redraft writes GGUF files of {', '.join(STANDALONE)} "
            f"only: {CONVERTER}"
        )
    if pair.config.get("use_sliding_window"):
        raise ValueError(f"{pair.draft} has layers with a window: {CONVERTER}")
    if pair.config["vocab_size"] != pair.target_config.vocab_size:
        raise ValueError(
            f"{pair.draft} has {pair.config['vocab_size']:,} tokens, and the target "
            f"{pair.target_config.vocab_size:,}: train it for this target"
        )
    check_same_tokenizer(pair.target.tokenizer, load_tokenizer(pair.draft))
    _require_rotation(pair.config, STANDALONE[kind], pair.draft)


def require_same_target(target: TargetFolder, gguf: GgufTarget) -> None:
    """Raise ValueError unless a GGUF file holds this target, whatever its types are.

    Sizes, tokens, and a sample of the embeddings are compared.
    """
    config, other = target.text_config, "a draft proposes badly beside another target: give"
    for name, theirs, ours in (
        ("layers", gguf.num_layers, config.num_hidden_layers),
        ("values a state", gguf.hidden_size, config.hidden_size),
        ("tokens", len(gguf.tokens), config.vocab_size),
    ):
        if theirs != ours:
            raise ValueError(
                f"{gguf.path} has {theirs:,} {name}, the target {target.name} {ours:,}: {other} the "
                "GGUF file of this target"
            )
    names = target.tokenizer.convert_ids_to_tokens(
        list(range(min(len(target.tokenizer), len(gguf.tokens))))
    )
    equal = sum(ours == theirs for ours, theirs in zip(names, gguf.tokens, strict=False))
    if equal < SAME_TOKENS * len(names):
        raise ValueError(
            f"{gguf.path} has {len(names) - equal:,} other tokens than the target {target.name}: "
            f"{other} the GGUF file of this target"
        )
    ids = torch.linspace(0, len(names) - 1, SAMPLED_ROWS).long().tolist()
    theirs_ND = gguf.rows("token_embd.weight", ids)
    if theirs_ND is None:
        raise ValueError(f"{gguf.path} has no token_embd.weight: it is not the file of a model")
    ours_ND = Target.from_folder(target.folder).embed_VD[ids].float()
    # A row that no text uses may be all zeros.
    used = (ours_ND.norm(dim=-1) > 0) & (theirs_ND.norm(dim=-1) > 0)
    cosine = torch.cosine_similarity(ours_ND[used], theirs_ND[used], dim=-1).mean()
    if not cosine >= SAME_ROWS:
        raise ValueError(
            f"{gguf.path} has the sizes of the target {target.name}, and other embeddings (cosine "
            f"{float(cosine):.2f}): {other} the GGUF file of this target"
        )


def _read_all(folder: Path) -> dict[str, Tensor]:
    return read_tensors(folder, tensor_files(folder))


def _standalone(pair: Pair) -> tuple[str, dict[str, Value], dict[str, Tensor]]:
    kind, stored = str(pair.config["model_type"]), _read_all(pair.draft)
    if pair.config.get("tie_word_embeddings"):
        stored.pop(HEAD, None)
    tensors = _tensors(pair.config, stored, STANDALONE[kind], pair.draft)
    return kind, layer_keys(pair.config), tensors


def _keys(family: str, draft: Draft) -> dict[str, Value]:
    """The keys of a head beside those of its layers."""
    layers, config = list(draft.aux_layer_ids), draft.config  # type: ignore[attr-defined]
    if family == "eagle3":
        return {
            "target_layers": layers,
            "target_hidden_size": draft.shape.hidden_size,  # type: ignore[attr-defined]
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
        }
    keys: dict[str, Value] = {
        "target_layers": layers,
        "block_size": config.block_size,
        "tokenizer.ggml.mask_token_id": config.mask_token_id,
    }
    return keys | ({"sample_from_anchor": config.first_slot == 0} if family == "dspark" else {})


def _tensors(
    config: Mapping[str, Any], stored: Mapping[str, Tensor], rotation: Rotation, draft: Path
) -> dict[str, Tensor]:
    """The tensors of a folder in vLLM's layout, under llama.cpp's names."""
    num_heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config.get("num_key_value_heads") or config["num_attention_heads"],
    }
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name == "t2d":
            continue
        if name == "d2t":  # offsets in vLLM, the target's ids themselves in llama.cpp
            tensors["d2t"] = tensor + torch.arange(len(tensor))
            continue
        heads = num_heads.get(name.split(".")[-2])
        if heads and rotation.neighbours:
            tensor = interleave(tensor, heads)
        tensors[_rename(name, draft)] = tensor
    if rope(config)["rope_type"] == LLAMA3:
        tensors[ROPE_FACTORS] = rope_factors(config)
    return tensors


def _rename(name: str, draft: Path) -> str:
    if name in OUTER:
        return OUTER[name]
    parts = name.removeprefix("model.").split(".")
    if parts[0] == "midlayer":
        parts = ["layers", "0", *parts[1:]]
    found = layer_name(int(parts[1]), ".".join(parts[2:])) if parts[0] == "layers" else None
    if found is None:
        raise ValueError(f"{draft} holds {name}, for which llama.cpp has no place")
    return found
