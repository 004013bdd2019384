"""The tap in front of the real engine: the answers clients receive through it, and its records."""

import ast
import asyncio
import importlib.util
import json
import socket
import threading
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from fake_completions import Server
from transformers import LlamaForCausalLM
from waiting import in_event_loop, until, wait_until

from redraft.online.records.origin import Origin
from redraft.online.records.record import Record, Sampling, read_frames
from redraft.online.records.spool import spool_files
from redraft.online.traffic import tap as tap_module
from redraft.online.traffic.proxy import Proxy
from redraft.online.traffic.server_check import Verdict
from redraft.online.traffic.tap import Tap, TapConfig
from redraft.online.traffic.tap_messages import (
    KNOWN,
    Answer,
    AnswerError,
    find_skip_reason,
    read_sampling,
    strip_added,
)
from redraft.online.traffic.upstream import Upstream

# --- messages


@pytest.mark.parametrize(
    ("question", "recordable"),
    [
        ({"prompt": "x"}, True),
        ({"prompt": [1, 2]}, True),
        ({"messages": []}, True),
        ({"prompt": "x", "n": 1, "logprobs": None, "echo": False}, True),
        ({"prompt": ["x", "y"]}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"prompt": "x", "n": 2}, False),
        ({"prompt": "x", "logprobs": 0}, False),
        ({"prompt": "x", "echo": True}, False),
        ({"messages": [], "response_format": {"type": "json_object"}}, False),
        ({"messages": [], "guided_regex": "a+"}, False),
        ({"prompt": "x", "logit_bias": {"5": 1}}, False),
        ({"prompt": "x", "min_tokens": 3}, False),
        ({"prompt": "x", "bad_words": ["y"]}, False),
        ({"prompt": "x", "allowed_token_ids": [5]}, False),
        ({"prompt": "x", "logit_bias": {}, "min_tokens": 0, "bad_words": []}, True),
        ({"messages": [], "tools": [{}], "tool_choice": "required"}, False),
        ({"messages": [], "tools": [{}]}, False),
        ({"messages": [], "tools": [{}], "tool_choice": "none"}, True),
        ({"messages": [], "thinking_token_budget": 0}, False),
        ({"messages": [], "watermarking": True}, False),
        ({"messages": [], "watermarking": False}, True),
        ({"prompt": "x", "vllm_xargs": {"a": 1}}, False),
        ({"prompt": "x", "prompt_embeds": "AAAA"}, False),
        ({"prompt": "x", "a_field_of_a_later_vllm": 1}, False),
        ({"prompt": "x", "a_field_of_a_later_vllm": None}, True),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, True),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            False,
        ),
        ([], False),
    ],
)
def test_only_plain_requests_are_touched(question, recordable):
    assert (find_skip_reason(question) == "") is recordable


@pytest.mark.parametrize(
    ("file", "name"),
    [("completion", "CompletionRequest"), ("chat_completion", "ChatCompletionRequest")],
)
def test_every_field_of_vllms_requests_is_decided_on(file, name):
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.submodule_search_locations[0], "entrypoints", "openai", file, "protocol.py")
    (request,) = (n for n in ast.parse(source.read_text()).body if getattr(n, "name", "") == name)
    fields = {
        n.target.id for n in request.body if isinstance(n, ast.AnnAssign) and n.target.id[0] != "_"
    }
    assert len(fields) > 40
    assert fields <= KNOWN


def test_an_event_that_is_only_there_for_the_tap_is_not_sent():
    event = {
        "choices": [
            {"delta": {}, "finish_reason": None, "token_ids": [5], "logprobs": {"content": []}}
        ]
    }
    assert strip_added(event) is False
    last = {"choices": [{"delta": {}, "finish_reason": "stop", "token_ids": [5]}]}
    assert strip_added(last) is True
    assert last["choices"][0]["token_ids"] is None
    first = {"choices": [{"delta": {"role": "assistant"}}], "prompt_token_ids": [1]}
    assert strip_added(first) is True
    assert first["prompt_token_ids"] is None


def test_the_likeliest_tokens_are_kept_whatever_was_sampled():
    answer = Answer(
        request_id="a", prompt_ids=[1, 2], output_ids=[9], top=[{9: -5.0, 3: -0.5, 4: -1.5}]
    )
    asked = {"temperature": 0.5, "reasoning_effort": "low", "chat_template_kwargs": {"x": True}}
    record = answer.record(asked, Origin(tenant="t"), "boot", "target", 2)
    assert record.template_arguments == '{"reasoning_effort": "low", "x": true}'
    np.testing.assert_array_equal(record.topk_ids, [[3, 4]])
    np.testing.assert_allclose(record.topk_log_probs, [[-0.5, -1.5]])
    assert record.sampling.temperature == 0.5
    assert record.tenant == "t"
    assert Answer(prompt_ids=[1]).record({}, Origin(), "boot", "target", 2) is None


