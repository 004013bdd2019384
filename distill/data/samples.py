"""Conversations as token ids with a loss mask.

Every assistant turn is rendered exactly as it is served.

A template may rewrite earlier turns (Qwen3 drops the `<think>`). So a turn joins the sample of the
turns before it only if the served prompt starts with exactly the tokens of this sample. Otherwise,
a new sample begins.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from redraft.distill.data.conditions import Turn, is_in
from redraft.distill.data.conversations import Conversation, is_plain_text, split_key
from redraft.distill.data.messages import Message, conversation_hash
from redraft.distill.data.modes import name_mode
from redraft.distill.data.processes import map_in_processes
from redraft.distill.data.rendering import (
    EXCLUDED,
    PackedTurn,
    Renderer,
    TurnBatch,
    count_unprompted,
)
from redraft.distill.data.sessions import StoredTurn, TokenTurn, expand_turns
from redraft.distill.data.template import Arguments
from redraft.engine.prompts import Prompt
from redraft.files.progress import Progress
from redraft.files.setting_error import SettingError

CHUNK, CHUNK_CHARS = 256, 1 << 20
"""Maximum number of conversations, and approximate maximum number of characters, that are tokenised
in one call. A fast tokenizer processes them in parallel, and takes a few hundred bytes of memory
per token.
"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """Whether token t is a label, i.e. an assistant token or the end of turn."""
    conversation: str
    """`conversation_hash` of the source conversation."""
    domain: str
    arguments: str = "{}"
    """Template arguments of the sample's first answer, as JSON."""


@dataclass(kw_only=True)
class SampleStats:
    conversations: int = 0
    samples: int = 0
    tokens: int = 0
    labels: int = 0
    cut: int = 0
    """Number of conversations cut at a turn because the next answer ends beyond the window.
    """
    truncated: int = 0
    """Number of answers truncated at the window: on request, or because there is no earlier turn to
    cut at.
    """
    left_out: int = 0
    """Number of answers omitted because they follow other answers in the same conversation and end
    beyond the window.
    """
    beyond_window: int = 0
    """Number of conversations whose first answer begins beyond the window."""
    labels_beyond: int = 0
    """Number of labels that are in no sample because of these cuts and omissions."""
    without_answer: int = 0
    """Number of conversations without a non-empty assistant turn."""
    unprompted: int = 0
    """Number of answers at the start of a conversation, with no prompt before them."""
    lone_tokens: int = 0
    """Number of plain texts whose last token is alone in a window, with nothing to learn."""
    refused_answers: Counter[str] = field(default_factory=Counter)
    """Number of answers that are used only as context, by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """The first question whose answer was refused, for each reason."""
    arguments: Counter[str] = field(default_factory=Counter)
    """Number of answers by the template arguments (JSON) with which a server renders their prompts.
    """
    ends: Counter[str] = field(default_factory=Counter)
    """Number of answers by stop token (empty for truncated answers)."""
    exact: int = 0
    """Number of answers whose token ids, including the prompt's, come from the server."""
    foreign_ids: int = 0
    """Number of conversations that contained a different tokenizer's ids and were tokenised again
    from their text.
    """
    marked_texts: int = 0
    """Number of plain texts that contain special tokens. These texts may be rendered chats, and
    training on them would include the user turns.
    """
    refusals: Counter[str] = field(default_factory=Counter)
    """Number of refused conversations, by the first line of the error."""

    def add(self, other: SampleStats) -> None:
        for name, theirs in vars(other).items():
            mine = getattr(self, name)
            # All other values are numbers or counters. The first example of a reason is kept.
            setattr(self, name, theirs | mine if name == "examples" else mine + theirs)

    def add_sample(self, sample: Sample) -> None:
        self.samples += 1
        self.tokens += len(sample.input_ids)
        self.labels += int(sample.loss_mask.sum())

    def add_refusal(self, error: jinja2.TemplateError, conversation: Conversation) -> None:
        self.refusals[_reason(error)] += 1
        self.add_example(f"by the chat template ({_reason(error)})", conversation)

    def add_example(self, reason: str, conversation: Conversation) -> None:
        question = next((m["content"] for m in conversation["messages"] if m["role"] == "user"), "")
        self.examples.setdefault(reason, question[:80])

    @property
    def share_beyond(self) -> float:
        """Share of all labels that are omitted because they lie beyond the window."""
        return self.labels_beyond / max(self.labels + self.labels_beyond, 1)

    def chosen_arguments(self) -> Arguments:
        return dict(json.loads(self.arguments.most_common(1)[0][0])) if self.arguments else {}

    def describe_arguments(self) -> str:
        named = [f"{key} for {count:,} answers" for key, count in self.arguments.most_common()]
        return f"template arguments: {', '.join(named)}" if set(self.arguments) - {"{}"} else ""

    def losses(self) -> Iterator[str]:
        counts = {
            "conversations without an assistant turn": self.without_answer,
            "opening answers with no question before them": self.unprompted,
            **{
                f"conversations refused by the chat template ({why})": count
                for why, count in self.refusals.items()
            },
            **{
                f"answers not learned, {reason}": count
                for reason, count in self.refused_answers.items()
            },
            "conversations with no answer inside the window": self.beyond_window,
            "conversations cut at a turn to fit the window": self.cut,
            "answers cut at the window": self.truncated,
            "later answers beyond the window left out": self.left_out,
            f"labels beyond the window left out, {self.share_beyond:.1%} of all": self.labels_beyond,
            "conversations with token ids of a different tokenizer, tokenised again": self.foreign_ids,
            "tokens of plain text left out, each alone in its window": self.lone_tokens,
            (
                "plain texts with special tokens, trained on in full, including user turns: give "
                "`messages` instead"
            ): self.marked_texts,
        }
        return (f"{count:,} {loss}" for loss, count in counts.items() if count)

    def __str__(self) -> str:
        size = (
            f"{self.conversations:,} conversations: {self.samples:,} samples, {self.tokens:,} "
            "tokens"
        )
        exact = [f"{self.exact:,} answers use the server's token ids"] if self.exact else []
        return "; ".join([f"{size} ({self.labels:,} labels)", *exact, *self.losses()])


