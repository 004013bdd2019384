"""Token ids of texts that repeat each other: each piece between two special tokens is encoded once.

A conversation of four turns is rendered as four prompts and four texts with an answer, one the beginning of the next:

    <|user|>q1<|assistant|>                          a fast tokenizer cuts at special tokens before it does anything
    <|user|>q1<|assistant|>a1<|end|>                 else, and encodes every piece by itself. So the ids of a text are
    <|user|>q1<|assistant|>a1<|end|><|user|>q2 ...   those of its pieces, each with the special token before it
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

PROBES = ("a", " a", "a ", "\n", "\n\n", "\n\n1", "  1", "  a", "É ", "a\n ", "'s", "{}", "")
"""Texts whose ids depend on the neighbours, if anything in a tokenizer does."""


class PieceEncoder:
    """Encodes texts with special tokens in them, as `tokenizer(texts, add_special_tokens=False)` does."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._tokens, self._borders = _find_borders(tokenizer)
        if self._borders and not self._is_exact():
            self._borders = frozenset()

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        if not self._borders:
            return self._encode(list(texts))
        cut = [self._cut(text) for text in texts]
        pieces = list(dict.fromkeys(piece for some in cut for piece in some))
        ids = dict(zip(pieces, self._encode(pieces), strict=True))
        return [[token for piece in some for token in ids[piece]] for some in cut]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        options = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
        encoded: list[list[int]] = self.tokenizer(texts, verbose=False, **options)["input_ids"] if texts else []
        return encoded

    def _cut(self, text: str) -> list[str]:
        """The text in pieces that each begin with a special token, but for the first."""
        found = self._tokens.finditer(text)
        # A token at the start of the text needs no cut: 0 is there already.
        starts = [0, *(m.start() for m in found if m.start() and m.group() in self._borders), len(text)]
        return [text[start:end] for start, end in pairwise(starts)]

    def _is_exact(self) -> bool:
        # `min`, because the order of a set differs from process to process.
        border = min(self._borders)
        texts = [f"{one}{border}{other}{border}{one}" for one in PROBES for other in PROBES]
        return self(texts) == self._encode(texts)


def _find_borders(tokenizer: Any) -> tuple[re.Pattern[str], frozenset[str]]:
    """(a pattern of the tokens that a tokenizer finds before anything else, those of them at which it may be cut).

    There are none for a tokenizer in Python, and for one with a token that is found or not by the words beside it.
    """
    added = list(tokenizer.added_tokens_decoder.values()) if getattr(tokenizer, "is_fast", False) else []
    first = [token for token in added if not token.normalized]  # found in the text as it stands
    none: tuple[re.Pattern[str], frozenset[str]] = re.compile("(?!)"), frozenset()
    if any(token.single_word for token in first) or getattr(tokenizer, "split_special_tokens", False):
        return none
    borders = frozenset(
        token.content
        for token in first
        if token.special and not (token.lstrip or token.rstrip) and token.content.strip() == token.content != ""
    )
    longest_first = sorted((token.content for token in first if token.content), key=len, reverse=True)
    return (re.compile("|".join(map(re.escape, longest_first))), borders) if borders else none
