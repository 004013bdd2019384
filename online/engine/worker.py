"""Additions to every worker of a vLLM server: capture, and the methods called by the routes.

The API process calls the `redraft_...` methods by name on all ranks at once; vLLM runs them between
two engine steps. They return errors instead of raising them: an exception in one rank would leave
the other ranks waiting.
"""

import logging
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from redraft.engine.hooks import Attached, RunnerState, attach, find_state
from redraft.files.folder import loaded_folder
from redraft.files.target_folder import TargetFolder
from redraft.heads.catalog import find_method
from redraft.online.engine.capture import Capture
from redraft.online.engine.config import CaptureConfig, PluginConfig, SwapCache, read_config
from redraft.online.engine.draft_costs import describe_cache, list_losses
from redraft.online.engine.feed import find_owner, name_owner
from redraft.online.engine.request_log import KEPT_STATES
from redraft.online.engine.reread import Rereader
from redraft.online.engine.runners import (
    describe_runner,
    find_runner,
    install_capture,
    install_proposers,
    install_reread,
)
from redraft.online.engine.slices import trace_slices
from redraft.online.engine.staging import (
    HostMemory,
    Share,
    Staging,
    count_bytes,
    list_weights,
    pin_on,
    plan_folder,
)
from redraft.online.engine.swap import (
    Layout,
    checksum,
    count_cache,
    load_draft,
    shared_modules,
)
from redraft.online.engine.target_watch import (
    TargetWatch,
    is_clear,
    load_target,
    look_at_target,
    name_target,
)
from redraft.online.engine.trainer_files import describe_target
from redraft.online.engine.worker_hooks import (
    stop_before_shutdown,
    watch_pushes,
    watch_sleep,
    watch_target,
)
from redraft.online.fleet.registry import hash_manifest

logger = logging.getLogger("vllm.redraft")

# Maximum number of hung reads before new drafts are refused, because each keeps its memory.
MAX_STUCK_READS = 4
SHOWN = (  # fields of a worker's state that its status contains
    *(
        "server_id",
        "draft_version",
        "manifest_sha256",
        "num_swaps",
        "swap_cache",
        "runner",
        "swap_off",
        "capture_off",
    ),
    *("target_fingerprint", "target_lineage", "target_checksum", "target_version"),
)
UPDATING = (
    "an update of the target weights is open, or has failed: finish or repeat it, then swap again"
)

# Time in seconds after which an unfinished swap is abandoned. It exceeds all deadlines of a swap
# together.
SWAP_LEASE_S = 300.0


@dataclass(kw_only=True)
class WorkerState(Attached):
    """State of one worker, stored in `worker.redraft`."""

    server_id: str
    runner: str = ""
    """vLLM's model runner and the reason for this choice, in one line."""
    capture_off: str = ""
    """Why recording is off although it is configured; empty otherwise."""
    swap_off: str = ""
    """Why drafts cannot be swapped; empty if they can."""
    swap_cache: SwapCache | Literal[""] = ""
    """How swaps handle the KV cache. Empty if the rank has no draft."""
    rereader: Rereader | None = None
    """Set only if `swap_cache` is "draft"."""
    target_fingerprint: str = ""
    target_lineage: str = ""
    target_checksum: str = ""
    target_version: str | None = ""
    """Version of the target's weights: "" at startup, None if unknown."""
    is_target_intact: bool = True
    """False once a swap has overwritten part of the target."""
    target_source: tuple[str, str, str | None] = (
        "",
        "",
        None,
    )
    """The target's model, object storage and revision before a load."""
    target_watch: TargetWatch | None = None
    """None if the target's weights change without redraft."""
    target_tensors: dict[str, str] = field(default_factory=dict)
    """Shapes and dtypes of the target's tensors by name. Empty if unknown."""
    draft_version: str = ""
    draft: Layout | None = None
    """The last good draft. None if the server runs without a draft."""
    draft_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes by rank: the draft's weights as stored in its files, and its part of the KV cache."""
    loaded_version: str = ""
    """Version of `draft`. After a trainer has pushed weights, the served version differs."""
    is_draft_intact: bool = True
    """False from the start of a load until all ranks have completed or undone it."""
    manifest_sha256: str = ""
    """Hash of the last good draft's manifest. Empty if the draft is not from a registry."""
    staging: Staging | None = None
    """The draft that is being read into memory or is there already."""
    memory: HostMemory = field(default_factory=HostMemory)
    share: Share = field(default_factory=Share)
    """The part of a draft that this rank reads."""
    swapper: str = ""
    """Id of the API process that is swapping. Empty if none is."""
    swapped_from_s: float = 0.0
    """Start time of that swap on the monotonic clock."""
    stuck: list[Staging] = field(default_factory=list)
    """Abandoned reads whose threads are still running."""
    asleep: set[str] = field(default_factory=set)
    """Parts of the memory that are in sleep mode."""
    num_swaps: int = 0
    capture: Capture | None = None
    forget_head: Callable[[], None] | None = None
    """Makes a lookup before a head discard its measurements of the head."""

    def name_draft(self, version: str) -> None:
        """Set the version of the draft that proposes tokens from the next step on."""
        self.draft_version = version
        if self.rereader:
            # Do not call `forget` in `redraft_load`: if the load fails on some rank, the old draft
            # is restored, and its KV cache entries are still correct.
            self.rereader.ledger.forget()
        if self.capture:
            self.capture.draft_version = version
        if self.forget_head:
            self.forget_head()


