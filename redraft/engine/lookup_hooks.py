"""Run lookups in vLLM's model runners. On V2, they are computed on the host, as on V1.

V2 keeps texts and draft tokens on the device, and its proposers return the same number of tokens
for each request. This module therefore tracks the text of each request on the host, and passes
lists of any length to the scheduler, which accepts them if steps are not scheduled ahead:

    add_requests ─► text ◄─ sample: the step's new tokens, awaited
                     │
                     └─► propose: look up, then the head, if any ─► take_draft_token_ids

B = requests in a step, S = slots of the runner, K = maximum number of draft tokens, T = tokens of
the longest request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redraft.engine import lookup_first
from redraft.engine.answer_counter import AnswerCounter
from redraft.engine.hooks import RunnerState, around, find_state, hook
from redraft.engine.live_file import open_file
from redraft.engine.lookup_first import SECTION
from redraft.engine.lookups import Counted, read_counted, read_live
from redraft.engine.settings import read_settings
from redraft.heads.families.retrieval import BEFORE_HEAD, FOLDER, Ids, Retrieval


@dataclass(kw_only=True)
class Request:
    """A request of a V2 runner, with V1's attribute names."""

    text: Ids
    """Prompt and answer. While the request runs, this is a view of the slot's row."""
    num_tokens: int
    num_prompt_tokens: int
    sampling_params: Any
    lora_request: Any

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self.text[: self.num_prompt_tokens].tolist())

    @property
    def output_token_ids(self) -> list[int]:
        return list(self.text[self.num_prompt_tokens : self.num_tokens].tolist())


class Batch(NamedTuple):
    """The requests in a step, with V1's attribute names."""

    req_ids: list[str]
    token_ids_cpu: list[Ids]
    """[B] arrays of [T] token ids"""
    num_tokens_no_spec: NDArray[np.int32]


@dataclass(frozen=True)
class HeadStep:
    """A lookup's call to its head: vLLM's arguments, and the number of tokens to draft."""

    num_spec_tokens_to_schedule: int
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def follow_requests(runner: Any, texts: Any) -> None:
    """Call the hooks of `texts` when requests of a V2 runner start and finish."""
    hook(
        runner,
        "lookups",
        add_requests=around(texts, "_add_requests", texts.add_requests),
        finish_requests=around(texts, "_finish_requests", texts.finish_requests),
    )


