"""Drafts after the answer: a step's tokens leave the worker before the next draft is computed.

    execute_model ─► sample_tokens ─► tokens to the client
                                        └─► take_draft_token_ids ─► propose ─► next step

vLLM's V1 runner proposes within `sample_tokens`, so that a first token waits for the draft to read the
prompt, and each token for the draft tokens after it. The engine core sends the tokens first and asks
for the draft tokens next (`EngineCore.post_step`), and the runner can compute them then: the inputs stay
as they are until the next `execute_model`. A step takes as long as before.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from redraft.engine.hooks import RunnerState, around, find_state, hook


class LateDrafts:
    """Computes the proposals of one V1 runner in `take_draft_token_ids`."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self._waiting: list[Callable[[], None]] = []
        self._propose: Any
        self._take: Any
        self._execute_model: Any
        hook(
            runner,
            "late_drafts",
            propose_draft_token_ids=around(self, "_propose", self.propose),
            take_draft_token_ids=around(self, "_take", self.take),
            execute_model=around(self, "_execute_model", self.execute_model),
        )

    def propose(self, scheduled: Any, sampled: Any, *rest: Any) -> Any:
        if not (scheduled.num_spec_tokens_to_schedule or reads_prompt(scheduled)):
            return self._propose(scheduled, sampled, *rest)
        self._waiting = [partial(self._draft, scheduled, sampled, *rest)]
        return [[] for _ in sampled]  # a list: vLLM copies nothing to the host yet

    def then(self, call: Callable[[], None]) -> None:
        """Call a function after the proposal of this step; at once if none waits."""
        if self._waiting:
            self._waiting.append(call)
        else:
            call()

    def finish(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def take(self) -> Any:
        self.finish()
        return self._take()

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.finish()  # the inputs of a proposal that nobody took are overwritten next
        return self._execute_model(*args, **kwargs)

    @torch.inference_mode()
    def _draft(self, scheduled: Any, *args: Any) -> None:
        self.runner._draft_token_ids = self._propose(scheduled, *args)
        self.runner._copy_draft_token_ids_to_cpu(scheduled)


def reads_prompt(output: Any) -> bool:
    """Whether a step reads more than the last token and the draft tokens of each request."""
    drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
    return bool(output.total_num_scheduled_tokens > len(output.num_scheduled_tokens) + drafts)


def install_late_drafts(initialize: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Wrap a worker's start-up so that its runner drafts after the answer, if it can."""

    def initialize_and_install(wrapper: Any, kv_cache_configs: list[Any]) -> None:
        initialize(wrapper, kv_cache_configs)
        install(wrapper.worker.model_runner)

    return initialize_and_install


def install(runner: Any) -> None:
    """Make a V1 runner draft after the answer. It is safe to call again."""
    config = runner.vllm_config
    state = find_state(runner, RunnerState)
    if state.late is None and can_wait(config):
        state.late = LateDrafts(runner)


def can_wait(config: Any) -> bool:
    """Whether draft tokens are taken after each step, and nothing else waits for the draft.

    Steps scheduled ahead take no draft tokens. A KV connector saves the draft's keys within the
    step. Replicas run empty drafts beside those of others, at the same point of a step.
    """
    parallel = config.parallel_config
    return bool(
        config.speculative_config
        and not config.use_v2_model_runner
        and not config.scheduler_config.async_scheduling
        and not config.kv_transfer_config
        and parallel.data_parallel_size == 1
        and parallel.pipeline_parallel_size == 1
    )


def after_draft(runner: Any, call: Callable[[], None]) -> None:
    """Call a function after the proposal of this step, at once if the runner does not wait."""
    late = find_state(runner, RunnerState).late
    if late is None:
        call()
    else:
        late.then(call)
