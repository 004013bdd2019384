"""Against a small HTTP server that speaks the contract.

It answers with the question and the length of the history.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tyro
from teachers import Reply, Teacher, teaching

from redraft.distill.data.conversations import load_conversations
from redraft.distill.data.messages import conversation_hash
from redraft.distill.signal.endpoint import Endpoint
from redraft.distill.signal.target_answers import Sampling, prompt_key, regenerate
from redraft.files import progress
from redraft.recipes.cli.run import dispatch
from redraft.recipes.data.regenerate import RegenerateConfig


def answer(request: dict[str, Any]) -> Reply:
    history = request["messages"]
    message = {"role": "assistant", "content": f"{history[-1]['content']}! ({len(history)})"}
    return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}


@dataclass
class Scripted(Teacher):
    """One that replies by a function of the request."""

    script: Callable[[dict[str, Any]], Reply] = answer

    def reply(self, request: dict[str, Any]) -> Reply:
        return self.script(request)


@contextmanager
def serving(
    script: Callable[[dict[str, Any]], Reply] = answer,
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(URL, the requests received so far) of a server that lists one model and replies by `script`."""
    with teaching(Scripted(script=script)) as teacher:
        yield teacher.url, teacher.requests


def make_endpoint(url: str, **options: Any) -> Endpoint:
    return Endpoint(url, **{"attempts": 3, "backoff_s": 0.01, "concurrency": 4, **options})


def make_conversation(*contents: str) -> dict[str, Any]:
    roles = ["user", "assistant"] * len(contents)
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]
    return {"messages": messages, "domain": "test"}


def contents(output: Path) -> set[tuple[str, ...]]:
    return {tuple(m["content"] for m in c["messages"]) for c in load_conversations(str(output))}


