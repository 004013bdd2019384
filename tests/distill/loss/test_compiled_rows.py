"""The divergence by compiled operations, and its products in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from redraft.distill.loss import compiled, products
from redraft.distill.loss.blocks import Scratch
from redraft.distill.loss.choice import DIVERGENCES, Divergence
from redraft.distill.loss.fused import DraftRows, ExactRows, FusedResult, fused_linear_divergence
from redraft.heads.logits import LogitRule

ROWS, WIDTH, VOCABULARY, DRAFT_IDS = 24, 6, 40, torch.arange(0, 40, 3)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No graph of another test: a function has eight at most."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled._compiled_rows.cache_clear()
    compiled._compiled_sums.cache_clear()
    yield
    torch._dynamo.reset()


def make(rows: int, columns: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(
        rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def make_drafts(dtype: torch.dtype, draft_ids: Tensor | None = None) -> list[DraftRows]:
    """Two steps with a head in common.

    The first is compared row for row, the second with some of the rows.
    """
    head_WD = make(
        VOCABULARY if draft_ids is None else len(draft_ids), WIDTH, 1, dtype
    ).requires_grad_()
    return [
        DraftRows(
            hidden_MD=make(len(rows), WIDTH, seed, dtype).requires_grad_(),
            head_WD=head_WD,
            target_row_M=torch.tensor(rows),
            weight_M=torch.linspace(0.5, 1.5, len(rows)),
            draft_ids_W=draft_ids,
        )
        for seed, rows in enumerate([list(range(ROWS)), [1, 2, 5, 9, 17, 20]], start=2)
    ]


def make_target(dtype: torch.dtype) -> ExactRows:
    return ExactRows(
        hidden_ND=make(ROWS, WIDTH, 8, dtype), head_VD=make(VOCABULARY, WIDTH, 9, dtype)
    )


def run(
    drafts: list[DraftRows], target: ExactRows, divergence: Divergence
) -> tuple[FusedResult, list[Tensor]]:
    labels_N = torch.arange(ROWS) % VOCABULARY
    result = fused_linear_divergence(
        drafts, target, divergence, normaliser=7.0, labels_N=labels_N, chunk_tokens=11
    )
    leaves = [*(draft.hidden_MD for draft in drafts), drafts[0].head_WD]
    return result, list(torch.autograd.grad(3 * result.loss, leaves))


@pytest.fixture
def any_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graphs without minutes of C++."""
    monkeypatch.setattr(
        compiled,
        "_compile",
        lambda f: torch.compile(f, dynamic=True, fullgraph=True, backend="aot_eager"),
    )


@pytest.fixture
def no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operations without the seconds in which PyTorch traces them."""
    monkeypatch.setattr(compiled, "_compile", lambda function: function)


CASES = [
    pytest.param(temperature, draft_ids, id=f"{temperature}-{kept}")
    for temperature in (1.0, 0.7)
    for kept, draft_ids in (("full", None), ("reduced", DRAFT_IDS))
]


@pytest.mark.parametrize(("temperature", "draft_ids"), CASES)
@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.usefixtures("no_graph")
def test_operations_to_compile_give_what_separate_ones_give(
    name: str, temperature: float, draft_ids: Tensor | None
) -> None:
    require_same(name, temperature, draft_ids)


TRACED = [
    name if name in ("lk_hybrid", "cross_entropy") else pytest.param(name, marks=pytest.mark.slow)
    for name in DIVERGENCES
]
"""In the quick tests, PyTorch traces the one with most operations, and the one without any."""


@pytest.mark.parametrize(
    ("temperature", "draft_ids"),
    [
        pytest.param(
            *case.values, id=case.id, marks=[pytest.mark.slow] * (case.id != "0.7-reduced")
        )
        for case in CASES
    ],
)
@pytest.mark.parametrize("name", TRACED)
@pytest.mark.usefixtures("any_backend")
def test_compiled_operations_give_what_separate_ones_give(
    name: str, temperature: float, draft_ids: Tensor | None
) -> None:
    require_same(name, temperature, draft_ids)
    assert (torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0) == (name != "cross_entropy")


def require_same(name: str, temperature: float, draft_ids: Tensor | None) -> None:
    """In float64, with capped logits."""
    drafts = [replace(draft, cap=2.0) for draft in make_drafts(torch.float64, draft_ids)]
    target = replace(make_target(torch.float64), rule=LogitRule(scale=0.5, cap=3.0))
    plain = Divergence(name=name, temperature=temperature, beta=0.3, eta=2.0, form="plain")
    (expected, its), (found, mine) = (
        run(drafts, target, replace(plain, form=form)) for form in ("plain", "compiled")
    )
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=1e-14)
    for sums in ("loss_S", "alpha_S", "alpha_greedy_S", "count_S"):
        torch.testing.assert_close(
            getattr(found, sums), getattr(expected, sums), rtol=1e-12, atol=1e-14
        )
    torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in DIVERGENCES if name != "cross_entropy"])
@pytest.mark.usefixtures("no_graph")
def test_peaked_distributions_are_as_exact(name: str) -> None:
    """In float32: logits up to 400, probabilities of 0."""
    drafts, target = make_drafts(torch.float32), make_target(torch.float32)
    target = replace(target, hidden_ND=60 * target.hidden_ND)
    drafts = [
        replace(draft, hidden_MD=(60 * draft.hidden_MD.detach()).requires_grad_())
        for draft in drafts
    ]
    (expected, its), (found, mine) = (
        run(drafts, target, Divergence(name=name, form=f)) for f in ("plain", "compiled")
    )
    assert torch.isfinite(found.loss)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("no_graph")
def test_heads_take_turns_in_the_memory_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Medusa.

    PyTorch's separate operations compute the target's p once for all heads, and hold all logits.
    """
    head_WD = make(VOCABULARY, WIDTH, 5, torch.float64).requires_grad_()
    drafts, target = make_drafts(torch.float64), make_target(torch.float64)
    drafts[1] = replace(drafts[1], head_WD=head_WD)
    held: dict[str, set[str]] = {"plain": set(), "compiled": set()}
    results = []
    take = Scratch.__call__
    for form, names in held.items():

        def watched(scratch: Scratch, name: str, *rest: Any, names: set[str] = names) -> Tensor:
            names.add(name)
            return take(scratch, name, *rest)

        monkeypatch.setattr(Scratch, "__call__", watched)
        results.append(run(drafts, target, Divergence(form=form)))
    (expected, its), (found, mine) = results
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-13)
    assert {name for name in held["plain"] if "logits" in name} == {
        "target logits",
        "draft logits 0",
        "draft logits 1",
    }
    assert {name for name in held["compiled"] if "logits" in name} == {
        "target logits",
        "draft logits 0",
    }


