"""Hooks on an instance of vLLM's V1 model runner.

No other file uses its method names.

In `_sample(logits, metadata)`, a step's target logits, draft tokens and sampled tokens are all
available. Each hook calls the runner's method, keeps references to the tensors, and returns the
result unchanged.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from redraft.engine.hooks import RunnerState, around, find_state, hook
from redraft.engine.patches import after_draft, reads_prompt
from redraft.online.engine.capture import Capture
from redraft.online.engine.domains import LOOKUP_METHODS, find_padded, mark_step
from redraft.online.engine.feed import Batch, Feed
from redraft.online.engine.request_log import RequestInfo
from redraft.online.engine.reread import ReadText
from redraft.online.engine.steps import EngineStep
from redraft.online.records.record import LOOKUP, PADDING

RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"


def install_capture(runner: Any, capture: Capture) -> None:
    """Make `capture` receive every step of `runner` from now on."""
    ours = _Hooks(runner, capture)
    hook(
        runner,
        "capture",
        _sample=around(ours, "_sample", ours.sample),
        sample_tokens=around(ours, "_sample_tokens", ours.sample_tokens),
        _get_spec_decode_draft_probs=around(ours, "_draft_probs", ours.draft_probs),
        _on_request_state_removed=around(ours, "_request_removed", ours.request_removed),
    )
    if capture.config.hidden_states:
        propose = around(ours, "_propose", ours.propose)
        hook(runner, "capture", propose_draft_token_ids=propose)


def install_proposers(runner: Any) -> None:
    """Distinguish lookups and padding from draft tokens of the served version."""
    find_state(runner, RunnerState).proposers = Proposers(runner)


def find_proposer(runner: Any) -> tuple[Any, list[Any], ReadText]:
    """Return the draft's proposer, its attention groups, and a function that reads a text."""

    def read_text(request_id: str, begin: int, end: int) -> list[int]:
        request = runner.requests[request_id]
        first = begin - request.num_prompt_tokens
        answer: list[int] = request.output_token_ids[first : first + end - begin]
        # If steps are scheduled ahead, -1 stands for a token that only the device has so far.
        return answer[: answer.index(-1)] if -1 in answer else answer

    return runner.drafter, list(runner.drafter.draft_attn_groups), read_text


class Proposers:
    """Tracks the proposer of each request's pending draft tokens, if it is not the served version.

    `sample_tokens` verifies these tokens within `_sample`, and then proposes the next ones. If a
    request nearly fills the context, vLLM proposes nothing for the whole batch and fills in zeros,
    as it does for requests that join the batch (`find_padded`).
    """

    def __init__(self, runner: Any) -> None:
        """Hook into the runner to track proposers from now on.

        The output of each step then names, for the scheduler, the requests whose drafts do not
        count.
        """
        self.runner = runner
        self.state = find_state(runner, RunnerState)
        self.foreign: dict[str, int] = {}
        self._is_proposed = False
        self._propose: Any
        self._sample_tokens: Any
        hook(
            runner,
            "proposers",
            propose_draft_token_ids=around(self, "_propose", self.propose),
            sample_tokens=around(self, "_sample_tokens", self.sample_tokens),
        )

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        self._is_proposed = True
        return self._propose(*args, **kwargs)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        self._is_proposed = False
        if state := self.runner.execute_model_state:  # None after a failure
            self.foreign |= dict.fromkeys(find_padded(state.scheduler_output), PADDING)
        verified = self.foreign
        result = self._sample_tokens(*args, **kwargs)
        if verified and result is not None:
            # If steps are scheduled ahead, vLLM passes a wrapper.
            mark_step(getattr(result, "_model_runner_output", result), foreign=verified)
        after_draft(self.runner, partial(self._note_foreign, verified))
        return result

    def _note_foreign(self, verified: dict[str, int]) -> None:
        batch = self.runner.input_batch.req_ids
        lookup = self.state.lookup
        if not self._is_proposed:
            found = dict.fromkeys(batch, PADDING)
            if lookup:
                lookup.skip()
        elif self.runner.speculative_config.method in LOOKUP_METHODS:
            found = dict.fromkeys(batch, LOOKUP)
        else:
            found = dict.fromkeys(getattr(lookup, "looked_up", ()), LOOKUP)
        # A request that was not in this step keeps its draft for a later step.
        scheduled = set(batch) if verified else ()
        waiting = {
            name: kind
            for name, kind in verified.items()
            if name not in scheduled and name in self.runner.requests
        }
        self.foreign = waiting | found


