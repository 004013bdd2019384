"""A small random head of every family, in the variants that its tests go through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from make_heads import VOCAB, make_random, make_target
from make_native import make_native_target
from torch import Tensor

from redraft.heads.catalog import find_family
from redraft.heads.target import Target

MASK = VOCAB - 1
DRAFT_IDS = torch.arange(3, VOCAB, 4)

SIZES = {
    "intermediate_size": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
"""Others than the target's, by every option of `LayerSizes`."""

Variants = dict[str, tuple[dict[str, Any], Tensor | None]]
"""Options and the ids of a reduced vocabulary, by name."""

BLOCK: dict[str, Any] = {"aux_layer_ids": (1, 2, 4), "num_layers": 2, "mask_token_id": MASK}

OPTIONS: dict[str, dict[str, Any]] = {
    "eagle1": {"num_steps": 4},
    "eagle3": {"aux_layer_ids": (1, 2, 4), "num_steps": 3},
    "mtp": {"num_steps": 3},
    "peagle": {**BLOCK, "num_layers": 3, "num_steps": 4},
    "dflash": {**BLOCK, "block_size": 4},
    "dspark": {**BLOCK, "block_size": 3, "markov_rank": 6},
    "medusa": {},
}
"""Options of all variants of a family, unless the variant says otherwise."""

VARIANTS: dict[str, Variants] = {
    "eagle1": {"plain": ({}, None), "sizes of its own": (SIZES, None)},
    "eagle3": {
        "plain": ({}, None),
        "reduced vocabulary": ({}, DRAFT_IDS),
        "the target's head": ({"own_head": False}, None),
        "the target's rows": ({"own_head": False}, DRAFT_IDS),
        "norm before residual": ({"norm_before_residual": True}, None),
        "3.1": ({"fc_norm": True, "norm_output": True}, DRAFT_IDS),
        "one layer": ({"aux_layer_ids": (5,)}, None),
        "four layers from the embeddings on": ({"aux_layer_ids": (0, 1, 3, 4)}, None),
        "sizes of its own": (SIZES, None),
    },
    "mtp": {layout: ({}, None) for layout in ("mimo", "qwen3_next", "qwen3_5", "deepseek")},
    "peagle": {
        "plain": ({}, None),
        "reduced vocabulary": ({}, DRAFT_IDS),
        "one layer, target's head": ({"num_layers": 1, "own_head": False}, None),
        "sizes of its own": (SIZES, None),
        "norms before fc and before the residual": (
            {"fc_norm": True, "norm_before_residual": True},
            None,
        ),
    },
    "dflash": {
        "plain": ({}, None),
        "reduced vocabulary": ({}, DRAFT_IDS),
        "one layer": ({"aux_layer_ids": (5,), "num_layers": 1}, None),
        "sizes of its own": (SIZES, None),
    },
    "dspark": {
        "from the anchor": ({}, None),
        "from the first mask": ({"sample_from_anchor": False, "block_size": 4}, None),
        "reduced vocabulary": ({}, DRAFT_IDS),
        "without confidence": ({"confidence_head": False, "num_layers": 1}, None),
        "sizes of its own": (SIZES, None),
    },
    "medusa": {"two layers": ({"num_layers": 2}, None), "without biases": ({"bias": False}, None)},
}


def make_variant(
    name: str, variant: str, folder: Path | None = None, **options: Any
) -> tuple[Any, Any]:
    """(head, target) of a variant.

    The target of an MTP layer is made in `folder`, in the layout that the variant names.
    """
    model: Any = (
        make_target() if folder is None or name != "mtp" else make_native_target(variant, folder)
    )
    family = find_family(name)
    chosen, draft_ids = VARIANTS[name][variant]
    config = family.options_class()(**{**OPTIONS[name], **chosen, **options})
    torch.manual_seed(0)
    vocabulary = () if draft_ids is None else (draft_ids,)
    return make_random(family.draft_class()(config, Target.from_model(model), *vocabulary)), model