class HostTexts:
    """The texts of a V2 runner's requests on the host, with a V1 runner's attribute names."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.vllm_config = runner, runner.vllm_config
        # The system allocates memory only for pages that are written to.
        self.ids_ST = np.zeros((runner.max_num_reqs, runner.max_model_len), np.int32)
        self.requests: dict[str, Request] = {}
        self.input_batch = Batch([], [], np.zeros(0, np.int32))
        self.on_end: Callable[[str, Request], None] = lambda name, request: None
        self._add_requests: Any
        self._finish_requests: Any
        follow_requests(runner, self)

    def add_requests(self, scheduler_output: Any) -> None:
        """Copy the texts of requests that start or resume. V2 calls both of them new."""
        self._add_requests(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            row_T = self.ids_ST[self.runner.req_states.req_id_to_index[request.req_id]]
            ids, prompt = request.prefill_token_ids, request.prompt_token_ids
            row_T[: len(ids)] = ids
            self.requests[request.req_id] = Request(
                text=row_T,
                num_tokens=len(ids),
                num_prompt_tokens=len(ids) if prompt is None else len(prompt),
                sampling_params=request.sampling_params,
                lora_request=request.lora_request,
            )

    def finish_requests(self, scheduler_output: Any) -> None:
        """Pass on the texts of requests that have finished."""
        for name in sorted(scheduler_output.finished_req_ids):
            if request := self.requests.pop(name, None):
                self.on_end(name, request)
        for name in scheduler_output.preempted_req_ids or ():
            if request := self.requests.get(name):
                # Copied, because another request will use the slot.
                request.text = request.text.copy()
        self._finish_requests(scheduler_output)

    def add_sampled(self, batch: Any, output: Any) -> list[list[int]]:
        """Append a step's tokens to the texts, and return them per request.

        Waits for the device.
        """
        ids_BK, counts_B1 = output.sampled_token_ids, output.num_sampled[:, None]
        rows = torch.cat([counts_B1.to(ids_BK.dtype), ids_BK], 1).tolist()
        sampled = [tokens[:count] for count, *tokens in rows]
        requests = [self.requests[name] for name in batch.req_ids]
        for request, tokens in zip(requests, sampled, strict=True):
            end = min(len(request.text), request.num_tokens + len(tokens))
            request.text[request.num_tokens : end] = tokens[: end - request.num_tokens]
            request.num_tokens = end
        self.input_batch = Batch(
            list(batch.req_ids),
            [request.text for request in requests],
            np.array([request.num_tokens for request in requests], np.int32),
        )
        return sampled


class LookupOnV2:
    """Proposes a V2 runner's draft tokens with one of V1's lookups, alone or before a head."""

    def __init__(self, runner: Any, texts: HostTexts, lookup: Any) -> None:
        self.runner, self.texts, self.lookup = runner, texts, lookup
        self.looked_up: frozenset[str] = frozenset()
        """Requests whose newest draft was looked up."""
        self._sampled: list[list[int]] = []
        self._drafts: list[list[int]] | None = None
        """Draft tokens of the newest step; None if it had no draft."""
        self.swapped = getattr(lookup, "swapped", None)
        self._is_first = True
        self._sample: Any
        self._take: Any
        self._propose: Any
        lookup.propose_by_head = self._ask_head
        hook(
            runner,
            "lookups",
            sample=around(self, "_sample", self.sample),
            take_draft_token_ids=around(self, "_take", self.take),
        )
        hook(runner.speculator, "lookups", propose=around(self, "_propose", self.propose))

    def sample(self, hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
        if self._drafts is None and not self._is_first:
            self.lookup.skip()  # no draft, because the pace was 0 in the previous step
        self._drafts, self._is_first, self.looked_up = None, False, frozenset()
        output, *rest = self._sample(hidden_states, batch, grammar_output)
        self._sampled = self.texts.add_sampled(batch, output)
        return output, *rest

    def propose(self, *args: Any, **options: Any) -> Tensor:
        """Return the draft tokens for a step, [B, K], in vLLM's interface. -1 means no token."""
        if options.get("dummy_run"):
            drafted: Tensor = self._propose(*args, **options)
            return drafted
        most = options.get("num_speculative_tokens", self.runner.num_speculative_steps)
        step = HeadStep(most, args, options)
        self._drafts = self.lookup.propose(step, self._sampled)
        names = self.texts.input_batch.req_ids
        self.looked_up = frozenset(getattr(self.lookup, "looked_up", names))
        tokens_BK = self.runner.req_states.draft_tokens
        padded = [draft + [-1] * (tokens_BK.shape[1] - len(draft)) for draft in self._drafts]
        pinned = torch.tensor(padded, dtype=tokens_BK.dtype, pin_memory=tokens_BK.is_cuda)
        return pinned.to(tokens_BK.device, non_blocking=True)

    def take(self) -> Any:
        """Return the draft tokens for the scheduler, which verifies only these."""
        if self._drafts is None:
            return self._take()
        from vllm.v1.outputs import DraftTokenIds

        return DraftTokenIds(self.texts.input_batch.req_ids, self._drafts)

    def _ask_head(self, step: HeadStep, *_: Any) -> Tensor:
        number = step.num_spec_tokens_to_schedule
        # With 0 tokens, the head still processes the step's tokens to fill its KV cache.
        options = {**step.options, "num_speculative_tokens": number}
        drafted: Tensor = self._propose(*step.args, **options)
        return drafted[:, :number]


