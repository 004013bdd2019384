"""Render conversations as they are served.

This module finds the prompt of every assistant turn, and the text that the target writes after it.

Most chat templates do not mark the assistant's text, so it is found by comparing renderings. The
prompt of turn i is `render(messages[:i], add_generation_prompt=True)`, and the answer is the rest
of `render(messages[:i + 1])`, up to and including the end of the turn.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

import jinja2
import numpy as np
from numpy.typing import NDArray

from redraft.distill.data.conditions import Turn
from redraft.distill.data.conversations import Conversation
from redraft.distill.data.messages import REASONING_FIELDS, Message, Tool
from redraft.distill.data.pieces import PieceEncoder, Pieces
from redraft.distill.data.reasoning import (
    REASONING_FORMS,
    ReasoningForm,
    is_cut,
    split_reasoning,
    without_reasoning,
)
from redraft.distill.data.template import (
    Arguments,
    asks_for_thought,
    find_arguments,
    read_names,
    reads_parts,
)
from redraft.distill.data.turns import PROBE, QUESTION, RefusedAnswerError, TurnWriter
from redraft.files.target_folder import count_ids, writes_date

T = TypeVar("T")

EXCLUDED = "which the data excludes from training"
"""Why an answer with `weight` 0 is not learned."""


class Renderer:
    """Applies a tokenizer's chat template as a server does, with a fixed date."""

    def __init__(
        self,
        tokenizer: Any,
        template_options: dict[str, Any],
        day: datetime.date | None = None,
        ends: Collection[int] | None = None,
    ) -> None:
        """Set up a renderer. `day` is the date for a template that writes today's date.

        `ends` are the stop ids. Without them, the first special token after an answer is its end.
        """
        self.tokenizer, self.template_options = tokenizer, template_options
        if writes_date(tokenizer):
            if day is None:
                raise ValueError(
                    "the chat template contains today's date: set one date for the whole run"
                )
            midnight = datetime.datetime.combine(day, datetime.time())
            # An option hides the global with the same name, which reads the clock.
            self.template_options = {"strftime_now": midnight.strftime, **template_options}
        special = {
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        }
        self.special = _any_of(special | set(tokenizer.all_special_tokens))
        self.ends = None if ends is None else tuple(tokenizer.convert_ids_to_tokens(sorted(ends)))
        self._end = _any_of(self.ends or ())
        # Returns the token ids of rendered texts. No special tokens are added, because the template
        # writes them itself.
        self.tokenise = PieceEncoder(tokenizer)

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        prompt: bool,
        tools: list[Tool] | None = None,
        arguments: Arguments | None = None,
    ) -> str:
        """Render `messages` as text, followed by the generation prompt if `prompt` is true.

        The template options of this renderer take precedence over a request's `arguments`.

        Raises:
            ValueError: there is no chat template.
            jinja2.TemplateError: the template refuses the messages or fails; a server then
                answers with status 400.
        """
        if self.tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template: choose a tokenizer with one, or a data set "
                "with a `text` column"
            )
        sent = [as_parts(message) for message in messages] if self.reads_parts else list(messages)
        options = {**(arguments or {}), **self.template_options}
        try:
            text: str = self.tokenizer.apply_chat_template(
                sent, tools=tools, tokenize=False, add_generation_prompt=prompt, **options
            )
        except jinja2.TemplateError:
            raise
        except Exception as error:  # a template is a program, and can raise any error
            raise jinja2.TemplateError(
                f"{type(error).__name__}: {error}{_hint(error, messages)}"
            ) from error
        return text

    def batch(self) -> TurnBatch:
        return TurnBatch(self.tokenise)

    def turns(
        self, conversation: Conversation, keep: Callable[[Turn], T]
    ) -> tuple[list[T], Counter[str]]:
        """Return `keep(turn)` for each assistant turn, and the counts of refused answers by reason.

        Only turns that follow a message are included. A last turn that was cut has no end.

        Raises:
            jinja2.TemplateError
        """
        return self.retry_without_opening(
            conversation["messages"], lambda messages: self._turns(messages, conversation, keep)
        )

    def prompt(
        self,
        messages: Sequence[Message],
        tools: list[Tool] | None = None,
        arguments: Arguments | None = None,
    ) -> str:
        """Render the prompt for an answer to `messages`, in a request with these arguments.

        Raises:
            jinja2.TemplateError: the template refuses them.
        """
        return self.retry_without_opening(
            messages,
            lambda messages: self(
                [self.as_context(m) for m in messages],
                prompt=True,
                tools=tools,
                arguments=arguments,
            ),
        )

    @staticmethod
    def retry_without_opening(
        messages: Sequence[Message], work: Callable[[Sequence[Message]], T]
    ) -> T:
        """Return `work(messages)`. If the template refuses them, retry without the opening answers.

        A third of ShareGPT's conversations begin with assistant messages, because long chats were
        cut.
        """
        try:
            return work(messages)
        except jinja2.TemplateError:
            shorter = _drop_opening(messages)
            if len(shorter) == len(messages):
                raise
            return work(shorter)

    def _turns(
        self, messages: Sequence[Message], conversation: Conversation, keep: Callable[[Turn], T]
    ) -> tuple[list[T], Counter[str]]:
        cut = len(messages) - 1 if conversation.get("cut") else None
        # The context is as a client sends it back. The writer receives the answer as the model
        # wrote it.
        context = [self.as_context(message) for message in messages]
        turns, refused = [], Counter[str]()
        given = self.known_arguments(conversation)
        for i in range(_num_opening(messages), len(messages)):
            is_ended = i != cut and not is_cut(messages[i])
            if not _is_answer(messages[i]) and (is_ended or not split_reasoning(messages[i])):
                continue
            if messages[i].get("unlearned"):
                refused[EXCLUDED] += 1
                continue
            try:
                turn = self._write(
                    context[:i],
                    conversation.get("tools"),
                    messages[i],
                    is_ended=is_ended,
                    given=given,
                )
            except RefusedAnswerError as error:
                refused[str(error)] += 1
            else:
                turns.append(keep(turn))
        return turns, refused

    @cached_property
    def num_ids(self) -> int:
        return count_ids(self.tokenizer)

    @cached_property
    def _write(self) -> TurnWriter:
        return TurnWriter(self)

    @cached_property
    def arguments(self) -> list[Arguments]:
        """Return the request arguments with which this template starts answers, default first."""
        fixed = set(self.template_options)
        return [
            arguments
            for arguments in find_arguments(self.tokenizer)
            if not fixed & arguments.keys()
        ]

    def known_arguments(self, conversation: Conversation) -> Arguments:
        """Return the conversation's own arguments, limited to those that the template reads."""
        given = conversation.get("arguments", {})
        return {name: given[name] for name in given.keys() & self._read_names}

    @cached_property
    def _read_names(self) -> set[str]:
        return read_names(self.tokenizer) - self.template_options.keys()

    def arguments_for(self, given: Arguments, *, thinks: bool) -> list[Arguments]:
        """Return the arguments with which a request gets an answer with a thought, or without one.

        All of them include `given`. A template may render a thought after a prompt that switches
        the reasoning off, but the target never writes one there.
        """
        if asks_for_thought(given) is not None:
            return [given]
        return [
            {**arguments, **given}
            for arguments in self.arguments
            if self._asked_thought.get(repr(arguments)) in (thinks, None)
        ]

    @cached_property
    def _asked_thought(self) -> dict[str, bool | None]:
        """Whether the prompt for each entry of `arguments` switches reasoning on.

        The value is None if the prompt for a short question does not show it. The prompts are
        compared, because the default equals one of the other settings, and some arguments change
        nothing.
        """
        prompts = dict[str, str]()
        asked: dict[bool | None, set[str]] = {True: set(), False: set(), None: set()}
        for arguments in self.arguments:
            with contextlib.suppress(jinja2.TemplateError):
                text = self(QUESTION, prompt=True, arguments=arguments)
                prompts[repr(arguments)] = text
                asked[asks_for_thought(arguments)].add(text)
        on, off = asked[True] - asked[False], asked[False] - asked[True]
        # A template with only an effort level, like gpt-oss's, also renders answers without a
        # thought.
        meaning = {**dict.fromkeys(on, True), **dict.fromkeys(off, False)} if on and off else {}
        return {key: meaning.get(text) for key, text in prompts.items()}

    @cached_property
    def reads_parts(self) -> bool:
        return reads_parts(self.tokenizer)

    @cached_property
    def reasoning_form(self) -> ReasoningForm | None:
        """Return the target's reasoning form, by the tags in its chat template or vocabulary.

        Return None if neither contains such tags.
        """
        template, vocabulary = str(self.tokenizer.chat_template), self.tokenizer.get_vocab()
        # The template takes precedence over the vocabulary, which may also contain tags of other
        # forms.
        granite, *others = REASONING_FORMS
        if "<response>" in template and granite.before in template:
            return granite
        by_template = (form for form in others if any(tag in template for tag in form.tags))
        by_vocabulary = (form for form in others if form.tags[0] in vocabulary)
        return next(by_template, None) or next(by_vocabulary, None)

    @cached_property
    def reads_reasoning_from(self) -> Literal["fields", "content"]:
        """Return the part of a message from which the template reads the reasoning."""
        # The template writes the probe if it reads one of these fields.
        answer = {"role": "assistant", "content": "so", **dict.fromkeys(REASONING_FIELDS, PROBE)}
        try:
            return "fields" if PROBE in self([*QUESTION, answer], prompt=False) else "content"
        except jinja2.TemplateError:
            return "content"

    def as_context(self, message: Message) -> Message:
        """Return the message as a client sends it back to the server.

        Its reasoning is in the field or the content, depending on where the answer had it. A
        template that does not read the field drops the reasoning.
        """
        if (split := split_reasoning(message)) is None:
            return message
        thought, said, form = split
        if form is None or self.reads_reasoning_from == "fields":
            return {**without_reasoning(message, said), **dict.fromkeys(REASONING_FIELDS, thought)}
        # A plain template has no tags, so the text stays unchanged.
        return message if self.reasoning_form in (None, form) else without_reasoning(message, said)

    def as_answer(self, message: Message) -> Message:
        """Return the message with its reasoning in the place that the template reads.

        The reasoning is in the fields, or in the content between the template's own tags.
        """
        if (split := split_reasoning(message)) is None:
            return message
        thought, said, form = split
        if self.reads_reasoning_from == "fields" or self.reasoning_form in (None, form):
            return self.as_context(message)  # keep the content unchanged, including spaces
        return without_reasoning(message, self.reasoning_form.write(thought, said))

    def through_end(self, tail: str) -> str:
        """Return `tail` through the first stop token. Empty if other text precedes this token."""
        found = self._end.search(tail)
        is_next = found and not self.special.sub("", tail[: found.start()]).strip()
        return tail[: found.end()] if found and is_next else ""

    def find_end(self, tail: str) -> str:
        found = self._end.search(tail)
        return found.group() if found else ""

    def read_end(self, answer: str) -> str:
        """Return the special token at the end of an answer. Empty if there is none."""
        tokens = self.ends or [match.group() for match in self.special.finditer(answer)][-1:]
        return next((token for token in tokens if answer.endswith(token)), "")

    def through_special(self, tail: str) -> str:
        found = self.special.search(tail)
        return tail[: found.end()] if found else ""


