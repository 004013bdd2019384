"""Read a draft from the registry into the worker's memory in a thread, the only one that a hung storage can stop.

    stage ─► thread: manifest, weights into memory, SHA-256 of every file, layout, pinning ─► done, or an error
    load  ─► copies from memory into the draft, while the engine is paused
    discard ─► frees the memory, at once or when the thread ends

The weights go into anonymous files in memory: safetensors opens them by path, and no page of them is on the storage.
Reading is done by Python, which lets the engine's thread run meanwhile. A page fault on a hung storage would stop both.
For a GPU the tensors are then copied to pinned memory, from which the paused engine takes them several times as fast.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import mmap
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from redraft.heads.files.artifact import MANIFEST, FileEntry, manifest, require_sizes, sha256
from redraft.online.engine.swap import Layout, read_tensors, require_same_layout, require_same_shared

logger = logging.getLogger("vllm.redraft")

CHUNK_BYTES = 16 << 20


class DamagedError(ValueError):
    """The files cannot be read or differ from the manifest."""


class Staging:
    """One draft on its way into memory. The model is not touched."""

    def __init__(self, folder: Path, current: Layout, shared: set[str], device: torch.device) -> None:
        """Begin to read `folder`, for a worker on `device`: a draft to replace `current`, which shares the modules
        `shared` with the target."""
        self.folder = folder
        self.layout: Layout | None = None
        """The draft's layout. None until it is done."""
        self.tensors: dict[str, Tensor] = {}
        """The weights outside the shared modules, in memory. Empty until it is done."""
        self.manifest_sha256 = ""
        """SHA-256 of the folder's manifest; empty if it has none."""
        self.error = ""
        self.is_damaged = False
        """Whether `error` is about damaged or unreadable files."""
        self._current, self._shared, self._device = current, shared, device
        self._descriptors: list[int] = []
        self._is_discarded = self._is_finished = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="redraft-staging", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def discard(self) -> None:
        """Free the memory; if the thread still reads, it stops after the next chunk and frees it."""
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
        except Exception as error:  # e.g. no memory; the thread's end must be told in any case
            self.error = f"{type(error).__name__}: {error}"
        with self._lock:
            # under the lock of `discard`: whichever of the two comes second frees the memory
            self._is_finished, is_useless = True, self._is_discarded or bool(self.error)
        if is_useless:
            self._free()

    def _stage(self) -> None:
        # All files are compared with the manifest, if there is one, before config.json is believed.
        entries = self._read_manifest()
        weights = sorted(self.folder.glob("*.safetensors"))
        files = [self._read_into_memory(path, entries) for path in weights]
        for name in entries.keys() - {path.name for path in weights}:
            _require_digest(self.folder, name, sha256(self.folder / name), entries)
        layout = Layout.read(self.folder)
        require_same_layout(self._current, layout)
        layout = layout.with_shared(self._shared, files)
        require_same_shared(self._current.with_shared(self._shared), layout)
        tensors = read_tensors(files, self._shared)
        if self._device.type == "cuda":
            tensors = self._pin(tensors)
        self.tensors, self.layout = tensors, layout

    def _pin(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies in pinned memory; the tensors themselves if the host has too little of it."""
        try:
            # A new thread has device 0. Pinning there would take memory of another rank's GPU.
            with torch.cuda.device(self._device):
                pinned = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        except RuntimeError as error:
            logger.warning("no pinned memory for %s, so its swap will pause longer: %s", self.folder, error)
            return tensors
        self._close_files()
        return pinned

    def _read_manifest(self) -> Mapping[str, FileEntry]:
        """The folder's manifest, with all sizes compared. A draft of the command line may have none."""
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

    def _read_into_memory(self, path: Path, entries: Mapping[str, FileEntry]) -> Path:
        """A copy of the file in memory, compared with the manifest."""
        digest = hashlib.sha256()
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            # mmap refuses an empty file
            if not size:
                raise DamagedError(f"{path} is empty: copy or publish the folder again")
            descriptor = os.memfd_create(path.name)
            self._descriptors.append(descriptor)
            os.ftruncate(descriptor, size)
            with mmap.mmap(descriptor, size) as memory, memoryview(memory) as view:
                begin = 0
                while begin < size:
                    if self._is_discarded:
                        raise ValueError(f"reading {path} was given up")
                    # Released after each chunk: mmap refuses to close under a view.
                    with view[begin : begin + CHUNK_BYTES] as chunk:
                        num_bytes = file.readinto(chunk)
                        digest.update(chunk[:num_bytes])
                    if not num_bytes:
                        raise DamagedError(f"{path} ended after {begin} of {size} bytes: copy or publish it again")
                    begin += num_bytes
        _require_digest(self.folder, path.name, digest.hexdigest(), entries)
        return Path(f"/proc/self/fd/{descriptor}")

    def _free(self) -> None:
        self.tensors = {}
        self._close_files()

    def _close_files(self) -> None:
        with self._lock:
            # Taken out under the lock, so that each is closed once: a second close could hit another file.
            descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)


def _require_digest(folder: Path, name: str, digest: str, entries: Mapping[str, FileEntry]) -> None:
    """Raise DamagedError unless the manifest, if there is one, has this SHA-256 for the file."""
    if not entries:
        return
    if name not in entries:
        raise DamagedError(f"{folder / name} is not in the manifest: copy or publish the folder again")
    if entries[name].sha256 != digest:
        raise DamagedError(f"{folder / name} is corrupt (its SHA-256 differs): copy or publish the folder again")
