"""Lookups on the device of vLLM's V2 runner, which schedules steps ahead.

The kernel runs in Triton's interpreter (`in_triton_chains.py`) and is compiled for GPUs
(`in_chain_compiler.py`), each in a process of its own. The rest runs here, with a kernel that does
nothing.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_runners import run_cases, triton_compiler, triton_interpreter
from stand_in_ahead import RunnerAhead
from test_lookup_on_v2 import RunnerV1, make_request, stream

import redraft.engine
from redraft.engine import adaptive
from redraft.engine.lookup_first import HeadLimits, mix
from redraft.engine.lookup_hooks import install
from redraft.engine.lookup_on_device import give_confidences, move_to_device
from redraft.engine.lookups import ON_DEVICE, lookup_env, on_device
from redraft.engine.server import vllm_keys
from redraft.eval.forecast.ngram import Ngram
from redraft.heads.families.retrieval import Retrieval
from redraft.online.engine import runner_v2

HERE = Path(__file__).parent
WAITS = ("tolist", "item", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__")


def test_lookup_on_the_device_follows_the_hosts_chains_in_tritons_interpreter() -> None:
    run_cases(HERE / "in_triton_chains.py", triton_interpreter(), at_least=8)


@pytest.mark.slow
def test_the_kernel_of_lookups_compiles_for_gpus(tmp_path: Path) -> None:
    run_cases(HERE / "in_chain_compiler.py", triton_compiler(tmp_path), at_least=6)


class NoKernel:
    """In place of the kernel: drafts nothing, and notes the arguments of each launch."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.follow_chains = self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            self.launches.append(args)
            tokens_BK, counts_B, confidences_BK = args[9:12]
            tokens_BK[:], counts_B[:], confidences_BK[:] = 0, 0, 0.5

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> NoKernel:
    made = NoKernel()
    monkeypatch.setattr(redraft.engine, "chain_kernel", made, raising=False)
    return made


