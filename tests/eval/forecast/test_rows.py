"""The rates of a draft step against the definitions, written out.

N = rows, V = vocabulary, W = draft vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from redraft.engine.sampling import Sampling
from redraft.eval.acceptance import alpha, alpha_greedy, probabilities
from redraft.eval.forecast.rows import StepRates, TargetRows, compare_rows, step_rates, target_rows
from redraft.heads.draft import DraftStep, ExactTarget, TopKTarget

N, V, D = 40, 24, 8
DRAFT_IDS = torch.arange(1, V, 3)


def make_step(draft_ids_W: Tensor | None, seed: int = 0) -> DraftStep:
    generator = torch.Generator().manual_seed(seed)
    width = V if draft_ids_W is None else len(draft_ids_W)
    return DraftStep(
        hidden_BTD=torch.randn(1, N, D, generator=generator),
        head_WD=torch.randn(width, D, generator=generator),
        shift=0,
        mask_BT=torch.ones(1, N, dtype=torch.bool),
        draft_ids_W=draft_ids_W,
    )


def make_target(seed: int = 1) -> ExactTarget:
    generator = torch.Generator().manual_seed(seed)
    return ExactTarget(
        hidden_BTD=torch.randn(1, N, D, generator=generator),
        head_VD=torch.randn(V, D, generator=generator),
    )


def spread(step: DraftStep, temperature: float) -> Tensor:
    """q over the target's vocabulary, [N, V]."""
    q_NW = probabilities(step.hidden_BTD[0] @ step.head_WD.T, temperature)
    ids_W = torch.arange(V) if step.draft_ids_W is None else step.draft_ids_W
    return torch.zeros(N, V).index_copy(1, ids_W, q_NW)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("draft_ids_W", [None, DRAFT_IDS], ids=["whole", "reduced"])
def test_rates_are_the_definitions_over_the_targets_vocabulary(
    draft_ids_W: Tensor | None, temperature: float
) -> None:
    step, rows_N = make_step(draft_ids_W), torch.arange(N)
    target = target_rows(make_target(), rows_N, Sampling().at(temperature))
    rates, q_NV = step_rates(step, rows_N, target, temperature), spread(step, temperature)
    torch.testing.assert_close(rates.alpha, alpha(target.p_NM, q_NV))
    torch.testing.assert_close(rates.alpha_greedy, alpha_greedy(target.p_NM, q_NV))
    assert torch.equal(rates.agree, q_NV.argmax(-1) == target.p_NM.argmax(-1))
    label_N = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(2))
    assert torch.equal(
        rates.accept(label_N, is_sampled=False), (q_NV.argmax(-1) == label_N).float()
    )
    if temperature > 0:
        p_N, q_N = (each.gather(1, label_N[:, None])[:, 0] for each in (target.p_NM, q_NV))
        torch.testing.assert_close(rates.accept(label_N, is_sampled=True), (q_N / p_N).clamp(max=1))


@pytest.mark.parametrize("draft_ids_W", [None, DRAFT_IDS], ids=["whole", "reduced"])
def test_a_top_k_target_that_kept_every_token_is_the_whole_target(
    draft_ids_W: Tensor | None,
) -> None:
    step, exact = make_step(draft_ids_W), make_target()
    top = (exact.hidden_BTD @ exact.head_VD.T).log_softmax(-1).topk(V)
    whole, kept = (
        compare_rows(step, t)
        for t in (exact, TopKTarget(ids_BTK=top.indices, log_probs_BTK=top.values))
    )
    torch.testing.assert_close(kept.alpha_BT, whole.alpha_BT)
    torch.testing.assert_close(kept.alpha_greedy_BT, whole.alpha_greedy_BT)
    assert torch.equal(kept.agree_BT, whole.agree_BT)


def test_a_tie_of_kept_tokens_goes_to_the_lowest_as_it_does_over_the_vocabulary() -> None:
    ids_NM = torch.tensor([[7, 3, 5]])
    assert TargetRows(p_NM=torch.tensor([[0.4, 0.4, 0.2]]), ids_NM=ids_NM).best.tolist() == [3]


def test_a_token_that_was_not_kept_has_no_probability() -> None:
    target = TargetRows(p_NM=torch.tensor([[0.6, 0.3]]), ids_NM=torch.tensor([[4, 2]]))
    assert target.probability(torch.tensor([2])).tolist() == pytest.approx([0.3])
    rates = StepRates(
        target=target, q_NW=torch.tensor([[0.1, 0.9]]), draft_ids_W=torch.tensor([4, 9])
    )
    assert rates.alpha_greedy.tolist() == [0.0]
    assert rates.alpha.tolist() == pytest.approx([0.1])
