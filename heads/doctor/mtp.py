"""Check that an MTP layer's inputs in serving are the same as in training."""

from collections.abc import Iterator

from redraft.files.checkpoint import load_text_config
from redraft.heads.doctor import shared
from redraft.heads.doctor.pair import Check, Finding, Pair
from redraft.heads.families.mtp_layouts import detect_layout

FACTS = {
    "reads_normed": "the target's hidden state {} its final norm",
    "zero_at_start": "the embedding at position 0 {}",
    "embedding_first": "the {} first in the concatenation",
}
"""Sentences that describe the fields of a `Layout`, which an engine derives from the target's
architecture.
"""

VALUES = {
    "reads_normed": {True: "after", False: "before"},
    "zero_at_start": {True: "set to zero", False: "as it is"},
    "embedding_first": {True: "embedding", False: "hidden state"},
}


def layout(pair: Pair) -> Iterator[Finding]:
    """Check that the layer was trained in this target's layout, because the engine assumes it."""
    served, trained = detect_layout(pair.target_config), pair.trained_with
    for key, sentence in FACTS.items():
        value = getattr(served, key)
        if trained.get(key, value) != value:
            gives, wants = (sentence.format(VALUES[key][v]) for v in (value, trained[key]))
            yield Finding(
                f"the engine gives the MTP layer {gives}, but it was trained with {wants}",
                "train it in its target's layout, as redraft's mtp family does",
            )
    if not pair.config.get(served.count_key):
        yield Finding(
            f"config.json does not state the number of MTP layers ({served.count_key})",
            f'write "{served.count_key}": 1 into config.json',
        )


def rope(pair: Pair) -> Iterator[Finding]:
    """Check that all rotary parameters equal the target's, including a partial rotation.

    They must be equal because the layer has the same class as the target's layers.
    """
    mine = load_text_config(pair.draft).rope_parameters
    yield from shared.compare_rope(mine, pair.target_config.rope_parameters)


CHECKS: tuple[Check, ...] = (layout, shared.sizes, rope, shared.positions)
