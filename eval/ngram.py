"""Prompt lookup: what followed the longest earlier occurrence of the text's last tokens is proposed again.

(Saxena, prompt-lookup-decoding.) The same choice as vLLM's `ngram` method makes: the longest n-gram of `min` to `max`
tokens that occurred before, and of its occurrences the earliest. K = num_speculative_tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Ngram:
    min: int = 2
    """Shortest run of tokens to look up."""
    max: int = 4
    """Longest one, which is tried first."""

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise ValueError(f"n-grams of {self.min} to {self.max} tokens: give 1 <= --ngram.min <= --ngram.max")

    @property
    def speculative_config(self) -> dict[str, Any]:
        """vLLM's, but for the number of tokens."""
        return {"method": "ngram", "prompt_lookup_min": self.min, "prompt_lookup_max": self.max}


def proposals(
    ids: Sequence[int], first: int, num_prefixes: int, ngram: Ngram, num_speculative_tokens: int
) -> Iterator[list[int]]:
    """For each prefix ids[:first], ids[:first + 1], ...: at most K tokens, none where nothing occurred before."""
    follows: dict[tuple[int, ...], int] = {}
    known = 0
    for end in range(first, first + num_prefixes):
        # an n-gram that ends before the prefix's last token has something to propose
        for last in range(known, end - 1):
            for n in range(ngram.min, min(ngram.max, last + 1) + 1):
                follows.setdefault(tuple(ids[last + 1 - n : last + 1]), last + 1)
        known = max(known, end - 1)
        suffixes = (tuple(ids[end - n : end]) for n in range(min(ngram.max, end), ngram.min - 1, -1))
        start = next((follows[suffix] for suffix in suffixes if suffix in follows), end)
        yield list(ids[start : min(start + num_speculative_tokens, end)])
