"""A stand-in for vLLM's V2 runner that schedules steps ahead: texts and lengths are on the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from test_lookup_on_v2 import LENGTH, SLOTS, RunnerV2


class Rows:
    """Stands for vLLM's `StagedWriteTensor`."""

    def __init__(self, size: Any, dtype: torch.dtype, device: Any) -> None:
        self.gpu, self.dtype = torch.zeros(size, dtype=dtype, device=device), dtype


class RunnerAhead(RunnerV2):
    device = torch.device("cpu")

    def __init__(self, speculative: Any) -> None:
        super().__init__(speculative)
        self.vllm_config.scheduler_config.async_scheduling = True
        self.req_states.all_token_ids = Rows((SLOTS, LENGTH), torch.int32, "cpu")
        self.req_states.total_len = Rows(SLOTS, torch.int32, "cpu")
        self.req_states.last_sampled_tokens = torch.zeros(SLOTS, 1, dtype=torch.int64)
        self.newest: list[int] = []
        self.counts: list[int] = []
        self.head_tokens = 0
        self.redraft: Any = None

    def add_requests(self, scheduler_output: Any) -> None:
        super().add_requests(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            slot, prompt = (
                self.req_states.req_id_to_index[request.req_id],
                request.prefill_token_ids,
            )
            self.req_states.all_token_ids.gpu[slot, : len(prompt)] = torch.tensor(prompt)
            self.req_states.total_len.gpu[slot] = len(prompt)

    def begin(self, names: list[str], sampled: list[list[int]]) -> Any:
        """The batch of a step, whose sampled tokens the device has put behind the texts."""
        self.sampled, self.newest = sampled, [tokens[-1] if tokens else 0 for tokens in sampled]
        states = self.req_states
        slots = [states.req_id_to_index[name] for name in names]
        for slot, tokens in zip(slots, sampled, strict=True):
            begin = int(states.total_len.gpu[slot])
            end = min(LENGTH, begin + len(tokens))
            states.all_token_ids.gpu[slot, begin:end] = torch.tensor(tokens)[: end - begin]
            states.total_len.gpu[slot] = end
            states.last_sampled_tokens[slot, 0] = states.all_token_ids.gpu[slot, end - 1]
        self.num_sampled_B = torch.tensor([len(tokens) for tokens in sampled], dtype=torch.int32)
        return SimpleNamespace(req_ids=names, num_reqs=len(names), idx_mapping=torch.tensor(slots))

    def propose(self, batch: Any, number: int) -> torch.Tensor:
        drafted: torch.Tensor = self.speculator.propose(
            batch, None, None, None, None, self.num_sampled_B, None,
            self.req_states.last_sampled_tokens, num_speculative_tokens=number,
        )  # fmt: skip
        return drafted

    def sample_tokens(self, names: list[str], sampled: list[list[int]], number: int) -> Any:
        batch = self.begin(names, sampled)
        self.sample(None, batch, None)
        self.counts = [0] * len(names)  # with 0 tokens, nothing is looked up
        self.drafts = self.propose(batch, number).tolist() if number else [[] for _ in names]
        return SimpleNamespace(model_runner_output=SimpleNamespace())

    def step(self, names: list[str], sampled: list[list[int]], number: int) -> Any:
        """The draft tokens that were found, or else the head's."""
        result = self.sample_tokens(names, sampled, number)
        own = min(number, self.head_tokens)
        drafts = [
            draft[: count or (own if tokens else 0)]
            for draft, count, tokens in zip(self.drafts, self.counts, sampled, strict=True)
        ]
        return drafts, result.model_runner_output

    def keep_counts(self, head_tokens: int) -> None:
        """Note how many tokens a lookup finds, which only the device knows."""
        runs, self.head_tokens = self.redraft.lookup.runs, head_tokens
        follow = runs.follow

        def follow_and_keep(*args: Any) -> Any:
            found = follow(*args)
            self.counts = found.counts_B.tolist()
            return found

        runs.follow = follow_and_keep