def widened(drafts: list[DraftRows], dtype: torch.dtype) -> list[DraftRows]:
    """The same numbers in a wider dtype, with one head for all steps."""
    heads: dict[int, Tensor] = {}

    def widen(tensor: Tensor) -> Tensor:
        return heads.setdefault(
            id(tensor), tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)
        )

    return [
        replace(
            draft,
            hidden_MD=widen(draft.hidden_MD),
            head_WD=widen(draft.head_WD),
            bias=None if draft.bias is None else (widen(draft.bias[0]), widen(draft.bias[1])),
        )
        for draft in drafts
    ]


def widened_target(target: ExactRows, dtype: torch.dtype) -> ExactRows:
    return ExactRows(hidden_ND=target.hidden_ND.to(dtype), head_VD=target.head_VD.to(dtype))


@pytest.mark.parametrize("name", [pytest.param("forward_kl", marks=pytest.mark.slow), "lk_hybrid"])
def test_kernels_in_cpp_are_exact_to_1e_4(name: str) -> None:
    # Each step is a kernel of its own to compile: in the quick test only that with repeated rows.
    first = 0 if name == "forward_kl" else 1
    drafts, target = make_drafts(torch.float32)[first:], make_target(torch.float32)
    oracle, its = run(
        widened(drafts, torch.float64),
        widened_target(target, torch.float64),
        Divergence(name=name, form="plain"),
    )
    found, mine = run(drafts, target, Divergence(name=name, form="compiled"))
    assert float(found.loss.detach()) == pytest.approx(float(oracle.loss.detach()), rel=1e-4)
    for one, other in zip(mine, its, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()


@pytest.mark.parametrize("bias", [False, True])
def test_products_in_float32_are_those_of_the_heads_widened(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of some rows of a head in bfloat16, of which the last is smaller.

    The hidden states are in float32, so on every CPU the products are, too.
    """
    monkeypatch.setattr(products, "TILE_ELEMENTS", 7 * WIDTH)
    narrow, target = make_drafts(torch.bfloat16), make_target(torch.bfloat16)
    narrow = [
        replace(draft, hidden_MD=draft.hidden_MD.detach().float().requires_grad_())
        for draft in narrow
    ]
    target = replace(target, hidden_ND=target.hidden_ND.float())
    if bias:
        head_WE = make(VOCABULARY, WIDTH, 21, torch.bfloat16)
        narrow = [
            replace(draft, bias=(make(len(draft.hidden_MD), WIDTH, 30, torch.bfloat16), head_WE))
            for draft in narrow
        ]
    found, mine = run(narrow, target, Divergence())
    oracle, its = run(
        widened(narrow, torch.float32), widened_target(target, torch.float32), Divergence()
    )
    torch.testing.assert_close(found.loss, oracle.loss)
    assert mine[-1].dtype == torch.bfloat16
    for one, other in zip(mine, its, strict=True):
        assert (one.float() - other).norm() < 0.01 * other.norm()


def test_a_narrow_dtype_stays_unless_its_products_are_much_slower() -> None:
    times = {torch.float32: 1.0, torch.bfloat16: 1.3, torch.float16: 1.1}

    def chosen(dtype: torch.dtype, device: str = "cpu") -> torch.dtype:
        x = torch.ones(2, dtype=dtype, device=device)
        return products.matmul_dtype(x, lambda left, _: times[left.dtype])

    assert chosen(torch.bfloat16) == torch.float32
    assert chosen(torch.float16) == torch.float16, "a tenth faster is no reason: noise would decide"
    assert chosen(torch.bfloat16, "meta") == torch.bfloat16
    assert chosen(torch.float64) == torch.float64
