"""Read a draft from the registry into the worker's memory.

A separate thread reads it, so hung storage blocks nothing else.

    stage ─► thread: manifest, layout, this rank's slices into memory, SHA-256 of this rank's files ─► done, or an error
    load  ─► copies from memory into the draft, while the engine is paused
    discard ─► frees the memory, at once or when the thread ends

The memory is anonymous: no page of it is backed by the storage. Python reads the files, so the
engine thread can run meanwhile. A page fault on hung storage would stop both. For a GPU, the memory
is one pinned buffer, because the paused engine copies weights from it several times as fast. The
buffer is created at start and used by every swap, because pinning takes the driver's lock and would
block the engine's kernel launches.

Each tensor-parallel rank reads the slices that it loads (`Slices`). The ranks divide among
themselves the files to compare with the manifest. A draft is loaded only if no rank has found
damage.
"""

import errno
import hashlib
import logging
import math
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import _TYPES as DTYPES
from torch import Tensor

from redraft.files.artifact import (
    MANIFEST,
    FileEntry,
    manifest,
    require_sizes,
    safetensors_header,
    sha256,
)
from redraft.online.engine.slices import Slice, Sliced, Slices
from redraft.online.engine.swap import Layout, require_same_layout, require_same_shared

logger = logging.getLogger("vllm.redraft")

CHUNK_BYTES = 16 << 20
ALIGNMENT = 64  # byte boundary at which tensors start in memory


class DamagedError(ValueError):
    """Raised when the files cannot be read, or differ from the manifest."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a draft that one rank reads, and the files that it compares with the manifest."""

    slices: Slices = field(default_factory=dict)
    rank: int = 0
    num_ranks: int = 1
    """Number of ranks that divide the checksum work. With 1, this rank checks every file."""


class HostMemory:
    """Host memory for one worker's drafts.

    The pinned buffer is kept; all other memory is freed after use.
    """

    def __init__(self, pin: Callable[[Tensor], None] | None = None) -> None:
        """Store `pin`, which pins a tensor in place; it is None on a CPU."""
        self._pin = pin
        self._pinned: Tensor | None = None
        self._is_lent = False
        self.num_lent = 0  # Buffers that are in use.

    @property
    def pinned_bytes(self) -> int:
        return 0 if self._pinned is None else len(self._pinned)

    def reserve(self, num_bytes: int) -> None:
        """Allocate the pinned buffer, if the worker has a GPU.

        Without enough pinned memory, swaps pause longer.
        """
        if self._pin is None or not num_bytes:
            return
        try:
            buffer = _anonymous(num_bytes)
            self._pin(buffer)
        except (AttributeError, RuntimeError, OSError) as error:
            logger.warning(
                "redraft: no pinned memory for drafts, so a swap pauses longer: %s", error
            )
            self._pin = None
        else:
            self._pinned = buffer

    def take(self, num_bytes: int) -> Tensor:
        """Lend a buffer of at least `num_bytes`: the pinned buffer if it is free and large enough.

        Raises:
            OSError: memory cannot be allocated.
        """
        if self._pinned is not None and not self._is_lent and num_bytes <= len(self._pinned):
            self._is_lent, buffer = True, self._pinned
        else:
            buffer = _anonymous(num_bytes)
        self.num_lent += 1
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        self.num_lent -= 1
        if buffer is self._pinned:
            self._is_lent = False


