"""A step makes its tensors on the batch's device and not on the default one.

A GPU refuses to join the two.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from make_heads import make_signal
from train_on_ranks import FAMILIES, make_family_target, micro_batches

from redraft.distill.loss.choice import Divergence
from redraft.distill.train.loop import make_accelerator
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"tied"}))
def test_no_tensor_of_a_step_is_made_on_the_default_device(name: str) -> None:
    """With `meta` as the default, and all else on the CPU.

    PyTorch refuses to join these two as well.
    """
    target = make_family_target(name)
    torch.manual_seed(1)
    draft: Any = FAMILIES[name](target)
    (batch,) = micro_batches(0, 0, 1, 1)
    signal = make_signal(target, batch, getattr(draft, "aux_layer_ids", ()))
    distillation = Distillation(
        draft, lambda _: signal, Divergence(), Optim(lr=1e-2), 8, make_accelerator(1, None, None)
    )
    with torch.device("meta"):
        stats = distillation.step([batch])
    distillation.close()
    assert stats.loss > 0
    assert not stats.skipped
