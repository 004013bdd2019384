"""The fused divergence.

M = draft rows, N = target rows, D = hidden, V = target vocabulary, W = draft vocabulary, K = kept
ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from divergences import (
    cross_entropy,
    define,
    draft_columns,
    exact_log_probs,
    log_probs,
    top_k_log_probs,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from redraft.distill.loss import blocks
from redraft.distill.loss.choice import DIVERGENCES, Divergence
from redraft.distill.loss.fused import (
    DraftRows,
    ExactRows,
    FusedResult,
    TopKRows,
    default_chunk_tokens,
    fused_linear_divergence,
)
from redraft.eval.acceptance import alpha, alpha_greedy
from redraft.heads.logits import LogitRule

V, K, N = 23, 6, 17
DRAFT_IDS = torch.tensor([0, 2, 3, 7, 8, 11, 16, 20, 22])


def make_exact(
    *, rows: int = N, vocabulary: int = V, hidden: int = 5, dtype: torch.dtype = torch.float64
) -> ExactRows:
    generator = torch.Generator().manual_seed(0)
    return ExactRows(
        hidden_ND=torch.randn(rows, hidden, generator=generator, dtype=dtype),
        head_VD=torch.randn(vocabulary, hidden, generator=generator, dtype=dtype),
    )


def make_top_k(exact: ExactRows, k: int = K) -> TopKRows:
    top = (exact.hidden_ND @ exact.head_VD.T).log_softmax(-1).topk(k)
    return TopKRows(ids_NK=top.indices, log_probs_NK=top.values)


def make_draft(
    target_rows: Sequence[int],
    *,
    head: Tensor | None = None,
    draft_ids: Tensor | None = None,
    vocabulary: int = V,
    hidden: int = 4,
    dtype: torch.dtype = torch.float64,
    seed: int = 1,
    bias_head: Tensor | None = None,
) -> DraftRows:
    generator = torch.Generator().manual_seed(seed)
    width = vocabulary if draft_ids is None else len(draft_ids)
    if head is None:
        head = torch.randn(width, hidden, generator=generator, dtype=dtype).requires_grad_()
    return DraftRows(
        hidden_MD=torch.randn(
            len(target_rows), hidden, generator=generator, dtype=dtype
        ).requires_grad_(),
        head_WD=head,
        target_row_M=torch.tensor(target_rows, dtype=torch.long),
        weight_M=0.5 + torch.rand(len(target_rows), generator=generator, dtype=dtype),
        draft_ids_W=draft_ids,
        bias=None
        if bias_head is None
        else (make_leaf(len(target_rows), bias_head.shape[1], seed + 100), bias_head),
    )


def make_leaf(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).requires_grad_()


def draft_logits(draft: DraftRows) -> Tensor:
    logits_MW = draft.hidden_MD @ draft.head_WD.T
    if draft.bias is not None:
        logits_MW = logits_MW + draft.bias[0] @ draft.bias[1].T
    return logits_MW if draft.cap is None else draft.cap * torch.tanh(logits_MW / draft.cap)


def make_labels(rows: int = N, vocabulary: int = V) -> Tensor:
    return torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(2))


def plain_log_probs(
    draft: DraftRows, target: ExactRows | TopKRows, temperature: float
) -> tuple[Tensor, Tensor]:
    q_logits = draft_logits(draft)
    if isinstance(target, TopKRows):
        rows = draft.target_row_M
        return top_k_log_probs(
            target.ids_NK[rows], target.log_probs_NK[rows], q_logits, draft.draft_ids_W
        )
    p_logits = target.rule.apply(target.hidden_ND[draft.target_row_M] @ target.head_VD.T)
    return exact_log_probs(p_logits, q_logits, temperature, draft.draft_ids_W)


def plain_values(
    draft: DraftRows,
    target: ExactRows | TopKRows,
    divergence: Divergence,
    labels: Tensor | None = None,
) -> Tensor:
    if divergence.name != "cross_entropy":
        return define(divergence, *plain_log_probs(draft, target, divergence.temperature))
    assert labels is not None
    log_q = log_probs(draft_logits(draft), divergence.temperature)
    return cross_entropy(
        log_q, *draft_columns(labels[draft.target_row_M], draft.draft_ids_W, log_q.shape[1])
    )


def plain_loss(
    drafts: Sequence[DraftRows],
    target: ExactRows | TopKRows,
    divergence: Divergence,
    normaliser: float,
    labels: Tensor | None = None,
) -> Tensor:
    losses = [
        (plain_values(d, target, divergence, labels) * d.weight_M).sum() / normaliser
        for d in drafts
    ]
    return torch.stack(losses).sum()


def leaves(drafts: Sequence[DraftRows]) -> list[Tensor]:
    return [
        tensor
        for draft in drafts
        for tensor in (draft.hidden_MD, draft.head_WD, *(draft.bias or ()))
        if tensor.requires_grad
    ]


def assert_fused_equals_plain(
    drafts: Sequence[DraftRows],
    target: ExactRows | TopKRows,
    divergence: Divergence,
    chunk_tokens: int = 4,
) -> FusedResult:
    labels = make_labels()
    result = fused_linear_divergence(
        drafts, target, divergence, normaliser=7.0, labels_N=labels, chunk_tokens=chunk_tokens
    )
    plain = plain_loss(drafts, target, divergence, 7.0, labels)
    torch.testing.assert_close(result.loss, plain, rtol=1e-12, atol=1e-14)
    inputs = list({id(leaf): leaf for leaf in leaves(drafts)}.values())
    # scaled, so that backward's own factor is seen
    for mine, its in zip(
        torch.autograd.grad(3 * result.loss, inputs),
        torch.autograd.grad(3 * plain, inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-13)
    return result


EVERY_FORM = [
    pytest.param(
        name, top_k, temperature, id=f"{name}-{'top-k' if top_k else 'exact'}-{temperature}"
    )
    for name in DIVERGENCES
    for top_k, temperature in [(False, 1.0), (False, 0.7), (False, 2.0), (True, 1.0)]
]


@pytest.mark.parametrize(("name", "top_k", "temperature"), EVERY_FORM)
@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS], ids=["full", "reduced"])
def test_fused_equals_the_plain_form_in_value_and_gradient(
    name: str, top_k: bool, temperature: float, draft_ids: Tensor | None
) -> None:
    target = make_top_k(make_exact()) if top_k else make_exact()
    divergence = Divergence(name=name, temperature=temperature, beta=0.3, eta=2.0)
    drafts = [make_draft([0, 3, 4, 9, 10, 11, 12, 16], draft_ids=draft_ids)]
    assert_fused_equals_plain(drafts, target, divergence)


@pytest.mark.parametrize(("name", "top_k", "temperature"), EVERY_FORM)
@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS], ids=["full", "reduced"])
def test_scaled_and_capped_logits_of_the_target_and_capped_ones_of_the_draft(
    name: str, top_k: bool, temperature: float, draft_ids: Tensor | None
) -> None:
    exact = replace(make_exact(), rule=LogitRule(scale=0.5, cap=2.0))
    target = make_top_k(exact) if top_k else exact
    divergence = Divergence(name=name, temperature=temperature, beta=0.3, eta=2.0)
    capped = replace(make_draft([0, 3, 4, 9, 10, 11, 12, 16], draft_ids=draft_ids), cap=1.5)
    free = make_draft([3, 4, 12], draft_ids=draft_ids, seed=5)
    assert_fused_equals_plain([capped, free], target, divergence)


# Not lk_hybrid: its weight is a constant by definition, which finite differences do not know.
@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "lk_hybrid"])
@pytest.mark.parametrize(("top_k", "temperature"), [(False, 0.7), (True, 1.0)])
@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS], ids=["full", "reduced"])
def test_gradcheck(name: str, top_k: bool, temperature: float, draft_ids: Tensor | None) -> None:
    target = make_top_k(make_exact()) if top_k else make_exact()
    divergence = Divergence(name=name, temperature=temperature, beta=0.3)
    draft = make_draft([1, 5], draft_ids=draft_ids, hidden=2)

    def loss(hidden_MD: Tensor, head_WD: Tensor) -> Tensor:
        return fused_linear_divergence(
            [replace(draft, hidden_MD=hidden_MD, head_WD=head_WD)],
            target,
            divergence,
            normaliser=2.0,
            labels_N=make_labels(),
            chunk_tokens=1,
        ).loss

    assert torch.autograd.gradcheck(loss, (draft.hidden_MD, draft.head_WD))


@pytest.mark.parametrize("top_k", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
def test_steps_of_different_shifts_share_the_target_and_a_head(
    top_k: bool, chunk_tokens: int
) -> None:
    target = make_top_k(make_exact()) if top_k else make_exact()
    first = make_draft(range(10))
    shared = make_draft(range(1, 11), head=first.head_WD, seed=2)
    own = make_draft(range(2, 17, 2), draft_ids=DRAFT_IDS, seed=3)
    single = make_draft([6], draft_ids=DRAFT_IDS, seed=4)
    assert_fused_equals_plain([first, shared, own, single], target, Divergence(), chunk_tokens)


@pytest.mark.parametrize("name", ["forward_kl", "lk_hybrid", "cross_entropy"])
@pytest.mark.parametrize("top_k", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS], ids=["full", "reduced"])
def test_a_low_rank_bias_is_part_of_the_logits(
    name: str, top_k: bool, chunk_tokens: int, draft_ids: Tensor | None
) -> None:
    """Beside steps with the same frozen head, of which one has no bias and two share it."""
    target = make_top_k(make_exact()) if top_k else make_exact()
    width = V if draft_ids is None else len(draft_ids)
    head, bias_head = make_leaf(width, 4, 7).detach(), make_leaf(width, 3, 8)
    shared = {"head": head, "draft_ids": draft_ids}
    drafts = [
        make_draft(range(10), **shared, bias_head=bias_head),
        make_draft(range(1, 11), **shared, bias_head=bias_head, seed=2),
        make_draft([6], **shared, seed=3),
    ]
    result = assert_fused_equals_plain(drafts, target, Divergence(name=name), chunk_tokens)
    for draft, alpha_M in zip(drafts, result.alpha_SM, strict=True):
        log_p, log_q = plain_log_probs(draft, target, 1.0)
        torch.testing.assert_close(alpha_M, alpha(log_p.exp(), log_q.exp()))
        assert not alpha_M.requires_grad


@pytest.mark.parametrize("top_k", [False, True])
@pytest.mark.parametrize("draft_ids", [None, torch.arange(0, 128, 2)], ids=["full", "reduced"])
def test_blocks_within_a_chunk_change_nothing(
    top_k: bool, draft_ids: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS_CPU", 3 * 128)
    exact = make_exact(vocabulary=128)
    drafts = [make_draft([0, 3, 4, 9, 10, 11, 12, 16], vocabulary=128, draft_ids=draft_ids)]
    target = make_top_k(exact) if top_k else exact
    result = assert_fused_equals_plain(drafts, target, Divergence(), chunk_tokens=8)
    log_p, log_q = plain_log_probs(drafts[0], target, 1.0)
    torch.testing.assert_close(result.alpha_S[0], alpha(log_p.exp(), log_q.exp()).sum())
    if not top_k:  # in a vocabulary of whole groups, where the argmax takes two levels
        torch.testing.assert_close(
            result.alpha_greedy_S[0], alpha_greedy(log_p.exp(), log_q.exp()).sum()
        )


def test_of_equal_logits_the_first_is_the_draft_token() -> None:
    # Ties within a group of 64 and across groups; the target puts 0.5 on the first and 0.25 on two
    # others.
    logits, p = torch.zeros(1, 192), torch.full((1, 192), 1e-9)
    logits[0, [70, 71, 130]] = 5.0
    p[0, 70], p[0, 71], p[0, 130] = 0.5, 0.25, 0.25
    draft = DraftRows(
        hidden_MD=logits,
        head_WD=torch.eye(192),
        target_row_M=torch.tensor([0]),
        weight_M=torch.ones(1),
    )
    target = ExactRows(hidden_ND=p.log(), head_VD=torch.eye(192))
    result = fused_linear_divergence([draft], target, Divergence(), normaliser=1)
    assert result.alpha_greedy_S.item() == pytest.approx(0.5)


def test_frozen_heads_and_hidden_states_get_no_gradient() -> None:
    target = make_exact()
    frozen_head = make_draft([1, 2], head=make_draft([0]).head_WD.detach())
    frozen_hidden = replace(make_draft([4, 8]), hidden_MD=make_draft([4, 8]).hidden_MD.detach())
    assert_fused_equals_plain(
        [frozen_head, frozen_hidden], target, Divergence(name="neg_log_alpha")
    )


def test_backward_twice_through_a_retained_graph_gives_the_same_gradient() -> None:
    draft = make_draft([1, 2])
    loss = fused_linear_divergence([draft], make_exact(), Divergence(), normaliser=1).loss
    once = torch.autograd.grad(5 * loss, draft.hidden_MD, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(5 * loss, draft.hidden_MD)[0], once)


def test_the_sums_are_unweighted_and_by_step() -> None:
    target = make_exact()
    drafts = [make_draft([1, 2, 3]), make_draft([5, 9], draft_ids=DRAFT_IDS)]
    divergence = Divergence(name="reverse_kl")
    result = fused_linear_divergence(drafts, target, divergence, normaliser=7)
    for step, draft in enumerate(drafts):
        log_p, log_q = plain_log_probs(draft, target, 1.0)
        torch.testing.assert_close(
            result.loss_S[step], plain_values(draft, target, divergence).sum()
        )
        torch.testing.assert_close(result.alpha_S[step], alpha(log_p.exp(), log_q.exp()).sum())
        torch.testing.assert_close(
            result.alpha_greedy_S[step], alpha_greedy(log_p.exp(), log_q.exp()).sum()
        )
    assert result.count_S.tolist() == [3, 2]
    assert not result.alpha_S.requires_grad


def test_alpha_greedy_of_a_top_k_target_counts_only_recorded_tokens() -> None:
    # Head rows are the identity, so hidden states are logits. Kept: ids 1 and 2.
    target = TopKRows(ids_NK=torch.tensor([[1, 2]]), log_probs_NK=torch.tensor([[0.6, 0.3]]).log())
    for logits, expected in [
        ([0.0, 3.0, 0.0, 0.0], 0.6),
        ([0.0, 0.0, 3.0, 0.0], 0.3),
        ([3.0, 0.0, 0.0, 0.0], 0.0),
    ]:
        draft = DraftRows(
            hidden_MD=torch.tensor([logits]),
            head_WD=torch.eye(4),
            target_row_M=torch.tensor([0]),
            weight_M=torch.ones(1),
        )
        result = fused_linear_divergence([draft], target, Divergence(), normaliser=1)
        assert result.alpha_greedy_S.item() == pytest.approx(expected)


@pytest.mark.parametrize("top_k", [False, True])
def test_no_rows_give_zero_loss_and_zero_gradients(top_k: bool) -> None:
    target = make_top_k(make_exact()) if top_k else make_exact()
    drafts = [make_draft([]), make_draft([], draft_ids=DRAFT_IDS)]
    result = fused_linear_divergence(drafts, target, Divergence(), normaliser=0)
    result.loss.backward()
    assert result.loss.item() == 0
    assert result.count_S.tolist() == [0, 0]
    assert drafts[0].head_WD.grad is not None
    assert torch.equal(drafts[0].head_WD.grad, torch.zeros_like(drafts[0].head_WD))
    assert drafts[1].hidden_MD.grad is not None


def test_one_step_without_rows_leaves_the_other_alone() -> None:
    assert_fused_equals_plain([make_draft([1, 3]), make_draft([])], make_exact(), Divergence())


# -------------------------------------------------------------------------------------------------------------
# numerics


@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "cross_entropy"])
@pytest.mark.parametrize("top_k", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_very_peaked_distributions_stay_finite(name: str, top_k: bool, dtype: torch.dtype) -> None:
    target = make_exact(dtype=torch.float32)
    target = replace(target, hidden_ND=60 * target.hidden_ND)
    draft = make_draft(range(N), dtype=torch.float32)
    hidden = (60 * draft.hidden_MD.detach()).to(dtype).requires_grad_()
    head = draft.head_WD.detach().to(dtype).requires_grad_()
    draft = replace(draft, hidden_MD=hidden, head_WD=head)
    result = fused_linear_divergence(
        [draft], make_top_k(target) if top_k else target, Divergence(name=name), normaliser=1
    )
    result.loss.backward()
    for value in (result.loss, hidden.grad, head.grad):
        assert value is not None
        assert torch.isfinite(value).all()


def test_a_token_the_draft_deems_impossible_still_pulls_with_its_full_mass() -> None:
    # In float32 q of the target's token is exactly 0; the gradient must be -p there all the same.
    for target in (
        ExactRows(hidden_ND=torch.tensor([[0.0, 200.0, 0.0, 0.0]]), head_VD=torch.eye(4)),
        TopKRows(ids_NK=torch.tensor([[1, 3]]), log_probs_NK=torch.tensor([[0.0, -200.0]])),
    ):
        hidden = torch.tensor([[200.0, -200.0, 0.0, 0.0]], requires_grad=True)
        draft = DraftRows(
            hidden_MD=hidden,
            head_WD=torch.eye(4),
            target_row_M=torch.tensor([0]),
            weight_M=torch.ones(1),
        )
        fused_linear_divergence([draft], target, Divergence(), normaliser=1).loss.backward()
        torch.testing.assert_close(
            hidden.grad, torch.tensor([[1.0, -1.0, 0.0, 0.0]]), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("name", list(DIVERGENCES))
@pytest.mark.parametrize("top_k", [False, True])
def test_bfloat16_is_close_to_float32(name: str, top_k: bool) -> None:
    exact = make_exact(rows=64, vocabulary=500, hidden=32, dtype=torch.float32)
    exact = replace(exact, head_VD=0.3 * exact.head_VD)
    wide = make_draft(range(64), vocabulary=500, hidden=32, dtype=torch.float32)
    head = (0.3 * wide.head_WD.detach()).bfloat16()
    gradients = []
    losses = []
    for dtype in (torch.bfloat16, torch.float32):
        draft = replace(
            wide,
            hidden_MD=wide.hidden_MD.detach().bfloat16().to(dtype).requires_grad_(),
            head_WD=head.to(dtype).requires_grad_(),
        )
        target = replace(
            exact,
            hidden_ND=exact.hidden_ND.bfloat16().to(dtype),
            head_VD=exact.head_VD.bfloat16().to(dtype),
        )
        result = fused_linear_divergence(
            [draft],
            make_top_k(exact) if top_k else target,
            Divergence(name=name),
            normaliser=64,
            labels_N=make_labels(64, 500),
        )
        assert result.loss.dtype == torch.float32
        losses.append(result.loss)
        gradients.append(torch.autograd.grad(result.loss, [draft.hidden_MD, draft.head_WD]))
    torch.testing.assert_close(losses[0], losses[1], rtol=5e-3, atol=0)
    for narrow, exact_gradient in zip(*gradients, strict=True):
        assert narrow.dtype == torch.bfloat16
        error = (narrow.float() - exact_gradient).norm() / exact_gradient.norm()
        assert error < (0.05 if name in ("total_variation", "neg_log_alpha", "lk_hybrid") else 0.02)


def test_a_float32_master_head_keeps_a_float32_gradient_under_autocast() -> None:
    # Row by row: chunks of 1 add 64 partial sums into the head's gradient, which bfloat16 would
    # round each time.
    target = make_exact(rows=64, dtype=torch.float32)
    draft = make_draft(range(64), dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        result = fused_linear_divergence(
            [draft], target, Divergence(), normaliser=64, chunk_tokens=1
        )
    mine = torch.autograd.grad(result.loss, leaves([draft]))
    exact = torch.autograd.grad(plain_loss([draft], target, Divergence(), 64), leaves([draft]))
    for narrow, wide in zip(mine, exact, strict=True):
        assert narrow.dtype == torch.float32
        assert 0 < (narrow - wide).norm() / wide.norm() < 0.01


# ---------------------------------------------------------------------------------------------------------------
# memory


class LargestTensor(TorchDispatchMode):
    """The most elements any operation returned while this was on."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_a_chunk_has_more_rows_on_a_gpu() -> None:
    rows = [default_chunk_tokens(torch.device(name)) for name in ("cpu", "meta", "cuda")]
    assert rows == [256, 2048, 2048]


