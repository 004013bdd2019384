"""Turns of one conversation are recognised with the chat templates of nine families."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import jinja2
import numpy as np
import pytest
from chat_templates import FAMILIES
from make_tokenizers import make_byte_tokenizer
from test_buffer import frames_of, make_record

from redraft.distill.data.rendering import Renderer
from redraft.online.daemon.opening import find_headers
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.config import BufferConfig

CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
}


def make_tokenizer(name: str) -> Any:
    family = FAMILIES[name]
    tokenizer = make_byte_tokenizer(bos_token=family.bos, eos_token=family.end)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.special)})
    tokenizer.chat_template = family.template
    return tokenizer


def ask(name: str) -> list[Any]:
    """Three questions and their answers, with reasoning."""
    return [
        message
        for number in range(3)
        for message in (
            {"role": "user", "content": f"question {number} of {name}?"},
            {"role": "assistant", "content": f"answer {number}", "reasoning": "hm, let me see"},
        )
    ]


def use_tools(name: str) -> list[Any]:
    """One question that takes three calls, without reasoning."""
    results = [
        message
        for number in range(3)
        for message in (
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": f"{number}", "tool_call_id": "1"},
        )
    ]
    return [{"role": "user", "content": f"add, {name}!"}, *results]


@pytest.mark.parametrize("make_messages", [ask, use_tools])
@pytest.mark.parametrize("num_unrecorded", [0, 1])
@pytest.mark.parametrize("name", FAMILIES)
def test_turns_of_a_rendered_conversation_are_one_conversation(
    name: str, num_unrecorded: int, make_messages: Any
) -> None:
    tokenizer = make_tokenizer(name)
    render = Renderer(tokenizer, {}, datetime.date(2026, 1, 1))
    for arguments in render.arguments:
        with Buffer(BufferConfig(), "target", headers=find_headers(tokenizer)) as buffer:
            for session in ("one", "two"):
                messages = make_messages(session)
                answers = [at for at, one in enumerate(messages) if one["role"] == "assistant"]
                for at in answers[num_unrecorded:]:
                    with contextlib.suppress(jinja2.TemplateError):  # some have no tools
                        prompt = render.prompt(messages[:at], arguments=arguments)
                        ids = np.array(render.tokenise([prompt])[0], "<i4")
                        record = make_record(
                            at,
                            prompt=ids.tobytes(),
                            num_prompt_tokens=len(ids),
                            request_id=f"{session}-{at}",
                        )
                        buffer.append(frames_of(record), 0.0)
            index = buffer._files.index()
            assert len(set(index["conversation"].tolist())) == min(2, len(index)), arguments
            assert make_messages is use_tools or len(index) == 2 * (3 - num_unrecorded)
