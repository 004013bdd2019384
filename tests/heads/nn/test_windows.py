"""Windows in attention against plain softmaxes over keys picked one after the other, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module
from torch import Tensor

from redraft.files.windows import View, make_views, read_windows, write_views
from redraft.heads.draft import Batch
from redraft.heads.nn import prefix
from redraft.heads.nn.attention import StepMemory
from redraft.heads.nn.blocks import BlockMask, attend_blocks
from redraft.heads.nn.prefix import Prefixes

SIZE, SLOTS, STEPS = 8, 3, 4
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 6 + [-1] * 2, [0] * 4 + [1] * 13])
ROWS = torch.tensor([[0, 3, 7, 9, 13], [1, 2, 6, 11, 15]])
FORMS = ("cpu", "gpu")


def is_seen(query: int, key: int, view: View) -> bool:
    """VLLM's rule, by positions."""
    if view.is_causal and key > query:
        return False
    return view.window is None or abs(query - key) < view.window


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(prefix, "ROWS_A_BLOCK", 4)
    if request.param == "gpu":
        make = Prefixes.of
        monkeypatch.setattr(
            Prefixes, "of", lambda document: replace(make(document), uses_flex=True)
        )
        monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    return str(request.param)


def compare(found: list[Tensor], wanted: list[Tensor], out: Tensor, by_hand: Tensor) -> None:
    torch.testing.assert_close(out, by_hand, atol=1e-10, rtol=1e-10)
    weights = torch.randn_like(out)
    grads, theirs = (
        torch.autograd.grad((each * weights).sum(), leaves)
        for each, leaves in ((out, found), (by_hand, wanted))
    )
    for mine, its in zip(grads, theirs, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-10, rtol=1e-10)


def make(*shapes: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    once = [torch.randn(*shape, dtype=torch.float64) for shape in shapes]
    return [x.clone().requires_grad_() for x in once], [x.clone().requires_grad_() for x in once]


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.parametrize(
    "view", [View(), View(None, True), View(4, True), View(4), View(5), View(6, True), View(40)]
)
def test_a_block_sees_its_window(view: View, form: str) -> None:
    tokens, rows = DOCUMENTS.shape[1], ROWS.shape[1] * SLOTS
    shapes = [(2, 4, rows, SIZE), *[(2, 2, tokens, SIZE)] * 2, *[(2, 2, rows, SIZE)] * 2]
    found, wanted = make(*shapes)
    q, ck, cv, bk, bv = found
    out = attend_blocks(q, (ck, cv), (bk, bv), BlockMask.make(ROWS, DOCUMENTS, SLOTS, view), 0.3)
    q, ck, cv, bk, bv = wanted
    picked = []
    for b in range(2):
        for h in range(4):
            for n in range(rows):
                last, slot = int(ROWS[b, n // SLOTS]), n % SLOTS
                at = last + 1 + slot  # the anchor is the row after `last`
                seen = [
                    t
                    for t in range(last + 1)
                    if DOCUMENTS[b, t] == DOCUMENTS[b, last] and is_seen(at, t, view)
                ]
                own = [n - slot + s for s in range(SLOTS) if is_seen(at, last + 1 + s, view)]
                keys, values = (
                    torch.cat([ck[b, h // 2, seen], bk[b, h // 2, own]]),
                    torch.cat([cv[b, h // 2, seen], bv[b, h // 2, own]]),
                )
                picked.append((0.3 * keys @ q[b, h, n]).softmax(0) @ values)
    compare(found, wanted, out, torch.stack(picked).view(2, 4, rows, SIZE))


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.parametrize("window", [None, 5, 7, 40])
@pytest.mark.parametrize("some", [False, True])
def test_a_step_sees_its_window(window: int | None, some: bool, form: str) -> None:
    """Row t of step k stands at position t + k, and its own keys of earlier steps at t + 1 to t + k."""
    tokens = DOCUMENTS.shape[1]
    rows = torch.tensor([[8, 3, 14, 0, 10], [16, 1, 5, 12, 3]]) if some else None
    counts = [tokens, 5, 4, 2] if some else [tokens] * STEPS
    shapes = [(2, heads, n, SIZE) for n in counts for heads in (4, 2, 2)]
    found, wanted = make(*shapes)
    zeros = torch.zeros_like(DOCUMENTS)
    memory = StepMemory(
        Batch(
            input_ids_BT=zeros, loss_mask_BT=zeros > 0, document_BT=DOCUMENTS, position_ids_BT=zeros
        ),
        rows,
        window,
    )
    outs = [memory.attend(*found[3 * k : 3 * k + 3], 0.3) for k in range(len(counts))]
    picked = []
    for k, n in enumerate(counts):
        for b in range(2):
            for h in range(4):
                for i in range(n):
                    t = i if rows is None or not k else int(rows[b, i])
                    view = View(window, True)
                    seen = [
                        s
                        for s in range(t + 1)
                        if DOCUMENTS[b, s] == DOCUMENTS[b, t] and is_seen(t + k, s, view)
                    ]
                    keys = [wanted[1][b, h // 2, seen]] + [
                        wanted[3 * j + 1][b, h // 2, i][None] for j in range(1, k + 1)
                    ]
                    values = [wanted[2][b, h // 2, seen]] + [
                        wanted[3 * j + 2][b, h // 2, i][None] for j in range(1, k + 1)
                    ]
                    picked.append(
                        (0.3 * torch.cat(keys) @ wanted[3 * k][b, h, i]).softmax(0)
                        @ torch.cat(values)
                    )
    compare(found, wanted, torch.cat([out.flatten(0, 2) for out in outs]), torch.stack(picked))


def test_the_keys_that_a_kernel_visits_grow_linearly_with_the_row() -> None:
    def count(tokens: int, window: int | None) -> int:
        found = Prefixes.of(torch.zeros(1, tokens, dtype=torch.long)).within(window)
        return int((found.end_BN - found.start_BN).sum())

    full, windowed = ([count(n, window) for n in (1024, 4096, 8192)] for window in (None, 512))
    assert [n // full[0] for n in full] == [1, 15, 63]
    assert [round(n / windowed[0], 1) for n in windowed] == [1.0, 5.0, 10.3]
    # W T - W (W - 1) / 2
    assert windowed == [512 * n - 512 * 511 // 2 for n in (1024, 4096, 8192)]

    def visited(tokens: int) -> int:
        mask = Prefixes.of(torch.zeros(1, tokens, dtype=torch.long)).within(512).blocks(tokens)
        return int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())

    # of 128 x 128: five blocks of keys for a block of rows, fewer at the beginning
    assert [visited(n) for n in (1024, 4096, 8192)] == [30, 150, 310]


@pytest.mark.parametrize(
    "views",
    [make_views(3, 64, (1,)), make_views(2, None, ()), make_views(2, 8, (), is_causal=False)],
)
def test_what_is_written_is_read(views: tuple[View, ...]) -> None:
    config = {**write_views(views)}
    read = read_windows(config, len(views), "draft")
    assert [view.window for view in make_views(len(views), **read)] == [
        view.window for view in views
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"layer_types": ["sliding_attention"]}, "has 1 entries.*2 layers"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ],
)
def test_other_windows_are_refused(config: dict[str, list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_windows(config, 2, "draft")
