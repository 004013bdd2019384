"""How much of what a model writes can be looked up in what it was asked: what n-gram drafting gets out of a workload.

K = num_speculative_tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eval.ngram import Ngram, proposals

OVERLAP_TOKENS = 4
"""Long enough that what recurs is quoted, not the language's common phrases."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A prompt and its answer, as token ids."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """What looking up finds in a workload."""

    num_answers: int
    num_tokens: int
    """Of the answers."""
    overlap: float
    """Share of the answers' 4-grams that their prompts hold too."""
    drafted: float
    """Share of the target steps for which anything was looked up."""
    acceptance_per_position: tuple[float, ...]
    """Share of the target steps whose first, second, ... token was looked up and right."""


def look_up(exchanges: Iterable[Exchange], ngram: Ngram, num_speculative_tokens: int) -> Lookup:
    """Walk every answer as the engine would with `ngram` drafts at temperature 0: exact, since the text is known.

    Raises: ValueError where no answer is long enough to draft anything.
    """
    accepted = [0] * num_speculative_tokens
    num_answers = num_tokens = steps = drafted = held = grams = 0
    for exchange in exchanges:
        for looked_up, run in _steps(exchange, ngram, num_speculative_tokens):
            steps += 1
            drafted += looked_up
            for position in range(run):
                accepted[position] += 1
        known = set(_grams(exchange.prompt_ids))
        written = _grams(exchange.answer_ids)
        held += sum(gram in known for gram in written)
        grams += len(written)
        num_answers += 1
        num_tokens += len(exchange.answer_ids)
    if not steps:
        raise ValueError("no answer has two tokens: there is no workload to look at")
    return Lookup(
        num_answers=num_answers,
        num_tokens=num_tokens,
        overlap=held / max(grams, 1),
        drafted=drafted / steps,
        acceptance_per_position=tuple(hits / steps for hits in accepted),
    )


def _steps(exchange: Exchange, ngram: Ngram, k: int) -> Iterable[tuple[bool, int]]:
    """(whether anything was looked up, how many tokens of it were right) for every target step behind the prefill."""
    ids = [*exchange.prompt_ids, *exchange.answer_ids]
    first = len(exchange.prompt_ids) + 1
    proposed = list(proposals(ids, first, max(len(ids) - first, 0), ngram, k))
    row = 0
    while row < len(proposed):
        follows = ids[first + row :]
        run = 0
        while run < min(len(proposed[row]), len(follows)) and proposed[row][run] == follows[run]:
            run += 1
        yield bool(proposed[row]), run
        row += run + 1


def _grams(ids: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + OVERLAP_TOKENS]) for i in range(len(ids) - OVERLAP_TOKENS + 1)]
