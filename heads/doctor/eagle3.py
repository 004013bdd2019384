"""Checks of an EAGLE-3 head: auxiliary layers, norms and draft vocabulary.

W = draft vocabulary, V = target vocabulary, D = hidden."""

import json
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from redraft.files.foreign import AUX_LAYERS, default_layers
from redraft.files.tensors import read_tensors
from redraft.heads.doctor import shared
from redraft.heads.doctor.pair import Check, Finding, Pair
from redraft.heads.doctor.windows import windows
from redraft.heads.families.eagle3 import ARCHITECTURE

NUM_AUX = "num_aux_hidden_states"
DEFAULT_NUM_AUX = 3  # vLLM's default without `num_aux_hidden_states` and a nested list


# Maximum number of ids in which no two neighbours have the same d2t offset.
WITHOUT_NEIGHBOURS = 64


def nested_ids(pair: Pair) -> Iterator[Finding]:
    """Check that the layers are listed at the config's top level, and unambiguously."""
    nested = _nested_ids(pair)
    if nested and not pair.config.get(AUX_LAYERS):
        above = [layer + 1 for layer in nested]
        lists = (
            f"{above} if the head was made for SGLang or TensorRT-LLM (SpecForge, ModelOpt), "
            f"{nested} if it was made for vLLM"
        )
        if above[-1] > pair.target_config.num_hidden_layers:
            lists = f"{nested}, because the target has no layer {above[-1]}"
        yield Finding(
            f"the aux layer ids {nested} are nested in another section of config.json: vLLM's "
            "V1 runner uses them unchanged, V2 ignores them, and SGLang and TensorRT-LLM interpret "
            f"them as {above} for most targets",
            f'write "{AUX_LAYERS}" at the top level of config.json: {lists}',
        )


def aux_layers(pair: Pair) -> Iterator[Finding]:
    """Check that the engine gives the head the layers that it was trained on."""
    top, nested = pair.config.get(AUX_LAYERS), _nested_ids(pair)
    num_layers = pair.target_config.num_hidden_layers
    if not top and nested:
        yield from _number_of_aux_layers(pair, nested)
        return
    served = list(top or default_layers(num_layers))
    trained = pair.trained_with.get(AUX_LAYERS)
    if served != sorted(set(served)) or served[0] < 0 or served[-1] > num_layers:
        yield Finding(
            f"aux layers {served} are not distinct ascending layers of the target, which "
            f"has layers 0 to {num_layers}",
            _write_ids(trained) if trained else "list the layers that the head was trained on",
        )
    elif trained and served != trained:
        given = "the engine uses" if top else "config.json lists none, and the engine uses"
        yield Finding(
            f"{given} aux layers {served}, but the head was trained on "
            f"{trained}"
            + shared.off_by_one(served, trained, "layer k is the residual stream after k layers"),
            _write_ids(trained),
        )
    yield from _number_of_aux_layers(pair, served)


def _number_of_aux_layers(pair: Pair, served: Sequence[int]) -> Iterator[Finding]:
    read = pair.shapes["fc.weight"][1] // pair.target_config.hidden_size
    if not pair.is_as_wide:
        return
    if len(served) != read:
        yield Finding(
            f"{len(served)} aux layers {list(served)} are listed, but the weights of fc read "
            f"{read}",
            f"list in {AUX_LAYERS} the {read} layers that the head was trained on",
        )
        return
    in_eagle_config = (pair.config.get("eagle_config") or {}).get(AUX_LAYERS)
    # This is vLLM's order (`llama_eagle3.py`). The ids at the top level are not considered here.
    counted = pair.layer_config.get(NUM_AUX) or len(in_eagle_config or ()) or DEFAULT_NUM_AUX
    if counted != read:
        where = "transformer_layer_config" if pair.is_speculators else "config.json"
        yield Finding(
            f"vLLM reserves space for {counted} aux layers, but the weights of fc read {read}",
            f'write "{NUM_AUX}": {read} into {where}',
        )


def _nested_ids(pair: Pair) -> list[int] | None:
    sections = (pair.config.get("eagle_config"), pair.config.get("transformer_layer_config"))
    return next(
        (list(section[AUX_LAYERS]) for section in sections if section and section.get(AUX_LAYERS)),
        None,
    )


def _write_ids(trained: Sequence[int]) -> str:
    return f'write "{AUX_LAYERS}": {list(trained)} at the top level of config.json'


def options(pair: Pair) -> Iterator[Finding]:
    """Check that the options that affect the arithmetic are as in training."""
    for key in ARCHITECTURE:
        trained = pair.trained_with.get(key)
        # vLLM's `update_eagle3` assumes true, but `update_peagle` assumes false.
        default = (
            pair.config.get("speculators_model_type") == "eagle3" and key == "norm_before_residual"
        )
        # An option that is unset and correct only by default is still reported if engines have
        # different defaults.
        unset_is_right = trained == default and key != "norm_before_residual"
        if (
            trained is None
            or pair.config.get(key) == trained
            or (key not in pair.config and unset_is_right)
        ):
            continue
        unset = f"unset (the engine uses {json.dumps(default)})"
        said = json.dumps(pair.config[key]) if key in pair.config else unset
        yield Finding(
            f"{key} is {said}, but the head was trained with {json.dumps(trained)}",
            f'write "{key}": {json.dumps(trained)} at the top level of config.json',
        )