def test_every_turn_is_answered_in_order_on_the_regenerated_history(tmp_path: Path) -> None:
    output = tmp_path / "deep" / "answers.jsonl"
    with serving() as (url, requests):
        stats = regenerate(
            [make_conversation("a", "old", "b", "old", "c"), make_conversation("lonely", "old")],
            make_endpoint(url + "/v1/"),
            output,
            Sampling(temperature=0.5, max_tokens=7, template_options={"enable_thinking": False}),
        )
    assert stats.done == 2
    assert contents(output) == {
        ("a", "a! (1)", "b", "b! (3)", "c", "c! (5)"),
        ("lonely", "lonely! (1)"),
    }
    expected = {"model": "the-target", "temperature": 0.5, "max_tokens": 7}
    assert all(expected.items() <= request.items() for request in requests)
    assert requests[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert {c["domain"] for c in load_conversations(str(output))} == {"test"}


def test_a_second_run_asks_only_for_what_is_missing(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    conversations = [make_conversation(f"question {i}", "old") for i in range(6)]
    with serving() as (url, requests):
        regenerate(conversations[:4], make_endpoint(url), output, Sampling())
        with output.open("a") as file:
            file.write('{"key": "0af9')
        stats = regenerate(conversations, make_endpoint(url), output, Sampling())
    assert (stats.already_there, stats.done, len(requests)) == (4, 2, 6)
    assert contents(output) == {(f"question {i}", f"question {i}! (1)") for i in range(6)}


@pytest.mark.parametrize("arguments", ['{"cup": 1', "[1]", '{"cup": "\\ud83d"}'])
def test_a_malformed_tool_call_costs_one_conversation(arguments: str, tmp_path: Path) -> None:
    def call(request: dict[str, Any]) -> Reply:
        if request["messages"][-1]["content"] != "weigh":
            return answer(request)
        function = {"name": "weigh", "arguments": arguments}
        message = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": function}],
        }
        return 200, {"choices": [{"message": message, "finish_reason": "tool_calls"}]}

    output = tmp_path / "answers.jsonl"
    asked = [make_conversation(question, "old") for question in ("a", "weigh", "b")]
    with serving(call) as (url, _):
        for there in (0, 2):
            stats = regenerate(asked, make_endpoint(url), output, Sampling())
            assert (stats.already_there, stats.done, stats.refused) == (there, 2 - there, 1)
    assert contents(output) == {("a", "a! (1)"), ("b", "b! (1)")}


@pytest.mark.parametrize(
    ("reply", "why", "reason"),
    [
        ((400, {"error": {"message": "maximum context length is 9"}}), "refuses", "length is 9"),
        (
            (200, {"choices": [{"message": {"content": "c"}, "finish_reason": "content_filter"}]}),
            "refuses",
            "filter",
        ),
        (
            (
                200,
                {"choices": [{"message": {"tool_calls": [{"function": {"arguments": "{"}}]}}]},
            ),
            "malformed",
            "JSON",
        ),
    ],
    ids=["too-long", "filtered", "malformed"],
)
def test_a_later_answer_that_does_not_arrive_costs_no_earlier_answer(
    reply: Reply, why: str, reason: str, tmp_path: Path
) -> None:
    output = tmp_path / "answers.jsonl"
    asked = [make_conversation("a", "old", "b", "old", "c"), make_conversation("fine")]
    with serving(lambda r: reply if len(r["messages"]) == 3 else answer(r)) as (url, _):
        stats = regenerate(asked, make_endpoint(url), output, Sampling())
        again = regenerate(asked, make_endpoint(url), output, Sampling())
    assert (stats.done, stats.refused, sum(stats.departed.values())) == (2, 0, 1)
    assert re.search(rf"1 end where .*{why}.*; the first reason: .*{reason}", str(stats))
    assert contents(output) == {("a", "a! (1)", "b"), ("fine", "fine! (1)")}
    assert again.already_there == 2


def test_template_arguments_of_the_data_are_sent_and_stay_with_the_answers(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    modes: list[dict[str, Any]] = [{"enable_thinking": True}, {"enable_thinking": False}, {}]
    asked = [{**make_conversation("a", "old"), "arguments": mode} for mode in modes]
    with serving() as (url, requests):
        stats = regenerate(asked, make_endpoint(url, concurrency=1), output, Sampling())
        assert stats.done == 3
        assert [request.get("chat_template_kwargs", {}) for request in requests] == modes
        assert [c["arguments"] for c in load_conversations(str(output))] == modes
        # The options of the run take precedence.
        options = {"enable_thinking": False, "effort": "low"}
        again = tmp_path / "again.jsonl"
        regenerate(asked[:1], make_endpoint(url), again, Sampling(template_options=options))
        assert requests[-1]["chat_template_kwargs"] == options
        assert [c["arguments"] for c in load_conversations(str(again))] == [options]


def test_a_log_shows_the_wait_for_the_first_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.0)

    def slow(request: dict[str, Any]) -> Reply:
        time.sleep(1.5)
        return answer(request)

    with serving(slow) as (url, _):
        regenerate(
            [make_conversation("a")], make_endpoint(url), tmp_path / "answers.jsonl", Sampling()
        )
    waiting = [line for line in capsys.readouterr().err.splitlines() if "0/1" in line]
    assert any("00:01" in line for line in waiting)


def test_an_overloaded_server_is_asked_again(tmp_path: Path) -> None:
    failures = iter([503, 429, 500])

    def overloaded(request: dict[str, Any]) -> Reply:
        status = next(failures, 200)
        return answer(request) if status == 200 else (status, {"error": {"message": "busy"}})

    with serving(overloaded) as (url, requests):
        stats = regenerate(
            [make_conversation("a")],
            make_endpoint(url, attempts=4),
            tmp_path / "answers.jsonl",
            Sampling(),
        )
    assert (stats.done, len(requests)) == (1, 4)


def test_a_server_that_goes_away_is_named_and_what_was_regenerated_stays(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    left = iter(range(3))

    def dying(request: dict[str, Any]) -> Reply:
        return (
            answer(request)
            if next(left, None) is not None
            else (503, {"error": {"message": "shutting down"}})
        )

    conversations = [make_conversation(f"question {i}") for i in range(8)]
    with serving(dying) as (url, _), pytest.raises(ConnectionError) as error:
        regenerate(conversations, make_endpoint(url), output, Sampling())
    message = str(error.value)
    assert "\n" not in message
    assert re.search(rf"{url}/v1/chat/completions .*\b3\b.*\(HTTP 503: shutting down\)", message)
    assert re.search(rf"\b3 of 8\b.* {output}:", message)
    assert len(contents(output)) == 3


def test_a_conversation_at_which_the_server_fails_costs_no_other(tmp_path: Path) -> None:
    output, is_broken = tmp_path / "answers.jsonl", False

    def failing(request: dict[str, Any]) -> Reply:
        if is_broken or request["messages"][-1]["content"] == "odd":
            return 500, {"error": {"message": "list index out of range"}}
        return answer(request)

    asked = [make_conversation("odd"), *(make_conversation(f"question {i}") for i in range(4))]
    with serving(failing) as (url, _):
        stats = regenerate(asked, make_endpoint(url, backoff_s=0.3), output, Sampling())
        assert (stats.done, stats.refused) == (4, 1)
        assert stats.refusal.endswith("in 3 tries (HTTP 500: list index out of range)")
        # If no other conversation is answered, the server is broken.
        is_broken = True
        asked += [make_conversation(f"further {i}") for i in range(4)]
        with pytest.raises(ConnectionError, match=r"HTTP 500.*4 of 9 conversations"):
            regenerate(asked, make_endpoint(url), output, Sampling())


def test_an_address_where_nothing_listens_is_named(tmp_path: Path) -> None:
    with serving() as (url, _):
        pass  # the port is free again
    with pytest.raises(ConnectionError, match=rf"{url}/v1/models .*\b3\b.*[Cc]onnect"):
        regenerate(
            [make_conversation("a")], make_endpoint(url), tmp_path / "answers.jsonl", Sampling()
        )


def test_a_conversation_that_the_server_refuses_is_counted_and_the_rest_goes_on(
    tmp_path: Path,
) -> None:
    def picky(request: dict[str, Any]) -> Reply:
        if request["messages"][0]["content"] == "too long":
            return 400, {"error": {"message": "maximum context length is 9\nmore of it"}}
        return answer(request)

    with serving(picky) as (url, _):
        stats = regenerate(
            [make_conversation("too long"), make_conversation("fine")],
            make_endpoint(url),
            tmp_path / "a",
            Sampling(),
        )
        assert (stats.done, stats.refused) == (1, 1)
        assert "the first reason: " + url in str(stats)
        assert str(stats).endswith("HTTP 400: maximum context length is 9")
        with pytest.raises(ValueError, match=r"HTTP 400: .*\b9\b"):
            regenerate(
                [make_conversation("too long")], make_endpoint(url), tmp_path / "b", Sampling()
            )


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"error": {"message": "the model is at its limit"}}, "the model is at its limit"),
        ({"error": "no route to the model"}, "no route to the model"),
        ({"error": "\x1b[2J is cleared"}, "\\x1b[2J is cleared"),
        ({"error": {"message": "too long", "code": 400}}, "too long"),
        ({"id": "x", "choices": None}, "choices"),
        ({"choices": []}, "choices"),
        ({"choices": [{"finish_reason": "stop"}]}, "choices"),
        (
            {"choices": [{"message": {"content": "half"}, "finish_reason": "content_filter"}]},
            "filter",
        ),
    ],
)
def test_a_reply_without_an_answer_costs_one_conversation(
    said: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    def gateway(request: dict[str, Any]) -> Reply:
        return (200, said) if request["messages"][0]["content"] == "odd" else answer(request)

    with serving(gateway) as (url, _):
        stats = regenerate(
            [make_conversation("odd"), make_conversation("fine")],
            make_endpoint(url),
            tmp_path / "a",
            Sampling(),
        )
    assert (stats.done, stats.refused) == (1, 1)
    assert reason in stats.refusal


def test_an_overload_that_is_said_with_the_status_200_is_asked_again(tmp_path: Path) -> None:
    replies = [(200, {"error": {"message": "slow down", "code": 429}})]

    with serving(lambda request: replies.pop() if replies else answer(request)) as (url, requests):
        stats = regenerate([make_conversation("a")], make_endpoint(url), tmp_path / "a", Sampling())
    assert (stats.done, stats.refused, len(requests)) == (1, 0, 2)


@pytest.mark.parametrize(
    ("listing", "reason"),
    [(b'{"data": []}', "--model"), (b"<!doctype html>", "OpenAI"), (b'["a"]', "OpenAI")],
)
def test_an_address_without_a_model_or_an_api_is_named(
    listing: bytes, reason: str, tmp_path: Path
) -> None:
    with teaching(Scripted(listing=listing)) as teacher:
        url = teacher.url
        with pytest.raises((ValueError, ConnectionError), match=f"{url}.*{reason}"):
            regenerate([make_conversation("a")], make_endpoint(url), tmp_path / "a", Sampling())


def test_a_wrong_model_name_ends_the_run(tmp_path: Path) -> None:
    def unknown(request: dict[str, Any]) -> Reply:
        return 404, {"error": {"message": f"no model {request['model']}"}}

    with serving(unknown) as (url, _), pytest.raises(ValueError, match="HTTP 404"):
        regenerate(
            [make_conversation("a")],
            make_endpoint(url, model="wrong"),
            tmp_path / "answers.jsonl",
            Sampling(),
        )


def test_an_answer_cut_at_the_length_limit_ends_its_conversation(tmp_path: Path) -> None:
    def cut(request: dict[str, Any]) -> Reply:
        status, body = answer(request)
        body["choices"][0]["finish_reason"] = "length"
        return status, body

    output = tmp_path / "answers.jsonl"
    with serving(cut) as (url, _):
        stats = regenerate(
            [make_conversation("a", "old", "b", "old")], make_endpoint(url), output, Sampling()
        )
    assert stats.cut == 1
    (conversation,) = load_conversations(str(output))
    assert conversation["cut"]
    assert len(conversation["messages"]) == 2


def test_an_answer_cut_in_its_thought_is_kept_with_the_thought(tmp_path: Path) -> None:
    def cut(request: dict[str, Any]) -> Reply:
        message = {"role": "assistant", "content": None, "reasoning": "First the number"}
        return 200, {"choices": [{"message": message, "finish_reason": "length"}]}

    output = tmp_path / "answers.jsonl"
    with serving(cut) as (url, _):
        stats = regenerate([make_conversation("a")], make_endpoint(url), output, Sampling())
    assert (stats.done, stats.cut, stats.refused) == (1, 1, 0)
    (conversation,) = load_conversations(str(output))
    assert conversation["cut"]
    assert conversation["messages"][1] == {
        "role": "assistant",
        "content": "",
        "reasoning": "First the number",
    }


def test_questions_are_asked_with_their_context_and_system_prompt(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [
        {
            "instruction": "how tall?",
            "context": "It has 3 m.",
            "response": "old",
            "system": "Be a guide.",
        },
        {
            "messages": json.dumps(
                [{"role": "User", "value": "why?"}, {"role": "ai", "value": "old"}]
            )
        },
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serving() as (url, requests):
        endpoint = make_endpoint(url, concurrency=1)
        regenerate(
            load_conversations(str(source)), endpoint, tmp_path / "answers.jsonl", Sampling()
        )
    asked = [[(m["role"], m["content"]) for m in request["messages"]] for request in requests]
    assert asked == [
        [("system", "Be a guide."), ("user", "how tall?\n\nIt has 3 m.")],
        [("user", "why?")],
    ]


def test_an_empty_answer_ends_its_conversation(tmp_path: Path) -> None:
    def silent_at_b(request: dict[str, Any]) -> Reply:
        status, body = answer(request)
        if request["messages"][-1]["content"] == "b":
            body["choices"][0]["message"]["content"] = None
        return status, body

    output = tmp_path / "answers.jsonl"
    with serving(silent_at_b) as (url, _):
        stats = regenerate(
            [make_conversation("a", "old", "b", "old"), make_conversation("b")],
            make_endpoint(url),
            output,
            Sampling(),
        )
    assert (stats.done, stats.refused) == (1, 1)
    assert contents(output) == {("a", "a! (1)", "b")}


def test_reasoning_that_the_server_parsed_out_stays_beside_the_answer(tmp_path: Path) -> None:
    def thinking(request: dict[str, Any]) -> Reply:
        message = {"role": "assistant", "content": "so", "reasoning": "hm"}
        return 200, {"choices": [{"message": message, "finish_reason": "stop"}]}

    output = tmp_path / "answers.jsonl"
    with serving(thinking) as (url, requests):
        regenerate([make_conversation("a", "old", "b")], make_endpoint(url), output, Sampling())
    answer = {"role": "assistant", "content": "so", "reasoning": "hm"}
    (conversation,) = load_conversations(str(output))
    assert conversation["messages"][1::2] == [answer, answer]
    assert requests[1]["messages"][1] == answer


def test_a_call_that_the_data_does_not_make_ends_the_conversation(tmp_path: Path) -> None:
    tools = [
        {"type": "function", "function": {"name": "add", "description": None, "parameters": None}}
    ]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}

    def calling(request: dict[str, Any]) -> Reply:
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        return 200, {"choices": [{"message": message, "finish_reason": "tool_calls"}]}

    old = {"role": "assistant", "content": "old"}
    called = [{"role": "user", "content": "a"}, old, {"role": "tool", "content": "5"}, old]
    twice = [{"role": "user", "content": "b"}, old, {"role": "user", "content": "c"}]
    output = tmp_path / "answers.jsonl"
    with serving(calling) as (url, requests):
        conversations = [{"messages": m, "domain": "all", "tools": tools} for m in (called, twice)]
        regenerate(conversations, make_endpoint(url, concurrency=1), output, Sampling())
    assert [request["tools"] for request in requests] == [tools] * 2
    for conversation in load_conversations(str(output)):
        assert [m["role"] for m in conversation["messages"]] == ["user", "assistant"]
        assert conversation["tools"] == tools
        (call,) = conversation["messages"][1]["tool_calls"]
        assert call["function"] == {"name": "add", "arguments": {"a": 2}}


def test_the_same_question_is_asked_again_with_other_tools(tmp_path: Path) -> None:
    def make_tools(*names: str) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": name}} for name in names]

    plain = make_conversation("a", "old")
    adding, calling = (
        {**plain, "tools": make_tools(*names)} for names in (["add"], ["add", "call"])
    )
    output = tmp_path / "answers.jsonl"
    with serving() as (url, requests):
        stats = regenerate([plain, adding, calling, adding], make_endpoint(url), output, Sampling())
    assert stats.done == len(requests) == 3
    assert sorted(len(c.get("tools", [])) for c in load_conversations(str(output))) == [0, 1, 2]
    # Outputs without tools stay valid.
    assert (
        prompt_key(plain)
        == prompt_key({**plain, "tools": []})
        == conversation_hash(plain["messages"][:1])
    )


def test_an_output_of_other_settings_or_another_kind_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    with serving() as (url, _):
        regenerate([make_conversation("a")], make_endpoint(url), output, Sampling(max_tokens=5))
        with pytest.raises(ValueError, match=r"'max_tokens': 5.*--overwrite"):
            regenerate([make_conversation("a")], make_endpoint(url), output, Sampling(max_tokens=6))
        output.write_text('{"messages": []}\n')
        with pytest.raises(ValueError, match=r"answers\.jsonl, line 1:"):
            regenerate([make_conversation("a")], make_endpoint(url), output, Sampling())


TORN = f'{{"key": "{"0f" * 32}", "domain": "test", "messages": [{{"ro'
"""A row that a kill cut off."""


@pytest.mark.parametrize(
    "held",
    [
        '{"weights": [1, 2, 3]}',
        '{"key": "value"}',
        f'{{"key": "{"0f" * 32}", "note": 1}}',
        f'{{"messages": []}}\n{TORN}',
        "one\n\nlast",
    ],
)
def test_a_file_of_another_kind_is_refused_as_it_was(tmp_path: Path, held: str) -> None:
    output = tmp_path / "answers.jsonl"
    output.write_text(held)
    with serving() as (url, requests), pytest.raises(ValueError, match=r"answers\.jsonl, line \d:"):
        regenerate([make_conversation("a")], make_endpoint(url), output, Sampling())
    assert output.read_text() == held
    assert not requests


def test_a_run_killed_in_its_first_row_starts_again(tmp_path: Path) -> None:
    output = tmp_path / "answers.jsonl"
    with serving() as (url, _):
        for length in (0, 1, 40, 80, len(TORN)):
            output.write_text(TORN[:length])
            regenerate([make_conversation("a")], make_endpoint(url), output, Sampling())
            assert contents(output) == {("a", "a! (1)")}


def test_template_options_can_be_given_on_the_command_line() -> None:
    arguments = [
        "--prompts",
        "a",
        "--output",
        "b",
        "--template-options",
        "enable_thinking",
        "False",
    ]
    assert tyro.cli(RegenerateConfig, args=arguments).template_options == {"enable_thinking": False}


@pytest.mark.parametrize("reason", ["max_tokens", "LENGTH", "model_length", "abort", "repetition"])
def test_no_answer_that_a_server_cut_is_learned_as_finished(reason: str, tmp_path: Path) -> None:
    def cut(request: dict[str, Any]) -> Reply:
        status, body = answer(request)
        body["choices"][0]["finish_reason"] = reason
        return status, body

    output = tmp_path / "answers.jsonl"
    with serving(cut) as (url, _):
        stats = regenerate([make_conversation("a")], make_endpoint(url), output, Sampling())
    assert stats.cut == 1
    (conversation,) = load_conversations(str(output))
    assert conversation["cut"]


@pytest.mark.parametrize("status", [400, 422])
def test_a_gateway_that_refuses_an_unknown_parameter_is_asked_without_it(
    status: int, tmp_path: Path
) -> None:
    def strict(request: dict[str, Any]) -> Reply:
        if "return_token_ids" in request:
            return status, {"error": {"message": "unknown parameter"}}
        return answer(request)

    asked = [make_conversation(question) for question in "abc"]
    with serving(strict) as (url, requests):
        stats = regenerate(
            asked, make_endpoint(url, concurrency=1), tmp_path / "a.jsonl", Sampling()
        )
    assert (stats.done, stats.without_ids, len(requests)) == (3, 3, 4)


@pytest.mark.parametrize("ids", [["a"], [1.5], [1 << 40], [-1], [[1], [2, 3]], "12", {"a": 1}])
def test_ids_that_no_tokenizer_has_are_none(ids: Any, tmp_path: Path) -> None:
    def odd(request: dict[str, Any]) -> Reply:
        status, body = answer(request)
        body["choices"][0]["token_ids"] = ids
        return status, {**body, "prompt_token_ids": [1, 2]}

    with serving(odd) as (url, _):
        stats = regenerate(
            [make_conversation("a")], make_endpoint(url), tmp_path / "a.jsonl", Sampling()
        )
    assert (stats.done, stats.without_ids) == (1, 1)


def test_of_several_models_the_one_that_answers_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(listing: bytes) -> str:
        with teaching(Scripted(listing=listing)) as teacher:
            conversations = [make_conversation("a")]
            regenerate(conversations, make_endpoint(teacher.url), tmp_path / "a.jsonl", Sampling())
        return capsys.readouterr().out

    assert "2 models: uses one" in run(b'{"data": [{"id": "one"}, {"id": "other"}]}')
    assert run(b'{"data": [{"id": "one"}]}') == ""


def test_a_redirect_is_named_with_its_place(tmp_path: Path) -> None:
    place = "https://gateway/v1/models"
    with teaching(Scripted(redirect=place)) as teacher:
        wanted = rf"{teacher.url}\S* answers HTTP 308: it redirects to {place}:"
        with pytest.raises(ValueError, match=wanted):
            regenerate(
                [make_conversation("a")], make_endpoint(teacher.url), tmp_path / "a", Sampling()
            )


def test_a_private_authority_counts_for_this_machine_and_a_missing_one_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key)]
    subprocess.run([*command, "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def run() -> int:
        endpoint = make_endpoint(url, attempts=2, backoff_s=1e9)
        return regenerate([make_conversation("a")], endpoint, tmp_path / "a", Sampling()).done

    with teaching(Scripted(), context=context) as teacher:
        url = teacher.url
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with pytest.raises(ConnectionError, match=rf"{url}.*CERTIFICATE_VERIFY_FAILED.*SSL_CERT_F"):
            run()
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "no-such"))
        with pytest.raises(ValueError, match="SSL_CERT_FILE"):
            run()
        with teaching(Scripted()) as plain:
            url = plain.url.replace("http:", "https:")
            monkeypatch.delenv("SSL_CERT_FILE")
            with pytest.raises(ConnectionError, match=rf"{url}.*not use TLS.*http://"):
                run()
        url = teacher.url
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert run() == 1


