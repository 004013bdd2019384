"""Prompts of training beside those of vLLM's server, token for token, by public chat templates."""

from __future__ import annotations

import datetime
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import jinja2
import pytest
from trl_templates import make_tokenizer, template_names

from redraft.distill.data.conversations import read_conversation
from redraft.distill.data.messages import Message, with_parts
from redraft.distill.data.rendering import Renderer
from redraft.engine.server import VllmServer, vllm_server
from redraft.files.checkpoint import load_tokenizer

TARGET = "tests/assets/tiny-target"
FUNCTION = {
    "name": "weigh",
    "description": "Weighs a thing.",
    "parameters": {"type": "object", "properties": {}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weigh", "arguments": {"thing": "a cup"}},
}
USER, AGAIN = {"role": "user", "content": "why 1"}, {"role": "user", "content": "and now?"}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "why"}, {"type": "text", "text": "blue"}],
}
ANSWER = {"role": "assistant", "content": "blue 1"}
ROWS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER, ANSWER, AGAIN, {"role": "assistant", "content": "blue 2"}]},
    "system": {"messages": [{"role": "system", "content": "Be kind."}, USER, ANSWER]},
    "parts": {"messages": [PARTS, ANSWER]},
    "thought": {
        "messages": [
            USER,
            {**ANSWER, "reasoning": "scatter"},
            AGAIN,
            {**ANSWER, "reasoning": "again"},
        ]
    },
    "tools": {
        "messages": [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": "3 kg"},
            ANSWER,
        ],
        "tools": TOOLS,
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log = tmp_path_factory.mktemp("served") / "vllm.log"
    arguments = [
        "--enable-scale-out",
        "--trust-request-chat-template",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
    ]
    with vllm_server(TARGET, log=log, extra_args=arguments) as started:
        yield started


def render(server: VllmServer, **request: Any) -> list[int] | str:
    """Ids of the prompt that the server makes of a request, or the reason why it refuses."""
    body = json.dumps({"model": server.model, "max_tokens": 8, **request}).encode()
    headers = {"content-type": "application/json"}
    posted = urllib.request.Request(f"{server.url}/v1/chat/completions/render", body, headers)
    try:
        with urllib.request.urlopen(posted, timeout=600) as response:
            ids: list[int] = json.load(response)["token_ids"]
    except urllib.error.HTTPError as error:
        return error.read().decode()
    return ids


def as_sent(message: Message) -> Message:
    """A message of ours in a request."""
    message = with_parts(message)
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [
        {**c["function"], "arguments": json.dumps(c["function"]["arguments"])} for c in calls
    ]
    return {
        **message,
        "tool_calls": [{**c, "function": f} for c, f in zip(calls, functions, strict=True)],
    }


@pytest.mark.slow
@pytest.mark.vllm
def test_the_prompts_of_training_are_those_of_the_server(server: VllmServer) -> None:
    tokenizer, compared, differing = load_tokenizer(TARGET), 0, []
    for name in template_names():
        tokenizer.chat_template = make_tokenizer(name).chat_template
        ours = Renderer(tokenizer, {}, datetime.date.today())
        for shape, row in ROWS.items():
            conversation = read_conversation(row)
            messages, tools = conversation["messages"], conversation.get("tools")
            for place in (
                i for i, message in enumerate(messages) if message["role"] == "assistant"
            ):
                for arguments in ours.arguments:
                    context = [ours.as_context(message) for message in messages[:place]]
                    try:
                        text = ours(context, prompt=True, tools=tools, arguments=arguments)
                    except jinja2.TemplateError:
                        continue
                    request = {
                        "chat_template": tokenizer.chat_template,
                        "chat_template_kwargs": arguments,
                    }
                    sent = [as_sent(message) for message in messages[:place]]
                    served = render(
                        server, messages=sent, **request, **({"tools": tools} if tools else {})
                    )
                    compared += 1
                    if served != ours.tokenise([text])[0]:
                        shown = served if isinstance(served, str) else tokenizer.decode(served)
                        differing.append((name, shape, place, arguments, shown[-300:], text[-300:]))
    assert not differing, f"{len(differing)} of {compared}, the first is {differing[0]}"
    assert compared > 400
