"""Top-k target signals on disk: written once, read at every epoch without the target.

    FOLDER/cache.json                    of which target and data, k, and how the shards are cut; written first
    FOLDER/shard-000000.safetensors      for each of its documents a key and a number of rows; then all rows' K ids and
                                         log-probabilities, labelled rows only

A document is found by a hash of its tokens and mask, so rows may be packed and shuffled otherwise than when written.

B = batch, T = tokens, N = rows, K = kept top-k ids.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from distill.packing import PackedDataset
from distill.samples import Sample, data_hash
from distill.signals import documents, recorded, top_k
from heads.artifact import require_space
from heads.draft import Batch, ExactTarget, TargetSignal, label_rows

SHARD_BYTES = 256 << 20
"""What a kill can lose, and what is in memory while writing."""

KEY_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class CacheHeader:
    """What a cache is of. Two caches with equal headers are interchangeable."""

    target: str
    """Fingerprint of the target's folder."""
    data: str
    """`data_hash` of the samples."""
    k: int
    bytes_per_token: int
    """Of a labelled token: K int32 ids and K float32 log-probabilities."""
    batch_size: int
    sequence_length: int
    batches_per_shard: int
    num_shards: int


def write_cache(
    samples: Sequence[Sample],
    source: Callable[[Batch], TargetSignal],
    folder: Path,
    *,
    target: str,
    k: int,
    sequence_length: int,
    batch_size: int,
    device: torch.device | str = "cpu",
) -> CacheHeader:
    """Write the `k` largest probabilities of `source` on every labelled row, saying first how much it will be.

    Shards that are there already are kept, so an interrupted run goes on where it was.

    Raises: OSError where the disk has too little room; ValueError where `folder` holds the cache of something else.
    """
    data = PackedDataset(samples, sequence_length=sequence_length)
    num_batches = -(-len(data.rows) // batch_size)
    bytes_per_token = 8 * k
    batches_per_shard = max(1, SHARD_BYTES // (bytes_per_token * batch_size * sequence_length))
    header = CacheHeader(
        target=target,
        data=data_hash(samples),
        k=k,
        bytes_per_token=bytes_per_token,
        batch_size=batch_size,
        sequence_length=sequence_length,
        batches_per_shard=batches_per_shard,
        num_shards=-(-num_batches // batches_per_shard),
    )
    _claim(folder, header)
    _announce(samples, folder, header)
    with tqdm(total=num_batches, desc="caching the target", unit="batch") as bar:
        batches = data.in_order(batch_size)
        for shard in range(header.num_shards):
            shard_batches = list(islice(batches, batches_per_shard))
            if not (folder / _shard_name(shard)).exists():
                _write_shard(folder / _shard_name(shard), shard_batches, source, k, device)
            bar.update(len(shard_batches))
    return header


class CachedTarget:
    """The signal that `write_cache` wrote."""

    def __init__(self, folder: Path, *, target: str, data: str) -> None:
        """Raises: ValueError where the cache is incomplete, or is not of this target and this data."""
        header = _read_header(folder)
        for what, wanted in (("target", target), ("data", data)):
            if getattr(header, what) != wanted:
                raise ValueError(
                    f"{folder} is the cache of another {what} ({getattr(header, what)[:12]}, wanted {wanted[:12]}): "
                    "write one of its own"
                )
        missing = [s for s in range(header.num_shards) if not (folder / _shard_name(s)).exists()]
        if missing:
            raise ValueError(f"{folder} lacks {len(missing)} of {header.num_shards} shards: write the cache to its end")
        self.folder, self.k = folder, header.k
        self._shards = [_open(folder / _shard_name(shard)) for shard in range(header.num_shards)]
        self._places: dict[bytes, tuple[int, int]] = {}
        for number, shard in enumerate(self._shards):
            starts = shard.get_tensor("num_rows").cumsum(0) - shard.get_tensor("num_rows")
            for key, start in zip(shard.get_tensor("keys").numpy(), starts.tolist(), strict=True):
                self._places[key.tobytes()] = (number, start)

    def __call__(self, batch: Batch) -> TargetSignal:
        """Raises: ValueError where the batch holds a document that was not cached."""
        found = [(rows, *self._rows(key, len(rows))) for key, rows in _keyed_rows(batch)]
        if not found:
            return recorded(batch, *_nothing(self.k))
        rows, ids, log_probs = zip(*found, strict=True)
        return recorded(batch, torch.cat(rows), torch.cat(ids), torch.cat(log_probs))

    def _rows(self, key: bytes, num_rows: int) -> tuple[Tensor, Tensor]:
        if key not in self._places:
            raise ValueError(f"{self.folder} does not hold this text: a cache serves the data that it was written from")
        number, start = self._places[key]
        shard = self._shards[number]
        rows = slice(start, start + num_rows)
        return shard.get_slice("ids")[rows], shard.get_slice("log_probs")[rows]


def _keyed_rows(batch: Batch) -> Iterator[tuple[bytes, Tensor]]:
    """(key, labelled rows of the flattened batch) of every document that has any."""
    is_label_row_N = label_rows(batch, 0).flatten()
    ids_N, mask_N = batch.input_ids_BT.flatten(), batch.loss_mask_BT.flatten()
    for tokens in documents(batch):
        rows = tokens[is_label_row_N[tokens]]
        if len(rows):
            digest = hashlib.blake2b(ids_N[tokens].cpu().numpy().astype("<i4").tobytes(), digest_size=KEY_BYTES)
            digest.update(mask_N[tokens].cpu().numpy().tobytes())
            yield digest.digest(), rows


def _top_k_rows(signal: TargetSignal, rows_N: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(ids, log-probabilities), [N, K] each."""
    if isinstance(signal.distribution, ExactTarget):
        return top_k(signal.distribution, rows_N, k)
    known = signal.distribution
    return known.ids_BTK.flatten(0, 1)[rows_N, :k], known.log_probs_BTK.flatten(0, 1)[rows_N, :k]


def _write_shard(
    path: Path, batches: Sequence[Batch], source: Callable[[Batch], TargetSignal], k: int, device: torch.device | str
) -> None:
    keys, num_rows, ids, log_probs = [], [], [], []
    for batch in batches:
        documents_rows = list(_keyed_rows(batch))
        if not documents_rows:
            continue
        on_device = Batch(**{name: tensor.to(device) for name, tensor in vars(batch).items()})
        rows_N = torch.cat([rows for _, rows in documents_rows]).to(device)
        ids_NK, log_probs_NK = _top_k_rows(source(on_device), rows_N, k)
        keys += [key for key, _ in documents_rows]
        num_rows += [len(rows) for _, rows in documents_rows]
        ids.append(ids_NK.to("cpu", torch.int32))
        log_probs.append(log_probs_NK.to("cpu", torch.float32))
    no_ids, no_log_probs = _nothing(k)[1:]
    tensors = {
        "keys": torch.from_numpy(np.frombuffer(b"".join(keys), np.uint8).copy()).view(-1, KEY_BYTES),
        "num_rows": torch.tensor(num_rows, dtype=torch.int64),
        "ids": torch.cat([no_ids, *ids]),
        "log_probs": torch.cat([no_log_probs, *log_probs]),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)


def _nothing(k: int) -> tuple[Tensor, Tensor, Tensor]:
    """No rows: their indices, ids and log-probabilities."""
    return torch.empty(0, dtype=torch.int64), torch.empty(0, k, dtype=torch.int32), torch.empty(0, k)


def _claim(folder: Path, header: CacheHeader) -> None:
    """Make `folder` the cache that `header` says, or find that it is."""
    if (folder / "cache.json").exists():
        there, wanted = asdict(_read_header(folder)), asdict(header)
        differing = next((name for name in wanted if there[name] != wanted[name]), None)
        if differing:
            was, is_now = there[differing], wanted[differing]
            raise ValueError(f"{folder} holds a cache with {differing} {was}, not {is_now}: choose another folder")
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "cache.json.partial"
    partial.write_text(json.dumps(asdict(header), indent=2) + "\n")
    os.replace(partial, folder / "cache.json")


def _announce(samples: Sequence[Sample], folder: Path, header: CacheHeader) -> None:
    """Say how much will be written.

    Raises: OSError where the disk has too little room for it.
    """
    labels = sum(int(sample.loss_mask.sum()) for sample in samples)
    num_bytes = labels * header.bytes_per_token
    written = sum(path.stat().st_size for path in folder.glob("shard-*.safetensors"))
    tqdm.write(
        f"caching the top {header.k} of {labels:,} labelled tokens: {header.bytes_per_token} bytes a token, "
        f"{num_bytes / 1e6:,.1f} MB in {folder}" + (f", {written / 1e6:,.1f} MB of it there already" if written else "")
    )
    require_space(folder, max(0, num_bytes - written))


def _read_header(folder: Path) -> CacheHeader:
    path = folder / "cache.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no cache of target signals (no cache.json)")
    try:
        return CacheHeader(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is corrupt ({error}): write the cache again") from error


def _shard_name(shard: int) -> str:
    return f"shard-{shard:06d}.safetensors"


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is corrupt or truncated ({error}): delete it and write the cache again") from error
