"""Compare two tokenizers, and give a draft the vocabulary of another tokenizer.

Tokens are compared by the bytes they stand for. So `Ġthe` of a byte-level BPE equals `▁the` of sentencepiece,
and `<0x0A>` equals `Ċ`. N = target tokens, V = rows of the embedding, D = hidden."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
ROLES = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id")


def check_same_tokenizer(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raise ValueError, with the first difference, unless every id is the same token in both.
    Merges may differ: an engine never tokenizes with the draft's."""
    if difference := first_difference(target_tokenizer, draft_tokenizer):
        token_id, target, draft = difference
        raise ValueError(
            f"the draft's tokenizer is not the target's: token {token_id} is {_shown(target)} in the target and "
            f"{_shown(draft)} in the draft; transplant the target's vocabulary into the draft (--draft.transplant), "
            f"or choose a draft of the target's family"
        )


def first_difference(target_tokenizer: Any, draft_tokenizer: Any) -> tuple[int, str | None, str | None] | None:
    """The lowest id with different tokens, and both tokens (None: absent). None if all ids agree."""
    target, draft = _read_tokens(target_tokenizer), _read_tokens(draft_tokenizer)
    for token_id in sorted(target.keys() | draft.keys()):
        if target.get(token_id) != draft.get(token_id):
            return token_id, target.get(token_id), draft.get(token_id)
    return None


@dataclass(frozen=True, kw_only=True)
class Transplant:
    """Numbers of rows of a transplanted vocabulary, by source."""

    matched: int  # Copied from the draft's token with the same bytes.
    by_role: int  # from the token of the same role (beginning, end, ...), spelled otherwise
    averaged: int  # Mean of the tokens into which the draft's tokenizer splits the text.
    left: int  # mean of all rows: special tokens without a counterpart, and padding

    def __str__(self) -> str:
        return f"{self.matched} tokens copied, {self.by_role} by role, {self.averaged} averaged, {self.left} left"


def transplant_vocabulary(draft: Any, draft_tokenizer: Any, target_tokenizer: Any, vocab_size: int) -> Transplant:
    """Give the causal LM `draft`, in place, the target's vocabulary of `vocab_size` rows.
    Input and output rows of a known token are copied. Those of an unknown token are the mean of the
    rows of the pieces (Qwama). Raises ValueError: the target has token ids beyond `vocab_size`."""
    matched, by_role, averaged = token_sources(target_tokenizer, draft_tokenizer)
    sources = {**averaged, **{token: [source] for token, source in (matched | by_role).items()}}
    if max(_read_tokens(target_tokenizer)) >= vocab_size:
        raise ValueError(f"the target's tokenizer has ids beyond its vocab_size {vocab_size}: take the target's config")
    pieces = [sources.get(token_id, []) for token_id in range(vocab_size)]
    _set_rows(draft, lambda weight_VD: mean_rows(weight_VD, pieces))
    for config in (draft.config, draft.generation_config):
        for role in ROLES[:3]:
            setattr(config, role, getattr(target_tokenizer, role))
    draft.get_input_embeddings().padding_idx = target_tokenizer.pad_token_id  # this row gets no gradient
    return Transplant(
        matched=len(matched), by_role=len(by_role), averaged=len(averaged), left=vocab_size - len(sources)
    )


def token_sources(
    target_tokenizer: Any, draft_tokenizer: Any
) -> tuple[dict[int, int], dict[int, int], dict[int, list[int]]]:
    """Draft ids by target id, in three parts: with the same bytes; else of the same role; else the pieces' ids."""
    specials, texts = _special_ids(draft_tokenizer), _token_bytes(draft_tokenizer)
    special_ids = {text: token_id for token_id, text in texts.items() if token_id in specials}
    # if several ids have the same bytes (`<0x41>` and `A`), the shortest spelling wins: the longer is a byte fallback
    tokens = _read_tokens(draft_tokenizer)
    plain = sorted(texts.keys() - specials, key=lambda token_id: (len(tokens[token_id]), token_id), reverse=True)
    # The longest came first, and a later entry overwrites an earlier one.
    plain_ids = {texts[token_id]: token_id for token_id in plain}
    roles = {
        getattr(target_tokenizer, role): getattr(draft_tokenizer, role)
        # reversed: of several roles with one id, the first in ROLES wins
        for role in reversed(ROLES)
        if getattr(target_tokenizer, role) is not None and getattr(draft_tokenizer, role) is not None
    }
    target_specials = _special_ids(target_tokenizer)
    matched: dict[int, int] = {}
    by_role: dict[int, int] = {}
    averaged: dict[int, list[int]] = {}
    for token_id, text in _token_bytes(target_tokenizer).items():
        same = (special_ids if token_id in target_specials else plain_ids).get(text)
        if same is not None:
            matched[token_id] = same
        elif token_id in roles:
            by_role[token_id] = roles[token_id]
        elif token_id not in target_specials and (pieces := _pieces(text, draft_tokenizer, texts, plain_ids)):
            averaged[token_id] = pieces
    return matched, by_role, averaged


