"""Track the version of the target's weights.

Records contain the version, LABEL@DIGEST, which is empty for the weights from the server's start.

    reload_weights, load_weights, a weight update, sleep at level 2 ─► has_moved
    the end of an update, else the next engine step ─► settle: tied heads, digest, version ─► records, status
    a step or status, at most once in LOOK_S ─► a matrix and the next pieces: new sum, e.g. after `param.copy_`
                                                ─► settle
    a trainer names its weights (EngineCore.set_weight_version) ─► label

Another process may replace the weights of a running server: reinforcement learning does so after
every step. The digest identifies them: weights that return get their old version, and servers with
the same weights in the same shards agree.
"""

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redraft.files.target_folder import TARGET_VERSION
from redraft.online.engine.copies import repack_tied_heads
from redraft.online.engine.swap import (
    clear_cache,
    compute_sums,
    end_load,
    find_weights,
    is_finite,
    loading,
)
from redraft.online.engine.trainer_files import describe_target, require_whole

logger = logging.getLogger("vllm.redraft")

PIECE_BYTES = 32 << 20
"""Maximum number of bytes to read from a weight at once."""

LOOK_S = 1.0
"""Minimum time in seconds between two checks of the weights while the engine computes. Checks do
not wake an idle worker, because vLLM's workers spin for a second after each message.
"""

UPDATES = ("reload_weights", "start_weight_update", "update_weights", "finish_weight_update")
"""Methods of vLLM's worker that replace weights."""

LOADS = (*UPDATES, "redraft_load_target", "redraft_move")

MAX_LABEL_CHARS = 100


