"""Layers that the backward pass computes again.

The same outputs and gradients, and no keys twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from make_heads import VOCAB, make_batch, make_ids, make_random, make_signal, make_target
from torch import Tensor, nn

from redraft.heads.families.dflash import Config as DFlashConfig
from redraft.heads.families.dflash import DFlash
from redraft.heads.families.dspark import Config as DSparkConfig
from redraft.heads.families.dspark import DSpark
from redraft.heads.families.eagle1 import Config as Eagle1Config
from redraft.heads.families.eagle1 import Eagle1
from redraft.heads.families.peagle import Config as PEagleConfig
from redraft.heads.families.peagle import PEagle
from redraft.heads.target import Target

BLOCKS: dict[str, Any] = {
    "aux_layer_ids": (1, 2, 4),
    "num_layers": 2,
    "block_size": 4,
    "mask_token_id": VOCAB - 1,
}
SLOTS: dict[str, Any] = {
    "aux_layer_ids": (1, 2, 4),
    "num_layers": 3,
    "num_steps": 4,
    "mask_token_id": VOCAB - 1,
}


def make_head(family: str, target: Target, *, recompute: bool) -> nn.Module:
    torch.manual_seed(0)
    made: dict[str, Callable[[], nn.Module]] = {
        "eagle1": lambda: Eagle1(Eagle1Config(num_steps=3), target),
        "peagle": lambda: PEagle(PEagleConfig(**SLOTS), target),
        "dspark": lambda: DSpark(DSparkConfig(**BLOCKS, markov_rank=4), target),
        # More anchors than a chunk holds, of 90 tokens.
        "dflash": lambda: DFlash(DFlashConfig(**BLOCKS, num_anchors=80), target),
    }
    head: Any = made[family]()
    head.recomputes = recompute
    return head


def run(family: str, model: Any, *, recompute: bool) -> tuple[list[Tensor], int]:
    """Outputs and gradients, and how often a layer's MLP ran."""
    head: Any = make_random(make_head(family, Target.from_model(model), recompute=recompute))
    batch, passes = make_batch([[make_ids(50), make_ids(40)]]), []
    for name, module in head.named_modules():
        if name.endswith("mlp"):
            module.register_forward_pre_hook(lambda *_: passes.append(1))
    hidden = [
        step.hidden_BTD
        for step in head.draft_steps(batch, make_signal(model, batch, head.aux_layer_ids))
    ]
    torch.stack(hidden).square().sum().backward()
    return [*hidden, *(p.grad for p in head.parameters() if p.grad is not None)], len(passes)


@pytest.mark.parametrize("family", ["eagle1", "peagle", "dflash", "dspark"])
def test_layers_that_are_computed_again_have_the_same_gradients(family: str) -> None:
    model = make_target()
    (kept, passes), (again, more_passes) = (
        run(family, model, recompute=recompute) for recompute in (False, True)
    )
    assert len(kept) == len(again) > 3 + 5
    for one, other in zip(kept, again, strict=True):
        torch.testing.assert_close(one, other)
    assert more_passes == 2 * passes, "each layer ran once more"


@pytest.mark.parametrize("family", ["eagle1", "peagle", "dflash", "dspark"])
def test_nothing_is_computed_again_without_gradients(family: str) -> None:
    model = make_target()
    head: Any = make_head(family, Target.from_model(model), recompute=True)
    passes: list[int] = []
    layer = next(module for name, module in head.named_modules() if name.endswith("mlp"))
    layer.register_forward_pre_hook(lambda *_: passes.append(1))
    batch = make_batch([[make_ids(9)]])
    with torch.no_grad():
        steps = head.draft_steps(batch, make_signal(model, batch, head.aux_layer_ids))
    assert not any(step.hidden_BTD.requires_grad for step in steps)
    assert passes
