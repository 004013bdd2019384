"""Collects the recorded requests and their steps from a model runner's hooks for capture.

    runner_v1, runner_v2 ─ requests, batches, states, ends ─► Feed ─► StepQueue ─► capture's thread

The hooks depend on a runner's names; everything else about a step is in this module, for all
runners. It runs in the engine thread, so it keeps references, copies little, and never waits for a
device.

R = logit rows of a step, S = its draft tokens, V = vocabulary, N = tokens of the step's captured
requests, L = hidden states of one token, D = size of each.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from redraft.online.engine.capture import Capture
from redraft.online.engine.config import CaptureConfig
from redraft.online.engine.one_pass import find_in_one_pass
from redraft.online.engine.request_log import RequestInfo
from redraft.online.engine.steps import DeviceRanges, EngineStep, StepPart
from redraft.online.records.origin import EXTRA_ARGS_KEY, Origin, read_origin_arguments
from redraft.online.records.record import Constraint, Sampling

OWNER_BYTES = 12  # bytes for the tenant, and for its salt and adapter, in the name of live counts


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The requests of a step in the runner's order, with the numbers known on the host."""

    infos: Sequence[RequestInfo | None]
    """Information about each request. None if a request is not recorded."""
    first_reads: Sequence[int]
    """Index of each request's first token among the tokens read, with the total at the end."""
    num_drafts: Sequence[int]
    proposers: Sequence[int]
    """Proposer of each request's draft tokens: 0 for the served version, otherwise LOOKUP or
    PADDING.
    """
    first_rows: Sequence[int]
    """Index of each request's first row of logits."""
    first_drafts: Sequence[int]
    """Index of each request's first draft token in the step's draft ids."""
    starts: Sequence[int]
    """Index in prompt + output of the first token that each request samples."""
    is_partial: Sequence[bool]
    """Whether the request reads part of a prompt but not its end, and samples nothing."""


