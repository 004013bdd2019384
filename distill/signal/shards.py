"""Tensors of documents on disk.

They are written once, looked up by the document's tokens, and memory-mapped instead of read
completely.

    FOLDER/cache.json                 target, data, content, and how the shards are cut; written first
    FOLDER/shard-000000.safetensors   keys, num_rows, crcs: one entry per document; then one tensor per name, the
                                      documents' rows end to end

The key of a document is a hash of tokens and mask, so training may pack and shuffle the rows
differently. A shard is renamed into place when it is complete, so an interrupted writer continues
after the last complete shard. Each document has a CRC-32, which is checked when the document is
first read, so training can start without reading terabytes first.

B = batch, T = tokens, N = rows.
"""

import errno
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from redraft.distill.data.packing import PackedDataset
from redraft.distill.data.samples import Sample, data_hash
from redraft.distill.signal.apart import documents
from redraft.distill.signal.transfer import to_device
from redraft.files.artifact import (
    is_full,
    remove_abandoned,
    require_space,
    sync,
    write_whole,
)
from redraft.files.folder import read_as
from redraft.files.progress import Progress
from redraft.heads.draft import Batch, TargetSignal, label_rows

# Maximum size of the states in memory while writing, which are lost if the writer is killed.
SHARD_BYTES = 256 << 20
KEY_BYTES = 16
HEADER = "cache.json"


class Content(Protocol):
    """The part of a signal that a cache keeps, e.g. the top-k probabilities."""

    @property
    def spec(self) -> dict[str, Any]:
        """The specification as JSON, for the header.

        Two contents with equal specs keep the same data.
        """

    @property
    def bytes_per_row(self) -> int: ...

    def rows(self, batch: Batch) -> Tensor:
        """Mask of the rows to keep, bool [B, T]."""

    def num_rows(self, sample: Sample) -> int:
        """Return an upper bound on the number of rows kept for a document."""

    def select(self, signal: TargetSignal, rows_N: Tensor) -> dict[str, Tensor]:
        """Return the tensors to keep for these rows of the flattened batch.

        They are returned by name, each [N, ...], on the CPU.
        """


@dataclass(frozen=True, kw_only=True)
class CacheHeader:
    """Identity and layout of a cache. Two caches with equal headers are interchangeable."""

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


