"""Samples of nine families against an oracle.

The text after every generation prompt, as a server gets it.

The oracle renders each request by itself with jinja2, from the messages that a client sends, on the
day of the run. The text the model then writes is given by hand for each family.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from typing import Any

import jinja2
import numpy as np
import pytest
from chat_templates import FAMILIES, Family
from make_tokenizers import make_byte_tokenizer
from transformers import PreTrainedTokenizerFast

from redraft.distill.data.conversations import Conversation, read_conversation
from redraft.distill.data.messages import REASONING_FIELDS
from redraft.distill.data.rendering import Renderer
from redraft.distill.data.samples import SampleStats, build_samples, held_out_prompts
from redraft.distill.data.template import find_arguments
from redraft.files.target_folder import writes_date

DAY = datetime.date(2024, 2, 29)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
    }
]
CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'},
}
ARGUMENTS = '{"a": 1, "b": "é"}'

ENDS = {"gpt-oss": "<|return|>", "Gemma 3": "<end_of_turn>", "Phi-4-mini": "<|end|>"}
"""Last token of an answer, if it is not the tokenizer's end token."""

EMPTY = {"Qwen3": "<think>\n\n</think>\n\n", "DeepSeek-R1": "\n</think>\n\n"}
"""Text before an answer without reasoning, which the template or the reader of the answer adds to
the prompt.
"""

ASKED = {"Granite 3.3": {"thinking": True}}
"""Template arguments of a request that gets a thought, if the default gets none."""

UNASKED = {"SmolLM3": {"enable_thinking": False}}
"""Template arguments of a request that gets no thought, if the default gets one."""

THOUGHT = {
    "Qwen3": "<think>\nhm\n</think>\n\nso",
    "SmolLM3": "<think>\nhm\n</think>\n\nso",
    "gpt-oss": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>so",
    "Granite 3.3": "<think>hm</think><response>so</response>",
    "Magistral": "[THINK]hm[/THINK]so",
    "DeepSeek-R1": "hm\n</think>\n\nso",
}
"""Text written for the reasoning `hm` and the answer `so`."""

CALLED = {
    "Llama 3.2": f'{{"name": "add", "parameters": {ARGUMENTS}}}<|eot_id|>',
    "Qwen3": f'<tool_call>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>',
    "gpt-oss": f" to=functions.add<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
    "Granite 3.3": f'<|tool_call|>[{{"name": "add", "arguments": {ARGUMENTS}}}]<|end_of_text|>',
    "Magistral": f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}</s>",
}
"""Text written for a call."""

THOUGHT_AND_CALLED = {
    "Qwen3": "<think>\nhm\n</think>\n\n" + CALLED["Qwen3"],
    "gpt-oss": "<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + CALLED["gpt-oss"],
    "Magistral": "[THINK]hm[/THINK]" + CALLED["Magistral"],
}


@functools.cache
def make_tokenizer(name: str) -> PreTrainedTokenizerFast:
    family = FAMILIES[name]
    special = {"bos_token": family.bos, "eos_token": family.end}
    tokenizer = make_byte_tokenizer(**special)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.special)})
    tokenizer.chat_template = family.template
    return tokenizer


def serve(
    family: Family,
    messages: list[dict[str, Any]],
    tools: list[Any] | None = None,
    arguments: dict[str, Any] | None = None,
) -> str:
    """The prompt made by a server from a client's request.

    As transformers compiles a template, with a fixed clock.
    """

    def refuse(reason: str) -> None:
        raise jinja2.TemplateError(reason)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    return environment.from_string(family.template).render(
        messages=[_parse_arguments(message) for message in messages],
        tools=tools,
        add_generation_prompt=True,
        bos_token=family.bos,
        eos_token=family.end,
        strftime_now=DAY.strftime,
        raise_exception=refuse,
        **(arguments or {}),
    )


