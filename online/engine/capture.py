"""Capture: a background thread turns the references left by the engine thread into records.

    engine thread                                background thread
    hook ──► EngineStep (references) ──► StepQueue ──► reduce_steps ──► RequestLog ──► encode_frame ──► Outlet
             on a GPU top-k and          bounded       top-k and        one per request,
             log-sum-exp instead                       log-sum-exp      steps become
             of logits                                                  segments

B = requests of the step, K = sampled tokens of each, H = tokens of a request, L = hidden states per
token, D = their size.
"""

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redraft.heads.nn.float8 import encode_float8
from redraft.online.engine.calibration import Calibration
from redraft.online.engine.config import CaptureConfig
from redraft.online.engine.reduction import ReducedSteps, ScratchMemory, copy_through, reduce_steps
from redraft.online.engine.request_log import KEPT_STATES, RequestLog, States, VerifiedStep
from redraft.online.engine.steps import EngineStep, StepPart, StepQueue
from redraft.online.records.guard import Guard, describe
from redraft.online.records.outlet import open_outlet
from redraft.online.records.record import Frame, encode_frame

logger = logging.getLogger("vllm.redraft")

SHIP_BYTES = 4 << 20
SHIP_INTERVAL_S = 1.0  # waiting records are sent when the oldest reaches this age
GREEDY_TEMPERATURE = 1e-5  # Below this, vLLM chooses the most probable token.
PINNED_BYTES = 8 << 20  # The buffer through which hidden states leave a GPU.
# Maximum wait for a step, in seconds. Each wake-up takes the GIL from the engine thread.
POLL_INTERVAL_S = 0.2


