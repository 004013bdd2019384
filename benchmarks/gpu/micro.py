"""Compare kernels and attention with the card's limits, and measure capture and swaps.

B = batch, H = query heads, G = key heads, T = tokens, E = head size, M = draft rows, C = target
rows, V = vocabulary.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.check import Config
from benchmarks.gpu.results import Results, median_s
from redraft.distill.loss import rows
from redraft.distill.loss.blocks import Scratch
from redraft.distill.loss.choice import Divergence
from redraft.distill.loss.fused import DraftRows, ExactRows, fused_linear_divergence
from redraft.distill.loss.products import Gradient
from redraft.heads.nn import prefix
from redraft.online.engine.one_pass import find_in_one_pass
from redraft.online.engine.staging import HostMemory, pin_on
from redraft.online.engine.swap import checksum


def measure(cfg: Config, results: Results) -> None:
    """Take every measurement; kernels are measured only on a GPU."""
    device = torch.device(cfg.device)
    both: list[Callable[[torch.device], Any]] = [
        product_into_float32,
        rows_without_a_number,
        attention,
        capture,
        checksums,
        pinning,
    ]
    of_gpus: list[Callable[[torch.device], Any]] = [
        rows_of_the_loss,
        beyond_2_to_31,
        attention_in_compiled_layers,
    ]
    for make in [*both, *(of_gpus if device.type == "cuda" else ())]:
        results.measure(make.__name__, make, device)


def random(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random numbers with a standard deviation of 2."""
    return (2 * torch.randn(*shape, device=device)).to(dtype)


def product_into_float32(device: torch.device) -> dict[str, float]:
    """Time a product of bfloat16 operands that is added to a float32 gradient.

    PyTorch before 2.10 does not support it on a GPU.
    """
    m, w, d = (14336, 32000, 4096) if device.type == "cuda" else (64, 256, 128)
    dz_MW, hidden_MD = random(m, w, device=device).mul_(1e-3), random(m, d, device=device)
    gradient, scratch = Gradient(torch.zeros(w, d, device=device)), Scratch()
    time_s = median_s(lambda: gradient.add_product(scratch, dz_MW.T, hidden_MD), device, rounds=5)
    return {"ms": 1e3 * time_s, "TFLOP/s": 2 * m * w * d / time_s / 1e12}


def rows_without_a_number(device: torch.device) -> dict[str, Any]:
    """Check that a NaN or an overflow in the target's states makes the loss NaN in every form.

    Otherwise, the optimizer would take a meaningless step.
    """
    hidden_MD, target_CD = (random(64, 64, device=device) for _ in range(2))
    head_WD, target_head_VD = (random(1000, 64, device=device) for _ in range(2))
    head_WD.requires_grad_()
    forms = ("plain", "kernel") if device.type == "cuda" else ("plain", "auto")
    found: dict[str, Any] = {}
    agree = True
    for bad in (math.nan, math.inf):
        target_CD[5, 7] = bad
        for name in (
            "forward_kl",
            "reverse_kl",
            "jensen_shannon",
            "total_variation",
            "neg_log_alpha",
            "lk_hybrid",
        ):
            losses = []
            for form in forms:
                draft = DraftRows(
                    hidden_MD=hidden_MD,
                    head_WD=head_WD,
                    target_row_M=torch.arange(64, device=device),
                    weight_M=torch.ones(64, device=device),
                )
                target = ExactRows(hidden_ND=target_CD, head_VD=target_head_VD)
                divergence = Divergence(name=name, form=form)  # type: ignore[arg-type]
                loss = fused_linear_divergence([draft], target, divergence, normaliser=64).loss
                (gradient,) = torch.autograd.grad(loss, head_WD)
                losses.append([float(loss.detach()), float(gradient.float().norm())])
            agree &= len({math.isnan(loss) for loss, _ in losses}) == 1
            found[f"{name}, {bad}"] = losses
    return {"forms agree": agree, "forms": forms, "loss, gradient": found}


