"""Checks that several families share.

They compare embeddings, rotary frequencies, positions and sizes with the target's.

V = vocabulary, D = hidden.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from redraft.files.folder import tensor_files
from redraft.files.tensors import read_tensors
from redraft.heads.doctor.pair import Check, Finding, Pair
from redraft.heads.shape import PARTIAL, llama_rope, read_layer_config
from redraft.heads.target import EMBEDDINGS, HEAD, Target

# Fields of `Target`, keyed by the tensor's name.
IN_TARGET = {EMBEDDINGS: "embed_VD", HEAD: "head_VD"}
# Relative difference between two copies of a matrix. bfloat16 alone causes 0.002.
SAME_WITHIN = 0.01


def shared_weights(pair: Pair, borrowed: tuple[str, ...] = (EMBEDDINGS,)) -> Iterator[Finding]:
    """Check that copies of shared tensors equal the target's."""
    copies = {
        name: IN_TARGET[end] for name in pair.shapes for end in borrowed if name.endswith(end)
    }
    if not copies:
        return
    target = Target.from_folder(pair.target.folder)
    for name, tensor in read_tensors(pair.draft, copies).items():
        mine, its = tensor.float(), getattr(target, copies[name]).float()
        fits = mine.shape == its.shape
        distance = float((mine - its).norm() / its.norm()) if fits else float("inf")
        if distance > SAME_WITHIN:
            yield Finding(
                f"{name} differs from the target's (by {distance:.2g} of its size), and the engine "
                "would use it: it is a leftover, or belongs to a different target",
                f"remove {name} from the checkpoint, so that the engine shares the "
                "target's, or copy the target's into it",
            )


def require_own_head(draft: Path, target: Path) -> None:
    """Reject a draft whose lm_head equals the target's bit for bit.

    vLLM shares the target's head with such a draft. vLLM decides this at start-up, so a later
    version with a trained head could not be swapped in. A draft without an lm_head passes, because
    its later versions have none either.

    Raises:
        ValueError: the draft's lm_head equals the target's.
    """
    if HEAD not in tensor_files(draft):
        return
    mine, its = read_tensors(draft, [HEAD])[HEAD], Target.from_folder(target).head_VD
    if mine.shape == its.shape and torch.equal(mine, its.to(mine)):
        raise ValueError(
            f"the {HEAD} of {draft} equals the target's, so vLLM would share it, and no "
            "version trained from it could be swapped in: train it offline first, or export "
            f"it without {HEAD}"
        )


def rope(pair: Pair) -> Iterator[Finding]:
    """Check a Llama layer's rotary parameters against the target's."""
    kept = {
        k: v
        for k, v in pair.layer_config.items()
        if k.startswith("rope_") or k in ("max_position_embeddings", PARTIAL)
    }
    mine = LlamaConfig(**kept).rope_parameters  # reads rope_theta and rope_scaling as engines do
    # redraft always trains with the target's frequencies. Other trainers may have omitted the
    # scaling, or rotate only the target's part of each attention head.
    its = llama_rope(pair.target_config.rope_parameters, is_own=PARTIAL in mine)
    yield from compare_rope(mine, its, is_doubt="redraft" not in pair.config)


def compare_rope(
    mine: Mapping[str, Any], its: Mapping[str, Any], *, is_doubt: bool = False
) -> Iterator[Finding]:
    """Report differences between the rotary parameters of draft (`mine`) and target (`its`)."""
    mine, its = _known(mine), _known(its)
    for key in sorted(mine.keys() | its.keys()):
        if mine.get(key) != its.get(key):
            yield Finding(
                f"the draft's {key} is {mine.get(key)}, but the target's is {its.get(key)}",
                "write the target's rope_parameters and rope_theta into the draft's config.json"
                + (", unless the draft was trained without them" if is_doubt else ""),
                is_doubt,
            )


def _known(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in parameters.items() if value is not None and key != "type"}


def positions(pair: Pair) -> Iterator[Finding]:
    """Check that the draft has at least as many positions as the target.

    Engines draft nothing beyond the draft's last position.
    """
    mine, its = (
        pair.layer_config.get("max_position_embeddings"),
        pair.target_config.max_position_embeddings,
    )
    # More positions than the target's are harmless, because no served sequence is longer.
    if mine is not None and mine < its:
        yield Finding(
            f"the draft has {mine} positions, but the target serves {its}: nothing is drafted "
            "beyond the draft's last position",
            f"serve with --max-model-len {mine}, or train the draft at the length that is served",
        )


def sizes(pair: Pair) -> Iterator[Finding]:
    """Check that a head's hidden size and vocabulary size equal the target's."""
    for key in ("hidden_size", "vocab_size"):
        mine, its = pair.layer_config.get(key), getattr(pair.target_config, key)
        if mine not in (None, its):
            yield Finding(
                f"{key} is {mine}, but the target's is {its}",
                "give the target that the head was trained on",
            )


def fc_bias(pair: Pair) -> Iterator[Finding]:
    """Check that `fc` has no bias, or only zeros, because vLLM adds none."""
    if "fc.bias" in pair.shapes and bool(read_tensors(pair.draft, ["fc.bias"])["fc.bias"].any()):
        yield Finding(
            "the checkpoint contains fc.bias, which the engine does not add",
            "train the head without it: a constant cannot be folded into fc",
        )


