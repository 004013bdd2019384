"""Hidden states on their way from a server to a trainer, through any storage that fsspec knows.

    NAME.bin     [T, L, D], row after row, as the server holds them
    NAME.json    written after it: type, shape, layers, CRC-32 of the bytes

Neither side holds the states twice: the writer sends its tensor's own memory, the reader takes a few rows at a time to
where they belong. Object storage knows no locks, so a file is there when its description is.
T = tokens, L = layers, D = hidden.
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
"""Moved at a time."""

WAIT_S = 120.0
"""For a server that has answered to finish writing."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.25
"""Between looks for the description: states of a short text are there at once, object storage charges by the look."""


class StatesLostError(OSError):
    """What the server wrote is not there, or not as it was written; it can be asked again."""


@dataclass(frozen=True, kw_only=True)
class Description:
    dtype: str
    shape: tuple[int, int, int]
    layers: tuple[int, ...]
    """Ascending; k is the residual stream after k layers."""
    crc32: int

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * int(getattr(torch, self.dtype).itemsize)


def absolute(storage: str) -> str:
    """A URL as it is, a path from the root."""
    return storage if "://" in storage else os.path.abspath(storage)


def write_states(url: str, states_TLD: Tensor, layers: Sequence[int]) -> None:
    """Write the states of one text under `url`.

    Raises: what the storage raises.
    """
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
    """Call `use(first row, some rows [t, L, D], layers)` until all states under `url` were used, and remove them.

    The rows' memory is used again. What was used is right only once this returns.

    Raises: StatesLostError where they do not come, or are cut or altered.
    """
    storage, path = fsspec.core.url_to_fs(url)
    description = _wait_for(storage, f"{path}.json", url, wait_s)
    try:
        with storage.open(f"{path}.bin", "rb", block_size=BLOCK_BYTES) as file:
            crc = _read_rows(file, description, use)
    except OSError as error:
        raise StatesLostError(f"{url} can not be read: {error}") from error
    finally:
        _remove(storage, path)
    if crc != description.crc32:
        raise StatesLostError(f"{url} is corrupt: its CRC-32 is {crc:08x}, not {description.crc32:08x}")


def remove_states(url: str) -> None:
    """Nothing is left under `url`."""
    _remove(*fsspec.core.url_to_fs(url))


def _remove(storage: Any, path: str) -> None:
    for kind in ("json", "bin"):
        with suppress(FileNotFoundError):
            storage.rm_file(f"{path}.{kind}")


def _read_rows(file: Any, description: Description, use: Callable[[int, Tensor, Sequence[int]], None]) -> int:
    """CRC-32 of all rows, each of which went through `use`."""
    tokens, num_layers, hidden = description.shape
    rows_a_block, crc = max(1, BLOCK_BYTES // description.row_bytes), 0
    buffer = torch.empty(min(tokens, rows_a_block) * description.row_bytes, dtype=torch.uint8)
    for first in range(0, tokens, rows_a_block):
        num_rows = min(rows_a_block, tokens - first)
        block = buffer[: num_rows * description.row_bytes]
        if file.readinto(block.numpy().data) != len(block):
            raise OSError("it is cut")
        crc = zlib.crc32(block.numpy().data, crc)
        use(first, block.view(getattr(torch, description.dtype)).view(num_rows, num_layers, hidden), description.layers)
    return crc


def _wait_for(storage: Any, path: str, url: str, wait_s: float) -> Description:
    deadline_s, pause_s = time.monotonic() + wait_s, FIRST_PAUSE_S
    while True:
        try:
            found = json.loads(storage.cat_file(path))
            return Description(**{**found, "shape": tuple(found["shape"]), "layers": tuple(found["layers"])})
        except (FileNotFoundError, json.JSONDecodeError):  # or half of it is there
            if time.monotonic() > deadline_s:
                raise StatesLostError(f"{url} did not come within {wait_s:g} s") from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
