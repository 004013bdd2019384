"""Conversations as token ids with a loss mask, every assistant turn rendered exactly as it is served.

Most chat templates do not mark the assistant's text, so the mask comes from comparing renderings. The prompt of turn i
is `render(messages[:i], add_generation_prompt=True)`, tokenised by itself, as a server does. The labels of turn i are
the rest of `render(messages[:i + 1])`, up to and including the end-of-turn token.

A template may rewrite earlier turns (Qwen3 drops the `<think>`). So a turn joins the sample of the turns before it only
if the served prompt starts with exactly the tokens of this sample; otherwise a new sample begins.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, TypeVar

import jinja2
import numpy as np
from numpy.typing import NDArray

from redraft.distill.data.conversations import Conversation, Message, conversation_hash, is_plain_text
from redraft.eval.prompts import Prompt
from redraft.heads.progress import Progress

T = TypeVar("T")

CHUNK = 256
"""Conversations tokenised in one call: a fast tokenizer works on them in parallel."""

REASONING_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Opening and closing of the reasoning that some models write before an answer: Qwen3 and DeepSeek-R1, Magistral, and
Seed-OSS."""

CHANNEL = "<|channel|>"
"""In the template of gpt-oss, which has a separate message for reasoning: text in tags would be learned as answer."""

PROBE = "redraft5f1cprobe"
"""Rendered in place of an answer, to find the text written around one by a template. Nothing in it can be trimmed
or parsed by a template."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One document to train on."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """Token t is a label: written by the assistant, or the end-of-turn token."""
    conversation: str
    """`conversation_hash` of the source."""
    domain: str


@dataclass(kw_only=True)
class SampleStats:
    """Counts kept by `build_samples`."""

    conversations: int = 0
    samples: int = 0
    tokens: int = 0
    labels: int = 0
    truncated: int = 0
    """Samples cut to the window."""
    without_answer: int = 0
    """Conversations without a non-empty assistant turn."""
    unprompted: int = 0
    """Answers at the beginning of a conversation, with nothing before them to answer."""
    refused: int = 0
    """Conversations refused by the chat template."""
    beyond_window: int = 0
    """Samples left out because the first label lies beyond the window."""
    refusal: str = ""
    """The template's first error message."""

    def add_refusal(self, error: jinja2.TemplateError) -> None:
        self.refused += 1
        self.refusal = self.refusal or str(error)

    def __str__(self) -> str:
        left_out = {
            "without an assistant turn": self.without_answer,
            "opening answers with no question before them": self.unprompted,
            f"refused by the chat template ({self.refusal})": self.refused,
            "with no answer inside the window": self.beyond_window,
        }
        parts = [f"{self.conversations:,} conversations: {self.samples:,} samples, {self.tokens:,} tokens"]
        parts[0] += f" ({self.labels:,} labels)"
        parts += [f"{count:,} {reason}" for reason, count in left_out.items() if count]
        if self.truncated:
            parts.append(f"{self.truncated:,} truncated to the window")
        return "; ".join(parts)


def build_samples(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    *,
    max_length: int,
    template_options: dict[str, Any] | None = None,
    day: datetime.date | None = None,
    progress: bool = True,
) -> tuple[list[Sample], SampleStats]:
    """Samples of at most `max_length` tokens, in the order of the conversations' hashes, with statistics.

    The rest of a longer conversation is dropped; a longer plain document is cut into several samples.
    `template_options` reach the chat template as they would in a request, e.g. `enable_thinking`. A template that
    writes today's date writes `day`; by default today.

    Raises:
        ValueError: if nothing is left to train on, or if a chat template is needed and the tokenizer has none.
    """
    # By hash, so that the samples do not depend on the order of the rows in a file.
    ordered = sorted((conversation_hash(c["messages"]), i) for i, c in enumerate(conversations))
    stats = SampleStats(conversations=len(conversations))
    render = Renderer(tokenizer, template_options or {}, day)
    samples: list[Sample] = []
    with Progress(total=len(ordered), desc="tokenising", unit="conv", disable=not progress) as bar:
        for start in range(0, len(ordered), CHUNK):
            chunk = [(key, conversations[i]) for key, i in ordered[start : start + CHUNK]]
            samples += _chunk_samples(chunk, render, max_length, stats)
            bar.update(len(chunk))
    if not samples:
        raise ValueError(f"nothing to train on: {stats}")
    stats.samples = len(samples)
    stats.tokens = sum(len(sample.input_ids) for sample in samples)
    stats.labels = sum(int(sample.loss_mask.sum()) for sample in samples)
    return samples, stats


