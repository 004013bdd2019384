from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import datasets
import pytest
import zstandard

from redraft.distill.data.conversations import (
    Overlap,
    identify_conversations,
    load_conversations,
    remove_overlap,
    split_held_out,
)
from redraft.distill.data.corpus import MAX_DOCSTRING_CHARS, completion_question, function_questions
from redraft.distill.data.messages import conversation_hash, read_message
from redraft.distill.data.rows import _load_hub
from redraft.files.setting_error import SettingError

QUESTION_AND_ANSWER = [
    {"role": "user", "content": "why?"},
    {"role": "assistant", "content": "<think>hm</think>so"},
]


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": QUESTION_AND_ANSWER},
        {"messages": QUESTION_AND_ANSWER, "prompt": "something else", "text": "and else"},
        {
            "conversations": [
                {"from": "human", "value": "why?"},
                {"from": "gpt", "value": "<think>hm</think>so"},
            ]
        },
        {"prompt": "why?", "completion": "<think>hm</think>so"},
        {"prompt": "why?", "response": "<think>hm</think>so"},
        {"prompt": QUESTION_AND_ANSWER[:1], "completion": QUESTION_AND_ANSWER[1:]},
        {
            "messages": [
                {**m, "content": [{"type": "text", "text": m["content"]}]}
                for m in QUESTION_AND_ANSWER
            ]
        },
        {"instruction": "why?", "input": "", "output": "<think>hm</think>so"},
    ],
    ids=[
        "messages",
        "messages-first",
        "sharegpt",
        "completion",
        "response",
        "conversational-prompt",
        "content-parts",
        "alpaca",
    ],
)
def test_every_usual_shape_reads_as_the_same_conversation(tmp_path: Path, row: dict) -> None:
    expected = [{"messages": QUESTION_AND_ANSWER, "domain": "maths"}]
    row = {**row, "domain": "maths"}
    assert load_conversations(write_jsonl(tmp_path / "a.jsonl", [row])) == expected
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "a.parquet")
    assert load_conversations(str(tmp_path / "a.parquet")) == expected


def test_a_prompt_alone_is_a_conversation_to_regenerate_and_text_is_a_document(
    tmp_path: Path,
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "why?"}, {"text": "Once."}])
    assert load_conversations(source) == [
        {"messages": [{"role": "user", "content": "why?"}], "domain": "all"},
        {"messages": [{"role": "text", "content": "Once."}], "domain": "all"},
    ]


ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
}
ADD_TOOL = {"type": "function", "function": ADD}
ADD_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [ADD_CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CALLED, "tools": [ADD_TOOL]},
        {"messages": CALLED, "tools": json.dumps([ADD])},
        {
            "messages": CALLED,
            "tools": [json.dumps({"function": dict(reversed(ADD.items())), "type": "function"})],
        },
        {
            "messages": [
                CALLED[0],
                {
                    **CALLED[1],
                    "content": None,
                    "tool_calls": [
                        {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
                    ],
                },
                *CALLED[2:],
            ],
            "tools": [ADD_TOOL],
        },
        {
            "messages": [
                CALLED[0],
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "add", "arguments": '{"a": 1}'},
                },
                {"role": "function", "content": "2"},
                CALLED[3],
            ],
            "tools": [ADD],
        },
        {
            "conversations": [
                {"from": "human", "value": "1 + 1?"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "It is 2."},
            ],
            "tools": json.dumps([ADD]),
        },
    ],
    ids=["chat", "bare-json", "list-of-json", "arguments-as-text", "function-call", "sharegpt"],
)
def test_every_dialect_of_tool_calls_reads_as_the_same_conversation(
    tmp_path: Path, row: dict
) -> None:
    expected = [{"messages": CALLED, "domain": "all", "tools": [ADD_TOOL]}]
    assert load_conversations(write_jsonl(tmp_path / "a.jsonl", [row])) == expected
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "a.parquet")
    assert load_conversations(str(tmp_path / "a.parquet")) == expected


def test_fields_of_other_calls_that_a_table_adds_are_no_arguments(tmp_path: Path) -> None:
    other = {"type": "function", "function": {"name": "sub", "arguments": {"b": 2}}}
    messages = [CALLED[0], {**CALLED[1], "tool_calls": [ADD_CALL, other]}]
    datasets.Dataset.from_list([{"messages": messages}]).to_parquet(tmp_path / "a.parquet")
    (found,) = load_conversations(str(tmp_path / "a.parquet"))
    assert found["messages"][1]["tool_calls"] == [ADD_CALL, other]