def make_runner(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> RunnerAhead:
    for name, value in lookup_env(config).items():
        monkeypatch.setenv(name, value)
    settings = {"enable_adaptive_verification": False} | vllm_keys(config)
    runner = RunnerAhead(SimpleNamespace(**settings))
    install(runner)
    runner_v2.install_proposers(runner)
    return runner


@pytest.mark.parametrize("head", [None, "eagle3"], ids=["alone", "before a head"])
def test_lookup_on_the_device_waits_for_nothing_and_uploads_once_a_step(
    head: str | None, kernel: NoKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Retrieval.speculative_config("live")
    config = mix(config, {"method": head}, HeadLimits()) if head else config
    runner = make_runner(on_device(config), monkeypatch)
    request = make_request(0, np.random.default_rng(0))
    runner.add(request)
    runner.sample_tokens([request.req_id], [[1]], 4)  # copies the whole table
    counts = dict.fromkeys((*WAITS, "to"), 0)

    def counting(name: str) -> Any:
        call = getattr(torch.Tensor, name)

        def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            counts[name] += 1
            return call(tensor, *args, **options)

        return counted

    batch = runner.begin([request.req_id], [[2]])
    for name in counts:
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    for _ in range(5):
        runner.sample(None, batch, None)
        runner.propose(batch, 4)
    monkeypatch.undo()
    assert {name: number for name, number in counts.items() if number} == {"to": 5}


def test_the_kernel_is_compiled_for_the_types_of_a_step(
    kernel: NoKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another type of a pointer would be compiled again, while the first requests wait."""
    runner = make_runner(on_device(Retrieval.speculative_config("live")), monkeypatch)
    request = make_request(0, np.random.default_rng(0))
    runner.add(request)
    runner.sample_tokens([request.req_id], [[1]], 4)
    at_start, in_step = (
        [arg.dtype if isinstance(arg, torch.Tensor) else type(arg) for arg in launch]
        for launch in (kernel.launches[0], kernel.launches[-1])
    )
    assert len(kernel.launches) == 2
    assert at_start == in_step


def test_all_who_hold_the_texts_see_them_on_the_device(
    kernel: NoKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM's penalties and bad words do, since before the lookup was installed."""
    config = on_device(
        mix(Retrieval.speculative_config("live"), {"method": "eagle3"}, HeadLimits())
    )
    for name, value in lookup_env(config).items():
        monkeypatch.setenv(name, value)
    runner = RunnerAhead(SimpleNamespace(enable_adaptive_verification=False, **vllm_keys(config)))
    held, pinned = runner.req_states.all_token_ids, runner.req_states.all_token_ids.gpu
    held._uva_buf = "host memory"
    install(runner)
    assert runner.redraft.lookup.is_mixed
    assert runner.req_states.all_token_ids is held
    assert held.gpu is not pinned
    assert (held.gpu.shape, held.gpu.dtype) == (pinned.shape, pinned.dtype)
    assert not hasattr(held, "_uva_buf")


@pytest.mark.vllm
def test_vllms_penalties_see_the_texts_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcRequestState
    from vllm.v1.worker.gpu.states import RequestState

    # Without a GPU, there is no pinned memory.
    monkeypatch.setattr(buffer_utils, "UvaBuffer", buffer_utils.NonUvaBuffer)
    states = RequestState(
        max_num_reqs=2,
        max_model_len=8,
        max_num_batched_tokens=8,
        num_speculative_steps=1,
        vocab_size=9,
        device=torch.device("cpu"),
    )
    held, pinned = LogitsProcRequestState.from_request_state(states), states.all_token_ids.gpu
    move_to_device(states.all_token_ids, states.device)
    assert held.all_token_ids.gpu is states.all_token_ids.gpu
    assert states.all_token_ids.gpu is not pinned
    # On a GPU, this attribute says that the contents of a write are in host memory.
    assert states.all_token_ids.write_contents is None
    states.add_request("a", 2, [3, 4], 0, 1)
    assert states.all_token_ids._staged_write_contents == [3, 4]


def test_live_counts_learn_the_same_answers_while_steps_are_scheduled_ahead(
    kernel: NoKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Retrieval.speculative_config("live", verify_cost=0.02)
    tables = []
    for config, make in ((live, RunnerV1), (on_device(live), RunnerAhead)):
        for name, value in lookup_env(config).items():
            monkeypatch.setenv(name, value)
        runner = make(SimpleNamespace(enable_adaptive_verification=False, **vllm_keys(config)))
        install(runner)
        counter = runner.redraft.counter
        counter.find_owner = lambda request: b"acme"
        list(stream(runner, seed=3))
        runner.end([])
        runner.end([])
        for _ in range(200):
            runner.redraft.lookup.texts.learn() if make is RunnerAhead else counter.learn()
        assert not counter.counts.keys() - {"counted"}, counter.counts
        tables.append((counter.counts["counted"], *counter.draft.runs.view()))
        assert tables[-1][0] > 5
    for one, other in zip(*tables, strict=True):
        assert np.array_equal(one, other)


def test_an_ended_text_longer_than_what_is_counted_keeps_its_end(
    kernel: NoKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from redraft.engine import lookup_on_device

    monkeypatch.setattr(lookup_on_device, "MOST_TOKENS", 6)
    monkeypatch.setattr(lookup_on_device, "SLACK", 4)
    runner = make_runner(on_device(Retrieval.speculative_config("live")), monkeypatch)
    for prompt, answer, wanted in (
        ([1, 2], [3, 4, 5], ([1, 2], [3, 4, 5])),
        ([*range(8)], [8, 9, 10, 11, 12, 13], ([4, 5, 6, 7], [8, 9, 10, 11, 12, 13])),
        ([1], [*range(12)], ([], [-1, -1, *range(2, 12)])),
    ):
        request = make_request(0, np.random.default_rng(0))
        request.prompt_token_ids = prompt
        runner.add(request)
        runner.begin([request.req_id], [answer])
        ended: list[Any] = []
        monkeypatch.setattr(
            runner.redraft.counter,
            "end",
            lambda name, request, ended=ended: ended.append(request),
        )
        runner.end([request.req_id])
        runner.end([])
        runner.redraft.lookup.texts.learn()
        assert not ended
        runner.end([])
        runner.redraft.lookup.texts.learn()
        assert (ended[0].prompt_token_ids, ended[0].output_token_ids) == wanted
        assert not runner.redraft.lookup.texts.requests


def test_nothing_is_kept_of_a_request_that_is_aborted_while_it_is_preempted(
    kernel: NoKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(on_device(Retrieval.speculative_config("live")), monkeypatch)
    counter, texts = runner.redraft.counter, runner.redraft.lookup.texts
    counter.find_owner = lambda request: b"acme"
    request = make_request(0, np.random.default_rng(0))
    runner.add(request)
    runner.sample_tokens([request.req_id], [[1]], 4)
    assert counter._owners == {request.req_id: b"acme"}
    preempted = SimpleNamespace(finished_req_ids=set(), preempted_req_ids={request.req_id})
    runner.finish_requests(preempted)
    assert counter._owners.keys() == texts.requests.keys() == {request.req_id}, "it may resume"
    runner.end([request.req_id])
    assert counter._owners == texts.requests == {}


def test_a_lookup_gives_vllm_confidences_only_if_it_verifies_adaptively(
    kernel: NoKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = on_device(Retrieval.speculative_config("live"))
    for is_adaptive in (False, True):
        for name, value in lookup_env(config).items():
            monkeypatch.setenv(name, value)
        runner = RunnerAhead(SimpleNamespace(enable_adaptive_verification=is_adaptive))
        give_confidences(runner)
        assert getattr(runner.speculator, adaptive.KEY, False) is is_adaptive
        install(runner)
        request = make_request(0, np.random.default_rng(0))
        runner.add(request)
        runner.sample_tokens([request.req_id], [[1]], 4)
    assert runner.speculator.draft_token_confidence_probs[0].tolist() == [0.5] * 4


def test_steps_scheduled_ahead_change_vllms_method_and_leave_n_grams_to_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = Retrieval.speculative_config("live")
    assert on_device(live)["method"] == ON_DEVICE
    monkeypatch.setattr(adaptive, "open_folder", Path)
    for config, obstacle in ((live, adaptive.UNSURE), (on_device(live), "")):
        found = adaptive.find_obstacle({}, "owner/absent", config, environment={}, on_cpu=False)
        assert found == obstacle
    mixed = on_device(mix(live, {"method": "eagle3"}, HeadLimits()))
    assert mixed["method"] == "eagle3"
    assert "disable_padded_drafter_batch" not in mixed
    ngrams = Ngram(min=1, max=3).speculative_config
    with pytest.raises(ValueError, match="--async-scheduling"):
        on_device(ngrams)
    mixed = mix(ngrams, {"method": "eagle3"}, HeadLimits())
    for name, value in lookup_env(mixed).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="--no-async-scheduling"):
        install(RunnerAhead(SimpleNamespace(method="eagle3")))
