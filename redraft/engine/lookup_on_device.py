"""Lookups of counted answers on the device, for vLLM's V2 runner with steps scheduled ahead.

The scheduler plans a step before the tokens of the previous step are on the host. The chains are
therefore followed on the device, in the texts that the runner keeps there, and the host copies only
the texts of finished requests:

    finish_requests ─► the text, copied ─► two steps later: counted ─► the table ─► propose

After two steps, the copy is complete, because vLLM plans no further ahead. All ranks of a server
read a text in the same step, so their tables and draft tokens are identical.

B = requests in a step, S = slots of the runner, K = maximum number of draft tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from redraft.engine.answer_counter import MOST_TOKENS, AnswerCounter
from redraft.engine.device_runs import Chains, DeviceRuns
from redraft.engine.hooks import around, hook
from redraft.engine.lookup_hooks import Batch, Request, follow_requests
from redraft.heads.families.retrieval import Live, Retrieval

STEPS_AHEAD = 2
"""Number of steps after which a copy from the device has reached the host."""

SLACK = 64
"""Maximum number of tokens in a text after the answer's end."""

PADDING = -1
"""Value that replaces tokens of an answer that are too old to be counted."""


class Ended(NamedTuple):
    """The text of a finished request on its way to the host."""

    step: int
    name: str
    request: Any
    copied: Tensor
    """The number of tokens, followed by the last tokens, in pinned memory."""
    event: Any

    def read(self) -> Request:
        if self.event is not None:
            self.event.synchronize()
        num_tokens, ids = int(self.copied[0]), self.copied[1:].numpy()
        ids = ids[max(0, len(ids) - num_tokens) :]
        first = num_tokens - len(ids)
        prompt = self.request.prompt_token_ids
        num_prompt = num_tokens if prompt is None else len(prompt)
        gone = np.full(max(0, first - num_prompt), PADDING, np.int32)
        return Request(
            text=np.concatenate([gone, ids]),
            num_tokens=len(gone) + len(ids),
            num_prompt_tokens=max(0, num_prompt - first),
            sampling_params=self.request.sampling_params,
            lora_request=self.request.lora_request,
        )


