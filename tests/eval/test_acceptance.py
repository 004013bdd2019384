"""V = vocabulary, K = num_speculative_tokens."""

from __future__ import annotations

import math
from itertools import accumulate
from operator import mul

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redraft.engine.counts import AcceptanceCounts, simulate_blocks, tau
from redraft.eval.acceptance import alpha, alpha_greedy, probabilities


def test_alpha_is_one_minus_total_variation():
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.1, 0.3, 0.6]])
    assert alpha(p, q).item() == pytest.approx(0.1 + 0.3 + 0.2)
    assert alpha(p, q).item() == pytest.approx(1 - 0.5 * (p - q).abs().sum().item())


def test_alpha_greedy_is_the_targets_probability_of_the_drafts_best_token():
    p, q = (
        torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]),
        torch.tensor([[0.1, 0.3, 0.6], [0.4, 0.3, 0.3]]),
    )
    assert alpha_greedy(p, q).tolist() == pytest.approx([0.2, 0.5])


def test_alpha_greedy_is_the_alpha_of_the_one_hot_draft():
    p, q_logits = torch.rand(5, 7).softmax(-1), torch.randn(5, 7)
    torch.testing.assert_close(
        alpha_greedy(p, q_logits.softmax(-1)), alpha(p, probabilities(q_logits, 0.0))
    )


def test_probabilities_are_softmax_at_a_temperature_and_one_hot_at_zero():
    logits = torch.tensor([[0.0, math.log(4.0), math.log(4.0)]], dtype=torch.float64)
    assert probabilities(logits, 1.0).tolist() == [pytest.approx([1 / 9, 4 / 9, 4 / 9])]
    assert probabilities(logits, 2.0).tolist() == [pytest.approx([0.2, 0.4, 0.4])]
    assert probabilities(logits, 0.0).tolist() == [[0.0, 1.0, 0.0]]
    assert probabilities(logits.bfloat16(), 1.0).dtype == torch.float32


def cumulative(rates: list[float]) -> list[float]:
    """Acceptance by position from the rate of each position.

    Each rate is given that the positions before it were accepted.
    """
    return list(accumulate(rates, mul))


def test_tau_of_independent_tokens_is_leviathans_formula():
    for rate, k in ((0.0, 3), (0.5, 1), (0.8, 5)):
        assert tau(cumulative([rate] * k)) == pytest.approx((1 - rate ** (k + 1)) / (1 - rate))
    assert tau(cumulative([1.0] * 4)) == 5.0


def test_tau_of_conditional_rates_by_hand():
    assert tau(cumulative([0.9, 0.5, 0.5])) == pytest.approx(1 + 0.9 + 0.45 + 0.225)


def test_counts_of_blocks_by_hand():
    counts = AcceptanceCounts.from_blocks([2, 0, 3, 1], 3)
    assert counts == AcceptanceCounts(
        num_drafts=4, num_accepted=6, num_draft_tokens=12, accepted_per_position=(3, 2, 1)
    )
    assert counts.tau == 1 + 6 / 4
    assert counts.acceptance_per_position == [0.75, 0.5, 0.25]
    assert counts.draft_acceptance_rate == 0.5


def test_counts_add_up():
    total = AcceptanceCounts.from_blocks([2, 0], 3) + AcceptanceCounts.from_blocks([3, 1], 3)
    assert total == AcceptanceCounts.from_blocks([2, 0, 3, 1], 3)
    assert total + AcceptanceCounts.zero(3) == total


def test_an_output_without_drafts_has_tau_one():
    assert AcceptanceCounts.zero(3).tau == 1.0
    assert AcceptanceCounts.zero(3).draft_acceptance_rate == 0.0


def walk_blocks(match_TK: torch.Tensor, num_output_tokens: int) -> AcceptanceCounts:
    """The blocks of an engine in order: each begins after the tokens emitted by the one before."""
    runs = match_TK.long().cumprod(-1).sum(-1).tolist()
    accepted: list[int] = []
    emitted = 1
    while emitted < num_output_tokens:
        accepted.append(runs[emitted - 1])
        emitted += accepted[-1] + 1
    return AcceptanceCounts.from_blocks(accepted, match_TK.shape[1])


def test_blocks_are_walked_as_the_engine_walks_them():
    # Prefill gives token 0. After it 2 of 2 match: tokens 1, 2, the target's 3. After 3 none: 4.
    # After 4 one: 5, 6.
    match_TK = torch.tensor([[1, 1], [0, 0], [0, 1], [0, 1], [1, 0], [1, 1]], dtype=torch.bool)
    assert simulate_blocks(match_TK, 7) == AcceptanceCounts.from_blocks([2, 0, 1], 2)


def test_a_match_after_a_mismatch_does_not_count():
    assert simulate_blocks(torch.tensor([[False, True, True]]), 2) == AcceptanceCounts.from_blocks(
        [0], 3
    )


def test_the_last_block_counts_beyond_the_end_of_the_output():
    match_TK = torch.ones(3, 4, dtype=torch.bool)
    assert simulate_blocks(match_TK, 2) == AcceptanceCounts.from_blocks([4], 4)


def walk_as_llama_cpp(match_TK: torch.Tensor, num_output: int, max_tokens: int) -> AcceptanceCounts:
    """One step after the other, as its server loops (`get_n_draft_max` and what follows it)."""
    emitted, drafts, drafted, at = 1, 0, 0, [0] * match_TK.shape[1]
    while emitted < num_output:
        tokens = min(match_TK.shape[1], max_tokens - emitted - 1)
        accepted = 0
        # The last token ends the answer, and is the target's own whatever was drafted.
        while (
            accepted < tokens
            and match_TK[emitted - 1, accepted]
            and emitted + accepted < num_output - 1
        ):
            at[accepted] += 1
            accepted += 1
        drafts, drafted = drafts + (tokens > 0), drafted + max(tokens, 0)
        emitted += accepted + 1
    return AcceptanceCounts(
        num_drafts=drafts,
        num_accepted=sum(at),
        num_draft_tokens=drafted,
        accepted_per_position=tuple(at),
    )


@given(st.integers(0, 2**32), st.integers(2, 40), st.integers(0, 5), st.integers(1, 5))
def test_llama_cpp_drafts_no_further_than_to_the_end(
    seed: int, num_output: int, room: int, k: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    match_TK = torch.rand(num_output - 1, k, generator=generator) < 0.7
    counts = simulate_blocks(match_TK, num_output, num_output + room)
    assert counts == walk_as_llama_cpp(match_TK, num_output, num_output + room)


def test_an_output_of_one_token_has_no_drafts():
    assert simulate_blocks(torch.ones(0, 3, dtype=torch.bool), 1) == AcceptanceCounts.zero(3)


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 5))
def test_blocks_emit_the_whole_output_and_not_a_block_more(seed: int, num_output: int, k: int):
    match_TK = (
        torch.rand(max(num_output - 1, 0), k, generator=torch.Generator().manual_seed(seed)) < 0.7
    )
    counts = simulate_blocks(match_TK, num_output)
    assert counts == walk_blocks(match_TK, num_output)
    emitted = 1 + counts.num_drafts + counts.num_accepted
    assert num_output <= emitted <= num_output + k
    assert sorted(counts.accepted_per_position, reverse=True) == list(counts.accepted_per_position)
