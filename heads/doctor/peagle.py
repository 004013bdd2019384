"""Checks of a P-EAGLE head.

These are EAGLE-3's checks, plus checks of the mask token and the masks' learned feature.
"""

from collections.abc import Iterator

from redraft.heads.doctor import eagle3, shared
from redraft.heads.doctor.pair import Check, Finding, Pair
from redraft.heads.families.peagle import MASK_KEYS


def mask_token(pair: Pair) -> Iterator[Finding]:
    """Check that the mask token has a target embedding and is the one used in training."""
    key = next((key for key in MASK_KEYS if pair.config.get(key) is not None), None)
    trained = pair.trained_with.get("mask_token_id")
    if key is None:
        said = "of training" if trained is None else str(trained)
        yield Finding(
            "config.json has no mask token, so vLLM fails to start",
            f'write "pard_token": {said} into it',
        )
        return
    mask = pair.config[key]
    if trained is not None and mask != trained:
        yield Finding(
            f"{key} is {mask}, but the head was trained with {trained}", f'write "{key}": {trained}'
        )
    else:
        yield from shared.mask_token_fits(pair, key, mask)


def mask_feature(pair: Pair) -> Iterator[Finding]:
    """Check that the masks' feature is as wide as the streams that `fc` reads."""
    width, found = pair.shapes["fc.weight"][1], pair.shapes.get("mask_hidden")
    if found is not None and found[-1] != width:
        yield Finding(
            f"mask_hidden has {found[-1]} numbers, but fc reads {width}", "export the head again"
        )


def stream_norms(pair: Pair) -> Iterator[Finding]:
    """Check that `fc_norm` is in the section from which vLLM reads it (`update_peagle`)."""
    is_normed = any(name.startswith("fc_norm.") for name in pair.shapes)
    if pair.is_speculators and is_normed and not pair.layer_config.get("fc_norm"):
        yield Finding(
            "transformer_layer_config lacks fc_norm, and for P-EAGLE vLLM reads this key nowhere else: "
            "without it, vLLM does not create the checkpoint's norms, and fails to start",
            'write "fc_norm": true into transformer_layer_config, or export the head in the layout '
            '"vllm"',
        )


CHECKS: tuple[Check, ...] = (*eagle3.CHECKS, mask_token, mask_feature, stream_norms)