def mean_rows(weight_VD: Tensor, pieces: list[list[int]]) -> Tensor:
    """Row i is the mean of rows `pieces[i]` of `weight_VD`, or of all rows if there are none. Computed in float32."""
    wide_VD = weight_VD.detach().float()
    lengths_N = torch.tensor([len(ids) for ids in pieces], device=weight_VD.device)
    flat = torch.tensor([token_id for ids in pieces for token_id in ids], dtype=torch.long, device=weight_VD.device)
    # Lengths [2, 0, 1] make offsets [0, 2, 2]. An empty bag is a row of zeros, replaced below.
    rows_ND = nn.functional.embedding_bag(flat, wide_VD, lengths_N.cumsum(0) - lengths_N, mode="mean")
    rows_ND[lengths_N == 0] = wide_VD.mean(0)
    return rows_ND.to(weight_VD.dtype)


def fit_vocabulary(draft: Any, vocab_size: int) -> None:
    """Pad or cut the causal LM `draft`, in place, to the target's `vocab_size` (such as 151936 to
    152064). Engines require equal sizes. A row added to the head is the mean of all rows. The logit
    is then the mean logit, which is never the largest, and by Jensen's inequality the probability
    is at most 1/V. No other vector has a lower worst case over hidden states (sup_h r.h -
    logsumexp(W h) = -max{entropy(a): W'a = r}). A row of zeros would win whenever all logits are
    negative. Before cutting, call `check_same_tokenizer`: the last rows must be unused."""
    size = draft.get_input_embeddings().weight.shape[0]
    if size != vocab_size:
        pieces = [[token_id] if token_id < size else [] for token_id in range(vocab_size)]
        _set_rows(draft, lambda weight_VD: mean_rows(weight_VD, pieces))


def _set_rows(draft: Any, make_rows: Any) -> None:
    """Replace input embeddings and head by `make_rows(weight)`; tied weights stay tied."""
    embedding, head = draft.get_input_embeddings(), draft.get_output_embeddings()
    tied = head.weight is embedding.weight
    embedding.weight = nn.Parameter(make_rows(embedding.weight))
    head.weight = embedding.weight if tied else nn.Parameter(make_rows(head.weight))
    vocab_size = embedding.weight.shape[0]
    embedding.num_embeddings = head.out_features = draft.config.vocab_size = draft.vocab_size = vocab_size


def _pieces(text: bytes, tokenizer: Any, texts: dict[int, bytes], plain_ids: dict[bytes, int]) -> list[int]:
    """Ids of the pieces of `text`; [] if some of the bytes are no token. The tokenizer cuts it if
    the pieces spell the same bytes. Otherwise, e.g. for half a character or because sentencepiece
    puts a space in front, it is cut into the longest matches from the left."""
    try:
        ids: list[int] = tokenizer.encode(text.decode(), add_special_tokens=False)
        if b"".join(texts[token_id] for token_id in ids) == text:
            return ids
    except (UnicodeDecodeError, KeyError):
        pass
    ids, rest = [], text
    # Quadratic in the number of bytes, but a token has few.
    while rest:
        size = next((size for size in range(len(rest), 0, -1) if rest[:size] in plain_ids), 0)
        if size == 0:
            return []
        ids.append(plain_ids[rest[:size]])
        rest = rest[size:]
    return ids


def _read_tokens(tokenizer: Any) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _special_ids(tokenizer: Any) -> set[int]:
    return {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}


def _token_bytes(tokenizer: Any) -> dict[int, bytes]:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # byte-level BPE spells each byte as a printable character, so the tokens alone do not show which kind it is
    is_byte_level = '"ByteLevel"' in json.dumps([backend["decoder"], backend["pre_tokenizer"]])
    # Added tokens are spelled as plain text in either kind.
    added = tokenizer.added_tokens_decoder
    decode = _byte_level if is_byte_level else _sentencepiece
    return {
        token_id: token.encode() if token_id in added else decode(token)
        for token_id, token in _read_tokens(tokenizer).items()
    }


def _byte_level(token: str) -> bytes:
    if not BYTES.keys() >= set(token):  # a reserved token in the plain vocabulary
        return token.encode()
    return bytes(BYTES[character] for character in token)


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def _shown(token: str | None) -> str:
    return "absent" if token is None else repr(token)