def held_out_prompts(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    *,
    num_prompts: int,
    max_length: int,
    template_options: dict[str, Any] | None = None,
    day: datetime.date | None = None,
) -> list[Prompt]:
    """The prompts of the last assistant turn of up to `num_prompts` conversations, taken from each domain in turn.

    The conversations' hashes decide which. Prompts longer than `max_length` tokens are skipped; plain documents have
    no prompt. `template_options` and `day` are those of `build_samples`.

    Raises:
        ValueError: if no prompt is left.
    """
    render = Renderer(tokenizer, template_options or {}, day)
    stats = SampleStats()
    by_domain: dict[str, list[Conversation]] = {}
    for conversation in sorted(conversations, key=lambda c: conversation_hash(c["messages"])):
        if not is_plain_text(conversation):
            by_domain.setdefault(conversation["domain"], []).append(conversation)
    # One conversation of each domain per round, so that a small domain is not lost among large ones.
    in_turns = (c for round_ in zip_longest(*(by_domain[name] for name in sorted(by_domain))) for c in round_ if c)
    rendered = (_prompt(conversation, render, stats) for conversation in in_turns)
    fitting = (prompt for prompt in rendered if prompt and len(prompt.token_ids) <= max_length)
    prompts = list(islice(fitting, num_prompts))
    refusals = f"{stats.refused:,} refused by the chat template ({stats.refusal})" if stats.refused else ""
    if not prompts:
        raise ValueError(
            f"none of {len(conversations):,} conversations has a prompt of at most {max_length} tokens"
            + (f"; {refusals}" if refusals else "")
        )
    if refusals:
        print(f"held-out conversations: {refusals}")
    return prompts


def _prompt(conversation: Conversation, render: Renderer, stats: SampleStats) -> Prompt | None:
    """The prompt of the last assistant turn as a server renders it.

    None if the conversation has no other turn, or if the template refuses it, which is counted.
    """
    messages = conversation["messages"]
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if all(message["role"] == "assistant" for message in messages):
        return None
    try:
        text = render.retry_without_opening(messages, lambda messages: render(messages, prompt=True))
    except jinja2.TemplateError as error:
        stats.add_refusal(error)
        return None
    return Prompt(token_ids=render.tokenise([text])[0], domain=conversation["domain"])


def _chunk_samples(
    chunk: list[tuple[str, Conversation]], render: Renderer, max_length: int, stats: SampleStats
) -> Iterator[Sample]:
    turns = [_turns(conversation, render, stats) for _, conversation in chunk]
    tokenised = iter(render.tokenise_turns([turn for some in turns for turn in some]))
    for (key, conversation), some in zip(chunk, turns, strict=True):
        if is_plain_text(conversation):
            documents = _text_documents(conversation["messages"][0]["content"], render.tokenizer, max_length)
        else:
            documents = _documents([next(tokenised) for _ in some])
        for input_ids, loss_mask in documents:
            if not any(loss_mask[:max_length]):
                stats.beyond_window += 1
                continue
            stats.truncated += len(input_ids) > max_length
            yield Sample(
                input_ids=np.array(input_ids[:max_length], np.int32),
                loss_mask=np.array(loss_mask[:max_length], np.bool_),
                conversation=key,
                domain=conversation["domain"],
            )


def _turns(conversation: Conversation, render: Renderer, stats: SampleStats) -> list[Turn]:
    if is_plain_text(conversation):
        return []
    try:
        turns = render.turns(conversation)
    except jinja2.TemplateError as error:
        stats.add_refusal(error)
        return []
    unprompted = count_unprompted(conversation["messages"])
    stats.unprompted += unprompted
    stats.without_answer += not turns and not unprompted
    return turns


def _documents(turns: list[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[bool]]]:
    """(ids, mask) of the samples of one conversation, from the (prompt ids, answer ids) of the turns."""
    documents: list[tuple[list[int], list[bool]]] = []
    for prompt, answer in turns:
        ids, mask = documents[-1] if documents else ([], [])
        if prompt[: len(ids)] == ids:  # the last sample grows by this turn
            documents = documents[:-1]
        else:  # the template rewrote an earlier turn: a new sample
            ids, mask = [], []
        between = len(prompt) - len(ids)
        documents.append((prompt + answer, mask + [False] * between + [True] * len(answer)))
    return documents


