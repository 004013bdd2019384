"""Conversations as token ids with a loss mask: every assistant turn in the rendering in which it is served.

Real chat templates mark nothing as the assistant's, so the mask comes from renderings: the prompt of turn i is
`render(messages[:i], add_generation_prompt=True)`, tokenised by itself as a server does, and what the model then writes
is the rest of `render(messages[:i + 1])` up to and with the end-of-turn token.

A template may rewrite earlier turns (Qwen3 drops their `<think>`). So a turn joins the sample of the turns before it
only where its served prompt starts with exactly that sample's tokens; otherwise it begins a sample of its own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from distill.data import Conversation, Message, conversation_hash, is_plain_text
from eval.prompts import Prompt

CHUNK = 256
"""Conversations tokenised in one call: a fast tokenizer works on them in parallel."""

PROBE = "redraft5f1cprobe"
"""Stands for an answer to learn what a template writes around it: no whitespace to trim, nothing to parse."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One document to train on."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """Token t is a label: written by the assistant, or its end-of-turn token."""
    conversation: str
    """`conversation_hash` of where it comes from."""
    domain: str


@dataclass(kw_only=True)
class SampleStats:
    """What became of the conversations."""

    conversations: int = 0
    samples: int = 0
    tokens: int = 0
    labels: int = 0
    truncated: int = 0
    """Samples cut to the window."""
    without_answer: int = 0
    """Conversations without an assistant turn that says anything."""
    refused: int = 0
    """Conversations that the chat template raises on."""
    beyond_window: int = 0
    """Samples left out because their first label lies beyond the window."""
    refusal: str = ""
    """What the template said the first time."""

    def __str__(self) -> str:
        left_out = {
            "without an assistant turn": self.without_answer,
            f"refused by the chat template ({self.refusal})": self.refused,
            "with no answer inside the window": self.beyond_window,
        }
        parts = [f"{self.conversations:,} conversations: {self.samples:,} samples, {self.tokens:,} tokens"]
        parts[0] += f" ({self.labels:,} labels)"
        parts += [f"{count:,} {what}" for what, count in left_out.items() if count]
        if self.truncated:
            parts.append(f"{self.truncated:,} truncated to the window")
        return "; ".join(parts)


def build_samples(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    *,
    max_length: int,
    template_options: dict[str, Any] | None = None,
    progress: bool = True,
) -> tuple[list[Sample], SampleStats]:
    """Samples of at most `max_length` tokens, in the order of their conversations' hashes, and what was left out.

    Conversations beyond the window keep their beginning; plain documents are cut into as many samples as they fill.
    `template_options` reach the chat template as they would in a request (`enable_thinking`, ...).

    Raises: ValueError where nothing is left to train on, or the tokenizer has no chat template and needs one.
    """
    ordered = sorted((conversation_hash(c["messages"]), i) for i, c in enumerate(conversations))
    stats = SampleStats(conversations=len(conversations))
    render = Renderer(tokenizer, template_options or {})
    samples: list[Sample] = []
    with tqdm(total=len(ordered), desc="tokenising", unit="conv", disable=not progress) as bar:
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
) -> list[Prompt]:
    """The prompts of the last assistant turn of up to `num_prompts` conversations, from every domain alike.

    Which ones is decided by the conversations' hashes. Those longer than `max_length` tokens are passed over, and plain
    documents have none.

    Raises: ValueError where none is left.
    """
    render = Renderer(tokenizer, template_options or {})
    by_domain: dict[str, list[Conversation]] = {}
    for conversation in sorted(conversations, key=lambda c: conversation_hash(c["messages"])):
        if not is_plain_text(conversation):
            by_domain.setdefault(conversation["domain"], []).append(conversation)
    in_turns = (c for round_ in zip_longest(*(by_domain[name] for name in sorted(by_domain))) for c in round_ if c)
    fitting = (prompt for c in in_turns if (prompt := _prompt(c, render)) and len(prompt.token_ids) <= max_length)
    prompts = list(islice(fitting, num_prompts))
    if not prompts:
        raise ValueError(f"none of {len(conversations):,} conversations has a prompt of at most {max_length} tokens")
    return prompts


def _prompt(conversation: Conversation, render: Renderer) -> Prompt | None:
    """What a server is given before the last assistant turn, generation prompt included."""
    messages = conversation["messages"]
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not messages:
        return None
    return Prompt(token_ids=render.tokenise([render(messages, prompt=True)])[0], domain=conversation["domain"])


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
        stats.refused += 1
        stats.refusal = stats.refusal or str(error)
        return []
    stats.without_answer += not turns
    return turns


