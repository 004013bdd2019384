"""The tap records nothing of a server whose answers are not the plain target's.

It names what to change.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from types import MappingProxyType

import httpx
import numpy as np
import pytest
from fake_completions import served
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from waiting import in_event_loop, until

from redraft.online.records.record import Sampling, read_frames
from redraft.online.records.spool import spool_files
from redraft.online.traffic import server_check
from redraft.online.traffic.proxy import Proxy
from redraft.online.traffic.server_check import NEUTRAL
from redraft.online.traffic.tap import Tap, TapConfig
from redraft.online.traffic.upstream import Upstream

CONFIGURED = {"temperature": 0.6, "top_k": 20}
"""Sampling parameters of the target's generation_config.json."""

LOGITS = np.linspace(3.0, -3.0, 12)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum())


def sample(mode, question):
    """Log-probabilities as vLLM returns them under --logprobs-mode."""
    if mode == "raw_logprobs":
        return log_softmax(LOGITS)
    if mode == "raw_logits":
        return LOGITS
    logits = LOGITS / question.get("temperature", 1.0)
    probs = np.exp(log_softmax(logits))
    is_kept = probs.cumsum() - probs < question.get("top_p", 1.0)
    kept = np.where(is_kept, logits, -math.inf)
    values = log_softmax(kept) if mode == "processed_logprobs" else kept
    return np.maximum(values, -9999.0)


def draw(question, defaults, watermarks):
    """First tokens for each prompt by an exponential race, as vLLM samples.

    A cut changes those that it takes away.
    """
    taken = {name: question.get(name, defaults.get(name, value)) for name, value in NEUTRAL.items()}
    log_probs = log_softmax(LOGITS / taken["temperature"])
    probs = np.exp(log_probs)
    is_kept = probs.cumsum() - probs < taken["top_p"]  # the likeliest come first
    if taken["top_k"] > 0:
        is_kept[int(taken["top_k"]) :] = False
    if watermarks and question.get("watermarking") is not False:
        log_probs = log_probs + 2.0 * (np.arange(len(log_probs)) % 2)
    for number, _ in enumerate(question["prompt"]):
        for seed in range(question["seed"], question["seed"] + question["n"]):
            race = np.random.default_rng([seed, number]).exponential(size=len(log_probs))
            yield [int(np.argmax(np.where(is_kept, log_probs - np.log(race), -math.inf)))]


def make_server(
    mode="raw_logprobs",
    max_logprobs=20,
    key="",
    defaults=MappingProxyType({}),
    watermarks=False,
    asked=None,
    broken=False,
):
    """A vLLM with these flags, which serves the target `m` and its adapter `a`."""

    asked = [] if asked is None else asked

    async def models(request):
        asked.append(("models", request.headers.get("authorization"), 0))
        if key and request.headers.get("authorization") != key:
            return Response(status_code=401)
        return JSONResponse({"data": [{"id": "m", "parent": None}, {"id": "a", "parent": "m"}]})

    async def complete(request):
        if key and request.headers.get("authorization") != key:
            return Response(status_code=401)
        question = json.loads(await request.body())
        prompts = len(question["prompt"]) if isinstance(question["prompt"], list) else 1
        count = prompts * question.get("n", 1)
        asked.append(("completions", request.headers.get("authorization"), count))
        if broken:
            return Response(status_code=500)
        if isinstance(question["prompt"], list):
            tokens = draw(question, defaults, watermarks)
            return JSONResponse(
                {"choices": [{"index": i, "token_ids": ids} for i, ids in enumerate(tokens)]}
            )
        count = question.get("logprobs") or 0
        if count > max_logprobs:
            return JSONResponse({"error": "too many"}, 400)
        choice = {"index": 0, "text": "x", "finish_reason": "length", "logprobs": None}
        if count:
            values = sample(mode, question).tolist()
            # the sampled token is listed even if it is not one of the likeliest
            sampled = len(values) - 1 if question.get("top_p", 1.0) == 1.0 else 0
            listed = {*range(count), sampled}
            top = {f"token_id:{token}": values[token] for token in sorted(listed)}
            choice["logprobs"] = {"top_logprobs": [top]}
        if question.get("return_token_ids"):
            choice |= {"token_ids": [0], "prompt_token_ids": [1, 2]}
        return JSONResponse({"id": "cmpl-1", "choices": [choice]})

    return Starlette(
        routes=[Route("/v1/models", models), Route("/v1/completions", complete, methods=["POST"])]
    )