def test_rows_may_differ_in_their_fields(tmp_path: Path) -> None:
    rows = [
        {"messages": QUESTION_AND_ANSWER},
        {"messages": QUESTION_AND_ANSWER, "cut": True, "domain": "code"},
    ]
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
    # the whole standard library would take 30 s
    monkeypatch.setattr("redraft.distill.data.corpus.sysconfig.get_path", lambda _: str(tmp_path))
    assert {c["domain"] for c in load_conversations("stdlib")} == {"code", "prose"}


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "\nso", "reasoning": "hm"},
        {"content": "so", "reasoning_content": "hm"},
        {"content": "so", "thinking": "hm"},
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}]},
        {
            "content": [
                {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                {"type": "text", "text": "so"},
            ]
        },
    ],
)
def test_reasoning_that_a_server_parsed_out_is_kept_beside_the_answer(fields: dict) -> None:
    message = {"role": "assistant", "content": "so", "reasoning": "hm"}
    assert read_message({"role": "assistant", **fields}) == message
    assert conversation_hash([message]) != conversation_hash(
        [{"role": "assistant", "content": "so"}]
    )


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", r"a\.jsonl [a-z ]+$"),
        ('{"id": 1, "title": "a"}', "line 1.* id, title: .*`messages`"),
        ('\n{"prompt":', r"JSON.*line 2: .*character 10"),
        ('{"messages": 5}', r"line 1: .*\bint\b"),
        ('{"messages": []}', r"messages \(.*line 1\)$"),
        ('{"messages": ["hello"]}', r"\brole\b.*line 1"),
        ('{"messages": [{"content": "a"}]}', r"\brole\b.*line 1"),
        ('{"conversations": [{"from": "alien", "value": "a"}]}', "line 1.*'alien'"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            r"line 1.* type image\b",
        ),
        ('{"messages": [{"role": "user", "content": 0.5}]}', r"content.*line 1: .*\bfloat\b"),
        ('{"messages": null}', "line 1.*`messages`"),
        ('{"prompt": "\\ud83d"}', "surrogate"),
        ('{"prompt": "a", "tools": "a hammer"}', r"definition.*JSON.*character 0"),
        ('{"prompt": "a", "tools": [{"a": 1}]}', "function definition.*line 1"),
        ('{"prompt": "a", "tools": 5}', r"\btools\b.*line 1: .*\bint\b"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", '
            '"arguments": "{"}}]}]}',
            r"call.*JSON.*character 1",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": '
            '"{}"}}]}]}',
            r"\bname or arguments\b",
        ),
        ("[1]", r"object.*row 1"),
        ('{"prompt": ' + 5000 * "[", r"readable.*line 1"),
        ('{"prompt": ' + 5000 * "1" + "}", r"readable.*line 1"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_in_one_line_if_there_is_no_other(
    tmp_path: Path, content: str, complaint: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=complaint) as error:
        load_conversations(str(path))
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    path.write_text('{"prompt": "good"}\n' + content)
    assert len(load_conversations(str(path))) == 1
    if content:
        with pytest.raises(ValueError, match=r"a\.jsonl, line [23]: .*\bstrict\b"):
            load_conversations(str(path), strict=True)


def test_unusable_rows_are_skipped_and_counted_by_reason_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"prompt": "a"}\n{"prompt"\n\xff\n{"prompt": 7.5}\n5\n{"prompt"\n{"text": "b"}\n'
    )
    assert len(load_conversations(str(path))) == 2
    columns, line = capsys.readouterr().out.splitlines()
    assert "columns read: prompt, text; not read: none" in columns
    assert "a.jsonl: 7 rows read, 2 used, 5 skipped: 2 not JSON (first: line 2: " in line
    assert "1 not UTF-8 (first: line 3" in line
    assert "1 with a column prompt that is neither text nor a list (first: line 4" in line
    assert "1 not a JSON object (first: line 5)" in line


SHAREGPT = [
    {
        "id": "a_0",
        "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
    },
    {
        "id": "a_1",
        "conversations": [{"from": "gpt", "value": "and"}, {"from": "human", "value": "so?"}],
    },
    {"id": "b_0", "conversations": []},
]
SHAREGPT_READ = [
    {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
        "domain": "all",
    },
    {
        "messages": [{"role": "assistant", "content": "and"}, {"role": "user", "content": "so?"}],
        "domain": "all",
    },
]


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["list.json", "lines.json", "lines.jsonl", "lines.ndjson"])
def test_sharegpt_is_read_as_a_list_or_as_lines_compressed_or_not(
    tmp_path: Path, name: str, compression: str
) -> None:
    text = (
        json.dumps(SHAREGPT, indent=1)
        if name == "list.json"
        else "\n".join(map(json.dumps, SHAREGPT))
    )
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[compression]
    path = tmp_path / f"{name}{compression}"
    path.write_bytes(compress(text.encode()))
    assert load_conversations(str(path)) == SHAREGPT_READ


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "text/a.txt"])
def test_a_cut_archive_is_named_wherever_it_ends(
    tmp_path: Path, name: str, compress: Callable[[bytes], bytes]
) -> None:
    suffix = {gzip.compress: ".gz", zstandard.compress: ".zst"}[compress]
    path = tmp_path / f"{name}{suffix}"
    path.parent.mkdir(exist_ok=True)
    # Two frames, of which the first may be read whole.
    lines = [json.dumps({**SHAREGPT[0], "id": i}).encode() + b"\n" for i in range(9)]
    first, second = compress(b"".join(lines[:5])), compress(b"".join(lines[5:]))
    whole = first + second
    source = str(path.parent if "text" in name else path)
    path.write_bytes(whole)
    assert len(load_conversations(source)) == (1 if "text" in name else 9)
    for size in (0, 1, len(first) // 2, len(first) + 1, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=re.escape(path.name)):
            load_conversations(source)


def test_a_cut_list_and_a_cut_saved_data_set_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(SHAREGPT)[:-9])
    with pytest.raises(ValueError, match=r"a\.json.*JSON"):
        load_conversations(str(tmp_path / "a.json"))
    # Between two batches, pyarrow reads those before as the whole.
    datasets.Dataset.from_list([{"prompt": "a"}] * 3).save_to_disk(tmp_path / "saved")
    assert len(load_conversations(str(tmp_path / "saved"))) == 3
    (data,) = (tmp_path / "saved").glob("*.arrow")
    data.write_bytes(data.read_bytes()[:-8])
    assert len(datasets.load_from_disk(str(tmp_path / "saved"))) == 3
    with pytest.raises(ValueError, match=re.escape(data.name)):
        load_conversations(str(tmp_path / "saved"))


