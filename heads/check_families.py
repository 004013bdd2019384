"""Checks of the method that a family is served with, and of what only Medusa or MTP heads have."""

from __future__ import annotations

import re
from collections.abc import Iterator

from heads.check import Pair
from heads.finding import Finding
from heads.mtp_layouts import layout_of

METHODS = {
    "eagle1": "eagle",
    "eagle3": "eagle3",
    "medusa": "medusa",
    "mtp": "mtp",
    "standalone": "draft_model",
}
"""vLLM's name for the way it runs a family; it has no proposer for MLPSpeculator."""

STEERING = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""Parts of a draft's path by which vLLM decides the method, whatever it is told for Medusa, MTP and draft models."""


def method_flag(pair: Pair, method: str | None) -> Iterator[Finding]:
    """The method asked for, the one that the config names and the one that the path steers to."""
    right = METHODS.get(pair.family)
    if right is None:
        return
    if method not in (None, right):
        yield Finding(
            f'method "{method}" does not run {_article(pair.family)} draft', f'serve it with "method": "{right}"'
        )
    algorithm = pair.config.get("speculators_model_type")
    if algorithm not in (None, right):
        yield Finding(
            f'config.json says speculators_model_type "{algorithm}", the tensors are those of {pair.family}',
            f'write "{right}" there and into speculators_config.algorithm',
        )
    named = (pair.config.get("redraft") or {}).get("family")
    if named not in (None, pair.family):
        yield Finding(f"config.json names the family {named}, the tensors are those of {pair.family}",
                      "export the head again: weights and config are of different heads")  # fmt: skip
    path = str(pair.draft).lower()
    steered = next((method for part, method in STEERING.items() if part in path), right)
    if steered != right and pair.family not in ("eagle1", "eagle3"):
        yield Finding(
            f'the path {pair.draft} makes vLLM take the method "{steered}", even where it is told "{right}"',
            f"move the draft to a path without {', '.join(STEERING)}",
        )


def _article(family: str) -> str:
    return f"{'an' if family[0] in 'aeioum' and family != 'medusa' else 'a'} {family}"


def medusa_bias(pair: Pair) -> Iterator[Finding]:
    """Biases that are there and dropped, or asked for and not there."""
    has_bias = any(re.fullmatch(r".*(layers|linear)\.?\d*\.bias", name) for name in pair.shapes)
    serves_bias = bool(pair.config.get("medusa_fc_bias", False))
    trained = (pair.trained_with or {}).get("medusa_fc_bias", has_bias)
    if has_bias and not serves_bias:
        said = "is false" if "medusa_fc_bias" in pair.config else "is unset"
        yield Finding(
            f"medusa_fc_bias {said}, so the engine drops the biases that the checkpoint holds",
            'write "medusa_fc_bias": true into config.json',
        )
    elif (serves_bias or trained) and not has_bias:
        yield Finding(
            "the Medusa heads were trained with biases that the checkpoint lacks", "export the head again with them"
        )


def medusa_sizes(pair: Pair, num_speculative_tokens: int) -> Iterator[Finding]:
    """Widths that are the target's, and as many heads as tokens are drafted."""
    target = pair.target_config
    for key, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if pair.config.get(key, wanted) != wanted:
            yield Finding(
                f"{key} is {pair.config[key]}, the target's is {wanted}", "give the target that the head was trained on"
            )
    heads = pair.config.get("num_heads") or pair.config.get("medusa_num_heads")
    if heads is not None and num_speculative_tokens > heads:
        yield Finding(
            f"{num_speculative_tokens} tokens are to be drafted by {heads} heads; vLLM makes up the missing ones",
            f'serve with "num_speculative_tokens": {heads} at most',
        )


MTP_FACTS = {
    "reads_normed": "the target's hidden state {} its final norm",
    "zero_at_start": "the embedding at position 0 {}",
    "embedding_first": "the {} first in the concatenation",
}
MTP_VALUES = {
    "reads_normed": {True: "after", False: "before"},
    "zero_at_start": {True: "set to zero", False: "as it is"},
    "embedding_first": {True: "embedding", False: "hidden state"},
}
"""What a layout fixes for the engine, in words."""


def mtp_layout(pair: Pair) -> Iterator[Finding]:
    """What the layer was trained with against what the engine feeds a target of this layout."""
    layout, trained = layout_of(pair.target_config), pair.trained_with or {}
    for key, sentence in MTP_FACTS.items():
        served = getattr(layout, key)
        if trained.get(key, served) != served:
            words = [sentence.format(MTP_VALUES[key][value]) for value in (served, trained[key])]
            yield Finding(
                f"the engine gives the MTP layer {words[0]}, it was trained with {words[1]}",
                "train it in the layout of its target: redraft's mtp family does",
            )
    if not pair.config.get(layout.count_key):
        yield Finding(
            f"config.json does not say how many MTP layers there are ({layout.count_key})",
            f'write "{layout.count_key}": 1 into config.json',
        )
