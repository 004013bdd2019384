"""Conversations rendered as they are served: the prompt of every assistant turn, and the text the target writes after.

Most chat templates do not mark the assistant's text, so it is found by comparing renderings. The prompt of turn i is
`render(messages[:i], add_generation_prompt=True)`, and the answer is the rest of `render(messages[:i + 1])`, up to and
including the end of the turn.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import jinja2

from redraft.distill.data.conversations import Conversation
from redraft.distill.data.day import writes_date
from redraft.distill.data.messages import REASONING_FIELDS, Message, Tool
from redraft.distill.data.pieces import PieceEncoder

T = TypeVar("T")

PROBE = "redraft5f1cprobe"
"""Rendered in place of a text, to find the text written around one by a template. Nothing in it can be trimmed
or parsed by a template."""


QUESTION: list[Message] = [{"role": "user", "content": "why?"}]


class ReasoningForm(NamedTuple):
    """The text around a model's reasoning and the answer after it."""

    before: str
    between: str
    after: str = ""

    @property
    def tags(self) -> tuple[str, str]:
        """The text before and after the reasoning, without line ends."""
        return self.before.strip(), self.between.strip()

    def write(self, thought: str, said: str) -> str:
        return (
            f"{self.before}{thought.strip()}{self.between}{said.strip() if self.after else said.lstrip()}{self.after}"
        )

    def read(self, content: str) -> tuple[str, str] | None:
        """(reasoning, answer) of a text in this form; None for any other text, or if the reasoning is empty."""
        opening, closing = self.tags
        text = content.lstrip()
        if not text.startswith(opening) or closing not in text:
            return None
        thought, _, said = text.removeprefix(opening).partition(closing)
        if not thought.strip():
            return None
        return thought.strip(), said.removesuffix(self.after) if self.after else said.lstrip()


THINK = ReasoningForm("<think>\n", "\n</think>\n\n")

# Granite first, because THINK would read such text too.
REASONING_FORMS = (
    ReasoningForm("<think>", "</think><response>", "</response>"),  # Granite 3.3
    THINK,  # Qwen3, DeepSeek-R1, SmolLM3
    ReasoningForm("[THINK]", "[/THINK]"),  # Magistral
    ReasoningForm("<seed:think>", "</seed:think>"),  # Seed-OSS
)


class RefusedAnswerError(ValueError):
    """An answer that the chat template cannot write as the target would have."""


@dataclass(frozen=True)
class Turn:
    """One assistant turn as served: the text read and the text written by the model."""

    prompt: str
    answer: str
    """Includes the end of turn."""


