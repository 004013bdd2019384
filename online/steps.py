"""What an engine step leaves behind, and the queue in which it waits for capture's thread.

B = requests of the step, R = logit rows, S = draft tokens of all requests, V = vocabulary, K = kept top-k ids,
N = tokens of the step's captured requests, L = hidden states of one token, D = their size.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from online.request_log import RequestInfo

MAX_QUEUED_BYTES = 256 << 20
"""Of logits waiting for the background thread: device memory that the engine does not get back meanwhile."""

MAX_QUEUED_STEPS = 512

REDUCED_BYTES = 4 << 20
"""Of the steps that are reduced together: enough to make the fixed cost of their calls small."""


# No dataclass: the engine thread makes one for every request of every step, and this takes a tenth of the time.
class StepPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request's share of a step."""

    request: RequestInfo
    start: int
    """Index, in prompt + output, of the first token that the step sampled."""
    sampled_row: int | None
    """Of `Step.sampled_BK`. None: a part of the prompt was read, and nothing sampled."""
    num_drafts: int
    first_row: int
    """Of `Step.logits_RV`: its rows are this one and the `num_drafts` that follow."""
    first_draft: int
    """Of `Step.draft_ids_S`."""
    num_read: int = 0
    """Tokens that the target read: `num_drafts` drafts, and those before them."""
    first_read: int = 0
    """Index among all tokens that the step's requests read, captured or not."""

    @property
    def begin(self) -> int:
        """Index, in prompt + output, of the first token that was read."""
        return self.start + self.num_drafts - self.num_read


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one engine step leaves behind: references to tensors that nothing writes to any more."""

    draft_version: str
    parts: list[StepPart]
    finished: list[str]
    """Requests that ended before this step."""
    sampled_BK: Tensor | None = None
    """Sampled tokens of each request, -1 padded."""
    logits_RV: Tensor | None = None
    """Before temperature, penalties and every other sampling parameter. None where no request verified drafts."""
    draft_ids_S: Tensor | None = None
    draft_probs_S: Tensor | None = None
    """None where drafting is greedy."""
    states_NLD: Tensor | None = None
    """bfloat16, of the tokens that `parts` read, in their order: a copy, for an engine may write to its own again."""
    computed: torch.cuda.Event | None = None
    """Of the engine's stream, behind all of these tensors: another thread works on another stream. None on a CPU."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.logits_RV, self.states_NLD) if tensor is not None)


class StepQueue:
    """Steps from the engine thread to the background thread; when full, the oldest step makes room."""

    def __init__(self, max_steps: int = MAX_QUEUED_STEPS, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self.max_steps = max_steps
        self.max_bytes = max_bytes
        self.num_dropped_steps = 0
        self.is_due = threading.Event()
        """As many steps wait as are reduced together."""
        self._steps: deque[Step] = deque()
        self._num_bytes = 0
        self._lock = threading.Lock()  # held for a few instructions only: the engine thread takes it too

    def put(self, step: Step) -> None:
        with self._lock:
            self._steps.append(step)
            self._num_bytes += step.num_bytes
            while len(self._steps) > 1 and (len(self._steps) > self.max_steps or self._num_bytes > self.max_bytes):
                dropped = self._steps.popleft()
                self._num_bytes -= dropped.num_bytes
                self.num_dropped_steps += 1
                if dropped.finished:  # requests that have ended must not be waited for ever
                    self._steps[0] = replace(self._steps[0], finished=dropped.finished + self._steps[0].finished)
            is_due = self._is_due()
        if is_due:
            self.is_due.set()

    def take(self) -> list[Step]:
        """The oldest steps, as many as are reduced together and at least one; empty if none waits."""
        taken: list[Step] = []
        num_bytes = 0
        with self._lock:
            while self._steps:
                num_bytes += self._steps[0].num_bytes
                if taken and num_bytes > REDUCED_BYTES:
                    break
                taken.append(self._steps.popleft())
                self._num_bytes -= taken[-1].num_bytes
            if not self._is_due():
                self.is_due.clear()
        return taken

    def _is_due(self) -> bool:
        return self._num_bytes >= REDUCED_BYTES or 2 * len(self._steps) > self.max_steps
