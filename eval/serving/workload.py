"""The acceptance of n-gram drafts on a workload: how much of the answers can be looked up in the text before them.

K = num_speculative_tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from redraft.eval.forecast.ngram import Ngram, propose_ngrams

OVERLAP_TOKENS = 4
"""Length of the n-grams counted for overlap: long enough to be quotations, not common phrases."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A prompt and the answer to it, as token ids."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Statistics of looking up a workload's answers."""

    num_answers: int
    num_tokens: int
    """Total tokens of the answers."""
    overlap: float
    """Share of the answers' 4-grams also found in the prompt."""
    drafted: float
    """Share of the target steps for which the lookup found a draft."""
    acceptance_per_position: tuple[float, ...]
    """Share of the target steps whose first, second, ... draft token was correct, with all before it."""


def look_up(exchanges: Iterable[Exchange], ngram: Ngram, num_speculative_tokens: int) -> Lookup:
    """Walk every answer as the engine would with `ngram` drafts. Exact at any temperature, because the text is known:
    a token that is looked up is accepted in just those cases in which the text goes on with it.

    Raises: ValueError if no answer is long enough to draft anything.
    """
    accepted = [0] * num_speculative_tokens
    num_answers = num_tokens = steps = drafted = shared = grams = 0
    for exchange in exchanges:
        for looked_up, run in _steps(exchange, ngram, num_speculative_tokens):
            steps += 1
            drafted += looked_up
            for position in range(run):
                accepted[position] += 1
        prompt_grams = set(_grams(exchange.prompt_ids))
        answer_grams = _grams(exchange.answer_ids)
        shared += sum(gram in prompt_grams for gram in answer_grams)
        grams += len(answer_grams)
        num_answers += 1
        num_tokens += len(exchange.answer_ids)
    if not steps:
        raise ValueError("no answer of the workload has two tokens or more: give one with longer answers")
    return Lookup(
        num_answers=num_answers,
        num_tokens=num_tokens,
        overlap=shared / max(grams, 1),
        drafted=drafted / steps,
        acceptance_per_position=tuple(hits / steps for hits in accepted),
    )


def _steps(exchange: Exchange, ngram: Ngram, k: int) -> Iterable[tuple[bool, int]]:
    """(whether the lookup found a draft, number of correct draft tokens) for every target step after the prefill."""
    ids = [*exchange.prompt_ids, *exchange.answer_ids]
    # the prefill writes the first token of the answer
    first = len(exchange.prompt_ids) + 1
    proposed = list(propose_ngrams(ids, first, max(len(ids) - first, 0), ngram, k))
    row = 0
    while row < len(proposed):
        follows = ids[first + row :]
        run = 0
        while run < min(len(proposed[row]), len(follows)) and proposed[row][run] == follows[run]:
            run += 1
        yield bool(proposed[row]), run
        row += run + 1  # the accepted tokens, and the target's next one


def _grams(ids: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + OVERLAP_TOKENS]) for i in range(len(ids) - OVERLAP_TOKENS + 1)]