def vocabulary_map(pair: Pair) -> Iterator[Finding]:
    """Check the maps of a reduced vocabulary.

    `d2t[i]` is the target id minus draft id i, and `t2d` marks the target ids that are kept.
    """
    vocab_size = pair.target_config.vocab_size
    rows = pair.shapes.get("lm_head.weight", (vocab_size,))[0]
    named = pair.config.get("draft_vocab_size") or vocab_size
    if named != rows:
        yield Finding(
            f"draft_vocab_size is {named}, but the head has {rows} rows",
            f'write "draft_vocab_size": {rows}',
        )
    if rows > vocab_size:
        yield Finding(
            f"a draft vocabulary of {rows} ids is larger than the target's {vocab_size}",
            "train a head for this target",
        )
    elif "d2t" in pair.shapes:
        yield from _check_map(pair, rows, vocab_size)
    elif rows < vocab_size:
        yield Finding(
            f"d2t is missing: the {rows} draft ids are used as the target's first {rows} "
            "ids, so nearly all of them are wrong",
            "export the head again, with d2t (int64, the target's id minus the draft's) and t2d",
        )


def map_of_all(pair: Pair) -> Iterator[Finding]:
    """Check that a head with the target's whole vocabulary has no map, because vLLM refuses one."""
    if pair.shapes.get("d2t") == (pair.target_config.vocab_size,):
        yield Finding(
            "the checkpoint contains d2t, but the head has the target's whole vocabulary: vLLM fails "
            "to start with it",
            "remove d2t and t2d from the checkpoint",
        )


def _check_map(pair: Pair, rows: int, vocab_size: int) -> Iterator[Finding]:
    wanted = [name for name in ("d2t", "t2d") if name in pair.shapes]
    tensors = read_tensors(pair.draft, wanted)
    offset_W = tensors["d2t"]
    if offset_W.is_floating_point():
        yield Finding(
            f"d2t is stored as {pair.dtypes['d2t']}, which rounds large ids",
            "store d2t as int64: export again",
        )
    elif offset_W.shape != (rows,):
        yield Finding(
            f"d2t has {offset_W.numel()} entries, but the draft's head has {rows} rows",
            "export the head again from training",
        )
    else:
        kept_V = tensors.get("t2d")
        yield from compare_maps(
            offset_W, None if kept_V is None else kept_V.nonzero().flatten(), vocab_size
        )


def compare_maps(offset_W: Tensor, kept_W: Tensor | None, vocab_size: int) -> Iterator[Finding]:
    """Report the faults in a vocabulary map.

    `kept_W` contains the ids marked in t2d; it is None if t2d is absent.
    """
    ids_W = offset_W + torch.arange(len(offset_W))
    # If ascending ids are read as offsets, the result ascends too: [5, 9] becomes [5, 10]. So t2d
    # decides. Without t2d, ids beyond the vocabulary reveal the mistake, or a long map in which no
    # two neighbours have the same offset.
    is_ids = _ascends_within(ids_W, vocab_size)
    is_steep = len(offset_W) > WITHOUT_NEIGHBOURS and bool((offset_W.diff() > 0).all())
    as_ids = torch.equal(offset_W, kept_W) if kept_W is not None else is_steep or not is_ids
    if (
        as_ids
        and _ascends_within(offset_W, vocab_size)
        and (kept_W is None or not torch.equal(ids_W, kept_W))
    ):
        yield Finding(
            "d2t contains the target's ids themselves, but the engine adds d2t to the draft's ids",
            "store d2t minus 0, 1, 2, ...: the offset of every draft id",
        )
    elif not is_ids:
        yield Finding(
            f"d2t gives ids that do not ascend within the target's 0 to {vocab_size - 1}",
            "export the head again",
        )
    elif kept_W is not None and not torch.equal(ids_W, kept_W):
        yield Finding(
            f"d2t and t2d contradict each other: d2t gives {len(ids_W)} ids, and t2d marks "
            f"{len(kept_W)} different ones",
            "export both from the ids that the head was trained with",
        )


def _ascends_within(ids_W: Tensor, vocab_size: int) -> bool:
    return bool((ids_W.diff() > 0).all()) and int(ids_W[0]) >= 0 and int(ids_W[-1]) < vocab_size


CHECKS: tuple[Check, ...] = (
    windows,
    *shared.LLAMA_LAYER,
    shared.shared_weights,
    shared.fc_bias,
    nested_ids,
    aux_layers,
    options,
    vocabulary_map,
    map_of_all,
)