class Feed:
    """The requests of one runner, and its newest step until that step is complete."""

    def __init__(self, capture: Capture, max_model_len: int, *, reduces: bool = False) -> None:
        """Create a feed that passes steps through a queue to capture's thread.

        With `reduces`, and always on a GPU, where memory is scarce, the feed keeps only the largest
        logits of each row. On a CPU, a reference to the logits costs nothing, and the background
        thread has time to reduce them.
        """
        self.capture = capture
        self.max_model_len = max_model_len
        self.reduces = reduces
        self.requests: dict[str, RequestInfo | None] = {}  # None: not recorded
        self.finished: list[str] = []
        self.num_new_tokens = 0  # Prompt tokens of the requests recorded since the newest step.
        # The newest step, kept until the draft reads its states.
        self.unread: EngineStep | None = None
        self.is_masked = False
        self.unmasked_RV: Tensor | None = None

    def add(self, request: Any) -> RequestInfo | None:
        """Add a request that is new or resumes after a preemption.

        `request` is vLLM's object, from either runner.
        """
        name = request.req_id
        known = self.requests.get(name)
        if known is not None and len(known.prompt_ids) != len(request.prompt_token_ids):
            # The client has sent the next part of a streamed input. In the prompt, this part
            # replaces the last token of the answer, so the record must end before it.
            self.end(name)
            self.requests[name] = None
        if name not in self.requests:
            self.requests[name] = self._decide(request)
        return self.requests[name]

    def end(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.finished.append(request_id)

    def flush(self) -> None:
        """Report finished requests to capture if the engine may become idle.

        In that case, no later step would report them.
        """
        if self.finished:
            self._release()
            self.capture.queue.put(self._make_finished_step())

    def put(self, step: EngineStep | None) -> None:
        """Set the newest step, or None if it has nothing to record."""
        self._release()  # the previous step drafted nothing, so its states were not read
        if self.capture.config.hidden_states:
            self.unread = step
        elif step is not None:
            self.capture.queue.put(step)

    def keep_unmasked(self, logits_RV: Tensor, request_ids: Iterable[str]) -> None:
        """Copy a step's logits before these requests' grammar mask overwrites them."""
        if any(self.requests.get(name) for name in request_ids):
            # Set first, so that the step has no rows if there is no memory for the copy.
            self.is_masked = True
            self.unmasked_RV = logits_RV.clone()

    def take_unmasked(self, logits_RV: Tensor | None) -> Tensor | None:
        """Return the logits from before the mask, if there was one."""
        kept_RV = self.unmasked_RV if self.is_masked else logits_RV
        self.is_masked, self.unmasked_RV = False, None
        return kept_RV

    def put_states(self, streams_ND: Sequence[Tensor]) -> None:
        """Complete the newest step with the hidden states that the draft now reads.

        There is one tensor for each layer.
        """
        if self.unread is not None and self.unread.parts:
            ranges = self.unread.ranges
            # If the device assigned tokens to requests, the host learns the assignment only later,
            # so copy all tokens.
            runs = [(0, ranges.num_tokens)] if ranges else _find_runs(self.unread.parts)
            states_NLD = _read_states(runs, streams_ND)
            # A second event is needed, because the copy of the states is queued after the first
            # event.
            self.unread = replace(
                self.unread, states_NLD=states_NLD, computed=record_event(states_NLD)
            )
        self._release()

    def make_step(
        self,
        batch: Batch,
        *,
        sampled_BK: Tensor,
        num_sampled_B: Tensor | None = None,
        starts_B: Tensor | None = None,
        logits_RV: Tensor | None,
        draft_ids_S: Tensor | None,
        draft_probs_S: Tensor | None,
        ranges: DeviceRanges | None = None,
        confidences_BJ: Tensor | None = None,
    ) -> EngineStep | None:
        """Create the step for a batch. Return None if the batch is empty.

        The tensors are as in `EngineStep`.
        """
        if not any(batch.infos):
            return self.make_empty_step()
        parts = self._list_parts(batch)
        # A step without a draft also has a row, because a learner can train a draft that was not
        # run.
        num_rows = sum(part.num_drafts + 1 for part in parts if part.sampled_row is not None)
        if not num_rows or logits_RV is None:
            logits_RV = draft_ids_S = draft_probs_S = None
        elif ranges is None and 2 * num_rows < len(logits_RV):
            # Copying a few rows takes less memory than a reference to all.
            parts, logits_RV = _copy_rows(parts, logits_RV)
        largest = None
        if logits_RV is not None and (self.reduces or logits_RV.is_cuda):
            # The copy is queued, not awaited. Without the reference, PyTorch could give the logits'
            # memory to the next step.
            largest, logits_RV = find_in_one_pass(logits_RV, self.capture.config.logprobs), None
        # Pass the list itself, because `StepQueue` may extend it in place.
        finished, self.finished = self.finished, []
        num_new_tokens, self.num_new_tokens = self.num_new_tokens, 0
        return EngineStep(
            draft_version=self.capture.draft_version,
            target_version=self.capture.target_version,
            num_new_tokens=num_new_tokens,
            parts=parts,
            finished=finished,
            sampled_BK=sampled_BK,
            num_sampled_B=num_sampled_B,
            starts_B=starts_B,
            ranges=ranges,
            confidences_BJ=confidences_BJ,
            logits_RV=logits_RV,
            largest=largest,
            draft_ids_S=draft_ids_S,
            draft_probs_S=draft_probs_S,
            computed=record_event(sampled_BK),  # recorded after all GPU work queued for this step
        )

    def _release(self) -> None:
        step, self.unread = self.unread, None
        if step is not None:
            self.capture.queue.put(step)

    def make_empty_step(self) -> EngineStep | None:
        """Create the step for a batch without recorded requests.

        The step reports the earlier requests that have finished. Return None if there are none.
        """
        return self._make_finished_step() if self.finished else None

    def _make_finished_step(self) -> EngineStep:
        finished, self.finished = self.finished, []
        return EngineStep(draft_version=self.capture.draft_version, parts=[], finished=finished)

    def _list_parts(self, batch: Batch) -> list[StepPart]:
        with_partial = self.capture.config.hidden_states
        return [
            StepPart(
                request=info,
                start=batch.starts[i],
                sampled_row=None if batch.is_partial[i] else i,
                num_drafts=batch.num_drafts[i],
                proposer=batch.proposers[i],
                first_row=batch.first_rows[i],
                first_draft=batch.first_drafts[i],
                num_read=batch.first_reads[i + 1] - batch.first_reads[i],
                first_read=batch.first_reads[i],
            )
            for i, info in enumerate(batch.infos)
            if info is not None and (with_partial or not batch.is_partial[i])
        ]

    def _decide(self, request: Any) -> RequestInfo | None:
        """Return the record header of a new request, or None if the request is not recorded."""
        params = request.sampling_params
        origin = read_origin_arguments(params.extra_args)
        if (
            origin is None
        ):  # e.g. from a different front end: it is unknown whether the client opted out
            self.capture.counts["skipped_requests_unmarked"] += 1
            return None
        if reason := _find_skip_reason(
            request, origin, with_states=self.capture.config.hidden_states
        ):
            self.capture.counts[f"skipped_requests_{reason}"] += 1
            return None
        if not self.capture.is_sampled(request.req_id, origin.tenant):
            return None
        self.capture.counts["captured_requests"] += 1
        # The prompt is counted once, with the next step: `StepQueue` limits the prompt tokens that
        # waiting steps keep in memory.
        self.num_new_tokens += len(request.prompt_token_ids)
        # The engine also ends an answer at the model's maximum length, whatever max_tokens is.
        max_tokens = self.max_model_len - len(request.prompt_token_ids)
        return RequestInfo(
            request_id=request.req_id,
            prompt_ids=list(request.prompt_token_ids),
            sampling=_read_sampling(params),
            max_tokens=min(params.max_tokens or max_tokens, max_tokens),
            stop_ids=frozenset(params.stop_token_ids or ()) | ({params.eos_token_id} - {None}),
            domain=origin.domain,
            tenant=origin.tenant,
            constraints=tuple(name for name, applies in _find_constraints(params) if applies),
            adapter=request.lora_request.lora_name if request.lora_request else "",
            template_arguments=origin.arguments,
            text_begin=_find_text(request),
        )


def record_event(tensor: Tensor) -> torch.cuda.Event | None:
    """Record an event after all work queued so far on the tensor's GPU.

    Return None on a CPU, where the work is already done.
    """
    if not tensor.is_cuda:
        return None
    # `blocking` lets the background thread wait for the event without spinning.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    return event


PLAIN_ARGUMENTS = {EXTRA_ARGS_KEY, "kv_transfer_params", "ec_transfer_params"}


def _find_text(request: Any) -> int:
    """Return the index of the first token after the last image, video or audio; 0 if none."""
    places = [feature.mm_position for feature in request.mm_features]
    return max((place.offset + place.length for place in places), default=0)


def _find_skip_reason(request: Any, origin: Origin, *, with_states: bool) -> str:
    """Return why a request cannot be recorded; empty if it can."""
    params = request.sampling_params
    reasons = {
        "opt_out": origin.opt_out,
        # The prefill yields the only token, so no draft proposes it (e.g. a step of a beam search).
        "one_token": params.max_tokens == 1,
        # A record cannot express how the engine then chooses its tokens.
        "watermark": bool(params.watermarking),
        "forced_tokens": bool(params.trace_decode_token_ids),
        "logit_bias": bool(params.logit_bias),  # vLLM refuses it only when it uses a draft
        # These arguments are for logits processors that do not belong to vLLM.
        "custom_arguments": bool((params.extra_args or {}).keys() - PLAIN_ARGUMENTS),
        # The target read more than token ids, but a head can learn from the states after the last
        # image.
        "multimodal": (bool(request.mm_features) and not with_states)
        # A prompt that mixes embeddings and text has token ids too, with placeholders among them.
        or request.prompt_embeds is not None,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _find_constraints(params: Any) -> Iterable[tuple[Constraint, bool]]:
    yield "structured_output", params.structured_outputs is not None
    yield "min_tokens", bool(params.min_tokens)
    yield "bad_words", bool(params.bad_words)
    yield "allowed_tokens", params.allowed_token_ids is not None
    yield "thinking_budget", params.thinking_token_budget is not None


def find_owner(config: CaptureConfig, request: Any) -> bytes | None:
    """Return the name of the live counts that draft for a request and learn from its answer.

    Requests with the same tenant, cache salt and adapter share live counts. None means that the
    request is excluded from live counts.
    """
    origin = read_origin_arguments(request.sampling_params.extra_args)
    if origin is None or origin.opt_out or config.find_skip_reason(origin.tenant, b""):
        return None
    adapter = request.lora_request.lora_name if request.lora_request else ""
    return name_owner(origin.tenant) + _hash(f"{origin.cache_salt}\0{adapter}")


def name_owner(tenant: str) -> bytes:
    """Return the name prefix of a tenant's live counts."""
    return _hash(tenant)


def _hash(name: str) -> bytes:
    # The hash is the same on all ranks, and too long for collisions to be found.
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:OWNER_BYTES]


def _read_sampling(params: Any) -> Sampling:
    return Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(0, params.top_k),
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
    )


