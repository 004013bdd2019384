"""Tensors of documents on disk: written once, found again by the document's tokens, mapped and never copied as a whole.

    FOLDER/cache.json                 of which target, data and content, and how the shards are cut; written first
    FOLDER/shard-000000.safetensors   keys, num_rows, crcs: one entry a document; then what is kept of their rows, one
                                      tensor of a kind, the documents' rows end to end

A document is found by a hash of its tokens and mask, so rows may be packed and shuffled otherwise than when written.
A shard is renamed into place when it is whole, so an interrupted writer goes on behind the last one. Every document has
a CRC-32 of its own, checked when it is first read: a cache of terabytes need not be read before training starts.

B = batch, T = tokens, N = rows.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from distill.packing import PackedDataset
from distill.samples import Sample, data_hash
from distill.signals import documents
from heads.artifact import require_space, sync, write_whole
from heads.draft import Batch, TargetSignal, label_rows

SHARD_BYTES = 256 << 20
"""What a kill can lose, and what is in memory while writing."""

KEY_BYTES = 16

HEADER = "cache.json"


class Content(Protocol):
    """What a cache keeps of a signal."""

    @property
    def spec(self) -> dict[str, Any]:
        """As JSON; what is kept is the same where this is."""
        ...

    @property
    def bytes_per_row(self) -> int: ...

    def rows(self, batch: Batch) -> Tensor:
        """The rows that are kept, bool [B, T]."""
        ...

    def num_rows(self, sample: Sample) -> int:
        """At most so many rows of a document."""
        ...

    def of(self, signal: TargetSignal, rows_N: Tensor) -> dict[str, Tensor]:
        """What is kept of the given rows of the flattened batch, by name, [N, ...] each, on the CPU."""
        ...


@dataclass(frozen=True, kw_only=True)
class CacheHeader:
    """What a cache is of. Two caches with equal headers are interchangeable."""

    target: str
    """Fingerprint of the target's folder."""
    data: str
    """`data_hash` of the samples."""
    content: dict[str, Any]
    bytes_per_row: int
    batch_size: int
    sequence_length: int
    batches_per_shard: int
    num_shards: int


# -------------------------------------------------------------------------------------------------------------- writing


