"""Signals that come from disk or a thread, for a batch on the GPU. `make test-gpu`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from gpu_or_cpu import DEVICE as GPU
from gpu_or_cpu import IS_GPU, ON_DEVICE, SHAPE
from make_heads import make_ids, make_target
from train_on_ranks import make_standalone

from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import Sample, data_hash
from redraft.distill.loss.choice import Divergence
from redraft.distill.signal.ahead import OneAhead
from redraft.distill.signal.cache import CachedTarget, TopK
from redraft.distill.signal.shards import write_cache
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.signal.transfer import to_device
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation
from redraft.heads.draft import TopKTarget

LABELLED, UNLABELLED = range(6), range(6, 8)

pytestmark = ON_DEVICE


@pytest.fixture
def samples() -> list[Sample]:
    """Six texts with labels, and two without."""
    return [
        Sample(
            input_ids=np.array(make_ids(12 + seed, seed=seed), np.int32),
            loss_mask=(np.arange(12 + seed) >= 4) & (seed in LABELLED),
            conversation=str(seed),
            domain="all",
        )
        for seed in (*LABELLED, *UNLABELLED)
    ]


@pytest.fixture
def cached(samples: list[Sample], tmp_path: Path) -> CachedTarget:
    """Their top 8 of a target on the CPU."""
    write_cache(
        samples,
        InProcessTarget(make_target(**SHAPE)),
        tmp_path / "cache",
        TopK(8),
        target="the-target",
        sequence_length=64,
        batch_size=2,
    )
    return CachedTarget(tmp_path / "cache", TopK(8), target="the-target", data=data_hash(samples))


def test_a_cache_gives_a_batch_on_the_gpu_what_it_gives_one_on_the_cpu(
    cached: CachedTarget, samples: list[Sample]
) -> None:
    for chosen in (LABELLED, UNLABELLED):
        batch = PackedDataset([samples[i] for i in chosen], sequence_length=64).batch(
            0, batch_size=1
        )
        here, there = cached(batch).distribution, cached(to_device(batch, GPU)).distribution
        assert isinstance(here, TopKTarget)
        assert isinstance(there, TopKTarget)
        assert there.ids_BTK.device.type == GPU.type
        assert torch.equal(there.ids_BTK.cpu(), here.ids_BTK)
        assert torch.equal(there.log_probs_BTK.cpu(), here.log_probs_BTK)


@pytest.mark.usefixtures("fresh_accelerator")
def test_a_standalone_draft_trains_on_a_cache_read_one_batch_ahead(
    cached: CachedTarget, samples: list[Sample]
) -> None:
    """Results that are read after all steps are those that are read after each."""
    found = []
    for is_late in (False, True):
        accelerator = Accelerator(cpu=not IS_GPU)
        draft = make_standalone(make_target(**SHAPE), **SHAPE).to(GPU)
        distillation = Distillation(
            draft,
            OneAhead(cached, GPU),
            Divergence(),
            Optim(lr=1e-2, warmup_fraction=0.0),
            4,
            accelerator,
        )
        data = PackedDataset(samples, sequence_length=64)
        batches = [to_device(data.batch(index, batch_size=1), GPU) for index in range(4)]
        pairs = list(zip(batches, [*batches[1:], None], strict=True))
        if is_late:
            unread = [distillation.take_step([batch], following) for batch, following in pairs]
            found.append([distillation.read(each) for each in unread])
        else:
            found.append([distillation.step([batch], following) for batch, following in pairs])
        distillation.close()
    assert not any(stats.skipped for stats in found[0])
    for early, late in zip(*found, strict=True):
        # A GPU adds in no fixed order, and AdamW makes a step of a tiny gradient too.
        assert late.loss == pytest.approx(early.loss, rel=1e-2)
        assert late.alpha == pytest.approx(early.alpha, rel=1e-2)
    assert found[0][-1].loss != found[0][0].loss
