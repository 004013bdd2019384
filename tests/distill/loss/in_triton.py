"""The Triton kernels of the fused divergence in Triton's interpreter.

They are compared with the plain form in float64.

`test_kernels.py` runs this file in a process that has Triton.

M = draft rows, W = draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partialmethod
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from redraft.distill.loss import rows
from redraft.distill.loss.choice import DIVERGENCES, Divergence
from redraft.distill.loss.fused import (
    DraftRows,
    ExactRows,
    FusedResult,
    TopKRows,
    fused_linear_divergence,
)
from redraft.heads.logits import LogitRule
from tests.distill.loss.test_fused import (
    DRAFT_IDS,
    EVERY_FORM,
    leaves,
    make_draft,
    make_exact,
    make_labels,
    make_leaf,
    make_top_k,
)

WITHIN = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "TILE_PER_WARP", 1)


@pytest.fixture(autouse=True)
def maximum_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX's `max.f32` and `min.f32` drop NaN, as numpy's `fmax` and `fmin` do.

    The interpreter's do not.
    """
    for name, operation in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        monkeypatch.setattr(
            InterpreterBuilder, name, partialmethod(InterpreterBuilder.binary_op, op=operation)
        )


def assert_kernel_equals_plain(
    drafts: Sequence[DraftRows], target: ExactRows | TopKRows, divergence: Divergence
) -> FusedResult:
    """In float32, against the plain form in float64.

    The loss, all sums, alpha of every row, and all gradients.
    """
    oracle = run(drafts, target, replace(divergence, form="plain"))
    narrow = [narrowed(draft) for draft in drafts]
    kernel = run(narrow, narrowed(target), replace(divergence, form="kernel"))
    for name in ("loss", "loss_S", "alpha_S", "alpha_greedy_S"):
        torch.testing.assert_close(getattr(kernel, name).double(), getattr(oracle, name), **WITHIN)
    for mine, true in zip(kernel.alpha_SM, oracle.alpha_SM, strict=True):
        torch.testing.assert_close(mine.double(), true, **WITHIN)
    gradients = [
        torch.autograd.grad(each.loss, unique(these))
        for each, these in ((kernel, narrow), (oracle, drafts))
    ]
    for mine, true in zip(*gradients, strict=True):
        torch.testing.assert_close(mine.double(), true, **WITHIN)
    return kernel


def run(
    drafts: Sequence[DraftRows], target: ExactRows | TopKRows, divergence: Divergence
) -> FusedResult:
    return fused_linear_divergence(
        drafts, target, divergence, normaliser=7.0, labels_N=make_labels(), chunk_tokens=4
    )


def unique(drafts: Sequence[DraftRows]) -> list[Tensor]:
    return list({id(leaf): leaf for leaf in leaves(drafts)}.values())


KEPT: dict[int, tuple[Tensor, Tensor]] = {}


def narrow(x: Tensor) -> Tensor:
    """One float32 copy of each tensor, so that a shared head stays shared.

    With the tensor, whose id must last.
    """
    if id(x) not in KEPT:
        KEPT[id(x)] = (x.detach().float().requires_grad_(x.requires_grad), x)
    return KEPT[id(x)][0]


def narrowed(given: Any) -> Any:
    changed = {
        name: tuple(map(narrow, value)) if isinstance(value, tuple) else narrow(value)
        for name, value in vars(given).items()
        if isinstance(value, tuple) or (isinstance(value, Tensor) and value.is_floating_point())
    }
    return replace(given, **changed)


@pytest.mark.parametrize(("name", "top_k", "temperature"), EVERY_FORM)
@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS], ids=["full", "reduced"])
def test_every_divergence(
    name: str, top_k: bool, temperature: float, draft_ids: Tensor | None
) -> None:
    exact = make_exact(rows=17)
    first = make_draft([0, 3, 4, 5, 11, 16], draft_ids=draft_ids)
    # other rows, with the same head
    second = make_draft([3, 5, 9], draft_ids=draft_ids, head=first.head_WD, seed=2)
    target = make_top_k(exact) if top_k else exact
    assert_kernel_equals_plain(
        [first, second], target, Divergence(name=name, temperature=temperature)
    )


@pytest.mark.parametrize(("name", "top_k", "temperature"), EVERY_FORM)
def test_capped_logits(name: str, top_k: bool, temperature: float) -> None:
    exact = replace(make_exact(), rule=LogitRule(scale=0.5, cap=2.0))
    draft = replace(make_draft([0, 3, 4, 5, 11, 16]), cap=1.5)
    target = make_top_k(exact) if top_k else exact
    assert_kernel_equals_plain([draft], target, Divergence(name=name, temperature=temperature))