def build_samples(
    conversations: Sequence[Conversation], tokenizer: Any, **options: Any
) -> tuple[list[Sample], SampleStats]:
    """Return the samples and their statistics; options and errors are as in `stream_samples`."""
    stats = SampleStats()
    return list(stream_samples(conversations, tokenizer, stats, **options)), stats


def stream_samples(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    stats: SampleStats,
    *,
    max_length: int,
    cuts_answers: bool = False,
    template_options: dict[str, Any] | None = None,
    day: datetime.date | None = None,
    ends: Collection[int] | None = None,
    progress: bool = True,
    purpose: str = "to train on",
) -> Iterator[Sample]:
    """Yield samples of at most `max_length` tokens, and count them in `stats`.

    The samples are in the order of the conversations' hashes. A conversation that is too long is
    cut after the last answer that fits, and the remainder is dropped. If not even the first answer
    fits, or with `cuts_answers`, the next answer is kept up to the end of the sample. A plain
    document that is too long is split into several samples. `template_options` are passed to the
    chat template as in a request, e.g. `enable_thinking`. A template that writes today's date
    writes `day` instead, which is then required. `ends` are the stop ids. If they are given, an
    answer with a different end of turn is refused.

    Raises:
        ValueError: nothing is left for the `purpose` (raised at the end), or a chat template is
            needed but the tokenizer has none.
    """
    # Sort by hash, so that the samples do not depend on the order of the rows in a file.
    ordered = sorted((conversation_hash(c["messages"]), i) for i, c in enumerate(conversations))
    chunks = list(_chunks((key, conversations[i]) for key, i in ordered))
    stats.conversations += len(conversations)
    work = functools.partial(_chunk_samples, max_length=max_length, cuts_answers=cuts_answers)
    make = functools.partial(Renderer, tokenizer, template_options or {}, day, ends)
    with Progress(total=len(ordered), desc="tokenising", unit="conv", disable=not progress) as bar:
        for chunk, (samples, counted) in zip(
            chunks, map_in_processes(work, make, chunks), strict=True
        ):
            stats.add(counted)
            for sample in samples:
                stats.add_sample(sample)
                yield sample
            bar.update(len(chunk))
    if not stats.samples:
        raise ValueError(f"nothing {purpose}: {stats}")


