"""The target's distribution after the filters.

By hand, by brute force, by vLLM's own functions, and in records.
"""

from __future__ import annotations

import itertools
import math
import statistics
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from redraft.engine.sampling import Sampling
from redraft.eval.forecast import sampled
from redraft.eval.forecast.sampled import sampled_probabilities, sampled_topk

FILTERS = [
    Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    for temperature, top_p, top_k, min_p in itertools.product(
        (0.6, 1.0, 1.5), (1.0, 0.9, 0.3), (0, 1, 20), (0.0, 0.05)
    )
]


def make_logits(num_rows: int = 40, vocab_size: int = 3000, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))


def filter_by_hand(logits_V: list[float], sampling: Sampling) -> list[float]:
    """One token at a time, in double precision."""
    highest = max(logits_V)
    weights = {
        v: math.exp((logit - highest) / sampling.temperature) for v, logit in enumerate(logits_V)
    }
    ranked = sorted(weights, key=lambda v: -weights[v])
    ranked = [v for v in ranked if weights[v] >= sampling.min_p * weights[ranked[0]]]
    ranked = ranked[: sampling.top_k or None]
    total, before, kept = sum(weights[v] for v in ranked), 0.0, []
    for v in ranked:
        if before < sampling.top_p * total:
            kept.append(v)
        before += weights[v]
    mass = sum(weights[v] for v in kept)
    return [weights[v] / mass if v in kept else 0.0 for v in weights]


@pytest.mark.parametrize("sampling", FILTERS)
def test_the_filters_keep_what_they_keep_by_hand(sampling: Sampling) -> None:
    logits_NV = make_logits(num_rows=3)
    told_NV = sampled_probabilities(logits_NV, sampling)
    for logits_V, told_V in zip(logits_NV.double().tolist(), told_NV, strict=True):
        torch.testing.assert_close(
            told_V, torch.tensor(filter_by_hand(logits_V, sampling)), atol=2e-6, rtol=1e-4
        )


@pytest.mark.parametrize(
    "sampling", [Sampling(top_p=0.99), Sampling(top_p=0.9, min_p=1e-6), Sampling(top_k=2)]
)
def test_the_whole_vocabulary_is_sorted_if_its_most_probable_tokens_do_not_decide(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled, "PREFIX", 8)
    logits_NV = make_logits(num_rows=3, spread=0.1)
    logits_NV[:, ::2] = 0.5  # half of all tokens are the most probable one
    told_NV = sampled_probabilities(logits_NV, sampling)
    if sampling.top_k:
        assert (told_NV > 0).sum(-1).tolist() == [1500] * 3, (
            "ties with the last one stay, as in vLLM"
        )
    else:
        told_V = torch.tensor(filter_by_hand(logits_NV[0].double().tolist(), sampling))
        assert abs(int((told_NV[0] > 0).sum()) - int((told_V > 0).sum())) <= 1
        torch.testing.assert_close(told_NV.sum(-1), torch.ones(3))


@pytest.mark.vllm
@pytest.mark.parametrize("sampling", [s for s in FILTERS if not s.min_p])
def test_vllms_verification_filters_to_the_same_distribution(sampling: Sampling) -> None:
    """`apply_sampling_constraints` is what its rejection sampler compares drafts with.

    Min_p is refused there.
    """
    from vllm.v1.sample import rejection_sampler

    logits_NV = make_logits()
    num_rows, vocab_size = logits_NV.shape
    constrain = rejection_sampler.apply_sampling_constraints
    metadata = SimpleNamespace(
        all_greedy=False,
        temperature=torch.full((num_rows,), sampling.temperature),
        top_k=torch.full((num_rows,), sampling.top_k or vocab_size, dtype=torch.int32),
        top_p=torch.full((num_rows,), sampling.top_p),
    )
    with pytest.MonkeyPatch.context() as patch:
        # one draft token per request: nothing to repeat (the CPU build's kernel is broken without
        # the plugin)
        patch.setattr(
            rejection_sampler,
            "expand_batch_to_tokens",
            lambda value_B, *_, replace_from=None, replace_to=None: value_B.clone(),
        )
        theirs_NV = constrain(logits_NV.clone(), torch.arange(1, num_rows + 1), metadata).softmax(
            -1
        )
    torch.testing.assert_close(
        sampled_probabilities(logits_NV, sampling), theirs_NV, atol=1e-6, rtol=0
    )


