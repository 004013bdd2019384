"""Wrappers of one worker's methods: loads, steps, sleep and shutdown.

A sleeping worker is not called, and its draft is restored when it wakes up. At sleep level 1, vLLM
moves all weights to the host. At level 2, it drops them. The client that wakes the server reloads
the target (`reload_weights`), but not the draft. The draft would then propose random tokens, and
only acceptance would show this.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from redraft.engine.hooks import Wrap, around, hook
from redraft.files.artifact import MANIFEST, verify
from redraft.online.engine.reread import Rereader
from redraft.online.engine.swap import load_draft
from redraft.online.engine.target_watch import (
    UPDATES,
    TargetWatch,
    end_reload,
    look_at_target,
    note_move,
    settle,
    writing,
)

logger = logging.getLogger("vllm.redraft")

PARTS = frozenset(("weights", "kv_cache"))  # tags of the memory that a sleeping worker releases


def watch_sleep(worker: Any) -> None:
    """Keep `worker.redraft.asleep` up to date, and reload the draft after sleep at level 2."""
    state = worker.redraft

    def note_sleep(sleep: Any) -> Any:
        def sleep_and_note(level: int = 1) -> None:
            sleep(level)
            state.asleep |= PARTS
            if level == 2:
                note_move(worker)
            if level == 2 and _has_draft(worker):
                state.is_draft_intact = False

        return sleep_and_note

    def load_awake(wake_up: Any) -> Any:
        def wake_up_with_draft(tags: list[str] | None = None) -> None:
            wake_up(tags)
            # Without tags, vLLM wakes up everything.
            state.asleep -= set(tags or PARTS)
            # The KV cache may still be asleep, but loading a draft touches only weights.
            if "weights" not in state.asleep and not state.is_draft_intact and _has_draft(worker):
                _load_again(worker)

        return wake_up_with_draft

    def note_discard(discard: Any) -> Any:
        def discard_and_note(tags: tuple[str, ...]) -> None:
            discard(tags)
            state.asleep |= set(tags)

        return discard_and_note

    hook(worker, "sleep", sleep=note_sleep, wake_up=load_awake, discard=note_discard)


def _has_draft(worker: Any) -> bool:
    return worker.redraft.draft is not None and worker.model_runner.get_draft_model() is not None


def _load_again(worker: Any) -> None:
    """Reload the last good draft from its folder.

    The server serves nothing in the meantime, so this may wait for the storage.
    """
    state, folder = worker.redraft, worker.redraft.draft.folder
    try:
        if (folder / MANIFEST).is_file():
            verify(folder)
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} has no weights")
        tensors = itertools.chain.from_iterable(load_file(file).items() for file in files)
        load_draft(worker, dict(tensors))
    except Exception:  # the target can serve without a good draft, and the status reports this
        logger.exception("redraft: draft %s could not be reloaded after sleep", folder)
    else:
        state.is_draft_intact = True
        if state.draft_version != state.loaded_version:
            state.name_draft(state.loaded_version)
        logger.info("redraft: draft %s was reloaded after sleep", folder)


def watch_target(worker: Any) -> None:
    """Keep the version of the target weights up to date.

    The version is determined again after each of the methods in UPDATES and, after any other load,
    before the next step.
    """
    if getattr(worker.vllm_config.parallel_config, "enable_eplb", False):
        return  # vLLM moves replicas of experts between ranks
    model = worker.model_runner.get_model()
    worker.redraft.target_watch = watch = TargetWatch(model)

    def note_load(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_and_note(*args: Any, **kwargs: Any) -> Any:
            with writing(worker):
                return load(*args, **kwargs)

        return load_and_note

    def look_before(execute: Callable[..., Any]) -> Callable[..., Any]:
        def look_and_execute(*args: Any, **kwargs: Any) -> Any:
            if watch.has_moved:
                settle(worker)
            else:
                look_at_target(worker)
            watch.is_cache_spoiled |= bool(watch.not_finite)
            return execute(*args, **kwargs)

        return look_and_execute

    updates = {name: _settling_after(worker, name) for name in UPDATES}
    hook(worker, "target_watch", execute_model=look_before, **updates)
    hook(model, "target_watch", load_weights=note_load)


def _settling_after(worker: Any, name: str) -> Wrap:
    ends = name in ("reload_weights", "update_weights")

    def wrap(update: Callable[..., Any]) -> Callable[..., Any]:
        def update_and_settle(*args: Any, **kwargs: Any) -> Any:
            with writing(worker, ends=ends):
                try:
                    result = update(*args, **kwargs)
                except BaseException:
                    if ends or name == "finish_weight_update":
                        end_reload(worker)
                    raise
            settle(worker)
            return result

        return update_and_settle

    return wrap


def watch_pushes(worker: Any, roots: Sequence[Path] = ()) -> None:
    """Name the drafts that trainers push through vLLM `pushed-1`, `pushed-2` and so on.

    Records made with them count for no version in the registry. Updates from files may use only
    files within `roots`.
    """
    state, numbers = worker.redraft, itertools.count(1)
    # Our backend loads through this method.
    worker.weight_transfer_engine.worker, worker.weight_transfer_engine.roots = worker, roots
    is_ours = worker.vllm_config.weight_transfer_config.backend == "redraft"
    kept = {} if is_ours or worker.model_runner.get_draft_model() is None else _keep_pushes(worker)

    def name_pushes(finish: Callable[..., Any]) -> Callable[..., Any]:
        def finish_and_name(*args: Any, **kwargs: Any) -> Any:
            if not worker._weight_update_is_draft:
                return finish(*args, **kwargs)
            state.is_draft_intact = False
            result = finish(*args, **kwargs)
            state.manifest_sha256 = ""
            state.name_draft(f"pushed-{next(numbers)}")
            if not is_ours:
                load_draft(worker, kept)
                kept.clear()
            state.is_draft_intact = True
            return result

        return finish_and_name

    hook(worker, "pushes", finish_weight_update=name_pushes)


def _keep_pushes(worker: Any) -> dict[str, Tensor]:
    """Keep vLLM's draft updates from loading anything.

    The updates would overwrite the target's modules and copy weights without values. Returns the
    dictionary in which each update puts its tensors for `load_draft`.
    """
    draft, kept = worker.model_runner.get_draft_model(), dict[str, Tensor]()

    def keep(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def load_or_keep(weights: Any) -> Any:
            if not (worker._weight_update_active and worker._weight_update_is_draft):
                return load(weights)
            kept.update((name, tensor.to("cpu", copy=True)) for name, tensor in weights)
            return set()

        return load_or_keep

    hook(draft, "pushes", load_weights=keep)
    return kept


def stop_before_shutdown(worker: Any, stop: Callable[[], None]) -> None:
    """Call `stop` before a worker shuts down."""

    def stop_before(shutdown: Callable[[], None]) -> Callable[[], None]:
        def stop_and_shutdown() -> None:
            stop()
            shutdown()

        return stop_and_shutdown

    hook(worker, "capture", shutdown=stop_before)


def reread_before_steps(rereader: Rereader) -> None:
    """Let `rereader` follow each step of its runner."""
    execute = around(rereader, "next_execute", rereader.execute)
    hook(rereader.runner, "reread", execute_model=execute)
