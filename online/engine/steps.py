"""The result of an engine step, and the queue between the engine thread and capture's thread.

B = requests of the step, R = logit rows, S = draft tokens of all requests, V = vocabulary, K = kept
top-k ids, N = tokens of the step's captured requests, L = hidden states per token, D = size of a
state.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from redraft.online.engine.request_log import RequestInfo

# Maximum bytes of tensors that wait for the thread; on a GPU, the engine cannot use this memory.
MAX_QUEUED_BYTES = 256 << 20
MAX_QUEUED_STEPS = 512  # Maximum number of waiting steps with rows.
# Maximum number of waiting steps. Most of them are light: tokens without rows and states.
MAX_LIGHT_STEPS = 8192

MAX_LIGHT_BYTES = 256 << 20
"""Limit, in bytes, on the memory for the tokens, requests and prompts of waiting steps, mostly host
memory. MAX_QUEUED_STEPS steps may always wait.
"""

STEP_BYTES, PART_BYTES, TOKEN_BYTES = 1024, 320, 40
"""Host memory in bytes, rounded up: for a step's objects, for each of its parts including its
numbers, and for each prompt token.
"""

REDUCED_BYTES = 4 << 20  # bytes of steps reduced in one call, to amortise its fixed cost


# A struct instead of a dataclass, because the engine thread creates one per request and step, and a
# struct takes a tenth of the time.
class StepPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    request: RequestInfo
    start: int
    """Index in prompt + output of the first token that the step sampled."""
    sampled_row: int | None
    """Row in `EngineStep.sampled_BK`. None if the step read only part of a prompt."""
    num_drafts: int
    proposer: int = 0
    """0 if the served version proposed the draft tokens, otherwise LOOKUP or PADDING."""
    first_row: int
    """First row in `EngineStep.logits_RV`; `num_drafts` more rows follow it."""
    first_draft: int
    """First entry in `EngineStep.draft_ids_S`."""
    num_read: int = 0
    """Number of tokens that the target read: context tokens, then the `num_drafts` draft tokens."""
    first_read: int = 0
    """Index of the request's first token among all tokens read in the step."""

    @property
    def begin(self) -> int:
        """Index in prompt + output of the first token that the target read."""
        # E.g. if token 10 and 3 drafts were read and sampling starts at 11: 11 + 3 - 4 = 10.
        return self.start + self.num_drafts - self.num_read


class DeviceRanges(NamedTuple):
    """Each request's first row of logits and first token read, plus one entry for the end.

    The requests are in the order of `EngineStep.sampled_BK`. The step's parts contain the host's
    numbers, which are only upper bounds.
    """

    rows_B1: Tensor
    reads_B1: Tensor
    num_tokens: int
    """Number of tokens read by all requests."""


class Largest(NamedTuple):
    """The largest logits of every row, in descending order, with their ids.

    The log-sum-exp of each whole row is included.
    """

    ids_RK: Tensor
    logits_RK: Tensor
    log_sum_exp_R: Tensor


@dataclass(frozen=True, kw_only=True)
class EngineStep:
    """References to the tensors of one engine step. Nothing writes to these tensors later."""

    draft_version: str
    target_version: str | None = ""
    """Version of the weights that verified the draft tokens. None if it is unknown."""
    parts: list[StepPart]
    finished: list[str]
    """Ids of the requests that ended before this step."""
    sampled_BK: Tensor | None = None
    """Sampled tokens by request, padded with -1 or limited by `num_sampled_B`."""
    num_sampled_B: Tensor | None = None
    """Number of valid tokens in `sampled_BK`, by request."""
    starts_B: Tensor | None = None
    """Values for `StepPart.start`, if only the device has them."""
    ranges: DeviceRanges | None = None
    """Set if the device chose how many draft tokens of each request to verify. The states then
    belong to all tokens of the step.
    """
    confidences_BJ: Tensor | None = None
    """The draft's confidence in its tokens, with adaptive verification."""
    logits_RV: Tensor | None = None
    """Logits before sampling parameters are applied. None if no request sampled, or if `largest` is
    set.
    """
    largest: Largest | None = None
    """The recorded part of the logits, if the hook has already extracted it."""
    draft_ids_S: Tensor | None = None
    """Draft ids of all requests, possibly with other entries in between."""
    draft_probs_S: Tensor | None = None
    """Draft probabilities. None if drafting is greedy."""
    states_NLD: Tensor | None = None
    """Hidden states (bfloat16 copies) of the tokens in `parts`, in the same order."""
    num_new_tokens: int = 0
    """Number of prompt tokens of the requests added since the previous step. The steps of an
    ended request keep its prompt in memory.
    """
    computed: torch.cuda.Event | None = None
    """Event on the engine's stream after the computation. None if there is no GPU."""

    def read_sampled(self) -> list[list[int]]:
        """Return the tokens that each request sampled. Waits for the device."""
        assert self.sampled_BK is not None
        rows = self.sampled_BK.tolist()
        if self.num_sampled_B is None:
            return [[token for token in row if token != -1] for row in rows]
        return [row[:count] for row, count in zip(rows, self.num_sampled_B.tolist(), strict=True)]

    def read_parts(self) -> list[StepPart]:
        """Return the parts with exact starts and ranges, after waiting for the device."""
        if self.starts_B is None:
            return self.parts
        starts = self.starts_B.tolist()
        ranges = None if self.ranges is None else [x.tolist() for x in self.ranges[:2]]

        def make_exact(part: StepPart) -> StepPart:
            i = part.sampled_row
            # Prompts come after all verified drafts, and the host's numbers are exact for them.
            if i is None:
                return part
            if ranges is None:
                return msgspec.structs.replace(part, start=starts[i])
            rows, reads = ranges
            return msgspec.structs.replace(
                part,
                start=starts[i],
                num_drafts=rows[i + 1] - rows[i] - 1,
                first_row=rows[i],
                first_draft=rows[i] + 1,
                num_read=reads[i + 1] - reads[i],
                first_read=reads[i],
            )

        return [make_exact(part) for part in self.parts]

    @property
    def num_rows(self) -> int:
        """Return the number of logit rows; 0 if no request sampled, or if the rows were dropped."""
        rows = self.logits_RV if self.largest is None else self.largest.log_sum_exp_R
        return 0 if rows is None else len(rows)

    @cached_property
    def num_bytes(self) -> int:
        """Return the size of all large tensors, in bytes."""
        # Cached, because the queue reads it under its lock. A frozen dataclass allows a
        # cached_property.
        held = (self.logits_RV, self.states_NLD, *(self.largest or ()))
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    @cached_property
    def num_light_bytes(self) -> int:
        """Return the approximate size of everything else, in bytes.

        It is approximate because the engine thread has no time to look at every part.
        """
        held = (
            self.sampled_BK,
            self.num_sampled_B,
            self.starts_B,
            self.draft_ids_S,
            self.draft_probs_S,
        )
        tensors = sum(tensor.nbytes for tensor in held if tensor is not None)
        return (
            STEP_BYTES + PART_BYTES * len(self.parts) + TOKEN_BYTES * self.num_new_tokens + tensors
        )

    def give_up_rows(self) -> EngineStep:
        """Return the step without its rows, draft tokens and states.

        It keeps its sampled tokens, so that the text of its requests has no gap.
        """
        return replace(
            self,
            logits_RV=None,
            largest=None,
            draft_ids_S=None,
            draft_probs_S=None,
            states_NLD=None,
        )