class DeviceTexts:
    """The running requests of a V2 runner, and the texts of finished ones."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.requests: dict[str, Any] = {}
        """vLLM's own request objects, by name, kept until the text is read."""
        self.input_batch = Batch([], [], np.zeros(0, np.int32))
        self.counter: AnswerCounter | None = None
        self._step = 0
        self._ended = deque[Ended]()
        self._add_requests: Any
        self._finish_requests: Any
        follow_requests(runner, self)

    def add_requests(self, scheduler_output: Any) -> None:
        self._add_requests(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            self.requests[request.req_id] = request

    def finish_requests(self, scheduler_output: Any) -> None:
        """Start copying the texts of finished requests, before their slots are reused."""
        self._step += 1
        for name in sorted(scheduler_output.finished_req_ids):
            slot = self.runner.req_states.req_id_to_index.get(name)
            if self.counter is None or slot is None:
                self.requests.pop(name, None)
                if self.counter is not None:  # a preempted request no longer has a slot
                    self.counter.end(name, None)
            elif request := self.requests.get(name):
                copied, event = self._copy(slot)
                self._ended.append(Ended(self._step, name, request, copied, event))
        self._finish_requests(scheduler_output)

    def learn(self) -> None:
        """Pass the texts that finished two steps ago to the counter, and count a few tokens."""
        if self.counter is None:
            return
        while self._ended and self._ended[0].step <= self._step - STEPS_AHEAD:
            ended = self._ended.popleft()
            self.counter.end(ended.name, ended.read())
            self.requests.pop(ended.name, None)
        self.counter.learn()

    def _copy(self, slot: int) -> tuple[Tensor, Any]:
        states = self.runner.req_states
        length_1 = states.total_len.gpu[slot : slot + 1]
        text_T = states.all_token_ids.gpu[slot]
        size = min(len(text_T), MOST_TOKENS + SLACK)
        places = torch.arange(-size, 0, device=text_T.device) + length_1
        last_T = text_T.index_select(0, places.clamp(min=0))
        copied = torch.cat([length_1.to(last_T.dtype), last_T]).to("cpu", non_blocking=True)
        if text_T.device.type != "cuda":
            return copied, None
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return copied, event


@dataclass
class LookupOnDevice:
    """Proposes a V2 runner's draft tokens from counted answers, alone or before a head."""

    runner: Any
    texts: DeviceTexts
    draft: Retrieval
    head_tokens: int | None = None
    """Maximum number of tokens that the head drafts per step. If None, it is the same as for the
    lookup.
    """
    head_requests: int | None = None
    """Maximum number of requests in a step for which the head drafts."""
    is_mixed: bool = False

    def __post_init__(self) -> None:
        self.looked_up: frozenset[str] = frozenset()
        """Requests whose newest draft was looked up."""
        self.runs = DeviceRuns(self.draft, self.runner.device)
        speculator = self.runner.speculator
        self.confidences_SK = getattr(speculator, "draft_token_confidence_probs", None)
        self._sample: Any
        self._propose: Any
        hook(self.runner, "lookups", sample=around(self, "_sample", self.sample))
        hook(speculator, "lookups", propose=around(self, "_propose", self.propose))
        # This compiles the kernel, for the dtypes of vLLM's slots and counts.
        slot_1 = torch.zeros(1, dtype=torch.int64, device=self.runner.device)
        self._follow(slot_1, slot_1.int(), [None], self.runner.num_speculative_steps)

    def sample(self, hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
        """Sample and count answers in every step, even if the pace is 0."""
        self.looked_up = frozenset()
        self.texts.input_batch = Batch(list(batch.req_ids), [], np.zeros(0, np.int32))
        self.texts.learn()
        return self._sample(hidden_states, batch, grammar_output)

    def propose(self, *args: Any, **options: Any) -> Tensor:
        """Queue the work for a step's draft tokens [B, K], in vLLM's interface, without waiting."""
        if options.get("dummy_run"):
            drafted: Tensor = self._propose(*args, **options)
            return drafted
        batch, num_sampled_B = args[0], args[5]
        most = options.get("num_speculative_tokens", self.runner.num_speculative_steps)
        owners = self._list_owners(batch.req_ids)
        found = self._follow(batch.idx_mapping, num_sampled_B, owners, most)
        # For all requests, even before a head, because only the device knows the origin of a draft.
        self.looked_up = frozenset(batch.req_ids)
        if self.is_mixed:
            return self._fill(found, most, *args, **options)
        if self.confidences_SK is not None:
            self.confidences_SK[: batch.num_reqs] = found.confidences_BK
        return found.tokens_BK

    def _follow(
        self, slots_B: Tensor, num_sampled_B: Tensor, owners: list[bytes | None], most: int
    ) -> Chains:
        states = self.runner.req_states
        return self.runs.follow(
            states.all_token_ids.gpu,
            states.total_len.gpu,
            slots_B,
            num_sampled_B,
            states.last_sampled_tokens,
            owners,
            most,
            self.runner.num_speculative_steps,
        )

    def _fill(self, found: Chains, most: int, *args: Any, **options: Any) -> Tensor:
        """Return the looked-up tokens, or the head's draft for requests without a match."""
        batch = args[0]
        number = most if self.head_tokens is None else min(most, self.head_tokens)
        if self.head_requests is not None and batch.num_reqs > self.head_requests:
            number = 0  # the head still processes the step's tokens to fill its KV cache
        drafted = self._propose(*args, **options | {"num_speculative_tokens": number})
        tokens_BK = found.tokens_BK.clone()
        is_head_B1 = (found.counts_B == 0)[:, None]
        tokens_BK[:, :number] = torch.where(is_head_B1, drafted[:, :number], tokens_BK[:, :number])
        return tokens_BK

    def _list_owners(self, names: list[str]) -> list[bytes | None]:
        if (counter := self.texts.counter) is None:
            return [b""] * len(names)
        return [counter.owner(name, self.texts.requests.get(name)) for name in names]


def install_on_device(
    runner: Any, draft: Retrieval, mixed: dict[str, int] | None
) -> LookupOnDevice:
    """Look tokens up on a V2 runner's device from now on. `mixed` is set if a head follows."""
    states = runner.req_states
    if mixed is not None:
        move_to_device(states.all_token_ids, runner.device)
    texts = DeviceTexts(runner)
    if isinstance(draft, Live):
        texts.counter = AnswerCounter(texts.requests, draft)
    limits = mixed or {}
    return LookupOnDevice(
        runner,
        texts,
        draft,
        head_tokens=limits.get("head_tokens"),
        head_requests=limits.get("head_requests"),
        is_mixed=mixed is not None,
    )


def move_to_device(texts: Any, device: torch.device) -> None:
    """Move vLLM's empty `StagedWriteTensor` to the device.

    With a head, vLLM keeps the texts in host memory, which each step would have to read. The object
    itself stays the same, because penalties, bad words and logits processors hold references to it.
    """
    moved = type(texts)(tuple(texts.gpu.shape), dtype=texts.dtype, device=device)
    vars(texts).clear()
    vars(texts).update(vars(moved))


def give_confidences(runner: Any) -> None:
    """Let vLLM verify a lookup's tokens adaptively. Call this before the caches are created.

    vLLM asks a speculator for confidences if its attributes declare them.
    """
    speculator, config = runner.speculator, runner.vllm_config.speculative_config
    if speculator is None or not config.enable_adaptive_verification:
        return
    if not hasattr(speculator, "draft_token_confidence_probs"):
        speculator.draft_token_confidence_probs = torch.zeros(
            runner.max_num_reqs, runner.num_speculative_steps, device=runner.device
        )
        speculator.enable_adaptive_verification = True
