"""Checks for several families: embeddings, rotary frequencies, positions and sizes against the target's.

V = vocabulary, D = hidden."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from redraft.heads.doctor import layer
from redraft.heads.doctor.pair import Check, Finding, Pair
from redraft.heads.files.folder import tensor_files
from redraft.heads.files.tensors import read_tensors
from redraft.heads.nn.layers import llama_rope
from redraft.heads.target import Target

EMBEDDINGS = "embed_tokens.weight"
HEAD = "lm_head.weight"
IN_TARGET = {EMBEDDINGS: "embed_VD", HEAD: "head_VD"}  # Fields of `Target`, by the tensor's name.
SAME_WITHIN = 0.01  # relative, of two copies of a matrix; bfloat16 alone makes 0.002


def shared_weights(pair: Pair, borrowed: tuple[str, ...] = (EMBEDDINGS,)) -> Iterator[Finding]:
    """Copies of borrowed tensors equal the target's."""
    copies = {name: IN_TARGET[end] for name in pair.shapes for end in borrowed if name.endswith(end)}
    if not copies:
        return
    target = Target.from_folder(pair.target.folder)
    for name, tensor in read_tensors(pair.draft, copies).items():
        distance = _distance(tensor, getattr(target, copies[name]))
        if distance > SAME_WITHIN:
            yield Finding(
                f"{name} is not the target's (it differs by {distance:.2g} of its size), and the engine would use it: "
                "a random left-over, or another target's",
                f"remove {name} from the checkpoint, the engine then shares the target's; or copy the target's there",
            )


def require_own_head(draft: Path, target: Path) -> None:
    """Raise ValueError if the draft has an lm_head equal to the target's bit by bit.
    vLLM shares the target's head with such a draft. It decides this when it starts, so a later
    version with a trained head could not be swapped in. A draft without an lm_head passes, because
    later versions have none either."""
    if HEAD not in tensor_files(draft):
        return
    mine, its = read_tensors(draft, [HEAD])[HEAD], Target.from_folder(target).head_VD
    if mine.shape == its.shape and torch.equal(mine, its.to(mine)):
        raise ValueError(
            f"the {HEAD} of {draft} is the target's: vLLM would share it, and no version that is trained from it could "
            f"be swapped in; train it offline first, or export it without {HEAD}"
        )


def _distance(mine: Tensor, its: Tensor) -> float:
    """|mine - its| / |its|; infinite if the shapes differ."""
    if mine.shape != its.shape:
        return float("inf")
    return float((mine.float() - its.float()).norm() / its.float().norm())


def rope(pair: Pair) -> Iterator[Finding]:
    """Rotary parameters of a Llama layer at the target's positions."""
    kept = {k: v for k, v in pair.layer_config.items() if k.startswith("rope_") or k == "max_position_embeddings"}
    mine = LlamaConfig(**kept).rope_parameters  # reads rope_theta and rope_scaling as engines do
    # redraft always trains at the target's frequencies; other trainers may have left out the scaling
    yield from compare_rope(mine, llama_rope(pair.target_config.rope_parameters), is_doubt="redraft" not in pair.config)


def compare_rope(mine: Mapping[str, Any], its: Mapping[str, Any], *, is_doubt: bool = False) -> Iterator[Finding]:
    """Differences between the rotary parameters of the draft (`mine`) and the target (`its`)."""
    mine, its = _known(mine), _known(its)
    for key in sorted(mine.keys() | its.keys()):
        if mine.get(key) != its.get(key):
            yield Finding(
                f"the draft's {key} is {mine.get(key)}, the target's is {its.get(key)}",
                "write the target's rope_parameters and rope_theta into the draft's config.json"
                + (", unless it was trained without" if is_doubt else ""),
                is_doubt,
            )


def _known(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in parameters.items() if value is not None and key != "type"}


def positions(pair: Pair) -> Iterator[Finding]:
    """The draft has as many positions as the target; engines draft nothing beyond the last."""
    mine, its = pair.layer_config.get("max_position_embeddings"), pair.target_config.max_position_embeddings
    # More positions than the target are harmless: no served text is so long.
    if mine is not None and mine < its:
        yield Finding(
            f"the draft has {mine} positions, the target serves {its}: nothing is drafted beyond",
            f"serve with --max-model-len {mine}, or train the draft at the length that is served",
        )


def sizes(pair: Pair) -> Iterator[Finding]:
    """Hidden size and vocabulary of a head are the target's."""
    for key in ("hidden_size", "vocab_size"):
        mine, its = pair.layer_config.get(key), getattr(pair.target_config, key)
        if mine not in (None, its):
            yield Finding(f"{key} is {mine}, the target's is {its}", "give the target that the head was trained on")


def fc_bias(pair: Pair) -> Iterator[Finding]:
    """No bias of `fc`, because no engine adds it."""
    if "fc.bias" in pair.shapes:
        yield Finding(
            "the checkpoint holds fc.bias, which the engine does not add",
            "train the head without it: a constant cannot be folded into fc",
        )


LLAMA_LAYER: tuple[Check, ...] = (sizes, rope, positions, *layer.CHECKS)
"""For a head made of one Llama layer at the target's positions."""


def mask_token_is_no_end(pair: Pair, mask: int) -> Iterator[Finding]:
    """The token in the empty slots is none that ends an answer: the head would learn both meanings at once."""
    try:
        ends = pair.target.end_ids
    except FileNotFoundError:  # no tokenizer
        return
    if mask in ends:
        yield Finding(
            f"the mask token {mask} ends answers of the target",
            "train the head with another free id: --head.mask-token-id",
            is_doubt=True,
        )
