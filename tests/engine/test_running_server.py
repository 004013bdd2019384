"""A running server of any engine: what it is, and the counts of an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from local_server import serve_handler

from redraft.engine.counts import AcceptanceCounts
from redraft.engine.running_server import find_server


@contextmanager
def fake_vllm(
    others: int = 0, late: int = 0, dropped: str = "", emptied: str = ""
) -> Iterator[str]:
    """vLLM's routes: an answer of 6 tokens in 3 drafts of 2 tokens, of which 3 are accepted.

    `others` are drafts of other clients meanwhile, and /metrics is `late` by so many readings. A
    gateway has `dropped` a field.
    """
    counted, waiting = [7, 14, 4], [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/metrics":
                waiting[0] -= 1
                if waiting[0] == 0:
                    counted[:] = [7 + 3 + others, 14 + 6 + 2 * others, 4 + 3]
                names = ("drafts", "draft_tokens", "accepted_tokens")
                lines = (
                    f'vllm:spec_decode_num_{name}_total{{engine="0"}} {value}\n'
                    for name, value in zip(names, counted, strict=True)
                )
                self.send(200, "".join(lines).encode())
                return
            found: dict[str, Any] = {
                "/version": {"version": "0.32.0"},
                "/v1/models": {"data": [{"id": "m"}]},
            }
            self.send(200 if self.path in found else 404, json.dumps(found.get(self.path)).encode())

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert asked["model"] == "m"
            assert asked["prompt"] == [1, 2]
            waiting[0] = 1 + late
            choice = {"text": "x", "token_ids": [5] * asked["max_tokens"]}
            choice |= {emptied: None} if emptied else {}
            content = {"choices": [{key: choice[key] for key in choice if key != dropped}]}
            self.send(200, json.dumps(content).encode())

        def send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with serve_handler(Handler) as url:
        yield url


@pytest.mark.parametrize("late", [0, 2])
def test_vllms_counters_are_read_until_they_count_the_answer(late: int) -> None:
    with fake_vllm(late=late) as url:
        server = find_server(f"{url}/")
        assert (server.engine, server.version, server.model) == ("vllm", "0.32.0", "m")
        answer = server.answer([1, 2], 6)
    assert answer.token_ids == [5] * 6
    expected = AcceptanceCounts(num_drafts=3, num_accepted=3, num_draft_tokens=6)
    assert answer.counts == expected


def test_another_client_of_a_vllm_is_told() -> None:
    with fake_vllm(others=9) as url, pytest.raises(ValueError, match="another client"):
        find_server(url).answer([1, 2], 6)


@pytest.mark.parametrize("how", ["dropped", "emptied"])
def test_a_gateway_that_drops_the_ids_is_told(how: str) -> None:
    with (
        fake_vllm(**{how: "token_ids"}) as url,
        pytest.raises(ValueError, match=f"{url} sends no `token_ids`.*gateway"),
    ):
        find_server(url).answer([1, 2], 6)


def test_a_server_that_is_no_engine_is_told() -> None:
    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *args: Any) -> None:
            pass

    with (
        serve_handler(Empty) as url,
        pytest.raises(ValueError, match=r"not a vLLM, SGLang or llama\.cpp server"),
    ):
        find_server(url)
    with pytest.raises(ConnectionError, match="stopped responding"):
        find_server(url)