def install(worker: Any) -> None:
    """Set up the state of a worker that has loaded the models.

    Capture starts if it is configured. The function raises nothing, because an exception would keep
    vLLM from starting. Instead, a failure switches off capture or swaps, and the reason is kept.
    """
    state = attach(worker, WorkerState(server_id=uuid.uuid4().hex[:16]))
    with _switching_off(state, "capture"):
        lookup = find_state(worker.model_runner, RunnerState).lookup
        state.forget_head = getattr(lookup, "swapped", None)
        state.runner = describe_runner(find_runner(worker.model_runner), worker.vllm_config)
    config = PluginConfig()
    with _switching_off(state, "capture", "swap"):
        config = read_config()
        if counter := find_state(worker.model_runner, RunnerState).counter:
            counter.find_owner = partial(find_owner, config.capture)
    with _switching_off(state, "capture"):
        if worker.vllm_config.speculative_config and _is_last_stage():
            install_proposers(worker.model_runner)
    with _switching_off(state, "swap"):
        _identify_draft(worker, config.registry)
    # The target's fingerprint is stored in records, and is used to refuse drafts for a different
    # target. If it cannot be computed, both capture and swaps are switched off.
    with _switching_off(state, *(["capture", "swap"] if config.capture.is_on else ["swap"])):
        served = worker.vllm_config.model_config
        target = TargetFolder(name=served.model, folder=loaded_folder(served))
        state.target_fingerprint = target.fingerprint
        if config.registry is not None or config.targets:  # only swaps and loads use it
            state.target_lineage = target.lineage
    with _switching_off(state, "swap"):
        state.target_checksum = checksum(worker.model_runner.get_model())
    # Install it before capture, because otherwise, records would still name weights that were
    # replaced.
    with _switching_off(state, *(["capture", "swap"] if config.capture.is_on else ["swap"])):
        watch_target(worker)
    if config.capture.is_on and not state.capture_off:
        with _switching_off(state, "capture"):
            _start_capture(worker, config.capture)
    with _switching_off(state, "swap"):
        watch_sleep(worker)
    if getattr(worker, "weight_transfer_engine", None) is not None:
        roots = [*config.targets, *([config.registry] if config.registry else [])]
        watch_pushes(worker, roots)
    # e.g. no safetensors files; weights from files are then not compared.
    with suppress(Exception):
        state.target_tensors = describe_target(loaded_folder(worker.vllm_config.model_config))
    with _switching_off(state, "swap"):
        if config.registry is not None:
            _prepare_cache(worker, config.swap.cache)
            _prepare_staging(worker)
    with suppress(Exception):  # lines of the log
        _tell_costs(worker)
    what = "records" if state.capture else "records nothing"
    logger.info(
        "redraft: vLLM's %s, %s, draft %s", state.runner, what, state.draft_version or "none"
    )