class Capture:
    """Decides which requests are recorded, and turns their steps into records.

    A background thread sends the records.
    """

    def __init__(
        self,
        config: CaptureConfig,
        server_id: str,
        fingerprint: str,
        draft_version: str,
        device: torch.device | None = None,
    ) -> None:
        """Prepare to record a worker that computes on `device`. None means the CPU."""
        self.config = config
        self.device = device or torch.device("cpu")
        self.server_id = server_id
        self.fingerprint = fingerprint
        self.draft_version = draft_version
        self.counts: Counter[str] = Counter()
        self.last_error = ""
        self._logged: set[str] = set()
        self.target_version: str | None = ""  # None means not yet known, so nothing is recorded
        self.kept_states = KEPT_STATES
        self.queue = StepQueue()
        self.calibration = Calibration()
        self.guard = Guard()
        self._outlet = open_outlet(config, server_id, self.guard)
        self._logs: dict[str, RequestLog] = {}
        self._scratch = ScratchMemory()
        self._pinned: Tensor | None = None
        self._waiting: list[Frame] = []
        self._waiting_since_s = 0.0
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redraft-capture", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send all complete records, then end the thread."""
        # Set the flag before waking the thread, because the thread checks it when it wakes up.
        self._is_stopping.set()
        self.queue.is_due.set()
        self._thread.join(timeout=10)
        self._outlet.close()

    def is_sampled(self, request_id: str, tenant: str) -> bool:
        """Whether this request belongs to the recorded sample.

        The result is the same on every call.
        """
        reason = self.config.find_skip_reason(tenant, request_id.encode())
        if reason:
            self.counts[f"skipped_requests_{reason}"] += 1
        return not reason

    def status(self) -> dict[str, Any]:
        """Return counters, and the last error if there was one.

        The result contains no text of any request.
        """
        return {
            **self.counts,
            "dropped_steps_queue_full": self.queue.num_dropped_steps,
            "steps_without_rows_queue_full": self.queue.num_steps_without_rows,
            **self._outlet.status(),
            **{
                f"failed_rounds_{task}": count for task, count in self.guard.failures.copy().items()
            },
            "open_requests": len(self._logs),
            "last_error": self.last_error,
        }

    def report(self, error: Exception, stage: str) -> None:
        """Count and log an error of capture. Serving continues without the records."""
        self.counts[f"errors_{stage}"] += 1
        self.last_error = describe(error)
        # Logged once, because an error at every step would flood the log.
        if self.last_error not in self._logged:
            self._logged.add(self.last_error)
            logger.warning(
                "capture failed (%s); serving continues without these records: %s",
                stage,
                self.last_error,
            )

    @contextlib.contextmanager
    def reporting(self, stage: str) -> Iterator[None]:
        """Report an exception in the block and continue: capture may fail, but serving must not."""
        try:
            yield
        except Exception as error:
            self.report(error, stage)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # a container may forbid this
            # Let this thread run on any core: vLLM's CPU worker pins its main thread, and new
            # threads inherit the mask.
            os.sched_setaffinity(threading.get_native_id(), range(os.cpu_count() or 1))
        # For this thread only, because a thread pool would occupy the engine's cores.
        torch.set_num_threads(1)
        if self.device.type == "cuda":
            # By default, a new thread uses the first GPU, where its first call would create a
            # context of half a gigabyte for the worker of each other GPU.
            torch.cuda.set_device(self.device)
            # Its own stream does not wait for the engine's, nor the engine's for it.
            torch.cuda.set_stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        while True:
            is_last = (
                self._is_stopping.is_set()
            )  # read before the queue, so that steps queued before the stop are still processed
            steps: list[EngineStep] = []
            with self.guard.round("capture"):
                steps = self.queue.take()
                self._apply_or_close(steps)
                if self._is_shipment_due() or (is_last and not steps):
                    self._ship()
            if is_last and not steps:
                return
            if not is_last:
                self.queue.is_due.wait(POLL_INTERVAL_S)

    def _apply_or_close(self, steps: list[EngineStep]) -> None:
        if not steps:
            return
        try:
            self._apply(steps)
        except Exception as error:
            # Running requests now have a gap, which their next step detects. Finished requests have
            # no next step, so end them here.
            self.report(error, "reduce")
            self._close_all(steps)

    def _apply(self, steps: list[EngineStep]) -> None:
        for step in steps:
            if step.computed is not None:
                # This thread copies on its own CUDA stream, which does not wait for the engine's
                # stream by itself.
                step.computed.synchronize()
        # Reduce all waiting steps at once: a step has few rows, so the fixed cost of a reduction
        # would exceed its work.
        kept = reduce_steps(steps, self.config.logprobs, self._scratch)
        first_row = first_draft = 0
        for step in steps:
            # `finished` names requests that ended before this step, so their records are sent
            # first.
            self._close_all([step])
            self._apply_one(step, kept, first_row, first_draft)
            first_row += step.num_rows
            first_draft += 0 if step.draft_ids_S is None else len(step.draft_ids_S)

    def _apply_one(
        self, step: EngineStep, kept: ReducedSteps | None, first_row: int, first_draft: int
    ) -> None:
        if step.sampled_BK is None:
            return
        sampled_by_row = step.read_sampled()
        confidences_BJ = step.confidences_BJ
        confidences = None if confidences_BJ is None else confidences_BJ.cpu().numpy()
        first_state = 0
        for part in step.read_parts():
            if step.ranges is not None:  # the states are for all tokens of the step
                first_state = part.first_read
            states_HLD = (
                None
                if step.states_NLD is None
                else step.states_NLD[first_state : first_state + part.num_read]
            )
            first_state += part.num_read
            sampled = [] if part.sampled_row is None else sampled_by_row[part.sampled_row]
            if not sampled:
                log = self._open_log(part, step)
                if not log.is_closed:
                    log.add_states(self._read_states(part.begin, states_HLD))
                continue
            if confidences is not None and not part.proposer:
                predicted_J = confidences[part.sampled_row, : part.num_drafts]
                self.calibration.add(predicted_J, len(sampled) - 1)
            verified = None
            if step.num_rows:
                assert kept is not None
                begin = first_draft + part.first_draft
                verified = VerifiedStep(
                    start=part.start,
                    draft_ids=kept.draft_ids_S[begin : begin + part.num_drafts],
                    draft_probs=_read_draft_probs(
                        part, kept.draft_probs_S[begin : begin + part.num_drafts]
                    ),
                    # The last sampled token is the target's: the bonus, or the replacement of the
                    # first rejected draft token.
                    num_accepted=len(sampled) - 1,
                    proposer=part.proposer,
                    rows=kept.rows.select(first_row + part.first_row, part.num_drafts + 1),
                )
            # States after a rejected draft token belong to discarded text. E.g. if one text token
            # and 3 draft tokens were read and 2 tokens were sampled, one draft token was accepted.
            # So 2 of the 4 states belong to the text.
            num_true = max(0, part.num_read - part.num_drafts + len(sampled) - 1)
            states = (
                [] if states_HLD is None else self._read_states(part.begin, states_HLD[:num_true])
            )
            self._append(part, step, sampled, verified, states)

    def _read_states(self, begin: int, states_HLD: Tensor | None) -> list[States]:
        """Return the bfloat16 states in the configured format; empty if there is no token."""
        if states_HLD is None or not len(states_HLD):
            return []
        if self.config.hidden_format == "float8":
            return [States(begin, self._to_host(encode_float8(states_HLD)).numpy())]
        words_HLD = self._to_host(states_HLD).contiguous().view(torch.int16).numpy().view(np.uint16)
        return [States(begin, words_HLD)]

    def _to_host(self, x: Tensor) -> Tensor:
        if not x.is_cuda:
            return x
        if self._pinned is None:
            self._pinned = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        return copy_through(x, self._pinned)

    def _open_log(self, part: StepPart, step: EngineStep) -> RequestLog:
        """Open the request's log, which must contain only text from the step's target weights.

        If the step's weights are unknown, the log is closed.
        """
        log = self._logs.get(part.request.request_id)
        if log is None:
            log = RequestLog(
                info=part.request,
                max_bytes=self.config.record_bytes,
                kept_states=self.kept_states,
            )
            self._logs[part.request.request_id] = log
        if not log.is_closed and log.target_version != step.target_version:
            self._emit(log)
            log.drop_states()
            log.target_version = step.target_version or ""
        if not log.is_closed and step.target_version is None:
            self.counts["broken_requests_target_unclear"] += 1
            log.is_closed = True
        return log

    def _append(
        self,
        part: StepPart,
        step: EngineStep,
        sampled: list[int],
        verified: VerifiedStep | None,
        states: list[States],
    ) -> None:
        log = self._open_log(part, step)
        if log.is_closed:
            return
        # Draft tokens are proposed at the end of a step and verified in the next one. A swap in
        # between may keep them, so the first step with the new draft verifies tokens from the old
        # draft.
        proposed_by, log.next_version = log.next_version or step.draft_version, step.draft_version
        if log.draft_version != proposed_by:  # a record names exactly one draft version
            self._emit(log)
            log.draft_version = proposed_by
        if not log.append(part.start, sampled, verified):
            self.counts["broken_requests_gap"] += 1
            self._emit(log)
            log.is_closed = True
            return
        log.add_states(states)
        # Keep a complete log (closed) until the engine reports the end, so that no second log is
        # opened.
        if log.is_complete:
            self._emit(log)
            log.is_closed = True
        elif log.is_full:
            self._emit(log)

    def _close_all(self, steps: list[EngineStep]) -> None:
        for request_id in itertools.chain.from_iterable(step.finished for step in steps):
            log = self._logs.pop(request_id, None)
            if log is not None and not log.is_closed:
                self._emit(log)

    def _emit(self, log: RequestLog) -> None:
        try:
            record = log.cut_segment(self.server_id, self.fingerprint)
            if record is None:
                return
            frame = encode_frame(record)
        # Only this request's record is lost; an uncaught exception would end the thread and all
        # recording.
        except Exception as error:
            self.report(error, "encode")
            log.is_closed = True
            return
        if not self._waiting:
            self._waiting_since_s = time.monotonic()
        self._waiting.append(frame)
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
        except (
            Exception
        ) as error:  # e.g. a full disk: these records are lost, but later ones may fit
            self.counts["dropped_records_spool"] += len(frames)
            self.report(error, "spool")


def _read_draft_probs(part: StepPart, draft_probs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the draft's probabilities for its tokens.

    At temperature 0 they are 1, because the draft then proposes its best token, and vLLM stores
    logits instead of probabilities.
    """
    return (
        np.ones_like(draft_probs)
        if part.request.sampling.temperature < GREEDY_TEMPERATURE
        else draft_probs
    )