# --- the engine


class RunningTap:
    verdicts: ClassVar = {}
    """By server and log-probabilities: a check takes the engine a second, and says the same."""

    def __init__(self, upstream, spool, logprobs):
        self.spool = spool
        tap = Tap(TapConfig(spool=spool, logprobs=logprobs), "target")
        self.tap = tap
        tap.check.verdict = self.verdicts.get((upstream, logprobs))
        proxy = Proxy(Upstream(upstream), tap)
        self.server = Server(uvicorn.Config(proxy.app(), port=0, log_level="warning"))
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started)
        wait_until(lambda: tap.check.verdict)
        self.verdicts[upstream, logprobs] = tap.check.verdict
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.server.port}", timeout=600)

    def counts(self):
        return self.tap.status()

    def stop(self):
        """Stop the tap and return its records."""
        self.server.should_exit = True
        self.thread.join(20)
        frames = [
            frame for path in spool_files(self.spool) for frame in read_frames(path.read_bytes())
        ]
        return [record for _, record in frames]


@pytest.fixture
def tap(server, tmp_path):
    running = RunningTap(server.url, tmp_path, logprobs=12)
    yield running
    running.stop()


def make_bodies():
    prompt = np.random.default_rng(40).integers(8, 500, 20).tolist()
    common = {"model": "m", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    text = common | {"prompt": prompt}
    chat = common | {"messages": [{"role": "user", "content": "hello"}]}
    return {
        "text": ("/v1/completions", text),
        "chat": ("/v1/chat/completions", chat),
        "text stream": ("/v1/completions", text | {"stream": True}),
        "chat stream": (
            "/v1/chat/completions",
            chat | {"stream": True, "stream_options": {"include_usage": True}},
        ),
        "logprobs": ("/v1/completions", text | {"logprobs": 2}),
        "two": ("/v1/completions", text | {"prompt": [prompt, prompt[:5]]}),
    }


def answer_of(http, path, body):
    """The answer's messages, without fields that differ between any two answers."""
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        messages = [answer.json()]
    else:
        lines = [line for line in answer.text.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        messages = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    for message in messages:
        message.pop("id")
        message.pop("created")
        message.pop("metrics", None)
        # On the last event only, which is the first one if a fast engine sends the text in one.
        message.pop("system_fingerprint", None)
    return messages


@pytest.mark.vllm
@pytest.mark.parametrize("kind", make_bodies())
def test_the_client_gets_what_it_would_have_got(server, tap, kind):
    server.swap(server.copy)
    path, body = make_bodies()[kind]
    direct = answer_of(httpx.Client(base_url=server.url, timeout=600), path, body)
    tapped = answer_of(tap.http, path, body)
    if body.get(
        "stream"
    ):  # How the text is cut into events depends on timing; the content does not.
        assert joined(tapped) == joined(direct)
        assert [set(event) for event in tapped[:1]] == [set(event) for event in direct[:1]]
    else:
        assert tapped == direct
    assert tap.counts().get("captured_requests", 0) == (kind not in ("logprobs", "two"))


def joined(events):
    """Text, finish reasons, usage, and every non-null field of a streamed answer."""
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(
        choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in choices
    )
    fields = {
        key for part in (*events, *choices) for key, value in part.items() if value is not None
    }
    finish = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    return text, fields, finish, [event["usage"] for event in events if event.get("usage")]


@pytest.mark.vllm
def test_what_it_records_is_the_targets_distribution(server, tap, random_target):
    model = LlamaForCausalLM.from_pretrained(random_target, dtype=torch.float32).eval()
    labels = {"X-Redraft-Tenant": "acme", "X-Redraft-Domain": "prose"}
    bodies = [body for kind, body in make_bodies().items() if kind not in ("logprobs", "two")]
    for path, body in bodies:
        # above temperature 0 the sampled token need not be among the likeliest ones
        answer = tap.http.post(path, json=body | {"temperature": 1.5, "seed": 3}, headers=labels)
        assert answer.status_code == 200
    records = tap.stop()
    assert len(records) == len(bodies)
    for record in records:
        assert isinstance(record, Record)
        assert (record.tenant, record.domain, record.sampling.temperature) == ("acme", "prose", 1.5)
        assert len(record.output_ids) == 20
        text = torch.tensor(np.concatenate([record.context_ids, record.output_ids]))[None].long()
        with torch.no_grad():
            log_probs_TV = (
                model(input_ids=text).logits[0].double().log_softmax(-1)[record.positions - 1]
            )
        assert record.top_k >= 11
        wanted = log_probs_TV.topk(record.top_k)
        np.testing.assert_allclose(record.topk_log_probs, wanted.values, atol=1e-3)


@pytest.mark.vllm
def test_errors_and_other_routes_pass_through(server, tap):
    direct = httpx.Client(base_url=server.url, timeout=600)
    for path, body in (
        ("/v1/completions", {"model": "nobody", "prompt": "x"}),
        ("/v1/completions", {"model": "m"}),
    ):
        wanted, got = direct.post(path, json=body), tap.http.post(path, json=body)
        assert got.status_code == wanted.status_code >= 400
        assert got.json() == wanted.json()
    assert tap.http.get("/v1/models").json()["data"][0]["id"] == "m"
    assert tap.http.post("/v1/completions", content=b"{").status_code == 400
    assert "vllm:" in tap.http.get("/metrics").text


@pytest.mark.vllm
def test_a_server_that_refuses_the_taps_wish_still_answers_the_client(server, tmp_path):
    running = RunningTap(server.url, tmp_path, logprobs=41)  # above the server's --max-logprobs
    path, body = make_bodies()["text"]
    assert answer_of(running.http, path, body) == answer_of(
        httpx.Client(base_url=server.url), path, body
    )
    assert running.counts()["skipped_requests_unfit_server"] == 1
    assert running.stop() == []


@pytest.mark.vllm
def test_who_opts_out_is_not_recorded(server, tap):
    path, body = make_bodies()["text"]
    assert tap.http.post(path, json=body, headers={"X-Redraft-Opt-Out": "1"}).status_code == 200
    counts = {name: count for name, count in tap.counts().items() if count}
    assert (counts.pop("is_checked"), counts.pop("problem", "")) == (True, "")
    assert counts == {"skipped_requests_opt_out": 1}
    assert tap.stop() == []


# --- without the engine: what a server or a client may send


LISTENER = socket.create_server(("127.0.0.1", 0))
UPSTREAM = Upstream(f"http://127.0.0.1:{LISTENER.getsockname()[1]}")
"""A server that accepts connections but never responds."""


def make_tap(folder):
    return checked(Tap(TapConfig(spool=folder), "target"))


def test_a_tap_without_a_place_for_records_is_refused():
    with pytest.raises(ValueError, match=r"destination .* records: .*spool.*ingest"):
        Tap(TapConfig(), "target")


def checked(tap):
    tap.check.verdict = Verdict(models=frozenset({"m"}), defaults=tap.check.defaults)
    return tap


def make_answer(**changes):
    return Answer(
        request_id="cmpl-trace",
        prompt_ids=[1, 2],
        output_ids=[9],
        top=[{9: -0.5, 3: -1.5}],
        **changes,
    )


def make_message(**changes):
    """A server's answer of one token, as JSON."""
    top = {"token_id:9": -0.5, "token_id:3": -1.5}
    choice = {"index": 0, "text": "x", "token_ids": [9], "logprobs": {"top_logprobs": [top]}}
    return json.dumps(
        {"id": "cmpl-trace", "prompt_token_ids": [1, 2], "choices": [choice]} | changes
    ).encode()


class Arrived:
    """A server's answer, as far as the tap reads it."""

    def __init__(self, message):
        self.message = message

    async def read(self):
        return self.message


async def relay(tap, message, given=MappingProxyType({})):
    """What the client gets."""
    return await tap.relay_answer(Arrived(message), dict(given), Origin())


@in_event_loop
async def relay_all(tap, *requests):
    """Answer these requests and ship the records."""
    async with tap.running(UPSTREAM):
        for given in requests:
            await relay(tap, make_message(), given)


def spooled(folder):
    return [record for path in spool_files(folder) for _, record in read_frames(path.read_bytes())]


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ({}, Sampling()),
        ({"temperature": 1e-40, "top_p": 1}, Sampling(temperature=0.01)),
        ({"temperature": 0, "top_p": 0.5, "top_k": 5, "min_p": 0.1}, Sampling(temperature=0.0)),
        ({"temperature": "0.5", "top_k": -1}, Sampling(temperature=0.5)),
        ({"top_k": 10**20}, Sampling(top_k=2**31 - 1)),
        ({"repetition_penalty": 10**20, "min_p": None}, Sampling(repetition_penalty=1e20)),
    ],
)
def test_sampling_is_stored_as_vllm_takes_it(given, stored):
    assert read_sampling(given) == stored