@pytest.mark.parametrize("top_k", [False, True])
def test_a_low_rank_bias_and_steps_with_heads_of_their_own(top_k: bool) -> None:
    exact = make_exact()
    drafts = [
        make_draft([1, 2, 8], bias_head=make_leaf(23, 3, 7)),
        make_draft([2, 8], seed=3),
        make_draft([0, 8], draft_ids=DRAFT_IDS, seed=4),
    ]
    assert_kernel_equals_plain(
        drafts, make_top_k(exact) if top_k else exact, Divergence(name="lk_hybrid")
    )


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("top_k", [False, True])
def test_very_peaked_distributions(name: str, top_k: bool) -> None:
    exact = make_exact(rows=6)
    exact = ExactRows(hidden_ND=20 * exact.hidden_ND, head_VD=exact.head_VD)
    draft = make_draft(range(6))
    draft = replace(draft, hidden_MD=(20 * draft.hidden_MD).detach().requires_grad_())
    target = make_top_k(exact, k=2) if top_k else exact
    kernel = run([narrowed(draft)], narrowed(target), Divergence(name=name, form="kernel"))
    gradients = torch.autograd.grad(kernel.loss, unique([narrowed(draft)]))
    oracle = run([narrowed(draft)], narrowed(target), Divergence(name=name, form="plain"))
    expected = torch.autograd.grad(oracle.loss, unique([narrowed(draft)]))
    torch.testing.assert_close(kernel.loss, oracle.loss, rtol=1e-4, atol=1e-4)
    for mine, true in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("top_k", [False, True])
def test_a_target_whose_kept_ids_are_the_whole_draft_vocabulary(top_k: bool) -> None:
    exact = make_exact(rows=5)
    ids = make_top_k(exact, k=3)
    draft_ids = ids.ids_NK[0].sort().values
    target = TopKRows(
        ids_NK=draft_ids.expand(5, -1),
        log_probs_NK=torch.tensor([-1.0, -1.5, -2.0]).double().expand(5, -1),
    )
    draft = make_draft(range(5), draft_ids=draft_ids)
    assert_kernel_equals_plain([draft], target if top_k else exact, Divergence(name="forward_kl"))


@pytest.mark.parametrize("top_k", [False, True])
@pytest.mark.parametrize("name", ["forward_kl", "lk_hybrid"])
def test_bfloat16_logits_and_a_float32_master_head(name: str, top_k: bool) -> None:
    """Only rounded where bfloat16 is written.

    Logits and gradient, as in the plain form in bfloat16.
    """
    exact = make_exact(dtype=torch.float32)
    target = make_top_k(exact) if top_k else exact
    results = {}
    for form in ("plain", "kernel"):
        draft = make_draft(range(17), dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            result = run([draft], target, Divergence(name=name, form=form))
        result.loss.backward()
        assert draft.head_WD.grad is not None
        assert draft.head_WD.grad.dtype == torch.float32
        results[form] = (result.loss.detach(), draft.head_WD.grad, draft.hidden_MD.grad)
    for mine, plain in zip(results["kernel"], results["plain"], strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-2, atol=2e-3)
    torch.testing.assert_close(results["kernel"][0], results["plain"][0], rtol=1e-5, atol=1e-6)


def test_of_equal_logits_the_first_is_the_draft_token() -> None:
    exact = make_exact(rows=3)
    head = torch.zeros(23, 4, dtype=torch.float64)
    head[5:] = 1.0  # 18 equal logits in three tiles
    draft = replace(
        make_draft(range(3), head=head), hidden_MD=torch.ones(3, 4, dtype=torch.float64)
    )
    p = (exact.hidden_ND @ exact.head_VD.T).softmax(-1)
    for target, expected in (
        (exact, p[:, 5].sum()),
        (make_top_k(exact), p[:, 5][(make_top_k(exact).ids_NK == 5).any(1)].sum()),
    ):
        result = run([narrowed(draft)], narrowed(target), Divergence(form="kernel"))
        torch.testing.assert_close(result.alpha_greedy_S[0].double(), expected, **WITHIN)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS], ids=["full", "reduced"])
@pytest.mark.parametrize("top_k", [False, True])
def test_a_target_row_that_is_not_finite_reaches_the_loss_and_the_gradients(
    name: str, bad: float, draft_ids: Tensor | None, top_k: bool
) -> None:
    """As in the plain form.

    So the step is skipped instead of taken with a finite, meaningless gradient.
    """
    exact = make_exact(rows=4, dtype=torch.float32)
    draft = make_draft(range(4), dtype=torch.float32, draft_ids=draft_ids)
    target: ExactRows | TopKRows = make_top_k(exact) if top_k else exact
    states = "log_probs_NK" if top_k else "hidden_ND"
    broken = getattr(target, states).detach().clone()
    broken[1] = bad
    results = {}
    for form in ("plain", "kernel"):
        result = run([draft], replace(target, **{states: broken}), Divergence(name=name, form=form))
        results[form] = (result.loss.detach(), *torch.autograd.grad(result.loss, unique([draft])))
    for mine, plain in zip(results["kernel"], results["plain"], strict=True):
        assert mine.isfinite().all() == plain.isfinite().all()