AS_TRAINED = (
    "rms_norm_eps",
    "hidden_act",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""Keys of config.json that change the arithmetic but not the shapes of the tensors."""


def tensors_fit_config(pair: Pair) -> Iterator[Finding]:
    """Check that the layers, biases and heads in config.json match the checkpoint.

    Engines use uninitialised memory for missing tensors.
    """
    config = pair.layer_config
    names = {
        re.sub(r"(midlayer|layers\.\d+)\.", "", name): shape for name, shape in pair.shapes.items()
    }
    layers = len(
        {match[1] for name in pair.shapes if (match := re.match(r"(midlayer|layers\.\d+)\.", name))}
    )
    asked = config.get("num_hidden_layers", layers)
    if asked != layers:
        yield Finding(
            f"config.json states {asked} layers, but the checkpoint contains {layers}; the engine "
            "leaves the others uninitialised",
            f'write "num_hidden_layers": {layers} into {_file(pair)}',
        )
    yield from biases(pair)
    sizes = _sizes(pair)
    for name, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        rows = names.get(f"self_attn.{name}.weight", (0,))[0]
        if rows and rows != sizes[heads] * sizes["head_dim"]:
            yield Finding(
                f"{heads} {sizes[heads]} with head_dim {sizes['head_dim']} does not match "
                f"the {rows} rows of {name}",
                f"write the {heads} and head_dim used in training into {_file(pair)}",
            )


def biases(pair: Pair) -> Iterator[Finding]:
    """Check that config.json states whether attention has biases."""
    has_bias = any(name.endswith("self_attn.q_proj.bias") for name in pair.shapes)
    if bool(pair.layer_config.get("attention_bias", False)) != has_bias:
        yield Finding(
            f"attention_bias is {str(not has_bias).lower()}, but the checkpoint contains "
            f"{'' if has_bias else 'no '}attention biases",
            f'write "attention_bias": {str(has_bias).lower()} into {_file(pair)}',
        )


def off_by_one(served: Sequence[int], trained: Sequence[int], meaning: str) -> str:
    """Return the end of a message about layers: whether all are too high or too low by one.

    `meaning` states how they are counted: DFlash counts layers from 0, but EAGLE-3 and speculators count
    the streams between layers, so that layer 1 is stream 2.
    """
    shifts = {s - t for s, t in zip(served, trained, strict=False)}
    if len(served) != len(trained) or shifts not in ({1}, {-1}):
        return ""
    return f": off by one, too {'high' if shifts == {1} else 'low'}; {meaning}"


def activation(pair: Pair) -> Iterator[Finding]:
    """Check that the layer's MLP uses SiLU, which engines always compute for a Llama layer."""
    if (act := pair.layer_config.get("hidden_act", "silu")) not in ("silu", "swish"):
        yield Finding(
            f'hidden_act is "{act}", but engines compute a Llama layer only with "silu"',
            f'write "hidden_act": "silu" into {_file(pair)} if the head was trained with '
            "it; otherwise, train a head with silu",
        )


def arithmetic(pair: Pair) -> Iterator[Finding]:
    """Check that the norm and the attention heads are the same as in training.

    A head from another trainer is compared with the target's layers; a difference is only a doubt.
    """
    trained, sizes = pair.trained_with, _sizes(pair)
    for key in AS_TRAINED:
        mine = sizes[key]
        if key in trained:
            if mine != trained[key]:
                yield Finding(
                    f"{key} is {mine}, but the head was trained with {trained[key]}",
                    f'write "{key}": {json.dumps(trained[key])} into {_file(pair)}',
                )
        elif key != "hidden_act" and mine != (its := _read_target(pair, key)):
            yield Finding(
                f"{key} is {mine}, but {its} in the target's layers, and there is no "
                "record of how the head was trained",
                f'if the head was trained with the target\'s, write "{key}": {json.dumps(its)} '
                f"into {_file(pair)}",
                is_doubt=True,
            )


def _sizes(pair: Pair) -> Mapping[str, Any]:
    known = (*AS_TRAINED, "hidden_size", "model_type")
    config = read_layer_config(
        {key: value for key, value in pair.layer_config.items() if key in known}, pair.draft
    )
    return {key: getattr(config, key) for key in AS_TRAINED}


def _read_target(pair: Pair, key: str) -> Any:
    # If the config does not contain a key, use the default that transformers uses.
    config = pair.target_config
    if key == "head_dim":
        return getattr(config, key, None) or config.hidden_size // config.num_attention_heads
    if key == "num_key_value_heads":
        return getattr(config, key, None) or config.num_attention_heads
    return getattr(config, key, None)


def _file(pair: Pair) -> str:
    return "transformer_layer_config of config.json" if pair.is_speculators else "config.json"


LLAMA_LAYER = (sizes, rope, positions, tensors_fit_config, activation, arithmetic)
"""Checks for a head made of one Llama layer at the target's positions."""

EAGLE1: tuple[Check, ...] = (
    *LLAMA_LAYER,
    partial(shared_weights, borrowed=(EMBEDDINGS, HEAD)),
    fc_bias,
)
"""Checks for a head that uses the target's embeddings and output head."""


def mask_token_fits(pair: Pair, key: str, mask: int) -> Iterator[Finding]:
    """Check that the mask token has a row in the target's embeddings and is not an end token.

    Otherwise, the head would learn two meanings for the token.
    """
    rows = pair.target_config.vocab_size
    if not 0 <= mask < rows:
        yield Finding(
            f"{key} {mask} is not in the target's table of {rows} embeddings",
            f"write the {key} used in training; if it is this value, the head belongs to a "
            "larger target",
        )
        return
    try:
        ends = pair.target.end_ids
    except FileNotFoundError:  # no tokenizer
        return
    if mask in ends:
        yield Finding(
            f"the mask token {mask} is an end token of the target",
            "train the head with a different free id: --head.mask-token-id",
            is_doubt=True,
        )
