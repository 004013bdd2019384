"""Capture: from the references that the engine thread leaves behind to records in the spool, on a thread of its own.

    engine thread                         background thread
    hook ──► Step (references) ──► StepQueue ──► seen ──► RequestLog (one a request) ──► encode ──► Outlet
                                   bounded,      top-k,   steps become segments
                                   oldest goes   log-sum-exp

B = requests of the step, K = sampled tokens of each, H = tokens of a request, L = hidden states of one token, D = their
size.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from online.outlet import open_outlet
from online.plugin_config import CaptureConfig
from online.records import Frame, frame_of
from online.reduction import Room, Seen, seen
from online.request_log import RequestLog, States, Verified
from online.steps import Step, StepPart, StepQueue

logger = logging.getLogger("vllm.redraft")

SEGMENT_ROWS = 512
"""A long answer is shipped in parts of about this many rows, so that the learner need not wait for its end."""

SHIP_BYTES = 4 << 20
SHIP_INTERVAL_S = 1.0
"""Records are shipped when so many bytes are waiting, or the oldest waits so long."""

POLL_INTERVAL_S = 0.2
"""The longest that a step waits: each time this thread wakes, it takes the interpreter from the engine's."""


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
        self._room = Room()
        self._waiting: list[Frame] = []
        self._waiting_since_s = 0.0
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redraft-capture", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ship what is complete, then end."""
        self._is_stopping.set()
        self.queue.is_due.set()
        self._thread.join(timeout=10)
        self._outlet.close()

    def is_sampled(self, request_id: str, tenant: str) -> bool:
        """Whether this request is one of those to record; the same answer on every call."""
        reason = self.config.skips(tenant, request_id.encode())
        if reason:
            self.counts[f"skipped_requests_{reason}"] += 1
        return not reason

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
        torch.set_num_threads(1)  # this thread's: a team of its own would take the engine's cores
        while True:
            is_last = self._is_stopping.is_set()  # first: what is put before the stop is still taken
            steps = self.queue.take()
            if steps:
                try:
                    self._apply(steps)
                except Exception as error:
                    self.report(error, "reduce")
                    self._close_all(steps)
            if is_last and not steps:
                self._ship()
                return
            if self._is_shipment_due():
                self._ship()
            if not is_last:
                self.queue.is_due.wait(POLL_INTERVAL_S)

    def _apply(self, steps: list[Step]) -> None:
        for step in steps:
            if step.computed is not None:
                step.computed.synchronize()
        kept = seen(steps, self.config.top_k, self._room)
        first_row = first_draft = 0
        for step in steps:
            self._close_all([step])
            self._apply_one(step, kept, first_row, first_draft)
            first_row += 0 if step.logits_RV is None else len(step.logits_RV)
            first_draft += 0 if step.draft_ids_S is None else len(step.draft_ids_S)

    def _apply_one(self, step: Step, kept: Seen | None, first_row: int, first_draft: int) -> None:
        """`kept` holds the step's rows and drafts from `first_row` and `first_draft` on."""
        if step.sampled_BK is None:
            return
        sampled_BK = step.sampled_BK.tolist()
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
                assert kept is not None
                begin = first_draft + part.first_draft
                verified = Verified(
                    start=part.start,
                    draft_ids=kept.draft_ids_S[begin : begin + part.num_drafts],
                    draft_probs=kept.draft_probs_S[begin : begin + part.num_drafts],
                    num_accepted=len(sampled) - 1,
                    rows=kept.rows.part(first_row + part.first_row, part.num_drafts + 1),
                )
            # The states behind a rejected draft token are of another text.
            num_true = max(0, part.num_read - part.num_drafts + len(sampled) - 1)
            states = [] if states_HLD is None else _states(part.begin, states_HLD[:num_true])
            self._append(part, step.draft_version, sampled, verified, states)

    def _append_states(self, part: StepPart, states_HLD: Tensor | None) -> None:
        log = self._log(part)
        if not log.is_closed:
            log.add_states(_states(part.begin, states_HLD))

    def _log(self, part: StepPart) -> RequestLog:
        log = self._logs.get(part.request.request_id)
        if log is None:
            log = self._logs[part.request.request_id] = RequestLog(info=part.request)
        return log

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
        log.add_states(states)
        if log.is_complete:
            self._emit(log)
            log.is_closed = True
        elif log.num_rows >= SEGMENT_ROWS:
            self._emit(log)

    def _close_all(self, steps: list[Step]) -> None:
        """Emit what is known of the requests that ended before these steps."""
        for request_id in itertools.chain.from_iterable(step.finished for step in steps):
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