@contextmanager
def _switching_off(state: WorkerState, *names: str) -> Iterator[None]:
    """Turn an exception in the block into the reason why capture, swaps or both are off."""
    try:
        yield
    except Exception as error:
        reason = (
            str(error)
            if isinstance(error, ValueError | OSError)
            else f"{type(error).__name__}: {error}"
        )
        for name in names:
            setattr(state, f"{name}_off", getattr(state, f"{name}_off") or reason)
        logger.exception("redraft: %s off, serving continues: %s", " and ".join(names), reason)


def _identify_draft(worker: Any, registry: Path | None) -> None:
    state: WorkerState = worker.redraft
    speculative = worker.vllm_config.speculative_config
    if not speculative or not speculative.draft_model_config:
        return
    # Name of a draft from outside the registry, used until the first swap.
    state.draft_version = "start"
    folder = loaded_folder(speculative.draft_model_config).resolve()
    if registry is not None and folder.parent == registry.resolve():
        state.draft_version = folder.name
        with suppress(OSError):
            state.manifest_sha256 = hash_manifest(folder)
    family = find_method(speculative.method, parallel_drafting=speculative.parallel_drafting)
    is_target = folder == loaded_folder(worker.vllm_config.model_config).resolve()
    if family is not None and family.is_in_target and is_target:
        raise ValueError(
            f"the {family.title} layer is served from the target's folder: start the server with "
            "--registry, to which a learner has exported the layer"
        )
    state.loaded_version, state.draft = state.draft_version, Layout.read(folder)


def _prepare_cache(worker: Any, cache: SwapCache) -> None:
    """Choose how swaps treat the cache, and prepare to keep a part of it.

    Raises:
        ValueError: `cache` requires a draft that can process the context again, and this draft
            cannot.
    """
    state: WorkerState = worker.redraft
    if worker.model_runner.get_draft_model() is None:
        return
    speculative = worker.vllm_config.speculative_config
    family = find_method(speculative.method, parallel_drafting=speculative.parallel_drafting)
    if cache == "auto" and family and family.keeps_cache:
        cache = "keep"
    if cache in ("auto", "draft"):
        try:
            if family is None or family.is_head:
                raise ValueError(
                    "--swap.cache draft supports only standalone drafts: use keep or clear for a head"
                )
            state.rereader = install_reread(worker.model_runner)
            cache = "draft"
        except ValueError as error:
            if cache == "draft":
                raise
            logger.info("redraft: a swap clears the cache (%s)", error)
            cache = "clear"
    state.swap_cache = cache