@contextlib.asynccontextmanager
async def tapped(folder, server, **config):
    """The tap in front of the server, and a client of it."""
    async with served(server) as upstream:
        tap = Tap(TapConfig(spool=folder, logprobs=5, **config), "target", CONFIGURED)
        proxy = Proxy(Upstream(f"http://127.0.0.1:{upstream.port}"), tap)
        async with (
            served(proxy.app()) as front,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{front.port}") as client,
        ):
            client.upstream, client.upstream_port = upstream, upstream.port
            yield tap, client


async def ask(client, **changes):
    answer = await client.post("/v1/completions", json={"model": "m", "prompt": "x"} | changes)
    assert answer.status_code == 200
    return answer.json()


def records_in(folder):
    return [record for path in spool_files(folder) for _, record in read_frames(path.read_bytes())]


@pytest.mark.parametrize(
    ("flags", "cure"),
    [
        ({"mode": "processed_logprobs"}, "--logprobs-mode raw_logprobs"),
        ({"mode": "processed_logits"}, "--logprobs-mode raw_logprobs"),
        ({"mode": "raw_logits"}, "--logprobs-mode raw_logprobs"),
        ({"max_logprobs": 4}, "--max-logprobs 5"),
        ({"defaults": {"temperature": 0.3}}, "--override-generation-config"),
        ({"defaults": {"top_p": 0.95}}, "--override-generation-config"),
        ({"watermarks": True}, "--watermark-config"),
    ],
)
@in_event_loop
async def test_a_server_with_an_unfit_flag_is_named_with_the_cure_and_not_recorded(
    tmp_path, caplog, flags, cure
):
    async with tapped(tmp_path, make_server(**flags)) as (tap, client):
        await until(lambda: tap.check.verdict)
        await ask(client)
        counts = tap.status()
        assert cure in counts["problem"]
        assert caplog.text.count(cure) == 1
        assert counts["skipped_requests_unfit_server"] == 1
        assert "captured_requests" not in counts
    assert records_in(tmp_path) == []


@in_event_loop
async def test_the_target_is_recorded_and_its_adapter_is_counted(tmp_path):
    async with tapped(tmp_path, make_server()) as (tap, client):
        await until(lambda: tap.check.verdict)
        for model in ("m", None, "a", "unknown"):
            await ask(client, model=model)
        assert tap.counts["captured_requests"] == 2
        assert tap.counts["skipped_requests_adapter"] == 2
    records = records_in(tmp_path)
    assert len(records) == 2
    np.testing.assert_allclose(
        records[0].topk_log_probs[0], log_softmax(LOGITS)[: records[0].top_k], atol=1e-5
    )


@pytest.mark.parametrize("defaults", [CONFIGURED, {}])
@in_event_loop
async def test_a_record_has_the_parameters_that_the_server_takes_by_default(tmp_path, defaults):
    """Those of generation_config.json, or none with --generation-config vllm."""
    async with tapped(tmp_path, make_server(defaults=defaults)) as (tap, client):
        await until(lambda: tap.check.verdict)
        await ask(client)
        await ask(client, temperature=0.9)
    asked, given = (record.sampling for record in records_in(tmp_path))
    assert asked == Sampling(**defaults)
    assert given == Sampling(**defaults | {"temperature": 0.9})


async def ask_with(client, key):
    headers = {"Authorization": f"Bearer {key}"}
    question = {"model": "m", "prompt": "x"}
    answer = await client.post("/v1/completions", json=question, headers=headers)
    return answer.status_code


