"""The engine's counters compared with the forecast, and every way for a measurement to fail."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from redraft.engine.counters import DECODE_TIME, find_counts, parse_counts
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.engine_log import last_error
from redraft.engine.lossless import compare_lossless
from redraft.engine.measure import Measurement, Output, complete_all, measure
from redraft.engine.prompts import Prompt
from redraft.engine.sampling import GREEDY
from redraft.engine.server import VllmServer, vllm_server
from redraft.eval import served
from redraft.eval.forecast.drafts import NamedDraft
from redraft.eval.forecast.greedy import Continuation, forecast, greedy_continuations
from redraft.eval.forecast.teacher_forced import Protocol
from redraft.files.target_folder import TargetFolder
from redraft.heads.draft import Batch, ExactTarget, TargetSignal
from redraft.heads.families.standalone import StandaloneDraft
from redraft.heads.target import LoadedTarget

MAX_TOKENS = 40


def make_prompts(num_prompts: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    return [
        Prompt(
            token_ids=torch.randint(16, 512, (5 + 3 * i,), generator=generator).tolist(),
            domain=("code", "prose")[i % 2],
        )
        for i in range(num_prompts)
    ]


@pytest.fixture(scope="module")
def target(served_pair: tuple[Path, Path]) -> Any:
    return LlamaForCausalLM.from_pretrained(served_pair[0]).eval()


@pytest.fixture(scope="module")
def continuations(target: Any) -> list[Continuation]:
    return greedy_continuations(
        target,
        make_prompts(16),
        max_tokens=MAX_TOKENS,
        num_speculative_tokens=3,
        end_ids=target.generation_config.eos_token_id,
    )


@pytest.fixture(scope="module")
def measured(engine_with_draft: VllmServer) -> Measurement:
    return measure(engine_with_draft, make_prompts(16), max_tokens=MAX_TOKENS, concurrency=4)


def exact_signal(target: Any) -> Callable[[Batch], TargetSignal]:
    return lambda batch: TargetSignal(
        distribution=ExactTarget(
            hidden_BTD=target.model(input_ids=batch.input_ids_BT).last_hidden_state,
            head_VD=target.lm_head.weight,
        )
    )


@pytest.mark.vllm
def test_the_engine_accepts_exactly_what_the_forecast_says(
    measured: Measurement,
    target: Any,
    continuations: list[Continuation],
    served_pair: tuple[Path, Path],
):
    draft = StandaloneDraft.load(served_pair[1]).eval()
    expected = forecast(draft, exact_signal(target), continuations, 3)
    assert len({len(c.output_ids) for c in continuations}) > 4, (
        "answers should end at different lengths"
    )
    assert [o.counts for o in measured.outputs] == [p.counts for p in expected.per_prompt]
    assert measured.counts is not None
    assert measured.counts.tau == expected.overall.tau
    assert {name: c.tau for name, c in measured.counts_by_domain.items()} == {
        name: summary.tau for name, summary in expected.by_domain.items()
    }


@pytest.mark.vllm
def test_the_engines_output_with_a_draft_is_the_targets_greedy_text(
    measured: Measurement, continuations: list[Continuation]
):
    assert [o.token_ids for o in measured.outputs] == [c.output_ids for c in continuations]
    assert measured.num_output_tokens == sum(len(c.output_ids) for c in continuations)
    assert measured.tokens_per_s > 0


@pytest.mark.vllm
def test_a_prompt_longer_than_the_window_gets_the_engines_message(engine_with_draft: VllmServer):
    with pytest.raises(ValueError, match=r"300.*256"):
        measure(engine_with_draft, [Prompt(token_ids=[20] * 300)], max_tokens=8)


@pytest.mark.vllm
def test_another_clients_requests_are_noticed(
    engine_with_draft: VllmServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("redraft.engine.measure.STATISTICS_TIMEOUT_S", 1)
    done = threading.Event()

    def intrude() -> None:
        request = {
            "model": engine_with_draft.model,
            "prompt": [20, 21, 22],
            "max_tokens": 8,
            "temperature": 0,
        }
        while not done.is_set():
            httpx.post(f"{engine_with_draft.url}/v1/completions", json=request, timeout=600)

    intruder = threading.Thread(target=intrude)
    intruder.start()
    try:
        with pytest.raises(ValueError, match=rf"{engine_with_draft.url} .*\bclient\b"):
            measure(engine_with_draft, make_prompts(4), max_tokens=MAX_TOKENS)
    finally:
        done.set()
        intruder.join()


@pytest.mark.slow
@pytest.mark.vllm
def test_an_engine_that_refuses_its_draft_says_why_in_one_line(
    served_pair: tuple[Path, Path], tmp_path: Path
):
    speculative_config = {
        "method": "draft_model",
        "model": str(tmp_path / "nowhere"),
        "num_speculative_tokens": 3,
    }
    with (
        pytest.raises(ChildProcessError, match="nowhere") as error,
        vllm_server(
            served_pair[0],
            log=tmp_path / "vllm.log",
            speculative_config=speculative_config,
            max_model_len=256,
        ),
    ):
        pass
    assert "\n" not in str(error.value)
    assert str(tmp_path / "vllm.log") in str(error.value)


def test_an_unreachable_server_is_a_connection_error():
    nobody = VllmServer(
        url="http://127.0.0.1:9", model="none", dtype="float32", num_speculative_tokens=0
    )
    with pytest.raises(ConnectionError, match=r"127.0.0.1:9.*ConnectError"):
        measure(nobody, make_prompts(2), max_tokens=4)
    with pytest.raises(ConnectionError, match=r"127.0.0.1:9.*0.*2"):
        asyncio.run(complete_all(nobody, make_prompts(2), 4, GREEDY, 2, "prompts"))


def test_a_measurement_leaves_out_statistics_of_the_warm_up_that_arrive_late(
    monkeypatch: pytest.MonkeyPatch,
):
    finished_s: list[float] = []
    num_counted = 0

    async def complete(
        server: VllmServer, prompts: Sequence[Prompt], max_tokens: int, *rest: Any, **options: Any
    ) -> list[Output]:
        finished_s.extend([max_tokens] * len(prompts))
        arrivals = ((0.0, 0), (1.0, max_tokens))
        return [Output(token_ids=[1] * max_tokens, counts=None, arrivals=arrivals) for _ in prompts]

    def read_one_more(server: VllmServer) -> str:
        nonlocal num_counted
        num_counted = min(num_counted + 1, len(finished_s))
        name, seconds = DECODE_TIME, sum(finished_s[:num_counted])
        return f"{name}count {num_counted}\n{name}sum {seconds}\n"

    monkeypatch.setattr("redraft.engine.measure.complete_all", complete)
    monkeypatch.setattr("redraft.engine.measure._read_metrics", read_one_more)
    server = VllmServer(
        url="http://127.0.0.1:9", model="none", dtype="float32", num_speculative_tokens=0
    )
    assert measure(server, make_prompts(4), max_tokens=MAX_TOKENS).decode_s == 4 * MAX_TOKENS


def test_no_prompts_are_refused():
    nobody = VllmServer(
        url="http://127.0.0.1:9", model="none", dtype="float32", num_speculative_tokens=0
    )
    with pytest.raises(ValueError, match="prompt"):
        measure(nobody, [], max_tokens=4)


def test_counts_of_another_dtype_are_not_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started: list[str | None] = []

    @contextlib.contextmanager
    def start(model: str, *, dtype: str | None, **options: Any) -> Iterator[VllmServer]:
        started.append(dtype)
        yield VllmServer(url="", model=model, dtype="", num_speculative_tokens=1)

    def measure_none(server: VllmServer, prompts: Sequence[Prompt], **options: Any) -> Measurement:
        return Measurement(
            prompts=prompts, outputs=[], full_s=1.0, full_tokens=0, dtype="", counts=None
        )

    monkeypatch.setattr(served, "vllm_server", start)
    monkeypatch.setattr(served, "measure", measure_none)
    target = LoadedTarget(files=TargetFolder.open("tests/assets/tiny-target"), model=None)
    draft = NamedDraft(
        name="d",
        source="d",
        family="ngram",
        fingerprint="d",
        forecast=None,
        speculative={"method": "ngram"},
    )
    protocol = Protocol(
        temperatures=(0.0,),
        num_speculative_tokens=(1,),
        max_tokens=4,
        end_ids=(),
        seed=0,
        batch_size=1,
    )
    for dtype in ("float32", "bfloat16", "float32"):
        options = served.EngineOptions(dtype=dtype)
        served.serve_and_count(target, draft, 1, make_prompts(2), protocol, options, tmp_path)
    assert started == ["float32", "bfloat16"]


METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 5.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 15.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="m"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 1.0
vllm:generation_tokens_total{engine="0",model_name="m"} 1.234e+06
"""


