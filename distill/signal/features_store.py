"""Pass hidden states from a server to a trainer, through any storage that fsspec supports.

    NAME.bin     [T, L, D], row by row, in the server's dtype or in 8 bits (`heads.nn.float8`): [T, L, D + 4]
    NAME.json    written afterwards: dtype, shape, layers, CRC-32 of the bytes

Neither side keeps a second copy of the states: the writer sends the tensor's memory directly, and
the reader copies a few rows at a time to the destination. Object storage has no locks, so a file is
complete once its description exists.

A reader accepts only files directly below its storage. A server's answer names one of them, and
cannot make the reader open a different address, a different folder, or a link.

T = tokens, t = tokens in a part, L = layers, D = hidden.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import fsspec
import msgspec
import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from redraft.distill.signal.storage import StatesFormat, StatesLostError
from redraft.files.plain import open_file
from redraft.heads.nn.float8 import SCALE_BYTES, decode_float8, encode_float8

BLOCK_BYTES = 4 << 20  # Bytes read or written at a time.

WAIT_S = 120.0
"""Time in seconds that a reader waits for a server to finish writing after the server has answered
the request.
"""

KEPT_S = 10 * WAIT_S
"""Age in seconds at which unread states are removed. Their trainer was killed or gave up."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.25
"""First and longest pause between checks for the description. The first is short, because the
states of a short text arrive at once. The longest is much longer, because object storage charges
for every check.
"""

LONGEST_DESCRIPTION, LONGEST_ROW = 1 << 16, 1 << 26
"""Maximum number of bytes in a NAME.json, and in the states of one token. A malicious server must
not exhaust the reader's memory.
"""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}", re.ASCII)
"""Pattern for names that no file system interprets as a folder, as a path that leads out of the
folder, or as a wildcard pattern.
"""

Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
Use = Callable[[int, Tensor, Sequence[int]], None]
"""Function that receives (first row, rows [t, L, D], layers). Rows that were sent in 8 bits arrive
as float32.
"""


