"""Attention over draft steps against a reference that writes every row's sequence out, in float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex_module
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from redraft.heads.draft import Batch, attention_mask
from redraft.heads.nn import prefix
from redraft.heads.nn.attention import StepMemory
from redraft.heads.nn.blocks import BlockMask, attend_blocks
from redraft.heads.nn.prefix import Prefixes, attend, block_mask

B, H, T, E, STEPS = 2, 4, 7, 8, 4
ONE_DOCUMENT = [[0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, -1, -1]]
PACKED = [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 2, 2, -1, -1]]


def make_batch(document: list[list[int]]) -> Batch:
    document_BT = torch.tensor(document)
    zeros = torch.zeros_like(document_BT)
    return Batch(
        input_ids_BT=zeros,
        loss_mask_BT=document_BT >= 0,
        document_BT=document_BT,
        position_ids_BT=zeros,
    )


def make_qkv(
    key_heads: int, value_size: int, dtype: torch.dtype = torch.float64
) -> list[list[Tensor]]:
    """For each step q, k and v."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, T, E), (B, key_heads, T, E), (B, key_heads, T, value_size)]
    return [
        [
            torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
            for s in shapes
        ]
        for _ in range(STEPS)
    ]


def row_by_row(
    qkv: list[list[Tensor]], step: int, document: list[list[int]], scale: float
) -> Tensor:
    """softmax over the row's own continuation.

    Step-0 keys of its document up to it, then its own of steps 1..step.
    """
    q, groups = qkv[step][0], H // qkv[0][1].shape[1]
    rows = []
    for b in range(B):
        for h in range(H):
            for t in range(T):
                seen = [(0, s) for s in range(t + 1) if document[b][s] == document[b][t]]
                seen += [(j, t) for j in range(1, step + 1)]
                keys = torch.stack([qkv[j][1][b, h // groups, s] for j, s in seen])
                values = torch.stack([qkv[j][2][b, h // groups, s] for j, s in seen])
                rows.append((keys @ q[b, h, t] * scale).softmax(0) @ values)
    return torch.stack(rows).view(B, H, T, -1)


@pytest.mark.parametrize("document", [ONE_DOCUMENT, PACKED], ids=["one document", "packed"])
@pytest.mark.parametrize(("key_heads", "value_size"), [(4, 8), (2, 8), (2, 5)])
def test_step_attention_equals_the_written_out_reference(
    document: list[list[int]], key_heads: int, value_size: int
) -> None:
    qkv = make_qkv(key_heads, value_size)
    memory = StepMemory(make_batch(document))
    real_rows = torch.tensor(document) >= 0
    outs, wanted = [], []
    for step, (q, k, v) in enumerate(qkv):
        mask = real_rows[:, None, :, None]
        outs.append(memory.attend(q, k, v, 0.3) * mask)
        wanted.append(row_by_row(qkv, step, document, 0.3) * mask)
    torch.testing.assert_close(torch.stack(outs), torch.stack(wanted), atol=1e-12, rtol=1e-12)
    leaves = [x for step in qkv for x in step]
    weights = torch.randn(len(outs), B, H, T, value_size, dtype=torch.float64)
    grads = torch.autograd.grad((torch.stack(outs) * weights).sum(), leaves)
    wanted_grads = torch.autograd.grad((torch.stack(wanted) * weights).sum(), leaves)
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad, wanted_grad, atol=1e-12, rtol=1e-12)


FORMS = ("cpu", "blocks", "gpu")


def use_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of the operations.

    Documents on a CPU, blocks of rows on a CPU, or a GPU's FlexAttention, uncompiled.
    """
    monkeypatch.setattr(prefix, "ROWS_A_BLOCK", 3)
    make, changes = (
        Prefixes.of,
        {"blocks": {"is_whole": False}, "gpu": {"uses_flex": True}}.get(form, {}),
    )
    monkeypatch.setattr(Prefixes, "of", lambda document: replace(make(document), **changes))
    if form == "gpu":
        monkeypatch.setattr(
            flex_module, "_validate_device", lambda *_: None
        )  # it refuses gradients on a CPU


def test_on_a_gpu_the_range_is_no_operation_because_autograd_is_off_inside_one() -> None:
    document = torch.zeros(1, T, dtype=torch.long)
    assert not Prefixes.of(document).uses_flex
    with FakeTensorMode():
        found = Prefixes.of(torch.zeros(1, T, dtype=torch.long, device="cuda"))
        some = found.rows(torch.zeros(1, 2, dtype=torch.long, device="cuda"), ascending=False)
    assert (found.uses_flex, some.uses_flex) == (True, True)


def masked_attention(
    q: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    document: list[list[int]],
    rows: Tensor | None,
    scale: float,
) -> Tensor:
    """The keys of all steps side by side under one mask."""
    mask = attention_mask(make_batch(document))
    eye = torch.eye(keys[0].shape[2], dtype=torch.bool).expand(len(mask), 1, -1, -1)
    if rows is not None:
        at = rows[:, None, :, None].expand(-1, -1, -1, mask.shape[-1])
        mask, eye = (
            mask.gather(2, at),
            torch.eye(rows.shape[1], dtype=torch.bool).expand(len(mask), 1, -1, -1),
        )
    seen = torch.cat([mask, *[eye] * (len(keys) - 1)], -1)
    k, v = (
        torch.cat(x, 2).repeat_interleave(q.shape[1] // x[0].shape[1], 1) for x in (keys, values)
    )
    return ((q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)).softmax(-1) @ v


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.parametrize("document", [ONE_DOCUMENT, PACKED], ids=["one document", "packed"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rows", [None, torch.tensor([[5, 1, 4], [3, 0, 2]])], ids=["all rows", "some rows"]
)
def test_every_form_equals_attention_under_a_mask(
    document: list[list[int]],
    form: str,
    dtype: torch.dtype,
    rows: Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_form(form, monkeypatch)
    qkv = make_qkv(2, E, dtype)
    if rows is not None:
        qkv = [[x.detach()[:, :, :3].requires_grad_() if i or not j else x for j, x in enumerate(step)]
               for i, step in enumerate(qkv)]  # fmt: skip
        qkv[0][0] = qkv[1][0]
    q, keys, values = qkv[-1][0], [k for _, k, _ in qkv], [v for _, _, v in qkv]
    prefixes = Prefixes.of(make_batch(document).document_BT)
    if rows is not None:
        prefixes = prefixes.rows(rows, ascending=False)
    out = attend(
        q, (keys[0], values[0]), prefixes, 0.3, list(zip(keys[1:], values[1:], strict=True))
    )
    wide = [x.detach().double().requires_grad_() for x in (q, *keys, *values)]
    wanted = masked_attention(wide[0], wide[1 : 1 + STEPS], wide[1 + STEPS :], document, rows, 0.3)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    weights = torch.randn(
        wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    grads = torch.autograd.grad((out.double() * weights).sum(), [q, *keys, *values])
    for grad, wanted_grad in zip(
        grads, torch.autograd.grad((wanted * weights).sum(), wide), strict=True
    ):
        torch.testing.assert_close(grad.double(), wanted_grad, atol=tolerance, rtol=tolerance)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
@pytest.mark.parametrize("form", ["cpu", "gpu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_blocks_equal_attention_under_a_mask(
    form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_form(form, monkeypatch)
    generator, slots = torch.Generator().manual_seed(0), 3
    rows = torch.tensor([[6, 1, 4], [3, 0, 2]])
    shapes = [(B, H, 9, E), (B, 2, T, E), (B, 2, T, E), (B, 2, 9, E), (B, 2, 9, E)]
    leaves = [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    ]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    mask = BlockMask.make(rows, make_batch(PACKED).document_BT, slots)
    out = attend_blocks(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]), mask, 0.3)
    at = rows.repeat_interleave(slots, 1)[:, None, :, None].expand(-1, -1, -1, T)
    context = attention_mask(make_batch(PACKED)).gather(2, at)
    own = torch.block_diag(*[torch.ones(slots, slots)] * 3).bool().expand(B, 1, -1, -1)
    k, v = (torch.cat([wide[i], wide[i + 2]], 2).repeat_interleave(2, 1) for i in (1, 2))
    scores = (wide[0] @ k.mT * 0.3).masked_fill(~torch.cat([context, own], -1), -torch.inf)
    wanted = scores.softmax(-1) @ v
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)
    weights = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    grads = torch.autograd.grad((out.double() * weights).sum(), leaves)
    for grad, wanted_grad in zip(
        grads, torch.autograd.grad((wanted * weights).sum(), wide), strict=True
    ):
        torch.testing.assert_close(grad.double(), wanted_grad, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("document", [[[0] * 300], [[0] * 130 + [1] * 100 + [2] * 3 + [-1] * 67]])
@pytest.mark.parametrize("some", [False, True])
def test_a_block_mask_holds_every_visible_key_and_marks_as_full_only_what_is(
    document: list[list[int]], some: bool
) -> None:
    prefixes = Prefixes.of(torch.tensor(document))
    if some:
        some_rows = torch.randperm(300, generator=torch.Generator().manual_seed(0))[None, :200]
        prefixes = prefixes.rows(some_rows, ascending=False)
    made = block_mask(prefixes.start_BN, prefixes.end_BN, 300)
    key = torch.arange(300)
    seen = (key >= prefixes.start_BN[..., None]) & (key < prefixes.end_BN[..., None])
    blocks = (
        torch.nn.functional.pad(seen, (0, 84, 0, -seen.shape[1] % 128))
        .unflatten(1, (-1, 128))
        .unflatten(3, (-1, 128))
    )
    partly = dense(made.kv_num_blocks, made.kv_indices)
    fully = dense(made.full_kv_num_blocks, made.full_kv_indices)
    assert torch.equal(partly | fully, blocks.any(4).any(2))
    assert not (partly & fully).any()
    rows = torch.nn.functional.pad(
        torch.ones(seen.shape[1], dtype=torch.bool), (0, -seen.shape[1] % 128)
    )
    all_seen = (blocks | ~rows.view(1, -1, 128, 1, 1)).all(4).all(2)
    assert torch.equal(fully, all_seen)


Call = tuple[int, int, int | None, torch.dtype, bool]
"""Rows of the batch, tokens, chosen rows (None: all), dtype, and whether there is a backward pass.
"""

TRAINING: Sequence[Call] = (
    # P-EAGLE in bfloat16: all rows, then ever fewer, in steps and in the last, smaller batch of an
    # epoch
    *(
        (batch, 512, rows, torch.bfloat16, True)
        for batch in (4, 1)
        for rows in (None, 300, 200, 90)
    ),
    # evaluations; forecasts in float32, one text at a time
    *((4, 512, None, torch.bfloat16, False), (2, 300, None, torch.bfloat16, False)),
    *((1, tokens, None, torch.float32, False) for tokens in (700, 90, 400)),
    # short batches: one text, or some
    *(
        (1, 100, None, torch.bfloat16, True),
        (3, 60, 30, torch.bfloat16, True),
        (1, 80, 40, torch.bfloat16, True),
    ),
)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Attention takes the form of a GPU.

    A compiler counts its graphs and leaves them as they are.
    """
    counter, compile_it = CompileCounter(), torch.compile
    torch._dynamo.reset()
    use_form("gpu", monkeypatch)
    make_kernel = prefix.as_kernel.__wrapped__

    @functools.cache
    def as_kernel(function: Callable[..., Any], _: str) -> Callable[..., Any]:
        with monkeypatch.context() as patched:
            patched.setattr(torch, "compile", functools.partial(compile_it, backend=counter))
            return make_kernel(function, "cuda")

    monkeypatch.setattr(prefix, "as_kernel", as_kernel)
    yield counter
    torch._dynamo.reset()


def run_call(call: Call) -> None:
    """Attention of this call, and its gradients, equal those of the CPU's form."""
    batch, tokens, num_rows, dtype, has_backward = call
    generator = torch.Generator().manual_seed(0)
    sizes = [(batch, 4, num_rows or tokens, E), *[(batch, 2, tokens, E)] * 2]
    q, k, v = (
        torch.randn(s, generator=generator).to(dtype).requires_grad_(has_backward) for s in sizes
    )
    prefixes = Prefixes.of(torch.arange(tokens).expand(batch, -1) // 250)
    if num_rows:
        rows = torch.stack(
            [torch.randperm(tokens, generator=generator)[:num_rows] for _ in range(batch)]
        )
        prefixes = prefixes.rows(rows, ascending=False)
    found = []
    for uses_flex in (True, False):
        out = attend(q, (k, v), replace(prefixes, uses_flex=uses_flex), 0.3)
        found.append(
            [out, *(torch.autograd.grad(out.float().sum(), (q, k, v)) if has_backward else ())]
        )
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for mine, true in zip(*found, strict=True):
        torch.testing.assert_close(mine, true, atol=tolerance, rtol=tolerance)


@pytest.mark.slow
def test_every_shape_of_a_training_is_compiled_also_after_pytorchs_limit_of_8(
    graphs: CompileCounter,
) -> None:
    for call in TRAINING:
        run_call(call)
    # As it stands, FlexAttention would compute all scores, and no graph would be counted.
    made = graphs.frame_count
    assert 8 < made <= 20
    for call in TRAINING:
        run_call(call)
    assert graphs.frame_count == made
    assert torch._dynamo.config.recompile_limit == 8  # of other functions


@pytest.mark.slow
def test_a_compiler_takes_the_own_keys_of_every_draft_step_whole_also_after_its_limit_of_8(
    graphs: CompileCounter,
) -> None:
    num_steps, found = 12, []
    for compiled in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            if not compiled:
                patched.setattr(prefix, "as_kernel", lambda function, _: function)
            torch.manual_seed(0)
            qkv = [
                [torch.randn(B, heads, T, E, requires_grad=True) for heads in (H, 2, 2)]
                for _ in range(num_steps)
            ]
            memory = StepMemory(make_batch(PACKED))
            outs = torch.stack([memory.attend(q, k, v, 0.3) for q, k, v in qkv])
            found.append(
                [outs, *torch.autograd.grad(outs.square().sum(), [x for step in qkv for x in step])]
            )
    for mine, true in zip(*found, strict=True):
        torch.testing.assert_close(mine, true, atol=1e-5, rtol=1e-5)
    # One graph forward and one backward for each number of own keys, and FlexAttention's.
    assert graphs.frame_count >= 2 * (num_steps - 1)


def test_a_compiler_takes_the_own_keys_of_a_block_whole(graphs: CompileCounter) -> None:
    found = []
    for compiled in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            if not compiled:
                patched.setattr(prefix, "as_kernel", lambda function, _: function)
            torch.manual_seed(0)
            q, k, v, own_k, own_v = (
                torch.randn(B, heads, T, E, requires_grad=True) for heads in (H, 2, 2, 2, 2)
            )
            out = attend(
                q,
                (k, v),
                Prefixes.of(make_batch(PACKED).document_BT),
                0.3,
                [(own_k, own_v)],
                num_slots=T,
            )
            found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, own_k, own_v))])
    for mine, true in zip(*found, strict=True):
        torch.testing.assert_close(mine, true, atol=1e-5, rtol=1e-5)
    assert graphs.frame_count >= 2


def test_attention_that_is_not_compiled_once_more_is_refused(
    graphs: CompileCounter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "MAX_GRAPHS", 2)
    run_call((4, 512, None, torch.float32, True))
    with pytest.raises(RuntimeError, match=r"2.*\[1, 4, 90, 8\].*torch.float32"):
        run_call((1, 90, None, torch.float32, False))
    assert graphs.frame_count == 2


def dense(counts: Tensor | None, indices: Tensor | None) -> Tensor:
    """Which blocks are in a list of a block mask, [1, blocks of rows, blocks of keys]."""
    assert counts is not None
    assert indices is not None
    listed = torch.arange(indices.shape[-1]) < counts[:, 0, :, None]
    return torch.zeros_like(listed).scatter(2, indices[:, 0].long(), listed)


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(result):
            self.elements = max(self.elements, x.numel() if isinstance(x, Tensor) else 0)
        return result


def test_nothing_of_the_size_of_a_mask_is_made() -> None:
    tokens, size = 2048, 4
    batch = make_batch([[0] * 1500 + [1] * 548])
    with LargestTensor() as seen:
        memory = StepMemory(batch)
        for _ in range(3):
            q, k, v = (torch.randn(1, 2, tokens, size, requires_grad=True) for _ in range(3))
            memory.attend(q, k, v, 0.5).sum().backward()
        block_mask(memory._prefixes.start_BN, memory._prefixes.end_BN, tokens)
    assert seen.elements <= 3 * 2 * tokens * size  # the diagonals' scores side by side


def test_under_autocast_attention_computes_in_the_autocast_type() -> None:
    q, k, v = make_qkv(H, E, torch.float32)[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert StepMemory(make_batch(ONE_DOCUMENT)).attend(q, k, v, 0.3).dtype == torch.bfloat16