class _Hooks:
    def __init__(self, runner: Any, capture: Capture) -> None:
        self.runner = runner
        self.capture = capture
        self.feed = Feed(capture, runner.max_model_len)
        self.state = find_state(runner, RunnerState)
        self.step_draft_probs_SV: Tensor | None = None
        self._sample: Any
        self._sample_tokens: Any
        self._draft_probs: Any
        self._request_removed: Any
        self._propose: Any

    def sample_tokens(self, grammar_output: Any) -> Any:
        with self.capture.reporting("hook"):
            state = self.runner.execute_model_state  # None after a failure
            if state is not None and grammar_output is not None:
                asked, requests = grammar_output.structured_output_request_ids, self.runner.requests
                names = [name for name in asked if name in requests]
                for name in names:  # the new tokens have not been sampled yet
                    self.feed.add(requests[name])
                self.feed.keep_unmasked(state.logits, names)
        return self._sample_tokens(grammar_output)

    def sample(self, logits_RV: Tensor | None, metadata: Any) -> Any:
        # Set by `draft_probs`, which the runner calls within `_sample`.
        self.step_draft_probs_SV = None
        infos: list[RequestInfo | None] = []
        with self.capture.reporting("hook"):
            runner = self.runner
            names = runner.input_batch.req_ids[: runner.input_batch.num_reqs]
            infos = [self.feed.add(runner.requests[name]) for name in names]
        kept_RV = logits_RV
        if (
            any(infos)
            and metadata is None
            and logits_RV is not None
            and logits_RV.dtype == torch.float32
        ):
            # Temperature and penalties change these logits in place; the rejection sampler changes
            # copies.
            kept_RV = logits_RV.clone()
        output = self._sample(logits_RV, metadata)
        with self.capture.reporting("hook"):
            # Keep only references: reading a value here would make the engine thread wait for the
            # GPU.
            kept_RV = self.feed.take_unmasked(kept_RV)
            self.feed.put(self._make_step(infos, kept_RV, metadata, output.sampled_token_ids))
        self.step_draft_probs_SV = None  # freed, because it is as large as the logits
        return output

    def propose(self, *args: Any, **kwargs: Any) -> Any:
        """Hook for the draft's proposal.

        `args[3]` contains the target's last hidden states, and `args[5]` the hidden states of its
        layers.
        """
        with self.capture.reporting("hidden_states"):
            # vLLM 0.32 passes all arguments by position. args[5] is a list of tensors, or None if
            # the draft reads no layers.
            self.feed.put_states(args[5] or [args[3]])
        return self._propose(*args, **kwargs)

    def draft_probs(self, metadata: Any) -> Tensor | None:
        self.step_draft_probs_SV = self._draft_probs(metadata)
        return self.step_draft_probs_SV

    def request_removed(self, request_id: str, state: Any) -> None:
        self._request_removed(request_id, state)
        with self.capture.reporting("hook"):
            self.feed.end(request_id)
            # Check this even if the request was not recorded, because the hook may hold the last
            # finished requests.
            if not self.runner.requests:
                self.feed.flush()

    def _make_step(
        self,
        infos: list[RequestInfo | None],
        logits_RV: Tensor | None,
        metadata: Any,
        sampled_BK: Tensor,
    ) -> EngineStep | None:
        if not any(infos):  # the usual case if only a fraction of the requests is recorded
            return self.feed.make_empty_step()
        runner = self.runner
        count = runner.input_batch.num_reqs
        first_reads = runner.query_start_loc.np[: count + 1].tolist()
        num_computed = runner.input_batch.num_computed_tokens_cpu[:count].tolist()
        num_drafts = metadata.num_draft_tokens if metadata else [0] * count
        first_drafts = [0, *accumulate(num_drafts)]
        # The scheduler pads with -1, and the target reads token 0 there.
        draft_ids_S = metadata.draft_token_ids.clamp(min=0) if metadata else None
        foreign = self.state.proposers.foreign if self.state.proposers else {}
        batch = Batch(
            infos=infos,
            first_reads=first_reads,
            num_drafts=num_drafts,
            proposers=[
                foreign.get(request_id, 0) for request_id in runner.input_batch.req_ids[:count]
            ],
            # Skip the drafts of all earlier requests, and one bonus row for each.
            first_rows=[first_drafts[i] + i for i in range(count)],
            first_drafts=first_drafts,
            # E.g. with 10 cached tokens, one sampled token and 3 drafts, the request samples from
            # 10 + 4 - 3 = 11 on.
            starts=[
                num_computed[i] + first_reads[i + 1] - first_reads[i] - num_drafts[i]
                for i in range(count)
            ],
            is_partial=runner.discard_request_mask.np[:count].tolist(),
        )
        return self.feed.make_step(
            batch,
            sampled_BK=sampled_BK,
            logits_RV=logits_RV,
            draft_ids_S=draft_ids_S,
            draft_probs_S=self._gather_draft_probs(draft_ids_S)
            if draft_ids_S is not None
            else None,
        )

    def _gather_draft_probs(self, draft_ids_S: Tensor) -> Tensor | None:
        if self.step_draft_probs_SV is None:
            return None
        return self.step_draft_probs_SV.gather(1, draft_ids_S[:, None].long())[:, 0]