class PackedTurn(NamedTuple):
    """A turn in a batch, with its texts stored as the indices of pieces."""

    prompt: NDArray[np.int32]
    whole: NDArray[np.int32]
    """Token ids of prompt and answer, tokenised as one text."""
    answer: str


class TurnBatch:
    """Turns that are tokenised in a single call, because they share most pieces."""

    def __init__(self, encoder: PieceEncoder) -> None:
        self._encode, self._pieces = encoder, Pieces(encoder)

    def add(self, turn: Turn) -> PackedTurn:
        pieces = self._pieces
        return PackedTurn(
            pieces.add(turn.prompt), pieces.add(turn.prompt + turn.answer), turn.answer
        )

    def encode(self) -> None:
        self._pieces.encode()

    def ids(self, turn: PackedTurn) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return (prompt ids, answer ids), with the prompt tokenised by itself, as by a server.

        The answer's ids are those that follow the prompt's ids in the whole text. If a token spans
        the border, the answer is tokenised by itself.
        """
        prompt, whole = self._pieces.ids(turn.prompt), self._pieces.ids(turn.whole)
        # E.g. a prompt that ends in "\n" and the answer "\nHi" may share a token "\n\n".
        keeps_prompt = np.array_equal(whole[: len(prompt)], prompt)
        return prompt, whole[len(prompt) :] if keeps_prompt else np.array(
            self._encode([turn.answer])[0], np.int32
        )


def as_parts(message: Message) -> Message:
    """Return the message as vLLM passes it to a template that reads parts.

    A tool result stays text.
    """
    if message["role"] == "tool":
        return message
    texts = message.get("parts") or [message["content"]]
    return {**message, "content": [{"type": "text", "text": text} for text in texts]}


def _hint(error: Exception, messages: Sequence[Message]) -> str:
    has_calls = any("tool_calls" in message for message in messages)
    if not isinstance(error, TypeError) or "dict" not in str(error) or not has_calls:
        return ""
    return (
        "; a server passes the arguments of a tool call to the template as an object: write "
        "`arguments | tojson` in the template"
    )


def _any_of(tokens: Collection[str]) -> re.Pattern[str]:
    # Longest first, because an alternation takes the first branch that matches. `(?!)` matches
    # nothing.
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def count_unprompted(messages: Sequence[Message]) -> int:
    """Count the answers at the beginning of a conversation, before the first question."""
    return sum(_is_answer(message) for message in messages[: _num_opening(messages)])


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and bool(
        message["content"].strip() or message.get("tool_calls")
    )


def _num_opening(messages: Sequence[Message]) -> int:
    return next(
        (i for i, message in enumerate(messages) if message["role"] != "assistant"), len(messages)
    )


def _drop_opening(messages: Sequence[Message]) -> list[Message]:
    """Return `messages` without the assistant messages at the beginning.

    A system prompt before them is kept.
    """
    system = [message for message in messages[:1] if message["role"] == "system"]
    rest = messages[len(system) :]
    return [*system, *rest[_num_opening(rest) :]]
