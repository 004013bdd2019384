"""The tap in front of the real engine: what clients get through it, and what it records."""

import asyncio
import json
import threading
import time

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from transformers import LlamaForCausalLM

from online.pools import Pools
from online.proxy import Proxy
from online.records import Record, read_frames
from online.request_origin import Origin
from online.spool import spool_files
from online.tap import Tap, TapConfig
from online.tap_messages import Answer, is_recordable, strip

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
        ({"messages": [], "tools": [{}], "tool_choice": "required"}, False),
        ({"messages": [], "tools": [{}]}, False),
        ({"messages": [], "tools": [{}], "tool_choice": "none"}, True),
        ([], False),
    ],
)
def test_only_plain_requests_are_touched(question, recordable):
    assert is_recordable(question) is recordable


def test_an_event_that_is_only_there_for_the_tap_is_not_sent():
    event = {"choices": [{"delta": {}, "finish_reason": None, "token_ids": [5], "logprobs": {"content": []}}]}
    assert strip(event) is False
    last = {"choices": [{"delta": {}, "finish_reason": "stop", "token_ids": [5]}]}
    assert strip(last) is True
    assert last["choices"][0]["token_ids"] is None
    first = {"choices": [{"delta": {"role": "assistant"}}], "prompt_token_ids": [1]}
    assert strip(first) is True
    assert first["prompt_token_ids"] is None


def test_the_likeliest_tokens_are_kept_whatever_was_sampled():
    answer = Answer(request_id="a", prompt_ids=[1, 2], output_ids=[9], top=[{9: -5.0, 3: -0.5, 4: -1.5}])
    record = answer.record({"temperature": 0.5}, Origin(tenant="t"), "boot", "target", 2)
    np.testing.assert_array_equal(record.topk_ids, [[3, 4]])
    np.testing.assert_allclose(record.topk_log_probs, [[-0.5, -1.5]])
    assert record.sampling.temperature == 0.5
    assert record.tenant == "t"
    assert Answer(prompt_ids=[1]).record({}, Origin(), "boot", "target", 2) is None


# --- the engine


class RunningTap:
    def __init__(self, upstream, spool, **config):
        self.spool = spool
        tap = Tap(TapConfig(spool=spool, **config), "target")
        proxy = Proxy(Pools(lambda: [(upstream, "")]), tap=tap)
        self.server = uvicorn.Server(uvicorn.Config(proxy.app(), port=0, log_level="warning"))
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve()), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)

    def counts(self):
        return self.http.get("/redraft/tap").json()

    def stop(self):
        """Stop it and return what it has recorded."""
        self.server.should_exit = True
        self.thread.join(20)
        frames = [frame for path in spool_files(self.spool) for frame in read_frames(path.read_bytes())]
        return [record for _, record in frames]


@pytest.fixture
def tap(server, tmp_path):
    running = RunningTap(server.url, tmp_path, top_k=12)
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
        "chat stream": ("/v1/chat/completions", chat | {"stream": True, "stream_options": {"include_usage": True}}),
        "logprobs": ("/v1/completions", text | {"logprobs": 2}),
        "two": ("/v1/completions", text | {"prompt": [prompt, prompt[:5]]}),
    }


def answer_of(http, path, body):
    """The answer's messages without what differs between any two answers."""
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
    return messages


@pytest.mark.vllm
@pytest.mark.parametrize("kind", make_bodies())
def test_the_client_gets_what_it_would_have_got(server, tap, kind):
    server.swap(server.copy)
    path, body = make_bodies()[kind]
    direct = answer_of(httpx.Client(base_url=server.url, timeout=120), path, body)
    tapped = answer_of(tap.http, path, body)
    if body.get("stream"):  # where the text is cut into events depends on timing; what they are made of does not
        assert joined(tapped) == joined(direct)
        assert [set(event) for event in tapped[:1]] == [set(event) for event in direct[:1]]
    else:
        assert tapped == direct
    assert tap.counts().get("captured_requests", 0) == (kind not in ("logprobs", "two"))


def joined(events):
    """Text, finish reasons, usage, and every field that is not null, of a streamed answer."""
    choices = [choice for event in events for choice in event["choices"]]
    text = "".join(choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in choices)
    fields = {key for part in (*events, *choices) for key, value in part.items() if value is not None}
    finish = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    return text, fields, finish, [event["usage"] for event in events if event.get("usage")]


@pytest.mark.vllm
def test_what_it_records_is_the_targets_distribution(server, tap, random_target):
    model = LlamaForCausalLM.from_pretrained(random_target, dtype=torch.float32).eval()
    labels = {"X-Redraft-Tenant": "acme", "X-Redraft-Domain": "prose"}
    bodies = [body for kind, body in make_bodies().items() if kind not in ("logprobs", "two")]
    for path, body in bodies:
        # above temperature 0 the sampled token need not be among the likeliest
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
            log_probs_TV = model(input_ids=text).logits[0].double().log_softmax(-1)[record.positions - 1]
        assert record.top_k >= 11
        wanted = log_probs_TV.topk(record.top_k)
        np.testing.assert_allclose(record.topk_log_probs, wanted.values, atol=1e-3)


@pytest.mark.vllm
def test_errors_and_other_routes_pass_through(server, tap):
    direct = httpx.Client(base_url=server.url, timeout=60)
    for path, body in (("/v1/completions", {"model": "nobody", "prompt": "x"}), ("/v1/completions", {"model": "m"})):
        wanted, got = direct.post(path, json=body), tap.http.post(path, json=body)
        assert got.status_code == wanted.status_code >= 400
        assert got.json() == wanted.json()
    assert tap.http.get("/v1/models").json()["data"][0]["id"] == "m"
    assert tap.http.post("/v1/completions", content=b"{").status_code == 400
    assert "vllm:" in tap.http.get("/metrics").text


@pytest.mark.vllm
def test_a_server_that_refuses_the_taps_wish_still_answers_the_client(server, tmp_path):
    running = RunningTap(server.url, tmp_path, top_k=41)  # above the server's --max-logprobs
    path, body = make_bodies()["text"]
    assert answer_of(running.http, path, body) == answer_of(httpx.Client(base_url=server.url), path, body)
    assert running.counts()["refused_requests"] == 1
    assert running.stop() == []


@pytest.mark.vllm
def test_who_opts_out_is_not_recorded(server, tap):
    path, body = make_bodies()["text"]
    assert tap.http.post(path, json=body, headers={"X-Redraft-Opt-Out": "1"}).status_code == 200
    assert {name: count for name, count in tap.counts().items() if count} == {"skipped_requests_opt_out": 1}
    assert tap.stop() == []