@pytest.mark.parametrize("top_k", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
def test_never_holds_more_logits_than_a_chunk(top_k: bool, reduced: bool) -> None:
    rows, vocabulary, chunk = 96, 1000, 8
    exact = make_exact(rows=rows, vocabulary=vocabulary)
    target = make_top_k(exact) if top_k else exact
    draft_ids = torch.arange(0, vocabulary, 2) if reduced else None
    bias_head = make_leaf(vocabulary // 2 if reduced else vocabulary, 4, 5)
    draft = make_draft(range(rows), vocabulary=vocabulary, draft_ids=draft_ids, bias_head=bias_head)
    with LargestTensor() as ours:
        fused_linear_divergence(
            [draft], target, Divergence(), normaliser=1, chunk_tokens=chunk
        ).loss.backward()
    assert ours.elements <= chunk * vocabulary
    with LargestTensor() as plain:
        plain_loss([draft], target, Divergence(), 1.0).backward()
    assert plain.elements >= rows * draft.head_WD.shape[0]


def test_a_heads_gradient_is_handed_over_and_not_copied() -> None:
    target, draft = make_exact(rows=20, vocabulary=200), make_draft(range(20), vocabulary=200)
    loss = fused_linear_divergence([draft], target, Divergence(), normaliser=1).loss
    places = set()

    class RecordLarge(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.shape == draft.head_WD.shape:
                places.add(result.data_ptr())
            return result

    with RecordLarge():
        (3 * loss).backward()
    assert draft.head_WD.grad is not None
    assert places == {draft.head_WD.grad.data_ptr()}


def test_the_targets_distribution_is_computed_once_for_all_steps() -> None:
    target = make_exact(rows=20)
    drafts = [make_draft(range(shift, 20), seed=shift) for shift in range(4)]
    softmaxes = []

    class CountSoftmaxes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.overloadpacket in (torch.ops.aten._softmax, torch.ops.aten.softmax):
                softmaxes.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    with CountSoftmaxes():
        fused_linear_divergence(drafts, target, Divergence(), normaliser=1, chunk_tokens=5)
    assert sum(softmaxes) == 20 + sum(len(draft.hidden_MD) for draft in drafts)


def test_the_targets_logits_are_computed_once_for_all_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = make_exact(rows=20)
    drafts = [make_draft(range(shift, 20), seed=shift) for shift in range(4)]
    matmuls = 0

    class CountTargetMatmuls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal matmuls
            if (
                func.overloadpacket is torch.ops.aten.addmm
                and args[2].data_ptr() == target.head_VD.data_ptr()
            ):
                matmuls += 1
            return func(*args, **(kwargs or {}))

    with CountTargetMatmuls():
        fused_linear_divergence(drafts, target, Divergence(), normaliser=1, chunk_tokens=5)
    assert matmuls == 4


def test_steps_with_one_head_share_its_products_and_no_row_is_gathered() -> None:
    target = make_exact(rows=20)
    first = make_draft(range(20))
    drafts = [
        first,
        make_draft(range(2, 20), head=first.head_WD, seed=2),
        make_draft([7], head=first.head_WD, seed=3),
    ]
    additions, gathers = 0, 0

    class CountPasses(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal additions, gathers
            name = func.overloadpacket
            additions += name is torch.ops.aten.addmm and args[0].shape == first.head_WD.shape
            gathers += (
                name is torch.ops.aten.index and args[0].data_ptr() == first.hidden_MD.data_ptr()
            )
            return func(*args, **(kwargs or {}))

    with CountPasses():
        fused_linear_divergence(drafts, target, Divergence(), normaliser=1, chunk_tokens=5)
    assert (additions, gathers) == (4, 0)  # one product for each chunk


def test_a_head_that_steps_share_is_converted_once() -> None:
    exact = make_exact(dtype=torch.float32)
    head = torch.randn(V, 4, dtype=torch.float64, requires_grad=True)  # to bfloat16, or to float32
    drafts = [make_draft([1, 2, 3], head=head, dtype=torch.float32, seed=seed) for seed in range(3)]
    conversions = 0

    class CountConversions(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal conversions
            conversions += func is torch.ops.aten._to_copy.default and args[0].shape == head.shape
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", torch.bfloat16), CountConversions():
        fused_linear_divergence(drafts, exact, Divergence(), normaliser=1.0)
    assert conversions == 1


# ---------------------------------------------------------------------------------------------------------------
# errors


def test_a_temperature_on_a_top_k_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2.0"):
        fused_linear_divergence(
            [make_draft([0])], make_top_k(make_exact()), Divergence(temperature=2.0), normaliser=1
        )


def test_vocabularies_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"24.*23"):
        fused_linear_divergence(
            [make_draft([0], vocabulary=24)], make_exact(), Divergence(), normaliser=1
        )
    with pytest.raises(ValueError, match=r"23.*9"):
        fused_linear_divergence(
            [replace(make_draft([0]), draft_ids_W=DRAFT_IDS)],
            make_exact(),
            Divergence(),
            normaliser=1,
        )


@pytest.mark.parametrize("rows", [[4, 1, 2], [1, 1, 2]])
def test_target_rows_in_another_order_or_repeated_are_refused(rows: list[int]) -> None:
    with pytest.raises(ValueError, match="ascending and distinct"):
        fused_linear_divergence([make_draft(rows)], make_exact(), Divergence(), normaliser=1)


def test_cross_entropy_without_labels_is_refused() -> None:
    with pytest.raises(ValueError, match="labels_N"):
        fused_linear_divergence(
            [make_draft([0])], make_exact(), Divergence(name="cross_entropy"), normaliser=1
        )