class StepQueue:
    """Queue of steps from the engine thread to the background thread.

    If too many bytes or steps wait, the oldest steps lose their rows, but the text of their
    requests continues. If too many steps without rows wait too, the oldest ones are dropped, and
    the rest of their requests is lost.
    """

    def __init__(
        self,
        max_steps: int = MAX_QUEUED_STEPS,
        max_bytes: int = MAX_QUEUED_BYTES,
        max_light_steps: int = MAX_LIGHT_STEPS,
        max_light_bytes: int = MAX_LIGHT_BYTES,
    ) -> None:
        self.max_steps = max_steps
        self.max_bytes = max_bytes
        self.max_light_steps = max_light_steps
        self.max_light_bytes = max_light_bytes
        self.num_dropped_steps = 0
        self.num_steps_without_rows = 0
        self.is_due = threading.Event()  # Set when enough steps wait for one batch.
        self._steps: deque[EngineStep] = deque()
        self._num_bytes = 0
        self._num_light_bytes = 0
        # Number of steps at the front of the queue that have lost their rows or never had any.
        self._num_light = 0
        self._lock = (
            threading.Lock()
        )  # held for only a few instructions, because the engine thread acquires it too

    def put(self, step: EngineStep) -> None:
        with self._lock:
            self._steps.append(step)
            self._count(step, 1)
            # The latest step keeps its rows, even if it alone exceeds the limit.
            while self._num_light < len(self._steps) - 1 and (
                self._num_bytes > self.max_bytes
                or len(self._steps) - self._num_light > self.max_steps
            ):
                self._give_up_rows()
            while len(self._steps) > self.max_steps and self._is_full():
                self._drop()
            is_due = self._is_due()
        if is_due:
            self.is_due.set()

    def take(self) -> list[EngineStep]:
        """Remove and return the oldest steps, up to one batch. Empty if none wait."""
        taken: list[EngineStep] = []
        num_bytes = 0
        with self._lock:
            while self._steps and len(taken) < self.max_steps:
                num_bytes += self._steps[0].num_bytes
                if taken and num_bytes > REDUCED_BYTES:
                    break
                taken.append(self._pop())
            if not self._is_due():
                self.is_due.clear()
        return taken

    def _is_due(self) -> bool:
        return self._num_bytes >= REDUCED_BYTES or 2 * len(self._steps) > self.max_steps

    def _is_full(self) -> bool:
        return (
            len(self._steps) > self.max_light_steps or self._num_light_bytes > self.max_light_bytes
        )

    def _give_up_rows(self) -> None:
        step = self._steps[self._num_light]
        if step.num_bytes:
            # Remove and add the step again, because its light bytes shrink too: it loses draft ids
            # and probabilities.
            self._count(step, -1)
            self.num_steps_without_rows += bool(step.num_rows)
            self._steps[self._num_light] = step = step.give_up_rows()
            self._count(step, 1)
        self._num_light += 1

    def _drop(self) -> None:
        dropped = self._pop()
        self.num_dropped_steps += 1
        if dropped.finished:  # otherwise, capture would wait indefinitely for finished requests
            dropped.finished.extend(
                self._steps[0].finished
            )  # not copied to a new list, because the list may be long
            self._steps[0] = replace(self._steps[0], finished=dropped.finished)

    def _pop(self) -> EngineStep:
        step = self._steps.popleft()
        self._count(step, -1)
        self._num_light = max(0, self._num_light - 1)
        return step

    def _count(self, step: EngineStep, sign: int) -> None:
        self._num_bytes += sign * step.num_bytes
        self._num_light_bytes += sign * step.num_light_bytes
