"""Hidden states on their way from a server to a trainer, through any storage supported by fsspec.

    NAME.bin     [T, L, D], row after row, in the server's dtype
    NAME.json    written afterwards: dtype, shape, layers, CRC-32 of the bytes

Neither side holds the states twice: the writer sends the tensor's memory as it is, and the reader copies a few rows at
a time to the destination. Object storage has no locks, so a file is complete once its description exists.
T = tokens, t = some of them, L = layers, D = hidden.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import fsspec
import torch
from torch import Tensor

BLOCK_BYTES = 4 << 20
"""Bytes read or written at a time."""

WAIT_S = 120.0
"""How long a reader waits for a server to finish writing, after the server has answered the request."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.25
"""Pauses between checks for the description. The first is short, because states of a short text arrive at once; the
longest is not, because object storage charges for every check."""


class StatesLostError(OSError):
    """The states are missing or damaged; the server can be asked for them again."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """The contents of NAME.json."""

    dtype: str
    shape: tuple[int, int, int]
    layers: tuple[int, ...]
    """Ascending; k is the residual stream after k layers."""
    crc32: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * int(getattr(torch, self.dtype).itemsize)


def absolute(storage: str) -> str:
    """A URL unchanged; a path made absolute."""
    return storage if "://" in storage else os.path.abspath(storage)


def write_states(url: str, states_TLD: Tensor, layers: Sequence[int]) -> None:
    """Write the states of one text under `url`. Errors of the storage are passed on."""
    storage, path = fsspec.core.url_to_fs(url)
    storage.makedirs(storage._parent(path), exist_ok=True)
    data, crc = states_TLD.contiguous().view(torch.uint8).flatten().numpy().data, 0
    with storage.open(f"{path}.bin", "wb") as file:
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            crc = zlib.crc32(block, crc)
            file.write(block)
    tokens, num_layers, hidden = states_TLD.shape
    description = Description(
        dtype=str(states_TLD.dtype).removeprefix("torch."),
        shape=(tokens, num_layers, hidden),
        layers=tuple(layers),
        crc32=crc,
    )
    storage.pipe_file(f"{path}.json", json.dumps(asdict(description)).encode())


def take_states(url: str, use: Callable[[int, Tensor, Sequence[int]], None], wait_s: float = WAIT_S) -> None:
    """Pass the states under `url` to `use(first row, rows [t, L, D], layers)`, a few rows at a time; then remove them.

    The memory of the rows is reused by the next call of `use`. The rows are known to be undamaged only once this
    returns.

    Raises:
        StatesLostError: if the states do not arrive within `wait_s`, are truncated, or fail the CRC-32.
    """
    storage, path = fsspec.core.url_to_fs(url)
    description = _wait_for(storage, f"{path}.json", url, wait_s)
    try:
        with storage.open(f"{path}.bin", "rb", block_size=BLOCK_BYTES) as file:
            crc = _read_rows(file, description, use)
    except OSError as error:
        raise StatesLostError(f"{url} cannot be read: {error}") from error
    finally:
        _remove(storage, path)
    if crc != description.crc32:
        raise StatesLostError(f"{url} is corrupt: its CRC-32 is {crc:08x}, not {description.crc32:08x}")


def remove_states(url: str) -> None:
    """Remove the states under `url`, if any."""
    _remove(*fsspec.core.url_to_fs(url))


def _remove(storage: Any, path: str) -> None:
    for kind in ("json", "bin"):
        with suppress(FileNotFoundError):
            storage.rm_file(f"{path}.{kind}")


def _read_rows(file: Any, description: Description, use: Callable[[int, Tensor, Sequence[int]], None]) -> int:
    """Pass all rows to `use`, and return the CRC-32."""
    tokens, num_layers, hidden = description.shape
    rows_per_block, crc = max(1, BLOCK_BYTES // description.row_bytes), 0
    buffer = torch.empty(min(tokens, rows_per_block) * description.row_bytes, dtype=torch.uint8)
    for first in range(0, tokens, rows_per_block):
        num_rows = min(rows_per_block, tokens - first)
        block = buffer[: num_rows * description.row_bytes]
        if file.readinto(block.numpy().data) != len(block):
            raise OSError("the file is truncated")
        crc = zlib.crc32(block.numpy().data, crc)
        use(first, block.view(getattr(torch, description.dtype)).view(num_rows, num_layers, hidden), description.layers)
    return crc


def _wait_for(storage: Any, path: str, url: str, wait_s: float) -> Description:
    deadline_s, pause_s = time.monotonic() + wait_s, FIRST_PAUSE_S
    while True:
        try:
            found = json.loads(storage.cat_file(path))
            return Description(**{**found, "shape": tuple(found["shape"]), "layers": tuple(found["layers"])})
        except (FileNotFoundError, json.JSONDecodeError):  # not there yet, or half written
            if time.monotonic() > deadline_s:
                raise StatesLostError(f"{url} did not come within {wait_s:g} s") from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
