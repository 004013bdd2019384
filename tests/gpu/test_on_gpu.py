"""The code that only a GPU runs.

Kernels, FlexAttention, streams, and a training step of each family beside the CPU's.

`make test-gpu`.

M = draft rows, W = draft vocabulary, D = hidden, R = rows of logits, V = target vocabulary, B =
requests, J = draft tokens of a request.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerators import reset_accelerator
from gpu_or_cpu import DEVICE as GPU
from gpu_or_cpu import IS_GPU, ON_DEVICE, ONLY_ON_GPU, SHAPE
from make_heads import make_batch, make_ids, make_signal, make_target
from recorded_heads import make_head, make_record, with_states
from torch import Tensor
from train_on_ranks import FAMILIES, Descent, make_standalone, rows_of
from transformers import AutoModelForCausalLM

from redraft.distill.loss.blocks import Scratch
from redraft.distill.loss.choice import Divergence
from redraft.distill.loss.fused import (
    DraftRows,
    ExactRows,
    FusedResult,
    TopKRows,
    fused_linear_divergence,
)
from redraft.distill.loss.products import Gradient
from redraft.distill.loss.rows import has_triton
from redraft.distill.signal.ahead import OneAhead
from redraft.distill.signal.transfer import host_zeros, to_device
from redraft.distill.train.muon import orthogonalise
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation
from redraft.heads.draft import Batch, ExactTarget, TargetSignal
from redraft.heads.families.eagle3 import Eagle3
from redraft.heads.families.mtp_folder import as_mimo
from redraft.heads.nn.layers import RMSNorm
from redraft.heads.nn.prefix import Prefixes, attend
from redraft.heads.target import Target
from redraft.online.engine import one_pass
from redraft.online.engine.reduction import copy_through
from redraft.online.learning.scoring import score_by_context
from redraft.online.records.record import Sampling
from tests.distill.loss.test_fused import (
    EVERY_FORM,
    leaves,
    make_draft,
    make_exact,
    make_labels,
    make_top_k,
)
from tests.heads.nn.test_attention import masked_attention

pytestmark = ON_DEVICE


@pytest.fixture(autouse=True)
def no_way_out_of_compilation() -> Iterator[None]:
    """After eight compilations of a function PyTorch runs it as it stands, without a word."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def assert_near(mine: Tensor, true: Tensor, within: float) -> None:
    """|mine - true| <= within * |true|, as norms over all entries."""
    narrow, exact = (x.detach().double().cpu() for x in (mine, true))
    assert (narrow - exact).norm().item() <= within * exact.norm().item()


# -----------------------------------------------------------------------------------------------------------
# optimizer


@pytest.mark.parametrize("shape", [(96, 160), (160, 96)])
def test_an_orthogonal_step_in_bfloat16_is_that_of_a_cpu_in_float32(shape: tuple[int, int]) -> None:
    matrix_RC = torch.randn(shape)
    found = orthogonalise(matrix_RC.to(GPU))
    assert (found.device.type, found.dtype) == (GPU.type, torch.float32)
    assert_near(found, orthogonalise(matrix_RC, torch.float32), within=0.05)


# ---------------------------------------------------------------------------------------------------------------
# norms


