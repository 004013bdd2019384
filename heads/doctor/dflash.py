"""Checks of a DFlash head.

They cover target layers, mask token, direction of attention, norms and draft vocabulary.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from redraft.files.windows import SECTION, SLIDING
from redraft.heads.doctor import shared
from redraft.heads.doctor.described import other_architecture
from redraft.heads.doctor.eagle3 import map_of_all, vocabulary_map
from redraft.heads.doctor.pair import Check, Finding, Pair
from redraft.heads.doctor.windows import windows

LAYERS, LAYERS_OF_SPECULATORS = "target_layer_ids", "aux_hidden_state_layer_ids"
"""Keys of the target layers in the two layouts, and the number to add to each layer: one layout
counts layers from 0, and the other gives the number of layers below.
"""

SECTION_KEYS = (
    "mask_token_id",
    LAYERS,
    LAYERS_OF_SPECULATORS,
    "causal",
    "is_causal",
    "sample_from_anchor",
)

COUNTED = {
    LAYERS: "layers are counted from 0",
    LAYERS_OF_SPECULATORS: "k is the state after k layers, starting at 1",
}


def target_layers(pair: Pair) -> Iterator[Finding]:
    """Check that the target layers exist, and that their number matches `fc`."""
    section, place = _section(pair, pair.config)
    key = LAYERS_OF_SPECULATORS if pair.is_speculators else LAYERS
    ids = section.get(key)
    if not ids:
        yield Finding(
            f"{place} has no {key}, so it is undefined which states of the target the engine feeds",
            f'write "{key}" into {place}: {COUNTED[key]}',
        )
        return
    read = pair.shapes["fc.weight"][1] // pair.target_config.hidden_size
    if len(ids) != read and pair.is_as_wide:
        yield Finding(
            f"{len(ids)} target layers {list(ids)} are listed, but the weights of fc read {read}",
            f"list in {key} the {read} layers that the head was trained on",
        )
        return
    first = 1 if pair.is_speculators else 0
    last = pair.target_config.num_hidden_layers - 1 + first
    if list(ids) != sorted(set(ids)) or ids[0] < first or ids[-1] > last:
        yield Finding(
            f"target layers {list(ids)} are not distinct ascending layers of the target, which has "
            f"{first} to {last}",
            "list the layers that the head was trained on; the first layer of the target "
            f"is {first}",
        )


def mask_token(pair: Pair) -> Iterator[Finding]:
    """Check that the token in the empty slots has a row in the target's embedding table."""
    section, place = _section(pair, pair.config)
    mask = section.get("mask_token_id")
    if mask is None:
        yield Finding(
            f"{place} has no mask_token_id, which fills the slots of the draft tokens",
            f'write the "mask_token_id" used in training into {place}',
        )
    else:
        yield from shared.mask_token_fits(pair, "mask_token_id", mask)


def as_trained(pair: Pair) -> Iterator[Finding]:
    """Check that the config keys that affect the arithmetic have the values used in training."""
    section, place = _section(pair, pair.config)
    trained, _ = _section(pair, pair.trained_with)
    for key in SECTION_KEYS:
        if key in trained and section.get(key) is not None and section[key] != trained[key]:
            counted = COUNTED.get(key)
            hint = shared.off_by_one(section[key], trained[key], counted) if counted else ""
            yield Finding(
                f"{key} is {section[key]}, but the head was trained with {trained[key]}{hint}",
                f'write "{key}": {str(trained[key]).lower()} into {place}',
            )


def causality(pair: Pair) -> Iterator[Finding]:
    """Check that the config states the direction of attention in a block, or has windows.

    If a head has windows, they determine the direction.
    """
    section, place = _section(pair, pair.config)
    is_said = "causal" in section or "is_causal" in pair.config
    has_windows = SLIDING in (pair.config.get("layer_types") or ())
    # The other layouts have other keys for it.
    if not (place == "config.json" or is_said or has_windows):
        yield Finding(
            f"{place} does not state whether attention within a block is causal, and "
            "engines have different defaults",
            f'write "causal": false into {place}, unless the head was trained with causal attention',
        )


def block_size(pair: Pair) -> Iterator[Finding]:
    """Check that the block is as long as in training."""
    section, _ = _section(pair, pair.config)
    # z-lab's newer files have it in the section.
    served = pair.config.get("block_size") or section.get("block_size")
    trained = pair.trained_with.get("block_size")
    if served is None or (trained is not None and served != trained):
        said = "missing" if served is None else served
        yield Finding(
            f"block_size is {said}, but the head was trained with {trained or 'an unknown value'}",
            f'write "block_size": {trained or "the number of slots per block in training"} into '
            "config.json",
        )


def head_norms(pair: Pair) -> Iterator[Finding]:
    """Check that every layer has query and key norms.

    The engine would leave missing norms at one.
    """
    for i in range(pair.layer_config.get("num_hidden_layers", 0)):
        missing = [
            n for n in ("q_norm", "k_norm") if f"layers.{i}.self_attn.{n}.weight" not in pair.shapes
        ]
        if missing:
            yield Finding(
                f"layer {i} lacks {' and '.join(missing)}, and the engine would use ones instead",
                "export the head again",
            )
            return


def rotation(pair: Pair) -> Iterator[Finding]:
    """Check that the rotary parameters and the attention head size are the same as in training."""
    trained, served = pair.trained_with, pair.layer_config
    place = "transformer_layer_config" if pair.is_speculators else "config.json"
    for key in ("head_dim", "rope_parameters"):
        if key in trained and served.get(key) != trained[key]:
            yield Finding(
                f"{key} is {served.get(key)}, but the head was trained with {trained[key]}",
                f'write the "{key}" used in training into {place}',
            )


def _section(pair: Pair, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """Return the part of config.json, or of the record in it, with the family's keys; its name."""
    inner = config.get(SECTION) or {}
    is_flat = SECTION not in pair.config and LAYERS in pair.config
    if pair.family.name == "dflash" and not (pair.is_speculators or is_flat):
        return inner, SECTION
    # DSpark and the speculators layout have all keys at the top level. So has a DSpark head without
    # a Markov head. Engines look in the section first.
    return {**config, **inner}, SECTION if LAYERS in inner else "config.json"


OF_BLOCKS: tuple[Check, ...] = (
    windows,
    shared.sizes,
    shared.positions,
    shared.shared_weights,
    shared.fc_bias,
    shared.biases,
    target_layers,
    mask_token,
    as_trained,
    block_size,
    head_norms,
    rotation,
    vocabulary_map,
    map_of_all,
)


def architecture(pair: Pair) -> Iterator[Finding]:
    """Report `other_architecture`, unless `checks.method_flag` does."""
    if not pair.is_speculators:
        yield from other_architecture(pair.config, pair.family)


CHECKS: tuple[Check, ...] = (architecture, *OF_BLOCKS, causality)
