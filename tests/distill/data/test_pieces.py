"""Ids of pieces put together against the ids of whole texts, by the real tokenizer library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tokenizers import make_byte_tokenizer, make_sentencepiece_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from redraft.distill.data.pieces import PieceEncoder

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def make_llama3() -> PreTrainedTokenizerFast:
    tokenizer = make_byte_tokenizer(vocab_size=300)
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return tokenizer


def make_prepending() -> PreTrainedTokenizerFast:
    """As Llama 2: a space is written before the text, but not after a special token."""
    tokenizer = make_sentencepiece_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first", split=False
    )
    return tokenizer


def make_lowercase() -> PreTrainedTokenizerFast:
    """A normaliser, and special tokens that are found after it."""
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
    )
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    text = ["the theatre there, naive cafe s t 1 12 <end> end"] * 3
    words.train_from_iterator(
        text, trainers.WordPieceTrainer(special_tokens=["[UNK]"], show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", eos_token="<END>"
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken("<Mid>", special=True, normalized=True)]}
    )
    return tokenizer


def make_python() -> Any:
    """One without a fast version: ids of bytes."""
    tokenizer = ByT5Tokenizer()
    added = [
        AddedToken(text, special=True, normalized=False) for text in ("<|end|>", "<|bos|>", "<END>")
    ]
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [*added, AddedToken("<left>", lstrip=True)]}
    )
    return tokenizer


def with_added(*tokens: AddedToken) -> PreTrainedTokenizerFast:
    tokenizer = make_llama3()
    tokenizer.add_tokens(list(tokens))
    return tokenizer


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "llama 3": make_llama3,
    "byte level": make_byte_tokenizer,
    "sentencepiece": make_sentencepiece_tokenizer,
    "prepending": make_prepending,
    "lowercase": make_lowercase,
    "in Python": make_python,
    "longer tokens over a border": lambda: with_added(
        AddedToken("a<|end|>", special=False, normalized=False)
    ),
    "tokens that take spaces": lambda: with_added(
        AddedToken("<left>", special=True, normalized=False, lstrip=True),
        AddedToken("<right>", special=True, normalized=False, rstrip=True),
    ),
    "tokens by words": lambda: with_added(
        AddedToken("word", special=True, normalized=False, single_word=True)
    ),
}
UNCUT = {"tokens by words"}

make = functools.cache(lambda name: TOKENIZERS[name]())
SPECIAL = [
    "<|end|>",
    "<|bos|>",
    "<s>",
    "</s>",
    "<END>",
    "<Mid>",
    "a<|end|>",
    "<left>",
    "<right>",
    "word",
    "<|end",
]
TEXTS = [
    " ",
    "  ",
    "\n",
    "\n\n",
    "1",
    "12",
    "a",
    " a",
    "the theatre",
    "'s",
    "É",
    "東京",
    "|>",
    "é\n ",
    "x" * 3,
]
texts = st.lists(st.sampled_from(SPECIAL + TEXTS) | st.text(max_size=4), max_size=12).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(some=st.lists(texts, max_size=4))
def test_pieces_have_the_ids_of_the_whole_text(name: str, some: list[str]) -> None:
    tokenizer = make(name)
    encode = PieceEncoder(tokenizer)
    assert encode(some) == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in some]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_are_cut_at_special_tokens_where_that_is_exact(name: str) -> None:
    assert bool(PieceEncoder(make(name))._borders) == (name not in UNCUT)


def test_a_tokenizer_that_depends_on_the_text_before_is_not_cut() -> None:
    """Found by trying.

    Nothing in the tokens shows that this one writes a space before every piece but the first.
    """
    tokenizer = make_llama3()
    plain = tokenizer.__class__.__call__

    class Odd(PreTrainedTokenizerFast):
        def __call__(self, text: object, **options: object) -> dict[str, list[list[int]]]:
            ids = plain(self, text, **options)["input_ids"]
            return {
                "input_ids": [[token + 1000 * (len(some) > 8) for token in some] for some in ids]
            }

    odd = Odd(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|end|>", bos_token="<|bos|>"
    )
    assert not PieceEncoder(odd)._borders


@pytest.mark.parametrize("make_tokenizer", [make_llama3, make_python])
def test_every_piece_of_a_conversation_is_encoded_once(
    make_tokenizer: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = make_tokenizer()
    encode, seen = PieceEncoder(tokenizer), list[str]()
    plain = encode.encode
    monkeypatch.setattr(encode, "encode", lambda pieces: seen.extend(pieces) or plain(pieces))
    turns = [f"<|bos|>question {i}<|bos|>answer {i}<|end|>" for i in range(8)]
    whole = ["".join(turns[: i + 1]) for i in range(8)]
    encode(whole)
    assert sorted(seen) == sorted({*seen})
    assert sum(map(len, seen)) == len(whole[-1]) - 7 * len("<|end|>")  # one end of turn for all
