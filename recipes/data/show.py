"""Show a draft's training data before training.

The command prints sizes, rejected answers, vocabulary, and labels in colour.
"""

import functools
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice, pairwise, zip_longest
from typing import Any

import numpy as np

from redraft.distill.data.conditions import dense
from redraft.distill.data.conversations import (
    Conversation,
    Loaded,
    Overlap,
    is_plain_text,
    load_source,
    remove_overlap,
    split_held_out,
)
from redraft.distill.data.day import choose_day
from redraft.distill.data.messages import conversation_hash
from redraft.distill.data.modes import name_mode
from redraft.distill.data.reasoning import is_cut, split_reasoning
from redraft.distill.data.samples import Sample, SampleStats, build_samples
from redraft.distill.data.vocabulary import measure_coverage
from redraft.files.artifact import write_whole
from redraft.files.folder import CONFIG
from redraft.files.replaced import require_apart
from redraft.files.served_target import require_rows, visible_length
from redraft.files.target_folder import TargetFolder, count_ids
from redraft.recipes.data.show_config import ShowConfig

VOCABULARY_SIZES = (4096, 8192, 16384, 32768, 65536)
GREEN, PLAIN = "\x1b[32m", "\x1b[0m"
# Turn kinds, roughly from rare to common.
KINDS = ("cut", "tools", "reasoning", "plain", "text")
# Maximum number of samples to search per turn kind, because the template may reject them all.
MAX_TRIED = 100
# A stretch of up to this many tokens, labelled or not, is shown in full even in a long text.
MIN_RUN = 40


def main(cfg: ShowConfig) -> None:
    """Print the summary and the samples.

    Raises:
        ValueError: no data can be read, or none of them can be trained on.
    """
    require_apart(cfg.json, cfg)
    target, day = TargetFolder.open(cfg.target), choose_day(cfg.date)
    tokenizer = target.tokenizer
    length = cfg.sequence_length
    if (target.folder / CONFIG).is_file():
        require_rows(target)
        length = visible_length(target.text_config, length)
    loaded = load_source(
        cfg.source, split=cfg.split, domain_column=cfg.domain_column, strict=cfg.strict
    )
    conversations = loaded.conversations
    train, held_out = split_held_out(conversations, cfg.held_out)
    train, overlap = remove_overlap(train, held_out)
    build = functools.partial(
        build_samples,
        tokenizer=tokenizer,
        max_length=length,
        cuts_answers=cfg.cut_answers,
        day=day,
        ends=target.end_ids,
    )
    samples, stats = build(train)
    held_out_samples, held_out_stats = held_out_part(held_out, build)
    by_hash = {conversation_hash(c["messages"]): c for c in train}
    possible = {key: possible_kinds(conversation) for key, conversation in by_hash.items()}

    def kinds_of(sample: Sample) -> set[str]:
        return find_kinds(sample, by_hash[sample.conversation], tokenizer, target.end_ids)

    shown = [
        (sample, sorted(kinds_of(sample)))
        for sample in choose_samples(samples, possible, kinds_of, cfg.num_samples)
    ]
    if cfg.json is not None:
        counted = summarise(loaded, stats, overlap, held_out_stats)
        texts = [paint(sample, tokenizer, cfg.sample_tokens, in_color=False) for sample, _ in shown]
        counted["samples"] = [
            {
                "kinds": kinds,
                "domain": sample.domain,
                "template_arguments": json.loads(sample.arguments),
                "tokens": len(sample.input_ids),
                "text": text,
            }
            for (sample, kinds), text in zip(shown, texts, strict=True)
        ]
        counted["end_ids"] = target.end_ids
        write_whole(cfg.json, json.dumps(counted, indent=1) + "\n")
    for line in loaded.lines():
        print(f"{cfg.source}: {line}")
    print(
        f"{len(conversations):,} conversations: {len(train):,} to train on, {len(held_out):,} held "
        "out"
    )
    print(describe_contents(conversations))
    print("\n".join(describe_training(samples, stats, train)))
    print("\n".join(describe_template(stats, tokenizer)))
    print("\n".join(describe_held_out(held_out_stats)))
    print(
        f"duplicates: {overlap}"
        if overlap != Overlap()
        else "duplicates: not checked, because no long answer is held out"
    )
    print("\n".join(describe_domains(conversations)))
    print("\n".join(describe_vocabulary(samples, held_out_samples, count_ids(tokenizer))))
    in_color = cfg.color and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print("\nlabels are green:" if in_color else "\nlabels are enclosed in 「 and 」:")
    for number, (sample, kinds) in enumerate(shown, 1):
        mode = name_mode(json.loads(sample.arguments))
        traits = ", ".join([*kinds, f"domain {sample.domain}", *filter(None, [mode])])
        print(f"--- sample {number}, {traits}, {len(sample.input_ids):,} tokens")
        print(paint(sample, tokenizer, cfg.sample_tokens, in_color))


