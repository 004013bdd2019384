"""Loss masks of public template families.

Five conditions on each turn, and transformers' assistant mask.
"""

from __future__ import annotations

import datetime
import functools
import re
from typing import Any

import jinja2
import numpy as np
import pytest
from chat_templates import FAMILIES
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trl_templates import (
    find_ends,
    make_tokenizer,
    template_names,
    training_names,
    training_template,
)

from redraft.distill.data.conditions import Turn
from redraft.distill.data.conversations import Conversation, read_conversation
from redraft.distill.data.messages import REASONING_FIELDS
from redraft.distill.data.rendering import Renderer
from redraft.distill.data.samples import build_samples, held_out_prompts
from redraft.distill.data.template import reads_parts

DAY = datetime.date(2024, 2, 29)
FUNCTION = {
    "name": "weigh",
    "description": "Weighs a thing.",
    "parameters": {
        "type": "object",
        "properties": {"thing": {"type": "string"}},
        "required": ["thing"],
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weigh", "arguments": {"thing": "a cup"}},
}
OPENING = r"<think>|<\|channel>thought"
TAGS = re.compile(rf"{OPENING}|</think>|<channel\|>")

OF_THE_TEMPLATE = re.compile(r"</?think>|<｜Assistant｜>|<\|start\|>assistant|<end>")
"""What the oracle marks beside the answer: an empty thought, some role headers, and a token after
the last turn.
"""


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def say(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


@functools.cache
def make_renderer(name: str) -> Renderer:
    tokenizer = make_tokenizer(name)
    return Renderer(tokenizer, {}, DAY, tokenizer.convert_tokens_to_ids(list(find_ends(name))))


def write_turns(name: str, row: dict[str, Any]) -> tuple[list[Turn], dict[str, int], Conversation]:
    """(turns, refused answers by reason, the conversation); a template may refuse all."""
    conversation = read_conversation(row)
    try:
        turns, refused = make_renderer(name).turns(conversation, lambda turn: turn)
    except jinja2.TemplateError:
        return [], {"by the template": 1}, conversation
    return turns, dict(refused), conversation


def text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def squeeze(content: str) -> str:
    return "".join(content.split())


WORDS = st.lists(
    st.sampled_from(["blue", "cup", "of", "tea", "weighs", "3", "kg", "Ünder"]),
    min_size=1,
    max_size=4,
).map(" ".join)


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """Conversations with and without system prompt, tools, thought and parts, whole and cut."""
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    )
    has_tools, thinks = draw(st.booleans()), draw(st.booleans())
    for number in range(draw(st.integers(1, 3))):
        question = f"q{number} {draw(WORDS)}"
        parts = [{"type": "text", "text": question}, {"type": "text", "text": "again"}]
        messages.append(user(parts if draw(st.booleans()) else question))
        thought = {"reasoning_content": f"t{number} {draw(WORDS)}"} if thinks else {}
        if has_tools:
            messages.append(say("", tool_calls=[CALL], **thought))
            messages.append(
                {"role": "tool", "tool_call_id": "call00001", "name": "weigh", "content": "heavy"}
            )
        messages.append(say(f"a{number} {draw(WORDS)}", **thought))
    cut = draw(st.booleans())
    if cut and thinks and draw(st.booleans()):
        messages[-1]["content"] = ""
    return {"messages": messages, "cut": cut, **({"tools": TOOLS} if has_tools else {})}


THINKING_CALL = {
    "messages": [
        user("q0 blue"),
        say("", tool_calls=[CALL], reasoning_content="t0 blue"),
        {"role": "tool", "tool_call_id": "call00001", "name": "weigh", "content": "heavy"},
        say("a0 blue", reasoning_content="t0 blue"),
    ],
    "cut": False,
    "tools": TOOLS,
}
"""A thought before a call and another after its result."""


@pytest.mark.parametrize("name", template_names())
@settings(max_examples=12, deadline=None)
@given(row=rows())
@example(row=THINKING_CALL)
def test_every_turn_satisfies_five_conditions_or_is_refused_with_a_reason(
    name: str, row: dict[str, Any]
) -> None:
    turns, refused, conversation = write_turns(name, row)
    answers = [m for m in row["messages"] if m["role"] == "assistant"]
    assert len(turns) + sum(refused.values()) == len(answers) or "by the template" in refused
    is_plain = all(m.keys() <= {"role", "content"} for m in row["messages"])
    assert not is_plain or not refused or "by the template" in refused
    if len(turns) < len(answers):
        return
    ends, tokenizer, render = find_ends(name), make_tokenizer(name), make_renderer(name)
    places = [i for i, m in enumerate(row["messages"]) if m["role"] == "assistant"]
    for turn, place, answer in zip(turns, places, answers, strict=True):
        is_cut = row["cut"] and place == places[-1]
        end = next((end for end in ends if turn.answer.endswith(end)), "")
        # 2: the end
        assert bool(end) != is_cut
        ids = tokenizer(turn.answer, add_special_tokens=False)["input_ids"]
        assert (ids[-1] in tokenizer.convert_tokens_to_ids(list(ends))) != is_cut
        # 3: the question
        question = [m for m in row["messages"][:place] if m["role"] == "user"][-1]
        assert squeeze(text(question["content"])) in squeeze(turn.prompt)
        # 4: one thought, from the state of the prompt
        own = re.split("assistant|model|<tool_response.>", turn.prompt[-30:])[-1] + turn.answer
        opens = [bool(re.fullmatch(OPENING, tag)) for tag in TAGS.findall(own)]
        assert opens in ([], [True, False], [True] if is_cut else [])
        thought = answer.get("reasoning_content", "")
        assert thought in turn.answer
        assert text(answer["content"]) in turn.answer
        # 5: the call
        assert not answer.get("tool_calls") or ("weigh" in turn.answer and "a cup" in turn.answer)
        # 1: a rendering, but for the thought, which some templates drop
        context = [render.as_context(m) for m in conversation["messages"][:place]]
        written = render.as_answer(conversation["messages"][place])
        whole = render(
            [*context, written], prompt=False, tools=row.get("tools"), arguments=turn.arguments
        )
        shown = TAGS.sub("", turn.prompt + turn.answer.removesuffix(end))
        is_rendered = any(
            squeeze(TAGS.sub("", whole)).startswith(squeeze(some))
            for some in (shown, "".join(shown.rsplit(thought, 1)) if thought else shown)
        )
        assert is_rendered or is_as_served(render, turn, context, written, row.get("tools"), end)


def is_as_served(
    render: Renderer, turn: Turn, context: Any, written: Any, tools: Any, end: str
) -> bool:
    """Whether the prompt is the served one, and the answer stands so after a lone question.

    gpt-oss drops the reasoning of earlier calls once there is an answer, and DiffusionGemma writes a
    header after a tool's result that its generation prompt leaves out.
    """
    prompt = render(context, prompt=True, tools=tools, arguments=turn.arguments)
    lone = render([user("why?"), written], prompt=False, arguments=turn.arguments)
    answer = TAGS.sub("", turn.answer.removesuffix(end))
    return turn.prompt.startswith(prompt) and squeeze(answer) in squeeze(TAGS.sub("", lone))


@pytest.mark.parametrize("name", training_names())
@pytest.mark.parametrize("shape", ["plain", "system", "thought", "tools"])
def test_labels_are_those_of_the_assistant_mask(name: str, shape: str) -> None:
    if (name, shape) == ("diffusion_gemma", "tools"):
        pytest.skip(
            "after a tool's result the template writes a header that its generation prompt leaves "
            "out"
        )
    thought = dict.fromkeys(REASONING_FIELDS, "a thought") if shape == "thought" else {}
    messages = [
        *([{"role": "system", "content": "Be kind."}] if shape == "system" else []),
        user("why 1"),
    ]
    if shape == "tools":
        messages += [say("", tool_calls=[CALL])]
        messages += [
            {"role": "tool", "tool_call_id": "call00001", "name": "weigh", "content": "3 kg"}
        ]
    messages += [say("blue 1", **thought)]
    row = {"messages": messages, **({"tools": TOOLS} if shape == "tools" else {})}
    turns, refused, _ = write_turns(name, row)
    if refused:  # some templates know no tools, no reasoning, or no system prompt
        assert shape != "plain"
        assert shape != "system" or refused == {"by the template": 1}
        return
    tokenizer = make_tokenizer(name)
    sent = [
        {**m, "content": [{"type": "text", "text": m["content"]}]}
        if reads_parts(tokenizer) and m["role"] != "tool"
        else m
        for m in messages
    ]
    marked = tokenizer.apply_chat_template(
        sent,
        tools=row.get("tools"),
        chat_template=training_template(name),
        return_dict=True,
        return_assistant_tokens_mask=True,
        **turns[-1].arguments,
    )
    mask = np.array(marked["assistant_masks"], bool)
    oracle = squeeze(OF_THE_TEMPLATE.sub("", tokenizer.decode(np.array(marked["input_ids"])[mask])))
    labels = squeeze(OF_THE_TEMPLATE.sub("", "".join(turn.answer for turn in turns)))
    if name.startswith("deepseek"):  # the template, so the oracle too, drops the thought
        labels = labels.removeprefix(squeeze(thought.get("reasoning_content", "")))
    assert labels == oracle


def learn(
    template: str, row: dict[str, Any], *, end: str, special: str = "", plain: str = ""
) -> list[tuple[str, str]]:
    """(end of the prompt, labels) of each turn by a template of ours."""
    turns, refused = _learn(template, row, end, special)
    assert not refused
    return turns


def _learn(
    template: str, row: dict[str, Any], end: str, special: str
) -> tuple[list[tuple[str, str]], dict[str, int]]:
    from make_tokenizers import make_byte_tokenizer

    tokenizer = make_byte_tokenizer(bos_token="<begin>", eos_token="<stop>")
    ends = end.split()
    tokenizer.add_special_tokens({"additional_special_tokens": sorted({*special.split(), *ends})})
    tokenizer.chat_template = template
    render = Renderer(tokenizer, {}, DAY, tokenizer.convert_tokens_to_ids(ends))
    turns, refused = render.turns(read_conversation(row), lambda turn: turn)
    return [(turn.prompt, turn.answer) for turn in turns], dict(refused)


CHAT = [user("ping 1"), say("pong 1"), user("ping 2"), say("pong 2")]
THOUGHT = [user("why 1"), say("blue 1", reasoning_content="scatter 1")]

# A role's token ends the turn before it.
NEXT_ROLE_ENDS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think></think>\n{% "
    "endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson "
    "}}</call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def test_a_turn_may_end_with_the_token_of_the_next_role() -> None:
    options = {"end": "<|user|> <|tool|>", "special": "<|assistant|>"}
    (first, second) = learn(NEXT_ROLE_ENDS, {"messages": CHAT}, **options)
    assert first == ("<|user|>\nping 1<|assistant|>\n<think></think>\n", "pong 1<|user|>")
    assert second[1] == "pong 2<|user|>"
    row = {
        "messages": [
            user("weigh"),
            say("", tool_calls=[CALL]),
            {"role": "tool", "content": "3"},
            say("3 kg"),
        ]
    }
    called, answered = learn(NEXT_ROLE_ENDS, row, **options)
    assert called[1] == '<call>weigh {"thing": "a cup"}</call><|tool|>'
    assert answered[1] == "3 kg<|user|>"


def test_an_end_that_does_not_end_generation_is_refused() -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|done|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    special = "<|done|> <|user|> <|assistant|>"
    turns, refused = _learn(template, {"messages": CHAT}, "<|other|>", special)
    assert (turns, refused) == ([], {"whose end in the chat template does not end generation": 2})
    assert [
        answer for _, answer in learn(template, {"messages": CHAT}, end="<|done|>", special=special)
    ] == [
        "pong 1<|done|>",
        "pong 2<|done|>",
    ]


@pytest.mark.parametrize(
    "inside", ["pong 1<|done|>", "pong<|done|><|user|>ping 3<|assistant|>pong 3", "<|done|>"]
)
def test_nothing_after_a_stop_token_is_learned(inside: str) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|done|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    row = {"messages": [user("ping 1"), say(inside), user("ping 2<|done|>"), say("pong 2")]}
    for cut in (False, True):
        turns, refused = _learn(
            template, {**row, "cut": cut}, "<|done|> <|other|>", "<|user|> <|assistant|>"
        )
        assert [answer for _, answer in turns] == ["pong 2" if cut else "pong 2<|done|>"]
        assert sum(refused.values()) == 1


def test_a_system_prompt_that_the_template_leaves_out_is_a_reason() -> None:
    template = (
        "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|done|>{% "
        "endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    row = {"messages": [{"role": "system", "content": "Be kind."}, *CHAT]}
    special = "<|user|> <|assistant|>"
    assert _learn(template, row, "<|done|>", special) == (
        [],
        {"whose system prompt the chat template leaves out": 2},
    )
    assert (
        len(
            learn(
                template.replace(" if m.role != 'system'", ""), row, end="<|done|>", special=special
            )
        )
        == 2
    )
    later = {"messages": [*CHAT[:2], {"role": "developer", "content": "Be brief."}, *CHAT[2:]]}
    turns, refused = _learn(template, later, "<|done|>", special)
    assert (len(turns), refused) == (1, {"whose system prompt the chat template leaves out": 1})


def test_a_template_that_reads_parts_gets_parts() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{% if p.type == 'text' %} {{ "
        "p.text }}{% endif %}"
        "{% endfor %}<|done|>\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    parts = [{"type": "text", "text": "ping"}, {"type": "text", "text": "1"}]
    row = {"messages": [user(parts), say("pong 1")]}
    assert learn(template, row, end="<|done|>") == [
        ("user: ping 1<|done|>\nassistant:", " pong 1<|done|>")
    ]


# The thought is a template's argument, off by default, and no answer is rendered with its thought.
SWITCHED = (
    "{% if thinking is not defined %}{% set thinking = false %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>{{ m.content }}<|assistant|>"
    "{% if not loop.last %}</think>{% endif %}{% else %}{{ m.content.split('</think>')[-1] "
    "}}<|done|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<think>' if thinking else '</think>' }}{% endif "
    "%}"
)


def test_the_arguments_of_the_template_follow_the_data() -> None:
    options = {"end": "<|done|>", "special": "<|user|> <|assistant|>"}
    assert learn(SWITCHED, {"messages": THOUGHT}, **options) == [
        ("<|user|>why 1<|assistant|><think>", "scatter 1</think>blue 1<|done|>")
    ]
    first, _ = learn(SWITCHED, {"messages": CHAT}, **options)
    assert first == ("<|user|>ping 1<|assistant|></think>", "pong 1<|done|>")


# A thought is rendered whatever the prompt asks for, as Gemma 4's template does.
ALWAYS_RENDERED = (
    "{% if enable_thinking %}<|think|>{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "<|user|>{{ m.content }}{% else %}<|assistant|>{% if m.reasoning %}<|channel>thought\n"
    "{{ m.reasoning }}\n<channel|>{% endif %}{{ m.content }}<|done|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Those of the larger sizes close an empty thought, which no answer repeats.
CLOSED = ALWAYS_RENDERED.replace(
    "<|assistant|>{% endif %}",
    "<|assistant|>{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}",
)
# The effort is written, and none of it is the default, as Mistral's template does.
EFFORT = (
    "{% set effort = reasoning_effort or 'none' %}{% if effort not in ['none', 'low', 'high'] %}"
    "{{ raise_exception('no such effort') }}{% endif %}{{ effort }}{% for m in messages %}"
    "{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>{% if m.reasoning %}"
    "<think>{{ m.reasoning }}</think>{% endif %}{{ m.content }}<|done|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GRADED = EFFORT.replace("or 'none'", "or 'low'").replace(
    "['none', 'low', 'high']", "['low', 'high']"
)


@pytest.mark.parametrize(
    ("template", "asked", "unasked", "thought"),
    [
        (
            ALWAYS_RENDERED,
            "<|think|><|user|>why 1<|assistant|>",
            "<|user|>ping 1<|assistant|>",
            "<|channel>thought\nscatter 1\n<channel|>",
        ),
        (
            CLOSED,
            "<|think|><|user|>why 1<|assistant|>",
            "<|user|>ping 1<|assistant|><|channel>thought\n<channel|>",
            "<|channel>thought\nscatter 1\n<channel|>",
        ),
        (
            EFFORT,
            "high<|user|>why 1<|assistant|>",
            "none<|user|>ping 1<|assistant|>",
            "<think>scatter 1</think>",
        ),
        (
            GRADED,
            "low<|user|>why 1<|assistant|>",
            "low<|user|>ping 1<|assistant|>",
            "<think>scatter 1</think>",
        ),
    ],
    ids=["always-rendered", "closed", "effort", "graded"],
)
def test_a_thought_follows_a_prompt_that_asks_for_one_and_no_other_answer_does(
    template: str, asked: str, unasked: str, thought: str
) -> None:
    options = {"end": "<|done|>", "special": "<|user|> <|assistant|>"}
    found = learn(template, {"messages": THOUGHT}, **options)
    assert found == [(asked, thought + "blue 1<|done|>")]
    (first, *_) = learn(template, {"messages": CHAT}, **options)
    assert first == (unasked, "pong 1<|done|>")


@pytest.mark.parametrize(
    "column",
    [
        {"chat_template_kwargs": {"reasoning_effort": "low", "unheard": 1, "messages": []}},
        {"chat_template_kwargs": '{"reasoning_effort": "low"}'},
        {"settings": {"temperature": 0.5, "template_options": {"reasoning_effort": "low"}}},
    ],
    ids=["object", "json", "regenerated"],
)
def test_template_arguments_in_the_data_are_those_of_the_prompt(column: dict[str, Any]) -> None:
    options = {"end": "<|done|>", "special": "<|user|> <|assistant|>"}
    for messages in (THOUGHT, CHAT[:2]):
        ((prompt, _),) = learn(EFFORT, {"messages": messages, **column}, **options)
        assert prompt == f"low<|user|>{messages[0]['content']}<|assistant|>"


def test_a_thought_opened_by_the_prompt_opens_once() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}\n{% elif "
        "loop.last %}<|assistant|>\n"
        "<think>\n\n{{ m.content }}\n<|done|>\n{% else %}<|assistant|>\n{{ "
        "m.content.split('</think>')[-1].strip() }}\n"
        "<|done|>\n{% endif %}{% endfor %}{% if add_generation_prompt "
        "%}<|assistant|>\n<think>\n\n{% endif %}"
    )
    row = {"messages": [user("why 1"), say("<think>\nscatter 1\n</think>\n\nblue 1")]}
    ((prompt, answer),) = learn(template, row, end="<|done|>", special="<|user|> <|assistant|>")
    assert prompt.endswith("<|assistant|>\n<think>\n\n")
    assert answer == "scatter 1\n</think>\n\nblue 1\n<|done|>"


EMPTY_THOUGHT = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% else "
    "%}<think></think>{% endif %}"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}<|done|>\n{% endfor %}{% if "
    "add_generation_prompt %}"
    "<|assistant|>\n{% if enable_thinking is false %}<think></think>{% else %}<think>\n{% endif "
    "%}{% endif %}"
)


@pytest.mark.parametrize(
    "template", [EMPTY_THOUGHT, EMPTY_THOUGHT.replace("enable_thinking is false", "false")]
)
def test_an_empty_thought_is_the_templates_own(template: str) -> None:
    options = {"end": "<|done|>", "special": "<|user|> <|assistant|>"}
    ((prompt, answer), _) = learn(template, {"messages": CHAT}, **options)
    assert (prompt, answer) == (
        "<|user|>\nping 1<|done|>\n<|assistant|>\n<think></think>",
        "pong 1<|done|>",
    )
    row = {"messages": [user("weigh"), say("", tool_calls=[CALL])]}
    ((prompt, answer),) = learn(template, row, **options)
    assert prompt.endswith("<think></think>")
    assert answer == '<call>weigh {"thing": "a cup"}</call><|done|>'
    ((prompt, answer),) = learn(template, {"messages": THOUGHT}, **options)
    assert (prompt[-8:], answer) == ("<think>\n", "scatter 1\n</think>\nblue 1<|done|>")


def test_a_template_that_adds_arguments_as_text_is_refused_with_a_cure_that_works() -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}<|done|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    row = {
        "messages": [
            user("weigh"),
            say("", tool_calls=[CALL]),
            {"role": "tool", "content": "3"},
            say("3 kg"),
        ]
    }
    options = {"end": "<|done|>", "special": "<|user|> <|assistant|> <|tool|>"}
    with pytest.raises(jinja2.TemplateError, match="tojson"):
        learn(template, row, **options)
    cured = template.replace("c.function.arguments }}", "(c.function.arguments | tojson) }}")
    assert len(learn(cured, row, **options)) == 2


def test_an_answer_cut_in_its_thought_has_no_end_and_no_closing_tag() -> None:
    cut = {"messages": [user("why 1"), say("", reasoning="scat")], "cut": True}
    options = {"end": "<|done|>", "special": "<|user|> <|assistant|>"}
    ((prompt, answer),) = learn(EMPTY_THOUGHT, cut, **options)
    assert (prompt[-8:], answer) == ("<think>\n", "scat")
    ((prompt, answer),) = learn(SWITCHED, cut, **options)
    assert (prompt[-7:], answer) == ("<think>", "scat")


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "gemma4_v5", "deepseek_r1_distill"])
def test_a_thought_that_does_not_close_opens_once_and_has_no_end(name: str) -> None:
    row = {"messages": [user("why 1"), say("<think>\nscat")]}
    ((turn,), refused, _) = write_turns(name, row)
    assert not refused
    opening, closing = make_renderer(name).reasoning_form.tags
    written = turn.prompt.rpartition("why 1")[2] + turn.answer
    assert written.count(opening) == 1
    assert closing not in written
    assert turn.answer.endswith("scat")


def test_an_answer_that_the_server_cut_has_no_end_wherever_it_stands() -> None:
    messages = [user("why 1"), say("scat", finish_reason="length"), user("go on"), say("ter")]
    turns, _, _ = write_turns("qwen3", {"messages": messages})
    assert [turn.answer for turn in turns] == ["scat", "ter<|im_end|>"]
    assert "scat<|im_end|>" in turns[1].prompt  # as the server writes it when it is sent back


@pytest.mark.parametrize("verdict", [{"weight": 0}, {"train": False}])
def test_an_answer_that_the_data_marks_is_read_and_not_learned(verdict: dict[str, Any]) -> None:
    messages = [user("a"), say("bad", **verdict), user("b"), say("good", weight=1)]
    ((turn,), refused, _) = write_turns("llama3", {"messages": messages})
    assert ("bad<|eot_id|>" in turn.prompt, turn.answer) == (True, "good<|eot_id|>")
    assert refused == {"which the data excludes from training": 1}


def test_parts_are_detected_as_vllm_detects_them() -> None:
    hf = pytest.importorskip("vllm.renderers.hf")
    templates = [*(make_tokenizer(name).chat_template for name in template_names())]
    templates += [family.template for family in FAMILIES.values()]
    for template in templates:
        tokenizer = make_tokenizer(template_names()[0])
        found = hf._detect_content_format(template, default="string") == "openai"
        tokenizer = type("Tokenizer", (), {"chat_template": template})
        assert reads_parts(tokenizer) == found


def test_prompts_to_measure_on_begin_as_most_answers_do() -> None:
    tokenizer = make_tokenizer("qwen3")
    for messages, ending in ((CHAT, "<think>\n\n</think>\n\n"), (THOUGHT, "assistant\n")):
        (prompt,) = held_out_prompts(
            [read_conversation({"messages": messages})], tokenizer, num_prompts=1, max_length=512
        )
        assert tokenizer.decode(prompt.token_ids).endswith(ending)


def test_arguments_and_ends_are_counted() -> None:
    tokenizer = make_tokenizer("qwen3")
    conversations = [read_conversation({"messages": some}) for some in (CHAT, THOUGHT)]
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    _, stats = build_samples(conversations, tokenizer, max_length=512, ends=ends, progress=False)
    assert stats.arguments == {"{}": 1, '{"enable_thinking": false}': 2}
    assert stats.ends == {"<|im_end|>": 3}
