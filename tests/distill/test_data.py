from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from distill.data import conversation_hash, is_held_out, load_conversations, message_text, split_held_out

QUESTION_AND_ANSWER = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "<think>hm</think>so"}]


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": QUESTION_AND_ANSWER},
        {"messages": QUESTION_AND_ANSWER, "prompt": "something else", "text": "and else"},
        {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "<think>hm</think>so"}]},
        {"prompt": "why?", "completion": "<think>hm</think>so"},
        {"prompt": "why?", "response": "<think>hm</think>so"},
        {"prompt": QUESTION_AND_ANSWER[:1], "completion": QUESTION_AND_ANSWER[1:]},
    ],
    ids=["messages", "messages-first", "sharegpt", "completion", "response", "conversational-prompt"],
)
def test_every_usual_shape_reads_as_the_same_conversation(tmp_path: Path, row: dict) -> None:
    expected = [{"messages": QUESTION_AND_ANSWER, "domain": "maths"}]
    row = {**row, "domain": "maths"}
    assert load_conversations(write_jsonl(tmp_path / "a.jsonl", [row])) == expected
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "a.parquet")
    assert load_conversations(str(tmp_path / "a.parquet")) == expected


def test_a_prompt_alone_is_a_conversation_to_regenerate_and_text_is_a_document(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "why?"}, {"text": "Once."}])
    assert load_conversations(source) == [
        {"messages": [{"role": "user", "content": "why?"}], "domain": "all"},
        {"messages": [{"role": "text", "content": "Once."}], "domain": "all"},
    ]


def test_conversations_with_tools_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "5"}]
    rows = [
        {"messages": QUESTION_AND_ANSWER},
        {"messages": [QUESTION_AND_ANSWER[0], *calls, QUESTION_AND_ANSWER[1]]},
        {"messages": QUESTION_AND_ANSWER, "tools": [{"name": "add"}]},
        {"conversations": [{"from": "human", "value": "why?"}, {"from": "function_call", "value": "{}"}]},
        {"messages": QUESTION_AND_ANSWER, "tools": []},
    ]
    found = load_conversations(write_jsonl(tmp_path / "a.jsonl", rows))
    assert [conversation["messages"] for conversation in found] == [QUESTION_AND_ANSWER] * 2
    assert "3 conversations with tools are left out" in capsys.readouterr().out


def test_rows_may_differ_in_their_fields(tmp_path: Path) -> None:
    rows = [{"messages": QUESTION_AND_ANSWER}, {"messages": QUESTION_AND_ANSWER, "cut": True, "domain": "code"}]
    first, second = load_conversations(write_jsonl(tmp_path / "a.jsonl", rows))
    assert "cut" not in first
    assert (second["cut"], second["domain"]) == (True, "code")


def test_a_folder_of_text_is_one_document_a_file_with_its_folder_as_domain(tmp_path: Path) -> None:
    (tmp_path / "law").mkdir()
    (tmp_path / "law" / "a.txt").write_text("first")
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert load_conversations(str(tmp_path)) == [
        {"messages": [{"role": "text", "content": "second"}], "domain": "all"},
        {"messages": [{"role": "text", "content": "first"}], "domain": "law"},
    ]


def test_the_standard_library_is_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "".join(f"    total = total + number * {i}\n" for i in range(9))
    (tmp_path / "sums.py").write_text(
        f'def add(total, number):\n    """{"Adds up. " * 12}"""\n{body}    return total\n'
    )
    monkeypatch.setattr("distill.corpus.sysconfig.get_path", lambda _: str(tmp_path))  # the whole of it takes 30 s
    assert {c["domain"] for c in load_conversations("stdlib")} == {"code", "prose"}


def test_reasoning_that_a_server_parsed_out_is_put_back() -> None:
    message = {"role": "assistant", "content": "\nso", "reasoning": "hm\n"}
    assert message_text(message) == "<think>\nhm\n</think>\n\nso"
    assert message_text({"content": None}) == ""


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "holds no conversation"),
        ('{"id": 1, "title": "a"}', "has the columns id, title: expected `messages`"),
        ('{"prompt": "a"}\n{"prompt":', "line 2: not JSON"),
        ('{"messages": 5}', "row 1: not a conversation"),
        ('{"messages": [{"content": "a"}]}', "row 1: not a conversation"),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "row 1: .* content is list, not text"),
        ('{"messages": null}', "row 1: not a conversation"),
        ("[1]", "line 1: not a JSON object"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=complaint) as error:
        load_conversations(str(path))
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_file_and_a_broken_parquet_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl: no such file"):
        load_conversations(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "a.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as parquet: .*magic"):
        load_conversations(str(tmp_path / "a.parquet"))


def test_a_name_that_is_nothing_here_nor_on_the_hub_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"nosuch/thing is no .* file, no folder, and not loadable"):
        load_conversations("nosuch/thing")


def test_the_split_is_by_content_alone_and_near_its_fraction() -> None:
    conversations = [{"messages": [{"role": "user", "content": str(i)}], "domain": "all"} for i in range(4000)]
    train, held_out = split_held_out(conversations, 0.1)
    assert len(train) + len(held_out) == 4000
    assert 330 < len(held_out) < 470  # 400 +- 3.7 standard deviations
    assert all(is_held_out(c["messages"], 0.2) for c in held_out)  # a larger fraction keeps what was held out
    assert split_held_out(conversations, 0.0)[1] == []


def test_the_hash_depends_on_roles_and_contents_only() -> None:
    message = {"role": "user", "content": "é"}
    assert conversation_hash([message]) == conversation_hash([{**message, "id": "7"}])
    assert conversation_hash([message]) != conversation_hash([{**message, "role": "assistant"}])