def summarise(
    loaded: Loaded, stats: SampleStats, overlap: Overlap, held_out: SampleStats | str
) -> dict[str, Any]:
    return {
        "conversations": len(loaded.conversations),
        "files_not_read": loaded.other_files,
        "columns": {"read": dict(loaded.columns.read), "unread": dict(loaded.columns.unread)},
        "skipped": {
            reason: {"rows": count, "first": loaded.skipped.first[reason]}
            for reason, count in loaded.skipped.counts.items()
        },
        "training": vars(stats),
        "held_out": held_out if isinstance(held_out, str) else vars(held_out),
        "overlap": asdict(overlap),
        "template_arguments": stats.chosen_arguments(),
    }


def held_out_part(
    conversations: Sequence[Conversation], build: Callable[..., tuple[list[Sample], SampleStats]]
) -> tuple[list[Sample], SampleStats | str]:
    """Return the held-out samples with their counts, or no samples and the reason."""
    try:
        return build(conversations, progress=False)
    except ValueError as error:
        return [], str(error).removeprefix("nothing to train on: ")


def describe_contents(conversations: Sequence[Conversation]) -> str:
    messages = [conversation["messages"] for conversation in conversations]
    counts = {
        "with several turns": sum(sum(m["role"] == "user" for m in some) > 1 for some in messages),
        "with a system prompt": sum(any(m["role"] == "system" for m in some) for some in messages),
        "with reasoning": sum(any(split_reasoning(m) for m in some) for some in messages),
        "with tool calls": sum(any("tool_calls" in m for m in some) for some in messages),
        "of plain text": sum(map(is_plain_text, conversations)),
    }
    return "  " + ", ".join(f"{count:,} {trait}" for trait, count in counts.items())


def describe_held_out(stats: SampleStats | str) -> Iterator[str]:
    if isinstance(stats, str):
        yield f"held out: no usable text ({stats})"
        return
    share = stats.labels / stats.tokens
    yield (
        f"held out: {stats.tokens:,} tokens in {stats.samples:,} samples, {share:.0%} of them "
        "labels"
    )
    for loss in stats.losses():
        yield f"  {loss}"


def describe_training(
    samples: Sequence[Sample], stats: SampleStats, train: Sequence[Conversation]
) -> Iterator[str]:
    """Describe the training part: turns, tokens, and everything that is cut or omitted."""
    turns = [length for sample in samples for length in measure_answers(sample)]
    yield (
        f"turns: {len(turns):,}, with a median of {statistics.median(turns):,.0f} labels and a "
        f"maximum of {max(turns):,}"
    )
    yield (
        f"tokens: {stats.tokens:,} in {stats.samples:,} samples, "
        f"{stats.labels / stats.tokens:.0%} of them labels"
    )
    if stats.exact:
        yield f"  {stats.exact:,} answers use the server's token ids"
    for loss in stats.losses():
        yield f"  {loss}"
    for reason, question in stats.examples.items():
        yield f"  not trained on: an answer {reason}, e.g. the answer to {printable(question)!r}"
    if num_cut := sum(map(has_cut_answer, train)):
        yield f"  {num_cut:,} conversations with an answer that the server truncated"


def describe_template(stats: SampleStats, tokenizer: Any) -> Iterator[str]:
    """Describe how turns end, and the template arguments that a server starts them with."""
    if not stats.ends:
        return
    ends = [
        f"{printable(end)} (id {tokenizer.convert_tokens_to_ids(end)}) {count:,}"
        if end
        else f"none, as cut {count:,}"
        for end, count in stats.ends.most_common()
    ]
    yield f"ends of turns: {', '.join(ends)}"
    yield stats.describe_arguments() or "template arguments: none"


def measure_answers(sample: Sample) -> list[int]:
    """Return the number of labels in each answer, i.e. the length of each run in the loss mask."""
    # E.g. the mask 0 1 1 0 1 flips at 1, 3, 4 and 5, so the runs have 3 - 1 = 2 and 5 - 4 = 1
    # labels.
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask.astype(np.int8), [0]])))
    return [int(length) for length in edges[1::2] - edges[::2]]


def describe_domains(conversations: Sequence[Conversation]) -> Iterator[str]:
    """Return one line per domain, the largest first."""
    counts = Counter(conversation["domain"] for conversation in conversations)
    yield f"domains: {len(counts)}"
    for name, count in counts.most_common(20):
        yield f"  {printable(name)}: {count:,} ({count / len(conversations):.1%})"
    if len(counts) > 20:
        yield f"  and {len(counts) - 20:,} more"