def install_lookups(initialize: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Make workers look tokens up if the environment specifies a lookup."""

    # vLLM calls this on every worker, after the target and the draft have been loaded.
    def initialize_and_install(wrapper: Any, kv_cache_configs: list[Any]) -> None:
        runner = wrapper.worker.model_runner
        if is_on_device(runner) and FOLDER in read_settings().get(SECTION, {}):
            from redraft.engine.lookup_on_device import give_confidences  # it imports this module

            give_confidences(runner)
        initialize(wrapper, kv_cache_configs)
        # This does nothing without these settings, or if the proposer is already in place.
        install(runner)

    return initialize_and_install


def is_on_device(runner: Any) -> bool:
    """Whether this runner schedules steps ahead, so that a lookup must not wait for its tokens."""
    scheduler = runner.vllm_config.scheduler_config
    return hasattr(runner, "speculator") and getattr(scheduler, "async_scheduling", False)


def install(runner: Any) -> None:
    """Look tokens up from now on, if the environment specifies a lookup.

    If this raises an error, vLLM does not start.

    Raises:
        ValueError: a setting is invalid, this draft does not support a preceding lookup, or this is
            neither of vLLM's model runners.
        FileNotFoundError: the folder specified for counted answers does not exist.
    """
    state = find_state(runner, RunnerState)
    if state.lookup is not None:
        return
    answers, ngrams = read_counted(), lookup_first.read_mix()
    if not (answers or ngrams):
        return
    is_v2 = hasattr(runner, "speculator")
    if is_v2 and runner.speculator is None:
        return  # this pipeline stage does not draft
    if not is_v2 and not hasattr(runner, "drafter"):
        raise ValueError(
            f"lookups support only vLLM's V1 and V2 model runners, not {type(runner).__qualname__}"
        )
    is_mixed = bool(ngrams) and runner.vllm_config.speculative_config.method != "ngram"
    if answers and is_mixed:
        answers.least_first = BEFORE_HEAD
    if is_v2 and is_on_device(runner):
        from redraft.engine.lookup_on_device import install_on_device  # it imports this module

        if answers is None:
            raise ValueError(
                "n-grams are looked up on the host, but this server uses asynchronous scheduling: "
                "start it with --no-async-scheduling"
            )
        state.lookup = device = install_on_device(runner, answers, ngrams if is_mixed else None)
        if counter := device.texts.counter:
            state.counter = counter
            _keep(runner, counter)
    elif is_v2:
        texts = HostTexts(runner)
        lookup = _make_lookup(texts, answers, ngrams, is_mixed)
        state.lookup = LookupOnV2(runner, texts, lookup)
        if counter := _find_counter(lookup):
            state.counter, texts.on_end = counter, counter.end
            _keep(runner, counter)
    elif answers or is_mixed:  # V1 supports n-grams without a head by itself
        state.lookup = lookup = _make_lookup(runner, answers, ngrams, is_mixed)
        propose = around(lookup, "propose_by_head", lookup.propose)
        hook(runner, "lookups", propose_draft_token_ids=propose)
        if counter := _find_counter(lookup):
            state.counter = counter
            _keep(runner, counter)
            hook(runner, "live_counts", _on_request_state_removed=partial(end_after, counter))


def _make_lookup(
    texts: Any, answers: Retrieval | None, ngrams: Mapping[str, int], is_mixed: bool
) -> Any:
    """Create the proposer for `texts`, which is a V1 runner or `HostTexts`."""
    counted = Counted(texts, answers) if answers else None
    if is_mixed:
        return lookup_first.make_proposer(texts, ngrams, counted)
    return counted or lookup_first.Ngrams(texts, ngrams)


def _keep(runner: Any, counter: AnswerCounter) -> None:
    """Read the previous server's counts, and write the counts of this one."""
    if folder := read_live().folder:
        counter.file = open_file(folder, runner, counter.draft)


def _find_counter(lookup: Any) -> AnswerCounter | None:
    return getattr(getattr(lookup, "lookup", lookup), "counter", None)


def end_after(
    counter: AnswerCounter, remove: Callable[[str, Any], None]
) -> Callable[[str, Any], None]:
    """Wrap V1's `_on_request_state_removed` so that the answer is queued afterwards."""

    def remove_and_end(name: str, request: Any) -> None:
        remove(name, request)
        counter.end(name, request)

    return remove_and_end
