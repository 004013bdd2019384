"""Find a row's columns under the names used for conversations, and count the other columns."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from redraft.distill.data.messages import (
    FINISHES,
    TEXT_ROLE,
    TOOL_KEYS,
    Message,
    Tool,
    begins_with_question,
    first_key,
    is_cut_reason,
    join_turns,
    parse_json,
    parse_list,
    read_messages,
    read_text,
    read_tools,
    refuse_media,
)
from redraft.distill.data.rows import UnusableRowError
from redraft.distill.data.sessions import KEYS, StoredTurn, read_turns, split_turns
from redraft.distill.data.template import Arguments

CONVERSATIONS = ("messages", "conversations", "conversation")
QUESTIONS = ("instruction", "prompt", "question", "query", "input")
CONTEXTS = ("input", "context")
ANSWERS = ("completion", "response", "output", "answer", "chosen")
SYSTEMS = ("system", "system_prompt", "system_message")
HISTORY = "history"
TOOLS = ("tools", "functions", "available_tools")
# TRL's name for the template arguments of the request that produced the answers.
ARGUMENTS = "chat_template_kwargs"
TOKEN_IDS = "token_ids"  # Column of `redraft regenerate` with the ids that a server returned.
MASKED = ("input_ids", "loss_mask")  # Columns of speculators' regenerated answers.
OURS = ("key", "settings")  # Columns that describe a run of `redraft regenerate`.


@dataclass(kw_only=True)
class Columns:
    """Row counts by column, and by the keys of messages, such as `messages.weight`."""

    read: Counter[str] = field(default_factory=Counter)
    unread: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        read, unread = (", ".join(sorted(names)) or "none" for names in (self.read, self.unread))
        return f"columns read: {read}; not read: {unread}"


def _is_missing(value: Any) -> bool:
    """Whether a table cell has no value (NaN in pandas)."""
    return value is None or (isinstance(value, float) and math.isnan(value))


class RowReader:
    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row = {column: value for column, value in row.items() if not _is_missing(value)}
        self.used: set[str] = set()
        self.unread_keys: set[str] = set()

    def take(self, columns: Collection[str]) -> tuple[str, Any] | None:
        """Return (name, value) for the first of these columns that has a value in the row."""
        if not (name := first_key(self.row, columns)):
            return None
        self.used.add(name)
        return name, self.row[name]

    def _take_filled(self, column: str) -> tuple[str, Any] | None:
        """Like `take`, but ignore empty text, which is not JSON."""
        found = self.take((column,))
        return None if found and found[1] == "" else found

    def count(self, columns: Columns) -> None:
        columns.read.update(self.used - {*OURS})
        columns.unread.update(self.row.keys() - self.used - {*OURS})
        columns.unread.update(self.unread_keys)

    def read(self) -> tuple[list[Message], list[Tool]]:
        """Return the row's (messages, tools).

        Raises:
            UnusableRowError: the row has no conversation to learn.
        """
        self._refuse()
        messages = join_turns(self._messages())
        # Tools may be in a message, as in ChatGLM's data, or in a column.
        tools = [
            tool
            for key in TOOL_KEYS
            for message in messages
            for tool in self._tools(key, message.pop(key, None))
        ]
        if found := self.take(TOOLS):
            tools = self._tools(*found) or tools
        return self._with_system(messages), tools

    def is_cut(self) -> bool:
        """Whether the server truncated the row's last answer."""
        cut = isinstance(self.row.get("cut"), bool) and self.take(("cut",))
        reasons = [found[1] for name in FINISHES if (found := self.take((name,)))]
        # speculators writes the reason there.
        metadata = self.row.get("metadata")
        if isinstance(metadata, dict) and (names := metadata.keys() & FINISHES):
            self.used.add("metadata")
            reasons += [metadata[name] for name in names]
        return bool(cut and cut[1]) or any(map(is_cut_reason, reasons))

    def arguments(self) -> Arguments | None:
        """Return the template arguments of the request that produced the answers. None if unknown.

        Raises:
            UnusableRowError: they are not an object.
        """
        settings = self.row.get("settings")
        ours = settings.get("template_options") if isinstance(settings, dict) else None
        found = self._take_filled(ARGUMENTS)
        value = parse_json(found[1], f"a column {ARGUMENTS}") if found else ours
        if not isinstance(value or {}, dict):
            raise UnusableRowError(f"with a column {ARGUMENTS} that is not an object")
        return None if value is None else dict(value or {})

    def token_turns(self, messages: list[Message]) -> list[StoredTurn]:
        """Return the ids of the last answers, as the server returned them, or an empty list.

        Raises:
            UnusableRowError: `redraft regenerate` wrote them, but they are incomplete.
        """
        answers = [message for message in messages if message["role"] == "assistant"]
        found = self.row.get(TOKEN_IDS)
        first = found[0] if isinstance(found, list) and found else None
        # Otherwise, this is a column with the same name from a different tool.
        if isinstance(first, dict) and first.keys() == KEYS:
            self.used.add(TOKEN_IDS)
            turns = read_turns(self.row[TOKEN_IDS])
            if len(turns) != len(answers):
                raise UnusableRowError(
                    "with different numbers of answers and of token id lists",
                    f"{len(turns)}, not {len(answers)}",
                )
            return turns
        turns = split_turns(*map(self.row.get, MASKED))
        if not 0 < len(turns) <= len(answers):
            return []
        self.used |= {*MASKED}
        # speculators repeats a conversation in a row for each answer, and masks the others.
        for answer in answers[: -len(turns)]:
            answer["unlearned"] = True
        return turns

    def _refuse(self) -> None:
        found = self.take(("label",))
        label = str(found[1]).lower() if found and isinstance(found[1], bool | str) else ""
        if label == "false":
            raise UnusableRowError("with a label of false")
        if found and label != "true":  # a number or a name is not a verdict
            self.used.remove("label")
        refuse_media(column for column, value in self.row.items() if value)

    def _messages(self) -> list[Message]:
        # Check the whole conversation first: ultrachat_200k has `prompt` in addition to `messages`.
        # Merged data sets may have an empty list of messages next to a question and an answer.
        conversation = self.take(CONVERSATIONS)
        if conversation and (
            messages := parse_list(conversation[1], f"a column {conversation[0]}")
        ):
            return self._read(conversation[0], messages, "user")
        if begins_with_question(self.row.get("chosen")) and (found := self.take(("chosen",))):
            return self._read(*found, "user")
        if question := self.take(QUESTIONS):
            return [*self._history(), *self._question(*question), *self._answer()]
        if found := self.take(("text",)):
            return read_messages(found[1], TEXT_ROLE)
        if conversation:
            return []
        raise UnusableRowError(
            "without a conversation",
            f"the columns {', '.join(sorted(self.row))}: expected `messages`, `conversations`, a "
            f"question ({', '.join(QUESTIONS)}) with an answer ({', '.join(ANSWERS)}), or `text`",
        )

    def _read(self, column: str, value: Any, role: str) -> list[Message]:
        unread: set[str] = set()
        messages = read_messages(value, role, unread, f"a column {column}")
        self.unread_keys |= {f"{column}.{key}" for key in unread}
        return messages

    def _tools(self, column: str, value: Any) -> list[Tool]:
        unread: set[str] = set()
        tools = read_tools(value, unread)
        self.unread_keys |= {f"{column}.{key}" for key in unread}
        return tools

    def _question(self, column: str, value: Any) -> list[Message]:
        messages = self._read(column, value, "user")
        others = (name for name in CONTEXTS if name != column)
        contexts = [
            read_text(found[1]) for name in others if (found := self.take((name,))) and found[1]
        ]
        if contexts and messages:
            last = messages[-1]
            messages[-1] = {**last, "content": "\n\n".join([last["content"], *contexts])}
        return messages

    def _answer(self) -> list[Message]:
        found = self.take(ANSWERS)
        return self._read(*found, "assistant") if found else []

    def _history(self) -> Iterator[Message]:
        """Yield the earlier turns, given as messages or as pairs of a question and an answer."""
        found = self._take_filled(HISTORY)
        for turn in parse_list(found[1], f"a column {HISTORY}") if found else []:
            if isinstance(turn, list) and len(turn) == 2:
                for role, text in zip(("user", "assistant"), turn, strict=True):
                    yield {"role": role, "content": read_text(text)}
            else:
                yield from self._read(HISTORY, [turn], "user")

    def _with_system(self, messages: list[Message]) -> list[Message]:
        found = self.take(SYSTEMS)
        text = read_text(found[1]) if found else ""
        if not text.strip() or not messages or messages[0]["role"] == TEXT_ROLE:
            return messages
        if messages[0]["role"] == "system":
            if messages[0]["content"].strip() == text.strip():
                return messages
            raise UnusableRowError("with two system prompts", "in a column and in the messages")
        return [{"role": "system", "content": text}, *messages]
