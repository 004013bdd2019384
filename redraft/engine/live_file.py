"""Live counts that survive a restart, in a file that is read at the start and written by a thread.

    steps ─► counts ─► once a minute, and right after `forget` ─► FOLDER/live-RANK.safetensors

The file contains hashes of runs, the token after each run, and hashed names of owners. Runs of
common words can be guessed from their hashes, so the folder is as private as the answers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import save

from redraft.files.private import make_private
from redraft.heads.families.retrieval import WINDOW, Live

logger = logging.getLogger(__name__)

WRITTEN_EVERY_S = 60.0
"""Time between two writes, in seconds. If the server is killed, at most the answers of this period
are lost.
"""

KEY = "redraft"


@dataclass(frozen=True, kw_only=True)
class LiveConfig:
    """Settings for live counts (`--draft live`)."""

    folder: Path | None = None
    """Folder that keeps the counts across restarts. By default, the counts are only in memory, and
    empty after a restart.
    """
    window: int = WINDOW
    """Number of most recent answers to draft from. A run of tokens is dropped if it has not
    occurred in this number of answers, or possibly in half as many.
    """
    shared: bool = False
    """Let all tenants share the counted answers of all tenants. A client can then infer other
    tenants' answers from the sizes of streamed events. Requests with different cache_salt values or
    LoRA adapters stay separate.
    """

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ValueError(f"--live.window {self.window} is too small: give at least 2")


class LiveFile:
    """The file with one engine's live counts."""

    def __init__(self, path: Path, draft: Live, target: str, *, writes: bool = True) -> None:
        """Set up the file. `writes` means that this rank writes it."""
        self.path, self.draft, self.target, self.is_written = path, draft, target, writes
        self.lock = threading.Lock()
        self.written = 0
        """Number of answers in the file."""
        self._ended = threading.Event()
        self._restore()
        if self.is_written:
            threading.Thread(target=self._write_often, name="live counts", daemon=True).start()

    def write(self) -> None:
        """Write all counts. Afterwards, no file contains deleted text."""
        with self.lock:
            self.written = self.draft.runs.num_texts
            tensors, numbers = self.draft.read_state()
            told = {KEY: json.dumps({**numbers, "target": self.target})}
            partial = self.path.with_suffix(".partial")
            with contextlib.suppress(FileNotFoundError):
                partial.unlink()
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(save(tensors, told))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)

    def close(self) -> None:
        self._ended.set()

    def _restore(self) -> None:
        """Read the file. If it is unreadable or for a different target, the counts stay empty."""
        if not self.path.is_file():
            return
        try:
            with safe_open(self.path, framework="numpy") as file:
                numbers: dict[str, Any] = json.loads(file.metadata()[KEY])
                tensors = {name: file.get_tensor(name) for name in ("places", "rows", "hashes")}
            is_read = numbers["target"] == self.target and self.draft.restore(tensors, numbers)
        except Exception as error:
            # Omit the message, because it may quote users' text.
            logger.warning("redraft: %s cannot be read: %s", self.path, type(error).__name__)
            return
        if not is_read:
            logger.warning("redraft: %s is for a different target or different settings", self.path)
        self.written = self.draft.runs.num_texts

    def _write_often(self) -> None:
        while not self._ended.wait(WRITTEN_EVERY_S):
            if self.draft.runs.num_texts == self.written:
                continue
            try:
                self.write()
            except OSError as error:
                logger.warning("redraft: %s cannot be written: %s", self.path, error)


def open_file(folder: Path, runner: Any, draft: Live) -> LiveFile:
    """Open the file with this engine's counts, which all ranks read and the first rank writes.

    Raises:
        ValueError: the ranks are on several machines, where their counts would differ.
    """
    from vllm.distributed import get_tensor_model_parallel_rank

    parallel = runner.vllm_config.parallel_config
    if parallel.nnodes > 1 or parallel.distributed_executor_backend == "ray":
        raise ValueError(
            "live counts can be kept in a folder only if all ranks are on one machine: remove "
            "--live.folder"
        )
    make_private(folder)
    path = folder / f"live-{parallel.data_parallel_rank}.safetensors"
    is_first = get_tensor_model_parallel_rank() == 0
    return LiveFile(path, draft, str(runner.vllm_config.model_config.model), writes=is_first)