def _read_states(runs: Sequence[tuple[int, int]], streams_ND: Sequence[Tensor]) -> Tensor:
    """Copy the hidden states of these runs of tokens, bfloat16 [N, L, D].

    A copy is necessary, because the engine reuses its buffers.
    """
    # Use slices: an index tensor would have to be copied to the GPU and would wait for its queue.

    def read(stream_ND: Tensor) -> Tensor:
        slices = [stream_ND[begin:end] for begin, end in runs]
        return slices[0] if len(slices) == 1 else torch.cat(slices)

    return torch.stack([read(stream_ND) for stream_ND in streams_ND], dim=1).bfloat16()


def _find_runs(parts: list[StepPart]) -> list[tuple[int, int]]:
    """Group the tokens read by `parts` into as few runs as possible.

    If all requests are recorded, there is only one run. One slice for each of 256 requests and
    three layers would take the engine thread a millisecond.
    """
    runs: list[tuple[int, int]] = []
    for part in parts:
        begin, end = part.first_read, part.first_read + part.num_read
        if runs and runs[-1][1] == begin:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs


def _copy_rows(parts: list[StepPart], logits_RV: Tensor) -> tuple[list[StepPart], Tensor]:
    moved: list[StepPart] = []
    kept: list[Tensor] = []
    num_rows = 0
    for part in parts:
        moved.append(msgspec.structs.replace(part, first_row=num_rows))
        if part.sampled_row is not None:
            kept.append(logits_RV[part.first_row : part.first_row + part.num_drafts + 1])
            num_rows += part.num_drafts + 1
    return moved, torch.cat(kept)
