"""Prompt lookup compared with a slow, obvious search, and with vLLM's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redraft.eval.forecast.ngram import Ngram, propose_ngrams

SMALL = st.lists(st.integers(0, 2), min_size=1, max_size=24)
LENGTHS = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(
    lambda pair: Ngram(min=min(pair), max=max(pair))
)


def search(ids: list[int], ngram: Ngram, num_tokens: int) -> list[int]:
    for n in range(ngram.max, ngram.min - 1, -1):
        for start in range(len(ids) - n):
            if ids[start : start + n] == ids[len(ids) - n :]:
                return ids[start + n : start + n + num_tokens]
    return []


@settings(max_examples=200, deadline=None)
@given(SMALL, LENGTHS, st.integers(1, 4))
def test_a_proposal_follows_the_longest_and_then_the_earliest_match(ids, ngram, num_tokens) -> None:
    found = list(propose_ngrams(ids, 1, len(ids), ngram, num_tokens))
    assert found == [search(ids[:end], ngram, num_tokens) for end in range(1, len(ids) + 1)]


def test_a_later_start_finds_the_same() -> None:
    ids, ngram = [1, 2, 3, 1, 2, 4, 1, 2], Ngram(min=1, max=3)
    assert (
        list(propose_ngrams(ids, 6, 3, ngram, 2)) == list(propose_ngrams(ids, 1, 8, ngram, 2))[5:]
    )


@pytest.mark.vllm
def test_vllm_proposes_the_same() -> None:
    import numpy as np
    from vllm.v1.spec_decode.ngram_proposer import (
        _find_longest_matched_ngram_and_propose_tokens as theirs,
    )

    draws = np.random.default_rng(0)
    for _ in range(300):
        ids = draws.integers(0, 3, draws.integers(1, 24)).tolist()
        ngram = Ngram(min=int(draws.integers(1, 3)), max=int(draws.integers(3, 5)))
        mine = next(iter(propose_ngrams(ids, len(ids), 1, ngram, 3)))
        assert mine == theirs(np.array(ids, np.int32), ngram.min, ngram.max, 1000, 3).tolist()


@pytest.mark.parametrize(("low", "high"), [(0, 2), (3, 2)])
def test_impossible_lengths_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=rf"\b{low} to {high}\b.*ascending"):
        Ngram(min=low, max=high)