@pytest.mark.vllm
@pytest.mark.parametrize("sampling", [s for s in FILTERS if s.min_p])
def test_vllms_sampler_without_a_draft_applies_min_p_before_the_other_filters(
    sampling: Sampling,
) -> None:
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits_NV = make_logits()
    num_rows, vocab_size = logits_NV.shape
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=num_rows))
    processor = MinPLogitsProcessor(config, torch.device("cpu"), False)
    processor.min_p, processor.min_p_count = torch.full((num_rows, 1), sampling.min_p), num_rows
    theirs_NV = apply_top_k_top_p(
        processor.apply(logits_NV / sampling.temperature),
        torch.full((num_rows,), sampling.top_k or vocab_size),
        torch.full((num_rows,), sampling.top_p),
    ).softmax(-1)
    torch.testing.assert_close(
        sampled_probabilities(logits_NV, sampling), theirs_NV, atol=1e-6, rtol=0
    )


@pytest.mark.vllm
def test_vllm_refuses_min_p_beside_a_draft() -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="min_p"):
        SamplingParams(min_p=0.1)._validate_spec_decode(SimpleNamespace())


@pytest.mark.vllm
def test_vllm_does_not_filter_what_a_draft_proposes() -> None:
    from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token

    logits_NV = make_logits(num_rows=4)
    metadata = SimpleNamespace(
        all_greedy=False,
        all_random=True,
        temperature=torch.full((4,), 0.7),
        top_k=torch.full((4,), 5),
        top_p=torch.full((4,), 0.5),
    )
    _, q_NV = compute_probs_and_sample_next_token(logits_NV.clone(), metadata)
    torch.testing.assert_close(q_NV, (logits_NV / 0.7).softmax(-1))


def kept_of(logits_NV: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
    found = logits_NV.log_softmax(-1).topk(num_kept)
    return found.values, found.indices


@pytest.mark.parametrize(
    "sampling", [s for s in FILTERS if s.top_k] + [Sampling(top_p=0.5), Sampling(min_p=0.3)]
)
def test_records_are_filtered_exactly_if_the_filters_end_within_the_kept_ids(
    sampling: Sampling,
) -> None:
    logits_NV = make_logits()
    log_probs_NK, ids_NK = kept_of(logits_NV, 64)
    exact_NV = sampled_probabilities(logits_NV, sampling)
    told_NK = sampled_topk(log_probs_NK, sampling)
    ends_within_N = exact_NV.gather(-1, ids_NK).sum(-1) > 1 - 1e-5
    assert ends_within_N.all() or not sampling.top_k
    assert ends_within_N.sum() > 10
    torch.testing.assert_close(
        told_NK[ends_within_N], exact_NV.gather(-1, ids_NK)[ends_within_N], atol=2e-6, rtol=1e-4
    )


def test_a_nucleus_that_ends_beyond_the_kept_ids_is_off_by_less_than_a_token() -> None:
    logits_NV, sampling = make_logits(), Sampling(top_p=0.95)
    log_probs_NK, ids_NK = kept_of(logits_NV, 16)
    exact_NK = sampled_probabilities(logits_NV, sampling).gather(-1, ids_NK)
    assert (exact_NK.sum(-1) < 0.9).sum() > 10, "most of these nuclei end beyond"
    told_NK = sampled_topk(log_probs_NK, sampling)
    bound_N1 = log_probs_NK[:, -1:].exp() / sampling.top_p
    assert ((told_NK / exact_NK - 1).abs() <= bound_N1 + 1e-5).all()


@pytest.mark.parametrize("temperature", [0.6, 0.8])
def test_below_temperature_1_the_other_tokens_have_less_than_the_told_mass(
    temperature: float,
) -> None:
    logits_NV, num_kept = make_logits(), 64
    log_probs_NK, ids_NK = kept_of(logits_NV, num_kept)
    exact_NK = sampled_probabilities(logits_NV, Sampling(temperature=temperature)).gather(
        -1, ids_NK
    )
    told_NK = sampled_topk(log_probs_NK, Sampling(temperature=temperature))
    rest_N = 1 - log_probs_NK.exp().sum(-1)
    scale_N = (log_probs_NK / temperature).exp().sum(-1)
    bound_N = rest_N * log_probs_NK[:, -1].exp() ** (1 / temperature - 1) / scale_N
    assert ((told_NK / exact_NK)[:, 0] - 1 <= bound_N + 1e-5).all()
    assert statistics.mean(rest_N.tolist()) > 0.05, "there is something to leave out"
