"""A block drafter in training over several epochs.

The blocks that it trains, and a run that is resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from make_heads import VOCAB, make_random, make_signal, make_target
from torch import Tensor

from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import Sample
from redraft.distill.loss.choice import Divergence
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation
from redraft.heads.draft import Batch, TargetSignal
from redraft.heads.families import dflash
from redraft.heads.target import Target

STEPS = 9


def make_data() -> PackedDataset:
    """Six texts of 16 tokens, so that an epoch is three batches of two."""
    rng = np.random.default_rng(0)
    mask = np.arange(16) >= 2
    texts = [rng.integers(0, VOCAB, 16).astype(np.int32) for _ in range(6)]
    samples = [
        Sample(input_ids=ids, loss_mask=mask, conversation=str(i), domain="all")
        for i, ids in enumerate(texts)
    ]
    return PackedDataset(samples, sequence_length=16, seed=3)


@pytest.fixture
def make_run() -> Callable[[], Distillation]:
    model = make_target()
    config = dflash.Config(
        aux_layer_ids=(1, 2, 4), num_layers=1, block_size=3, mask_token_id=VOCAB - 1, num_anchors=4
    )

    def signal(batch: Batch) -> TargetSignal:
        return make_signal(model, batch, config.aux_layer_ids)

    def make() -> Distillation:
        torch.manual_seed(0)
        head = make_random(dflash.DFlash(config, Target.from_model(model)))
        return Distillation(
            head, signal, Divergence(), Optim(lr=1e-2), STEPS, Accelerator(cpu=True)
        )

    return make


def take(
    run: Distillation,
    data: PackedDataset,
    last: int,
    change: Callable[[Batch], Batch] = lambda batch: batch,
) -> None:
    for step in range(run.step_index, last):
        run.step([change(data.batch(step, batch_size=2))])


def weights(run: Distillation) -> dict[str, Tensor]:
    found = {name: tensor.clone() for name, tensor in run.weights().items()}
    run.close()
    return found


def test_a_run_resumed_in_its_second_epoch_ends_as_the_unbroken_one(
    make_run: Callable[[], Distillation], tmp_path: Path
) -> None:
    unbroken = make_run()
    take(unbroken, make_data(), 5)
    unbroken.save(tmp_path / "checkpoint")
    take(unbroken, make_data(), STEPS)
    wanted = weights(unbroken)
    resumed = make_run()
    resumed.resume(tmp_path / "checkpoint")
    take(resumed, make_data(), STEPS)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(resumed).items())
    # and it matters: with the same anchors in every epoch the weights are others
    always_the_same = make_run()
    take(always_the_same, make_data(), STEPS, lambda batch: replace(batch, salt=0))
    assert not torch.equal(weights(always_the_same)["fc.weight"], wanted["fc.weight"])


def test_the_epochs_of_a_run_begin_a_block_at_nearly_every_row(
    make_run: Callable[[], Distillation],
) -> None:
    run, data = make_run(), make_data()
    begun: dict[tuple[int, ...], Tensor] = {}
    for index in range(30):
        batch = data.batch(index, batch_size=2)
        mask_BT = run.draft.draft_steps(batch, run.target(batch))[0].mask_BT  # type: ignore[operator]
        for ids_T, mask_T in zip(batch.input_ids_BT.tolist(), mask_BT, strict=True):
            begun[tuple(ids_T)] = (
                begun.get(tuple(ids_T), torch.zeros(16, dtype=torch.bool)) | mask_T
            )
    run.close()
    # 14 rows of a text have a label two tokens on, and an epoch takes 4 of them
    assert len(begun) == 6
    assert sum(int(mask_T.sum()) for mask_T in begun.values()) >= 0.9 * 6 * 14
