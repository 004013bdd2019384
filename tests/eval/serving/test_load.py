"""Loads on a real server, and loads that cannot be run."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import asdict, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from make_serving import make_load_result
from transformers import AutoTokenizer

from redraft.eval.engine.measure import read_counters
from redraft.eval.engine.sampling import GREEDY, PENALTIES, Sampling
from redraft.eval.engine.server import VllmServer, vllm_server
from redraft.eval.serving import load as load_module
from redraft.eval.serving.cost import Advice, Range
from redraft.eval.serving.load import (
    Load,
    convert_result,
    data_arguments,
    median_run,
    run_load,
    sampling_fields,
    write_sonnet,
)

JSON = {"Content-Type": "application/json"}


def make_load(**changes: Any) -> Load:
    values: dict[str, Any] = {
        "data": "random",
        "input_tokens": 24,
        "output_tokens": 12,
        "num_prompts": 6,
        "sampling": GREEDY,
        "concurrency": 2,
    }
    return Load(**{**values, **changes})


def make_generator_result(**changes: Any) -> dict[str, Any]:
    """The generator's result for two requests of 11 tokens.

    The first token after 1 s, the others within 2 s.
    """
    return {
        "completed": 2,
        "failed": 0,
        "duration": 4.0,
        "total_input_tokens": 60,
        "total_output_tokens": 22,
        "output_throughput": 5.5,
        "request_throughput": 0.5,
        "latencies": [3.0, 3.0],
        "start_times": [0.0, 1.0],
        "ttfts": [1.0, 1.0],
        "itls": [[0.2] * 10] * 2,
        "output_lens": [11, 11],
        **changes,
    }


def test_without_a_draft_a_step_writes_a_token() -> None:
    seen = convert_result(make_generator_result(), decode_s=4.0)
    assert (seen.num_steps, seen.step_s, seen.tau) == (20, pytest.approx(0.2), 1.0)
    assert seen.tpot_ms.mean == pytest.approx(200)
    assert (seen.ttft_ms.median, seen.e2e_ms.p99) == (1000, 3000)
    assert seen.mean_input_tokens == 30


def test_with_a_draft_the_engines_drafts_are_the_steps() -> None:
    counters = {
        "spec_decode_num_drafts": 10,
        "spec_decode_accepted_tokens": 12,  # two of them after the last token of an answer
        "spec_decode_per_position_acceptance_rates": [0.8, 0.4],
    }
    seen = convert_result(make_generator_result(**counters), decode_s=4.0)
    assert (seen.num_steps, seen.step_s) == (10, pytest.approx(0.4))
    assert seen.tau == pytest.approx(2.2)
    assert seen.acceptance_per_position == (0.8, 0.4)


def test_steps_for_which_nothing_was_looked_up_count_too() -> None:
    counters = {
        "spec_decode_num_drafts": 4,
        "spec_decode_accepted_tokens": 5,
        "spec_decode_per_position_acceptance_rates": [0.75, 0.5],
    }
    seen = convert_result(make_generator_result(**counters), decode_s=4.0)
    assert seen.num_steps == 15, "20 tokens, 5 of them accepted"
    assert seen.tau == pytest.approx(20 / 15)
    assert seen.acceptance_per_position == pytest.approx((0.75 * 4 / 15, 0.5 * 4 / 15))
    assert 1 + sum(seen.acceptance_per_position) == pytest.approx(seen.tau)


def test_a_load_in_which_the_server_changes_its_speed_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady, slower = [[0.01] * 40], [[0.01] * 20 + [0.03] * 20]
    gaps = [steady, slower, steady]  # the warm-up comes first
    asked: list[list[str]] = []

    def generate(arguments: list[str], log: Path) -> dict[str, Any]:
        asked.append(arguments)
        one = {
            "completed": 1,
            "latencies": [2.0],
            "ttfts": [1.0],
            "output_lens": [41],
            "start_times": [0.0],
        }
        return make_generator_result(**one, itls=gaps.pop(0))

    clock = SimpleNamespace(seconds=0.0, requests=0)
    monkeypatch.setattr(load_module, "_generate", generate)
    monkeypatch.setattr(load_module, "_require_healthy", lambda _: None)
    monkeypatch.setattr(load_module, "wait_for_decode_time", lambda *_, **__: clock)
    server = VllmServer(
        url="http://a", model=str(tmp_path), dtype="float32", num_speculative_tokens=0
    )
    run = run_load(server, make_load(num_prompts=1, concurrency=1), tmp_path)
    assert (run.repeats, run.half_step_s) == (1, pytest.approx((0.01, 0.01)))
    assert len(asked) == 3


def test_the_median_is_a_whole_run() -> None:
    runs = [make_load_result(speed) for speed in (30.0, 10.0, 20.0)]
    assert median_run(runs) == runs[2]
    assert median_run(runs[:2]) == runs[1], "the slower of two"


def test_lines_are_cut_to_a_length_with_the_chat_template(
    tiny_target: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    load = make_load(data="sonnet", input_tokens=64, num_prompts=5)
    write_sonnet(tmp_path / "prompts.jsonl", None, str(tiny_target), load)
    prompts = [
        json.loads(line)["prompt"] for line in (tmp_path / "prompts.jsonl").read_text().splitlines()
    ]
    assert len(set(prompts)) == 5
    for prompt in prompts:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        assert 60 <= len(tokenizer(text).input_ids) <= 64
    write_sonnet(tmp_path / "again.jsonl", None, str(tiny_target), load)
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "prompts.jsonl").read_bytes()


def test_lines_come_from_the_users_text(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("shall I compare thee\n\nto a summers day\n")
    load = make_load(data=f"sonnet:{tmp_path / 'text.txt'}", input_tokens=80, num_prompts=1)
    write_sonnet(tmp_path / "prompts.jsonl", tmp_path / "text.txt", str(tiny_target), load)
    prompt = json.loads((tmp_path / "prompts.jsonl").read_text())["prompt"]
    assert set(prompt.splitlines()[1:-1]) <= {"shall I compare thee", "to a summers day"}


def test_every_text_and_tokenizer_gets_different_prompts(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("the one\ntext\n")
    (tmp_path / "other.txt").write_text("quite another\ntext of mine\n")
    other = shutil.copytree(tiny_target, tmp_path / "target")
    (other / "tokenizer_config.json").touch()
    paths = [
        data_arguments(
            make_load(data=data, input_tokens=64, num_prompts=1), str(target), tmp_path / "prompts"
        )[3]
        for data, target in (
            ("sonnet", tiny_target),
            (f"sonnet:{tmp_path / 'one.txt'}", tiny_target),
            (f"sonnet:{tmp_path / 'other.txt'}", tiny_target),
            ("sonnet", other),
        )
    ]
    assert len(set(paths)) == 4
    assert "quite another" in Path(paths[2]).read_text()


def test_a_length_without_room_or_a_text_without_lines_is_refused(
    tiny_target: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"^3 .*template"):
        write_sonnet(
            tmp_path / "p.jsonl", None, str(tiny_target), make_load(data="sonnet", input_tokens=3)
        )
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match="has 0 lines"):
        write_sonnet(
            tmp_path / "p.jsonl", tmp_path / "empty.txt", str(tiny_target), make_load(data="sonnet")
        )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": "sonet"}, "sonet"),
        ({"data": "sharegpt"}, "sharegpt"),
        ({"data": "jsonl:ours.txt"}, r"jsonl:ours\.txt"),
        ({"data": "nowhere.jsonl"}, r"nowhere\.jsonl"),
        ({"num_prompts": 0}, r"prompts.*\b0\b"),
    ],
)
def test_an_impossible_load_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        make_load(**changes)


def test_an_unreachable_server_is_named(tmp_path: Path) -> None:
    server = VllmServer(
        url="http://127.0.0.1:9", model="m", dtype="float32", num_speculative_tokens=0
    )
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:9"):
        run_load(server, make_load(), tmp_path)


@pytest.mark.vllm
def test_a_real_server_is_loaded_and_counted(engine_with_draft: VllmServer, tmp_path: Path) -> None:
    before = read_counters(engine_with_draft)
    seen = run_load(engine_with_draft, make_load(), tmp_path)
    assert (seen.num_requests, seen.num_output_tokens) == (6, 72), (
        "random prompts get answers of the full length"
    )
    assert seen.mean_input_tokens == pytest.approx(24, abs=2)
    counted = read_counters(engine_with_draft).num_drafts - before.num_drafts
    assert 0 < seen.num_steps < counted, "the warm-up does not count"
    assert seen.tau == pytest.approx(1 + sum(seen.acceptance_per_position))
    assert len(seen.acceptance_per_position) == 3
    assert seen.ttft_ms.mean + seen.tpot_ms.mean < seen.e2e_ms.mean
    # by the engine's clock, the steps take up most of the time that the clients wait, and never
    # more than that
    waited_s = 6 * seen.e2e_ms.mean / 1e3
    assert 0.2 * waited_s < seen.step_s * seen.num_steps < waited_s
    assert (tmp_path / "load.log").read_text().count(
        "Serving Benchmark Result"
    ) == 2 + seen.repeats, "one of the warm-up, and one of the load and of each repeat"


@pytest.mark.vllm
def test_every_request_carries_its_sampling(engine_with_draft: VllmServer, tmp_path: Path) -> None:
    """A relay in front of the real server keeps the bodies of the requests."""
    seen: list[dict[str, Any]] = []

    class Relay(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(httpx.get(engine_with_draft.url + self.path, timeout=600))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/completions":  # the generator asks for token ids, too
                seen.append(json.loads(body))
            self._answer(
                httpx.post(
                    engine_with_draft.url + self.path, content=body, headers=JSON, timeout=600
                )
            )

        def _answer(self, response: httpx.Response) -> None:
            self.send_response(response.status_code)
            self.send_header("Content-Type", response.headers.get("Content-Type", "text/plain"))
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        def log_message(self, *_: Any) -> None:
            pass

    relay = ThreadingHTTPServer(("127.0.0.1", 0), Relay)
    threading.Thread(target=relay.serve_forever, daemon=True).start()
    try:
        server = replace(engine_with_draft, url=f"http://127.0.0.1:{relay.server_port}")
        sampling = Sampling(temperature=0.7, top_p=0.8, top_k=20)
        run_load(server, make_load(sampling=sampling), tmp_path)
    finally:
        relay.shutdown()
        relay.server_close()
    assert len(seen) >= 6
    for body in seen:
        assert {name: body[name] for name in asdict(sampling) | PENALTIES} == asdict(
            sampling
        ) | PENALTIES


def test_the_penalties_are_those_of_the_targets_folder(tmp_path: Path) -> None:
    config = {"repetition_penalty": 1.05, "temperature": 0.7}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    fields = sampling_fields(make_load(), str(tmp_path))
    assert fields == asdict(GREEDY) | PENALTIES | {"repetition_penalty": 1.05}


@pytest.mark.vllm
def test_every_kind_of_data_reaches_the_server(
    engine_with_draft: VllmServer, tmp_path: Path
) -> None:
    turns = [
        {"from": "human", "value": "one two three four five"},
        {"from": "gpt", "value": "six seven eight"},
    ]
    (tmp_path / "share.json").write_text(
        json.dumps([{"conversations": turns}, {"conversations": turns[:1]}])
    )
    (tmp_path / "ours.jsonl").write_text('{"prompt": "def f(x):"}\n')
    for data in ("sonnet", str(tmp_path / "share.json"), str(tmp_path / "ours.jsonl")):
        load = make_load(data=data, input_tokens=60, num_prompts=2)
        seen = run_load(engine_with_draft, load, tmp_path)
        assert seen.num_requests == 2
        assert seen.num_output_tokens >= 2


@pytest.mark.vllm
def test_a_refused_request_is_reported_with_its_reason(
    engine_with_draft: VllmServer, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"4 of 4 random .*Bad Request"):
        run_load(engine_with_draft, make_load(input_tokens=400), tmp_path)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("share.json", "[]", r"share\.json.*\btwo\b"),
        ("share.json", "{}", r"share\.json.*\btwo\b"),
        ("share.json", '[{"conversations": [{"value": "a"}, {"value": "b"}]}]', r"\bfits\b"),
        ("share.json", "[1]", r"share\.json.*\bShareGPT\b"),
        ("ours.jsonl", "", r"ours\.jsonl.*\bempty\b"),
        ("ours.jsonl", '{"text": "a"}', "line 1.*`prompt`"),
        ("ours.jsonl", "{", "line 1.*JSON"),
    ],
)
def test_a_file_without_prompts_is_refused(
    engine_with_draft: VllmServer, tmp_path: Path, name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said):
        run_load(engine_with_draft, replace(make_load(), data=str(tmp_path / name)), tmp_path)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_engine_drafts_as_the_advised_schedule_says(
    served_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    advice = Advice(
        acceptance_per_position=(0.5, 0.3),
        table=(),
        schedule=(
            Range(first=1, last=1, num_speculative_tokens=2),
            Range(first=2, last=16, num_speculative_tokens=0),
        ),
    )
    config = advice.speculative_config({"method": "draft_model", "model": str(served_pair[1])})
    with vllm_server(
        served_pair[0], log=tmp_path / "vllm.log", speculative_config=config, max_model_len=256
    ) as server:
        one = run_load(server, make_load(concurrency=1, output_tokens=24), tmp_path)
        many = run_load(
            server, make_load(concurrency=8, output_tokens=24, num_prompts=16), tmp_path
        )
    assert one.tau > 1.1
    assert one.num_steps < 6 * 23, "fewer steps than tokens"
    assert many.tau < 1.05, "only the last request, alone in its steps, is drafted for"
