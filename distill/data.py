"""Conversations in, from wherever they are kept, and which of them are held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import datasets

from distill.corpus import stdlib_conversations

Message = dict[str, str]
"""`role` and `content`."""

TOOL_ROLES = ("tool", "function", "function_call", "observation")
"""Of calls and of what they return."""

TEXT_ROLE = "text"
"""Role of the only message of a plain document: no chat template, every token of it is a label."""

TEXT_SUFFIXES = {".txt", ".md"}

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}


class Conversation(TypedDict):
    messages: list[Message]
    domain: str
    cut: NotRequired[bool]
    """The last message stopped at a length limit, so no end of turn follows it."""


def conversation_hash(messages: Sequence[Message]) -> str:
    """SHA-256 (hex) of the roles and contents, whatever else a row carries: the identity of a conversation."""
    canonical = json.dumps([[m["role"], m["content"]] for m in messages], ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def is_held_out(messages: Sequence[Message], fraction: float) -> bool:
    """True for `fraction` of all conversations: decided by their hash alone, so by every process alike, for ever."""
    return int(conversation_hash(messages)[:16], 16) < fraction * 2**64


def split_held_out(
    conversations: Iterable[Conversation], fraction: float
) -> tuple[list[Conversation], list[Conversation]]:
    """(train, held out), by `is_held_out`."""
    train: list[Conversation] = []
    held_out: list[Conversation] = []
    for conversation in conversations:
        (held_out if is_held_out(conversation["messages"], fraction) else train).append(conversation)
    return train, held_out


def load_conversations(source: str, *, split: str = "train", domain_column: str | None = None) -> list[Conversation]:
    """Every conversation of `source`, which is one of

    - `stdlib`: made from the Python standard library's sources;
    - a `.jsonl` or `.parquet` file, or the name of a data set on the hub (its `split`), with the columns
      `messages` (role, content), `conversations` (ShareGPT: from, value), `prompt` with `completion` or `response`,
      `prompt` alone, or `text`; and `domain_column`, by default `domain` where there is one;
    - a folder of `.txt` and `.md` files: each is one document, its domain the first folder under `source`.

    Raises: FileNotFoundError for a missing file; ValueError for an empty source, columns that are none of these, a row
    that does not read as one of them, or one without the domain column that was named.
    """
    path = Path(source)
    if source == "stdlib":
        conversations = [cast(Conversation, conversation) for conversation in stdlib_conversations()]
    elif path.is_dir():
        conversations = _text_folder(path)
    else:
        conversations = _from_rows(_rows(source, split), source, domain_column)
    if not conversations:
        raise ValueError(f"{source} holds no conversation")
    return conversations


def is_plain_text(conversation: Conversation) -> bool:
    return [message["role"] for message in conversation["messages"]] == [TEXT_ROLE]


def message_text(message: dict[str, Any]) -> str:
    """A message's content, with the reasoning that a server's parser took out of it put back in front.

    Raises: ValueError where the content is not text.
    """
    content = message.get("content") or ""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if not isinstance(content, str):
        raise ValueError(f"a message's content is {type(content).__name__}, not text")
    return f"<think>\n{reasoning.strip()}\n</think>\n\n{content.lstrip()}" if reasoning else content


def _text_folder(folder: Path) -> list[Conversation]:
    conversations: list[Conversation] = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix in TEXT_SUFFIXES and p.is_file()):
        below = path.relative_to(folder).parts
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
        if text.strip():
            domain = below[0] if len(below) > 1 else "all"
            conversations.append({"messages": [{"role": TEXT_ROLE, "content": text}], "domain": domain})
    return conversations


def _rows(source: str, split: str) -> Iterable[dict[str, Any]]:
    path = Path(source)
    if path.suffix not in {".jsonl", ".parquet"}:
        return _hub_rows(source, split)
    if not path.exists():
        raise FileNotFoundError(f"{source}: no such file")
    if path.suffix == ".jsonl":
        return _jsonl_rows(path)
    return _parquet_rows(path)


def _jsonl_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read here and not by `datasets`, which fails on a field that the first rows do not have."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line) if line.strip() else None
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg} at character {error.pos})") from None
            if row is None:
                continue
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: not a JSON object")
            yield row


def _parquet_rows(path: Path) -> Iterable[dict[str, Any]]:
    try:
        table: Iterable[dict[str, Any]] = datasets.load_dataset("parquet", data_files=str(path), split="train")
        return table
    except (datasets.exceptions.DatasetsError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {_first_line(error)}") from error


def _hub_rows(name: str, split: str) -> Iterable[dict[str, Any]]:
    try:
        table: Iterable[dict[str, Any]] = datasets.load_dataset(name, split=split)
        return table
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise ValueError(
            f"{name} is no .jsonl or .parquet file, no folder, and not loadable from the hub: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error.__cause__ or error).splitlines()[0]


def _from_rows(rows: Iterable[dict[str, Any]], source: str, domain_column: str | None) -> list[Conversation]:
    conversations: list[Conversation] = []
    num_with_tools = 0
    for number, row in enumerate(rows, 1):
        read = _reader(set(row), source)
        if domain_column is not None and row.get(domain_column) is None:
            raise ValueError(
                f"{source}, row {number} has no column {domain_column!r}, it has {', '.join(sorted(row))}: "
                "name the one that holds the domain"
            )
        try:
            if _calls_tools(row):
                num_with_tools += 1
                continue
            conversation: Conversation = {
                "messages": read(row),
                "domain": str(row.get(domain_column or "domain") or "all"),
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{source}, row {number}: not a conversation ({type(error).__name__}: {error})") from None
        if row.get("cut"):
            conversation["cut"] = True
        conversations.append(conversation)
    if num_with_tools:
        print(f"{source}: {num_with_tools:,} conversations with tools are left out: their calls would not be rendered")
    return conversations


def _calls_tools(row: dict[str, Any]) -> bool:
    """A target sees the tools' definitions and writes calls, which messages of text alone do not hold."""
    messages = [m for column in ("messages", "conversations") for m in row.get(column) or () if isinstance(m, dict)]
    is_tool = any(m.get("tool_calls") or (m.get("role") or m.get("from")) in TOOL_ROLES for m in messages)
    return bool(row.get("tools")) or is_tool


def _reader(columns: set[str], source: str) -> Callable[[dict[str, Any]], list[Message]]:
    """How a row with these columns reads as messages; the first shape that fits."""
    for column in ("messages", "conversations"):
        if column in columns:
            return lambda row: _messages(row[column], "user")
    for column in ("completion", "response"):
        if {"prompt", column} <= columns:
            return lambda row: _messages(row["prompt"], "user") + _messages(row[column], "assistant")
    for column, role in (("prompt", "user"), ("text", TEXT_ROLE)):
        if column in columns:
            return lambda row: _messages(row[column], role)
    raise ValueError(
        f"{source} has the columns {', '.join(sorted(columns))}: expected `messages`, `conversations`, `prompt` "
        f"(with `completion` or `response`) or `text`"
    )


def _messages(value: str | list[dict[str, Any]], role: str) -> list[Message]:
    """Messages from a list of them in either dialect, or from the bare text of one message of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [_message(raw) for raw in value]


def _message(raw: dict[str, Any]) -> Message:
    if raw.get("role"):
        return {"role": raw["role"], "content": message_text(raw)}
    return {"role": SHAREGPT_ROLES.get(raw["from"], raw["from"]), "content": message_text({"content": raw["value"]})}
