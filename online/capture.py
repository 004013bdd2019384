"""Capture: from the references that the engine thread leaves behind to records in the spool, on a thread of its own.

    engine thread                         background thread
    hook ──► Step (references) ──► StepQueue ──► reduce ──► RequestLog (one a request) ──► encode ──► Outlet
                                   bounded,      top-k,     steps become segments
                                   oldest goes   log-sum-exp

B = requests of the step, R = logit rows, S = draft tokens of all requests, V = vocabulary, K = kept top-k ids,
N = tokens of the step's captured requests, L = hidden states of one token, D = their size.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import zlib
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from online.outlet import open_outlet
from online.plugin_config import CaptureConfig
from online.records import Frame, frame_of
from online.request_log import RequestInfo, RequestLog, Rows, States, Verified

logger = logging.getLogger("vllm.redraft")

MAX_QUEUED_BYTES = 256 << 20
"""Of logits waiting for the background thread: device memory that the engine does not get back meanwhile."""

MAX_QUEUED_STEPS = 512

MAX_REDUCED_ELEMENTS = 1 << 22
"""Logits reduced in one call: enough to make its fixed cost small, 16 MB of float32."""

SEGMENT_ROWS = 512
"""A long answer is shipped in parts of about this many rows, so that the learner need not wait for its end."""

SHIP_BYTES = 4 << 20
SHIP_INTERVAL_S = 1.0
"""Records are shipped when so many bytes are waiting, or the oldest waits so long."""

POLL_INTERVAL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class StepPart:
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

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.logits_RV, self.states_NLD) if tensor is not None)


class StepQueue:
    """Steps from the engine thread to the background thread; when full, the oldest step makes room."""

    def __init__(self, max_steps: int = MAX_QUEUED_STEPS, max_bytes: int = MAX_QUEUED_BYTES) -> None:
        self.max_steps = max_steps
        self.max_bytes = max_bytes
        self.num_dropped_steps = 0
        self._steps: deque[Step] = deque()
        self._num_bytes = 0
        self._lock = threading.Lock()  # held for a few instructions only: the engine thread takes it too

    def put(self, step: Step) -> None:
        with self._lock:
            self._steps.append(step)
            self._num_bytes += step.num_bytes
            while len(self._steps) > 1 and (len(self._steps) > self.max_steps or self._num_bytes > self.max_bytes):
                self._num_bytes -= self._steps.popleft().num_bytes
                self.num_dropped_steps += 1

    def take(self) -> list[Step]:
        """The oldest steps, as many as are reduced in one call and at least one; empty if none waits."""
        taken: list[Step] = []
        elements = 0
        with self._lock:
            while self._steps:
                size = 0 if self._steps[0].logits_RV is None else self._steps[0].logits_RV.numel()
                if taken and elements + size > MAX_REDUCED_ELEMENTS:
                    break
                elements += size
                taken.append(self._steps.popleft())
                self._num_bytes -= taken[-1].num_bytes
        return taken


@torch.inference_mode()
def reduce(logits_RV: Tensor, top_k: int) -> Rows:
    """The largest `top_k` of every row as log-probabilities at temperature 1, with the log-sum-exp of all."""
    logits_RV = logits_RV.float()
    logits_RK, ids_RK = logits_RV.topk(min(top_k, logits_RV.shape[-1]), dim=-1)
    # On a CPU `softmax` takes half the time of `logsumexp`.
    log_sum_exp_R = logits_RK[:, 0] - logits_RV.softmax(-1).gather(1, ids_RK[:, :1]).squeeze(1).log()
    return Rows(
        topk_ids_RK=ids_RK.int().cpu().numpy(),
        topk_log_probs_RK=(logits_RK - log_sum_exp_R[:, None]).cpu().numpy(),
        log_sum_exp_R=log_sum_exp_R.cpu().numpy(),
    )


class Capture:
    """Decides which requests are recorded, takes their steps, and ships records from a thread of its own."""

    def __init__(self, config: CaptureConfig, server_id: str, fingerprint: str, draft_version: str) -> None:
        self.config = config
        self.server_id = server_id
        self.fingerprint = fingerprint
        self.draft_version = draft_version
        self.counts: Counter[str] = Counter()
        self.last_error = ""
        self.queue = StepQueue()
        self._outlet = open_outlet(config, server_id)
        self._logs: dict[str, RequestLog] = {}
        self._waiting: list[Frame] = []
        self._waiting_since_s = 0.0
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redraft-capture", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ship what is complete, then end."""
        self._is_stopping.set()
        self._thread.join(timeout=10)
        self._outlet.close()

    def is_sampled(self, request_id: str, tenant: str) -> bool:
        """Whether this request is one of those to record; the same answer on every call."""
        if self.config.tenants is not None and tenant not in self.config.tenants:
            self.counts["skipped_requests_tenant"] += 1
            return False
        if zlib.crc32(request_id.encode()) >= self.config.fraction * 2**32:
            self.counts["skipped_requests_fraction"] += 1
            return False
        return True

    def status(self) -> dict[str, Any]:
        """Counters, and the last error if there was one. Nothing of any text."""
        return {
            **self.counts,
            "dropped_steps_queue_full": self.queue.num_dropped_steps,
            **self._outlet.status(),
            "open_requests": len(self._logs),
            "last_error": self.last_error,
        }

    def report(self, error: Exception, what: str) -> None:
        """Count and log an error of capture: serving goes on without it."""
        self.counts[f"errors_{what}"] += 1
        message = f"{type(error).__name__}: {error}"
        if message != self.last_error:  # the same error on every step would fill the log
            logger.warning("capture, %s: %s", what, message)
        self.last_error = message

    def _run(self) -> None:
        _leave_engine_cores()
        while True:
            is_last = self._is_stopping.is_set()  # first: what is put before the stop is still taken
            steps = self.queue.take()
            if steps:
                try:
                    self._apply(steps)
                except Exception as error:
                    self.report(error, "reduce")
            if self._is_shipment_due():
                self._ship()
            if not steps and is_last:
                self._ship()
                return
            if not steps:
                self._is_stopping.wait(POLL_INTERVAL_S)

    def _apply(self, steps: list[Step]) -> None:
        logits = [step.logits_RV for step in steps if step.logits_RV is not None]
        rows = reduce(torch.cat(logits), self.config.top_k) if logits else None
        first_row = 0
        for step in steps:
            for request_id in step.finished:
                self._close(request_id)
            self._apply_one(step, rows, first_row)
            first_row += 0 if step.logits_RV is None else len(step.logits_RV)

    def _apply_one(self, step: Step, rows: Rows | None, first_row: int) -> None:
        if step.sampled_BK is None:
            return
        sampled_BK = step.sampled_BK.tolist()
        draft_ids = None if step.draft_ids_S is None else step.draft_ids_S.cpu().numpy().astype(np.int32)
        draft_probs = None if draft_ids is None else np.ones(draft_ids.shape, np.float32)
        if step.draft_probs_S is not None:
            draft_probs = step.draft_probs_S.float().cpu().numpy()
        first_state = 0
        for part in step.parts:
            states_HLD = None if step.states_NLD is None else step.states_NLD[first_state : first_state + part.num_read]
            first_state += part.num_read
            if part.sampled_row is None:
                self._append_states(part, states_HLD)
                continue
            sampled = [token for token in sampled_BK[part.sampled_row] if token != -1]
            verified = None
            if part.num_drafts:
                assert rows is not None
                assert draft_ids is not None
                assert draft_probs is not None
                drafts = slice(part.first_draft, part.first_draft + part.num_drafts)
                verified = Verified(
                    start=part.start,
                    draft_ids=draft_ids[drafts],
                    draft_probs=draft_probs[drafts],
                    num_accepted=len(sampled) - 1,
                    rows=rows.part(first_row + part.first_row, part.num_drafts + 1),
                )
            # The states behind a rejected draft token are of another text.
            num_true = max(0, part.num_read - part.num_drafts + len(sampled) - 1)
            states = [] if states_HLD is None else _states(part.begin, states_HLD[:num_true])
            self._append(part, step.draft_version, sampled, verified, states)

    def _append_states(self, part: StepPart, states_HLD: Tensor | None) -> None:
        log = self._log(part)
        if not log.is_closed:
            log.states += _states(part.begin, states_HLD)

    def _log(self, part: StepPart) -> RequestLog:
        return self._logs.setdefault(part.request.request_id, RequestLog(info=part.request))

    def _append(
        self, part: StepPart, draft_version: str, sampled: list[int], verified: Verified | None, states: list[States]
    ) -> None:
        log = self._log(part)
        if log.is_closed:
            return
        if log.draft_version != draft_version:  # every record names the one version that proposed its drafts
            self._emit(log)
            log.draft_version = draft_version
        if not log.append(part.start, sampled, verified):
            self.counts["broken_requests_gap"] += 1
            self._emit(log)
            log.is_closed = True
            return
        log.states += states
        if log.is_complete:
            self._emit(log)
            log.is_closed = True
        elif log.num_rows >= SEGMENT_ROWS:
            self._emit(log)

    def _close(self, request_id: str) -> None:
        log = self._logs.pop(request_id, None)
        if log is not None and not log.is_closed:
            self._emit(log)

    def _emit(self, log: RequestLog) -> None:
        record = log.segment(self.server_id, self.fingerprint)
        if record is None:
            return
        if not self._waiting:
            self._waiting_since_s = time.monotonic()
        self._waiting.append(frame_of(record))
        self.counts["records"] += 1
        self.counts["rows"] += len(record.positions)

    def _is_shipment_due(self) -> bool:
        if not self._waiting:
            return False
        waited_s = time.monotonic() - self._waiting_since_s
        return waited_s > SHIP_INTERVAL_S or sum(map(len, self._waiting)) >= SHIP_BYTES

    def _ship(self) -> None:
        frames, self._waiting = self._waiting, []
        if not frames:
            return
        try:
            self._outlet.write(frames)
            self.counts["shipped_records"] += len(frames)
            self.counts["shipped_bytes"] += sum(map(len, frames))
        except OSError as error:  # a full disk: these are lost, the next ones may fit again
            self.counts["dropped_records_spool"] += len(frames)
            self.report(error, "spool")


def _states(begin: int, states_HLD: Tensor | None) -> list[States]:
    """The bits of bfloat16 states, none where there is no token."""
    if states_HLD is None or not len(states_HLD):
        return []
    words_HLD = states_HLD.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
    return [States(begin, words_HLD)]


def _leave_engine_cores() -> None:
    """Let this thread run anywhere: vLLM's CPU worker binds its main thread to one core, and children inherit it."""
    with contextlib.suppress(OSError):  # a container may not allow it
        os.sched_setaffinity(threading.get_native_id(), range(os.cpu_count() or 1))