@dataclass(frozen=True, kw_only=True)
class Description:
    """The contents of NAME.json."""

    dtype: Literal["float64", "float32", "bfloat16", "float16", "float8"]
    shape: tuple[Size, Size, Size]
    layers: tuple[int, ...]
    """Layer indices, ascending. k means the residual stream after k layers."""
    crc32: int
    target: tuple[str, str, str | None] = ("", "", "")
    """Lineage and fingerprint of the folder that the server loaded, and the version of its weights
    if they were updated (`online.engine.target_watch`). A value is empty if it is unknown, or if
    the weights were not updated.
    """

    def __post_init__(self) -> None:
        if len(self.layers) != self.shape[1] or self.row_bytes > LONGEST_ROW:
            raise ValueError(f"{len(self.layers)} layers cannot have the shape {list(self.shape)}")

    @property
    def row_bytes(self) -> int:
        return math.prod(self.stored_shape) * self.stored_dtype.itemsize

    @property
    def stored_dtype(self) -> torch.dtype:
        dtype: torch.dtype = torch.uint8 if self.dtype == "float8" else getattr(torch, self.dtype)
        return dtype

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Return the shape of one row, in elements of `stored_dtype`."""
        _, num_layers, hidden = self.shape
        return num_layers, hidden + SCALE_BYTES if self.dtype == "float8" else hidden


def absolute(storage: str) -> str:
    """Return a URL unchanged or a path made absolute, without a trailing slash.

    Raises:
        ValueError: the result does not name a folder.
    """
    named = (storage if "://" in storage else os.path.abspath(storage)).rstrip("/")
    if not storage or not named or named.endswith(":"):
        raise ValueError(
            f"{storage!r} is not a storage for hidden states: give a folder, or a URL such as "
            "s3://bucket/states"
        )
    return named


def write_states(
    url: str,
    states_TLD: Tensor,
    layers: Sequence[int],
    states_format: StatesFormat = "exact",
    target: tuple[str, str, str | None] = ("", "", ""),
) -> None:
    """Write the states of one text under `url`, with `target` for the `Description`.

    Errors of the storage are passed on.
    """
    storage, path = fsspec.core.url_to_fs(url)
    storage.makedirs(storage._parent(path), exist_ok=True)
    crc = 0
    with storage.open(f"{path}.bin", "wb") as file:
        for block in _blocks(states_TLD, states_format):
            crc = zlib.crc32(block, crc)
            file.write(block)
    tokens, num_layers, hidden = states_TLD.shape
    description = Description(
        dtype="float8"
        if states_format == "float8"
        else str(states_TLD.dtype).removeprefix("torch."),  # type: ignore[arg-type]
        shape=(tokens, num_layers, hidden),
        layers=tuple(layers),
        crc32=crc,
        target=target,
    )
    # Write it last, because the description marks the bytes as complete.
    storage.pipe_file(f"{path}.json", json.dumps(asdict(description)).encode())


def _blocks(states_TLD: Tensor, states_format: StatesFormat) -> Iterator[memoryview]:
    """Yield the bytes of the states, for about BLOCK_BYTES of states at a time."""
    num_rows = max(1, BLOCK_BYTES // states_TLD[0].nbytes)
    for start in range(0, len(states_TLD), num_rows):
        states_tLD = states_TLD[start : start + num_rows]
        # Convert to bytes, because numpy has no bfloat16.
        block = (
            encode_float8(states_tLD)
            if states_format == "float8"
            else states_tLD.contiguous().view(torch.uint8)
        )
        yield block.flatten().numpy().data


def name_states(token_ids: Sequence[int]) -> str:
    """Return the name under which the states for these tokens are kept, which is a hash."""
    ids = np.asarray(token_ids, "<i4")
    return hashlib.blake2b(ids.tobytes(), digest_size=16).hexdigest()


class Leftovers:
    """Removes written states at the age of KEPT_S, even on a server that gets no more requests."""

    def __init__(self, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self._written = deque[tuple[float, str]]()
        threading.Thread(target=self._remove_often, name="unread states", daemon=True).start()

    def note(self, url: str) -> None:
        """Record the time of states that are about to be written."""
        self._written.append((time.monotonic(), url))

    def _remove_often(self) -> None:
        while True:
            time.sleep(self._kept_s / 20)
            while self._written and self._written[0][0] < time.monotonic() - self._kept_s:
                _, url = self._written.popleft()
                with suppress(Exception):  # the storage may not respond
                    _remove(*fsspec.core.url_to_fs(url))


class Storage:
    """The only place from which a reader accepts states."""

    def __init__(self, storage: str) -> None:
        """Set up the reader without opening anything.

        Args:
            storage: A folder or fsspec URL, the same as the servers'.

        Raises:
            ValueError: it does not name a folder, or a kind of storage that fsspec supports.
        """
        self.root = absolute(storage)
        try:
            self._files, self._folder = fsspec.core.url_to_fs(self.root)
        except ImportError as error:  # "Install s3fs to access S3"
            raise ValueError(f"{storage} needs an additional package: {error}") from None

    def take(self, url: str, use: Use, wait_s: float = WAIT_S) -> Description:
        """Pass the states under `url` to `use`, a few rows at a time, then remove the states.

        Returns their description. The next call of `use` reuses the memory of the rows. The rows
        are known to be undamaged only once this method returns.

        Raises:
            ValueError: `url` is not directly below this storage; in that case, nothing is opened.
            StatesLostError: the states do not arrive within `wait_s`, are truncated, or fail the
                CRC-32.
        """
        path = f"{self._folder}/{self._name(url)}"
        try:
            description = self._wait_for(path, url, wait_s)
            self._pass_rows(path, description, use, url)
        except StatesLostError:
            raise
        except OSError as error:
            raise StatesLostError(f"{url} cannot be read: {error}") from error
        finally:
            # Remove them after an error too, because a second request for the text gets a different
            # name.
            _remove(self._files, path)
        return description

    def move(self, url: str, kept: Storage, token_ids: Sequence[int]) -> Description:
        """Copy the states for these tokens from `url` to another storage, then remove them here.

        The bytes are copied unchanged, and checked on the way. Returns the description of the
        states.

        Raises:
            ValueError: `url` is not directly below this storage.
            StatesLostError: the states do not arrive completely, or belong to a different number of
                tokens.
            OSError: the other storage is full.
        """
        path, crc = f"{self._folder}/{self._name(url)}", 0
        there = f"{kept._folder}/{name_states(token_ids)}"
        try:
            description = self._wait_for(path, url, WAIT_S)
            kept._files.makedirs(kept._folder, exist_ok=True)
            with self._open(f"{path}.bin") as file, kept._files.open(f"{there}.bin", "wb") as copy:
                while block := file.read(BLOCK_BYTES):
                    crc = zlib.crc32(block, crc)
                    copy.write(block)
        except FileNotFoundError as error:
            raise StatesLostError(f"{url} cannot be read: {error}") from error
        finally:
            _remove(self._files, path)
        if crc != description.crc32 or description.shape[0] != len(token_ids):
            _remove(kept._files, there)
            raise StatesLostError(
                f"{url} is corrupt, or has {description.shape[0]} tokens instead of "
                f"{len(token_ids)}"
            )
        # Write it last, as in `write_states`.
        kept._files.pipe_file(f"{there}.json", json.dumps(asdict(description)).encode())
        return description

    def read(self, token_ids: Sequence[int], use: Use) -> Description | None:
        """Pass the kept states for exactly these tokens to `use`, as `take` does, but keep them.

        Returns their description, or None if there are no such states.

        Raises:
            StatesLostError: they are damaged, or incomplete.
        """
        path = f"{self._folder}/{name_states(token_ids)}"
        try:
            description = msgspec.json.decode(self._read_start(f"{path}.json"), type=Description)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, RecursionError) as error:
            raise StatesLostError(f"{path}.json is damaged: {error}") from None
        try:
            self._pass_rows(path, description, use, f"{path}.bin")
        except StatesLostError:
            raise
        except OSError as error:
            raise StatesLostError(f"{path}.bin cannot be read: {error}") from error
        return description

    def forget(self, token_ids: Sequence[int]) -> None:
        """Remove the kept states for these tokens, if any."""
        _remove(self._files, f"{self._folder}/{name_states(token_ids)}")

    def _name(self, url: str) -> str:
        folder, _, name = url.rpartition("/")
        if folder != self.root or not _NAME.fullmatch(name):
            raise ValueError(
                f"a server returned {url[:300]!r} as the path of hidden states, which is not directly below "
                f"{self.root}: start "
                "`redraft serve-features --storage` and the trainer (--signal.storage) with the "
                "same storage"
            )
        return name

    def _open(self, path: str) -> Any:
        """Open the file `path` for reading.

        On a local disk, links and pipes are refused, because reading a pipe would block.
        """
        if not isinstance(self._files, LocalFileSystem):
            return self._files.open(path, "rb", block_size=BLOCK_BYTES)
        return open_file(path)

    def _pass_rows(self, path: str, description: Description, use: Use, name: str) -> None:
        """Pass all rows of the states to `use`.

        Raises:
            StatesLostError: the CRC-32 of the rows differs from the description's.
        """
        # A read takes at most LONGEST_ROW bytes, because a row that is longer than a block is read
        # as a separate block.
        tokens = description.shape[0]
        rows_per_block, crc = max(1, BLOCK_BYTES // description.row_bytes), 0
        buffer = torch.empty(min(tokens, rows_per_block) * description.row_bytes, dtype=torch.uint8)
        with self._open(f"{path}.bin") as file:
            for first in range(0, tokens, rows_per_block):
                num_rows = min(rows_per_block, tokens - first)
                block = buffer[: num_rows * description.row_bytes]
                if file.readinto(block.numpy().data) != len(block):
                    raise OSError("the file is truncated")
                crc = zlib.crc32(block.numpy().data, crc)
                rows = block.view(description.stored_dtype).view(
                    num_rows, *description.stored_shape
                )
                use(
                    first,
                    decode_float8(rows, torch.float32) if description.dtype == "float8" else rows,
                    description.layers,
                )
        if crc != description.crc32:
            raise StatesLostError(
                f"{name} is corrupt: its CRC-32 is {crc:08x}, not {description.crc32:08x}"
            )

    def _wait_for(self, path: str, url: str, wait_s: float) -> Description:
        deadline_s, pause_s = time.monotonic() + wait_s, FIRST_PAUSE_S
        while True:
            try:
                # ValidationError is a DecodeError, so it must be caught first. Waiting does not
                # help if the JSON is complete but has the wrong fields.
                return msgspec.json.decode(self._read_start(f"{path}.json"), type=Description)
            except (msgspec.ValidationError, RecursionError) as error:
                raise StatesLostError(f"{url} has an invalid description: {error}") from None
            # The file does not exist yet, or is incomplete.
            except (FileNotFoundError, msgspec.DecodeError):
                if time.monotonic() > deadline_s:
                    raise StatesLostError(f"{url} did not arrive within {wait_s:g} s") from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _read_start(self, path: str) -> bytes:
        if not isinstance(self._files, LocalFileSystem):
            content: bytes = self._files.cat_file(
                path, end=LONGEST_DESCRIPTION
            )  # `open` would ask twice
            return content
        with self._open(path) as file:
            return bytes(file.read(LONGEST_DESCRIPTION))


def _remove(storage: Any, path: str) -> None:
    # Remove the description first, because without it, no reader opens the bytes.
    for kind in ("json", "bin"):
        with suppress(FileNotFoundError, IsADirectoryError):
            storage.rm_file(f"{path}.{kind}")