class Renderer:
    """Applies a tokenizer's chat template as a server does, on one day."""

    def __init__(self, tokenizer: Any, template_options: dict[str, Any], day: datetime.date | None = None) -> None:
        """`day` is the date written by a template that writes today's. No other template needs one."""
        self.tokenizer, self.template_options = tokenizer, template_options
        if writes_date(tokenizer):
            if day is None:
                raise ValueError("the chat template writes today's date: choose one day for the whole run")
            midnight = datetime.datetime.combine(day, datetime.time())
            # An option shadows the global of the same name, which reads the clock.
            self.template_options = {"strftime_now": midnight.strftime, **template_options}
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted(special | set(tokenizer.all_special_tokens), key=len, reverse=True)
        # Longest first, because an alternation takes the first branch that matches. `(?!)` matches nothing.
        self.special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._encode = PieceEncoder(tokenizer)

    def __call__(self, messages: Sequence[Message], *, prompt: bool, tools: list[Tool] | None = None) -> str:
        """`messages` as text, followed by the generation prompt if they are a `prompt`.

        Raises:
            ValueError: if the tokenizer has no chat template.
            jinja2.TemplateError: if the template refuses them or fails. A server then answers with status 400.
        """
        if self.tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template: choose a tokenizer with one, or a data set with a `text` column"
            )
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=prompt, **self.template_options
            )
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error
        return text

    def tokenise(self, texts: list[str]) -> list[list[int]]:
        """Ids of rendered texts. No special tokens are added, because a template writes them itself."""
        return self._encode(texts)

    def tokenise_turns(self, turns: list[Turn]) -> list[tuple[list[int], list[int]]]:
        """(prompt ids, answer ids) of each turn, the prompt tokenised by itself, as a server does.

        The answer's ids follow the prompt's when both are tokenised as one text. If a token merges across the border
        (an answer that begins with a newline), the answer is tokenised by itself: a generated token cannot merge with
        the prompt.
        """
        # In one call, because they share most pieces.
        ids = self.tokenise([text for turn in turns for text in (turn.prompt, turn.prompt + turn.answer)])
        pairs = []
        for turn, prompt, whole in zip(turns, ids[::2], ids[1::2], strict=True):
            # A prompt that ends in "\n" and the answer "\nHi" may share a token "\n\n".
            keeps_prompt = whole[: len(prompt)] == prompt
            answer = whole[len(prompt) :] if keeps_prompt else self.tokenise([turn.answer])[0]
            pairs.append((prompt, answer))
        return pairs

    def turns(self, conversation: Conversation) -> tuple[list[Turn], Counter[str]]:
        """Every assistant turn with a message before it to answer, and the refused answers by reason.

        A last turn cut at a length limit has no end of turn.

        Raises:
            jinja2.TemplateError: if the template refuses the conversation.
        """
        return self.retry_without_opening(
            conversation["messages"], lambda messages: self._turns(messages, conversation)
        )

    def prompt(self, messages: Sequence[Message], tools: list[Tool] | None = None) -> str:
        """The prompt of an answer to `messages`.

        Raises:
            jinja2.TemplateError: if the template refuses them.
        """
        return self.retry_without_opening(
            messages, lambda messages: self([self.as_context(m) for m in messages], prompt=True, tools=tools)
        )

    @staticmethod
    def retry_without_opening(messages: Sequence[Message], work: Callable[[Sequence[Message]], T]) -> T:
        """`work(messages)`. If the template refuses them, try without the assistant's messages before the first other.

        A third of ShareGPT begins with the assistant, because long chats were cut into parts. Some templates render
        that as context; others demand that the user begins.
        """
        try:
            return work(messages)
        except jinja2.TemplateError:
            shorter = _drop_opening(messages)
            if len(shorter) == len(messages):
                raise
            return work(shorter)

    def _turns(self, messages: Sequence[Message], conversation: Conversation) -> tuple[list[Turn], Counter[str]]:
        cut = len(messages) - 1 if conversation.get("cut") else None
        # The context as a client sends it back; `_TurnWriter` gets the answer as the model wrote it.
        context = [self.as_context(message) for message in messages]
        turns, refused = [], Counter[str]()
        for i in range(_num_opening(messages), len(messages)):
            if not _is_answer(messages[i]):
                continue
            write = _TurnWriter(self, context[:i], conversation.get("tools"), is_ended=i != cut)
            try:
                turns.append(write(messages[i]))
            except RefusedAnswerError as error:
                refused[str(error)] += 1
        return turns, refused

    @cached_property
    def reasoning_form(self) -> ReasoningForm | None:
        """The target's, by the tags in its chat template or its vocabulary; None if they have none."""
        template, vocabulary = str(self.tokenizer.chat_template), self.tokenizer.get_vocab()
        # The template counts before the vocabulary, which may hold tags of other forms too.
        granite, *others = REASONING_FORMS
        if "<response>" in template and granite.before in template:
            return granite
        by_template = (form for form in others if any(tag in template for tag in form.tags))
        by_vocabulary = (form for form in others if form.tags[0] in vocabulary)
        return next(by_template, None) or next(by_vocabulary, None)

    @cached_property
    def reads_reasoning_from(self) -> Literal["fields", "content"]:
        """The part of a message with the reasoning that the template writes."""
        # The template writes the probe if it reads one of the fields.
        answer = {"role": "assistant", "content": "so", **dict.fromkeys(REASONING_FIELDS, PROBE)}
        try:
            return "fields" if PROBE in self([*QUESTION, answer], prompt=False) else "content"
        except jinja2.TemplateError:
            return "content"

    def as_context(self, message: Message) -> Message:
        """The message as a client sends it back to the server: with its reasoning in the field, or in the content, in
        which the answer came. A template that does not read the field drops the reasoning."""
        if (split := split_reasoning(message)) is None:
            return message
        thought, said, form = split
        if form is None or self.reads_reasoning_from == "fields":
            return {**_without_reasoning(message, said), **dict.fromkeys(REASONING_FIELDS, thought)}
        # A plain template says nothing of tags, so the text stays.
        return message if self.reasoning_form in (None, form) else _without_reasoning(message, said)

    def as_answer(self, message: Message) -> Message:
        """The message with its reasoning as the template reads it: in fields, or in the content in its own tags."""
        if (split := split_reasoning(message)) is None:
            return message
        thought, said, form = split
        if self.reads_reasoning_from == "fields" or self.reasoning_form in (None, form):
            return self.as_context(message)  # in the content, unchanged to the last space
        return _without_reasoning(message, self.reasoning_form.write(thought, said))

    def through_special(self, tail: str) -> str:
        """`tail` up to and including the first special token; empty if there is none."""
        found = self.special.search(tail)
        return tail[: found.end()] if found else ""