def test_a_server_that_never_lists_its_models_is_named_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redraft.distill.signal.endpoint.LIST_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=rf"{url}/v1/models did not answer in 3 tries"):
            regenerate([make_conversation("a")], make_endpoint(url), tmp_path / "a", Sampling())


def test_a_password_in_the_address_is_sent_and_not_shown(tmp_path: Path) -> None:
    with teaching(Scripted()) as teacher:
        url = teacher.url.replace("://", "://me:secret@")
        endpoint = make_endpoint(url)
        regenerate([make_conversation("a")], endpoint, tmp_path / "a", Sampling())
    assert base64.b64decode(teacher.headers["Authorization"].split()[1]) == b"me:secret"
    with pytest.raises(ConnectionError, match=teacher.url) as error:
        regenerate([make_conversation("b")], make_endpoint(url), tmp_path / "b", Sampling())
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://a:999999", "http://[::1", "ftp://a"])
def test_what_is_no_address_is_refused_before_anything_is_asked(url: str) -> None:
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        make_endpoint(url)


@pytest.mark.parametrize("key", ["secret\n", "secret\r", "schl\u00fcssel"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="OPENAI_API_KEY") as refused:
        make_endpoint("http://127.0.0.1:1", api_key=key)
    assert key.strip() not in str(refused.value)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("num-conversations", -1), ("max-tokens", 0), ("concurrency", 0), ("temperature", -1)],
)
def test_a_number_that_means_nothing_is_refused_by_its_flag(
    flag: str, value: int, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["regenerate", "--prompts", "a.jsonl", "--output", "b.jsonl", f"--{flag}", str(value)]
    assert dispatch(command) == 2
    assert f"redraft: --{flag} is {value}" in capsys.readouterr().err
