"""Random Markov models of a few tokens are the target and the draft.

Every expectation can be summed up exactly.

S = state (the last token), V = vocabulary, K = num_speculative_tokens.
"""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from autoregressive import token_by_token
from positions import cumulative
from reference_sampler import NextLogits, sample, verify_block
from scipy.stats import chisquare
from torch import Tensor

from redraft.engine.counts import AcceptanceCounts, tau
from redraft.eval.acceptance import alpha, alpha_greedy, probabilities

VOCAB = 4
K = 3


def make_markov(seed: int, scale: float = 1.0) -> Tensor:
    """Logits [S, V] of the next token after each last token."""
    return scale * torch.randn(
        VOCAB, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def as_model(logits_SV: Tensor) -> NextLogits:
    return lambda tokens: logits_SV[tokens[-1]]


def sample_markov(target_SV: Tensor, draft_SV: Tensor, seed: int, max_tokens: int, **options):
    return sample(
        as_model(target_SV),
        token_by_token(as_model(draft_SV)),
        [0],
        num_speculative_tokens=K,
        max_tokens=max_tokens,
        generator=torch.Generator().manual_seed(seed),
        **options,
    )


def expected_tau(p_SV: Tensor, q_SV: Tensor, state: int, k: int) -> float:
    """E[tokens of one block] by summing over all paths.

    1 + sum_v min(p, q) * (block of k - 1 from v).
    """
    if k == 0:
        return 1.0
    accepted_V = torch.minimum(p_SV[state], q_SV[state]).tolist()
    return 1.0 + sum(
        a * expected_tau(p_SV, q_SV, v, k - 1) for v, a in enumerate(accepted_V) if a > 0
    )


@pytest.mark.parametrize(("temperature", "greedy_draft"), [(1.0, False), (1.0, True), (0.7, False)])
def test_output_follows_the_targets_distribution(temperature: float, greedy_draft: bool):
    target_SV, draft_SV = make_markov(1), make_markov(2)
    p_SV = probabilities(target_SV, temperature)
    observed = dict.fromkeys(itertools.product(range(VOCAB), repeat=3), 0)
    num_samples = 3000
    for seed in range(num_samples):
        tokens, _ = sample_markov(
            target_SV,
            draft_SV,
            seed,
            max_tokens=3,
            temperature=temperature,
            greedy_draft=greedy_draft,
        )
        observed[tuple(tokens)] += 1
    expected = [num_samples * float(p_SV[0, a] * p_SV[a, b] * p_SV[b, c]) for a, b, c in observed]
    assert chisquare(list(observed.values()), expected).pvalue > 0.001


def test_the_chi_square_test_sees_a_sampler_that_redraws_from_p_after_a_rejection():
    # A classic mistake: the sample size of the test above must be large enough to catch it.
    p_V, q_V = probabilities(make_markov(1)[0], 1.0), probabilities(make_markov(2)[0], 1.0)
    generator = torch.Generator().manual_seed(0)
    observed = [0] * VOCAB
    for _ in range(3000):
        token = int(torch.multinomial(q_V, 1, generator=generator))
        if torch.rand((), generator=generator) * q_V[token] >= p_V[token]:
            token = int(torch.multinomial(p_V, 1, generator=generator))
        observed[token] += 1
    assert chisquare(observed, (3000 * p_V).tolist()).pvalue < 1e-6


def within_three_standard_errors(errors: list[float]) -> bool:
    return abs(statistics.mean(errors)) <= 3 * statistics.stdev(errors) / len(errors) ** 0.5


@pytest.mark.parametrize("greedy_draft", [False, True])
def test_measured_acceptance_and_tau_agree_with_the_formulas_over_200_seeds(greedy_draft: bool):
    alpha_errors, tau_errors = [], []
    for seed in range(200):
        # All rows are equal: the next token does not depend on the prefix, so Leviathan's formula
        # is exact.
        p_logits_SV = make_markov(seed)[:1].expand(VOCAB, VOCAB)
        q_logits_SV = make_markov(1000 + seed)[:1].expand(VOCAB, VOCAB)
        p_SV, q_SV = probabilities(p_logits_SV, 1.0), probabilities(q_logits_SV, 1.0)
        expected = float((alpha_greedy if greedy_draft else alpha)(p_SV, q_SV)[0])
        _, counts = sample_markov(
            p_logits_SV, q_logits_SV, seed, max_tokens=40, greedy_draft=greedy_draft
        )
        # Sums, not ratios: the run's end is a stopping time, so by Wald's identity these have mean
        # zero exactly.
        alpha_errors.append(counts.accepted_per_position[0] - expected * counts.num_drafts)
        tau_errors.append(
            counts.num_accepted - (tau(cumulative([expected] * K)) - 1) * counts.num_drafts
        )
    assert within_three_standard_errors(alpha_errors)
    assert within_three_standard_errors(tau_errors)


def test_measured_tau_agrees_with_the_sum_over_paths_where_tokens_depend_on_their_prefix():
    errors = []
    for seed in range(200):
        target_SV, draft_SV = make_markov(seed), make_markov(1000 + seed)
        generator = torch.Generator().manual_seed(seed)
        expected = expected_tau(probabilities(target_SV, 1.0), probabilities(draft_SV, 1.0), 0, K)
        blocks = []
        for _ in range(20):
            drafted = token_by_token(as_model(draft_SV))([0], K, 1.0, generator)
            blocks.append(len(verify_block(as_model(target_SV), [0], drafted, 1.0, generator)))
        errors.append(statistics.mean(blocks) - expected)
    assert within_three_standard_errors(errors)


def test_a_copy_of_the_target_as_its_own_draft_is_always_accepted():
    target_SV = make_markov(3)
    tokens, counts = sample_markov(target_SV, target_SV, seed=0, max_tokens=41)
    assert len(tokens) == 41
    assert counts == AcceptanceCounts.from_blocks([K] * 10, K)
    assert counts.tau == K + 1


def test_greedy_decoding_with_any_draft_is_the_targets_greedy_text():
    target_SV, draft_SV = make_markov(5), make_markov(6)
    alone = [0]
    for _ in range(12):
        alone.append(int(target_SV[alone[-1]].argmax()))
    tokens, _ = sample_markov(target_SV, draft_SV, seed=0, max_tokens=12, temperature=0.0)
    assert tokens == alone[1:]


def test_equal_seeds_give_equal_samples():
    one, other = (
        sample_markov(make_markov(1), make_markov(2), seed=7, max_tokens=30) for _ in range(2)
    )
    assert one == other
