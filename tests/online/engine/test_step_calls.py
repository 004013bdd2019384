"""The operations on tensors that the hooks on a model runner add to a step.

A step that records nothing has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from redraft.online.engine import runner_v2
from redraft.online.engine.capture import Capture
from redraft.online.engine.config import CaptureConfig
from redraft.online.engine.request_log import RequestInfo
from redraft.online.engine.runner_v1 import _Hooks as V1
from redraft.online.engine.runner_v2 import _Hooks as V2
from redraft.online.records.record import Sampling

V = 50
NAMES = ["a", "b"]


class Counter(TorchDispatchMode):
    """Operations on tensors, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def make_info(name: str) -> RequestInfo:
    return RequestInfo(
        request_id=name, prompt_ids=[1, 2, 3], sampling=Sampling(temperature=0), max_tokens=8,
        stop_ids=frozenset(),
    )  # fmt: skip


def make_capture(folder: Path) -> Capture:
    return Capture(CaptureConfig(spool=folder, logprobs=4), "boot", "target", "draft")


def sample_v1(folder: Path, recorded: str, num_drafts: int) -> tuple[list[str], int]:
    """(operations of a step in which `recorded` of two requests is recorded, steps in the queue)."""
    batch = SimpleNamespace(
        num_reqs=2, req_ids=NAMES, num_computed_tokens_cpu=np.array([5, 7], np.int32)
    )
    per_request = num_drafts + 1
    runner = SimpleNamespace(
        max_model_len=100, input_batch=batch,
        query_start_loc=SimpleNamespace(np=np.arange(3) * per_request),
        discard_request_mask=SimpleNamespace(np=np.zeros(2, bool)),
    )  # fmt: skip
    runner.requests = {
        name: SimpleNamespace(req_id=name, prompt_token_ids=[1, 2, 3]) for name in NAMES
    }
    capture = make_capture(folder)
    hooks = V1(runner, capture)
    sampled = SimpleNamespace(sampled_token_ids=torch.zeros(2, per_request, dtype=torch.int64))
    hooks._sample = lambda logits_RV, metadata: sampled
    hooks.feed.requests = {name: make_info(name) if name == recorded else None for name in NAMES}
    metadata = None
    if num_drafts:
        drafts = torch.zeros(2 * num_drafts, dtype=torch.int32)
        metadata = SimpleNamespace(num_draft_tokens=[num_drafts] * 2, draft_token_ids=drafts)
    logits_RV = torch.zeros(2 * per_request, V)
    with Counter() as counter:
        assert hooks.sample(logits_RV, metadata) is sampled
    return counter.names, len(capture.queue.take())


def test_a_step_that_records_nothing_costs_no_operation_on_v1(tmp_path: Path) -> None:
    for num_drafts in (0, 3):
        names, queued = sample_v1(tmp_path, "nobody", num_drafts)
        assert names == []
        assert queued == 0


def test_a_recorded_step_without_drafts_copies_the_logits_once_on_v1(tmp_path: Path) -> None:
    names, queued = sample_v1(tmp_path, "a", 0)
    # The sampler changes them in place. Of two rows, half are copied again, without a reference.
    assert names.count("aten.clone.default") == 1
    assert queued == 1


def test_a_recorded_step_with_drafts_copies_no_logits_on_v1(tmp_path: Path) -> None:
    names, queued = sample_v1(tmp_path, "a", 3)
    assert "aten.clone.default" not in names
    assert names.count("aten.clamp.default") == 1  # of the draft ids
    assert queued == 1


def test_a_step_that_records_nothing_costs_no_operation_on_v2(tmp_path: Path) -> None:
    speculative = SimpleNamespace(method="eagle3")
    runner = SimpleNamespace(max_model_len=100, speculative_config=speculative)
    capture = make_capture(tmp_path)
    hooks = V2(runner, capture)
    hooks.feed.requests = dict.fromkeys(NAMES, None)
    # Nothing else of the batch is read.
    batch, logits_RV = SimpleNamespace(req_ids=NAMES), torch.zeros(2, V)
    with Counter() as counter:
        hooks.sampled(SimpleNamespace(), logits_RV, batch)
    assert counter.names == []
    assert not capture.queue.take()
    assert not [name for name in capture.counts if name.startswith(("error", "broken"))]


def test_vllms_warm_up_runs_the_kernels_of_a_recorded_step_on_v2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, all requests would wait for their compilation in the first recorded step."""
    calls: list[tuple[Any, ...]] = []
    for name in ("find_in_one_pass", "gather_probs"):
        monkeypatch.setattr(
            runner_v2, name, lambda *args, name=name: calls.append((name, *(args[1:])))
        )
    speculative = SimpleNamespace(method="eagle3")
    hooks = V2(
        SimpleNamespace(max_model_len=100, speculative_config=speculative), make_capture(tmp_path)
    )
    batch = SimpleNamespace(req_ids=["_warmup_0_", "_warmup_1_"], idx_mapping=torch.tensor([3, 1]))
    logits_RV, draft_logits = torch.zeros(2, V), torch.zeros(4, 1, V)
    hooks.sampled(SimpleNamespace(), logits_RV, batch, draft_logits)
    assert calls == [], "on a CPU, no kernel is compiled"
    hooks.feed.reduces = True
    hooks.sampled(SimpleNamespace(), logits_RV, batch)
    hooks.sampled(SimpleNamespace(), logits_RV, batch, draft_logits)
    assert [name for name, *_ in calls] == ["find_in_one_pass", "find_in_one_pass", "gather_probs"]
    slots, steps, ids, temperatures = calls[-1][1:]
    assert slots.tolist() == [3, 1]
    assert (steps.dtype, ids.dtype, temperatures.dtype) == (*[torch.int64] * 2, torch.float32)
    hooks.feed.requests = dict.fromkeys(NAMES, None)
    hooks.sampled(SimpleNamespace(), logits_RV, SimpleNamespace(req_ids=NAMES), draft_logits)
    assert len(calls) == 3
    assert not hooks.capture.queue.take()
    assert not [name for name in hooks.capture.counts if name.startswith("error")]


def test_the_ends_of_recorded_requests_travel_with_a_step_that_records_nothing(
    tmp_path: Path,
) -> None:
    speculative = SimpleNamespace(method="eagle3")
    runner = SimpleNamespace(max_model_len=100, speculative_config=speculative)
    capture = make_capture(tmp_path)
    hooks = V2(runner, capture)
    hooks.feed.requests = {"gone": make_info("gone"), "a": None}
    hooks.feed.end("gone")
    hooks.sampled(SimpleNamespace(), torch.zeros(1, V), SimpleNamespace(req_ids=["a"]))
    (step,) = capture.queue.take()
    assert list(step.finished) == ["gone"]