# --------------------------------------------------------------------------------------------------------------
# writing


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
    rank: int = 0,
    num_ranks: int = 1,
) -> CacheHeader:
    """Write `content` of the signal from `source` for all samples.

    The size of the cache is printed first. Existing shards are kept, so an interrupted run
    continues where it stopped. With several ranks, each rank writes every `num_ranks`-th shard, and
    the cache is complete when all ranks have returned.

    Raises:
        OSError: the disk has too little space.
        ValueError: `folder` contains a different cache.
    """
    data = PackedDataset(samples, sequence_length=sequence_length)
    num_batches = -(-len(data.rows) // batch_size)
    batches_per_shard = max(
        1, SHARD_BYTES // (content.bytes_per_row * batch_size * sequence_length)
    )
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
    if rank == 0:
        _announce(samples, folder, content)
    with Progress(
        total=num_batches, desc="caching the target", unit="batch", disable=rank > 0
    ) as bar:
        for shard in range(header.num_shards):
            first = shard * batches_per_shard
            if shard % num_ranks != rank or (folder / _shard_name(shard)).exists():
                bar.update(min(batches_per_shard, num_batches - first))
            else:
                shard_batches = islice(
                    data.in_order(batch_size, first=first * batch_size), batches_per_shard
                )
                counted = _count_on(bar, shard_batches)
                _write_shard(folder / _shard_name(shard), counted, source, content, device)
    return header


def _count_on(bar: Progress, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches.

    `bar` moves when the next batch is requested, not only after a whole shard.
    """
    for batch in batches:
        yield batch
        bar.update()


def _claim(folder: Path, header: CacheHeader) -> None:
    """Write the header into `folder`.

    Raises:
        ValueError: `folder` already has a different header.
    """
    if not (folder / HEADER).exists():
        write_whole(folder / HEADER, json.dumps(asdict(header), indent=2) + "\n")
    there = asdict(read_header(folder))
    for name, wanted in asdict(header).items():
        if (found := there[name]) != wanted:
            raise ValueError(
                f"{folder} contains a cache with {name} {found}, not {wanted}: choose a "
                f"different folder"
            )


def _announce(samples: Sequence[Sample], folder: Path, content: Content) -> None:
    """Print how much will be written.

    Raises:
        OSError: the disk has too little space for it.
    """
    rows = sum(map(content.num_rows, samples))
    num_bytes = rows * content.bytes_per_row
    written = sum(path.stat().st_size for path in folder.glob("shard-*.safetensors"))
    Progress.write(
        f"caching {content} of {rows:,} tokens: {content.bytes_per_row:,} bytes per token, "
        f"{num_bytes:,} bytes ({num_bytes / 1e6:,.1f} MB) in {folder}"
        + (f", {written / 1e6:,.1f} MB of it already written" if written else "")
    )
    require_space(folder, max(0, num_bytes - written))


def _write_shard(
    path: Path,
    batches: Iterable[Batch],
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
        signal = source(to_device(batch, torch.device(device)))
        for key, rows_N in keyed:
            keys.append(key)
            num_rows.append(len(rows_N))
            kept.append(content.select(signal, rows_N.to(device)))
            crcs.append(_crc(kept[-1]))
    tensors = {
        "keys": torch.from_numpy(np.frombuffer(b"".join(keys), np.uint8).copy()).view(
            -1, KEY_BYTES
        ),
        "num_rows": torch.tensor(num_rows, dtype=torch.int64),
        # int64, because a CRC-32 is unsigned.
        "crcs": torch.tensor(crcs, dtype=torch.int64),
    }
    names = list(kept[0]) if kept else []
    # A shard under its final name is complete. Two runs may write the same cache at once, so each
    # has its own partial file. Partial files of killed writers are removed later.
    partial = path.with_suffix(f".{os.getpid()}.partial")
    remove_abandoned(path.parent, "shard-*.partial")
    whole = {name: torch.cat([tensors[name] for tensors in kept]) for name in names}
    try:
        save_file(tensors | whole, partial)
        sync(partial)
        partial.replace(path)
    except Exception as error:
        partial.unlink(missing_ok=True)
        if not is_full(error):
            raise
        raise OSError(errno.ENOSPC, f"no space left for {path} ({error})") from error


def keyed_rows(batch: Batch, wanted_BT: Tensor) -> Iterator[tuple[bytes, Tensor]]:
    """Yield (key, wanted rows of the flattened batch) for every document with a label.

    Nothing is learned from the other documents.
    """
    is_label_row_N, is_wanted_N = label_rows(batch, 0).flatten(), wanted_BT.flatten()
    ids_N, mask_N = batch.input_ids_BT.flatten(), batch.loss_mask_BT.flatten()
    for tokens in documents(batch.document_BT):
        if is_label_row_N[tokens].any():
            # The key includes the mask, which decides which rows are kept: the same text with
            # different labels is a different document.
            digest = hashlib.blake2b(
                ids_N[tokens].cpu().numpy().astype("<i4").tobytes(), digest_size=KEY_BYTES
            )
            digest.update(mask_N[tokens].cpu().numpy().tobytes())
            yield digest.digest(), tokens[is_wanted_N[tokens]]


def _crc(tensors: Mapping[str, Tensor]) -> int:
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy().data, crc)
    return crc


# --------------------------------------------------------------------------------------------------------------
# reading


class Shards:
    """A complete cache, mapped into memory."""

    def __init__(self, folder: Path, content: Content, *, target: str, data: str) -> None:
        """Open a complete cache of this content for this target and data.

        A cache of hidden states may have more layers than `content`.

        Raises:
            ValueError: the cache is incomplete or corrupt, or belongs to a different target,
                different data or different content.
        """
        self.folder, self.header = folder, read_header(folder)
        there = {"target": self.header.target, "data": self.header.data, **self.header.content}
        for name, wanted in {"target": target, "data": data, **content.spec}.items():
            found = there.get(name)
            if found != wanted and not (name == "layers" and set(wanted) <= set(found or ())):
                raise ValueError(
                    f"{folder} was written with {name} {found!s:.40}, but this run has "
                    f"{wanted!s:.40}: write the cache into a new folder"
                )
        if num_missing := _count_missing(folder, self.header):
            raise ValueError(
                f"{folder} is incomplete ({num_missing} of {self.header.num_shards} shards are "
                "missing): run the command that writes it again"
            )
        self._tensors = [
            _map_file(folder / _shard_name(shard)) for shard in range(self.header.num_shards)
        ]
        self._places: dict[bytes, tuple[int, int, slice]] = {}
        self._checked: set[bytes] = set()
        for shard, tensors in enumerate(self._tensors):
            # E.g. two documents of [3, 2] rows have ends [3, 5] and starts [0, 3].
            keys, ends = tensors.pop("keys").numpy(), tensors["num_rows"].cumsum(0)
            bounds = zip((ends - tensors.pop("num_rows")).tolist(), ends.tolist(), strict=True)
            for index, (key, (start, end)) in enumerate(zip(keys, bounds, strict=True)):
                self._places[key.tobytes()] = shard, index, slice(start, end)

    def document(self, key: bytes) -> dict[str, Tensor]:
        """Return the cached tensors of a document by name, as views into the file.

        Raises:
            ValueError: the document was not cached or is corrupt.
        """
        if key not in self._places:
            raise ValueError(
                f"{self.folder} does not contain this text: train on the data for which the cache was "
                "written"
            )
        shard, index, rows = self._places[key]
        tensors = self._tensors[shard]
        kept = {name: tensor[rows] for name, tensor in tensors.items() if name != "crcs"}
        # Check each document only once: a second epoch does not compute the CRC-32 again.
        if key not in self._checked:
            if _crc(kept) != int(tensors["crcs"][index]):
                path = self.folder / _shard_name(shard)
                raise ValueError(
                    f"{path} is corrupt (a CRC-32 differs): delete it and write the cache again"
                )
            self._checked.add(key)
        return kept


def is_complete(folder: Path) -> bool:
    return (folder / HEADER).exists() and not _count_missing(folder, read_header(folder))


def read_header(folder: Path) -> CacheHeader:
    """Return the header of the cache in `folder`.

    Raises:
        FileNotFoundError
        ValueError: the header cannot be read.
    """
    path = folder / HEADER
    if not path.exists():
        raise FileNotFoundError(f"{folder} contains no cache of the target (no {HEADER})")
    return read_as(path, CacheHeader, "write the cache again")


def _count_missing(folder: Path, header: CacheHeader) -> int:
    return sum(not (folder / _shard_name(shard)).exists() for shard in range(header.num_shards))


def _shard_name(shard: int) -> str:
    return f"shard-{shard:06d}.safetensors"


def _map_file(path: Path) -> dict[str, Tensor]:
    """Map the tensors of a file into memory. The kernel reads a page when it is first used."""
    try:
        with safe_open(path, framework="pt") as file:
            # The tensors keep the mapping alive after the file is closed.
            return {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is corrupt or truncated ({error}): delete it and write the cache again"
        ) from error
