"""The tags in which models write their reasoning, and functions that split messages at them."""

import re
from dataclasses import dataclass
from functools import cached_property

from redraft.distill.data.messages import Message


@dataclass(frozen=True)
class ReasoningForm:
    """The text around a model's reasoning and around the answer that follows it."""

    before: str
    between: str
    after: str = ""

    @cached_property
    def tags(self) -> tuple[str, str]:
        """The text before and after the reasoning, without line breaks."""
        return self.before.strip(), self.between.strip()

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self.tags)))

    @cached_property
    def empty(self) -> re.Pattern[str]:
        """Pattern for tags without reasoning, or only the closing tag, at the start of a text."""
        opening, closing = map(re.escape, self.tags)
        return re.compile(rf"\s*(?:{opening})?\s*{closing}\s*")

    @cached_property
    def _at_end(self) -> re.Pattern[str]:
        opening, closing = map(re.escape, self.tags)
        return re.compile(rf"(?:{opening}\s*)?(?:{closing}\s*)?\Z")

    def trailing_tags(self, prompt: str) -> str:
        found = self._at_end.search(prompt, max(0, len(prompt) - 64))
        return found.group() if found else ""

    def write(self, thought: str, said: str) -> str:
        said = said.strip() if self.after else said.lstrip()
        return f"{self.before}{thought.strip()}{self.between}{said}{self.after}"

    def read(self, content: str) -> tuple[str, str] | None:
        """Return (reasoning, answer) for a text in this form.

        Return None for any other text, and if there is no reasoning.
        """
        opening, closing = self.tags
        if closing not in content:
            return None
        text = content.lstrip()
        if not text.startswith(opening):
            return None
        thought, _, said = text.removeprefix(opening).partition(closing)
        if not thought.strip():
            return None
        return thought.strip(), said.removesuffix(self.after) if self.after else said.lstrip()

    def read_open(self, content: str) -> str:
        """Return the reasoning in a text that ends before its closing tag.

        Empty for any other text.
        """
        opening, text = self.tags[0], content.lstrip()
        is_open = text.startswith(opening) and not any(tag in content for tag in CLOSING_TAGS)
        return text.removeprefix(opening).strip() if is_open else ""


THINK = ReasoningForm("<think>\n", "\n</think>\n\n")

# Granite comes first, because THINK would also match such text.
REASONING_FORMS = (
    ReasoningForm("<think>", "</think><response>", "</response>"),  # Granite 3.3
    THINK,  # Qwen3, DeepSeek-R1, SmolLM3
    ReasoningForm("[THINK]", "[/THINK]"),  # Magistral
    ReasoningForm("<seed:think>", "</seed:think>"),  # Seed-OSS
    ReasoningForm("<|channel>thought\n", "\n<channel|>"),  # Gemma 4
)
CLOSING_TAGS = ("</think>", *(form.tags[1] for form in REASONING_FORMS))


def split_reasoning(message: Message) -> tuple[str, str, ReasoningForm | None] | None:
    """Return (reasoning, answer, the form used in the content) for an assistant message.

    Return None if there is no reasoning. The form is None if the reasoning is in a field. If a
    thought is not closed, the answer is empty.
    """
    if message["role"] != "assistant":
        return None
    content = message["content"]
    if message.get("reasoning"):
        return message["reasoning"].strip(), content, None
    for form in REASONING_FORMS:
        if parts := form.read(content):
            return *parts, form
    for form in REASONING_FORMS:
        if thought := form.read_open(content):
            return thought, "", form
    return None


def is_cut(message: Message) -> bool:
    """Whether the server cut an assistant message: it is marked as cut or has an open thought."""
    opens = any(form.read_open(message["content"]) for form in REASONING_FORMS)
    return message["role"] == "assistant" and (message.get("cut", False) or opens)


def without_reasoning(message: Message, content: str) -> Message:
    return {key: value for key, value in message.items() if key not in ("reasoning", "parts")} | {
        "content": content
    }