def pin_on(device: torch.device) -> Callable[[Tensor], None] | None:
    """Return a function that pins memory for a GPU. Return None for any other device."""
    if device.type != "cuda":
        return None

    def pin(buffer: Tensor) -> None:
        # `pin_memory` is not used, because it rounds sizes up to a power of 2: 1.05 GiB would take
        # 2 GiB.
        with torch.cuda.device(device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(runtime.cudaHostRegister(buffer.data_ptr(), len(buffer), 0))

    return pin


def _anonymous(num_bytes: int) -> Tensor:
    """Allocate bytes that are freed together with the tensor and its views."""
    # mmap does not accept a length of 0.
    return torch.frombuffer(mmap.mmap(-1, max(num_bytes, 1)), dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of a tensor that this rank reads: the same range of bytes in each of `rows` rows."""

    name: str
    whole: Sequence[int]
    """Shape of the whole tensor in the file."""
    slice: Slice | None
    dtype: torch.dtype
    rows: int
    row_bytes: int
    first_byte: int
    """Offset of the part's first byte within each row."""
    num_bytes: int
    """Number of the part's bytes in each row."""
    begin: int
    """Offset of the part within the file's data section."""
    at: int
    """Offset in memory."""

    @property
    def end(self) -> int:
        """End of the part in memory, in bytes."""
        return self.at + self.rows * self.num_bytes

    def tensor(self, memory: Tensor) -> Tensor:
        """Return a tensor of the shape in the file, with values only in this part."""
        values = memory[self.at : self.end].view(self.dtype)
        if self.slice is None:
            return values.view(*self.whole)
        return Sliced.holding(values.view(*self.slice.shape(self.whole)), self.slice, self.whole)


def plan_parts(
    header: Mapping[str, Any], slices: Slices, shared: set[str], at: int = 0
) -> list[Part]:
    """List a file's parts, placed in memory from `at` on, without the modules in `shared`."""
    parts = []
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
        if not shared.isdisjoint(name.split(".")):
            continue
        shape, dtype, cut = entry["shape"], DTYPES[entry["dtype"]], slices.get(name)
        rows = math.prod(shape[: cut.dim]) if cut else 1
        inner = math.prod(shape[cut.dim + 1 :]) * dtype.itemsize if cut else 0
        whole_bytes = math.prod(shape) * dtype.itemsize
        at = -(-at // ALIGNMENT) * ALIGNMENT
        part = Part(
            name=name,
            whole=shape,
            slice=cut,
            dtype=dtype,
            rows=rows,
            row_bytes=whole_bytes // rows if rows else 0,
            first_byte=cut.first * inner if cut else 0,
            num_bytes=cut.size * inner if cut else whole_bytes,
            begin=entry["data_offsets"][0],
            at=at,
        )
        parts.append(part)
        at = part.end
    return parts


def plan_folder(folder: Path, slices: Slices, shared: set[str]) -> dict[Path, list[Part]]:
    """List the parts of all files of a draft, one after another in memory.

    Raises:
        ValueError: a header is corrupt.
    """
    plan: dict[Path, list[Part]] = {}
    at = 0
    for path in sorted(folder.glob("*.safetensors")):
        plan[path] = plan_parts(safetensors_header(path), slices, shared, at)
        at = plan[path][-1].end if plan[path] else at
    return plan


def list_weights(folder: Path, shared: set[str]) -> dict[str, Tensor]:
    """Return a draft's tensors outside the modules named in `shared`, without memory."""
    return {
        part.name: torch.empty(*part.whole, dtype=part.dtype, device="meta")
        for parts in plan_folder(folder, {}, shared).values()
        for part in parts
    }


def count_bytes(plan: Mapping[Path, Sequence[Part]]) -> int:
    """Return the memory that these parts need, in bytes."""
    return max((part.end for parts in plan.values() for part in parts), default=0)


class Staging:
    """A draft that is being read into memory. The model stays unchanged."""

    def __init__(
        self, folder: Path, current: Layout, shared: set[str], memory: HostMemory, share: Share
    ) -> None:
        """Start reading the draft in `folder`.

        The draft will replace `current`, which shares the modules named in `shared` with the
        target.
        """
        self.folder = folder
        self.layout: Layout | None = None  # The draft's layout; None until the read is done.
        # The draft's tensors outside the shared modules; empty until the read is done.
        self.tensors: dict[str, Tensor] = {}
        self.manifest_sha256 = ""  # SHA-256 of the folder's manifest; empty if it has none.
        self.error = ""
        self.is_damaged = False  # Whether `error` is about damaged or unreadable files.
        self.bytes_read = 0  # Bytes of the weights files that were read so far.
        self._current, self._shared, self._memory, self._share = current, shared, memory, share
        self._buffer: Tensor | None = None
        self._is_discarded = self._is_finished = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="redraft-staging", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        """Wait until the read is done."""
        self._thread.join()

    def discard(self) -> None:
        """Free the memory.

        A thread that is still reading stops after its next chunk and frees it.
        """
        with self._lock:
            self._is_discarded, is_finished = True, self._is_finished
        if is_finished:
            self._free()

    def _run(self) -> None:
        try:
            self._stage()
        except (DamagedError, OSError) as error:
            is_memory = isinstance(error, OSError) and error.errno == errno.ENOMEM
            self.is_damaged, self.error = not is_memory, str(error)
        except ValueError as error:
            self.error = str(error)
        # E.g. out of memory. The thread must always report that it has finished.
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        with self._lock:
            # Take the same lock as `discard`: whichever comes second frees the memory.
            self._is_finished, is_useless = True, self._is_discarded or bool(self.error)
        if is_useless:
            self._free()

    def _stage(self) -> None:
        entries = self._read_manifest()
        weights = sorted(self.folder.glob("*.safetensors"))
        for name in entries.keys() - {path.name for path in weights}:
            _require_digest(self.folder, name, sha256(self.folder / name), entries)
        for path in weights:
            self._require_named(path, entries)
        try:
            layout = Layout.read(self.folder)
            require_same_layout(self._current, layout)
        except ValueError:
            # If a header is corrupt, report damage rather than a different layout.
            for path in weights:
                _require_digest(self.folder, path.name, sha256(path), entries)
            raise
        plan = plan_folder(self.folder, self._share.slices, self._shared)
        self._buffer = self._memory.take(count_bytes(plan))
        for i, (path, parts) in enumerate(plan.items()):
            is_mine = bool(entries) and i % self._share.num_ranks == self._share.rank
            digest = self._read_file(path, parts, self._buffer, is_hashed=is_mine)
            if is_mine:
                _require_digest(self.folder, path.name, digest, entries)
        layout = layout.with_shared(self._shared)
        require_same_shared(self._current.with_shared(self._shared), layout)
        self.tensors = {
            part.name: part.tensor(self._buffer) for parts in plan.values() for part in parts
        }
        self.layout = layout

    def _read_manifest(self) -> Mapping[str, FileEntry]:
        """Read the folder's manifest, and compare all file sizes with it.

        A draft given on the command line may have no manifest.
        """
        path = self.folder / MANIFEST
        if not path.is_file():
            return {}
        try:
            self.manifest_sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            entries = manifest(self.folder)
            require_sizes(self.folder, entries)
        except ValueError as error:
            raise DamagedError(str(error)) from error
        return entries

    def _require_named(self, path: Path, entries: Mapping[str, FileEntry]) -> None:
        """Raise DamagedError if the manifest lacks the file, or the file's header is corrupt."""
        if entries and path.name not in entries:
            raise DamagedError(f"{path} is not in the manifest: copy or publish the folder again")
        try:
            safetensors_header(path)
        except ValueError as error:
            raise DamagedError(str(error)) from error

    def _read_file(
        self, path: Path, parts: Sequence[Part], buffer: Tensor, *, is_hashed: bool
    ) -> str:
        """Read a file's parts into memory, and return the file's SHA-256 if `is_hashed`."""
        with path.open("rb", buffering=0) as file, memoryview(buffer.numpy().data) as memory:
            reader = _Reader(self, file, hashlib.sha256() if is_hashed else None)
            data = 8 + int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
            for part in parts:
                for row in range(part.rows):
                    reader.go_to(data + part.begin + row * part.row_bytes + part.first_byte)
                    at = part.at + row * part.num_bytes
                    reader.fill(memory[at : at + part.num_bytes])
            return reader.finish(path.stat().st_size)

    def require_wanted(self) -> None:
        """Raise ValueError if this read was aborted."""
        if self._is_discarded:
            raise ValueError(f"reading {self.folder} was aborted")

    def _free(self) -> None:
        self.tensors = {}
        with self._lock:
            # Read under the lock, so that the memory is returned only once.
            buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._memory.give_back(buffer)


class _Reader:
    """Reads a file from front to back.

    With a digest, it reads every byte; without one, it skips the bytes that are not needed.
    """

    def __init__(self, staging: Staging, file: FileIO, digest: Any) -> None:
        self._staging, self._file, self._digest = staging, file, digest
        self._position = 0
        self._unwanted = memoryview(bytearray(0 if digest is None else CHUNK_BYTES))

    def go_to(self, position: int) -> None:
        if self._digest is None:
            self._file.seek(position)
            self._position = position
        while self._position < position:
            self.fill(self._unwanted[: position - self._position])

    def fill(self, memory: memoryview) -> None:
        """Read the next bytes into memory.

        Raises:
            DamagedError: the file ends too early.
        """
        begin = 0
        while begin < len(memory):
            self._staging.require_wanted()
            chunk = memory[begin : begin + CHUNK_BYTES]
            num_bytes = self._file.readinto(chunk)
            if not num_bytes:
                raise DamagedError(
                    f"{self._file.name} ended after {self._position} bytes: copy or publish it "
                    "again"
                )
            if self._digest is not None:
                self._digest.update(chunk[:num_bytes])
            begin += num_bytes
            self._position += num_bytes
            self._staging.bytes_read += num_bytes

    def finish(self, size: int) -> str:
        """Read up to the file's end at `size`, and return the SHA-256.

        Return an empty string without a digest.
        """
        if self._digest is None:
            return ""
        self.go_to(size)
        return str(self._digest.hexdigest())


def _require_digest(folder: Path, name: str, digest: str, entries: Mapping[str, FileEntry]) -> None:
    """Raise DamagedError unless the manifest, if there is one, has this SHA-256 for the file."""
    if not entries:
        return
    if name not in entries:
        raise DamagedError(
            f"{folder / name} is not in the manifest: copy or publish the folder again"
        )
    if entries[name].sha256 != digest:
        raise DamagedError(
            f"{folder / name} is corrupt (its SHA-256 differs): copy or publish the folder again"
        )
