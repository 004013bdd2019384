"""Write one assistant turn as served.

It consists of the text that the server reads, and the text that the target writes.
"""

from __future__ import annotations

import contextlib
import itertools
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

import jinja2

from redraft.distill.data.conditions import (
    Content,
    Turn,
    broken_condition,
    broken_thought,
    dense,
    missing_question,
)
from redraft.distill.data.messages import Message, Tool
from redraft.distill.data.reasoning import split_reasoning
from redraft.distill.data.template import Arguments

if TYPE_CHECKING:
    from redraft.distill.data.rendering import Renderer

PROBE = "redraft5f1cprobe"
"""Text that is rendered in place of a message, to find the text that a template writes around it. A
template can neither trim nor parse it."""

QUESTION: list[Message] = [{"role": "user", "content": "why?"}]

Way = Literal["from the prompt", "after an empty thought", "alone", "by hand"]
WAYS: tuple[Way, ...] = ("from the prompt", "after an empty thought", "alone", "by hand")
"""Ways to find what the target wrote, best first:

- the rendering after the generation prompt;
- the same, if the template, not the target, writes the tags of an empty thought first;
- the rendering after a single question, because an answer may change the turns before it: gpt-oss
  drops the reasoning before a tool call once the call has led to an answer, which did not exist when
  the server made the prompt;
- the answer's own text, because some templates drop the reasoning even of the last answer
  (DeepSeek-R1).
"""


class RefusedAnswerError(ValueError):
    """Raised for an answer that the chat template does not render as the target writes it."""


class Choice(NamedTuple):
    way: Way
    arguments: Arguments


class Kind(NamedTuple):
    """Traits of an answer that determine the best way to render it."""

    thinks: bool
    calls: bool


