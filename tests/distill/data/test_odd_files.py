"""Data files as people have them: other encodings, other content than the name says."""

import datetime
import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from redraft.distill.data.conversations import load_conversations

ROWS = [{"prompt": f"Question {i}?", "completion": f"The answer is {i}."} for i in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
MARK = "\ufeff"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n"


def write(path: Path, content: bytes) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return str(path)


def answers(source: str, split: str = "train") -> list[str]:
    conversations = load_conversations(source, split=split)
    return [conversation["messages"][-1]["content"] for conversation in conversations]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
@pytest.mark.parametrize(("name", "text"), [("a.jsonl", LINES), ("a.json", json.dumps(ROWS))])
def test_text_in_another_encoding_is_refused_whole_with_the_command_that_converts_it(
    tmp_path: Path, name: str, text: str, encoding: str
) -> None:
    with pytest.raises(ValueError, match=r"a\.json.* UTF-16 .*iconv"):
        load_conversations(write(tmp_path / name, text.encode(encoding)))


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    wanted = [row["completion"] for row in ROWS]
    for name, text in (
        ("a.jsonl", LINES),
        ("b.jsonl", json.dumps(ROWS)),
        ("c.json", json.dumps(ROWS)),
    ):
        assert answers(write(tmp_path / name, (MARK + text).encode())) == wanted
    write(tmp_path / "texts" / "a.txt", f"{MARK}A document.".encode())
    assert answers(str(tmp_path / "texts")) == ["A document."]
    with pytest.raises(ValueError, match=r"d\.json.*truncated"):
        load_conversations(write(tmp_path / "d.json", (MARK + json.dumps(ROWS)[:-9]).encode()))


def test_a_list_under_the_name_of_lines_is_read_as_a_list(tmp_path: Path) -> None:
    wanted = [row["completion"] for row in ROWS]
    for text in (json.dumps(ROWS), json.dumps(ROWS, indent=2), f"\n  {json.dumps(ROWS)}\n"):
        assert answers(write(tmp_path / "a.jsonl", text.encode())) == wanted
    # A first line that is a list does not make a list of the file.
    assert answers(write(tmp_path / "a.jsonl", f"[1, 2]\n{LINES}".encode())) == wanted


def test_the_content_says_whether_a_file_is_compressed(tmp_path: Path) -> None:
    wanted = [row["completion"] for row in ROWS]
    for name, content in (
        ("unpacked.jsonl.gz", LINES.encode()),
        ("unpacked.json.zst", json.dumps(ROWS).encode()),
        ("marked.jsonl.gz", f"{MARK}\n{LINES}".encode()),
        ("packed.jsonl", gzip.compress(LINES.encode())),
        ("packed.json", zstandard.compress(json.dumps(ROWS).encode())),
        ("other.jsonl.gz", zstandard.compress(LINES.encode())),
    ):
        assert answers(write(tmp_path / name, content)) == wanted
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is corrupt"):
        load_conversations(write(tmp_path / "a.jsonl.gz", b"<html>"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.parquet", "texts/a.txt"])
def test_a_pointer_of_git_lfs_is_no_data(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, POINTER)
    with pytest.raises(ValueError, match=r"a\.\S+ is a Git LFS pointer.*git lfs pull"):
        load_conversations(str(tmp_path / "texts") if "texts" in name else path)


def test_an_empty_shard_and_a_map_are_read_from_parquet(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = pyarrow.map_(pyarrow.string(), pyarrow.string())
    messages = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a map"}]]
    table = pyarrow.table({"messages": pyarrow.array(messages, pyarrow.list_(message))})
    pyarrow.parquet.write_table(table, tmp_path / "train-00000-of-00002.parquet")
    pyarrow.parquet.write_table(table[:0], tmp_path / "train-00001-of-00002.parquet")
    assert answers(str(tmp_path)) == ["a map"]
    with pytest.raises(ValueError, match="contains no conversation"):
        load_conversations(str(tmp_path / "train-00001-of-00002.parquet"))
    whole = (tmp_path / "train-00000-of-00002.parquet").read_bytes()
    capfd.readouterr()
    with pytest.raises(ValueError, match=r"cut\.parquet cannot be read as parquet"):
        load_conversations(write(tmp_path / "cut.parquet", whole[:-9]))
    assert capfd.readouterr() == ("", "")  # the error is the only line


def test_a_date_of_a_table_in_a_call_costs_its_row(tmp_path: Path) -> None:
    function = {"name": "book", "arguments": {"on": datetime.date(2026, 11, 30)}}
    called = {"role": "assistant", "tool_calls": [{"function": function}]}
    rows = [{"messages": [{"role": "user", "content": "Book it."}, called]}] * 2
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(
        ValueError, match=r"2 with a value that JSON cannot represent .*row 1.*date"
    ):
        load_conversations(str(tmp_path / "a.parquet"))


def test_shards_with_a_count_name_their_split_exactly(tmp_path: Path) -> None:
    for split in ("train_sft", "train_gen", "test_sft"):
        row = {"prompt": "q", "completion": split}
        write(tmp_path / f"{split}-00000-of-00001.jsonl", json.dumps(row).encode())
    assert answers(str(tmp_path), "train_gen") == ["train_gen"]
    with pytest.raises(
        ValueError, match=r"no split train, only .*train_gen.*: choose one with split"
    ):
        load_conversations(str(tmp_path))
    (tmp_path / "train_gen-00000-of-00001.jsonl").unlink()
    assert answers(str(tmp_path)) == ["train_sft"]


@pytest.mark.parametrize("pattern", ["/data/train.jsonl", ""])
def test_a_card_that_declares_no_path_in_its_folder_is_named(tmp_path: Path, pattern: str) -> None:
    write(tmp_path / "a.jsonl", LINES.encode())
    card = f"---\nconfigs:\n- data_files: ['a.jsonl', '{pattern}']\n---\n"
    write(tmp_path / "README.md", card.encode())
    with pytest.raises(ValueError, match=r"README\.md declares .*not a path"):
        load_conversations(str(tmp_path))


@pytest.mark.parametrize("source", ["https://host/data/train.jsonl", "s3://bucket/train.parquet"])
def test_a_web_address_is_refused_as_one(source: str) -> None:
    with pytest.raises(ValueError, match="is a web address: download"):
        load_conversations(source)


def test_the_channels_of_gpt_oss_are_a_thought_a_call_and_an_answer(tmp_path: Path) -> None:
    def text(words: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": words}]

    call = {"channel": "commentary", "recipient": "functions.add", "content": text('{"a": 1}')}
    messages = [
        {"role": "user", "content": text("1 + 1?")},
        {"role": "assistant", "channel": "analysis", "content": text("I add.")},
        {"role": "assistant", **call},
        {"role": "tool", "name": "functions.add", "recipient": "assistant", "content": text("2")},
        {"role": "assistant", "channel": "analysis", "content": text("So 2."), "recipient": "all"},
        {"role": "assistant", "channel": "final", "content": text("It is 2.")},
    ]
    source = write(tmp_path / "a.jsonl", json.dumps({"messages": messages}).encode())
    ((_, called, _, answer),) = (c["messages"] for c in load_conversations(source))
    function = {"name": "add", "arguments": {"a": 1}}
    assert (called["content"], called["reasoning"]) == ("", "I add.")
    assert called["tool_calls"] == [{"type": "function", "function": function}]
    assert answer == {"role": "assistant", "content": "It is 2.", "reasoning": "So 2."}


def test_a_call_of_gpt_oss_keeps_its_weight_and_reason_and_a_thought_its_calls(
    tmp_path: Path,
) -> None:
    call = {"recipient": "functions.add", "content": "{}", "weight": 0, "finish_reason": "length"}
    listed = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    messages = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "channel": "commentary", **call},
        {"role": "user", "content": "Again."},
        {"role": "assistant", "channel": "analysis", "content": "I add.", "tool_calls": listed},
    ]
    source = write(tmp_path / "a.jsonl", json.dumps({"messages": messages}).encode())
    ((_, unlearned, _, called),) = (c["messages"] for c in load_conversations(source))
    assert unlearned["tool_calls"][0]["function"]["name"] == "add"
    assert (unlearned["unlearned"], unlearned["cut"]) == (True, True)
    assert (called["reasoning"], called["content"]) == ("I add.", "")
    assert called["tool_calls"] == listed
