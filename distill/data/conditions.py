"""Five conditions that a turn must meet before it is learned.

A wrong loss mask lowers acceptance, and has no other visible effect."""

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from redraft.distill.data.reasoning import ReasoningForm
from redraft.distill.data.template import Arguments

SWITCH = re.compile(r"/(?:no_?)?think\b")  # words in a prompt that templates interpret as a switch
ASCII_WORD = re.compile(r"(?<![\\\w])[a-zA-Z0-9]+(?!\w)", re.ASCII)


@dataclass(frozen=True)
class Turn:
    """An assistant turn as served: the model's prompt, and the text that the model generates."""

    prompt: str
    answer: str
    """The text that the model writes, including the end of turn."""
    arguments: Arguments = field(default_factory=dict)
    """Template arguments of the request with this prompt."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """The parts of a conversation that must appear in a turn."""

    systems: tuple[str, ...] = ()
    """System prompts, including those between two turns."""
    question: str
    """The user's last message before the answer."""
    results: tuple[str, ...] = ()
    """Tool results since that message."""
    thought: str
    said: str
    call_names: tuple[str, ...]
    """Names of functions and arguments, each repeated as often as it must appear."""
    is_ended: bool
    """Whether the answer ended with an end token instead of at a length limit."""


def broken_condition(
    turn: Turn,
    content: Content,
    rendered: str,
    form: ReasoningForm | None,
    ends: Collection[str] | None,
) -> str | None:
    """Return the reason why a turn cannot be learned, or None if it can.

    `rendered` is the rendered conversation through the answer, `form` is the form of the reasoning,
    and `ends` contains the texts of the stop tokens.
    """
    end = next((text for text in ends or () if turn.answer.endswith(text)), "")
    written = turn.answer.removesuffix(end)
    if missing := missing_question(turn.prompt, content):
        return missing
    if not is_in(content.thought, written):
        return "with reasoning that the chat template leaves out"
    if any(written.count(name) < count for name, count in Counter(content.call_names).items()):
        return "with tool calls that the chat template leaves out"
    if not is_in(content.said, written):
        is_beside = "text in addition to tool calls" if content.call_names else "text"
        return f"with {is_beside} that the chat template leaves out"
    if content.is_ended and ends is not None and not end:
        return "whose end in the chat template does not end generation"
    if not content.is_ended and end:
        return "with an end of turn, although it was truncated at a length limit"
    if any(text in written for text in ends or ()):
        return "with a stop token inside"
    if broken := broken_thought(turn, content, form):
        return broken
    if not rendered.startswith(turn.prompt + written) and not _is_rendered(
        turn, written, content, rendered, form
    ):
        return "that the chat template does not render after their prompt"
    return None


def missing_question(prompt: str, content: Content) -> str | None:
    """Return the reason if a prompt lacks text that the answer depends on, otherwise None."""
    for name, text in (
        ("question", content.question),
        *(("system prompt", text) for text in content.systems),
    ):
        if not is_in(text, prompt) and not is_in(SWITCH.sub("", text), prompt):
            return f"whose {name} the chat template leaves out"
    if not all(_has_words(result, prompt) for result in content.results):
        return "whose tool result the chat template leaves out"
    return None


def broken_thought(turn: Turn, content: Content, form: ReasoningForm | None) -> str | None:
    """Return the reason if the tags in prompt and answer do not form one thought, or None."""
    if form is None or _thinks_once(turn, content, form):
        return None
    return "whose reasoning does not open and close once after the prompt"


def dense(text: str) -> str:
    """Return `text` without whitespace, because templates trim and reflow text."""
    return "".join(text.split())


def is_in(part: str, text: str) -> bool:
    return part.strip() in text or dense(part) in dense(text)


def _has_words(result: str, text: str) -> bool:
    """Whether `text` contains a tool result, which templates escape as JSON or markup."""
    return is_in(result, text) or all(word in text for word in ASCII_WORD.findall(result))


def _thinks_once(turn: Turn, content: Content, form: ReasoningForm) -> bool:
    """Whether exactly one thought opens and closes, or there is none.

    The check starts from the state in which the prompt ends.
    """
    opening, closing = form.tags
    answer, said = turn.answer, content.said.strip()
    if said and said in answer:
        answer = answer.rpartition(said)[0]
    elif content.call_names:
        answer = answer.partition(content.call_names[0])[0]
    before, written = (
        form.pattern.findall(form.trailing_tags(turn.prompt)),
        form.pattern.findall(answer),
    )
    if closing in before:  # the server starts the answer after the thought
        return not written and not content.thought
    if not said and not content.is_ended and before + written == [opening]:
        return True  # cut while it thought
    return before + written == ([opening, closing] if content.thought or before + written else [])


def _is_rendered(
    turn: Turn, written: str, content: Content, rendered: str, form: ReasoningForm | None
) -> bool:
    """Whether the turn is rendered, except for reasoning, which many templates drop."""
    texts = (
        form.pattern.sub("", text) if form else text for text in (rendered, turn.prompt, written)
    )
    whole, prompt, answer = map(dense, texts)
    if not whole.startswith(prompt):
        return False
    rest = whole.removeprefix(prompt)
    return rest.startswith((answer, answer.removeprefix(dense(content.thought))))
