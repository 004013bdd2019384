"""M = rows, V = target vocabulary, W = draft vocabulary, K = kept ids."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from divergences import (
    LOG_ZERO,
    cross_entropy,
    define,
    draft_columns,
    exact_log_probs,
    forward_kl,
    jensen_shannon,
    lk_hybrid,
    log_probs,
    neg_log_alpha,
    reverse_kl,
    top_k_log_probs,
    total_variation,
)
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy
from torch import Tensor

from redraft.distill.loss.choice import DIVERGENCES, Divergence

AGAINST_TARGET = [name for name in DIVERGENCES if name != "cross_entropy"]


def make_logits(rows: int, vocabulary: int, *, seed: int = 0, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)


def log_of(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log().clamp_min(LOG_ZERO)


def test_values_match_hand_computation_on_two_outcomes() -> None:
    p, q = log_of(0.75, 0.25), log_of(0.5, 0.5)
    kl_pq = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    kl_qp = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2)
    assert forward_kl(p, q).item() == pytest.approx(kl_pq, abs=1e-14)
    assert reverse_kl(p, q).item() == pytest.approx(kl_qp, abs=1e-14)
    assert total_variation(p, q).item() == pytest.approx(0.25, abs=1e-14)
    assert neg_log_alpha(p, q).item() == pytest.approx(-math.log(0.75), abs=1e-14)
    weight = math.exp(-3 * 0.75)
    assert lk_hybrid(p, q, eta=3.0).item() == pytest.approx(
        weight * kl_pq + (1 - weight) * 0.25, abs=1e-14
    )
    # beta 0.2: m = (0.55, 0.45)
    kl_pm = 0.75 * math.log(0.75 / 0.55) + 0.25 * math.log(0.25 / 0.45)
    kl_qm = 0.5 * math.log(0.5 / 0.55) + 0.5 * math.log(0.5 / 0.45)
    assert jensen_shannon(p, q, beta=0.2).item() == pytest.approx(
        0.2 * kl_pm + 0.8 * kl_qm, abs=1e-14
    )


def test_values_match_scipy_on_a_large_vocabulary() -> None:
    p, q = log_probs(make_logits(5, 1000)), log_probs(make_logits(5, 1000, seed=1))
    p_probs, q_probs = p.exp().numpy(), q.exp().numpy()
    torch.testing.assert_close(forward_kl(p, q), torch.tensor(entropy(p_probs, q_probs, axis=1)))
    torch.testing.assert_close(reverse_kl(p, q), torch.tensor(entropy(q_probs, p_probs, axis=1)))
    torch.testing.assert_close(
        jensen_shannon(p, q, beta=0.5), torch.tensor(jensenshannon(p_probs, q_probs, axis=1) ** 2)
    )
    torch.testing.assert_close(
        total_variation(p, q), torch.tensor(abs(p_probs - q_probs).sum(1) / 2)
    )


def test_cross_entropy_is_minus_log_q_of_the_label_and_zero_out_of_reach() -> None:
    log_q = log_of(0.5, 0.2, 0.3).repeat(3, 1)
    columns, reachable = draft_columns(torch.tensor([20, 11, 30]), torch.tensor([10, 20, 30]), 3)
    torch.testing.assert_close(
        cross_entropy(log_q, columns, reachable),
        -torch.tensor([0.2, 1.0, 0.3], dtype=torch.float64).log(),
    )


@pytest.mark.parametrize("name", AGAINST_TARGET)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_divergence_is_zero_at_q_equal_p_and_positive_elsewhere(
    name: str, temperature: float
) -> None:
    divergence = Divergence(name=name, temperature=temperature)
    p_logits = make_logits(20, 50)
    at_p = define(divergence, *exact_log_probs(p_logits, p_logits.clone(), temperature))
    torch.testing.assert_close(at_p, torch.zeros(20, dtype=torch.float64), atol=1e-12, rtol=0)
    elsewhere = define(
        divergence, *exact_log_probs(p_logits, make_logits(20, 50, seed=1), temperature)
    )
    assert (elsewhere > 0.01).all()


def test_jensen_shannon_approaches_both_kls_after_scaling() -> None:
    p, q = exact_log_probs(make_logits(3, 50), make_logits(3, 50, seed=1))
    torch.testing.assert_close(
        jensen_shannon(p, q, 1e-7) / 1e-7, forward_kl(p, q), rtol=1e-4, atol=0
    )
    torch.testing.assert_close(
        jensen_shannon(p, q, 1 - 1e-7) / 1e-7, reverse_kl(p, q), rtol=1e-4, atol=0
    )


def test_lk_hybrid_holds_its_weight_constant() -> None:
    p_logits, q_logits = make_logits(3, 50), make_logits(3, 50, seed=1).requires_grad_()
    p, q = exact_log_probs(p_logits, q_logits)
    weight = torch.exp(-2.0 * (1 - total_variation(p, q).detach()))
    expected = torch.autograd.grad(
        (weight * forward_kl(p, q) + (1 - weight) * total_variation(p, q)).sum(),
        q_logits,
        retain_graph=True,
    )[0]
    torch.testing.assert_close(
        torch.autograd.grad(lk_hybrid(p, q, eta=2.0).sum(), q_logits)[0], expected
    )


def test_temperature_divides_the_logits() -> None:
    logits = make_logits(2, 7)
    torch.testing.assert_close(log_probs(logits, 4.0), (logits / 4).log_softmax(-1))


def test_bfloat16_logits_are_widened_before_the_softmax() -> None:
    logits = make_logits(2, 1000).bfloat16()
    assert log_probs(logits).dtype == torch.float32
    torch.testing.assert_close(log_probs(logits), log_probs(logits.float()))


# ---------------------------------------------------------------------------------------------------
# reduced vocabulary


def test_mass_out_of_reach_counts_as_rejected_in_every_divergence() -> None:
    # The draft has ids 0 and 2; the target's 0.4 on id 1 is out of its reach.
    p_logits = log_of(0.3, 0.4, 0.3)
    p, q = exact_log_probs(p_logits, log_of(0.5, 0.5), draft_ids_W=torch.tensor([0, 2]))
    assert total_variation(p, q).item() == pytest.approx(0.4)
    assert neg_log_alpha(p, q).item() == pytest.approx(-math.log(0.6))
    assert reverse_kl(p, q).item() == pytest.approx(-math.log(0.6))
    assert forward_kl(p, q).item() == pytest.approx(0, abs=1e-14), (
        "no draft of this vocabulary can do better"
    )
    padded_q = log_of(0.5, 0, 0.5)
    padded_js = jensen_shannon(p_logits, padded_q, beta=0.3)
    torch.testing.assert_close(jensen_shannon(p, q, beta=0.3), padded_js)


@pytest.mark.parametrize("name", AGAINST_TARGET)
def test_the_renormalised_target_is_the_best_a_reduced_draft_can_do(name: str) -> None:
    draft_ids = torch.tensor([1, 2, 5, 6])
    p_logits = make_logits(1, 8)
    best = p_logits[:, draft_ids].clone().requires_grad_()
    divergence = Divergence(name=name)
    value = define(divergence, *exact_log_probs(p_logits, best, draft_ids_W=draft_ids))
    for seed in range(20):
        other = best.detach() + make_logits(1, 4, seed=seed, scale=0.3)
        assert (
            define(divergence, *exact_log_probs(p_logits, other, draft_ids_W=draft_ids))
            >= value - 1e-12
        )


# -------------------------------------------------------------------------------------------------------
# top-k and tail


def make_top_k(p_logits_MV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    top = p_logits_MV.log_softmax(-1).topk(k)
    return top.indices, top.values


def test_top_k_merges_the_tail_into_one_outcome() -> None:
    p_logits = log_of(0.1, 0.4, 0.2, 0.3)
    q_logits = log_of(0.25, 0.3, 0.4, 0.05)
    log_p, log_q = top_k_log_probs(*make_top_k(p_logits, 2), q_logits)
    torch.testing.assert_close(log_p.exp(), torch.tensor([[0.4, 0.3, 0.3]], dtype=torch.float64))
    torch.testing.assert_close(log_q.exp(), torch.tensor([[0.3, 0.05, 0.65]], dtype=torch.float64))


def test_top_k_of_a_reduced_vocabulary_leaves_out_what_the_draft_lacks() -> None:
    p_logits = log_of(0.1, 0.4, 0.2, 0.3)
    log_p, log_q = top_k_log_probs(
        *make_top_k(p_logits, 2), log_of(0.25, 0.7, 0.05), torch.tensor([0, 2, 3])
    )
    torch.testing.assert_close(log_p.exp(), torch.tensor([[0.0, 0.3, 0.3]], dtype=torch.float64))
    torch.testing.assert_close(log_q.exp(), torch.tensor([[0.0, 0.05, 0.95]], dtype=torch.float64))


@pytest.mark.parametrize("name", AGAINST_TARGET)
@pytest.mark.parametrize("draft_ids", [None, torch.tensor([0, 3, 4, 9, 11])])
def test_all_ids_kept_equals_the_exact_target(name: str, draft_ids: Tensor | None) -> None:
    p_logits = make_logits(6, 12)
    q_logits = make_logits(6, 12 if draft_ids is None else 5, seed=1)
    divergence = Divergence(name=name)
    exact = define(divergence, *exact_log_probs(p_logits, q_logits, draft_ids_W=draft_ids))
    kept = define(divergence, *top_k_log_probs(*make_top_k(p_logits, 12), q_logits, draft_ids))
    torch.testing.assert_close(kept, exact)


@pytest.mark.parametrize(
    "name", ["forward_kl", "reverse_kl", "jensen_shannon", "total_variation", "neg_log_alpha"]
)
def test_top_k_is_a_lower_bound_that_tightens_with_k(name: str) -> None:
    p_logits, q_logits = make_logits(6, 40), make_logits(6, 40, seed=1)
    divergence = Divergence(name=name)
    values = [
        define(divergence, *top_k_log_probs(*make_top_k(p_logits, k), q_logits))
        for k in (1, 4, 16, 24)
    ]
    values.append(define(divergence, *exact_log_probs(p_logits, q_logits)))
    for coarse, fine in pairwise(values):
        assert (coarse <= fine + 1e-9).all()


# ------------------------------------------------------------------------------------------------------------
# stability


@pytest.mark.parametrize("name", AGAINST_TARGET)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("k", [None, 3])
def test_peaked_and_infinite_logits_stay_finite(name: str, reduced: bool, k: int | None) -> None:
    p_logits = torch.tensor([[300.0, 0, -300, 5, 4], [0.0, -math.inf, 1, 2, -math.inf]])
    q_logits = torch.tensor([[-400.0, 0, 300, 1, 1], [0.0, -math.inf, 1, 200, -math.inf]])
    draft_ids = torch.tensor([0, 1, 3]) if reduced else None
    q_logits = q_logits[:, draft_ids].requires_grad_() if reduced else q_logits.requires_grad_()
    if k is None:
        value = define(
            Divergence(name=name), *exact_log_probs(p_logits, q_logits, draft_ids_W=draft_ids)
        )
    else:
        value = define(
            Divergence(name=name), *top_k_log_probs(*make_top_k(p_logits, k), q_logits, draft_ids)
        )
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert q_logits.grad is not None
    assert torch.isfinite(q_logits.grad).all()


# ----------------------------------------------------------------------------------------------------
# choice, reduction


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"forward_kl, .*cross_entropy"):
        Divergence(name="kl")


@pytest.mark.parametrize(
    "wrong", [{"temperature": 0.0}, {"temperature": math.nan}, {"beta": 1.0}, {"eta": -1.0}]
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Divergence(**wrong)  # type: ignore[arg-type]