def test_a_folder_of_data_files_is_read_whole_with_its_folders_as_domains(tmp_path: Path) -> None:
    for folder in ("code", ".cache"):
        (tmp_path / folder).mkdir()
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "one"}])
    (tmp_path / "code" / "b.jsonl.gz").write_bytes(
        gzip.compress(b'{"prompt": "two"}\n{"prompt": "3", "domain": "c"}')
    )
    write_jsonl(tmp_path / ".cache" / "c.jsonl", [{"prompt": "hidden"}])
    (tmp_path / "README.md").write_text("a card of the data set, not a document")
    found = [(c["messages"][0]["content"], c["domain"]) for c in load_conversations(str(tmp_path))]
    assert found == [("one", "all"), ("two", "code"), ("3", "c")]


def read_questions(folder: Path, split: str = "train") -> list[str]:
    return [c["messages"][0]["content"] for c in load_conversations(str(folder), split=split)]


def write_files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / name, [{"prompt": name}])


@pytest.mark.parametrize(
    ("names", "split", "read"),
    [
        (["train.jsonl", "test.jsonl", "valid.jsonl"], "train", ["train.jsonl"]),
        (["train.jsonl", "test.jsonl", "valid.jsonl"], "validation", ["valid.jsonl"]),
        (["more.jsonl", "my_train.jsonl", "x-eval.jsonl"], "train", ["more.jsonl", "my_train.jsonl"]),
        (["data/train-0-of-2.jsonl", "data/test-0-of-1.jsonl"], "test", ["data/test-0-of-1.jsonl"]),
        (["train/a.jsonl", "train/law/b.jsonl", "dev/c.jsonl"], "train", ["train/a.jsonl", "train/law/b.jsonl"]),
        (["train_sft-0.jsonl", "train_gen-0.jsonl"], "train_sft", ["train_sft-0.jsonl"]),
        (["more.jsonl", "test.jsonl", "train.jsonl"], "train_sft", ["more.jsonl", "train.jsonl"]),
        (["test.jsonl", "train.jsonl"], "test_sft", ["test.jsonl"]),
        (["latest.jsonl", "testimony.jsonl"], "train", ["latest.jsonl", "testimony.jsonl"]),
        (["test.jsonl"], "train", ["test.jsonl"]),
    ],
)  # fmt: skip
def test_a_folder_is_read_by_split_as_its_names_say(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    names: list[str],
    split: str,
    read: list[str],
) -> None:
    write_files(tmp_path, *names)
    assert read_questions(tmp_path, split) == read
    said = "other splits not read" in capsys.readouterr().out
    assert said == (len(read) < len(names))
    identity = identify_conversations(str(tmp_path), split)
    assert [name for name, *_ in identity] == read