def _documents(turns: list[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[bool]]]:
    """(ids, mask) of the samples that the (prompt ids, answer ids) of a conversation's turns make."""
    documents: list[tuple[list[int], list[bool]]] = []
    for prompt, answer in turns:
        ids, mask = documents[-1] if documents else ([], [])
        if prompt[: len(ids)] != ids:
            ids, mask = [], []
        else:
            documents = documents[:-1]
        between = len(prompt) - len(ids)
        documents.append((prompt + answer, mask + [False] * between + [True] * len(answer)))
    return documents


def _text_documents(text: str, tokenizer: Any, max_length: int) -> list[tuple[list[int], list[bool]]]:
    """A plain text as windows of `max_length`; the first token of each has nothing before it to be predicted from."""
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
    """One assistant turn as served."""

    prompt: str
    answer: str
    """What the model writes, end of turn included."""


class Renderer:
    """A tokenizer's own chat template, as a server applies it."""

    def __init__(self, tokenizer: Any, template_options: dict[str, Any]) -> None:
        self.tokenizer, self.template_options = tokenizer, template_options
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        longest_first = sorted(special | set(tokenizer.all_special_tokens), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def __call__(self, messages: Sequence[Message], *, prompt: bool) -> str:
        """`messages` as text, with the generation prompt where they are one."""
        if self.tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template: give a tokenizer that has one, or a data set of `text`"
            )
        text: str = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt, **self.template_options
        )
        return text

    def tokenise(self, texts: list[str]) -> list[list[int]]:
        """Ids of rendered texts: a template writes its special tokens itself."""
        return self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []

    def tokenise_turns(self, turns: list[Turn]) -> list[tuple[list[int], list[int]]]:
        """(prompt ids, answer ids) of each, the prompt as a server tokenises it.

        The answer's ids are those that follow the prompt's where both are tokenised as one text. Only where that merges
        across the border (an answer that begins with a newline) is it tokenised by itself: nothing generated can merge.
        """
        prompts = self.tokenise([turn.prompt for turn in turns])
        wholes = self.tokenise([turn.prompt + turn.answer for turn in turns])
        return [
            (prompt, whole[len(prompt) :] if whole[: len(prompt)] == prompt else self.tokenise([turn.answer])[0])
            for turn, prompt, whole in zip(turns, prompts, wholes, strict=True)
        ]

    def turns(self, conversation: Conversation) -> list[Turn]:
        """Every assistant turn that says something; one cut at a length limit has no end."""
        messages = conversation["messages"]
        unended = len(messages) - 1 if conversation.get("cut") else None
        return [
            self._turn(messages[:i], message["content"], ended=i != unended)
            for i, message in enumerate(messages)
            if message["role"] == "assistant" and message["content"].strip()
        ]

    def _turn(self, before: list[Message], content: str, *, ended: bool) -> Turn:
        prompt = self(before, prompt=True)
        head, _, tail = self(with_answer(before, PROBE), prompt=False).rpartition(PROBE)
        end = self._through_special(tail) if ended else ""
        whole = self(with_answer(before, content), prompt=False)
        written = _behind(prompt, content)
        if not (whole.startswith(prompt) and _dense(written) in _dense(whole[len(prompt) :])):
            # The template rewrites even the last answer (DeepSeek-R1 drops its reasoning): the model wrote `content`.
            return Turn(prompt, written + end)
        if head.removeprefix(prompt).strip() and whole.startswith(head) and not _begins_alike(content, head, prompt):
            # Written by the template, not by the model (Qwen3's empty think block): part of the prompt.
            prompt = head
        return Turn(prompt, whole.removesuffix(tail)[len(prompt) :] + end)

    def _through_special(self, tail: str) -> str:
        """`tail` up to its first special token, that included; nothing where it has none."""
        found = self.special.search(tail)
        return tail[: found.end()] if found else ""


def _begins_alike(content: str, head: str, prompt: str) -> bool:
    """Whether the assistant itself wrote what the template would put at the head of an answer."""
    return content.lstrip().startswith(head.removeprefix(prompt).strip())


def _behind(prompt: str, content: str) -> str:
    """What is left of an answer for the model to write: a prompt that opens `<think>` has its first line already."""
    opening, blank = "<think>", prompt[len(prompt.rstrip()) :]
    if not prompt.rstrip().endswith(opening) or not content.lstrip().startswith(opening):
        return content.lstrip()
    return content.lstrip().removeprefix(opening).removeprefix(blank)


def with_answer(before: Sequence[Message], content: str) -> list[Message]:
    return [*before, {"role": "assistant", "content": content}]


def _dense(text: str) -> str:
    return re.sub(r"\s+", "", text)
