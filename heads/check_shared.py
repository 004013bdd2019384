"""Checks of what a draft has in common with its target: embeddings, rotary frequencies, positions, sizes, tokenizer.

V = vocabulary, D = hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from heads.check import Pair
from heads.checkpoint import load_tokenizer
from heads.finding import Finding
from heads.layers import whole_rope
from heads.target import Target
from heads.tensors import read_tensors, tensor_files
from heads.tokenizers import check_same_tokenizer

HEAD = "lm_head.weight"

SAME_WITHIN = 0.01
"""Relative distance of two copies of one matrix that were rounded to different types; bfloat16 alone makes 0.002."""


def shared_weights(pair: Pair) -> Iterator[Finding]:
    """Copies of the target's embeddings (and of its head, where the family borrows it) that are not the target's."""
    borrowed = {"embed_tokens.weight": "embed_VD"}
    if pair.family == "eagle1":
        borrowed[HEAD] = "head_VD"
    copies = {name: theirs for name in pair.shapes for end, theirs in borrowed.items() if name.endswith(end)}
    if not copies:
        return
    target = Target.from_folder(pair.target)
    for name, tensor in read_tensors(pair.draft, copies).items():
        distance = _distance(tensor, getattr(target, copies[name]))
        if distance > SAME_WITHIN:
            yield Finding(
                f"{name} is not the target's (it differs by {distance:.2g} of its size), and the engine would use it: "
                "a random left-over, or another target's",
                f"remove {name} from the checkpoint, the engine then shares the target's; or copy the target's there",
            )


def require_own_head(draft: Path, target: Path) -> None:
    """Return where the draft brings no head, or one that is not the target's bit by bit.

    vLLM shares the target's head with a draft that brings the same one. It decides so when it starts: no version that
    was trained from there could be swapped in.

    Raises: ValueError.
    """
    if HEAD not in tensor_files(draft):
        return
    mine, its = read_tensors(draft, [HEAD])[HEAD], Target.from_folder(target).head_VD
    if mine.shape == its.shape and torch.equal(mine, its.to(mine)):
        raise ValueError(
            f"the {HEAD} of {draft} is the target's: vLLM would share it, and no version that is trained from it could "
            f"be swapped in; train it offline first, or export it without {HEAD}"
        )


def _distance(mine: Tensor, its: Tensor) -> float:
    """|mine - its| / |its|; infinite where the shapes differ."""
    if mine.shape != its.shape:
        return float("inf")
    return float((mine.float() - its.float()).norm() / its.float().norm())


def rope(pair: Pair) -> Iterator[Finding]:
    """Rotary parameters of a head that continues the target's positions."""
    mine, its = _rope_of(pair), _plain(pair.target_config.rope_parameters)
    if pair.family != "mtp":
        its = whole_rope(its)
    for key in sorted(mine.keys() | its.keys()):
        if mine.get(key) != its.get(key):
            yield Finding(
                f"the draft's {key} is {mine.get(key)}, the target's is {its.get(key)}",
                "write the target's rope_parameters and rope_theta into the draft's config.json",
            )


def _rope_of(pair: Pair) -> dict[str, Any]:
    if pair.family == "mtp":
        return _plain(AutoConfig.from_pretrained(pair.draft).get_text_config().rope_parameters)
    kept = {k: v for k, v in pair.layer_config.items() if k.startswith("rope_") or k == "max_position_embeddings"}
    return _plain(LlamaConfig(**kept).rope_parameters)  # reads rope_theta and rope_scaling as engines do


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in parameters.items() if value is not None and key != "type"}


def positions(pair: Pair) -> Iterator[Finding]:
    """As many positions as the target serves; beyond its own a draft is not asked."""
    mine, its = pair.layer_config.get("max_position_embeddings"), pair.target_config.max_position_embeddings
    if mine is not None and mine < its:
        yield Finding(
            f"the draft has {mine} positions, the target serves {its}: nothing is drafted beyond",
            f"serve with --max-model-len {mine}, or train the draft at the length that is served",
        )


def sizes(pair: Pair) -> Iterator[Finding]:
    """Width and vocabulary of a head, which are its target's."""
    for key in ("hidden_size", "vocab_size"):
        mine, its = pair.layer_config.get(key), getattr(pair.target_config, key)
        if mine not in (None, its):
            yield Finding(f"{key} is {mine}, the target's is {its}", "give the target that the head was trained on")


def fc_bias(pair: Pair) -> Iterator[Finding]:
    """A bias of `fc`, which no engine adds."""
    if "fc.bias" in pair.shapes:
        yield Finding(
            "the checkpoint holds fc.bias, which the engine does not add",
            "train the head without it: a constant cannot be folded into fc",
        )


def tokenizer(pair: Pair) -> Iterator[Finding]:
    """A standalone draft proposes ids that the target reads as its own."""
    mine, its = pair.config.get("vocab_size"), pair.target_config.vocab_size
    if mine != its:
        yield Finding(
            f"the draft has {mine} rows in its vocabulary, the target {its}: vLLM refuses the pair",
            "pad or cut the draft's embeddings to the target's vocab_size (redraft distill does)",
        )
    try:
        check_same_tokenizer(load_tokenizer(pair.target), load_tokenizer(pair.draft))
    except ValueError as error:
        problem, _, cure = str(error).partition("; ")
        yield Finding(problem, cure or "copy the target's tokenizer into the draft's folder")