def install_pace(runner: Any, *, has_keys: bool) -> None:
    """Skip the draft at 0 draft tokens, unless it must write a prompt's KV cache entries."""
    speculative = runner.speculative_config
    most, is_suffix = runner.num_spec_tokens, speculative.method == "suffix"
    drafts_all = is_suffix or speculative.parallel_drafting
    lookup = find_state(runner, RunnerState).lookup

    def pace(propose: Callable[..., Any]) -> Callable[..., Any]:
        def propose_or_not(scheduled: Any, sampled: Any, *rest: Any) -> Any:
            number = scheduled.num_spec_tokens_to_schedule
            # Suffix decoding learns from every token, so it cannot be skipped.
            if not (number or is_suffix or (has_keys and reads_prompt(scheduled))):
                found = (
                    [[] for _ in sampled] if isinstance(sampled, list) else _skip(runner, sampled)
                )
            else:
                # A lookup does not accept 0, and parallel drafts always have the same shape.
                asked = (
                    most if drafts_all else max(1, number) if isinstance(sampled, list) else number
                )
                # Copy the scheduler's output only if it must change, because it is a dataclass of
                # twenty fields.
                if asked != number:
                    scheduled = replace(scheduled, num_spec_tokens_to_schedule=asked)
                found = propose(scheduled, sampled, *rest)
            if not number and lookup:
                lookup.skip()  # live counts learn from this step, but no draft is verified
            return (
                [tokens[:number] for tokens in found]
                if isinstance(found, list)
                else found[:, :number]
            )

        return propose_or_not

    hook(runner, "pace", propose_draft_token_ids=pace)


def _skip(runner: Any, sampled_BK: Any) -> Any:
    """Return no draft tokens, as a tensor [B, 0].

    If steps are scheduled ahead, the runner reads the number of rejected tokens from the copy made
    here.
    """
    if runner.valid_sampled_token_count_event is not None:
        following, counts = runner.drafter.prepare_next_token_ids_padded(
            sampled_BK, runner.requests, runner.input_batch, runner.discard_request_mask.gpu
        )
        runner._copy_valid_sampled_token_count(following, counts)
    return sampled_BK.new_empty((len(sampled_BK), 0)).long()
