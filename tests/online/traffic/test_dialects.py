"""The tap in front of other engines: no field that they refuse, and records of ids to score."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from make_gguf import write_gguf
from sglang_server import OUTPUT_IDS, PROMPT_IDS, sglang_server
from transformers import PreTrainedTokenizerFast
from waiting import wait_until

from benchmarks.llama_server import serving
from redraft.files.checkpoint import load_causal_lm
from redraft.files.folder import fingerprint
from redraft.online.records.origin import Origin
from redraft.online.records.record import Record, read_frames
from redraft.online.records.spool import spool_files
from redraft.online.traffic.dialects import DIALECTS, LlamaCppAnswer, SglangAnswer
from redraft.online.traffic.proxy import Proxy
from redraft.online.traffic.tap import Tap, TapConfig
from redraft.online.traffic.tap_messages import AnswerError
from redraft.online.traffic.upstream import Upstream
from redraft.recipes.cli.run import dispatch


@contextmanager
def tapped(url: str, spool: Path, target: str, engine: Any) -> Iterator[tuple[httpx.Client, Tap]]:
    """A client of a running tap, which has checked its server."""
    tap = Tap(TapConfig(spool=spool, engine=engine), target)
    app = Proxy(Upstream(url), tap).app()
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    wait_until(lambda: tap.check.verdict)
    assert tap.check.verdict is not None
    assert tap.check.verdict.problem == ""
    port = server.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        yield client, tap
    server.should_exit = True
    thread.join(20)


def read_records(spool: Path) -> list[Record]:
    frames = [frame for path in spool_files(spool) for frame in read_frames(path.read_bytes())]
    records = [record for _, record in frames]
    assert all(isinstance(record, Record) for record in records), records
    return records  # type: ignore[return-value]


def without(message: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in names}


VARYING = ("id", "created", "timings", "id_slot", "tokens_cached", "usage", "generation_settings")
"""Parts of an answer of llama.cpp that differ from request to request."""


def test_llama_cpps_clients_get_their_answers_and_score_completes_the_records(
    random_target: Path, small_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    pytest.importorskip("xllamacpp", reason="the package xllamacpp is not installed")
    gguf = write_gguf(tmp_path / "target.gguf", random_target, small_tokenizer)
    greedy = {"temperature": 0, "max_tokens": 6}
    bodies = {
        "/v1/chat/completions": {**greedy, "messages": [{"role": "user", "content": "def f"}]},
        "/v1/completions": {**greedy, "prompt": "return x", "model": "any"},
        "/completion": {"temperature": 0, "n_predict": 6, "prompt": [20, 30, 40]},
    }
    with serving(gguf) as direct:
        expected = {path: direct.post(path, json=body).json() for path, body in bodies.items()}
        url = str(direct.base_url)
        with tapped(url, tmp_path / "ids", fingerprint(random_target), "llama.cpp") as (http, tap):
            for path, body in bodies.items():
                found = http.post(path, json=body)
                assert found.status_code == 200
                assert without(found.json(), *VARYING) == without(expected[path], *VARYING)
            asked = {**bodies["/completion"], "verbose": True}
            assert http.post("/completion", json=asked).status_code == 200
        counts = tap.status()
    assert counts["shipped_records"] == 3
    assert counts["skipped_requests_unfit"] == 1
    records = read_records(tmp_path / "ids")
    assert [len(record.positions) for record in records] == [0, 0, 0]
    assert records[2].context_ids.tolist() == [20, 30, 40]
    assert {record.sampling.temperature for record in records} == {0.0}
    args = [
        "data",
        "score",
        str(tmp_path / "ids"),
        "--target",
        str(random_target),
        "--logprobs",
        "8",
    ]
    assert dispatch([*args, "--spool", str(tmp_path / "spool"), "--target-dtype", "float32"]) == 0
    model = load_causal_lm(random_target)
    for record in read_records(tmp_path / "spool"):
        # Greedy: llama.cpp's token is the target's most probable one, in each row.
        assert record.topk_ids[:, 0].tolist() == record.output_ids.tolist()
        assert len(record.positions) == len(record.output_ids)
    assert model is not None


def test_sglang_gets_no_field_that_it_refuses(tmp_path: Path) -> None:
    """The stand-in refuses what SGLang 0.5.23 does not have."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 0}
    text = {"model": "m", "prompt": "x", "max_tokens": 2}
    with (
        sglang_server(lambda ids, asked: {}) as url,
        tapped(url, tmp_path, "target", "sglang") as (http, tap),
    ):
        for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
            answer = http.post(path, json=body).json()
            (choice,) = answer["choices"]
            assert choice["prompt_token_ids"] is None
            assert choice.get("token_ids") is choice.get("response_token_ids") is None
            assert http.post(path, json={**body, "stream": True}).status_code == 200
        wait_until(lambda: len(tap._waiting) + tap.counts["shipped_records"] == 2)
    assert tap.status()["skipped_requests_streamed"] == 2
    for record in read_records(tmp_path):
        assert record.context_ids.tolist() == PROMPT_IDS
        assert record.output_ids.tolist() == OUTPUT_IDS


def test_the_tap_says_that_tensorrt_llm_cannot_be_recorded(
    random_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["tap", "http://127.0.0.1:9", "--target", str(random_target), "--spool", "x"]
    assert dispatch([*args, "--engine", "tensorrt-llm"]) == 2
    assert "TensorRT-LLM does not return the token ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    "used", [{"mirostat": 2}, {"dry_multiplier": 0.8}, {"lora": [{"id": 0}]}, {"grammar": "root"}]
)
def test_an_answer_that_llama_cpp_sampled_otherwise_is_not_recorded(used: dict[str, Any]) -> None:
    answer = LlamaCppAnswer()
    settings = {"temperature": 0.7, "repeat_penalty": 1.0, **used}
    message = {"generation_settings": settings, "tokens": [1], "prompt": "", "tokens_evaluated": 1}
    with pytest.raises(AnswerError):
        answer.read(message)


def test_no_dialect_adds_a_field_that_its_engine_does_not_have() -> None:
    added = {name: set(one.ask({}, "chat", 5)) for name, one in DIALECTS.items()}
    assert added["sglang"] == {"return_token_ids"}
    assert added["llama.cpp"] == {"return_tokens", "verbose"}
    assert "top_logprobs" in added["vllm"]


def test_a_record_of_ids_has_the_templates_arguments_of_its_request() -> None:
    answer = SglangAnswer(prompt_ids=[1, 2], output_ids=[3])
    asked = {"messages": [], "chat_template_kwargs": {"enable_thinking": False}}
    record = answer.record(asked, Origin(), "tap", "target", 8)
    assert record is not None
    assert record.template_arguments == '{"enable_thinking": false}'
    assert (record.top_k, record.row_positions, record.output_ids.tolist()) == (1, b"", [3])
