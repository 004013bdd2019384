"""llama.cpp b11549, tested by running it: a draft's GGUF file next to its target's GGUF file.

    standalone      a Llama, Qwen 2 or Qwen 3
    EAGLE-3         one layer on the hidden states of three inner target layers
    DFlash, DSpark  full-attention layers, bidirectional within a block

llama.cpp misreads some drafts without an error, and then acceptance falls. The causes are the
stream after the last layer, EAGLE-3.1's norms, windows, causal blocks, and long-context rotation in
DFlash. Drafts with any of them are refused here.
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redraft.files.checkpoint import load_tokenizer
from redraft.files.folder import read_config
from redraft.files.gguf_rope import LLAMA3, PLAIN, ROPE_FACTORS, rope, rope_factors
from redraft.files.gguf_writer import (
    GgufTarget,
    Value,
    interleave,
    layer_keys,
    layer_name,
    write_gguf,
)
from redraft.files.target_folder import TargetFolder
from redraft.files.tensors import read_tensors
from redraft.files.tokenizers import first_difference
from redraft.files.windows import SECTION as BLOCK
from redraft.files.windows import beside_target, trained_views
from redraft.heads.doctor.pair import Finding, Pair
from redraft.heads.engines.folders import OTHERWISE, layers_read, section, shell, write_changed
from redraft.heads.engines.table import Export
from redraft.heads.families.eagle3 import has_qk_norm
from redraft.heads.target import HEAD, Target

TITLE = "llama.cpp"
FILE = "draft.gguf"

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
"""Architectures of targets whose inner layers' hidden states llama.cpp passes to a head
(`t_layer_inp`, b10605). With any other target, llama-server crashes.
"""

CONVERTER = "convert it with llama.cpp's convert_hf_to_gguf.py"

SAME_TOKENS = 0.99
"""Minimum share of equal tokens. llama.cpp's converter renames padding and a few special tokens."""

SAMPLED_ROWS, SAME_ROWS = 256, 0.9
"""Number of embeddings to compare, and their minimum mean cosine. The tiny target in 4 bits (Q4_0)
reaches 0.996; for a different target, the cosine is near 0.
"""

OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",  # the norm of DFlash's context
    "input_norm.weight": "enc.output_norm.weight",  # for EAGLE-3 with norm_before_fc
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}


@dataclass(frozen=True)
class Rotation:
    """How a llama.cpp architecture rotates queries and keys."""

    neighbours: bool
    """Whether rotary embeddings pair adjacent dimensions instead of the two halves."""
    kinds: tuple[str, ...] = (PLAIN,)


STANDALONE = {
    "llama": Rotation(True, (PLAIN, LLAMA3)),
    "qwen2": Rotation(False),
    "qwen3": Rotation(False),
}
"""`model_type` of standalone drafts. llama.cpp's architectures have the same names."""

EAGLE3, DFLASH = Rotation(True, (PLAIN, LLAMA3)), Rotation(False)