def write_cache(
    samples: Sequence[Sample],
    source: Callable[[Batch], TargetSignal],
    folder: Path,
    content: Content,
    *,
    target: str,
    sequence_length: int,
    batch_size: int,
    device: torch.device | str = "cpu",
) -> CacheHeader:
    """Write `content` of what `source` says about all samples, saying first how much it will be.

    Shards that are there already are kept, so an interrupted run goes on where it was.

    Raises: OSError where the disk has too little room; ValueError where `folder` holds the cache of something else.
    """
    data = PackedDataset(samples, sequence_length=sequence_length)
    num_batches = -(-len(data.rows) // batch_size)
    batches_per_shard = max(1, SHARD_BYTES // (content.bytes_per_row * batch_size * sequence_length))
    header = CacheHeader(
        target=target,
        data=data_hash(samples),
        content=content.spec,
        bytes_per_row=content.bytes_per_row,
        batch_size=batch_size,
        sequence_length=sequence_length,
        batches_per_shard=batches_per_shard,
        num_shards=-(-num_batches // batches_per_shard),
    )
    _claim(folder, header)
    _announce(samples, folder, content)
    with tqdm(total=num_batches, desc="caching the target", unit="batch") as bar:
        batches = data.in_order(batch_size)
        for shard in range(header.num_shards):
            shard_batches = list(islice(batches, batches_per_shard))
            if not (folder / _shard_name(shard)).exists():
                _write_shard(folder / _shard_name(shard), shard_batches, source, content, device)
            bar.update(len(shard_batches))
    return header


def _claim(folder: Path, header: CacheHeader) -> None:
    """Make `folder` the cache that `header` says, or find that it is."""
    if (folder / HEADER).exists():
        there, wanted = asdict(read_header(folder)), asdict(header)
        differing = next((name for name in wanted if there[name] != wanted[name]), None)
        if differing:
            was, is_now = there[differing], wanted[differing]
            raise ValueError(f"{folder} holds a cache with {differing} {was}, not {is_now}: choose another folder")
        return
    write_whole(folder / HEADER, json.dumps(asdict(header), indent=2) + "\n")


def _announce(samples: Sequence[Sample], folder: Path, content: Content) -> None:
    """Say how much will be written.

    Raises: OSError where the disk has too little room for it.
    """
    rows = sum(map(content.num_rows, samples))
    num_bytes = rows * content.bytes_per_row
    written = sum(path.stat().st_size for path in folder.glob("shard-*.safetensors"))
    tqdm.write(
        f"caching {content} of {rows:,} tokens: {content.bytes_per_row:,} bytes a token, {num_bytes:,} bytes "
        f"({num_bytes / 1e6:,.1f} MB) in {folder}"
        + (f", {written / 1e6:,.1f} MB of it there already" if written else "")
    )
    require_space(folder, max(0, num_bytes - written))


def _write_shard(
    path: Path,
    batches: Sequence[Batch],
    source: Callable[[Batch], TargetSignal],
    content: Content,
    device: torch.device | str,
) -> None:
    keys: list[bytes] = []
    crcs: list[int] = []
    kept: list[dict[str, Tensor]] = []
    num_rows: list[int] = []
    for batch in batches:
        keyed = list(keyed_rows(batch, content.rows(batch)))
        if not keyed:
            continue
        signal = source(Batch(**{name: tensor.to(device) for name, tensor in vars(batch).items()}))
        for key, rows_N in keyed:
            keys.append(key)
            num_rows.append(len(rows_N))
            kept.append(content.of(signal, rows_N.to(device)))
            crcs.append(_crc(kept[-1]))
    tensors = {
        "keys": torch.from_numpy(np.frombuffer(b"".join(keys), np.uint8).copy()).view(-1, KEY_BYTES),
        "num_rows": torch.tensor(num_rows, dtype=torch.int64),
        "crcs": torch.tensor(crcs, dtype=torch.int64),
    }
    names = list(kept[0]) if kept else []
    partial = path.with_suffix(".partial")
    save_file(tensors | {name: torch.cat([tensors[name] for tensors in kept]) for name in names}, partial)
    sync(partial)
    partial.replace(path)


def keyed_rows(batch: Batch, wanted_BT: Tensor) -> Iterator[tuple[bytes, Tensor]]:
    """(key, wanted rows of the flattened batch) of every document with a label; no other teaches anything."""
    is_label_row_N, is_wanted_N = label_rows(batch, 0).flatten(), wanted_BT.flatten()
    ids_N, mask_N = batch.input_ids_BT.flatten(), batch.loss_mask_BT.flatten()
    for tokens in documents(batch):
        if is_label_row_N[tokens].any():
            digest = hashlib.blake2b(ids_N[tokens].cpu().numpy().astype("<i4").tobytes(), digest_size=KEY_BYTES)
            digest.update(mask_N[tokens].cpu().numpy().tobytes())
            yield digest.digest(), tokens[is_wanted_N[tokens]]


def _crc(tensors: Mapping[str, Tensor]) -> int:
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy().data, crc)
    return crc


# -------------------------------------------------------------------------------------------------------------- reading


class Shards:
    """A complete cache, mapped into memory."""

    def __init__(self, folder: Path, *, target: str, data: str) -> None:
        """Raises: ValueError where the cache is incomplete or corrupt, or is not of this target and this data."""
        self.folder, self.header = folder, read_header(folder)
        for what, wanted in (("target", target), ("data", data)):
            if getattr(self.header, what) != wanted:
                raise ValueError(
                    f"{folder} is the cache of another {what} ({getattr(self.header, what)[:12]}, wanted "
                    f"{wanted[:12]}): write one of its own"
                )
        if missing := _missing(folder, self.header):
            raise ValueError(f"{folder} lacks {missing} of {self.header.num_shards} shards: write the cache to its end")
        self._tensors = [_mapped(folder / _shard_name(shard)) for shard in range(self.header.num_shards)]
        self._places: dict[bytes, tuple[int, int, slice]] = {}
        self._checked: set[bytes] = set()
        for shard, tensors in enumerate(self._tensors):
            keys, ends = tensors.pop("keys").numpy(), tensors["num_rows"].cumsum(0)
            bounds = zip((ends - tensors.pop("num_rows")).tolist(), ends.tolist(), strict=True)
            for index, (key, (start, end)) in enumerate(zip(keys, bounds, strict=True)):
                self._places[key.tobytes()] = shard, index, slice(start, end)

    def document(self, key: bytes) -> dict[str, Tensor]:
        """What is kept of a document's rows: views into the file.

        Raises: ValueError where it was not cached, or is not as it was written.
        """
        if key not in self._places:
            raise ValueError(f"{self.folder} does not hold this text: a cache serves the data that it was written from")
        shard, index, rows = self._places[key]
        tensors = self._tensors[shard]
        kept = {name: tensor[rows] for name, tensor in tensors.items() if name != "crcs"}
        if key not in self._checked:
            if _crc(kept) != int(tensors["crcs"][index]):
                path = self.folder / _shard_name(shard)
                raise ValueError(f"{path} is corrupt (a CRC-32 differs): delete it and write the cache again")
            self._checked.add(key)
        return kept


def is_complete(folder: Path) -> bool:
    """True where `folder` holds a cache with all of its shards."""
    return (folder / HEADER).exists() and not _missing(folder, read_header(folder))


def read_header(folder: Path) -> CacheHeader:
    """Raises: FileNotFoundError where there is none; ValueError where it cannot be read."""
    path = folder / HEADER
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no cache of target signals (no {HEADER})")
    try:
        return CacheHeader(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is corrupt ({error}): write the cache again") from error


def _missing(folder: Path, header: CacheHeader) -> int:
    return sum(not (folder / _shard_name(shard)).exists() for shard in range(header.num_shards))


def _shard_name(shard: int) -> str:
    return f"shard-{shard:06d}.safetensors"


def _mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, which the kernel reads page by page when they are used."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is corrupt or truncated ({error}): delete it and write the cache again") from error
