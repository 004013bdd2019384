"""The forecast of block verification against every block there is.

S = prefixes, V = vocabulary, K = draft tokens. p = target, q = draft.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_verification import forecast_of, make_draft, make_table, write_text

from redraft.engine.counts import expected_blocks, verify_as_block

V, K = 3, 3


def make_law(seed, sharpness=1.0):
    """A distribution [V] after each prefix of at most K tokens, float64."""
    rng = np.random.default_rng(seed)
    prefixes = [p for n in range(K + 1) for p in itertools.product(range(V), repeat=n)]
    return {prefix: rng.dirichlet(np.full(V, sharpness)) for prefix in prefixes}


def chance(law, tokens, begin=0):
    """The probability of tokens after the first `begin` of them."""
    return float(np.prod([law[tokens[:i]][tokens[i]] for i in range(begin, len(tokens))]))


def enumerate_blocks(p, q):
    """(law of the first K tokens, P(at least j accepted)), by Sun et al.'s algorithm 2.

    As in vLLM's kernel: joint ratios w, residual masses R, thresholds h; the last j with u_j <= h_j
    ends the accepted part, and a draw from max(0, w p - q) follows.
    """
    law, reached = {}, np.zeros(K)
    for block in itertools.product(range(V), repeat=K):
        w = [1.0]
        for j in range(K):
            ratio = p[block[:j]][block[j]] / q[block[:j]][block[j]]
            w.append(min(1.0, w[j] * ratio))
        rest = [np.maximum(w[j] * p[block[:j]] - q[block[:j]], 0) for j in range(K)]
        h = [1.0]
        for j in range(1, K + 1):
            mass = rest[j].sum() if j < K else 0.0
            space = mass + 1 - w[j]
            h.append(w[j] if j == K else mass / space if space > 0 else 1.0)
        for length in range(K + 1):
            ends = (
                chance(q, block) * h[length] * np.prod([1 - h[j] for j in range(length + 1, K + 1)])
            )
            if ends == 0:
                continue
            reached[:length] += ends
            kept = block[:length]
            drawn = rest[length] / rest[length].sum() if length < K else None
            if length == K:
                law[kept] = law.get(kept, 0.0) + ends
                continue
            for more in itertools.product(range(V), repeat=K - length):
                text = (*kept, *more)
                after = drawn[more[0]] * chance(p, text, length + 1)
                law[text] = law.get(text, 0.0) + ends * after
    return law, reached


def forecast_blocks(p, q, verify):
    """P(at least j accepted), over the texts of the target."""
    reached = np.zeros(K)
    for text in itertools.product(range(V), repeat=K):
        ratio_1K = np.array([[q[text[:j]][text[j]] / p[text[:j]][text[j]] for j in range(K)]])
        reached += chance(p, text) * np.cumprod(verify(ratio_1K)[0])
    return reached


@pytest.mark.parametrize("seed", range(6))
def test_block_verification_is_forecast_as_enumerated(seed):
    p, q = make_law(seed), make_law(100 + seed)
    _, reached = enumerate_blocks(p, q)
    np.testing.assert_allclose(forecast_blocks(p, q, verify_as_block), reached, rtol=1e-12)
    standard = forecast_blocks(p, q, lambda ratio: np.minimum(1, ratio))
    assert (reached >= standard - 1e-12).all()
    assert reached[1:].sum() > standard[1:].sum() + 1e-6, "blocks are longer"


@pytest.mark.parametrize("seed", range(3))
def test_block_verification_leaves_the_law_of_the_text(seed):
    p, q = make_law(seed), make_law(100 + seed)
    law, _ = enumerate_blocks(p, q)
    assert len(law) == V**K
    for text, weight in law.items():
        assert weight == pytest.approx(chance(p, text), rel=1e-12)


def test_block_verification_gains_nothing_on_one_token_with_all_mass():
    """A greedy draft or a lookup: r / p is at least 1 if it matches the text, else 0."""
    ratio_TK = np.array([[1 / 0.5, 1 / 0.2, 0.0], [1.0, 1.0, 1.0], [0.0, 1 / 0.3, 1.0]])
    matches_TK = np.minimum(1, ratio_TK)
    for row in verify_as_block(ratio_TK).cumprod(1) - matches_TK.cumprod(1):
        assert row.tolist() == [0, 0, 0]


def test_block_verification_is_forecast_beside_the_served_draft():
    target_SV, draft_SV = make_table(4), make_table(5)
    text = write_text(target_SV, 1.0, torch.Generator().manual_seed(0))
    able = replace(make_draft(draft_SV, is_sampled=True), can_sample=True)
    found = forecast_of(able, target_SV, text, 1.0)
    p_SV, q_SV = (table_SV.double().softmax(-1) for table_SV in (target_SV, draft_SV))
    tokens = [*text.prompt.token_ids, *text.output_ids, *text.beyond_ids]
    begin, num_output, most = len(text.prompt.token_ids), len(text.output_ids), 3
    ratio_TK = np.array(
        [
            [
                float(q_SV[tokens[at - 1], tokens[at]] / p_SV[tokens[at - 1], tokens[at]])
                for at in range(begin + 1 + t, begin + 1 + t + most)
            ]
            for t in range(num_output - 1)
        ]
    )
    wanted = expected_blocks(verify_as_block(ratio_TK), num_output)
    for k in (1, 2, most):
        assert found.block_counts[k].num_accepted >= found.counts[k].num_accepted - 1e-9
    assert found.block_counts[most].num_accepted == pytest.approx(wanted.num_accepted, rel=1e-5)
    assert found.block_counts[1].num_accepted == pytest.approx(found.counts[1].num_accepted)
    cold = write_text(target_SV, 0.0, torch.Generator())
    assert forecast_of(able, target_SV, cold, 0.0).block_counts == {}
