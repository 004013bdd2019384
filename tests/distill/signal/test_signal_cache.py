from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import Sample, data_hash
from redraft.distill.signal import cache, shards
from redraft.distill.signal.cache import CachedTarget, TopK
from redraft.distill.signal.shards import write_cache
from redraft.distill.signal.sources import InProcessTarget, top_k
from redraft.heads.draft import Batch, TargetSignal, label_rows

K = 6


def make_target() -> InProcessTarget:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        pad_token_id=0,
    )
    return InProcessTarget(LlamaForCausalLM(config))


def make_samples(num: int = 30, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 20, num)
    return [
        Sample(
            input_ids=rng.integers(1, 61, length).astype(np.int32),
            loss_mask=np.arange(length) >= length // 2,
            conversation=str(i),
            domain="all",
        )
        for i, length in enumerate(lengths)
    ]


def write(
    folder: Path,
    samples: list[Sample],
    source: Callable[[Batch], TargetSignal],
    k: int = K,
    **options: Any,
) -> None:
    defaults = {"target": "the-target", "sequence_length": 32, "batch_size": 2}
    write_cache(samples, source, folder, TopK(k), **{**defaults, **options})


def read(
    folder: Path, samples: list[Sample], target: str = "the-target", k: int = K
) -> CachedTarget:
    return CachedTarget(folder, TopK(k), target=target, data=data_hash(samples))


def test_the_cache_gives_the_top_k_of_the_target_however_the_rows_are_packed(
    tmp_path: Path,
) -> None:
    samples, target = make_samples(), make_target()
    write(tmp_path, samples, target)
    cached = read(tmp_path, samples)
    data = PackedDataset(samples, sequence_length=40, seed=9)
    for index in range(data.num_batches(3)):
        batch = data.batch(index, batch_size=3)
        known = cached(batch).distribution
        rows_N = label_rows(batch, 0).flatten().nonzero().squeeze(1)
        ids_NK, log_probs_NK = top_k(target(batch).distribution, rows_N, K)
        assert torch.equal(known.ids_BTK.flatten(0, 1)[rows_N], ids_NK)
        torch.testing.assert_close(
            known.log_probs_BTK.flatten(0, 1)[rows_N], log_probs_NK, atol=1e-5, rtol=0
        )
        assert (known.ids_BTK[~label_rows(batch, 0)] == -1).all()
        assert torch.isfinite(known.log_probs_BTK).all()


def test_ranks_write_each_shard_once_and_together_the_cache_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 48 * 2 * 32)  # a batch
    samples, target = make_samples(), make_target()
    write(tmp_path / "one", samples, target)
    capsys.readouterr()
    passes = []

    def counted(batch: Batch) -> TargetSignal:
        passes.append(batch)
        return target(batch)

    for rank in (2, 0, 1):
        assert not shards.is_complete(tmp_path / "three")
        write(tmp_path / "three", samples, counted, rank=rank, num_ranks=3)
        assert ("caching the top 6" in capsys.readouterr().out) == (rank == 0)
    one, three = (
        {f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("one", "three")
    )
    assert one == three
    assert len(passes) == len(one) - 1 > 3, "a pass for each shard, beside the header"


def test_a_batch_on_a_device_gets_its_signal_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` in place of a GPU.

    PyTorch refuses to join its tensors with the CPU's just the same.
    """
    samples = make_samples()
    write(tmp_path, samples, make_target())
    cached, batch = (
        read(tmp_path, samples),
        PackedDataset(samples, sequence_length=40).batch(0, batch_size=3),
    )
    there = Batch(
        **{name: x.to("meta") for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}
    )
    # A `meta` tensor holds no values, so the documents are found in the batch of the CPU.
    found = [
        (key, rows_N.to("meta")) for key, rows_N in shards.keyed_rows(batch, label_rows(batch, 0))
    ]
    for documents in (found, []):
        monkeypatch.setattr(cache, "keyed_rows", lambda *_, documents=documents: iter(documents))
        known = cached(there).distribution
        assert known.ids_BTK.device.type == known.log_probs_BTK.device.type == "meta"
        assert known.ids_BTK.shape == (*batch.input_ids_BT.shape, K)


def test_a_cache_can_be_written_from_a_cache_with_a_smaller_k(tmp_path: Path) -> None:
    samples, target = make_samples(), make_target()
    write(tmp_path / "six", samples, target)
    write(tmp_path / "two", samples, read(tmp_path / "six", samples), k=2)
    batch = PackedDataset(samples, sequence_length=32).batch(0, batch_size=4)
    six, two = (
        read(tmp_path / name, samples, k=k)(batch).distribution
        for name, k in (("six", 6), ("two", 2))
    )
    assert torch.equal(six.ids_BTK[:, :, :2], two.ids_BTK)


def test_the_size_is_said_before_and_is_what_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = make_samples(200)
    write(tmp_path, samples, make_target())
    labels = sum(int(sample.loss_mask.sum()) for sample in samples)
    assert (
        f"caching the top 6 of {labels:,} tokens: 48 bytes per token, {labels * 48:,} bytes"
        in capsys.readouterr().out
    )
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert labels * 48 <= written < labels * 48 * 1.2


def test_too_little_disk_is_said_before_anything_is_computed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rf"Errno {errno.ENOSPC}.*{tmp_path}"):
        write(tmp_path, make_samples(), lambda _: pytest.fail("the target was asked"), k=10**15)


def test_an_interrupted_cache_goes_on_with_the_shard_that_it_was_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 1)  # a shard a batch
    samples, target, asked = make_samples(), make_target(), []

    def dying(batch: Batch) -> TargetSignal:
        asked.append(batch)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return target(batch)

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, samples, dying)
    with pytest.raises(ValueError, match=r"\d+ of \d+ shards"):
        read(tmp_path, samples)
    write(tmp_path, samples, dying)
    num_batches = len(list(PackedDataset(samples, sequence_length=32).in_order(2)))
    assert len(asked) == num_batches + 1
    write(tmp_path / "whole", samples, target)
    for shard in (tmp_path / "whole").glob("*"):
        assert shard.read_bytes() == (tmp_path / shard.name).read_bytes()


def test_the_cache_of_another_target_or_of_other_data_is_refused(tmp_path: Path) -> None:
    samples = make_samples()
    write(tmp_path, samples, make_target())
    with pytest.raises(ValueError, match="target the-target, but this run has another-target"):
        read(tmp_path, samples, target="another-target")
    with pytest.raises(ValueError, match=data_hash(samples)[:12]):
        read(tmp_path, make_samples(seed=1))
    with pytest.raises(ValueError, match=r"'k': 6\}.*'k': 5\}"):
        write(tmp_path, samples, make_target(), k=5)


def test_text_that_was_not_cached_is_refused(tmp_path: Path) -> None:
    samples = make_samples()
    write(tmp_path, samples, make_target())
    other = PackedDataset(make_samples(seed=1), sequence_length=32).batch(0, batch_size=2)
    with pytest.raises(ValueError, match=rf"{tmp_path} .*\btext\b"):
        read(tmp_path, samples)(other)


def test_a_truncated_shard_and_a_missing_cache_are_named(tmp_path: Path) -> None:
    samples = make_samples()
    with pytest.raises(FileNotFoundError, match=r"cache\.json"):
        read(tmp_path, samples)
    write(tmp_path, samples, make_target())
    shard = tmp_path / "shard-000000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"shard-000000\.safetensors"):
        read(tmp_path, samples)