def find_refused(pair: Pair) -> Iterator[Finding]:
    """Report the parts of a draft that llama.cpp does not compute, or misreads without an error."""
    if not pair.family.is_head:
        yield from _refuse_standalone(pair)
        return
    layers, last = layers_read(pair), pair.target_config.num_hidden_layers
    if last in layers:
        below = " ".join(map(str, sorted({min(2, last - 1), last // 2, last - 1})))
        yield Finding(
            f"the head reads the stream after the last layer, {last}, which {TITLE} reads after the "
            "final norm: the head would load, but fewer tokens would be accepted",
            f"train with layers below {last}, e.g. --head.aux-layer-ids {below}",
        )
    yield from _refuse_views(pair)
    if pair.family.name == "eagle3":
        yield from _refuse_eagle3(pair, layers)
    elif pair.family.name == "dspark" and not pair.config.get("enable_confidence_head"):
        yield Finding(
            f"{TITLE} cannot load a DSpark head without a confidence head",
            "train with --head.confidence-head",
        )
    for key in ("attention_bias", "mlp_bias"):
        if pair.layer_config.get(key):
            name = pair.family.title
            yield Finding(f"{key} is true: {TITLE}'s {name} has no biases", OTHERWISE)
    rotation = EAGLE3 if pair.family.name == "eagle3" else DFLASH
    yield from _refuse_rotation(pair.layer_config, rotation)


def find_misread(pair: Pair) -> Iterator[Finding]:
    """Report nothing, because llama.cpp does not read folders, so it cannot misread one."""
    yield from ()


def write(export: Export, folder: Path) -> None:
    """Write the draft as a GGUF file into `folder`, for the target's GGUF file `export.gguf`.

    Raises:
        FileNotFoundError: the target's GGUF file does not exist.
        ValueError: no GGUF file is given, or it is corrupt or contains a different target or
            architecture; or a tensor is missing, unknown or has the wrong shape.
    """
    if export.gguf is None:
        raise ValueError(f"{TITLE} needs the target's GGUF file: set --gguf")
    pair, gguf = export.pair, GgufTarget(export.gguf)
    if pair.family.is_head and gguf.architecture not in GIVE_STREAMS:
        raise ValueError(
            f"{TITLE} cannot pass the hidden states of inner layers of a "
            f"{gguf.architecture} target ({gguf.path}) to a head, and crashes: serve a "
            "standalone draft there, or this head with vLLM"
        )
    require_same_target(pair.target, gguf)
    if not pair.family.is_head:
        write_gguf(folder / FILE, *read_model(pair.draft), gguf.tokenizer)
        return
    # The draft has one of the two layouts and is complete, because loading has checked it.
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        write_changed(pair, Path(made), lambda config, tensors: None)
        config, stored = read_config(Path(made)), read_tensors(Path(made))
    architecture, rotation = "dflash", DFLASH
    if pair.family.name == "eagle3":
        architecture, rotation = "eagle3", EAGLE3
    keys = layer_keys(config) | _keys(pair, config)
    tensors = _tensors(config, stored, rotation, pair.draft)
    write_gguf(folder / FILE, architecture, keys, tensors, gguf.tokenizer)


def read_model(folder: Path) -> tuple[str, dict[str, Value], dict[str, Tensor]]:
    """Return llama.cpp's architecture, keys and tensors for a whole model in `STANDALONE`.

    Raises:
        ValueError: the model contains a tensor that llama.cpp does not support.
    """
    config, stored = read_config(folder), read_tensors(folder)
    if config.get("tie_word_embeddings"):
        stored.pop(HEAD, None)
    kind = str(config["model_type"])
    return kind, layer_keys(config), _tensors(config, stored, STANDALONE[kind], folder)


def serve(export: Export) -> str:
    """Return the shell command that serves the target with the draft."""
    return shell(
        *("llama-server", "-m", export.gguf, "-md", export.output / FILE),
        *("--spec-type", TYPES[export.pair.family.name]),
        *("--spec-draft-n-max", export.num_tokens),
    )


def _refuse_eagle3(pair: Pair, layers: list[int]) -> Iterator[Finding]:
    if len(layers) != 3:
        yield Finding(
            f"the head reads {len(layers)} layers, {layers}, but {TITLE}'s EAGLE-3 reads exactly 3",
            "train with three layers (--head.aux-layer-ids)",
        )
    if (count := pair.layer_config.get("num_hidden_layers", 1)) != 1:
        yield Finding(f"the head has {count} layers, but {TITLE}'s EAGLE-3 has one", OTHERWISE)
    for option in ("fc_norm", "norm_output"):
        if pair.config.get(option):
            yield Finding(
                f"{option} is true (EAGLE-3.1): {TITLE} does not compute this norm",
                f"train with --head.no-{option.replace('_', '-')}",
            )
    if has_qk_norm(pair.config):
        yield Finding(f"{TITLE}'s EAGLE-3 has no norms of queries and keys", OTHERWISE)


def _refuse_views(pair: Pair) -> Iterator[Finding]:
    is_block = pair.family.name != "eagle3"
    views = beside_target(trained_views(pair.config), pair.target_config)
    for layer, view in enumerate(views):
        if view.window:
            yield Finding(
                f"layer {layer} has a window of {view.window}, but {TITLE} would let it attend to all "
                "positions",
                "train without --head.window",
            )
        elif is_block and view.is_causal:
            yield Finding(
                f"layer {layer} attends causally within a block, but {TITLE} attends in both "
                "directions",
                "train without --head.is-causal",
            )


def _refuse_rotation(config: Mapping[str, Any], rotation: Rotation) -> Iterator[Finding]:
    found = rope(config)
    if found["rope_type"] not in rotation.kinds or found.get("partial_rotary_factor", 1) != 1:
        yield Finding(
            f"its rotary embeddings have the type {found['rope_type']}, but {TITLE} supports only "
            f"{' or '.join(rotation.kinds)} for such a draft, on whole heads: it would load, but "
            "draft poorly in long texts",
            OTHERWISE,
        )


def _refuse_standalone(pair: Pair) -> Iterator[Finding]:
    kind, tokens = pair.config.get("model_type"), pair.target_config.vocab_size
    if kind not in STANDALONE:
        yield Finding(f"redraft cannot write a {kind} model as a GGUF file", CONVERTER)
        return
    if pair.config.get("use_sliding_window"):
        yield Finding("its layers have a window, which redraft cannot write", CONVERTER)
    if pair.config["vocab_size"] != tokens:
        yield Finding(
            f"it has {pair.config['vocab_size']:,} tokens, but the target has {tokens:,}",
            "train it for this target",
        )
    elif found := first_difference(pair.target.tokenizer, load_tokenizer(pair.draft)):
        yield Finding(
            f"token {found[0]} differs between its tokenizer and the target's",
            "train a draft of the target's family",
        )
    yield from _refuse_rotation(pair.config, STANDALONE[kind])


def require_same_target(target: TargetFolder, gguf: GgufTarget) -> None:
    """Raise ValueError unless a GGUF file contains this target, regardless of its tensor types.

    The sizes, the tokens and a sample of the embeddings are compared.
    """
    config, other = target.text_config, "a draft has low acceptance with a different target: use"
    for name, theirs, ours in (
        ("layers", gguf.num_layers, config.num_hidden_layers),
        ("values per state", gguf.hidden_size, config.hidden_size),
        ("tokens", len(gguf.tokens), config.vocab_size),
    ):
        if theirs != ours:
            raise ValueError(
                f"{gguf.path} has {theirs:,} {name}, but the target {target.name} has {ours:,}: {other} the "
                "GGUF file of this target"
            )
    names = target.tokenizer.convert_ids_to_tokens(
        list(range(min(len(target.tokenizer), len(gguf.tokens))))
    )
    equal = sum(ours == theirs for ours, theirs in zip(names, gguf.tokens, strict=False))
    if equal < SAME_TOKENS * len(names):
        raise ValueError(
            f"{gguf.path} has {len(names) - equal:,} tokens that the target {target.name} lacks: "
            f"{other} the GGUF file of this target"
        )
    ids = torch.linspace(0, len(names) - 1, SAMPLED_ROWS).long().tolist()
    theirs_ND = gguf.rows("token_embd.weight", ids)
    if theirs_ND is None:
        raise ValueError(f"{gguf.path} has no token_embd.weight, so it is not a model file")
    ours_ND = Target.from_folder(target.folder).embed_VD[ids].float()
    # Rows of unused tokens may be all zeros.
    used = (ours_ND.norm(dim=-1) > 0) & (theirs_ND.norm(dim=-1) > 0)
    cosine = torch.cosine_similarity(ours_ND[used], theirs_ND[used], dim=-1).mean()
    if not cosine >= SAME_ROWS:
        raise ValueError(
            f"{gguf.path} has the same sizes as the target {target.name}, but different embeddings "
            f"(cosine "
            f"{float(cosine):.2f}): {other} the GGUF file of this target"
        )


def _keys(pair: Pair, config: Mapping[str, Any]) -> dict[str, Value]:
    """Return a head's keys, except its layers', from its config.json in vLLM's layout."""
    layers = pair.family.read_layers(config)
    if pair.family.name == "eagle3":
        return {
            "target_layers": layers,
            "target_hidden_size": config["hidden_size"],
            "norm_before_residual": config["norm_before_residual"],
            "norm_before_fc": config["norm_before_fc"],
        }
    block = {
        "target_layers": layers,
        "block_size": config["block_size"],
        "tokenizer.ggml.mask_token_id": section(config, BLOCK).get(
            "mask_token_id", config.get("mask_token_id")
        ),
    }
    anchored = {"sample_from_anchor": config.get("sample_from_anchor", True)}
    return block | (anchored if pair.family.name == "dspark" else {})


def _tensors(
    config: Mapping[str, Any], stored: Mapping[str, Tensor], rotation: Rotation, draft: Path
) -> dict[str, Tensor]:
    """Return the tensors of a folder in vLLM's layout, under llama.cpp's names."""
    num_heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config.get("num_key_value_heads") or config["num_attention_heads"],
    }
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name == "t2d":
            continue
        if name == "d2t":  # vLLM stores offsets, but llama.cpp stores the target's ids themselves
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
        raise ValueError(f"{draft} contains {name}, which llama.cpp does not support")
    return found