def test_a_request_that_sets_no_sampling_is_recorded_with_the_servers_defaults(tmp_path):
    defaults = {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    tap = checked(Tap(TapConfig(spool=tmp_path, logprobs=2), "target", defaults))
    relay_all(tap, {}, {"top_p": 1, "top_k": None})
    assert [record.sampling for record in spooled(tmp_path)] == [
        Sampling(temperature=0.7, top_p=0.8, top_k=20),
        Sampling(temperature=0.7, top_p=1.0, top_k=20),
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1}, {"temperature": 3}, {"temperature": float("nan")}, {"temperature": float("inf")},
        {"temperature": 10**400}, {"temperature": []}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": -2}, {"top_k": "x"},
        {"min_p": -0.1}, {"presence_penalty": 3}, {"frequency_penalty": -3}, {"repetition_penalty": 0},
    ],
)  # fmt: skip
def test_sampling_that_vllm_refuses_is_not_recorded(tmp_path, given):
    with pytest.raises(AnswerError):
        read_sampling(given)
    tap = make_tap(tmp_path)
    relay_all(tap, given)
    assert tap.status()["errors_sampling"] == 1
    assert spooled(tmp_path) == []


@pytest.mark.vllm
def test_what_vllm_refuses_is_what_we_refuse():
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    for given in (
        {"temperature": 2.1},
        {"top_p": 0.0},
        {"min_p": 1.1},
        {"presence_penalty": 2.1},
        {"top_k": -2},
    ):
        with pytest.raises(VLLMValidationError, match=next(iter(given))):
            SamplingParams(**given)
    assert SamplingParams(temperature=1e-40).temperature == 0.01
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=5, min_p=0.1)
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)