def describe_vocabulary(
    train: Sequence[Sample], held_out: Sequence[Sample], vocab_size: int
) -> Iterator[str]:
    """Return a line for each size of draft vocabulary.

    The line has the share of labels that the vocabulary covers in the training and the held-out
    text.
    """
    sizes = [size for size in VOCABULARY_SIZES if size < vocab_size]
    if not sizes or not held_out:
        reason = (
            "no text is held out to evaluate it on"
            if sizes
            else "smaller than any draft vocabulary"
        )
        yield f"vocabulary: {vocab_size:,} ids; {reason}"
        return
    yield f"draft vocabulary, of the target's {vocab_size:,} ids: share of the labels in it"
    learned, unseen = (
        measure_coverage(train, part, sizes, vocab_size) for part in (train, held_out)
    )
    for size in sizes:
        yield (
            f"  {size:>6,}  {unseen[size]:6.2%} of held-out text, {learned[size]:6.2%} of "
            "training text"
        )


def has_cut_answer(conversation: Conversation) -> bool:
    return conversation.get("cut", False) or any(map(is_cut, conversation["messages"]))


def possible_kinds(conversation: Conversation) -> set[str]:
    if is_plain_text(conversation):
        return {"text"}
    messages = conversation["messages"]
    kinds = {
        "cut": has_cut_answer(conversation),
        "tools": any("tool_calls" in message for message in messages),
        "reasoning": any(split_reasoning(message) for message in messages),
        "plain": True,
    }
    return {kind for kind, is_there in kinds.items() if is_there}


def find_kinds(
    sample: Sample, conversation: Conversation, tokenizer: Any, end_ids: Collection[int]
) -> set[str]:
    """Return the kinds of turn among a sample's labels.

    Other turns may be unusable or in other samples.
    """
    possible, messages = possible_kinds(conversation), conversation["messages"]
    if len(possible) == 1:
        return possible
    written = dense(tokenizer.decode(sample.input_ids[sample.loss_mask].tolist()))
    calls = [
        call["function"]["name"] for message in messages for call in message.get("tool_calls", ())
    ]
    thoughts = [dense(parts[0])[:32] for message in messages if (parts := split_reasoning(message))]
    is_cut = sample.loss_mask[-1] and sample.input_ids[-1] not in end_ids
    kinds = {
        "cut": "cut" in possible and is_cut,
        "tools": any(name in written for name in calls),
        "reasoning": any(thought in written for thought in thoughts),
    }
    return {kind for kind, is_there in kinds.items() if is_there} or {"plain"}


def choose_samples(
    samples: Sequence[Sample],
    possible: Mapping[str, Collection[str]],
    kinds_of: Callable[[Sample], set[str]],
    count: int,
) -> list[Sample]:
    """Return a sample with each kind of turn, then samples from all domains in turn, up to `count`.

    `possible` are the kinds of turn in each conversation, by hash, and `kinds_of` returns the kinds
    in a sample. Samples are in the order of their hashes, so the choice is random.
    """
    chosen: list[Sample] = []
    seen: set[str] = set()
    for kind in KINDS if count else ():
        candidates = islice((s for s in samples if kind in possible[s.conversation]), MAX_TRIED)
        sample = (
            None if kind in seen else next((s for s in candidates if kind in kinds_of(s)), None)
        )
        if sample is not None:
            chosen.append(sample)
            seen |= kinds_of(sample)
    domains: dict[str, list[Sample]] = {}
    for sample in samples:
        domains.setdefault(sample.domain, []).append(sample)
    in_turns = (
        s
        for round_ in zip_longest(*(domains[name] for name in sorted(domains)))
        for s in round_
        if s
    )
    shown = set(map(id, chosen))
    rest = (sample for sample in in_turns if id(sample) not in shown)
    return [*chosen, *islice(rest, max(0, count - len(chosen)))]


def paint(sample: Sample, tokenizer: Any, max_tokens: int, in_color: bool) -> str:
    """Return the text of a sample's first `max_tokens` tokens, with the labels marked."""
    opening, closing = (GREEN, PLAIN) if in_color else ("「", "」")
    ids, mask = sample.input_ids, sample.loss_mask
    # Decode the pieces between two flips of the mask, not token by token, because a character may
    # span several tokens.
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    # For a long sample, show both ends of each piece, because labels may follow thousands of tokens
    # about tools.
    most = max_tokens if len(ids) <= max_tokens else max(MIN_RUN, max_tokens // (len(borders) - 1))
    parts, room = [], max_tokens
    for start, end in pairwise(borders):
        size = min(most, room, end - start)
        text = printable(_show_ends(ids[start:end].tolist(), size, tokenizer))
        parts.append(f"{opening}{text}{closing}" if mask[start] else text)
        room -= size
        if not room:
            break
    return "".join(parts) + (" ..." if end < len(ids) else "")


def _show_ends(ids: list[int], size: int, tokenizer: Any) -> str:
    if len(ids) <= size:
        return str(tokenizer.decode(ids))
    last = size // 2
    return f"{tokenizer.decode(ids[: size - last])} ... {tokenizer.decode(ids[len(ids) - last :])}"


def printable(text: str) -> str:
    """Return `text` without control characters, by which web data could control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
