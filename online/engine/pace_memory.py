"""A policy's estimates on disk, so that a restarted server drafts from its first step.

    REGISTRY/pace-KEY.json     KEY: machine, engine, target, and the draft's settings

Step times depend on the machine, the engine and the draft's shape, so estimates for other
configurations are not read. Acceptance belongs to one version; for a different version, it is
treated as after a swap.
"""

import hashlib
import json
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from redraft.engine.lookup_first import SECTION
from redraft.engine.machine import VLLM_VERSION, read_processor
from redraft.engine.settings import read_settings
from redraft.files.folder import fingerprint, loaded_folder
from redraft.files.sealed import read_sealed_as, write_sealed
from redraft.online.engine.pace_policy import Known, Policy
from redraft.online.fleet.registry import hash_manifest

logger = logging.getLogger("vllm.redraft")

SAVE_S = 30.0  # Seconds between two saves; a kill loses at most this much.


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The file's fields."""

    key: str
    draft: str
    """Hash of the version's manifest. Empty if the version or the target's weights are unknown."""
    policy: Known


class PaceMemory:
    """The file that keeps one server's policy, in the registry's folder."""

    def __init__(self, registry: Path, key: str, version: str) -> None:
        self.registry, self.key, self.version = registry, key, version
        self.path = registry / f"pace-{key[:16]}.json"
        self._saved_s: float | None = None
        self._writer: threading.Thread | None = None

    def recall(self, policy: Policy) -> bool:
        """Restore the policy from the file, and return whether there was one.

        Errors are logged.
        """
        try:
            kept = read_sealed_as(self.path, Kept, None)
            if kept is None:
                return False
            if kept.key != self.key:
                raise ValueError(f"{self.path} belongs to a different server")
            policy.recall(kept.policy)
        except (OSError, ValueError) as error:
            logger.warning("redraft: --pace starts without earlier estimates: %s", error)
            return False
        if not kept.draft or kept.draft != self._hash_draft():
            policy.swapped()
        return True

    def note(self, policy: Policy, now_s: float) -> None:
        """Save the policy every SAVE_S seconds, in a thread that may wait for the disk."""
        if self._saved_s is None:
            self._saved_s = now_s
        if now_s - self._saved_s < SAVE_S or (self._writer and self._writer.is_alive()):
            return
        self._saved_s = now_s
        self._writer = threading.Thread(target=self.save, args=(policy.known(),), daemon=True)
        self._writer.start()

    def save(self, known: Known) -> None:
        kept = Kept(key=self.key, draft=self._hash_draft(), policy=known)
        try:
            write_sealed(self.path, msgspec.to_builtins(kept))
        except OSError as error:
            logger.warning(
                "redraft: --pace cannot save its estimates for the next start: %s", error
            )
            self._saved_s = float("inf")  # logged once, because later attempts would fail too

    def _hash_draft(self) -> str:
        with suppress(OSError):
            return hash_manifest(self.registry / self.version) if self.version else ""
        return ""


def open_memory(registry: Path | None, vllm_config: Any) -> PaceMemory | None:
    """Open a server's stored policy.

    Return None if there is no registry, or if the model cannot be identified.
    """
    if registry is None:
        return None
    try:
        key = make_key(vllm_config)
    except (OSError, ValueError) as error:
        logger.warning("redraft: --pace cannot save its estimates for the next start: %s", error)
        return None
    draft = vllm_config.speculative_config.draft_model_config
    folder = loaded_folder(draft).resolve() if draft else Path()
    version = folder.name if folder.parent == registry.resolve() else ""
    return PaceMemory(registry, key, version)


def make_key(vllm_config: Any) -> str:
    """Return the SHA-256, in hex, of everything that step times depend on.

    Raises:
        OSError, ValueError: the target cannot be read.
    """
    from vllm.platforms import (
        current_platform,
    )  # imported here, because tests of the files need no engine

    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    facts = {
        "machine": [read_processor(), os.cpu_count(), current_platform.get_device_name()],
        "engine": VLLM_VERSION,
        "target": fingerprint(loaded_folder(model)),
        "dtype": str(model.dtype),
        "ranks": vllm_config.parallel_config.world_size,
        "requests": vllm_config.scheduler_config.max_num_seqs,
        "context": model.max_model_len,
        "draft": [speculative.method, speculative.num_speculative_tokens],
        "lookup": read_settings().get(SECTION),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