def _prepare_staging(worker: Any) -> None:
    """Find this rank's slices of a draft, and pin memory for them before serving starts."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    state: WorkerState = worker.redraft
    draft, target = worker.model_runner.get_draft_model(), worker.model_runner.get_model()
    if draft is None or state.draft is None:
        return
    shared, num_ranks = shared_modules(draft, target), get_tensor_model_parallel_world_size()
    if num_ranks > 1:
        # Some loaders read vLLM's current config.
        with set_current_vllm_config(worker.vllm_config):
            slices = trace_slices(draft, target, list_weights(state.draft.folder, shared))
        # The files may differ between machines, so with several machines every rank compares all
        # of them.
        one_machine = worker.vllm_config.parallel_config.nnodes == 1
        state.share = Share(
            slices=slices,
            rank=get_tensor_model_parallel_rank() if one_machine else 0,
            num_ranks=num_ranks if one_machine else 1,
        )
    state.memory = HostMemory(pin_on(worker.device))
    num_bytes = count_bytes(plan_folder(state.draft.folder, state.share.slices, shared))
    state.memory.reserve(num_bytes)
    kind = "pinned" if state.memory.pinned_bytes else "pageable"
    logger.info("redraft: a swap reads %.3f GB of a draft into %s memory", num_bytes / 1e9, kind)
    state.draft_bytes = {
        "weights": num_bytes,
        "kv_cache": (num_cached := count_cache(draft, target)),
    }
    if _is_recording_rank():
        sizes = num_bytes / 1e9, num_cached / 1e9
        logger.info(
            "redraft: the draft takes %.3f GB for weights and %.3f GB of the KV cache", *sizes
        )


def _tell_costs(worker: Any) -> None:
    config = worker.vllm_config
    if not config.speculative_config or not _is_recording_rank():
        return
    for line in list_losses(config, on_cpu=worker.device.type == "cpu"):
        logger.info("redraft: %s", line)
    draft, target = worker.model_runner.get_draft_model(), worker.model_runner.get_model()
    if draft is not None:
        mine, others = count_cache(draft, target), count_cache(target, draft)
        logger.info("redraft: %s", describe_cache(config, mine / (mine + others)))


def _start_capture(worker: Any, config: CaptureConfig) -> None:
    state: WorkerState = worker.redraft
    if not _is_recording_rank():
        return
    capture = Capture(
        config, state.server_id, state.target_fingerprint, state.draft_version, worker.device
    )
    capture.kept_states = _count_kept_states(worker)
    install_capture(worker.model_runner, capture)
    capture.start()
    stop_before_shutdown(worker, capture.stop)
    state.capture = capture


def _count_kept_states(worker: Any) -> int:
    """Return how many of a segment's last states the first rows of the next segment read.

    If the draft has a window, these are all the states in the window.
    """
    state, speculative = cast(WorkerState, worker.redraft), worker.vllm_config.speculative_config
    if state.draft is None:
        return KEPT_STATES
    family = find_method(speculative.method, parallel_drafting=speculative.parallel_drafting)
    return max(KEPT_STATES, family.needed_states(state.draft.settings) if family else 0)


def redraft_status(worker: Any) -> dict[str, Any]:
    """Return the versions that this rank serves, and capture's counters."""
    look_at_target(worker)  # checked here, because nothing else checks while the engine is idle
    state: WorkerState = worker.redraft
    speculative = worker.vllm_config.speculative_config
    counter = find_state(worker.model_runner, RunnerState).counter
    return {
        **{name: getattr(state, name) for name in SHOWN},
        "draft_intact": state.is_draft_intact,
        "draft_bytes": state.draft_bytes,
        "asleep": bool(state.asleep),
        "method": speculative.method if speculative else None,
        "num_speculative_tokens": speculative.num_speculative_tokens if speculative else 0,
        "draft_sample_method": speculative.draft_sample_method if speculative else None,
        "target_intact": state.is_target_intact,
        "live_answers": dict(counter.counts) if counter else None,
        "reread_tokens": state.rereader.num_tokens if state.rereader else 0,
        "reread_error": state.rereader.error if state.rereader else "",
        "capture": state.capture.status() if state.capture else None,
        "confidence": state.capture.calibration.status() if state.capture else [],
    }


def redraft_forget(worker: Any, tenant: str) -> int:
    """Drop a tenant's text from the live counts. Returns the number of runs dropped."""
    counter = find_state(worker.model_runner, RunnerState).counter
    return counter.forget(name_owner(tenant)) if counter else 0


def redraft_move(worker: Any, label: str = "", folder: str = "", draft: str = "") -> dict[str, Any]:
    """Load target weights from a folder, name them, and load a draft from another folder.

    Each of these happens only if its argument is given. The method is for a trainer that runs the
    engine in its own process, pauses it, and empties the cache. Returns `{"error",
    "target_version", "draft_version"}`. After an error on any rank, the ranks may differ: repeat
    the call.
    """
    state: WorkerState = worker.redraft
    loaded = load_target(worker, folder) if folder else {}
    error = str(loaded.get("error", ""))
    if loaded.get("touched"):
        load_target(worker, None)
    if label and not error:
        name_target(worker, label)
    if draft and not error:
        error = _swap_at_once(worker, draft)
    return {
        "error": error,
        "target_version": state.target_version,
        "draft_version": state.draft_version,
    }


