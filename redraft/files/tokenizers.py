"""Compare two tokenizers, and give a draft as many vocabulary rows as its target.

N = target tokens, V = rows of the embedding, D = hidden.
"""

from typing import Any

import torch
from torch import Tensor, nn


def check_same_tokenizer(target_tokenizer: Any, draft_tokenizer: Any) -> None:
    """Raise ValueError, with the first difference, unless every id is the same token in both.

    Merges may differ, because an engine never tokenizes with the draft's tokenizer.
    """
    if difference := first_difference(target_tokenizer, draft_tokenizer):
        token_id, target, draft = difference
        raise ValueError(
            f"the draft's tokenizer differs from the target's: token {token_id} is "
            f"{_shown(target)} in "
            f"the target but {_shown(draft)} in the draft; choose a draft of the target's family"
        )


def first_difference(
    target_tokenizer: Any, draft_tokenizer: Any
) -> tuple[int, str | None, str | None] | None:
    """Return the lowest id whose tokens differ, with both tokens (None if absent).

    Return None if all ids agree.
    """
    target, draft = _read_tokens(target_tokenizer), _read_tokens(draft_tokenizer)
    for token_id in sorted(target.keys() | draft.keys()):
        if target.get(token_id) != draft.get(token_id):
            return token_id, target.get(token_id), draft.get(token_id)
    return None


def mean_rows(weight_VD: Tensor, pieces: list[list[int]]) -> Tensor:
    """Return the mean of rows `pieces[i]` of `weight_VD` as row i.

    If `pieces[i]` is empty, the mean is over all rows. The means are computed in float32.
    """
    wide_VD = weight_VD.detach().float()
    lengths_N = torch.tensor([len(ids) for ids in pieces], device=weight_VD.device)
    flat = torch.tensor(
        [token_id for ids in pieces for token_id in ids], dtype=torch.long, device=weight_VD.device
    )
    # Lengths [2, 0, 1] give offsets [0, 2, 2]. An empty bag is a row of zeros, replaced below.
    rows_ND = nn.functional.embedding_bag(
        flat, wide_VD, lengths_N.cumsum(0) - lengths_N, mode="mean"
    )
    rows_ND[lengths_N == 0] = wide_VD.mean(0)
    return rows_ND.to(weight_VD.dtype)


def fit_vocabulary(draft: Any, vocab_size: int) -> None:
    """Pad or truncate the causal LM `draft`, in place, to the target's `vocab_size`.

    The sizes may be 151936 and 152064, for example, but engines require equal sizes. A row added to
    the head is the mean of all rows. Its logit is then the mean logit, which is never the largest.
    By Jensen's inequality, its probability is at most 1/V. No other vector has a lower worst case
    over hidden states (sup_h r.h - logsumexp(W h) = -max{entropy(a): W'a = r}). A row of zeros
    would be the argmax whenever all logits are negative. Call `check_same_tokenizer` before
    truncating, because the last rows must be unused.
    """
    size = draft.get_input_embeddings().weight.shape[0]
    if size != vocab_size:
        pieces = [[token_id] if token_id < size else [] for token_id in range(vocab_size)]
        _set_rows(draft, lambda weight_VD: mean_rows(weight_VD, pieces))


def _set_rows(draft: Any, make_rows: Any) -> None:
    """Replace input embeddings and head with `make_rows(weight)`. Tied weights stay tied."""
    embedding, head = draft.get_input_embeddings(), draft.get_output_embeddings()
    tied = head.weight is embedding.weight
    embedding.weight = nn.Parameter(make_rows(embedding.weight))
    head.weight = embedding.weight if tied else nn.Parameter(make_rows(head.weight))
    vocab_size = embedding.weight.shape[0]
    embedding.num_embeddings = head.out_features = draft.vocab_size = vocab_size
    draft.config.get_text_config().vocab_size = vocab_size


def _read_tokens(tokenizer: Any) -> dict[int, str]:
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _shown(token: str | None) -> str:
    return "absent" if token is None else repr(token)
