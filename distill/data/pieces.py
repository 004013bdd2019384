"""Encode texts that repeat each other: each piece between two special tokens is encoded once.

A conversation of four turns is rendered as four prompts and four texts with an answer, each of
which is the beginning of the next:

    <|user|>q1<|assistant|>                          a tokenizer cuts at special tokens before it does anything
    <|user|>q1<|assistant|>a1<|end|>                 else, and encodes every piece by itself. So the ids of a text are
    <|user|>q1<|assistant|>a1<|end|><|user|>q2 ...   those of its pieces, each with the special token before it
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROBES = ("a", " a", "a ", "\n", "\n\n", "\n\n1", "  1", "  a", "É ", "a\n ", "'s", "{}", "")
"""Texts that show whether a tokenizer's ids for a text depend on the neighbouring text."""


class PieceEncoder:
    """Encodes texts that contain special tokens.

    The result equals that of `tokenizer(texts, add_special_tokens=False)`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._tokens, self._borders = _find_borders(tokenizer)
        if self._borders and not self._is_exact():
            self._borders = frozenset()

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        pieces = Pieces(self)
        places = [pieces.add(text) for text in texts]
        pieces.encode()
        return [pieces.ids(some).tolist() for some in places]

    def encode(self, texts: list[str]) -> list[list[int]]:
        options = {
            "add_special_tokens": False,
            "return_attention_mask": False,
            "return_token_type_ids": False,
        }
        encoded: list[list[int]] = (
            self.tokenizer(texts, verbose=False, **options)["input_ids"] if texts else []
        )
        return encoded

    def cut(self, text: str) -> list[str]:
        """Cut the text into pieces, all of which except the first begin with a special token."""
        if not self._borders:
            return [text]
        found = self._tokens.finditer(text)
        # A token at the start of the text needs no cut, because 0 is already in the list.
        starts = [
            0,
            *(m.start() for m in found if m.start() and m.group() in self._borders),
            len(text),
        ]
        return [text[start:end] for start, end in pairwise(starts)]

    def _is_exact(self) -> bool:
        # `min`, because the order of a set differs from process to process.
        border = min(self._borders)
        texts = [f"{one}{border}{other}{border}{one}" for one in PROBES for other in PROBES]
        return self(texts) == self.encode(texts)


class Pieces:
    """Texts to encode in a single call, stored as the indices of their pieces.

    A fast tokenizer works in parallel, and the prompts of a conversation share most pieces.
    """

    def __init__(self, encoder: PieceEncoder) -> None:
        self._encoder = encoder
        self._places: dict[str, int] = {}
        self._ids: list[NDArray[np.int32]] = []

    def add(self, text: str) -> NDArray[np.int32]:
        """Return the indices of a text's pieces, to be passed to `ids` after `encode`."""
        places = self._places
        return np.array(
            [places.setdefault(p, len(places)) for p in self._encoder.cut(text)], np.int32
        )

    def encode(self) -> None:
        self._ids = [np.array(ids, np.int32) for ids in self._encoder.encode(list(self._places))]

    def ids(self, places: NDArray[np.int32]) -> NDArray[np.int32]:
        return (
            np.concatenate([self._ids[place] for place in places])
            if len(places)
            else np.array([], np.int32)
        )


def _find_borders(tokenizer: Any) -> tuple[re.Pattern[str], frozenset[str]]:
    """Return (pattern of the tokens that are matched first, tokens at which text may be cut).

    Both match nothing if the text next to a token decides whether the tokenizer matches it.
    """
    added = list(tokenizer.added_tokens_decoder.values())
    # The tokenizer matches these tokens in the unmodified text. A tokenizer written in Python
    # matches all special tokens there.
    first = [token for token in added if not token.normalized or not tokenizer.is_fast]
    none: tuple[re.Pattern[str], frozenset[str]] = re.compile("(?!)"), frozenset()
    if any(token.single_word for token in first) or getattr(
        tokenizer, "split_special_tokens", False
    ):
        return none
    borders = frozenset(
        token.content
        for token in first
        if token.special
        and not (token.lstrip or token.rstrip)
        and token.content.strip() == token.content != ""
    )
    longest_first = sorted(
        (token.content for token in first if token.content), key=len, reverse=True
    )
    return (re.compile("|".join(map(re.escape, longest_first))), borders) if borders else none
