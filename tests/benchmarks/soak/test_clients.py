"""The verdicts on requests of a soak.

A client that was not told why its request failed is always found.
"""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import pytest

from benchmarks.soak.attack import MUTATIONS, Door, build_requests, draw_shot, find_broken_rule
from benchmarks.soak.clients import Clients, Verdict, judge_refusal, judge_stream, judge_whole
from redraft.engine.prompts import Prompt

DONE = "data: [DONE]\n\n"


def event(index=0, finish_reason=None):
    return (
        f"data: {json.dumps({'choices': [{'index': index, 'finish_reason': finish_reason}]})}\n\n"
    )


def read(text, num_choices=1, patience=None):
    return asyncio.run(judge_stream(httpx.Response(200, text=text), num_choices, patience))


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (event() + event(finish_reason="stop") + DONE, "answered"),
        (event() + DONE, "untold"),
        (event(finish_reason="stop"), "untold"),
        ("", "untold"),
        (event() + 'data: {"cho', "untold"),
        (event() + 'data: {"error": {"message": "the server ended", "code": 502}}\n\n', "told"),
    ],
)
def test_a_stream_is_answered_only_with_its_end(text, kind):
    assert read(text).kind == kind


def test_every_choice_of_a_stream_must_finish():
    both = event(0, "stop") + event(1, "length")
    assert read(both + DONE, num_choices=2).kind == "answered"
    assert read(event(0, "stop") * 2 + DONE, num_choices=2).kind == "untold"


def test_a_client_that_hangs_up_is_no_failure():
    assert read(event() * 5, patience=3) == Verdict("left")


def test_a_refusal_tells_only_with_a_message():
    assert judge_refusal(503, b'{"error": {"message": "no server", "code": 503}}') == Verdict(
        "told", "503"
    )
    assert judge_refusal(500, b"Internal Server Error").kind == "untold"
    assert judge_refusal(502, b'{"error": {"message": ""}}').kind == "untold"


def test_a_whole_answer_needs_all_its_choices():
    assert judge_whole(b'{"choices": [{"finish_reason": "stop"}]}', 1).kind == "answered"
    assert judge_whole(b'{"choices": [{"finish_reason": "stop"}]}', 2).kind == "untold"
    assert judge_whole(b'{"choices": [{"finish_reason"', 1).kind == "untold"


async def serve_bytes(answer: bytes):
    """A server that gives every request the same bytes, and then hangs up; and its port."""

    async def handle(reader, writer):
        await reader.read(1 << 16)
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(("was_tap_up", "kind"), [(True, "untold"), (False, "cut")])
def test_a_connection_that_breaks_is_untold_unless_the_tap_itself_was_killed(was_tap_up, kind):
    async def main():
        server, port = await serve_bytes(b"")
        clients = Clients(
            {f"http://127.0.0.1:{port}": lambda since_s: was_tap_up},
            [Prompt(token_ids=[1])],
            random.Random(0),
            1,
            0,
        )
        async with server, httpx.AsyncClient(timeout=30) as http:
            return await clients.ask(http)

    assert asyncio.run(main()).kind == kind


REFUSED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "rule"),
    [
        (REFUSED, ""),
        (b"", ""),
        (REFUSED.replace(b"400", b"502"), ""),
        (REFUSED.replace(b"400", b"500"), "status 500"),
        (
            REFUSED.replace(b"400", b"500") + b'{"message":"EngineCore encountered an issue. See"}',
            "",
        ),
        (REFUSED * 3, "answered 3 times"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"draft_version": "v000001"}', "it reached /redraft/status"),
    ],
)
def test_an_answer_to_a_hostile_request_that_breaks_a_rule_is_found(answer, rule):
    assert find_broken_rule(answer) == rule


def test_hostile_requests_differ_and_have_names():
    shots = build_requests(random.Random(0))
    assert len({shot.name for shot in shots}) == len(shots) == len({shot.sent for shot in shots})


def test_a_seed_draws_the_same_attacks_again_and_every_mutation():
    door = Door(process=None, port=0, paths=(b"/a", b"/b"))
    drawn = [
        [draw_shot(rng, door) for _ in range(1000)] for rng in (random.Random(5), random.Random(5))
    ]
    assert drawn[0] == drawn[1]
    names = {name for shot in drawn[0] for name in shot.name.split("+")}
    assert names >= {mutate.__name__.removeprefix("_") for mutate in MUTATIONS}


def test_a_stream_with_fewer_tokens_than_asked_for_is_not_whole():
    used = f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': 3}})}\n\n"
    whole = event(finish_reason="length") + used + DONE
    for num_tokens, kind in ((3, "answered"), (4, "untold")):
        verdict = asyncio.run(
            judge_stream(httpx.Response(200, text=whole), 1, num_tokens=num_tokens)
        )
        assert verdict.kind == kind