def test_counters_are_summed_over_engines():
    assert parse_counts(METRICS) == AcceptanceCounts(
        num_drafts=15, num_draft_tokens=45, num_accepted=13, accepted_per_position=(9, 4)
    )


def test_a_server_without_speculation_has_no_counts():
    assert find_counts("vllm:generation_tokens_total 5.0\n") is None


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (
            "(EngineCore pid=7) ERROR 01-01 [core.py:9] ValueError: the vocabularies differ\n"
            "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause "
            "above.\n",
            "ValueError: the vocabularies differ",
        ),
        (
            "usage: api_server.py\napi_server.py: error: argument --port: invalid\n",
            "error: argument --port: invalid",
        ),
        (
            "  Value error, max_model_len (9) is too long. [type=value_error, input_value=A(()), "
            "input_type=A]\n",
            "Value error, max_model_len (9) is too long.",
        ),
        (
            "  Value error, no such folder: 'x'.\nVerify that:\n - it exists [type=value_error, "
            "input_value=A(())]\n",
            "Value error, no such folder: 'x'.",
        ),
        ("Killed\n", "Killed"),
        ("", "it wrote nothing"),
    ],
)
def test_the_last_error_of_a_log_is_the_cause(tmp_path: Path, log: str, cause: str):
    (tmp_path / "log").write_text(log)
    assert last_error(tmp_path / "log") == cause