class _TurnWriter:
    """Writes one turn: what the server reads before it, and what the target writes."""

    def __init__(self, render: Renderer, before: list[Message], tools: list[Tool] | None, *, is_ended: bool) -> None:
        self.render, self.before, self.tools, self.is_ended = render, before, tools, is_ended
        self.prompt = render(before, prompt=True, tools=tools)

    def __call__(self, message: Message) -> Turn:
        """The turn of an assistant's message.

        Raises:
            RefusedAnswerError: if the template leaves a part of it out.
        """
        thought, said, _ = split_reasoning(message) or ("", message["content"], None)
        if "reasoning" in message and self._has_no_place_for_reasoning:
            raise RefusedAnswerError("with reasoning, for which the chat template has no tags")
        answer = self.render.as_answer(message)
        return (
            self._calls(message, answer, thought, said)
            if "tool_calls" in message
            else self._text(message, answer, thought)
        )

    @property
    def _has_no_place_for_reasoning(self) -> bool:
        return self.render.reads_reasoning_from == "content" and self.render.reasoning_form is None

    def _whole(self, answer: Message) -> str:
        return self.render([*self.before, {"role": "assistant", **answer}], prompt=False, tools=self.tools)

    def _text(self, message: Message, answer: Message, thought: str) -> Turn:
        """An answer of text, with or without reasoning."""
        content: str = answer["content"]
        # The template's text around an answer, e.g. "...<|im_start|>assistant\n" and "<|im_end|>\n". The target
        # writes the end of turn. The newline after it is the template's.
        head, _, tail = self._whole({"content": PROBE}).rpartition(PROBE)
        end = self.render.through_special(tail) if self.is_ended else ""
        whole = self._whole(answer)
        written = _strip_opening(self.prompt, content)
        if not self._continues(whole, written, thought):
            # `_as_after_question` comes here again, with QUESTION: the recursion ends after one level.
            if self.before != QUESTION:
                return self._as_after_question(message)
            if thought and self.render.reads_reasoning_from == "fields":
                raise RefusedAnswerError("with reasoning that the chat template leaves out")
            # The template rewrites even the last answer (DeepSeek-R1 drops the reasoning), but the model wrote it all.
            return Turn(self._close_reasoning(content), written + end)
        prompt = self._skip_empty_reasoning(head, content) if whole.startswith(head) else self.prompt
        return Turn(prompt, whole.removesuffix(tail)[len(prompt) :] + end)

    def _calls(self, message: Message, answer: Message, thought: str, said: str) -> Turn:
        """An answer with tool calls."""
        whole, calls = self._whole(answer), answer["tool_calls"]
        functions = [call["function"] for call in calls]
        # Names of functions and of arguments: the values are written in many forms (JSON, XML, Python).
        names = [text for function in functions for text in (function["name"], *function["arguments"])]
        parts = {"tool calls": names, "text beside tool calls": [said], "reasoning before tool calls": [thought]}
        # gpt-oss's template writes the first call alone.
        has_all = all(whole[len(self.prompt) :].count(f["name"]) >= names.count(f["name"]) for f in functions)
        for part, texts in parts.items():
            if not has_all or not self._continues(whole, *texts):
                if self.before != QUESTION:
                    return self._as_after_question(message)
                raise RefusedAnswerError(f"with {part} that the chat template leaves out")
        head = self._whole({"content": PROBE}).rpartition(PROBE)[0]
        prompt = self._skip_empty_reasoning(head, thought) if whole.startswith(head) else self.prompt
        # The template's text after the arguments of the last call: is there an end of turn in it?
        probe = {"type": "function", "function": {"name": calls[-1]["function"]["name"], "arguments": {PROBE: PROBE}}}
        tail = self._whole({**answer, "tool_calls": [*calls[:-1], probe]}).rpartition(PROBE)[2]
        return Turn(prompt, self._end_calls(whole[len(prompt) :], has_end=bool(self.render.special.search(tail))))

    def _end_calls(self, written: str, has_end: bool) -> str:
        """The text of an answer with calls, up to its last special token if the template `has_end` after a call."""
        if not has_end:
            return written.rstrip()
        *_, last = self.render.special.finditer(written)
        return written[: last.end() if self.is_ended else last.start()]

    def _continues(self, whole: str, *texts: str) -> bool:
        """Whether a rendering is the prompt and these texts after it, however reflowed."""
        if not whole.startswith(self.prompt):
            return False
        rest = whole.removeprefix(self.prompt)
        reflowed = [text for text in texts if text not in rest]
        return not reflowed or all(_dense(text) in _dense(rest) for text in reflowed)

    def _as_after_question(self, message: Message) -> Turn:
        """The turn with the answer as it is written after a lone question.

        An answer may change the turns before it: gpt-oss drops the reasoning before a tool call once the call has led
        to an answer, which the server did not have when it made the prompt.
        """
        alone = _TurnWriter(self.render, QUESTION, None, is_ended=self.is_ended)
        turn = alone(message)
        return Turn(self.prompt + turn.prompt.removeprefix(alone.prompt), turn.answer)

    def _skip_empty_reasoning(self, head: str, content: str) -> str:
        """The prompt, with the empty reasoning that the template, not the model, wrote before this answer (Qwen3)."""
        added = head.removeprefix(self.prompt).strip()
        is_empty = _dense(added) in _empty_reasoning() and head.startswith(self.prompt)
        # The model wrote the empty block if the answer begins with it: then it is a part to learn.
        is_own = _dense(_strip_opening(self.prompt, content)).startswith(_dense(added))
        return head if is_empty and not is_own else self.prompt

    def _close_reasoning(self, content: str) -> str:
        """The prompt, with its open reasoning closed for an answer without any."""
        opening, closing = THINK.tags
        if self.prompt.rstrip().endswith(opening) and closing not in content:
            return self.prompt.rstrip() + "\n" + THINK.between
        return self.prompt