def test_the_folder_of_a_split_is_not_a_domain(tmp_path: Path) -> None:
    write_files(tmp_path, "train/law/a.jsonl", "train/b.jsonl")
    assert [c["domain"] for c in load_conversations(str(tmp_path))] == ["all", "law"]


@pytest.mark.parametrize(
    "files",
    [
        "\n  - split: train\n    path: [a.jsonl, b/*.jsonl]\n  - split: test\n    path: z.jsonl",
        "\n    train: [a.jsonl, b/*.jsonl]\n    test: z.jsonl",
    ],
)
def test_a_folder_is_read_by_split_as_its_card_says(tmp_path: Path, files: str) -> None:
    write_files(tmp_path, "a.jsonl", "b/test.jsonl", "z.jsonl", "draft.jsonl")
    card = f"---\nconfigs:\n- config_name: one\n  data_files:{files}\n---\n# Title\n"
    (tmp_path / "README.md").write_text(card)
    assert read_questions(tmp_path) == ["a.jsonl", "b/test.jsonl"]
    for split in ("test", "test_sft"):
        assert read_questions(tmp_path, split) == ["z.jsonl"]
    with pytest.raises(ValueError, match=r"no split dev, only train, test"):
        load_conversations(str(tmp_path), split="dev")
    (tmp_path / "README.md").write_text(
        card.replace("# Title", "").replace(
            "configs:", "configs:\n- config_name: two\n  data_files: a.jsonl"
        )
    )
    with pytest.raises(ValueError, match=r"the configs two, one.*:CONFIG"):
        load_conversations(str(tmp_path))


