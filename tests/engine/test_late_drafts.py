"""The order of a V1 runner's work after a step, on a stand-in with vLLM's order of calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redraft.engine.hooks import RunnerState, find_state, hook
from redraft.engine.patches import after_draft, can_draft_late, install_late


class Runner:
    """Proposes within `sample_tokens`, as `GPUModelRunner` of vLLM 0.32 does."""

    def __init__(self, **changes: Any) -> None:
        self.vllm_config = config(**changes)
        self.calls: list[str] = []
        self.drafts = [[1, 2], [3, 4]]
        self._draft_token_ids: Any = None

    def execute_model(self, scheduled: Any) -> None:
        self.calls.append("execute")
        self.scheduled = scheduled

    def sample_tokens(self) -> str:
        self.calls.append("sample")
        self._draft_token_ids = self.propose_draft_token_ids(self.scheduled, torch.ones(2, 1))
        self._copy_draft_token_ids_to_cpu(self.scheduled)
        return "tokens"

    def propose_draft_token_ids(self, scheduled: Any, sampled: Any) -> Any:
        assert torch.is_inference_mode_enabled() or not scheduled.num_spec_tokens_to_schedule
        self.calls.append("propose")
        return torch.tensor(self.drafts)

    def _copy_draft_token_ids_to_cpu(self, scheduled: Any) -> None:
        if isinstance(self._draft_token_ids, torch.Tensor):
            self.calls.append("copy")

    def take_draft_token_ids(self) -> Any:
        self.calls.append("take")
        return self._draft_token_ids.tolist()


def config(**changes: Any) -> Any:
    given = {"data_parallel_size": 1, "pipeline_parallel_size": 1, "async_scheduling": False}
    given |= {"use_v2_model_runner": False, "kv_transfer_config": None, "speculative_config": 1}
    given |= changes
    return SimpleNamespace(
        speculative_config=given["speculative_config"],
        use_v2_model_runner=given["use_v2_model_runner"],
        kv_transfer_config=given["kv_transfer_config"],
        scheduler_config=SimpleNamespace(async_scheduling=given["async_scheduling"]),
        parallel_config=SimpleNamespace(
            data_parallel_size=given["data_parallel_size"],
            pipeline_parallel_size=given["pipeline_parallel_size"],
        ),
    )


def step(number: int, *, read: int = 1) -> Any:
    """What a scheduler asks for: draft tokens for the next step, and tokens to read per request."""
    return SimpleNamespace(
        num_spec_tokens_to_schedule=number,
        num_scheduled_tokens={"a": read, "b": read},
        scheduled_spec_decode_tokens={},
        total_num_scheduled_tokens=2 * read,
    )


def make_runner() -> Runner:
    runner = Runner()
    install_late(runner)
    install_late(runner)  # once for each feature that asks
    return runner


def test_the_tokens_of_a_step_come_before_its_draft_and_the_draft_is_the_same() -> None:
    runner = make_runner()
    runner.execute_model(step(2, read=30))
    assert runner.sample_tokens() == "tokens"
    assert runner.calls == ["execute", "sample"]
    after_draft(runner, lambda: runner.calls.append("after"))
    assert runner.take_draft_token_ids() == [[1, 2], [3, 4]]
    assert runner.calls[2:] == ["propose", "copy", "after", "take"]
    assert runner.take_draft_token_ids() == [[1, 2], [3, 4]]
    assert runner.calls[6:] == ["take"]


def test_a_draft_that_nobody_takes_is_computed_before_its_inputs_are_overwritten() -> None:
    runner = make_runner()
    runner.execute_model(step(2))
    runner.sample_tokens()
    runner.execute_model(step(2))
    assert runner.calls == ["execute", "sample", "propose", "copy", "execute"]


@pytest.mark.parametrize(("read", "waits"), [(30, True), (1, False)])
def test_at_0_tokens_only_the_reading_of_a_prompt_waits(read: int, waits: bool) -> None:
    runner = make_runner()
    runner.execute_model(step(0, read=read))
    with torch.inference_mode():
        runner.sample_tokens()
    assert ("propose" in runner.calls) is not waits
    done: list[int] = []
    after_draft(runner, lambda: done.append(1))
    assert len(done) == (not waits)


def test_wrappers_of_the_proposal_run_with_it() -> None:
    runner = make_runner()

    def note(call: Any) -> Any:
        def propose(*args: Any) -> Any:
            runner.calls.append("states")
            return call(*args)

        return propose

    hook(runner, "capture", propose_draft_token_ids=note)
    runner.execute_model(step(2))
    runner.sample_tokens()
    assert "states" not in runner.calls
    runner.take_draft_token_ids()
    assert runner.calls[2:4] == ["states", "propose"]


@pytest.mark.parametrize(
    "change",
    [
        {"use_v2_model_runner": True},
        {"async_scheduling": True},
        {"kv_transfer_config": "nixl"},
        {"data_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"speculative_config": None},
    ],
)
def test_no_draft_waits_where_another_part_waits_for_it(change: dict[str, Any]) -> None:
    assert can_draft_late(config())
    assert not can_draft_late(config(**change))
    runner = Runner(**change)
    install_late(runner)
    assert find_state(runner, RunnerState).late is None
    done: list[int] = []
    after_draft(runner, lambda: done.append(1))
    assert done