def _text_documents(text: str, tokenizer: Any, max_length: int) -> list[tuple[list[int], list[bool]]]:
    """A plain text as windows of `max_length` tokens. The first token of each is not a label: nothing precedes it."""
    ids = tokenizer(text, verbose=False)["input_ids"]
    windows = [ids[start : start + max_length] for start in range(0, len(ids), max_length)]
    return [(window, [False] + [True] * (len(window) - 1)) for window in windows if len(window) > 1]


def data_hash(samples: Iterable[Sample]) -> str:
    """SHA-256 (hex) over the token ids and masks, in order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(len(sample.input_ids).to_bytes(8, "little"))
        digest.update(sample.input_ids.astype("<i4").tobytes())
        digest.update(np.packbits(sample.loss_mask).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Turn:
    """One assistant turn as served: the text read and the text written by the model."""

    prompt: str
    answer: str
    """Includes the end of turn."""


def writes_date(tokenizer: Any) -> bool:
    """Whether the chat template writes today's date, as those of Llama 3.2, SmolLM3 and gpt-oss do."""
    return "strftime_now" in str(tokenizer.chat_template)


class Renderer:
    """Applies a tokenizer's chat template as a server does, on one day."""

    def __init__(self, tokenizer: Any, template_options: dict[str, Any], day: datetime.date | None = None) -> None:
        """`day` is the date written by a template that writes today's; by default today."""
        self.tokenizer, self.template_options = tokenizer, template_options
        if writes_date(tokenizer):
            midnight = datetime.datetime.combine(day or datetime.date.today(), datetime.time())
            # An option shadows the global of the same name, which reads the clock.
            self.template_options = {"strftime_now": midnight.strftime, **template_options}
        self.reasoning_tags = find_reasoning_tags(tokenizer)
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted(special | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def __call__(self, messages: Sequence[Message], *, prompt: bool) -> str:
        """`messages` as text, followed by the generation prompt if they are a `prompt`.

        Raises:
            ValueError: if the tokenizer has no chat template.
        """
        if self.tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template: choose a tokenizer with one, or a data set with a `text` column"
            )
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt, **self.template_options
        )
        return text

    def tokenise(self, texts: list[str]) -> list[list[int]]:
        """Ids of rendered texts. No special tokens are added, because a template writes them itself."""
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def tokenise_turns(self, turns: list[Turn]) -> list[tuple[list[int], list[int]]]:
        """(prompt ids, answer ids) of each turn, the prompt tokenised by itself, as a server does.

        The answer's ids follow the prompt's when both are tokenised as one text. If a token merges across the border
        (an answer that begins with a newline), the answer is tokenised by itself: a generated token cannot merge with
        the prompt.
        """
        prompts = self.tokenise([turn.prompt for turn in turns])
        wholes = self.tokenise([turn.prompt + turn.answer for turn in turns])
        pairs = []
        for turn, prompt, whole in zip(turns, prompts, wholes, strict=True):
            keeps_prompt = whole[: len(prompt)] == prompt
            answer = whole[len(prompt) :] if keeps_prompt else self.tokenise([turn.answer])[0]
            pairs.append((prompt, answer))
        return pairs

    def turns(self, conversation: Conversation) -> list[Turn]:
        """Every non-empty assistant turn with a message before it to answer.

        A last turn cut at a length limit has no end of turn.
        """
        is_cut = bool(conversation.get("cut"))
        return self.retry_without_opening(conversation["messages"], lambda messages: self._turns(messages, is_cut))

    def retry_without_opening(self, messages: list[Message], work: Callable[[list[Message]], T]) -> T:
        """`work(messages)`. If the template refuses them, try without the assistant's messages before the first other.

        A third of ShareGPT begins with the assistant, because long chats were cut into parts. Some templates render
        that as context; others demand that the user begins.
        """
        messages = [self._with_own_tags(message) for message in messages]
        try:
            return work(messages)
        except jinja2.TemplateError:
            shorter = _drop_opening(messages)
            if len(shorter) == len(messages):
                raise
            return work(shorter)

    def _with_own_tags(self, message: Message) -> Message:
        """The message with its reasoning, if any, in the tags that the target writes.

        Raises:
            jinja2.TemplateError: if the target writes channels.
        """
        content = message["content"].lstrip()
        for opening, closing in REASONING_TAGS:
            if message["role"] != "assistant" or not content.startswith(opening) or closing not in content:
                continue
            if CHANNEL in str(self.tokenizer.chat_template):
                raise jinja2.TemplateError(f"reasoning in {opening}, while this target writes channels")
            if self.reasoning_tags in (None, (opening, closing)):
                return message  # unchanged to the last space; a plain template says nothing of tags
            thought, _, said = content.removeprefix(opening).partition(closing)
            return {**message, "content": write_reasoning(thought, said, self.reasoning_tags)}
        return message

    def _turns(self, messages: list[Message], is_cut: bool) -> list[Turn]:
        cut = len(messages) - 1 if is_cut else None
        turns = []
        for i in range(_num_opening(messages), len(messages)):
            if messages[i]["role"] == "assistant" and messages[i]["content"].strip():
                turns.append(self._turn(messages[:i], messages[i]["content"], is_ended=i != cut))
        return turns

    def _turn(self, before: list[Message], content: str, *, is_ended: bool) -> Turn:
        prompt = self(before, prompt=True)
        # The template's text around an answer.
        head, _, tail = self(add_answer(before, PROBE), prompt=False).rpartition(PROBE)
        end = self._through_special(tail) if is_ended else ""
        whole = self(add_answer(before, content), prompt=False)
        written = _strip_opening(prompt, content)
        if not (whole.startswith(prompt) and _dense(written) in _dense(whole[len(prompt) :])):
            # The template rewrites even the last answer (DeepSeek-R1 drops the reasoning), but the model wrote it all.
            return Turn(prompt, written + end)
        if head.removeprefix(prompt).strip() and whole.startswith(head) and not _writes_head(content, head, prompt):
            # The template wrote this, not the model (Qwen3's empty think block), so it belongs to the prompt.
            prompt = head
        return Turn(prompt, whole.removesuffix(tail)[len(prompt) :] + end)

    def _through_special(self, tail: str) -> str:
        """`tail` up to and including the first special token; empty if there is none."""
        found = self.special.search(tail)
        return tail[: found.end()] if found else ""