PROBES: dict[Kind, Message] = {
    Kind(thinks, calls): {
        "role": "assistant",
        "content": "" if calls else "so",
        **({"reasoning": "hm"} if thinks else {}),
        **(
            {
                "tool_calls": [
                    {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
                ]
            }
            if calls
            else {}
        ),
    }
    for thinks, calls in itertools.product((False, True), repeat=2)
}
"""One short answer for each combination of traits."""


class TurnWriter:
    """Writes turns with one template, and checks each against the conditions in `conditions`."""

    def __init__(self, render: Renderer) -> None:
        self.render = render
        self._best: dict[tuple[Kind, str], list[Choice]] = {}
        self._known: dict[tuple[str, bool, bool], str] = {}

    def __call__(
        self,
        before: list[Message],
        tools: list[Tool] | None,
        message: Message,
        *,
        is_ended: bool,
        given: Arguments,
    ) -> Turn:
        """Write the turn for an assistant message that follows the messages `before`.

        `before` has the form in which a client sends the messages. `given` contains the request's
        template arguments, as recorded in the data.

        Raises:
            RefusedAnswerError: no way to write the turn satisfies the conditions.
        """
        kind = Kind(self._thinks(message), "tool_calls" in message)
        if kind.thinks and "reasoning" in message and self._has_no_place_for_reasoning:
            raise RefusedAnswerError("with reasoning, but the chat template has no tags for it")
        turn, _ = self._first(
            _Answer(self, before, tools, message, is_ended=is_ended), self._choices(kind, given)
        )
        return turn

    def split(self, message: Message) -> tuple[str, str]:
        """Return (reasoning, remaining text) for an assistant message.

        If the server opens the thought in its prompt, the answer has no opening tag.
        """
        if parts := split_reasoning(message):
            return parts[0], parts[1]
        form, content = self.render.reasoning_form, message["content"]
        before, closing, after = content.partition(form.tags[1]) if form else (content, "", "")
        if closing and before.strip() and form and form.tags[0] not in before:
            return before.strip(), after.lstrip()
        return "", content

    def _thinks(self, message: Message) -> bool:
        """Whether the target wrote a thought, even an empty one.

        The target writes no tags after a prompt that switches the reasoning off.
        """
        form = self.render.reasoning_form
        is_empty = form is not None and form.empty.match(message["content"]) is not None
        return is_empty or bool(self.split(message)[0])

    @property
    def _has_no_place_for_reasoning(self) -> bool:
        return self.render.reads_reasoning_from == "content" and self.render.reasoning_form is None

    def _choices(self, kind: Kind, given: Arguments) -> list[Choice]:
        """Return all choices, beginning with the best one for a short answer of this kind."""
        key = kind, repr(given)
        if key not in self._best:
            fitting = self.render.arguments_for(given, thinks=kind.thinks)
            natural = [Choice(way, arguments) for way in WAYS for arguments in fitting]
            first = []
            with contextlib.suppress(RefusedAnswerError, jinja2.TemplateError):
                probe = _Answer(self, QUESTION, None, PROBES[kind], is_ended=True)
                first = [self._first(probe, natural)[1]]
            self._best[key] = [*first, *natural]
        return self._best[key]

    @staticmethod
    def _first(answer: _Answer, choices: list[Choice]) -> tuple[Turn, Choice]:
        reason = error = None
        for choice in choices:
            try:
                written = answer.write(choice)
            except jinja2.TemplateError as refused:  # e.g. a template that requires tools
                error = error or refused
                continue
            if not isinstance(written, str):
                return written, choice
            reason = reason or written
        if reason is None and error is not None:
            raise error
        raise RefusedAnswerError(reason)

    def find_end(self, tail: str, arguments: Arguments, *, calls: bool) -> str:
        """Return the end of turn after an answer.

        This is `tail`, which the template writes after the last answer, up to a stop token.
        Otherwise, it is the first token of the next turn, at which GLM-4.5, for example, stops.
        """
        if self.render.ends is None:
            return self.render.through_special(tail)
        if end := self.render.through_end(tail):
            return end
        following = self._after(arguments, calls=calls, is_last=False)
        return self.render.find_end(following) if calls else self.render.through_end(following)

    def find_tail(self, arguments: Arguments) -> str:
        """Return the template's text after the answer to a single question.

        The answer contains no calls, and ends the conversation.
        """
        return self._after(arguments, calls=False, is_last=True)

    def ends_calls(self, arguments: Arguments) -> bool:
        """Whether the template writes a special token after the last call."""
        return bool(self.render.special.search(self._after(arguments, calls=True, is_last=True)))

    def _after(self, arguments: Arguments, *, calls: bool, is_last: bool) -> str:
        """Return the template's text between an answer (or a call) and the next message."""
        key = (repr(arguments), calls, is_last)
        if key not in self._known:
            self._known[key] = self._render_after(arguments, calls=calls, is_last=is_last)
        return self._known[key]

    def _render_after(self, arguments: Arguments, *, calls: bool, is_last: bool) -> str:
        function = {"name": "f", "arguments": {PROBE: PROBE}}
        call = {
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        }
        answer = {"role": "assistant", **(call if calls else {"content": PROBE})}
        result = {"role": "tool", "content": "x", "tool_call_id": "1"}
        following = [] if is_last else [result] if calls else QUESTION
        try:
            text = self.render([*QUESTION, answer, *following], prompt=False, arguments=arguments)
        except jinja2.TemplateError:
            return ""
        return text.rpartition(PROBE)[2]


class _Answer:
    def __init__(
        self,
        writer: TurnWriter,
        before: list[Message],
        tools: list[Tool] | None,
        message: Message,
        *,
        is_ended: bool,
    ) -> None:
        self.writer, self.render, self.before, self.tools, self.message = (
            writer,
            writer.render,
            before,
            tools,
            message,
        )
        self.is_ended = is_ended
        self._seen: dict[str, tuple[str, str]] = {}

    @property
    def _calls(self) -> bool:
        return "tool_calls" in self.message

    @cached_property
    def _parts(self) -> tuple[str, str]:
        return self.writer.split(self.message)

    @cached_property
    def _answer(self) -> Message:
        return self.render.as_answer(self.message)

    @cached_property
    def _content(self) -> Content:
        question, results = "", list[str]()
        for message in reversed(self.before):
            if message["role"] == "user":
                question = message["content"]
                break
            results += [message["content"]] if message["role"] == "tool" else []
        functions = [call["function"] for call in self.message.get("tool_calls", [])]
        names = tuple(
            text for function in functions for text in (function["name"], *function["arguments"])
        )
        thought, said = self._parts
        return Content(
            systems=tuple(
                message["content"] for message in self.before if message["role"] == "system"
            ),
            question=question,
            results=tuple(results),
            thought=thought,
            said=said,
            call_names=names,
            is_ended=self.is_ended,
        )

    @cached_property
    def _alone(self) -> _Answer:
        return _Answer(self.writer, QUESTION, None, self.message, is_ended=self.is_ended)

    def write(self, choice: Choice) -> Turn | str:
        way, arguments = choice
        prompt, whole = self._render(arguments)
        if way == "alone":
            return self._write_alone(prompt, arguments)
        turn = (
            self._by_hand(prompt, arguments)
            if way == "by hand"
            else self._find(prompt, whole, way, arguments)
        )
        if turn is None:
            return self._absence
        form, ends = self.render.reasoning_form, self.render.ends
        return broken_condition(turn, self._content, whole, form, ends) or turn

    @property
    def _absence(self) -> str:
        thought, _ = self._parts
        part = "tool calls" if self._calls else "reasoning" if thought else "text"
        return f"with {part} that the chat template leaves out"

    def _render(self, arguments: Arguments) -> tuple[str, str]:
        """Return (the prompt, the text that includes the answer), each rendered only once."""
        key = repr(arguments)
        if key not in self._seen:
            prompt = self.render(self.before, prompt=True, tools=self.tools, arguments=arguments)
            self._seen[key] = prompt, self._whole(self._answer, arguments)
        return self._seen[key]

    def _whole(self, answer: Message, arguments: Arguments) -> str:
        messages = [*self.before, {"role": "assistant", **answer}]
        return self.render(messages, prompt=False, tools=self.tools, arguments=arguments)

    def _write_alone(self, prompt: str, arguments: Arguments) -> Turn | str:
        if self.before == QUESTION:
            return self._absence
        alone = self._alone.write(Choice("after an empty thought", arguments))
        if isinstance(alone, str):
            return alone
        before = self._alone._render(arguments)[0]
        # If the thought that the prompt opens was closed before the answer, the prompt differs, so
        # this way does not apply.
        if not alone.prompt.startswith(before):
            return self._absence
        prompt += alone.prompt.removeprefix(before)
        turn = Turn(prompt, self._strip_opening(prompt, alone.answer), arguments)
        return (
            missing_question(prompt, self._content)
            or broken_thought(turn, self._content, self.render.reasoning_form)
            or turn
        )

    def _find(self, prompt: str, whole: str, way: Way, arguments: Arguments) -> Turn | None:
        tail = "" if self._calls else self._tail(whole, arguments)
        text = whole[: len(whole) - len(tail)]
        start = self._end_of_empty_thought(prompt, text)
        if way == "from the prompt" and start is not None:
            return None
        if start is None:
            if not text.startswith(prompt):
                return None
            start = len(prompt)
        answer = (
            self._end_calls(text[start:], arguments)
            if self._calls
            else self._end(text[start:], tail, arguments)
        )
        return Turn(text[:start], answer, arguments)

    def _end_of_empty_thought(self, prompt: str, text: str) -> int | None:
        """Return the end of an empty thought that the template wrote, not the target.

        The end is an index in the rendering. Return None if there is no such thought.
        """
        form = self.render.reasoning_form
        if form is None:
            return None
        base = prompt if text.startswith(prompt) else prompt.rstrip().removesuffix(form.tags[0])
        found = form.empty.match(text, len(base)) if text.startswith(base) else None
        content = self._answer["content"]
        if found is None or dense(self._strip_opening(prompt, content)).startswith(
            dense(found.group())
        ):
            return None
        # Whitespace after the tags may belong to the answer.
        place = text.find(content, len(base)) if content.strip() else -1
        return found.end() if place < 0 else min(found.end(), place)

    def _by_hand(self, prompt: str, arguments: Arguments) -> Turn | None:
        thought, said = self._parts
        if self._calls or (thought and self.render.reads_reasoning_from == "fields"):
            return None
        form, content = self.render.reasoning_form, self._answer["content"]
        if form:
            opening, closing = form.tags
            is_open = prompt.rstrip().endswith(opening)
            if is_open and closing not in content and not thought:
                between = form.between if prompt != prompt.rstrip() else closing
                prompt = prompt.rstrip() + ("\n" if prompt != prompt.rstrip() else "") + between
            elif is_open and "reasoning" in self.message and prompt.endswith(opening):
                # If there is no line break after the opening tag, there is none around the closing
                # tag either.
                content = opening + thought + closing + said
        written = self._strip_opening(prompt, content.lstrip())
        return Turn(
            prompt, self._end(written, self.writer.find_tail(arguments), arguments), arguments
        )

    def _strip_opening(self, prompt: str, content: str) -> str:
        """Return the answer without its opening tag if the prompt already ends with that tag."""
        form = self.render.reasoning_form
        opening, blank = form.tags[0] if form else "", prompt[len(prompt.rstrip()) :]
        if (
            not form
            or not prompt.rstrip().endswith(opening)
            or not content.lstrip().startswith(opening)
        ):
            return content
        written = content.lstrip().removeprefix(opening)
        return written.removeprefix(blank) if written.startswith(blank) else written.lstrip()

    def _tail(self, whole: str, arguments: Arguments) -> str:
        usual, ending = self.writer.find_tail(arguments), self._answer["content"].rstrip()[-64:]
        if whole.endswith(usual) and whole[: len(whole) - len(usual)].rstrip().endswith(ending):
            return usual
        return self._whole({"content": PROBE}, arguments).rpartition(PROBE)[2]

    def _end(self, text: str, tail: str, arguments: Arguments) -> str:
        """Return a text answer with its end of turn, or through the word at which it was cut."""
        if self.is_ended:
            return text + self.writer.find_end(tail, arguments, calls=False)
        thought, said = self._parts
        # The template closes a truncated thought.
        return text if said.strip() else text[: text.rfind(thought) + len(thought)]

    def _end_calls(self, text: str, arguments: Arguments) -> str:
        """Return an answer with tool calls.

        The answer extends through the special token after the calls, or up to the next turn.
        """
        last = None
        if self.writer.ends_calls(arguments):
            *_, last = self.render.special.finditer(text)
        if last is None:
            end = self.writer.find_end("", arguments, calls=True) if self.is_ended else ""
            return text.rstrip() + end
        return text[: last.end() if self.is_ended else last.start()]
