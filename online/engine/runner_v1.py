"""Hooks on an instance of vLLM's V1 model runner. No other file knows the runner's method names.

`_sample(logits, metadata)` is the one place where the target's logits, the draft tokens and the sampled tokens of a
step meet. Each hook calls the runner's method, keeps references to the tensors, and returns the result unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from redraft.online.engine.capture import Capture
from redraft.online.engine.request_log import RequestInfo
from redraft.online.engine.steps import EngineStep, StepPart
from redraft.online.records.origin import Origin, read_origin_arguments
from redraft.online.records.record import Sampling

RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"


def require_known_runner(runner: object) -> None:
    """Check that `runner` is vLLM's V1 model runner or derived from it, as the CPU runner is.

    Raises: ValueError if it is not.
    """
    names = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(runner).__mro__]
    if RUNNER not in names:
        raise ValueError(f"vLLM's V1 model runner is recorded, not {names[0]}: set VLLM_USE_V2_MODEL_RUNNER=0")


def install_capture(runner: Any, capture: Capture) -> None:
    """Let `capture` see every step of `runner` from now on."""
    hooks = _Hooks(runner, capture)
    runner._sample = hooks.sample
    runner._get_spec_decode_draft_probs = hooks.draft_probs
    runner._on_request_state_removed = hooks.request_removed
    if capture.config.hidden_states:
        runner.propose_draft_token_ids = hooks.propose


class _Hooks:
    def __init__(self, runner: Any, capture: Capture) -> None:
        self.runner = runner
        self.capture = capture
        self.requests: dict[str, RequestInfo | None] = {}
        """Record header of every running request; None if a request is not recorded."""
        self.finished: list[str] = []
        self.step_draft_probs_SV: Tensor | None = None
        self.unread: EngineStep | None = None
        """The newest step, held back until the draft reads the hidden states of this step."""
        self._sample = runner._sample
        self._draft_probs = runner._get_spec_decode_draft_probs
        self._request_removed = runner._on_request_state_removed
        self._propose = runner.propose_draft_token_ids

    def sample(self, logits_RV: Tensor | None, metadata: Any) -> Any:
        self.step_draft_probs_SV = None  # set by `draft_probs`, which the runner calls within `_sample`
        output = self._sample(logits_RV, metadata)
        try:
            step = self._make_step(logits_RV, metadata, output.sampled_token_ids)
            self._release()  # the previous step drafted nothing, so nobody read the states
            if self.capture.config.hidden_states:
                self.unread = step
            elif step is not None:
                self.capture.queue.put(step)
        except Exception as error:  # capture may fail, serving must not
            self.capture.report(error, "hook")
        return output

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        """Hook on the draft's proposal: args[3] holds the target's last hidden states, args[5] those of its layers."""
        try:
            if self.unread is not None and self.unread.parts:
                states_NLD = _read_states(self.unread.parts, args[5] or [args[3]])
                self.unread = replace(self.unread, states_NLD=states_NLD, computed=_record_event(states_NLD))
            self._release()
        except Exception as error:  # capture may fail, serving must not
            self.capture.report(error, "hidden_states")
        return self._propose(*args, **kwargs)

    def _release(self) -> None:
        step, self.unread = self.unread, None
        if step is not None:
            self.capture.queue.put(step)

    def draft_probs(self, metadata: Any) -> Tensor | None:
        self.step_draft_probs_SV = self._draft_probs(metadata)
        return self.step_draft_probs_SV

    def request_removed(self, request_id: str, state: Any) -> None:
        self._request_removed(request_id, state)
        if self.requests.pop(request_id, None) is not None:
            self.finished.append(request_id)
        try:
            # Check even if this request was not recorded: it may be the last to go.
            if self.finished and not self.runner.requests:  # the engine may now idle, and no step would carry the news
                self._release()
                self.capture.queue.put(self._make_finished_step())
        except Exception as error:  # capture may fail, serving must not
            self.capture.report(error, "hook")

    def _make_finished_step(self) -> EngineStep:
        finished, self.finished = self.finished, []
        return EngineStep(draft_version=self.capture.draft_version, parts=[], finished=finished)

    def _make_step(self, logits_RV: Tensor | None, metadata: Any, sampled_BK: Tensor) -> EngineStep | None:
        batch = self.runner.input_batch
        infos = [self._get_info(request_id) for request_id in batch.req_ids[: batch.num_reqs]]
        if not any(infos):
            return self._make_finished_step() if self.finished else None
        parts = self._list_parts(infos, metadata.num_draft_tokens if metadata else [0] * len(infos))
        finished, self.finished = self.finished, []
        num_rows = sum(part.num_drafts + 1 for part in parts if part.num_drafts)
        if not num_rows or logits_RV is None:
            return EngineStep(
                draft_version=self.capture.draft_version,
                parts=parts,
                finished=finished,
                sampled_BK=sampled_BK,
                computed=_record_event(sampled_BK),
            )
        if 2 * num_rows < len(logits_RV):  # copying few rows holds less memory than a reference to all
            parts, logits_RV = _copy_rows(parts, logits_RV)
        draft_probs_S = self._gather_draft_probs(metadata.draft_token_ids)
        return EngineStep(
            draft_version=self.capture.draft_version,
            parts=parts,
            finished=finished,
            sampled_BK=sampled_BK,
            logits_RV=logits_RV,
            draft_ids_S=metadata.draft_token_ids,
            draft_probs_S=draft_probs_S,
            # A reference is enough: V1's rejection sampler copies the rows it changes.
            computed=_record_event(logits_RV),  # after all GPU work queued for this step
        )

    def _list_parts(self, infos: list[RequestInfo | None], num_drafts_B: Sequence[int]) -> list[StepPart]:
        runner, count = self.runner, len(infos)
        first_reads = runner.query_start_loc.np[: count + 1].tolist()
        num_computed_B = runner.input_batch.num_computed_tokens_cpu[:count].tolist()
        is_partial_prefill_B = runner.discard_request_mask.np[:count].tolist()
        with_partial = self.capture.config.hidden_states
        parts: list[StepPart] = []
        first_draft = 0
        for i, (info, num_drafts) in enumerate(zip(infos, num_drafts_B, strict=True)):
            if info is not None and (with_partial or not is_partial_prefill_B[i]):
                num_read = first_reads[i + 1] - first_reads[i]
                part = StepPart(
                    request=info,
                    start=num_computed_B[i] + num_read - num_drafts,
                    sampled_row=None if is_partial_prefill_B[i] else i,
                    num_drafts=num_drafts,
                    first_row=first_draft + i,  # each earlier request has its drafts plus one bonus row
                    first_draft=first_draft,
                    num_read=num_read,
                    first_read=first_reads[i],
                )
                parts.append(part)
            first_draft += num_drafts
        return parts

    def _gather_draft_probs(self, draft_ids_S: Tensor) -> Tensor | None:
        if self.step_draft_probs_SV is None:
            return None
        return self.step_draft_probs_SV.gather(1, draft_ids_S[:, None].long())[:, 0]

    def _get_info(self, request_id: str) -> RequestInfo | None:
        if request_id not in self.requests:
            self.requests[request_id] = self._decide(self.runner.requests[request_id])
        return self.requests[request_id]

    def _decide(self, state: Any) -> RequestInfo | None:
        """The record header of a new request, or None if it is not to be recorded."""
        params = state.sampling_params
        origin = read_origin_arguments(params.extra_args)
        if origin is None:  # e.g. of another front end: whether its client opted out is not known
            self.capture.counts["skipped_requests_unmarked"] += 1
            return None
        if reason := _find_skip_reason(state, origin):
            self.capture.counts[f"skipped_requests_{reason}"] += 1
            return None
        if not self.capture.is_sampled(state.req_id, origin.tenant):
            return None
        self.capture.counts["captured_requests"] += 1
        max_model_len = self.runner.max_model_len - len(state.prompt_token_ids)
        return RequestInfo(
            request_id=state.req_id,
            prompt_ids=list(state.prompt_token_ids),
            sampling=_read_sampling(params),
            max_tokens=min(params.max_tokens or max_model_len, max_model_len),
            stop_ids=frozenset(params.stop_token_ids or ()) | ({params.eos_token_id} - {None}),
            domain=origin.domain,
            tenant=origin.tenant,
        )


def _find_skip_reason(state: Any, origin: Origin) -> str:
    """Why a request cannot be recorded; empty if it can."""
    params = state.sampling_params
    reasons = {
        "opt_out": origin.opt_out,
        # its logits already contain the grammar's mask
        "structured_output": params.structured_outputs is not None,
        # the engine changes its logits after they were captured, and a record does not say how; logit_bias is refused
        "min_tokens": bool(params.min_tokens),
        "bad_words": bool(params.bad_words),
        "allowed_tokens": params.allowed_token_ids is not None,
        # with an adapter the target is not the one the draft is trained for
        "lora": state.lora_request is not None,
        # the target read more than token ids
        "multimodal": bool(state.mm_features) or state.prompt_token_ids is None,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


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


def _read_states(parts: list[StepPart], streams_ND: Sequence[Tensor]) -> Tensor:
    """Hidden states of the tokens read by `parts`, bfloat16 [N, L, D]. A copy: the engine reuses the buffers."""

    # By slices: an index tensor would be copied to the GPU and wait for its queue.
    def read(stream_ND: Tensor) -> Tensor:
        return torch.cat([stream_ND[part.first_read : part.first_read + part.num_read] for part in parts])

    return torch.stack([read(stream_ND) for stream_ND in streams_ND], dim=1).bfloat16()


def _copy_rows(parts: list[StepPart], logits_RV: Tensor) -> tuple[list[StepPart], Tensor]:
    """Copy the rows of `parts`, and return the parts with offsets into the copy."""
    moved: list[StepPart] = []
    kept: list[Tensor] = []
    num_rows = 0
    for part in parts:
        moved.append(msgspec.structs.replace(part, first_row=num_rows))
        if part.num_drafts:
            kept.append(logits_RV[part.first_row : part.first_row + part.num_drafts + 1])
            num_rows += part.num_drafts + 1
    return moved, torch.cat(kept)


def _record_event(tensor: Tensor) -> torch.cuda.Event | None:
    """An event after all work queued so far on the tensor's GPU; None on a CPU, where the work is done already."""
    if not tensor.is_cuda:
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(tensor.device).record_event()
    return event
