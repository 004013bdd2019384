"""Prompt lookup (Saxena, prompt-lookup-decoding).

If the text's last tokens occurred before, the lookup proposes the tokens that followed them there.

Like vLLM's `ngram` method, it uses the longest n-gram of `min` to `max` tokens that occurred
earlier, at its earliest occurrence. K = num_speculative_tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, kw_only=True)
class Ngram:
    """The lengths of n-grams to look up."""

    min: int = 2
    """Shortest run of tokens to look up."""
    max: int = 4
    """Longest run of tokens to look up. Longer runs are tried first."""

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise ValueError(
                f"n-grams of {self.min} to {self.max} tokens: these must be at least 1 and ascending"
            )

    def blocks(
        self, ids: Sequence[int], first: int, num_prefixes: int, num_speculative_tokens: int
    ) -> Iterator[list[int]]:
        return propose_ngrams(ids, first, num_prefixes, self, num_speculative_tokens)

    @property
    def speculative_config(self) -> dict[str, Any]:
        return {"method": "ngram", "prompt_lookup_min": self.min, "prompt_lookup_max": self.max}


@runtime_checkable
class Lookup(Protocol):
    """A draft that proposes tokens only from the text itself."""

    def blocks(
        self, ids: Sequence[int], first: int, num_prefixes: int, num_speculative_tokens: int
    ) -> Iterator[list[int]]:
        """Yield at most K tokens for each prefix ids[:first], ids[:first + 1], ..."""
        ...


def propose_ngrams(
    ids: Sequence[int], first: int, num_prefixes: int, ngram: Ngram, num_speculative_tokens: int
) -> Iterator[list[int]]:
    """Yield at most K tokens for each prefix ids[:first], ids[:first + 1], ...

    A prefix gets no tokens if none of its final n-grams occurred earlier.
    """
    follows: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after it
    known = 0
    for end in range(first, first + num_prefixes):
        # An n-gram at the very end of the prefix is not followed by any token to propose.
        for last in range(known, end - 1):
            for n in range(ngram.min, min(ngram.max, last + 1) + 1):
                # `setdefault` keeps the earliest occurrence.
                follows.setdefault(tuple(ids[last + 1 - n : last + 1]), last + 1)
        known = max(known, end - 1)
        # longest first
        suffixes = (
            tuple(ids[end - n : end]) for n in range(min(ngram.max, end), ngram.min - 1, -1)
        )
        # Without a match, the slice ids[end:end] is empty.
        start = next((follows[suffix] for suffix in suffixes if suffix in follows), end)
        yield list(ids[start : min(start + num_speculative_tokens, end)])
