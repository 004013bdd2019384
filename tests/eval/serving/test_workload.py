"""Lookup statistics on exchanges that can be walked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from redraft.eval.counts import simulate_blocks, tau
from redraft.eval.forecast.ngram import Ngram, propose_ngrams
from redraft.eval.serving.workload import Exchange, look_up

NGRAM = Ngram(min=2, max=4)


def test_a_quoted_answer_is_looked_up() -> None:
    found = look_up([Exchange(prompt_ids=[1, 2, 3, 4, 5, 6, 9], answer_ids=[1, 2, 3, 4, 5, 6])], NGRAM, 3)
    # token 1 comes from the prefill, 2 from a step that finds nothing for (9, 1); then (1, 2) is found: 3, 4, 5 are
    # right and 6 is the target's own
    assert found.drafted == pytest.approx(1 / 2)
    assert found.acceptance_per_position == pytest.approx((1 / 2, 1 / 2, 1 / 2))
    assert tau(found.acceptance_per_position) == pytest.approx(2.5)
    assert found.overlap == 1.0
    assert (found.num_answers, found.num_tokens) == (1, 6)


def test_a_wrong_lookup_is_not_accepted() -> None:
    found = look_up([Exchange(prompt_ids=[1, 2, 7, 7, 7], answer_ids=[1, 2, 8, 8])], NGRAM, 2)
    # after (1, 2) comes 7, 7, but 8 was written: one wasted draft among three steps
    assert (found.drafted, tau(found.acceptance_per_position)) == (pytest.approx(1 / 3), 1.0)
    assert found.overlap == 0.0


def test_the_walk_is_that_of_the_engine() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 4, 300).tolist()
    exchange, k = Exchange(prompt_ids=ids[:40], answer_ids=ids[40:]), 4
    found = look_up([exchange], NGRAM, k)
    rows = list(propose_ngrams(ids, 41, 259, NGRAM, k))
    match_TK = torch.zeros(len(rows), k, dtype=torch.bool)
    for row, proposed in enumerate(rows):
        for position, token in enumerate(proposed[: 259 - row]):
            match_TK[row, position] = token == ids[41 + row + position]
    counts = simulate_blocks(match_TK, 260)
    assert found.acceptance_per_position == pytest.approx(counts.acceptance_per_position)
    assert tau(found.acceptance_per_position) > 1.1


def test_a_workload_without_answers_is_refused() -> None:
    with pytest.raises(ValueError, match="no answer of the workload has two tokens"):
        look_up([Exchange(prompt_ids=[1, 2, 3], answer_ids=[4])], NGRAM, 2)