def make_measurement(*outputs: list[int], dtype: str = "float32") -> Measurement:
    return Measurement(
        prompts=[Prompt(token_ids=[1, 2], domain="code")] * len(outputs),
        outputs=[Output(token_ids=ids, counts=None) for ids in outputs],
        full_s=2.0,
        full_tokens=sum(map(len, outputs)),
        dtype=dtype,
        counts=None,
    )


def logits_with_gap(gap: float) -> Callable[[Sequence[int]], Tensor]:
    def logits(tokens: Sequence[int]) -> Tensor:
        assert list(tokens) == [1, 2, 5], "the prompt and the common part of both outputs"
        return torch.tensor([0.0, 0, 0, 0, 0, 0, 4.0, 4.0 - gap])

    return logits


def test_equal_outputs_are_lossless():
    same = make_measurement([5, 6], [7])
    assert compare_lossless(same, same).differences == []
    assert compare_lossless(same, same).lossless


def test_tokens_per_second_counts_output_tokens():
    assert make_measurement([5, 6], [7]).tokens_per_s == 1.5


@pytest.mark.parametrize(("dtype", "gap"), [("float32", 5e-4), ("auto", 0.125)])
def test_a_tie_is_listed_and_still_lossless(dtype: str, gap: float):
    mine, its = make_measurement([5, 6, 6], dtype=dtype), make_measurement([5, 7, 9], dtype=dtype)
    result = compare_lossless(mine, its, logits_with_gap(gap))
    (difference,) = result.differences
    assert (difference.position, difference.token_with, difference.token_without) == (1, 6, 7)
    assert difference.logit_gap == pytest.approx(gap, rel=1e-3)
    assert result.lossless


def test_a_wrong_token_is_not_lossless():
    result = compare_lossless(
        make_measurement([5, 7]), make_measurement([5, 6]), logits_with_gap(0.125)
    )
    assert not result.lossless
    assert result.differences[0].logit_gap == 0.125


def test_a_difference_without_the_targets_logits_is_no_tie():
    assert not compare_lossless(make_measurement([5, 6]), make_measurement([5, 7])).lossless


def test_an_output_that_ends_early_differs_where_it_ends():
    (difference,) = compare_lossless(make_measurement([5]), make_measurement([5, 6])).differences
    assert (difference.position, difference.token_with, difference.token_without) == (1, None, 6)
