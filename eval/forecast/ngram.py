"""Prompt lookup (Saxena, prompt-lookup-decoding): the text's last tokens occurred before; propose what followed them.

Like vLLM's `ngram` method, this takes the longest n-gram of `min` to `max` tokens with an earlier occurrence, and
its earliest occurrence. K = num_speculative_tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from redraft.heads.families.retrieval import is_retrieval


@dataclass(frozen=True, kw_only=True)
class Ngram:
    """The lengths of n-grams to look up."""

    min: int = 2
    """Shortest run of tokens to look up."""
    max: int = 4
    """Longest run of tokens to look up; tried first."""

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max:
            raise ValueError(f"n-grams of {self.min} to {self.max} tokens: give 1 <= --ngram.min <= --ngram.max")

    def blocks(
        self, ids: Sequence[int], first: int, num_prefixes: int, num_speculative_tokens: int
    ) -> Iterator[list[int]]:
        """As `propose_ngrams`."""
        return propose_ngrams(ids, first, num_prefixes, self, num_speculative_tokens)

    @property
    def speculative_config(self) -> dict[str, Any]:
        """vLLM's speculative config, without num_speculative_tokens."""
        return {"method": "ngram", "prompt_lookup_min": self.min, "prompt_lookup_max": self.max}


@runtime_checkable
class Lookup(Protocol):
    """A draft that proposes tokens by the text alone."""

    def blocks(
        self, ids: Sequence[int], first: int, num_prefixes: int, num_speculative_tokens: int
    ) -> Iterator[list[int]]:
        """For each prefix ids[:first], ids[:first + 1], ...: at most K tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class Mix:
    """The name of a draft with a lookup before it: `ngram+HEAD`, or `ANSWERS+HEAD` with a folder of counted answers.

    `:TOKENS` at the end limits the head, as in `ngram+HEAD:2`.
    """

    lookup: str = "ngram"
    """`ngram`, or the folder of the answers."""
    head: str
    """Folder, hub name or family of the head."""
    head_tokens: int | None = None
    """Most tokens of the head in a step; None for as many as the lookup may have."""

    def __str__(self) -> str:
        name = f"{self.lookup}+{self.head}"
        return name if self.head_tokens is None else f"{name}:{self.head_tokens}"

    @staticmethod
    def parse(name: str, lookups: Collection[str] = ()) -> Mix | None:
        """The inverse of `str`; None for the name of another draft. `lookups` are further names of lookups."""
        # A path may have a plus in it, so all are tried.
        for plus in re.finditer(r"\+", name):
            lookup, head = name[: plus.start()], re.fullmatch(r"(.+?)(?::(\d+))?", name[plus.end() :])
            if head and (lookup in ("ngram", *lookups) or is_retrieval(lookup)):
                return Mix(lookup=lookup, head=head[1], head_tokens=int(head[2]) if head[2] else None)
        return None


def shorten_name(draft: str) -> str:
    """A draft's name in tables: the last part of the path or hub name, or the one before it if the last is `draft`."""
    if mixed := Mix.parse(draft):
        return str(replace(mixed, lookup=shorten_name(mixed.lookup), head=shorten_name(mixed.head)))
    path = Path(draft)
    return path.parent.name if path.name == "draft" and path.parent.name else path.name or draft


def propose_ngrams(
    ids: Sequence[int], first: int, num_prefixes: int, ngram: Ngram, num_speculative_tokens: int
) -> Iterator[list[int]]:
    """For each prefix ids[:first], ids[:first + 1], ...: at most K tokens, none if no n-gram occurred before."""
    follows: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after it
    known = 0
    for end in range(first, first + num_prefixes):
        # an n-gram at the very end of the prefix is not followed by anything to propose
        for last in range(known, end - 1):
            for n in range(ngram.min, min(ngram.max, last + 1) + 1):
                # setdefault keeps the earliest occurrence
                follows.setdefault(tuple(ids[last + 1 - n : last + 1]), last + 1)
        known = max(known, end - 1)
        # longest first
        suffixes = (tuple(ids[end - n : end]) for n in range(min(ngram.max, end), ngram.min - 1, -1))
        # Without a match the slice is ids[end:end]: no token.
        start = next((follows[suffix] for suffix in suffixes if suffix in follows), end)
        yield list(ids[start : min(start + num_speculative_tokens, end)])