def _chunks(
    conversations: Iterable[tuple[str, Conversation]],
) -> Iterator[list[tuple[str, Conversation]]]:
    chunk: list[tuple[str, Conversation]] = []
    size = 0
    for key, conversation in conversations:
        chunk.append((key, conversation))
        size += sum(len(message["content"]) for message in conversation["messages"])
        if len(chunk) == CHUNK or size > CHUNK_CHARS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def held_out_prompts(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    *,
    num_prompts: int,
    max_length: int,
    usual: Arguments | None = None,
    day: datetime.date | None = None,
    beside: Iterable[Prompt] = (),
) -> list[Prompt]:
    """Return up to `num_prompts` different prompts for the conversations' last assistant turns.

    The prompts are taken from each domain in turn, and the conversations' hashes decide which ones.
    Conversations with the same first question, such as a session recorded after each turn, are not
    independent: one is taken for each first question before a second one is taken for any of them.
    Prompts that occur in `beside` are excluded, and so are repeats: an answer follows from its
    prompt, so they would count the same evidence again. Prompts longer than `max_length` tokens are
    excluded too, and plain documents have no prompt. One line is printed with the number of
    excluded prompts for each reason. `day` is as in `stream_samples`. A prompt uses the template
    arguments that its conversation records, or otherwise the `usual` ones: by default, the
    arguments of most answers. If the prompts then use several thinking modes, each domain is split by mode.

    Raises:
        ValueError: no prompt is left.
    """
    if usual is None:
        usual = choose_arguments(conversations, tokenizer, day)
    render, left_out = Renderer(tokenizer, {}, day), Counter[str]()
    by_domain: dict[str, list[Conversation]] = {}
    for conversation in _spread(conversations):
        if is_plain_text(conversation):
            left_out["plain texts"] += 1
        else:
            by_domain.setdefault(conversation["domain"], []).append(conversation)
    # Take one conversation of each domain per round, so that a small domain is not lost among large
    # ones.
    in_turns = (
        c
        for round_ in zip_longest(*(by_domain[name] for name in sorted(by_domain)))
        for c in round_
        if c
    )
    prompts, modes, seen = (
        list[Prompt](),
        list[str](),
        {tuple(prompt.token_ids) for prompt in beside},
    )
    while len(prompts) < num_prompts and (asked := next(in_turns, None)):
        # If a conversation records its arguments, they are complete, even if empty.
        arguments = render.known_arguments(asked) if "arguments" in asked else usual
        prompt = _prompt(asked, render, arguments, max_length)
        if not isinstance(prompt, Prompt):
            left_out[prompt] += 1
        elif (key := tuple(prompt.token_ids)) in seen:
            left_out["repeated"] += 1
        else:
            seen.add(key)
            prompts.append(prompt)
            modes.append(name_mode(arguments))
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in left_out.items())
    if conversations and left_out["plain texts"] == len(conversations):
        raise SettingError(
            "plain texts contain no prompts to evaluate on: give some with {prompts} FILE"
        )
    if not prompts:
        raise SettingError(
            f"none of {len(conversations):,} conversations has a prompt of at most {max_length} "
            f"tokens: raise {{max_prompt_tokens}}{f'; {reasons}' if reasons else ''}"
        )
    if left_out:
        print(f"held-out prompts: {len(prompts):,}; left out: {reasons}")
    if len(set(modes)) > 1:
        prompts = [
            replace(prompt, domain=f"{prompt.domain}, {mode or 'default mode'}")
            for prompt, mode in zip(prompts, modes, strict=True)
        ]
    return prompts