@in_event_loop
async def test_shipping_survives_a_record_that_cannot_be_encoded_and_a_spool_that_fails(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(tap_module, "SHIP_INTERVAL_S", 0.01)
    spool = tmp_path / "spool"
    tap = make_tap(spool)
    async with tap.running(UPSTREAM):
        for message in (make_message(id="\ud800"), make_message()):
            await relay(tap, message)
        await until(lambda: tap.counts["shipped_records"] == 1)
        assert tap.status()["errors_UnicodeEncodeError"] == 1
        spool.rename(tmp_path / "away")
        spool.write_text("in the way")
        await relay(tap, make_message())
        await until(lambda: tap.counts["dropped_records_spool"] == 1)
        spool.unlink()
        (tmp_path / "away").rename(spool)
        await relay(tap, make_message())
    assert tap.status()["shipped_records"] == len(spooled(spool)) == 2


def test_answers_of_one_trace_are_records_of_their_own():
    records = [make_answer().record({}, Origin(), "boot", "target", 2) for _ in range(10)]
    assert len({record.record_id for record in records}) == 10
    assert all(record.request_id.startswith("cmpl-trace-") for record in records)
    long_id = Answer(**(vars(make_answer()) | {"request_id": "a" * 10**6})).record(
        {}, Origin(), "boot", "target", 2
    )
    assert len(long_id.request_id) < 200


@in_event_loop
async def test_words_of_a_user_are_neither_logged_nor_left_in_the_answer(tmp_path, caplog):
    tap = make_tap(tmp_path)
    top = {" hunter2": -0.1, " swordfish": -2.5}
    choice = {"index": 0, "text": " hunter2", "token_ids": [7], "logprobs": {"top_logprobs": [top]}}
    got = json.loads(await relay(tap, make_message(id="cmpl-1", choices=[choice])))
    assert got["choices"] == [{"index": 0, "text": " hunter2", "token_ids": None, "logprobs": None}]
    assert got["prompt_token_ids"] is None
    await relay(tap, make_message(prompt_token_ids=["hunter2"]))
    counts = tap.status()
    assert (counts["errors_unnamed_tokens"], counts["errors_ValueError"]) == (1, 1)
    assert "return_tokens_as_token_ids" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize(
    "odd", ["5", "[1]", '"text"', "null", '{"choices": 5}', '{"choices": [5, null]}', "{"]
)
@in_event_loop
async def test_an_answer_of_any_form_reaches_the_client(tmp_path, odd):
    got = await relay(make_tap(tmp_path), odd.encode())
    assert got == odd.encode() or json.loads(got) == json.loads(odd)