@in_event_loop
async def test_a_server_that_wants_a_key_is_checked_with_one_that_it_has_accepted(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(server_check, "CHECK_S", 0.01)
    asked = []
    async with tapped(tmp_path, make_server(key="Bearer k", asked=asked)) as (tap, client):
        await until(lambda: "key_file" in tap.check.problem)
        for number in range(20):
            assert await ask_with(client, f"wrong-{number}") == 401
            await asyncio.sleep(0.01)
        assert await ask_with(client, "k") == 200
        assert tap.counts["skipped_requests_unchecked_server"] == 21
        await until(lambda: tap.check.verdict)
        assert await ask_with(client, "wrong") == 401
        assert await ask_with(client, "k") == 200
        await until(lambda: tap.counts["captured_requests"] == 1)
    # The tap itself has asked without a key, once, and then with the good one.
    assert [kind for kind, key, _ in asked if key != "Bearer k"] == ["models"]
    billed = [count for kind, key, count in asked if key == "Bearer k"]
    assert sum(billed) - 2 <= 1026, "without the client's own two"


@in_event_loop
async def test_the_operators_key_is_taken_if_there_is_one(tmp_path):
    asked, key_file = [], tmp_path / "key"
    key_file.write_text("own")
    key_file.chmod(0o600)
    server = make_server(key="Bearer own", asked=asked)
    async with tapped(tmp_path / "spool", server, key_file=key_file) as (tap, client):
        await until(lambda: tap.check.verdict)
        assert await ask_with(client, "own") == 200
        assert tap.counts["captured_requests"] == 1
    assert {key for _, key, _ in asked} == {"Bearer own"}


@pytest.mark.parametrize("content", ["", "two\nlines", "kéy"])
def test_a_file_without_a_key_is_refused_by_name(tmp_path, content):
    key_file = tmp_path / "key"
    key_file.write_text(content)
    key_file.chmod(0o600)
    with pytest.raises(ValueError, match=re.escape(str(key_file))):
        Tap(TapConfig(spool=tmp_path, key_file=key_file), "target")


@in_event_loop
async def test_a_wrong_key_of_the_operator_is_named_and_no_clients_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(server_check, "CHECK_S", 0.01)
    asked, key_file = [], tmp_path / "key"
    key_file.write_text("old")
    key_file.chmod(0o600)
    server = make_server(key="Bearer new", asked=asked)
    async with tapped(tmp_path / "spool", server, key_file=key_file) as (tap, client):
        await until(lambda: "rejects the key in key_file" in tap.check.problem)
        assert await ask_with(client, "new") == 200
        await asyncio.sleep(0.1)
    assert asked == [("models", "Bearer old", 0), ("completions", "Bearer new", 1)]


@in_event_loop
async def test_a_check_that_costs_answers_is_not_repeated_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(server_check, "CHECK_S", 0.01)
    asked = []
    async with tapped(tmp_path, make_server(asked=asked, broken=True)) as (tap, _):
        await until(lambda: "500" in tap.check.problem)
        await asyncio.sleep(0.2)
        assert [kind for kind, _, _ in asked] == ["models", "completions"]
        tap.check._next_s = 0.0  # a minute later
        await until(lambda: len(asked) == 4)


@in_event_loop
async def test_a_server_that_was_down_is_checked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(server_check, "CHECK_S", 0.01)
    monkeypatch.setattr(server_check, "COST_PAUSE_S", 0.0)
    async with tapped(tmp_path, make_server()) as (tap, client):
        await until(lambda: tap.check.verdict)
        first = tap.check.verdict
        client.upstream.cut_off()
        await client.upstream.shutdown()
        assert await ask_with(client, "k") == 503
        await until(lambda: tap.check.verdict is None)
        async with served(make_server(mode="raw_logits"), client.upstream_port):
            await until(lambda: tap.check.verdict)
            assert first.problem == ""
            assert "--logprobs-mode" in tap.check.verdict.problem


@in_event_loop
async def test_another_model_at_the_same_address_is_not_recorded_as_the_target(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(server_check, "CHECK_S", 0.01)
    monkeypatch.setattr(server_check, "COST_PAUSE_S", 0.0)
    monkeypatch.setattr(server_check, "LOOK_S", 0.0)

    async def restart(client, logits):
        """Serve this model until the tap has checked it; return the server's problem."""
        monkeypatch.setitem(globals(), "LOGITS", logits)
        # No client sends a request during the outage.
        await until(lambda: tap.check.verdict is None)
        async with served(make_server(), client.upstream_port) as server:
            await until(lambda: tap.check.verdict)
            await ask(client)
            problem = tap.check.verdict.problem
            server.cut_off()
        return problem

    first = LOGITS
    noise = 0.05 * np.random.default_rng(0).standard_normal(len(first))  # rounding, e.g. on a GPU
    async with tapped(tmp_path, make_server()) as (tap, client):
        await until(lambda: tap.check.verdict)
        client.upstream.cut_off()
        await client.upstream.shutdown()
        assert await restart(client, first + noise) == ""
        assert "different model" in await restart(client, 2 * first)
        assert tap.counts["skipped_requests_unfit_server"] == 1
        assert await restart(client, first) == ""
    assert len(records_in(tmp_path)) == 2