def _spread(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Order conversations by hash: first one for each first question, then a second one, and so on."""
    ranks = Counter[str]()
    ranked: list[tuple[int, Conversation]] = []
    for conversation in sorted(conversations, key=lambda c: conversation_hash(c["messages"])):
        ranked.append((ranks[key := split_key(conversation)], conversation))
        ranks[key] += 1
    return [conversation for _, conversation in sorted(ranked, key=lambda one: one[0])]


def choose_arguments(
    conversations: Sequence[Conversation], tokenizer: Any, day: datetime.date | None
) -> Arguments:
    render, counts = Renderer(tokenizer, {}, day), SampleStats()
    if tokenizer.chat_template is None or len(render.arguments) == 1:
        return {}
    for conversation in conversations[:CHUNK]:
        with suppress(jinja2.TemplateError):
            written, _ = render.turns(conversation, lambda turn: json.dumps(turn.arguments))
            counts.arguments.update(written)
    return counts.chosen_arguments()


def _prompt(
    conversation: Conversation, render: Renderer, arguments: Arguments, max_length: int
) -> Prompt | str:
    """Render the last assistant turn's prompt as a server does, or return why it is excluded."""
    messages = conversation["messages"]
    if messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if all(message["role"] == "assistant" for message in messages):
        return "with nothing to answer"
    try:
        text = render.prompt(messages, conversation.get("tools"), arguments)
    except jinja2.TemplateError as error:
        return f"refused by the chat template ({_reason(error)})"
    prompt = Prompt(token_ids=render.tokenise([text])[0], domain=conversation["domain"])
    return prompt if len(prompt.token_ids) <= max_length else f"longer than {max_length:,} tokens"


def _reason(error: jinja2.TemplateError) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _chunk_samples(
    render: Renderer,
    chunk: list[tuple[str, Conversation]],
    max_length: int,
    *,
    cuts_answers: bool,
) -> tuple[list[Sample], SampleStats]:
    samples, stats, batch = [], SampleStats(), render.batch()
    exact = [_exact_turns(conversation, render, stats) for _, conversation in chunk]
    # Encode all turns in one call, because conversations share pieces and a fast tokenizer works in
    # parallel.
    turns = [
        ([], []) if ours is not None else _turns(conversation, render, batch, stats)
        for (_, conversation), ours in zip(chunk, exact, strict=True)
    ]
    batch.encode()
    for (key, conversation), ours, (some, asked) in zip(chunk, exact, turns, strict=True):
        if ours is not None:
            documents = _documents(ours, max_length, cuts_answers, stats)
            asked = [render.known_arguments(conversation)]
        elif is_plain_text(conversation):
            documents = _text_documents(
                conversation["messages"][0]["content"], render, max_length, stats
            )
        else:
            documents = _documents(map(batch.ids, some), max_length, cuts_answers, stats)
        arguments = json.dumps(asked[0] if asked else {}, sort_keys=True)
        samples += [
            Sample(
                input_ids=i,
                loss_mask=m,
                conversation=key,
                domain=conversation["domain"],
                arguments=arguments,
            )
            for i, m in documents
        ]
    return samples, stats


def _exact_turns(
    conversation: Conversation, render: Renderer, stats: SampleStats
) -> Iterator[TokenTurn] | None:
    """Return the turns to learn, with the server's token ids.

    None if the data has no token ids, or if a different tokenizer produced them.
    """
    if not (turns := conversation.get("turns")):
        return None
    answers = [m for m in conversation["messages"] if m["role"] == "assistant"][-len(turns) :]
    written = [_decode(turn, render) for turn in turns]
    for turn, text, answer in zip(turns, written, answers, strict=True):
        # A server may leave special tokens out of the text, e.g. the tags around a thought.
        if not _has_written(text, answer) and not _has_written(
            _decode(turn, render, skip_special_tokens=True), answer
        ):
            stats.foreign_ids += 1
            return None
    arguments = json.dumps(render.known_arguments(conversation))
    for text, answer in zip(written, answers, strict=True):
        if "unlearned" in answer:
            stats.refused_answers[EXCLUDED] += 1
            continue
        stats.exact += 1
        stats.arguments[arguments] += 1
        stats.ends[render.read_end(text)] += 1
    expanded = zip(expand_turns(turns), answers, strict=True)
    return (turn for turn, answer in expanded if "unlearned" not in answer)


def _decode(turn: StoredTurn, render: Renderer, **options: bool) -> str:
    """Return the text of an answer. Empty if an id is outside the vocabulary."""
    if max(int(part.max(initial=0)) for part in turn[1:]) >= render.num_ids:
        return ""
    return str(render.tokenizer.decode(turn.answer_A.tolist(), **options))


def _has_written(text: str, answer: Message) -> bool:
    """Whether a decoded answer equals the data's, i.e. both come from the same tokenizer."""
    said = [part for part in (answer["content"], answer.get("reasoning", "")) if part.strip()]
    names = [call["function"]["name"] for call in answer.get("tool_calls", ())]
    return bool(text) and all(is_in(part, text) for part in said or names)


def _turns(
    conversation: Conversation, render: Renderer, batch: TurnBatch, stats: SampleStats
) -> tuple[list[PackedTurn], list[Arguments]]:
    """Return the turns, and the template arguments for each."""
    if is_plain_text(conversation):
        return [], []

    def keep(turn: Turn) -> tuple[PackedTurn, Turn]:
        return batch.add(turn), replace(turn, prompt="")

    try:
        kept, refused = render.turns(conversation, keep)
    except jinja2.TemplateError as error:
        stats.add_refusal(error, conversation)
        return [], []
    unprompted = count_unprompted(conversation["messages"])
    stats.unprompted += unprompted
    stats.refused_answers += refused
    for reason in refused:
        stats.add_example(reason, conversation)
    for _, turn in kept:
        stats.arguments[json.dumps(turn.arguments)] += 1
        stats.ends[render.read_end(turn.answer)] += 1
    stats.without_answer += not (kept or refused or unprompted)
    return [packed for packed, _ in kept], [turn.arguments for _, turn in kept]


Document = tuple[NDArray[np.int32], NDArray[np.bool_]]  # The ids and the loss mask of a sample.


def _documents(
    turns: Iterable[tuple[NDArray[np.int32], NDArray[np.int32]]],
    max_length: int,
    cuts_answers: bool,
    stats: SampleStats,
) -> list[Document]:
    """Build the samples of one conversation from the (prompt ids, answer ids) of its turns."""
    documents: list[Document] = []
    num_left_out = num_truncated = 0
    for prompt, answer in turns:
        # Turns ([u1], [a1]) and ([u1 a1 u2], [a2]) make one document u1 a1 u2 a2 with the mask 0 1
        # 0 1. If the second prompt drops a part of a1, they make two documents.
        mask = np.zeros(len(prompt), np.bool_)
        ids = documents[-1][0] if documents else prompt[:0]
        grows = np.array_equal(prompt[: len(ids)], ids)
        # A prompt contains all earlier turns, so this is the remaining space in the sample.
        room = max_length - len(prompt)
        # By default, only a first answer is cut in the middle, because otherwise nothing of the
        # conversation would be left.
        if room < 1 or (room < len(answer) and documents and not cuts_answers):
            num_left_out += 1
            stats.labels_beyond += len(answer)
            continue
        # Otherwise, the template rewrote an earlier turn, so a new sample begins.
        if grows and documents:
            mask[: len(ids)] = documents.pop()[1]
        num_truncated += room < len(answer)
        stats.labels_beyond += max(0, len(answer) - room)
        answer = answer[:room]
        labels = np.concatenate([mask, np.ones(len(answer), np.bool_)])
        documents.append((np.concatenate([prompt, answer]), labels))
    stats.truncated += num_truncated
    # Cut either at a turn or in an answer, not at both.
    stats.cut += bool(documents and num_left_out and not num_truncated)
    stats.left_out += num_left_out if documents else 0
    stats.beyond_window += bool(num_left_out and not documents)
    return documents


def _text_documents(
    text: str, render: Renderer, max_length: int, stats: SampleStats
) -> list[Document]:
    """Split a plain text into windows of `max_length` tokens.

    The first token of each window is not a label, because nothing precedes it.
    """
    tokenizer = render.tokenizer
    # A rendered text already has the tokenizer's first token.
    is_begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids = np.array(
        tokenizer(text, verbose=False, add_special_tokens=not is_begun)["input_ids"], np.int32
    )
    windows = [ids[start : start + max_length] for start in range(0, len(ids), max_length)]
    stats.lone_tokens += sum(len(window) == 1 for window in windows)
    stats.marked_texts += bool(render.special.search(text))
    return [(window, np.arange(len(window)) > 0) for window in windows if len(window) > 1]


def data_hash(samples: Iterable[Sample]) -> str:
    """Return the SHA-256 (hex) over the token ids and masks, in order."""
    digest = hashlib.sha256()
    for sample in samples:
        # Hash the length first, so that the samples [1], [2, 3] and [1, 2], [3] differ.
        digest.update(len(sample.input_ids).to_bytes(8, "little"))
        digest.update(sample.input_ids.astype("<i4").tobytes())
        digest.update(np.packbits(sample.loss_mask).tobytes())
    return digest.hexdigest()