def test_a_norm_under_autocast_is_one_kernel_in_bfloat16() -> None:
    norm, x = (
        RMSNorm(512, eps=1e-5).to(GPU),
        torch.randn(4, 8, 512, device=GPU, dtype=torch.bfloat16),
    )
    with torch.autocast(GPU.type, torch.bfloat16):
        norm(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            out = norm(x)
    assert out.dtype == torch.bfloat16
    names = {event.key for event in seen.key_averages()}
    if IS_GPU:
        assert "aten::_fused_rms_norm" in names
        assert "aten::pow" not in names
    assert_near(out, torch.nn.functional.rms_norm(x.double(), [512], eps=1e-5), 5e-3)


# ------------------------------------------------------------------------------------------------------------
# attention

DOCUMENTS = [[0] * 140 + [1] * 160, [0] * 200 + [1] * 60 + [-1] * 40]
NUM_ROWS = 150


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("some", [False, True], ids=["all rows", "some rows"])
def test_flex_attention_equals_attention_under_a_mask(
    size: int, dtype: torch.dtype, within: float, some: bool
) -> None:
    """The range alone, and with two keys of the row's own; the mask's form is in float64."""
    generator = torch.Generator().manual_seed(0)
    batch, tokens = len(DOCUMENTS), len(DOCUMENTS[0])
    rows = (
        torch.stack([torch.randperm(tokens, generator=generator)[:NUM_ROWS] for _ in DOCUMENTS])
        if some
        else None
    )
    count = NUM_ROWS if some else tokens
    shapes = [(batch, 4, count, size), *[(batch, 2, n, size) for n in (tokens, count, count)] * 2]
    narrow = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    weights = torch.randn(shapes[0], generator=generator)
    prefixes = Prefixes.of(torch.tensor(DOCUMENTS, device=GPU))
    if rows is not None:
        prefixes = prefixes.rows(rows.to(GPU), ascending=False)
    for steps in (1, 3):
        inputs = [
            x.to(GPU).requires_grad_()
            for x in (narrow[0], *narrow[1 : 1 + steps], *narrow[4 : 4 + steps])
        ]
        q, keys, values = inputs[0], inputs[1 : 1 + steps], inputs[1 + steps :]
        out = attend(
            q,
            (keys[0], values[0]),
            prefixes,
            size**-0.5,
            list(zip(keys[1:], values[1:], strict=True)),
        )
        wide = [x.detach().cpu().double().requires_grad_() for x in inputs]
        wanted = masked_attention(
            wide[0], wide[1 : 1 + steps], wide[1 + steps :], DOCUMENTS, rows, size**-0.5
        )
        assert out.dtype == dtype
        assert_near(out, wanted, within)
        found = torch.autograd.grad((out.float() * weights.to(GPU)).sum(), inputs)
        for grad, wanted_grad in zip(
            found, torch.autograd.grad((wanted * weights).sum(), wide), strict=True
        ):
            assert_near(grad, wanted_grad, within)


# -----------------------------------------------------------------------------------------------------------
# divergence

NARROW, WIDE = (32_768, 128_256) if IS_GPU else (97, 300)
WIDTHS = [
    pytest.param(NARROW, None, id="narrow"),
    pytest.param(WIDE, None, id="wide"),
    pytest.param(WIDE, torch.arange(0, WIDE, 4), id="a quarter of wide"),
]


def move(given: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Draft rows and target rows on the GPU in this type.

    A tensor that several of them share stays one.
    """
    moved: dict[int, Tensor] = {}

    def to_gpu(x: Tensor) -> Tensor:
        if id(x) not in moved:
            copy = x.detach().to(GPU, dtype if x.is_floating_point() else x.dtype)
            moved[id(x)] = copy.requires_grad_(x.requires_grad)
        return moved[id(x)]

    return [
        replace(
            each,
            **{
                name: to_gpu(value)
                for name, value in vars(each).items()
                if isinstance(value, Tensor)
            },
        )
        for each in given
    ]


def run(
    drafts: Sequence[DraftRows], target: ExactRows | TopKRows, divergence: Divergence
) -> FusedResult:
    return fused_linear_divergence(
        drafts, target, divergence, normaliser=7.0, labels_N=make_labels().to(GPU), chunk_tokens=8
    )


@pytest.mark.parametrize(("name", "top_k", "temperature"), EVERY_FORM)
@pytest.mark.parametrize(("width", "draft_ids"), WIDTHS)
def test_the_kernels_equal_the_plain_form_in_float64(
    name: str, top_k: bool, temperature: float, width: int, draft_ids: Tensor | None
) -> None:
    exact = make_exact(vocabulary=width)
    target = make_top_k(exact, k=32) if top_k else exact
    first = make_draft(range(17), vocabulary=width, draft_ids=draft_ids)
    # other rows, with the same head
    second = make_draft(
        [3, 5, 9], vocabulary=width, draft_ids=draft_ids, head=first.head_WD, seed=2
    )
    divergence = Divergence(name=name, temperature=temperature)
    results, gradients = [], []
    for dtype in (torch.float32, torch.float64):
        *drafts, its = move([first, second, target], dtype)
        by_form = replace(divergence, form="kernel" if dtype == torch.float32 else "plain")
        results.append(run(drafts, its, by_form))
        distinct = {id(leaf): leaf for leaf in leaves(drafts)}.values()
        gradients.append(torch.autograd.grad(results[-1].loss, list(distinct)))
    kernel, plain = results
    for each in ("loss", "loss_S", "alpha_S", "alpha_greedy_S"):
        torch.testing.assert_close(
            getattr(kernel, each).double(), getattr(plain, each), rtol=1e-4, atol=1e-5
        )
    for mine, true in zip(kernel.alpha_SM, plain.alpha_SM, strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-4, atol=1e-5)
    for mine, true in zip(*gradients, strict=True):
        assert_near(
            mine, true, 1e-3
        )  # with a top-k target q is nearly all tail: up to 4e-4 in the interpreter


@ONLY_ON_GPU
def test_a_gpu_takes_the_kernels_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_triton()
    *drafts, target = move([make_draft(range(17)), make_exact()], torch.float32)
    plain = run(drafts, target, Divergence(form="plain"))
    monkeypatch.setattr(
        "redraft.distill.loss.fused._run_blocks", lambda *_: pytest.fail("PyTorch's operations")
    )
    torch.testing.assert_close(
        run(drafts, target, Divergence()).loss, plain.loss, rtol=1e-5, atol=1e-6
    )


def test_products_in_bfloat16_add_to_a_float32_gradient_unrounded() -> None:
    generator = torch.Generator().manual_seed(0)
    dz_WM, hidden_MD = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((96, 40), (40, 64))
    )
    gradient = Gradient(torch.full((96, 64), torch.nan, device=GPU))
    for _ in range(3):
        gradient.add_product(Scratch(), dz_WM.to(GPU), hidden_MD.to(GPU))
    total = gradient.finish()
    assert total.dtype == torch.float32
    # Products rounded to bfloat16, as on a CPU, are 2e-3 away.
    assert_near(total, 3 * (dz_WM.double() @ hidden_MD.double()), 1e-5 if IS_GPU else 4e-3)


def test_under_autocast_both_forms_give_the_same_gradients() -> None:
    """Bfloat16 products of a float32 head: rounded where bfloat16 is written, in either form."""
    given = [make_draft(range(17), vocabulary=NARROW), make_exact(vocabulary=NARROW)]
    gradients = []
    for form in ("kernel", "plain"):
        *drafts, target = move(given, torch.float32)
        with torch.autocast(GPU.type, torch.bfloat16):
            loss = run(drafts, target, Divergence(name="lk_hybrid", form=form)).loss
        gradients.append(torch.autograd.grad(loss, leaves(drafts)))
    for kernel, plain in zip(*gradients, strict=True):
        assert kernel.dtype == torch.float32
        assert_near(kernel, plain, 2e-2)


# --------------------------------------------------------------------------------------------------------------
# capture


SCAN = """
import torch
from redraft.online.engine import one_pass
assert one_pass.find_kernels() is not None
one_pass.CHUNK, one_pass.GROUP = 256, 8
torch.manual_seed(0)
for size, k, dtype in ((1000, 16, torch.float32), (4099, 32, torch.bfloat16), (513, 4, torch.float16)):
    for kind in ("distinct", "full of ties", "masked", "all alike", "far below 0", "a view"):
        logits = 5 * torch.randn(3, size) - 3
        if kind == "full of ties": logits = logits.round()
        if kind == "masked": logits[:, 100:] = -torch.inf
        if kind == "all alike": logits[:] = -1.5
        if kind == "far below 0": logits[:] -= 300; logits[:, :256] = -torch.inf
        logits = logits.to(dtype)
        if kind == "a view": logits = logits.repeat(1, 2)[:, :size]
        found = one_pass.find_in_one_pass(logits, k)
        exact = logits.double()
        assert torch.equal(found.logits_RK.double(), exact.sort(descending=True).values[:, :k]), (size, kind)
        assert torch.equal(exact.gather(1, found.ids_RK.long()), found.logits_RK.double()), (size, kind)
        assert all(len(set(ids)) == k for ids in found.ids_RK.tolist()), (size, kind)
        torch.testing.assert_close(found.log_sum_exp_R.double(), exact.logsumexp(-1), atol=1e-5, rtol=1e-6)
for size in (97, 513, 1000):
    stored = 5 * torch.randn(6, 4, size).to(torch.bfloat16)
    stored[2] = torch.nan  # of a request that is not recorded
    stored[3, 1, : size // 2] = -torch.inf
    stored[3, 2] -= 300
    slots, steps = torch.tensor([4, 0, 3, 3, 3, 5]), torch.tensor([0, 2, 1, 2, 0, 3])
    ids, temperatures = torch.randint(size, (6,)), torch.tensor([0.0, 0.7, 1.3, 1.0, 2.0, 0.01])
    warmth = temperatures.where(temperatures > 0, 1.0)[:, None]
    exact = (stored[slots, steps].double() / warmth).softmax(-1).gather(1, ids[:, None])[:, 0]
    found = one_pass.gather_probs(stored, slots, steps, ids, temperatures)
    torch.testing.assert_close(found.double(), exact, atol=1e-7, rtol=1e-4)
    assert len(one_pass.gather_probs(stored, slots[:0], steps[:0], ids[:0], temperatures[:0])) == 0
print("SAME")
"""


@pytest.mark.parametrize("shape", [(3, 2, 8), (0, 2, 8), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_states_leave_the_device_whole_through_a_small_buffer(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    states = torch.randn(*shape, device=GPU).mul(100).to(dtype).transpose(0, 1)
    buffer = torch.empty(7, dtype=torch.uint8, pin_memory=IS_GPU)
    assert torch.equal(copy_through(states, buffer), states.cpu())


def test_the_kernels_of_capture_find_what_a_sort_finds() -> None:
    """With ties, masks and views, in small tiles; in a process, because it sets them."""
    code = f"import torch\ntorch.set_default_device({GPU.type!r})\n{SCAN}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "SAME", done.stderr[-3000:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_of_capture_at_their_sizes(dtype: torch.dtype) -> None:
    assert one_pass.find_kernels() is not None
    torch.manual_seed(0)
    logits_RV = (5 * torch.randn(64, WIDE, device=GPU) - 3).to(dtype)
    found, exact_RV = one_pass.find_in_one_pass(logits_RV, 32), logits_RV.double()
    assert torch.equal(found.logits_RK.double(), exact_RV.topk(32).values)
    assert torch.equal(exact_RV.gather(1, found.ids_RK.long()), found.logits_RK.double())
    assert all(len(set(ids)) == 32 for ids in found.ids_RK.tolist())
    torch.testing.assert_close(
        found.log_sum_exp_R.double(), exact_RV.logsumexp(-1), atol=1e-5, rtol=1e-6
    )
    slots, steps = (
        torch.arange(16, device=GPU).repeat_interleave(3),
        torch.arange(3, device=GPU).repeat(16),
    )
    ids, warmth = torch.randint(WIDE, (48,), device=GPU), 0.5 + torch.rand(48, device=GPU)
    logits_BJV = logits_RV.view(16, 4, WIDE)
    exact = (
        (logits_BJV[slots, steps].double() / warmth[:, None])
        .softmax(-1)
        .gather(1, ids[:, None])[:, 0]
    )
    probs = one_pass.gather_probs(logits_BJV, slots, steps, ids, warmth)
    torch.testing.assert_close(probs.double(), exact, atol=1e-7, rtol=1e-4)


# ---------------------------------------------------------------------------------------------------------------
# stream


@ONLY_ON_GPU
def test_a_signal_that_comes_on_another_stream_is_whole_and_stays_until_the_step_is_done() -> None:
    """The step is slow and lets go of the signal at once.

    The next one must not be written into that memory.
    """
    batches = [make_batch([[make_ids(64, seed=seed)]]) for seed in range(8)]
    streams = set()

    def teach(batch: Batch) -> TargetSignal:
        streams.add(torch.cuda.current_stream(GPU))
        states = host_zeros(1, 64, 4096, dtype=torch.float32, device=GPU)
        states += batch.input_ids_BT[..., None].cpu()
        arrived = states.to(GPU, non_blocking=True)
        return TargetSignal(
            distribution=ExactTarget(hidden_BTD=arrived, head_VD=arrived[0]),
            aux_BTLD=arrived[:, :, None],
        )

    source, sums = OneAhead(teach, GPU), []
    busy = torch.randn(4096, 4096, device=GPU)
    source.start(batches[0])
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        signal = source(batch)
        if following is not None:
            source.start(following)
        for _ in range(20):
            busy = (busy @ busy).tanh()
        assert isinstance(signal.distribution, ExactTarget)
        sums.append(signal.distribution.hidden_BTD.sum(-1))
        del signal
    for found, batch in zip(sums, batches, strict=True):
        assert torch.equal(found.cpu(), 4096.0 * batch.input_ids_BT)
    assert streams
    assert torch.cuda.default_stream(GPU) not in streams


@ONLY_ON_GPU
def test_the_stream_ahead_reads_a_batch_only_once_it_has_arrived() -> None:
    """The batch is copied behind products that take a while, and nobody waits for it."""

    def teach(batch: Batch) -> TargetSignal:
        read_BT1 = batch.input_ids_BT[..., None].clone()
        return TargetSignal(distribution=ExactTarget(hidden_BTD=read_BT1, head_VD=read_BT1[0]))

    source, busy = OneAhead(teach, GPU), torch.randn(4096, 4096, device=GPU)
    for seed in range(8):
        there = make_batch([[make_ids(64, seed=seed)]])
        for _ in range(20):
            busy = (busy @ busy).tanh()
        batch = to_device(there, GPU)
        source.start(batch)
        known = source(batch).distribution
        assert isinstance(known, ExactTarget)
        assert torch.equal(known.hidden_BTD[..., 0].cpu(), there.input_ids_BT)


# --------------------------------------------------------------------------------------------------------
# training step


def train_one_step(name: str, folder: Path, *, on_cpu: bool) -> tuple[float, dict[str, Tensor]]:
    """(loss, clipped gradient of every parameter) of a step in float32."""
    reset_accelerator()
    accelerator = Accelerator(cpu=on_cpu)
    model: Any = make_target(**SHAPE)
    if name == "mtp":
        if not folder.exists():
            model.save_pretrained(folder / "llama")
            as_mimo(folder / "llama", folder / "mimo")
        model = AutoModelForCausalLM.from_pretrained(folder / "mimo").eval()
    target = model.to(accelerator.device)
    torch.manual_seed(1)
    draft: Any = (
        make_standalone(target, **SHAPE) if name == "standalone" else FAMILIES[name](target)
    )
    before = {key: tensor.detach().cpu().clone() for key, tensor in draft.named_parameters()}
    aux = getattr(draft, "aux_layer_ids", ())
    optim = Optim(lr=1.0, warmup_fraction=0.0, schedule="constant")
    distillation = Distillation(
        draft,
        lambda batch: make_signal(target, batch, aux),
        Divergence(name="forward_kl"),
        optim,
        8,
        accelerator,
    )
    stats = distillation.step([to_device(rows_of(0), accelerator.device)])
    assert not stats.skipped
    assert next(draft.parameters()).device.type == accelerator.device.type
    after = {key: tensor.cpu() for key, tensor in distillation.weights().items()}
    distillation.close()
    gc.collect()
    return stats.loss, {key: before[key] - after[key] for key in before}


@pytest.mark.usefixtures("fresh_accelerator")
@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"tied", "mtp-moe"}))
def test_a_training_step_is_that_of_the_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", Descent)  # it leaves the gradient in the weights
    loss, gradients = train_one_step(name, tmp_path / "target", on_cpu=False)
    true_loss, true_gradients = train_one_step(name, tmp_path / "target", on_cpu=True)
    assert loss == pytest.approx(true_loss, rel=1e-3)
    whole = torch.stack([gradient.norm() for gradient in true_gradients.values()]).norm()
    assert whole > 0
    for key, true in true_gradients.items():
        apart = (gradients[key] - true).norm()
        # A gradient that is zero but for rounding is compared with all of them.
        assert apart <= 1e-3 * true.norm() + 1e-6 * whole, (
            f"{key}: {apart:.2e} of {true.norm():.2e}"
        )


def test_the_learner_scores_a_head_as_on_the_cpu(random_target: Path, tmp_path: Path) -> None:
    record = with_states(make_record(sampling=Sampling()), random_target, "eagle3")
    folder, found = make_head("eagle3", random_target, tmp_path / "head"), []
    for device in (GPU, torch.device("cpu")):
        target = Target.from_folder(random_target)
        moved = replace(
            target, embed_VD=target.embed_VD.to(device), head_VD=target.head_VD.to(device)
        )
        head = Eagle3.load(folder, moved).to(device).eval()
        options: Any = {"sequence_length": 64, "reads": "layers", "device": device}
        counts = score_by_context(
            head, record, num_speculative_tokens=3, method="probabilistic", **options
        )
        found.append([(power, c.num_drafts, c.num_accepted) for power, c in counts.items()])
    assert found[1]
    for mine, true in zip(*found, strict=True):
        assert mine == pytest.approx(true, rel=1e-3)