def _parse_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """A message as vLLM hands it to a template.

    No None, arguments parsed, the reasoning in every field.
    """
    message = {**message, "content": message.get("content") or ""}
    if "reasoning" in message:
        message |= dict.fromkeys(REASONING_FIELDS, message["reasoning"])
    if "tool_calls" in message:
        functions = [call["function"] for call in message["tool_calls"]]
        parsed = [
            {**function, "arguments": json.loads(function["arguments"])} for function in functions
        ]
        message["tool_calls"] = [{"type": "function", "function": function} for function in parsed]
    return message


def learn(name: str, row: dict[str, Any]) -> tuple[list[tuple[str, str]], SampleStats]:
    """(every labelled text with the text before it, the counts) of one row."""
    tokenizer, conversation = make_tokenizer(name), read_conversation(row)
    samples, stats = build_samples(
        [conversation], tokenizer, max_length=8192, day=DAY, progress=False
    )
    found = []
    for sample in samples:
        edges = np.flatnonzero(
            np.diff(np.concatenate([[0], sample.loss_mask.astype(np.int8), [0]]))
        )
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            before = tokenizer.decode(sample.input_ids[:start])
            # token by token as the server tokenises the prompt
            assert (
                tokenizer(before, add_special_tokens=False)["input_ids"]
                == sample.input_ids[:start].tolist()
            )
            found.append((before, tokenizer.decode(sample.input_ids[start:end])))
    return found, stats


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def say(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


SYSTEM = {"role": "system", "content": "Be brief."}
RESULT = {"role": "tool", "content": "5", "tool_call_id": "1"}
AFTER_CALL = [user("1 + é?"), say("", tool_calls=[CALL]), RESULT]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("start", [[], [SYSTEM]], ids=["alone", "system"])
def test_the_labels_are_the_text_after_every_generation_prompt(name: str, start: list[Any]) -> None:
    chat = [*start, user("a"), say("one"), user("b"), say("two")]
    header = "<|channel|>final<|message|>" if name == "gpt-oss" else ""
    end = ENDS.get(name, FAMILIES[name].end)
    expected = [
        (
            serve(FAMILIES[name], chat[:i], arguments=UNASKED.get(name)) + EMPTY.get(name, ""),
            header + chat[i]["content"] + end,
        )
        for i in (len(start) + 1, len(start) + 3)
    ]
    found, _ = learn(name, {"messages": chat})
    assert found == expected


@pytest.mark.parametrize("name", THOUGHT)
@pytest.mark.parametrize("dialect", ["field", "tags", "parts"])
def test_reasoning_is_learned_as_the_target_writes_it_and_not_read_again(
    name: str, dialect: str
) -> None:
    """A client sends back the text that it got, or the answer without the reasoning.

    The template decides.
    """
    answer = {
        "field": say("so", reasoning="hm"),
        "tags": say("<think>\nhm\n</think>\n\nso"),
        "parts": say(
            [
                {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                {"type": "text", "text": "so"},
            ]
        ),  # type: ignore[arg-type]
    }[dialect]
    row = [user("a"), answer, user("b"), answer]
    own_tags = ("Qwen3", "SmolLM3", "DeepSeek-R1")
    sent_back = answer if dialect == "tags" and name in own_tags else say("so")
    end = ENDS.get(name, FAMILIES[name].end)
    prompts = [[user("a")], [user("a"), sent_back, user("b")]]
    expected = [
        (serve(FAMILIES[name], prompt, arguments=ASKED.get(name)), THOUGHT[name] + end)
        for prompt in prompts
    ]
    found, stats = learn(name, {"messages": row})
    assert found == expected
    assert not stats.refused_answers


def test_an_empty_block_in_the_answer_was_written_by_the_target() -> None:
    answer = "<think>\n\n</think>\n\none"
    found, _ = learn("Qwen3", {"messages": [user("a"), say(answer)]})
    assert found == [(serve(FAMILIES["Qwen3"], [user("a")]), answer + "<|im_end|>")]


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(THOUGHT)))
def test_reasoning_of_a_field_is_refused_if_the_target_has_no_tags(name: str) -> None:
    chat = [user("a"), say("so", reasoning="hm"), user("b"), say("two")]
    found, stats = learn(name, {"messages": chat})
    assert found == [(serve(FAMILIES[name], chat[:3]), "two" + ENDS.get(name, FAMILIES[name].end))]
    assert stats.refused_answers == {"with reasoning, but the chat template has no tags for it": 1}
    assert "1 answers not learned, with reasoning, but the chat template has no tags for it" in str(
        stats
    )


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("start", [[], [SYSTEM]], ids=["alone", "system"])
def test_a_tool_call_its_result_and_the_tools_are_rendered_as_served(
    name: str, start: list[Any]
) -> None:
    chat = [*start, *AFTER_CALL, say("6"), user("b"), say("two")]
    header = "<|channel|>final<|message|>" if name == "gpt-oss" else ""
    end = ENDS.get(name, FAMILIES[name].end)
    texts = {1: CALLED[name], 3: header + "6" + end, 5: header + "two" + end}
    expected = [
        (serve(FAMILIES[name], chat[: len(start) + i], TOOLS) + EMPTY.get(name, ""), text)
        for i, text in texts.items()
    ]
    found, stats = learn(name, {"messages": chat, "tools": TOOLS})
    assert found == expected
    assert not stats.refused_answers
    assert "add" in expected[0][0]
    assert ARGUMENTS in expected[1][0]