def split_reasoning(message: Message) -> tuple[str, str, ReasoningForm | None] | None:
    """(reasoning, answer, form in which they stand in the content) of an assistant's message; None without reasoning.

    The form is None if the reasoning stands in a field.
    """
    if message["role"] != "assistant":
        return None
    if message.get("reasoning"):
        return message["reasoning"].strip(), message["content"], None
    for form in REASONING_FORMS:
        if parts := form.read(message["content"]):
            return *parts, form
    return None


def _without_reasoning(message: Message, content: str) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning"} | {"content": content}


def count_unprompted(messages: Sequence[Message]) -> int:
    """The number of answers at the beginning of a conversation, with nothing before them to answer."""
    return sum(_is_answer(message) for message in messages[: _num_opening(messages)])


def _is_answer(message: Message) -> bool:
    """Whether the assistant said or called something."""
    return message["role"] == "assistant" and bool(message["content"].strip() or message.get("tool_calls"))


def _num_opening(messages: Sequence[Message]) -> int:
    return next((i for i, message in enumerate(messages) if message["role"] != "assistant"), len(messages))


def _drop_opening(messages: Sequence[Message]) -> list[Message]:
    """`messages` without the assistant's before the first of another role; a system prompt stays."""
    system = [message for message in messages[:1] if message["role"] == "system"]
    rest = messages[len(system) :]
    return [*system, *rest[_num_opening(rest) :]]


def _empty_reasoning() -> Iterator[str]:
    """The tags around no reasoning, all of them, or the closing one after a prompt with the opening one."""
    for form in REASONING_FORMS:
        yield from ("".join(form.tags), form.tags[1])


def _strip_opening(prompt: str, content: str) -> str:
    """The answer without the opening `<think>` if the prompt already ends with one."""
    opening, blank = THINK.tags[0], prompt[len(prompt.rstrip()) :]
    if not prompt.rstrip().endswith(opening) or not content.lstrip().startswith(opening):
        return content.lstrip()
    return content.lstrip().removeprefix(opening).removeprefix(blank)


def _dense(text: str) -> str:
    """`text` without whitespace: templates trim and reflow."""
    return "".join(text.split())
