"""What the plugin adds to every worker of a vLLM server: capture, and the methods behind the routes.

The API process calls the `redraft_...` methods by name on all ranks at once; vLLM runs them between two engine steps.
They return errors and never raise: an exception in one rank would leave the others waiting.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heads.artifact import fingerprint
from online.capture import Capture
from online.plugin_config import read_config
from online.runner_v1 import install_capture, require_known_runner
from online.swap import (
    UNSUPPORTED_METHODS,
    checksum,
    load_draft,
    model_folder,
    require_same_layout,
    require_same_shared,
    shared_modules,
)

logger = logging.getLogger("vllm.redraft")


@dataclass(kw_only=True)
class WorkerState:
    """Of one worker; as its attribute `redraft`."""

    server_id: str
    target_fingerprint: str
    target_checksum: str
    is_target_intact: bool = True
    draft_version: str
    draft_folder: Path | None
    """The last good draft. None: the server runs without one."""
    is_draft_intact: bool = True
    """False between a failed load and the next that succeeds."""
    num_swaps: int = 0
    capture: Capture | None = None


def register_worker() -> None:
    """Add the methods to vLLM's worker class, and `install` to the end of its start. May be called again."""
    from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

    if hasattr(WorkerBase, "redraft_status"):
        return
    WorkerBase.redraft_status = redraft_status
    WorkerBase.redraft_load = redraft_load
    WorkerBase.redraft_restore = redraft_restore
    WorkerBase.redraft_commit = redraft_commit
    initialize = WorkerWrapperBase.initialize_from_config

    def initialize_and_install(self: Any, kv_cache_configs: list[Any]) -> None:
        initialize(self, kv_cache_configs)
        install(self.worker)

    WorkerWrapperBase.initialize_from_config = initialize_and_install


def install(worker: Any) -> None:
    """Take up the state of a worker that has loaded its models, and begin capture where it is asked for.

    Raises: RuntimeError for a model runner that the hooks do not know; ValueError or OSError for a bad setting.
    """
    config = read_config()
    runner = worker.model_runner
    require_known_runner(runner)
    speculative = worker.vllm_config.speculative_config
    draft = speculative and speculative.draft_model_config
    folder = model_folder(draft.model) if draft else None
    worker.redraft = state = WorkerState(
        server_id=uuid.uuid4().hex[:16],
        target_fingerprint=fingerprint(model_folder(worker.vllm_config.model_config.model)),
        target_checksum=checksum(runner.get_model()),
        draft_version=_version(folder, config.registry),
        draft_folder=folder,
    )
    if config.capture is None or not _is_recording_rank():
        return
    state.capture = Capture(config.capture, state.server_id, state.target_fingerprint, state.draft_version)
    install_capture(runner, state.capture)
    state.capture.start()
    _stop_at_shutdown(worker, state.capture)


def redraft_status(worker: Any) -> dict[str, Any]:
    """What this rank serves and what it has captured."""
    state: WorkerState = worker.redraft
    speculative = worker.vllm_config.speculative_config
    return {
        "server_id": state.server_id,
        "draft_version": state.draft_version,
        "draft_intact": state.is_draft_intact,
        "method": speculative.method if speculative else None,
        "num_speculative_tokens": speculative.num_speculative_tokens if speculative else 0,
        "target_fingerprint": state.target_fingerprint,
        "target_checksum": state.target_checksum,
        "target_intact": state.is_target_intact,
        "num_swaps": state.num_swaps,
        "capture": state.capture.status() if state.capture else None,
    }


def redraft_load(worker: Any, folder: str) -> dict[str, Any]:
    """Load the draft in `folder`: `{"ok", "load_ms", ...}`, or `{"ok": False, "error", "touched"}`."""
    state: WorkerState = worker.redraft
    try:
        _require_swappable(worker)
        assert state.draft_folder is not None
        require_same_layout(state.draft_folder, Path(folder))
        shared = shared_modules(worker.model_runner.get_draft_model(), worker.model_runner.get_model())
        require_same_shared(state.draft_folder, Path(folder), shared)
    except (ValueError, OSError) as error:
        return {"ok": False, "touched": False, "error": str(error)}
    return _load(worker, Path(folder))


def redraft_restore(worker: Any) -> dict[str, Any]:
    """Load the last good draft again, after a load that failed on some rank."""
    state: WorkerState = worker.redraft
    assert state.draft_folder is not None
    return _load(worker, state.draft_folder)


def redraft_commit(worker: Any, folder: str, version: str) -> None:
    """Name the draft that was loaded on all ranks: from now on it is the last good one."""
    state: WorkerState = worker.redraft
    state.draft_folder, state.draft_version = Path(folder), version
    state.num_swaps += 1
    if state.capture:
        state.capture.draft_version = version


def _load(worker: Any, folder: Path) -> dict[str, Any]:
    state: WorkerState = worker.redraft
    runner = worker.model_runner
    began_s = time.perf_counter()
    state.is_draft_intact = False
    try:
        load_draft(runner.get_draft_model(), runner.get_model(), folder, worker.vllm_config, worker.device)
    except Exception as error:
        logger.exception("loading the draft of %s failed", folder)
        return {"ok": False, "touched": True, "error": f"{type(error).__name__}: {error}"}
    state.is_draft_intact = True
    load_ms = 1e3 * (time.perf_counter() - began_s)
    now = checksum(runner.get_model())
    state.is_target_intact = now == state.target_checksum
    return {"ok": True, "load_ms": load_ms, "checksum_before": state.target_checksum, "checksum_after": now}


def _require_swappable(worker: Any) -> None:
    speculative = worker.vllm_config.speculative_config
    if worker.redraft.draft_folder is None or worker.model_runner.get_draft_model() is None:
        raise ValueError("this server has no draft model to swap: start it with one")
    if speculative.method in UNSUPPORTED_METHODS:
        raise ValueError(
            f"drafts of method {speculative.method} can not be swapped: restart the server with the new one"
        )


def _version(folder: Path | None, registry: Path | None) -> str:
    """The version's id where the draft comes from the registry, else `start`; empty without a draft."""
    if folder is None:
        return ""
    return folder.name if registry is not None and folder.parent == registry.resolve() else "start"


def _is_recording_rank() -> bool:
    """All ranks of a tensor-parallel group see the same logits: the first records."""
    from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

    return bool(get_tensor_model_parallel_rank() == 0 and get_pp_group().is_last_rank)


def _stop_at_shutdown(worker: Any, capture: Capture) -> None:
    shutdown = worker.shutdown

    def stop_and_shutdown() -> None:
        capture.stop()
        shutdown()

    worker.shutdown = stop_and_shutdown