@pytest.mark.parametrize("name", THOUGHT_AND_CALLED)
def test_reasoning_before_a_call_is_read_again_only_if_the_template_writes_it(name: str) -> None:
    chat = [
        user("a"),
        say("", tool_calls=[CALL], reasoning="hm"),
        RESULT,
        say("so", reasoning="hm"),
    ]
    expected = [
        (serve(FAMILIES[name], chat[:1], TOOLS), THOUGHT_AND_CALLED[name]),
        (
            serve(FAMILIES[name], chat[:3], TOOLS),
            THOUGHT[name] + ENDS.get(name, FAMILIES[name].end),
        ),
    ]
    found, stats = learn(name, {"messages": chat, "tools": TOOLS})
    assert found == expected
    assert not stats.refused_answers
    assert ("hm" in expected[1][0]) == (name != "Magistral")


@pytest.mark.parametrize("name", ["SmolLM3", "Phi-4-mini", "DeepSeek-R1"])
def test_a_call_that_the_template_leaves_out_is_refused_and_the_answer_after_it_learned(
    name: str,
) -> None:
    chat = [*AFTER_CALL, say("6")]
    found, stats = learn(name, {"messages": chat, "tools": TOOLS})
    assert found == [
        (
            serve(FAMILIES[name], chat[:3], TOOLS, UNASKED.get(name)),
            "6" + ENDS.get(name, FAMILIES[name].end),
        )
    ]
    assert stats.refused_answers == {"with tool calls that the chat template leaves out": 1}


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize(
    "arguments", ["{}", '{"a": 1}', '{"a": {"b": [1, null, true]}}', '{"a": "</tool_call>\\n"}']
)
def test_a_call_ends_once_whatever_its_arguments(name: str, arguments: str) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    found, _ = learn(name, {"messages": [user("a"), say("", tool_calls=[call])], "tools": TOOLS})
    expected = CALLED[name].replace(ARGUMENTS, arguments)
    assert found == [(serve(FAMILIES[name], [user("a")], TOOLS) + EMPTY.get(name, ""), expected)]


@pytest.mark.parametrize(
    ("name", "between"), [("Qwen3", "\n"), ("Magistral", ""), ("Granite 3.3", "")]
)
def test_parallel_calls_are_learned_together(name: str, between: str) -> None:
    found, _ = learn(
        name, {"messages": [user("a"), say("", tool_calls=[CALL, CALL])], "tools": TOOLS}
    )
    end = FAMILIES[name].end
    one = CALLED[name].removesuffix(end)
    expected = (
        one + between + one
        if name != "Granite 3.3"
        else one[:-1] + ", " + one.removeprefix("<|tool_call|>[")
    )
    assert found[0][1] == expected + end


def test_parallel_calls_are_refused_if_the_template_writes_the_first_alone() -> None:
    found, stats = learn(
        "gpt-oss",
        {"messages": [*AFTER_CALL, say("6"), user("b"), say("", tool_calls=[CALL, CALL])]},
    )
    assert len(found) == 2
    assert stats.refused_answers == {"with tool calls that the chat template leaves out": 1}