def _swap_at_once(worker: Any, folder: str) -> str:
    """Read and load a draft. Returns the error, or an empty string if there is none."""
    state: WorkerState = worker.redraft
    swapper = uuid.uuid4().hex
    done = redraft_stage(worker, folder, swapper)
    if done is not None and done["ok"]:
        assert state.staging is not None
        state.staging.join()
        done = (
            {"ok": False, "error": state.staging.error}
            if state.staging.error
            else redraft_load(worker, folder)
        )
    if done is None or done["ok"]:
        redraft_commit(worker, Path(folder).name)
    redraft_discard(worker, swapper)
    return "" if done is None else str(done.get("error", ""))


def redraft_stage(worker: Any, folder: str | None, swapper: str) -> dict[str, Any] | None:
    """Start reading a draft into memory. If `folder` is None, read the last good draft.

    Return `{"ok": True}`, or `{"ok": False, "error"}`, with `"is_busy": True` if an abandoned read
    of the same draft has not ended yet; the caller then tries again. Pipeline stages before the
    last have no draft, so this method and the following ones return None there. This method returns
    before the read ends, because the engine runs no step while a worker method runs. `swapper` is
    the id of the API process. Other processes are refused until that process calls
    `redraft_discard`, or until its lease ends.
    """
    state: WorkerState = worker.redraft
    if _is_stage_without_draft(worker):
        return None
    if (
        state.swapper not in ("", swapper)
        and time.monotonic() - state.swapped_from_s < SWAP_LEASE_S
    ):
        return {
            "ok": False,
            "error": "another API process of this server is swapping: wait, then swap again",
        }
    # A swap by this API process, or one with an expired lease, may be unfinished: free its memory
    # first.
    _end_swap(state)
    try:
        _require_swappable(worker)
        assert state.draft is not None
        source = Path(folder) if folder else state.draft.folder
        # There is only one reader per version, because repeated requests for a version must leave
        # room for others.
        if any(staging.folder == source for staging in state.stuck):
            return {
                "ok": False,
                "is_busy": True,
                "error": f"an earlier read of {source} has not ended yet",
            }
        if len(state.stuck) >= MAX_STUCK_READS:
            raise ValueError(
                f"{len(state.stuck)} drafts are still being read: the registry's storage does not respond"
            )
    except ValueError as error:
        return {"ok": False, "error": str(error)}
    state.swapper, state.swapped_from_s = swapper, time.monotonic()
    # Read this from the modules themselves, because vLLM decides at start which of them the draft
    # shares with the target.
    shared = shared_modules(worker.model_runner.get_draft_model(), worker.model_runner.get_model())
    state.staging = Staging(source, state.draft, shared, state.memory, state.share)
    return {"ok": True}


def redraft_staged(worker: Any) -> dict[str, Any] | None:
    """Return the state of the read: `{"done", "error", "damaged", "manifest_sha256"}`."""
    if _is_stage_without_draft(worker):
        return None
    staging: Staging | None = worker.redraft.staging
    if staging is None:
        return {
            "done": True,
            "error": "no draft is being read",
            "damaged": False,
            "manifest_sha256": "",
        }
    return {
        "done": staging.is_done,
        "error": staging.error,
        "damaged": staging.is_damaged,
        "manifest_sha256": staging.manifest_sha256,
    }


def redraft_discard(worker: Any, swapper: str) -> None:
    """End this API process's swap, if it has one, and free the staged draft's memory."""
    if worker.redraft.swapper == swapper:
        _end_swap(worker.redraft)


def _end_swap(state: WorkerState) -> None:
    state.swapper = ""
    if state.staging is not None:
        state.staging.discard()
        # A hung read cannot be stopped, so it counts until its thread ends.
        state.stuck.append(state.staging)
        state.staging = None
    state.stuck = [staging for staging in state.stuck if not staging.is_done]