def attention(device: torch.device) -> dict[str, Any]:
    """Compare the drafts' FlexAttention on two documents with PyTorch's attention on one.

    PyTorch's does twice the work. The first call compiles ours.
    """
    on_gpu = device.type == "cuda"
    sizes = ((128, 32, 8, 2048, 8), (64, 32, 8, 2048, 8), (128, 32, 8, 8192, 2), (256, 16, 4, 2048, 4)) if on_gpu else (
        (64, 4, 2, 256, 1),
    )  # fmt: skip
    return {
        f"head {size[0]}, {size[4]} x {size[3]}": time_attention(*size, device=device)
        for size in sizes
    }


def time_attention(
    size: int, heads: int, keys: int, tokens: int, batch: int, *, device: torch.device
) -> Any:
    """Time both kinds of attention; each row holds two documents."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k, v = (
        random(batch, h, tokens, size, device=device, dtype=dtype).requires_grad_()
        for h in (heads, keys, keys)
    )
    documents_BT = (
        (torch.arange(tokens, device=device) * 2 // tokens).expand(batch, -1).contiguous()
    )
    prefixes, scale = prefix.Prefixes.of(documents_BT), size**-0.5

    def ours() -> Any:
        return prefix.attend(q, (k, v), prefixes, scale)

    def theirs() -> Any:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    began_s = time.perf_counter()
    weights = torch.randn_like(ours())
    torch.autograd.grad(ours(), (q, k, v), weights)
    compile_s = time.perf_counter() - began_s
    times = {}
    for name, run in (("forward + backward", ours), ("PyTorch's", theirs)):
        both = partial(lambda run: torch.autograd.grad(run(), (q, k, v), weights), run)
        times[f"{name}, ms"] = 1e3 * median_s(both, device, rounds=5)
    return {"first call, s": round(compile_s, 1), **times}


def capture(device: torch.device) -> dict[str, Any]:
    """Time the search for the largest logits, for 256 requests with 3 draft tokens each."""
    num_rows, width = (1024, 128256) if device.type == "cuda" else (16, 8192)
    logits_RV = random(num_rows, width, device=device)
    table = {
        "one pass": median_s(lambda: find_in_one_pass(logits_RV, 32), device),
        "topk and logsumexp": median_s(
            lambda: (logits_RV.float().topk(32), logits_RV.float().logsumexp(-1)), device
        ),
    }
    return {name: {"ms": 1e3 * s, "TB/s": logits_RV.nbytes / s / 1e12} for name, s in table.items()}


def checksums(device: torch.device) -> dict[str, float]:
    """Time the target's checksum, which every swap computes twice during its pause.

    On a GPU, also measure the memory it needs for a transposed weight.
    """
    wide, layers = (14336, 32) if device.type == "cuda" else (512, 2)
    model = nn.ModuleList(
        nn.Linear(4096, wide, bias=False, device=device, dtype=torch.bfloat16)
        for _ in range(layers)
    )
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    found = {"GB": num_bytes / 1e9, "ms": 1e3 * median_s(lambda: checksum(model), device, rounds=3)}
    if device.type == "cuda":
        turned = nn.Module()
        turned.register_buffer("weight", random(16384, 8192, device=device).t())
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        checksum(turned)
        found["further GB for a transposed weight of 0.27"] = (
            torch.cuda.max_memory_allocated() - before
        ) / 1e9
    return found


def pinning(device: torch.device) -> dict[str, float]:
    """Measure how long it takes to pin the buffer for a staged draft.

    Also return the longest delay of a kernel launch in another thread meanwhile.
    """
    num_bytes = 1 << (31 if device.type == "cuda" else 24)
    memory, done = HostMemory(pin_on(device)), threading.Event()

    def reserve() -> None:
        memory.reserve(num_bytes)
        done.set()

    x, longest_s, began_s = torch.zeros(1024, device=device), 0.0, time.perf_counter()
    thread = threading.Thread(target=reserve)
    thread.start()
    while not done.is_set():
        launched_s = time.perf_counter()
        x.add_(1).sum().item()
        longest_s = max(longest_s, time.perf_counter() - launched_s)
    thread.join()
    return {
        "pinned GB": memory.pinned_bytes / 1e9,
        "s": time.perf_counter() - began_s,
        "longest launch, ms": 1e3 * longest_s,
    }


def rows_of_the_loss(device: torch.device) -> dict[str, Any]:
    """Measure the loss kernels' bandwidth, counting the bytes that must be moved.

    It uses the sizes of EAGLE-3 for Llama-3.1-8B and the sizes of a standalone draft.
    """
    target_CV, ids_W = (
        random(2048, 128256, device=device),
        torch.arange(0, 128000, 4, device=device),
    )
    seconds = median_s(lambda: rows.target_rows(target_CV, None, 1.0), device)
    table = {"target_rows 2048 x 128256": target_CV.nbytes / seconds / 1e12}
    for m, draft_ids_W, name in (
        (14336, ids_W, "lk_hybrid"),
        (14336, ids_W, "forward_kl"),
        (2048, None, "forward_kl"),
    ):
        kept_CW, sums_2C = rows.target_rows(target_CV, draft_ids_W, 1.0)
        kept_CW = target_CV if draft_ids_W is None else kept_CW
        place_M, scale_M = (
            torch.arange(m, device=device) % 2048,
            torch.full((m,), 1e-4, device=device),
        )
        work_MW = random(m, kept_CW.shape[1], device=device)
        run = launch(work_MW, kept_CW, sums_2C, place_M, scale_M, name)
        seconds = median_s(run, device)
        table[f"draft_rows {name} {m} x {kept_CW.shape[1]}"] = (
            (2 * work_MW.nbytes + kept_CW.nbytes) / seconds / 1e12
        )
    return {"TB/s": table}


def launch(work_MW: Tensor, *args: Any) -> Callable[[], Tensor]:
    """Return a call of `draft_rows` at temperature 1."""
    kept_CW, sums_2C, place_M, scale_M, name = args

    def run() -> Tensor:
        made: Tensor = rows.draft_rows(
            work_MW, kept_CW, sums_2C, place_M, scale_M, None, name, 1.0, 0.5, 3.0
        )
        return made

    return run


def beyond_2_to_31(device: torch.device) -> dict[str, Any]:
    """Compare the last rows of more than 2^31 logits with the same rows computed alone."""
    m, width, c = 14400, 151936, 2048
    target_CV, work_MW = random(c, width, device=device), random(m, width, device=device)
    last_MW = work_MW[-8:].clone()
    place_M, scale_M = torch.arange(m, device=device) % c, torch.full((m,), 1e-2, device=device)
    _, sums_2C = rows.target_rows(target_CV, None, 1.0)
    values = launch(work_MW, target_CV, sums_2C, place_M, scale_M, "forward_kl")()
    alone = launch(
        last_MW, target_CV, sums_2C, place_M[-8:].clone(), scale_M[-8:].clone(), "forward_kl"
    )()
    return {
        "values equal": torch.equal(values[:, -8:], alone),
        "gradients equal": torch.equal(work_MW[-8:], last_MW),
        "peak GB": torch.cuda.max_memory_allocated() / 1e9,
    }


def attention_in_compiled_layers(device: torch.device) -> dict[str, Any]:
    """Check attention inside compiled layers, where it is compiled separately.

    It must not hold all scores in memory.
    """
    attend: Any = torch.compiler.disable(prefix.attend)  # type: ignore[no-untyped-call]
    linear = nn.Linear(256, 256, device=device, dtype=torch.bfloat16)
    prefixes = prefix.Prefixes.of(torch.zeros(2, 256, dtype=torch.long, device=device))

    def layer(x_BTD: Tensor) -> Tensor:
        q = linear(x_BTD).view(2, 256, 4, 64).transpose(1, 2)
        made: Tensor = attend(q, (q, q), prefixes, 0.125).transpose(1, 2).flatten(2) * 2
        return made

    x_BTD, compiled = random(2, 256, 256, device=device), torch.compile(layer)
    compiled(x_BTD)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = compiled(x_BTD)
    used = torch.cuda.max_memory_allocated() - before
    return {
        "difference": float((made - layer(x_BTD)).float().abs().max()),
        "bytes": used,
        "bytes of all scores": 2 * 4 * 256 * 256 * 4,
    }


MEASURES = {"micro": measure}