def test_text_beside_a_call_is_refused_if_the_template_drops_it() -> None:
    chat = [user("a"), say("Let me see.", tool_calls=[CALL]), RESULT, say("6")]
    found, stats = learn("Llama 3.2", {"messages": chat, "tools": TOOLS})
    assert [text for _, text in found] == ["6<|eot_id|>"]
    assert stats.refused_answers == {
        "with text in addition to tool calls that the chat template leaves out": 1
    }
    (first, _), _ = learn("Qwen3", {"messages": chat, "tools": TOOLS})
    assert first[1] == "Let me see.\n" + CALLED["Qwen3"]


def refusal(name: str, messages: list[Any]) -> str:
    """The template's reason against a conversation, for training and for held-out prompts alike."""
    row = read_conversation({"messages": messages, "tools": TOOLS})
    good: Conversation = {"messages": [user("a"), say("one")], "domain": "all"}
    _, stats = build_samples(
        [row, good], make_tokenizer(name), max_length=8192, day=DAY, progress=False
    )
    assert stats.refusals.total() == 1
    with pytest.raises(ValueError, match=re.escape(next(iter(stats.refusals)))):
        held_out_prompts([row], make_tokenizer(name), num_prompts=1, max_length=8192, day=DAY)
    return next(iter(stats.refusals))


def test_conversations_that_a_server_answers_with_status_400_are_refused_with_the_templates_reason() -> (
    None
):
    twice = [user("a"), user("b"), say("one")]
    assert "roles must alternate user/assistant" in refusal("Gemma 3", twice)
    assert "roles must alternate" in refusal("Magistral", twice)
    assert "roles must alternate" in refusal("Gemma 3", [*AFTER_CALL, say("6")])
    assert "single tool-calls" in refusal(
        "Llama 3.2", [user("a"), say("", tool_calls=[CALL, CALL]), RESULT, say("6")]
    )
    assert "there was no previous" in refusal("gpt-oss", [user("a"), RESULT, say("6")])
    assert "both content and thinking" in refusal(
        "gpt-oss", [user("a"), say("x", tool_calls=[CALL], reasoning="hm"), RESULT, say("6")]
    )


def test_a_template_that_fails_in_python_refuses_too() -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + m.tool_calls }}{% endfor %}"
    with pytest.raises(jinja2.TemplateError, match="TypeError"):
        Renderer(tokenizer, {})([{**say(""), "tool_calls": [CALL]}], prompt=True)


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{{ 1 / 0 }}", "ZeroDivisionError"), ("{{ range(10 ** 9) }}", "OverflowError")],
)
def test_any_error_of_a_template_refuses(template: str, reason: str) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(jinja2.TemplateError, match=reason):
        Renderer(tokenizer, {})([say("")], prompt=True)


@pytest.mark.parametrize("template", ["{% if a %}", "\n{{ messages | nofilter }}"])
def test_a_template_that_is_none_is_named_with_its_line(template: str) -> None:
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=rf"chat template .*line {template.count(chr(10)) + 1}: "):
        find_arguments(tokenizer)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_prompt_of_a_held_out_conversation_is_the_served_one_on_the_day_of_the_run(
    name: str,
) -> None:
    chat = [user("a"), say("so", reasoning="hm"), user("b"), say("two")]
    tokenizer = make_tokenizer(name)
    (prompt,) = held_out_prompts(
        [read_conversation({"messages": chat})], tokenizer, num_prompts=1, max_length=8192, day=DAY
    )
    text = tokenizer.decode(prompt.token_ids)
    asked = [user("a"), say("so"), user("b")]
    assert text == serve(FAMILIES[name], asked, arguments=ASKED.get(name))
    has_date = any(
        DAY.strftime(form) in text for form in ("%d %b %Y", "%d %B %Y", "%Y-%m-%d", "%B %d, %Y")
    )
    assert (
        has_date
        == writes_date(tokenizer)
        == (name in ("Llama 3.2", "SmolLM3", "gpt-oss", "Granite 3.3"))
    )