def find_reasoning_tags(tokenizer: Any) -> tuple[str, str] | None:
    """The tags of REASONING_TAGS in a tokenizer's chat template or vocabulary; None if it has none of them."""
    template, vocabulary = str(tokenizer.chat_template), tokenizer.get_vocab()
    for tags in REASONING_TAGS:
        if any(tag in template for tag in tags):
            return tags
    for tags in REASONING_TAGS:
        if tags[0] in vocabulary:
            return tags
    return None


def write_reasoning(thought: str, said: str, tags: tuple[str, str]) -> str:
    """Reasoning and answer as one text. Only models with `<think>` put line ends around the reasoning."""
    blank, gap = ("\n", "\n\n") if tags == REASONING_TAGS[0] else ("", "")
    return f"{tags[0]}{blank}{thought.strip()}{blank}{tags[1]}{gap}{said.lstrip()}"


def count_unprompted(messages: Sequence[Message]) -> int:
    """The number of non-empty answers at the beginning of a conversation, with nothing before them to answer."""
    return sum(bool(message["content"].strip()) for message in messages[: _num_opening(messages)])


def _num_opening(messages: Sequence[Message]) -> int:
    return next((i for i, message in enumerate(messages) if message["role"] != "assistant"), len(messages))


def _drop_opening(messages: Sequence[Message]) -> list[Message]:
    """`messages` without the assistant's before the first of another role; a system prompt stays."""
    system = [message for message in messages[:1] if message["role"] == "system"]
    rest = messages[len(system) :]
    return [*system, *rest[_num_opening(rest) :]]


def _writes_head(content: str, head: str, prompt: str) -> bool:
    """Whether the assistant wrote the head of the answer itself, rather than the template."""
    return content.lstrip().startswith(head.removeprefix(prompt).strip())


def _strip_opening(prompt: str, content: str) -> str:
    """The answer without the opening `<think>` if the prompt already ends with one."""
    opening, blank = "<think>", prompt[len(prompt.rstrip()) :]
    if not prompt.rstrip().endswith(opening) or not content.lstrip().startswith(opening):
        return content.lstrip()
    return content.lstrip().removeprefix(opening).removeprefix(blank)


def add_answer(before: Sequence[Message], content: str) -> list[Message]:
    return [*before, {"role": "assistant", "content": content}]


def _dense(text: str) -> str:
    """`text` without whitespace: templates trim and reflow."""
    return re.sub(r"\s+", "", text)