class TargetWatch:
    """Checksums of a model's weights, piece by piece, and the version that the weights have."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.has_moved = False
        """Whether weights may have been written since `settle`."""
        self.is_torn = False
        """Whether the last write failed. It stays true until a write succeeds or the weights turn
        out to be the old ones.
        """
        self.not_finite = ""
        """The first weight with values that are not finite; empty if there is none. Weights that
        were not finite at the start are ignored.
        """
        self.is_cache_spoiled = False
        """Whether the engine has computed keys and values with weights that are not finite."""
        self.digest = ""
        self.label = ""
        """The trainer's name for these weights."""
        self._pieces: list[tuple[str, int, int]] = []
        """Name, first row and end row of each piece; the end is 0 for a weight that is not
        split.
        """
        matrices = []
        for name, read in find_weights(model).items():
            tensor = read()
            rows = len(tensor) if tensor.dim() else 1
            num_rows = max(1, rows * PIECE_BYTES // max(1, tensor.nbytes))
            ends = [(first, first + num_rows) for first in range(0, rows, num_rows)]
            if tensor.dim() > 1:
                matrices.append(len(self._pieces))
            self._pieces += [(name, *end) for end in ends] if len(ends) > 1 else [(name, 0, 0)]
        # Take it from the middle, so that it is a linear layer's weight, because some training runs
        # leave embeddings and norms unchanged.
        self._watched = matrices[len(matrices) // 2 :][:1]
        self._next = 0
        self.next_look_s = 0.0
        self._never_finite: list[int] | None = None
        self.settle()
        self._start = self.digest

    def settle(self) -> None:
        """Record the current weights.

        Half-written weights get no digest, because they are never served intentionally.
        """
        self._sums = self._compute(range(len(self._pieces)))
        found = self._list_not_finite()
        if self._never_finite is None:
            self._never_finite = found
        new = (i for i in found if i not in self._never_finite)
        self.not_finite = next((self._pieces[i][0] for i in new), "")
        digest = hashlib.sha256(repr((self._pieces, self._sums)).encode()).hexdigest()[:12]
        if digest == self.digest:
            self.is_torn = False
        elif not self.is_torn:
            self.digest, self.label = digest, ""
        self.has_moved = False

    @property
    def version(self) -> str | None:
        """Return the name of the weights in records.

        The name is empty for the weights at the start, and None for weights that are half-written
        or not finite.
        """
        if self.is_torn or self.not_finite:
            return None
        return "" if self.digest == self._start else f"{self.label}@{self.digest}"

    def is_due(self) -> bool:
        """Return whether the last check was at least LOOK_S ago.

        If so, the interval restarts now.
        """
        now_s = time.monotonic()
        if now_s < self.next_look_s:
            return False
        self.next_look_s = now_s + LOOK_S
        return True

    def is_whole(self) -> bool:
        """Whether all weights are unchanged since the last `settle`."""
        return self._compute(range(len(self._pieces))) == self._sums

    def is_changed(self) -> bool:
        """Whether the watched matrix or the next piece has changed since the last `settle`."""
        looked = [*self._watched, *([self._next] if self._pieces else [])]
        self._next = (self._next + 1) % max(1, len(self._pieces))
        return self._compute(looked) != [self._sums[i] for i in looked]

    def _compute(self, indices: Sequence[int]) -> list[list[int]]:
        sums = [compute_sums(piece) for piece in self._read(indices)]
        # Copy all sums to the host at once, because every copy waits for the device.
        found: list[list[int]] = torch.stack(sums).tolist() if sums else []
        return found

    def _list_not_finite(self) -> list[int]:
        """Return the indices of the pieces that contain non-finite values."""
        flags = [is_finite(piece) for piece in self._read(range(len(self._pieces)))]
        found = torch.stack(flags).tolist() if flags else []
        return [i for i, finite in enumerate(found) if not finite]

    def _read(self, indices: Sequence[int]) -> Iterator[Tensor]:
        # Look it up by name each time, because an update may replace the first tensor by a
        # different one.
        readers = find_weights(self.model)
        for name, first, end in (self._pieces[i] for i in indices):
            tensor = readers[name]()
            yield tensor[first:end] if end else tensor


@contextmanager
def writing(worker: Any, *, ends: bool = True) -> Iterator[None]:
    """Context for a block that writes weights and may fail half-way.

    With `ends`, a successful block also repairs an earlier failure.
    """
    watch = worker.redraft.target_watch
    watch.has_moved = True
    try:
        yield
    except BaseException:
        watch.is_torn = True
        raise
    watch.is_torn &= not ends


def end_reload(worker: Any) -> None:
    """Restore the old weights of layers that still wait for new ones, after a load has failed.

    vLLM leaves these layers on `meta`. With such layers, the next step would crash the engine, and
    the next load would count the tensors that they have already received.
    """
    runner, vllm_config = worker.model_runner, worker.vllm_config
    with loading(worker):
        end_load(runner.get_model(), vllm_config.model_config)
        if (draft := runner.get_draft_model()) is not None:
            end_load(draft, vllm_config.speculative_config.draft_model_config)


def is_clear(worker: Any) -> bool:
    """Whether the target weights are complete: no update is running, and the last one succeeded."""
    watch = worker.redraft.target_watch
    if watch is not None and watch.has_moved:
        settle(worker)
    return worker.redraft.target_version is not None and not worker._weight_update_active


def note_move(worker: Any) -> None:
    """Mark the weights as moved, so that they get a new name before the next step."""
    if worker.redraft.target_watch is not None:
        worker.redraft.target_watch.has_moved = True


@torch.no_grad()
def settle(worker: Any) -> None:
    """Determine the version of the current weights, for records from the next step on.

    The function raises no error, because steps and updates call it.

    During an update, or if the weights cannot be read, the version is None.
    """
    state = worker.redraft
    watch, version = state.target_watch, None
    if watch is None:
        return
    if not worker._weight_update_active and "weights" not in state.asleep:
        try:
            with torch.inference_mode(False):
                # vLLM's CPU build has packed them at start, and a load has no tensor for them.
                repack_tied_heads(watch.model)
                watch.settle()
            version = watch.version
            if watch.is_cache_spoiled and not watch.not_finite:
                # Attention multiplies the entries of freed KV cache blocks by 0, and NaN times 0 is
                # still NaN.
                clear_cache(watch.model, worker.model_runner.get_draft_model())
                watch.is_cache_spoiled = False
        except Exception:
            if state.target_version is not None:  # not at every step
                logger.exception(
                    "redraft: the target weights cannot be read, and nothing is recorded"
                )
    if version != state.target_version:
        logger.info(
            "redraft: the target weights are %s",
            version or ("unclear" if version is None else "the start's"),
        )
        if watch.not_finite:
            logger.error(
                "redraft: %s has non-finite values: load different weights", watch.not_finite
            )
    _set_version(worker, version)


def look_at_target(worker: Any) -> None:
    """If a check is due and the weights have changed without an update, settle. Raises nothing."""
    state = worker.redraft
    if state.target_watch is None or "weights" in state.asleep or worker._weight_update_active:
        return
    if not state.target_watch.is_due():
        return
    try:
        # `has_moved` stays set if an executor calls the runner directly, as Ray's does.
        is_changed = state.target_watch.has_moved or state.target_watch.is_changed()
    except Exception:
        is_changed = True  # e.g. a half-loaded weight, which `settle` logs
    if is_changed:
        settle(worker)


def load_target(worker: Any, folder: str | None) -> dict[str, Any]:
    """Load the target weights from a folder.

    If `folder` is None, reload the previous weights, because a rank has failed.

    Return `{"ok": True}` or `{"ok": False, "error", "touched"}`, where `touched` means that the
    weights may be partly updated.
    """
    state, config = worker.redraft, worker.vllm_config.model_config
    if folder is not None:
        if "weights" in state.asleep or worker._weight_update_active:
            error = (
                "the engine is asleep, or an update of the target weights is open: wake "
                "it up or finish the update, then load again"
            )
            return {"ok": False, "error": error, "touched": False}
        if state.target_tensors:
            try:
                require_whole(describe_target(Path(folder)), state.target_tensors)
            except (OSError, ValueError) as refusal:
                return {"ok": False, "error": f"{folder}: {refusal}", "touched": False}
        state.target_source = (config.model, config.model_weights, config.revision)
    before = state.target_source
    try:
        if folder is None:
            config.model, config.model_weights, config.revision = before
        worker.reload_weights(weights_path=folder)
    except Exception as error:
        logger.exception(
            "redraft: the target weights could not be loaded from %s", folder or before[0]
        )
        # Otherwise, vLLM would reload from this folder the next time.
        config.model, config.model_weights, config.revision = before
        is_touched = state.target_watch is None or not is_clear(worker)
        return {"ok": False, "error": f"{type(error).__name__}: {error}", "touched": is_touched}
    if folder is not None and state.target_watch is not None and state.target_watch.not_finite:
        config.model, config.model_weights, config.revision = before
        told = f"{folder}: {state.target_watch.not_finite} has non-finite values"
        return {"ok": False, "error": told, "touched": True}
    return {"ok": True}


def name_target(worker: Any, label: str) -> None:
    """Set the trainer's name for the current weights."""
    state = worker.redraft
    if state.target_watch is not None:
        state.target_watch.next_look_s = 0.0  # the trainer may have just written them
        look_at_target(worker)
    if state.target_watch is not None:
        # Like a draft's name, it is written to the journal and the metrics.
        label = "".join(char if "!" <= char <= "~" else "_" for char in label)
        state.target_watch.label = label[:MAX_LABEL_CHARS]
        if state.target_version is not None:
            _set_version(worker, state.target_watch.version)


def _set_version(worker: Any, version: str | None) -> None:
    worker.redraft.target_version = version
    if worker.redraft.capture:
        worker.redraft.capture.target_version = version
    if isinstance(worker.vllm_config.additional_config, dict):
        # These states are the ones that `redraft serve-features` sends.
        worker.vllm_config.additional_config[TARGET_VERSION] = version


def update_rank(
    worker: Any, method: str, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, str, bool | None]:
    """Call a method in LOADS, and return (result, error, state).

    The state says whether the call succeeded. The state is None if the target weights may be partly
    updated, or if the update was for the draft.
    """
    result, error = None, ""
    try:
        result = getattr(worker, method)(*args, **kwargs)
    except Exception as failure:
        logger.exception("redraft: %s failed", method)
        error = f"{type(failure).__name__}: {failure}"
    is_done = not error and not (isinstance(result, dict) and result.get("error"))
    is_of_draft = method in UPDATES[2:] and worker._weight_update_is_draft
    return result, error, None if is_of_draft or not is_clear(worker) else is_done


def doubt_target(worker: Any) -> None:
    """Remove the weights' name until a load succeeds, because the ranks have different weights."""
    if (watch := worker.redraft.target_watch) is not None:
        watch.is_torn, watch.digest = True, ""
        settle(worker)


def register_backend() -> None:
    """Register vLLM's weight-transfer backend `redraft`, with which trainers send files.

    It is safe to call again.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "redraft" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "redraft", "redraft.online.engine.weight_transfer", "Files"
        )
