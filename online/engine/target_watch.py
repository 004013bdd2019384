"""Are the target's weights still those of the start? Records carry the fingerprint, and drafts were trained for it.

    every LOOK_S seconds ─► the next pieces of the weights ─┐
    a swap, an update of weights ─► all of them ────────────┴─► another sum: capture and swaps are off, with the reason

Another process may replace the weights of a running server: reinforcement learning does so after every step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from redraft.online.engine.swap import compute_sums, find_weights

logger = logging.getLogger("vllm.redraft")

PIECE_BYTES = 32 << 20
"""Largest part of a weight to read at once."""

PIECES_AT_ONCE = 4
"""Parts of a look. The engine makes no step meanwhile: 10 ms on a CPU, less than 1 ms on a GPU."""

CHANGED = "the target's weights are not those of its start: restart this server with its present target"

UPDATES = ("reload_weights", "update_weights", "finish_weight_update")
"""Methods of vLLM's worker, which replace weights."""


class TargetWatch:
    """The sums of a model's weights when this was made, to be compared piece by piece."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._pieces: list[tuple[str, int, int]] = []
        """Name, first row and end; an uncut weight has the end 0."""
        for name, read in find_weights(model).items():
            tensor = read()
            rows = len(tensor) if tensor.dim() else 1
            num_rows = max(1, rows * PIECE_BYTES // max(1, tensor.nbytes))
            ends = [(first, first + num_rows) for first in range(0, rows, num_rows)]
            self._pieces += [(name, *end) for end in ends] if len(ends) > 1 else [(name, 0, 0)]
        self._sums = self._compute(range(len(self._pieces)))
        self._next = 0

    def is_changed(self, *, everywhere: bool = False) -> bool:
        """Whether the next pieces, or all of them, differ from the start."""
        count = len(self._pieces)
        num_looked = count if everywhere else min(count, PIECES_AT_ONCE)
        looked = [(self._next + i) % count for i in range(num_looked)]
        self._next = (self._next + num_looked) % max(1, count)
        return self._compute(looked) != [self._sums[i] for i in looked]

    def _compute(self, indices: Sequence[int]) -> list[list[int]]:
        # Found by name each time: an update may put another tensor in the place of the first.
        readers = find_weights(self.model)
        sums = []
        for name, first, end in (self._pieces[i] for i in indices):
            tensor = readers[name]()
            sums.append(compute_sums(tensor[first:end] if end else tensor))
        # all sums in one copy to the host: each would wait for the device
        found: list[list[int]] = torch.stack(sums).tolist() if sums else []
        return found


def watch_target(worker: Any) -> None:
    """Keep the sums of the target's weights, and compare all of them after each of UPDATES."""
    if getattr(worker.vllm_config.parallel_config, "enable_eplb", False):
        return  # replicas of experts move between ranks
    worker.redraft.target_watch = TargetWatch(worker.model_runner.get_model())
    for name in UPDATES:
        _look_after(worker, name)


def _look_after(worker: Any, name: str) -> None:
    update = getattr(worker, name, None)
    if update is None:
        return

    def update_and_look(*args: Any, **kwargs: Any) -> Any:
        result = update(*args, **kwargs)
        look_at_target(worker, everywhere=True)
        return result

    setattr(worker, name, update_and_look)


def look_at_target(worker: Any, *, everywhere: bool = False) -> None:
    """Switch capture and swaps off if the weights differ. Raises nothing: updates and swaps come through here."""
    state = worker.redraft
    # A worker that sleeps has no weights, and after a change there is nothing more to find.
    if state.target_watch is None or state.asleep or not state.is_target_intact:
        return
    try:
        is_changed = state.target_watch.is_changed(everywhere=everywhere)
    except Exception:
        logger.exception("redraft: the target's weights could not be compared")
        return
    if is_changed:
        state.is_target_intact = False
        state.capture_off = state.swap_off = CHANGED
        if state.capture:
            state.capture.is_off = True
        logger.error("redraft: capture and swaps are off: %s", CHANGED)
