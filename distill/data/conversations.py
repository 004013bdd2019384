"""Read conversations from files, folders or the hub, and split off a held-out part."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from redraft.distill.data.columns import Columns, RowReader
from redraft.distill.data.corpus import function_questions, stdlib_conversations
from redraft.distill.data.messages import (
    TEXT_ROLE,
    Message,
    Tool,
    conversation_hash,
    require_json,
)
from redraft.distill.data.rows import (
    TABLES,
    TEXTS,
    Row,
    UnusableRowError,
    count_others,
    find_files,
    folder_domain,
    identify_source,
    is_saved,
    open_plain,
    read_rows,
)
from redraft.distill.data.sessions import StoredTurn
from redraft.distill.data.splits import choose_files
from redraft.distill.data.template import Arguments
from redraft.files.setting_error import SettingError

MADE = {
    "stdlib": stdlib_conversations,
    "stdlib-functions": function_questions,
}  # sources without a file
# An answer longer than this that occurs in two conversations is a copy, not a coincidence.
MIN_SHARED_CHARS = 80


class Conversation(TypedDict):
    messages: list[Message]
    domain: str
    cut: NotRequired[bool]
    """Whether the last message was truncated at a length limit, so that no end of turn follows."""
    tools: NotRequired[list[Tool]]
    arguments: NotRequired[Arguments]
    """Template arguments of the request, if the data contains them. Empty if it had none."""
    turns: NotRequired[list[StoredTurn]]
    """Token ids of the last answers and their prompts, as returned by the server."""
    split_key: NotRequired[str]
    """Hash (hex) used for the split instead of the hash of the first user message."""


def split_held_out(
    conversations: Iterable[Conversation], fraction: float
) -> tuple[list[Conversation], list[Conversation]]:
    """Split the conversations into (train, held out).

    A `fraction` of all first questions is held out, together with every conversation that begins
    with one of them. Only the questions' hashes decide, so every process holds out the same
    conversations.
    """
    train: list[Conversation] = []
    held_out: list[Conversation] = []
    for conversation in conversations:
        # 16 hex digits are 64 bits.
        is_out = int(split_key(conversation)[:16], 16) < fraction * 2**64
        (held_out if is_out else train).append(conversation)
    return train, held_out


def split_key(conversation: Conversation) -> str:
    """Return the hash (hex) of the first user message, for `split_held_out`.

    Without a user message, it is the hash of the first message. A conversation with a `split_key`
    uses that key instead.
    """
    if "split_key" in conversation:
        return conversation["split_key"]
    messages = conversation["messages"]
    return conversation_hash([m for m in messages if m["role"] == "user"][:1] or messages[:1])


@dataclass(kw_only=True)
class Overlap:
    """Counts of text that is not trained on, because it is repeated or is also held out."""

    held_out_answers: int = 0
    """Number of distinct held-out answers longer than MIN_SHARED_CHARS."""
    shared_answers: int = 0
    """Number of held-out answers that also occur word for word in the training data."""
    repeated: int = 0
    """Number of training conversations removed because they equal an earlier one."""
    sharing: int = 0
    """Number of training conversations removed because they contain a held-out answer."""

    def __str__(self) -> str:
        found = (
            f"{self.shared_answers:,} of {self.held_out_answers:,} held-out answers also occur "
            "word for word in training"
        )
        return (
            f"{found}; removed {self.sharing:,} conversations that contain them, and "
            f"{self.repeated:,} repeated conversations"
        )


def remove_overlap(
    train: Sequence[Conversation], held_out: Sequence[Conversation]
) -> tuple[list[Conversation], Overlap]:
    """Remove repetitions and held-out answers from the training conversations.

    Returns the remaining conversations and the counts. Short answers ("Yes."), which conversations
    share by chance, are kept.
    """
    held_out_texts = {text for conversation in held_out for text in _answers(conversation)}
    overlap = Overlap(held_out_answers=len(held_out_texts))
    shared: set[str] = set()
    seen: set[str] = set()
    kept: list[Conversation] = []
    for conversation in train:
        key = conversation_hash(conversation["messages"])
        common = held_out_texts.intersection(_answers(conversation))
        if common:
            shared |= common
            overlap.sharing += 1
        elif key in seen:
            overlap.repeated += 1
        else:
            kept.append(conversation)
        seen.add(key)
    overlap.shared_answers = len(shared)
    return kept, overlap


def _answers(conversation: Conversation) -> Iterator[str]:
    for message in conversation["messages"]:
        text = message["content"].strip()
        if message["role"] in ("assistant", TEXT_ROLE) and len(text) > MIN_SHARED_CHARS:
            yield text


def load_conversations(
    source: str, *, split: str = "train", domain_column: str | None = None, strict: bool = False
) -> list[Conversation]:
    """Return the conversations from `load_source`, and print its counts.

    Raises the same errors as `load_source`.
    """
    loaded = load_source(source, split=split, domain_column=domain_column, strict=strict)
    for line in loaded.lines():
        print(f"{source}: {line}")
    return loaded.conversations


def load_source(
    source: str, *, split: str = "train", domain_column: str | None = None, strict: bool = False
) -> Loaded:
    """Load every conversation from `source`.

    `source` is one of:

    - `stdlib`: conversations made from the Python standard library's sources; `stdlib-functions`:
      prompts without answers, to complete the library's functions that have a docstring;
    - a `.jsonl`, `.json` (a list) or `.parquet` file, the former two also as `.gz` or `.zst`; a
      folder of such files, except files that belong to other splits; or one `split` of a data set
      on the hub. The module `columns` lists the column names that are read. The domain is read from
      `domain_column`, or from `domain` if a row has this column; otherwise, the domain is the first
      folder under `source`;
    - a folder that contains only `.txt` and `.md` files: one document each.

    Rows that cannot be used are skipped and counted by reason. Files that are not read are counted
    by suffix.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is corrupt, or no row can be used; with `strict`, the first row that
            cannot be used.
    """
    path = Path(source)
    if source in MADE:
        return Loaded(conversations=[_stdlib_conversation(row) for row in MADE[source]()])
    if not path.is_dir() or is_saved(path):
        return _from_rows(read_rows(source, split), source, domain_column, strict)
    kinds = TABLES if find_files(path, TABLES) else TEXTS
    others = count_others(path, kinds)
    if others and not find_files(path, kinds):
        names = ", ".join((*TABLES, *TEXTS))
        raise ValueError(
            f"{source} has no conversations: found no {names} files, but {_join(others)}"
        )
    files, splits = choose_files(path, find_files(path, kinds), split)
    rows = read_rows(source, split) if kinds == TABLES else _text_rows(path, files)
    loaded = _from_rows(rows, source, domain_column, strict)
    loaded.other_files, loaded.other_splits = others, splits
    return loaded


def identify_conversations(source: str, split: str) -> list[Any]:
    """Return the identity of the data in `source`, for JSON, without reading the data.

    Raises the same errors as `load_conversations`.
    """
    return [source, sys.version] if source in MADE else identify_source(source, split)


def _stdlib_conversation(row: dict[str, Any]) -> Conversation:
    """Split by the whole conversation, not only by its first question.

    The demos' small target was trained on one part of this split.
    """
    conversation = cast(Conversation, row)
    return {**conversation, "split_key": conversation_hash(conversation["messages"])}


def is_plain_text(conversation: Conversation) -> bool:
    return [message["role"] for message in conversation["messages"]] == [TEXT_ROLE]


def _text_rows(folder: Path, files: Iterable[Path]) -> Iterator[Row]:
    for path in files:
        try:
            with open_plain(path) as file:
                text = file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
            ) from None
        values = {"text": text} if text.strip() else UnusableRowError("without text")
        yield Row(path.relative_to(folder).as_posix(), values, folder_domain(folder, path))


@dataclass
class Skipped:
    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    """For each reason, the location and details of the first row skipped for it."""

    def add(self, place: str, error: UnusableRowError) -> None:
        self.counts[error.reason] += 1
        self.first.setdefault(error.reason, f"{place}: {error.detail}" if error.detail else place)

    def __str__(self) -> str:
        parts = [
            f"{count:,} {reason} (first: {self.first[reason]})"
            for reason, count in self.counts.most_common()
        ]
        return ", ".join(parts)

    @property
    def num_rows(self) -> int:
        return sum(self.counts.values())


@dataclass(kw_only=True)
class Loaded:
    """The conversations from a source, and counts of everything that was not read."""

    conversations: list[Conversation] = field(default_factory=list)
    columns: Columns = field(default_factory=Columns)
    skipped: Skipped = field(default_factory=Skipped)
    other_files: Counter[str] = field(default_factory=Counter)
    """Number of files that are not read, by suffix."""
    other_splits: Counter[str] = field(default_factory=Counter)
    """Number of files that belong to other splits, by split."""

    def lines(self) -> Iterator[str]:
        if self.other_files:
            yield f"files not read: {_join(self.other_files)}"
        if self.other_splits:
            yield f"files of other splits not read: {_join(self.other_splits)}"
        if self.columns.read:
            yield str(self.columns)
        if self.skipped.counts:
            used, skipped = len(self.conversations), self.skipped.num_rows
            yield (
                f"{used + skipped:,} rows read, {used:,} used, {skipped:,} skipped: {self.skipped}"
            )


def _join(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common())


def _from_rows(rows: Iterable[Row], source: str, domain_column: str | None, strict: bool) -> Loaded:
    loaded = Loaded()
    for row in rows:
        try:
            if isinstance(row.values, UnusableRowError):
                raise row.values
            conversation = read_conversation(row.values, row.domain, domain_column, loaded.columns)
        except UnusableRowError as error:
            if strict:
                raise SettingError(
                    f"unusable row in {source}, {row.place}: {error} (without {{strict}}, the row "
                    "is skipped)"
                ) from None
            loaded.skipped.add(row.place, error)
        else:
            loaded.conversations.append(conversation)
    if domain_column and loaded.conversations and not loaded.columns.read[domain_column]:
        names = ", ".join(sorted(loaded.columns.read | loaded.columns.unread))
        raise SettingError(
            f"{source} has no column {domain_column!r}, only {names}: choose the column with the "
            "domain ({domain_column})"
        )
    if not loaded.conversations and loaded.skipped.counts:
        raise ValueError(f"{source} has no usable conversations: {loaded.skipped}")
    if not loaded.conversations:
        raise ValueError(f"{source} contains no conversation")
    return loaded


def read_conversation(
    row: Mapping[str, Any],
    domain: str = "all",
    domain_column: str | None = None,
    columns: Columns | None = None,
) -> Conversation:
    """Read the conversation in a row of any known shape.

    Columns and keys that are read, and those that are not, are counted in `columns`.

    Raises:
        UnusableRowError: there is no conversation.
    """
    reader = RowReader(row)
    messages, tools = reader.read()
    if not messages:
        raise UnusableRowError("without messages")
    named = reader.take((domain_column or "domain",))
    conversation: Conversation = {
        "messages": messages,
        "domain": str((named and named[1]) or domain),
    }
    if messages[-1].pop("cut", False) or reader.is_cut():
        conversation["cut"] = True
    if tools:
        conversation["tools"] = tools
    if (arguments := reader.arguments()) is not None:
        conversation["arguments"] = arguments
    require_json(conversation)
    if turns := reader.token_turns(messages):
        conversation["turns"] = turns
    if columns is not None:
        reader.count(columns)
    return conversation