def redraft_load(worker: Any, folder: str, has_moved: bool = False) -> dict[str, Any] | None:
    """Load the draft in `folder` from memory into the model.

    Return `{"ok", "load_ms", ...}`, or `{"ok": False, "error", "touched"}`. `has_moved` means that
    the target was loaded in the same pause. The draft counts as intact only after `redraft_commit`,
    because another rank may have failed.
    """
    state: WorkerState = worker.redraft
    if _is_stage_without_draft(worker):
        return None
    staging = state.staging
    if state.asleep:
        return {
            "ok": False,
            "touched": False,
            "error": "the engine has gone to sleep: wake it up, then swap again",
        }
    if not is_clear(worker):
        return {"ok": False, "touched": False, "error": UPDATING}
    if staging is None or staging.folder != Path(folder) or not staging.is_done or staging.error:
        return {"ok": False, "touched": False, "error": f"{folder} was not read into memory"}
    return _load(worker, staging, state.target_watch if has_moved else None)


def redraft_restore(worker: Any) -> dict[str, Any] | None:
    """Reload the last good draft from memory after a load has failed on some rank."""
    state: WorkerState = worker.redraft
    assert state.draft is not None
    loaded = redraft_load(worker, str(state.draft.folder))
    if loaded is not None:
        state.is_draft_intact = loaded["ok"]
    return loaded


def redraft_commit(worker: Any, version: str) -> None:
    """Record the draft that all ranks have loaded as the last good one."""
    state: WorkerState = worker.redraft
    if _is_stage_without_draft(worker):
        state.draft_version = version
        return
    assert state.staging is not None
    state.loaded_version = version
    state.draft = state.staging.layout
    state.manifest_sha256 = state.staging.manifest_sha256
    state.is_draft_intact = (
        not state.asleep
    )  # if the engine went to sleep after the load, the draft is loaded when it wakes up
    state.num_swaps += 1
    state.name_draft(version)


def _load(worker: Any, staging: Staging, known: TargetWatch | None) -> dict[str, Any]:
    """Load a staged draft into the model, and check whether the target weights have changed.

    `known` contains the checksums of the current target weights.
    """
    state, target = worker.redraft, worker.model_runner.get_model()
    began_s = time.perf_counter()
    state.is_draft_intact = False
    try:
        # Compare with the state before the load, not with the start, because replicas move experts
        # between them.
        before = known.digest if known else checksum(target)
        load_draft(worker, staging.tensors)
        after = checksum(target) if not known else before if known.is_whole() else "changed"
    except Exception as error:
        # The load may already have overwritten a part. `touched` makes the routes restore the last
        # good draft.
        logger.exception("loading draft %s failed", staging.folder)
        return {"ok": False, "touched": True, "error": f"{type(error).__name__}: {error}"}
    load_ms = 1e3 * (time.perf_counter() - began_s)
    state.target_checksum = after
    # Once False, this stays False, because only a restart restores the target's weights.
    state.is_target_intact = state.is_target_intact and after == before
    return {"ok": True, "load_ms": load_ms, "checksum_before": before, "checksum_after": after}


def _is_stage_without_draft(worker: Any) -> bool:
    """Whether this is a pipeline stage before the last. Only the last stage has the draft."""
    # On the last stage, a missing draft is an error, which `_require_swappable` reports.
    return worker.model_runner.get_draft_model() is None and not _is_last_stage()


def _require_swappable(worker: Any) -> None:
    if worker.redraft.draft is None or worker.model_runner.get_draft_model() is None:
        raise ValueError("this server has no draft model to swap: restart it with one")
    speculative = worker.vllm_config.speculative_config
    if getattr(speculative, "draft_lm_head_quantization", None):
        raise ValueError(
            "the draft has a quantised copy of the target's output head "
            "(draft_lm_head_quantization), which a swap would not update: restart the server "
            "without it"
        )
    if worker.redraft.asleep:
        raise ValueError("the engine is sleeping: wake it up, then swap again")
    if not is_clear(worker):
        raise ValueError(UPDATING)


def _is_recording_rank() -> bool:
    """Whether this rank records. One per tensor-parallel group does: all have the same logits."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return bool(get_tensor_model_parallel_rank() == 0 and _is_last_stage())


def _is_last_stage() -> bool:
    """Whether this rank is in the last pipeline stage, which computes logits and drafts."""
    from vllm.distributed import get_pp_group

    return bool(get_pp_group().is_last_rank)
