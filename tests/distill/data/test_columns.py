"""Rows as people publish them.

Each column, role and key is read, listed as not read, or a reason to skip the row.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from redraft.distill.data.columns import Columns
from redraft.distill.data.conversations import load_conversations, read_conversation
from redraft.distill.data.rows import UnusableRowError

QUESTION, ANSWER = {"role": "user", "content": "how tall?"}, {"role": "assistant", "content": "3 m"}
SYSTEM = {"role": "system", "content": "Be a guide."}
CHAT = [QUESTION, ANSWER]
IMAGE = {"type": "image_url", "image_url": {"url": "boat.jpg"}}
SHAREGPT = [{"from": "human", "value": "how tall?"}, {"from": "gpt", "value": "3 m"}]
PARAMETERS = {"type": "object", "properties": {"thing": {"type": "string"}}}
FUNCTION = {"name": "weigh", "description": "Weighs.", "parameters": PARAMETERS}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"system": "Be a guide.", "messages": CHAT}, [SYSTEM, *CHAT]),
        ({"system_prompt": "Be a guide.", "conversations": SHAREGPT}, [SYSTEM, *CHAT]),
        ({"system": "Be a guide.", "messages": [SYSTEM, *CHAT]}, [SYSTEM, *CHAT]),
        ({"system": "", "messages": CHAT}, CHAT),
        ({"system": "Be a guide.", "question": "how tall?", "response": "3 m"}, [SYSTEM, *CHAT]),
        (
            {
                "instruction": "how tall?",
                "context": "It has 3 m.",
                "response": "3 m",
                "category": "qa",
            },
            [{"role": "user", "content": "how tall?\n\nIt has 3 m."}, ANSWER],
        ),
        ({"prompt": "how tall?", "answer": "3 m"}, CHAT),
        ({"prompt": "how tall?", "chosen": "3 m", "rejected": "no"}, CHAT),
        ({"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [ANSWER]}, CHAT),
        ({"prompt": "how tall?", "chosen": CHAT, "rejected": CHAT}, CHAT),
        ({"chosen": json.dumps(CHAT)}, CHAT),
        (
            {"instruction": "and now?", "output": "4 m", "history": [["how tall?", "3 m"]]},
            [*CHAT, "and now?", "4 m"],
        ),
        ({"instruction": "and now?", "output": "4 m", "history": CHAT}, [*CHAT, "and now?", "4 m"]),
        ({"messages": json.dumps(CHAT)}, CHAT),
        ({"prompt": json.dumps([QUESTION]), "completion": json.dumps([ANSWER])}, CHAT),
        (
            {
                "conversation": [
                    {"role": "user", "value": "how tall?"},
                    {"role": "assistant", "value": "3 m"},
                ]
            },
            CHAT,
        ),
        (
            {
                "conversations": [
                    {"from": "human", "content": "how tall?"},
                    {"from": "gpt", "content": "3 m"},
                ]
            },
            CHAT,
        ),
        (
            {"messages": [{"role": "User", "text": "how tall?"}, {"role": "ai", "text": "3 m"}]},
            CHAT,
        ),
        (
            {
                "messages": [
                    {"role": "Human", "content": "how tall?"},
                    {"role": "Assistant", "content": "3 m"},
                ]
            },
            CHAT,
        ),
        ({"messages": [{"role": "developer", "content": "Be a guide."}, *CHAT]}, [SYSTEM, *CHAT]),
        ({"prompt": "how tall?", "completion": "3 m", "label": True}, CHAT),
        ({"input": "how tall?", "output": "3 m", "system_message": "Be a guide."}, [SYSTEM, *CHAT]),
        ({"instruction": "", "input": "how tall?", "completion": "", "output": "3 m"}, CHAT),
        ({"messages": [{"role": "user", "content": "", "value": "how tall?"}, ANSWER]}, CHAT),
        ({"messages": CHAT, "tools": "null", "cut": "false"}, CHAT),
        ({"messages": [], "prompt": "how tall?", "completion": "3 m"}, CHAT),
        ({"conversations": "[]", "chosen": CHAT, "rejected": CHAT}, CHAT),
        ({"question": 7, "answer": 2}, ["7", "2"]),
        ({"messages": [QUESTION, {"role": "assistant", "content": 2}]}, ["how tall?", "2"]),
    ],
)
def test_common_names_are_read(row: dict[str, Any], expected: list[Any]) -> None:
    roles = ("user", "assistant")
    plain = [
        m if isinstance(m, dict) else {"role": roles[i % 2], "content": m}
        for i, m in enumerate(expected)
    ]
    assert read_conversation(row)["messages"] == plain


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT, "tools": [{"type": "function", "function": FUNCTION}]},
        {"messages": CHAT, "tools": json.dumps([FUNCTION])},
        {"messages": CHAT, "functions": [FUNCTION], "tools": []},
        {"messages": CHAT, "tools": [{**FUNCTION, "parameters": json.dumps(PARAMETERS)}]},
        {
            "messages": CHAT,
            "tools": [{"name": "weigh", "description": "Weighs.", "input_schema": PARAMETERS}],
        },
        {
            "messages": [
                {
                    "role": "system",
                    "content": "",
                    "tools": [{"type": "function", "function": FUNCTION}],
                },
                *CHAT,
            ]
        },
    ],
)
def test_tools_are_read_in_every_spelling(row: dict[str, Any]) -> None:
    conversation = read_conversation(row)
    assert conversation["tools"] == [{"type": "function", "function": FUNCTION}]
    assert not any("tools" in message for message in conversation["messages"])


@pytest.mark.parametrize(
    "call",
    [
        {"function": {"name": "weigh", "arguments": '{"thing": "cup"}'}},
        json.dumps({"function": json.dumps({"name": "weigh", "arguments": {"thing": "cup"}})}),
        {"name": "weigh", "arguments": {}, "parameters": {"thing": "cup"}},
        {"name": "weigh", "args": {"thing": "cup"}, "type": "tool_call"},
        {"name": "weigh", "input": {"thing": "cup"}, "type": "tool_use"},
    ],
)
def test_calls_are_read_in_every_spelling(call: Any) -> None:
    _, message = read_conversation(
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}]}
    )["messages"]
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "weigh", "arguments": {"thing": "cup"}}}
    ]


def call(thing: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weigh", "arguments": {"thing": thing}}}


def say(content: str = "", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def speak(speaker: str, value: Any) -> dict[str, str]:
    return {"from": speaker, "value": value if isinstance(value, str) else json.dumps(value)}


RESULT = {"role": "tool", "content": "1 kg"}
CUP, POT = call("cup"), call("pot")


@pytest.mark.parametrize(
    ("row", "turn"),
    [
        (
            {
                "conversations": [
                    speak("human", "how tall?"),
                    speak("gpt", "Let me weigh."),
                    speak("function_call", CUP["function"]),
                    speak("function_call", POT["function"]),
                ]
            },
            say("Let me weigh.", tool_calls=[CUP, POT]),
        ),
        (
            {"messages": [QUESTION, say("Let me weigh."), say(tool_calls=[CUP])]},
            say("Let me weigh.", tool_calls=[CUP]),
        ),
        (
            {"messages": [QUESTION, say(reasoning_content="hm"), say("so"), say(tool_calls=[CUP])]},
            say("so", reasoning="hm", tool_calls=[CUP]),
        ),
        (
            {
                "prompt": [QUESTION],
                "completion": [say(tool_calls=[CUP]), say(tool_calls=[POT])],
            },
            say(tool_calls=[CUP, POT]),
        ),
        ({"messages": [QUESTION, say("3 m"), say(""), say("high")]}, say("3 m\n\nhigh")),
    ],
    ids=["sharegpt", "chat", "thought-alone", "completion", "texts"],
)
def test_messages_of_an_assistant_in_a_row_are_one_turn(
    row: dict[str, Any], turn: dict[str, Any]
) -> None:
    assert read_conversation(row)["messages"] == [QUESTION, turn]


@pytest.mark.parametrize(
    ("row", "is_cut"),
    [
        ({"messages": CHAT, "cut": True}, True),
        ({"messages": CHAT, "finish_reason": "length"}, True),
        ({"messages": CHAT, "stop_reason": "max_tokens"}, True),
        ({"messages": CHAT, "stop_reason": "model_context_window_exceeded"}, True),
        ({"messages": CHAT, "done_reason": "length"}, True),
        ({"messages": CHAT, "done_reason": "stop"}, False),
        ({"messages": CHAT, "metadata": {"finish_reason": "length"}}, True),
        ({"messages": CHAT, "metadata": {"finish_reason": "stop"}}, False),
        ({"messages": [QUESTION, {**ANSWER, "finish_reason": "length"}]}, True),
        ({"messages": [QUESTION, say("3 "), say("m", finish_reason="length")]}, True),
        ({"messages": CHAT, "finish_reason": "stop", "cut": False}, False),
        ({"messages": [QUESTION, {**ANSWER, "finish_reason": "tool_calls"}]}, False),
    ],
)
def test_an_answer_that_the_server_cut_is_marked_so(row: dict[str, Any], is_cut: bool) -> None:
    columns = Columns()
    assert read_conversation(row, columns=columns).get("cut", False) == is_cut
    assert not columns.unread


def test_a_text_after_a_call_and_a_second_thought_are_turns_of_their_own() -> None:
    messages = [
        QUESTION,
        say(tool_calls=[CUP]),
        say("3 m"),
        RESULT,
        say("one", reasoning="hm"),
        say("two", reasoning="ah"),
    ]
    assert read_conversation({"messages": messages})["messages"] == messages


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "how tall?", "completion": "no", "label": False}, "with a label of false"),
        ({"prompt": "how tall?", "completion": "no", "label": "False"}, "with a label of false"),
        (
            {"conversations": SHAREGPT, "image": "boat.jpg"},
            "with images or audio, which are not read",
        ),
        (
            {"messages": CHAT, "images": [{"bytes": "x"}]},
            "with images or audio, which are not read",
        ),
        ({"messages": CHAT, "image_path": "boat.jpg"}, "with images or audio, which are not read"),
        ({"messages": CHAT, "img_base64": "aGk="}, "with images or audio, which are not read"),
        (
            {"messages": [{"speaker": "user", "utterance": "how tall?"}]},
            "with a message that has no role",
        ),
        (
            {"messages": [QUESTION, {"role": "assistant", "tool_calls": [7]}]},
            "with a tool call that has no name or arguments",
        ),
        (
            {"messages": [CHAT[0] | {"videos": ["a.mp4"]}, ANSWER]},
            "with images or audio, which are not read",
        ),
        ({"messages": [{"role": "user", "content": [IMAGE]}, ANSWER]}, "content that is not text"),
        ({"messages": [{"role": "alien", "content": "a"}]}, "with an unknown speaker"),
        (
            {"messages": [{"role": "user", "body": "how tall?"}, ANSWER]},
            "with a message without content, value, text",
        ),
        (
            {"system": "Be a guide.", "messages": [{"role": "system", "content": "Sing."}, *CHAT]},
            "with two system prompts",
        ),
        *(
            (
                {"question": "how tall?", "answer": answer},
                "with a column answer that is neither text nor a list",
            )
            for answer in (2.0, True, {"text": "3 m"})
        ),
        ({"messages": "how tall?"}, "with a column messages that is not JSON"),
        ({"messages": 5}, "with a column messages that is not a list"),
        *(
            (
                {"prompt": "a", "completion": "b", "history": history},
                "with a column history that is not a list",
            )
            for history in (5, True, "null", {"user": "a"})
        ),
        (
            {"prompt": "a", "tools": [{"name": "weigh", "parameters": "{"}]},
            "with a tool's parameters that is not JSON",
        ),
    ],
)
def test_rows_that_must_not_be_learned_are_left_out_with_a_reason(
    row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnusableRowError) as error:
        read_conversation(row)
    assert error.value.reason == reason


def test_data_of_images_alone_end_in_one_line(tmp_path: Any) -> None:
    rows = [
        {"images": ["boat.jpg"], "caption": "a boat"},
        {"messages": [{"role": "user", "content": [IMAGE]}, ANSWER]},
    ]
    (path := tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"\bimages\b.*\bimage_url\b") as ended:
        load_conversations(str(path))
    assert "\n" not in str(ended.value)


def test_an_empty_list_of_images_is_no_image() -> None:
    assert read_conversation({"messages": CHAT, "images": []})["messages"] == CHAT


@pytest.mark.parametrize("missing", [None, "", float("nan")])
@pytest.mark.parametrize(
    "column", ["system", "context", "history", "tools", "label", "cut", "domain", "image", "topic"]
)
def test_a_missing_value_in_an_optional_column_refuses_nothing(column: str, missing: Any) -> None:
    row = {"prompt": "how tall?", "completion": "3 m", column: missing}
    conversation = read_conversation(row, "all", "topic")
    assert conversation == {"messages": CHAT, "domain": "all"}


def test_a_domain_column_that_no_row_has_is_named(tmp_path: Path) -> None:
    rows = [{"messages": CHAT, "topic": "trees"}, {"messages": CHAT}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_conversations(str(path), domain_column="topic")
    assert [conversation["domain"] for conversation in found] == ["trees", "all"]
    with pytest.raises(ValueError, match=r"no column 'tropic', only messages, topic"):
        load_conversations(str(path), domain_column="tropic")


def test_keys_of_calls_and_tools_and_second_names_are_listed() -> None:
    call = {
        "id": "1",
        "type": "function",
        "index": 0,
        "function": {"name": "weigh", "kwargs": {"thing": "cup"}},
    }
    both = {
        "role": "assistant",
        "content": "3 m",
        "text": "4 m",
        "value": "3 m",
        "tool_calls": [call],
    }
    columns = Columns()
    read_conversation(
        {"messages": [QUESTION, both], "tools": [{**FUNCTION, "returns": "kg"}]}, columns=columns
    )
    assert columns.unread.keys() == {"messages.text", "messages.tool_calls.kwargs", "tools.returns"}


def test_columns_and_keys_that_are_not_read_are_listed(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = Columns()
    row = {
        "messages": [{**QUESTION, "weight": 1}, ANSWER],
        "id": 7,
        "category": "qa",
        "label": 3,
        "empty": None,
    }
    read_conversation(row, columns=columns)
    read_conversation({"prompt": "a", "id": 8}, columns=columns)
    assert columns.read == {"messages": 1, "prompt": 1}
    assert columns.unread == {"id": 2, "category": 1, "label": 1, "messages.weight": 1}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    load_conversations(str(path))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("columns read: messages; not read: category, id, label, messages.weight")


def test_files_that_are_not_read_are_counted_and_can_be_converted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (table := tmp_path / "a.csv").write_text("prompt,completion\nhow tall?,3 m\n")
    (text := tmp_path / "a.txt").write_text("how tall?")
    (packed := tmp_path / "a.jsonl.xz").write_bytes(b"")
    for source, words in ((table, "from_csv"), (text, "give its folder"), (packed, "unpack it")):
        with pytest.raises(ValueError, match=rf"\{source.suffix}.*{words}") as ended:
            load_conversations(str(source))
        assert "\n" not in str(ended.value)
    text.unlink(), packed.unlink()
    with pytest.raises(ValueError, match=r"\.csv"):
        load_conversations(str(tmp_path))
    (tmp_path / "B.JSONL").write_text(json.dumps({"prompt": "how tall?", "completion": "3 m"}))
    assert [c["messages"] for c in load_conversations(str(tmp_path))] == [CHAT]
    assert "files not read: 1 .csv" in capsys.readouterr().out
    # The way out of the error.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / ".cache")
    datasets.Dataset.from_csv(str(table)).to_json(tmp_path / "a.jsonl")
    assert [c["messages"] for c in load_conversations(str(tmp_path))] == [CHAT, CHAT]