def test_links_to_files_and_folders_are_read_and_a_broken_one_is_named(tmp_path: Path) -> None:
    write_files(tmp_path / "elsewhere", "a.jsonl", "b.jsonl")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "c.jsonl").symlink_to(tmp_path / "elsewhere" / "a.jsonl")
    (folder / "again").symlink_to(folder)
    assert read_questions(folder) == ["a.jsonl", "a.jsonl", "b.jsonl"]
    assert len(identify_conversations(str(folder), "train")) == 3
    (folder / "d.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(FileNotFoundError, match=r"d\.jsonl.*gone\.jsonl"):
        load_conversations(str(folder))


def test_the_input_of_an_alpaca_row_follows_the_instruction_and_text_parts_are_joined(
    tmp_path: Path,
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two", "image_url": None}]
    rows = [
        {"instruction": "Translate.", "input": "un", "output": "one", "text": "the whole prompt"},
        {"messages": [{"role": "user", "content": parts}]},
    ]
    first, second = load_conversations(write_jsonl(tmp_path / "a.jsonl", rows))
    assert [m["content"] for m in first["messages"]] == ["Translate.\n\nun", "one"]
    assert second["messages"][0]["content"] == "one\ntwo"


def test_a_missing_file_and_a_broken_parquet_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        load_conversations(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "a.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(ValueError, match=r"a\.parquet.*magic"):
        load_conversations(str(tmp_path / "a.parquet"))


def test_a_name_that_is_nothing_here_nor_on_the_hub_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="nosuch/thing"):
        load_conversations("nosuch/thing")


def test_the_only_split_of_its_kind_is_read_and_another_is_named_with_its_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (folder := tmp_path / "data").mkdir()
    for name, count in (("train", 2), ("test", 3)):
        write_jsonl(folder / f"{name}.jsonl", [{"prompt": name}] * count)
    # The library reads a folder as it reads a data set of the hub.
    assert len(_load_hub(str(folder), "train_sft")) == 2
    assert len(_load_hub(str(folder), "train[:1]")) == 1
    with pytest.raises(ValueError, match=r"train_sft\[:1\]|Unknown split"):
        _load_hub(str(folder), "train_sft[:1]")
    with pytest.raises(SettingError, match=r"has no split other, only train, test: .*\bsplit$"):
        _load_hub(str(folder), "other")
    rows = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "saved")
    for split, name in (("train_sft", "train"), ("validation", None), ("test", "test")):
        refused = (
            pytest.raises(SettingError, match="has no split") if name is None else nullcontext()
        )
        with refused:
            (found,) = load_conversations(str(tmp_path / "saved"), split=split)
            assert found["messages"][0]["content"] == name


def test_the_split_is_by_content_alone_and_near_its_fraction() -> None:
    conversations = [
        {"messages": [{"role": "user", "content": str(i)}], "domain": "all"} for i in range(4000)
    ]
    train, held_out = split_held_out(conversations, 0.1)
    assert len(train) + len(held_out) == 4000
    assert 330 < len(held_out) < 470  # 400 +- 3.7 standard deviations
    more = split_held_out(conversations, 0.2)[1]
    assert all(
        conversation in more for conversation in held_out
    )  # a larger fraction keeps what was held out
    assert split_held_out(conversations, 0.0)[1] == []


def test_the_hash_depends_on_roles_and_contents_only() -> None:
    message = {"role": "user", "content": "é"}
    assert conversation_hash([message]) == conversation_hash([{**message, "id": "7"}])
    assert conversation_hash([message]) != conversation_hash([{**message, "role": "assistant"}])


def make_chat(question: str, answer: str, system: str = "") -> dict:
    start = [{"role": "system", "content": system}] if system else []
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": [*start, *chat], "domain": "all"}


def test_all_answers_to_one_question_are_on_one_side() -> None:
    conversations = [
        make_chat(f"question {i % 200}", f"answer {i}", "s" * (i % 3)) for i in range(2000)
    ]
    sides = [
        {c["messages"][-2]["content"] for c in part} for part in split_held_out(conversations, 0.3)
    ]
    assert len(sides[0]) + len(sides[1]) == 200
    assert sides[1]
    assert not sides[0] & sides[1]


def test_repeated_conversations_and_held_out_answers_are_taken_out_of_training() -> None:
    copied, short = "a long answer that a scraper found on two pages " * 3, "Yes."
    held_out = [
        make_chat("h1", copied),
        make_chat("h2", short),
        make_chat("h3", "an answer of its own " * 9),
    ]
    train = [
        make_chat("t1", f" {copied}\n"),
        make_chat("t2", short),
        make_chat("t3", short),
        make_chat("t2", short),
    ]
    kept, overlap = remove_overlap(train, held_out)
    assert kept == [train[1], train[2]]
    assert overlap == Overlap(held_out_answers=2, shared_answers=1, repeated=1, sharing=1)
    assert str(overlap).startswith(
        "1 of 2 held-out answers also occur word for word in training; removed 1 conversations that contain them,"
    )


def test_the_split_of_the_standard_library_is_that_of_the_small_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights in tests/assets were trained on one side of a split by whole conversations."""
    for i in range(60):
        (tmp_path / f"m{i}.py").write_text(f'"""{f"About {i}. " * 12}"""\n')
    monkeypatch.setattr("redraft.distill.data.corpus.sysconfig.get_path", lambda _: str(tmp_path))
    conversations = load_conversations("stdlib")
    _, held_out = split_held_out(conversations, 0.2)
    by_whole = [
        c for c in conversations if int(conversation_hash(c["messages"])[:16], 16) < 0.2 * 2**64
    ]
    assert held_out == by_whole != []


def test_functions_of_the_library_become_questions(tmp_path: Path) -> None:
    source = (
        'def double(x, by=2):\n    """Twice.\n\n    And more.\n    """\n    return x * by\n\n'
        "def bare(x):\n    return x\n\n"
        'class A:\n    def only(self):\n        """A docstring and no body."""\n'
    )
    (tmp_path / "one.py").write_text(source)
    (tmp_path / "two.py").write_text(source)  # the same question again
    (question,) = function_questions(tmp_path)
    assert question["messages"] == [
        {
            "role": "user",
            "content": "Complete this Python function:\n\n```python\ndef double(x, by=2):\n"
            '    """Twice.\n\n    And more.\n    """\n```',
        }
    ]


def test_made_data_have_an_identity_of_their_own() -> None:
    ours = {
        source: identify_conversations(source, "train") for source in ("stdlib", "stdlib-functions")
    }
    assert ours == {
        source: [source, sys.version] for source in ours
    }  # and no data set on the hub is asked for


def test_the_first_functions_are_a_draw_from_all_modules(tmp_path: Path) -> None:
    for module in ("a", "b"):
        body = "".join(f'def {module}{i}():\n    """Text."""\n    pass\n' for i in range(20))
        (tmp_path / f"{module}.py").write_text(body)
    texts = [str(question["messages"][0]["content"]) for question in function_questions(tmp_path)]  # type: ignore[index]
    assert 0 < sum("def a" in text for text in texts[:20]) < 20
    long = completion_question("def f():", "line\n" * 400)
    assert MAX_DOCSTRING_CHARS - 10 < long.count("line") * 5 <= MAX_DOCSTRING_CHARS
