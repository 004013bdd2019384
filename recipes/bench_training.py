"""Measure the speed and memory of training against what others do, as ratios of one interleaved run.

redraft bench-training

Every case runs both sides in turn, with a matmul in between, in a process of its own: a machine that drifts drifts for
both, and the matmul says how much of it was there. Peak memory is what a side needs above its weights and inputs, each
side in a fresh process. Nothing here is a test: a ratio below its requirement is printed, not raised.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from distill.fused import DraftRows, ExactRows, fused_linear_divergence
from distill.losses import Divergence
from distill.signals import InProcessTarget
from distill.train import DistillStep
from heads.draft import Batch
from heads.standalone import StandaloneDraft
from recipes.cli import run_recipe

Side = Literal["ours", "theirs"]
DtypeName = Literal["bfloat16", "float32"]


@dataclass(frozen=True, kw_only=True)
class Config:
    output: Path = Path("outputs/bench/training.json")
    rounds: int = 5
    """Times each side runs; the ratio is the median of the rounds' ratios."""
    threads: int = 0
    """Threads of torch; 0 leaves torch's own choice."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    cases: str = ""
    """Only cases whose name contains this."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing done in two ways."""

    name: str
    theirs: str
    """What ours is compared with."""
    tokens: int
    """Tokens of one run."""
    dtype: DtypeName
    matmul_flops: float
    """What our run cannot do without."""
    build: Callable[[Side, str], Callable[[], Tensor]]
    """Allocates weights and inputs on a device; the function it gives runs that side once, gradients included, and
    returns the loss. A function of a module: it travels to the processes that measure it."""
    required_speed: float | None = None
    """Least ratio of tokens/s, ours to theirs."""
    required_memory: float | None = None
    """Largest ratio of peak memory, ours to theirs."""


# ----------------------------------------------------------------------------- loss alone: fused against logits in full

NUM_TOKENS = 1024
HIDDEN = 512


def fused_loss_cases() -> list[Case]:
    dtypes: tuple[DtypeName, ...] = ("bfloat16", "float32")
    return [fused_loss_case(thousands, dtype) for thousands in (32, 128) for dtype in dtypes]


def fused_loss_case(thousands: int, dtype: DtypeName) -> Case:
    """KL of two linear heads, with the gradients of the draft's hidden states and head."""
    vocabulary, required = 1024 * thousands, dtype == "bfloat16"
    return Case(
        name=f"fused loss, vocabulary {thousands}k, {dtype}",
        theirs="the naive form: both logits, log_softmax, KL, backward",
        tokens=NUM_TOKENS,
        dtype=dtype,
        matmul_flops=4 * 2.0 * NUM_TOKENS * HIDDEN * vocabulary,
        build=functools.partial(build_fused_loss, vocabulary, dtype),
        required_speed=2.0 if required else None,
        required_memory=0.5 if required else None,
    )


def build_fused_loss(vocabulary: int, dtype: DtypeName, side: Side, device: str) -> Callable[[], Tensor]:
    make = functools.partial(_normal, torch.Generator().manual_seed(0), device, dtype)
    head_VD, target_head_VD = (make(vocabulary, HIDDEN, scale=HIDDEN**-0.5) for _ in range(2))
    hidden_ND, target_hidden_ND = (make(NUM_TOKENS, HIDDEN, scale=2.0) for _ in range(2))
    leaves = [hidden_ND.requires_grad_(), head_VD.requires_grad_()]

    def ours() -> Tensor:
        rows_N = torch.arange(NUM_TOKENS, device=device)
        weight_N = torch.ones(NUM_TOKENS, device=device)
        draft = DraftRows(hidden_MD=hidden_ND, head_WD=head_VD, target_row_M=rows_N, weight_M=weight_N)
        target = ExactRows(hidden_ND=target_hidden_ND, head_VD=target_head_VD)
        return fused_linear_divergence([draft], target, Divergence(), normaliser=NUM_TOKENS).loss

    def naive() -> Tensor:
        with torch.no_grad():
            log_p_NV = torch.log_softmax(target_hidden_ND @ target_head_VD.T, -1, dtype=torch.float32)
        log_q_NV = torch.log_softmax(hidden_ND @ head_VD.T, -1, dtype=torch.float32)
        return F.kl_div(log_q_NV, log_p_NV, reduction="batchmean", log_target=True)

    def run() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        return _backward(ours() if side == "ours" else naive())

    return run


# -------------------------------------------------------------------------------------- a whole step: against TRL's GKD

STEP_BATCH, STEP_LENGTH, STEP_VOCABULARY = 2, 512, 32_768

Precision = Literal["mixed", "weights"]
"""mixed: the student's weights in float32 under autocast, as TRL and we train by default; weights: all in bfloat16."""


def kl_step_cases() -> list[Case]:
    """A small Llama learns the distribution of a larger one: both models, loss, backward, AdamW."""
    student, target = (_num_matmul_weights(config) for config in (student_config(), target_config()))
    return [
        Case(
            name=f"KL step, vocabulary 32k, bfloat16 {precision}",
            theirs="TRL's GKD loss",
            tokens=STEP_BATCH * STEP_LENGTH,
            dtype="bfloat16",
            # 2 flops a weight and token, twice more for the student's backward; attention scores left out
            matmul_flops=2.0 * STEP_BATCH * STEP_LENGTH * (3 * student + target),
            build=functools.partial(build_kl_step, precision),
            required_speed=1.8 if precision == "mixed" else None,
        )
        for precision in get_args(Precision)
    ]


def student_config() -> LlamaConfig:
    return _llama(layers=2, hidden=256)


def target_config() -> LlamaConfig:
    return _llama(layers=6, hidden=512)


def _llama(layers: int, hidden: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=STEP_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=STEP_LENGTH,
        tie_word_embeddings=False,
    )


def _num_matmul_weights(config: LlamaConfig) -> int:
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in name)


def build_kl_step(precision: Precision, side: Side, device: str) -> Callable[[], Tensor]:
    torch.manual_seed(0)
    mixed = precision == "mixed"
    target = LlamaForCausalLM(target_config()).to(device, torch.bfloat16).eval().requires_grad_(False)
    student = LlamaForCausalLM(student_config()).to(device, torch.float32 if mixed else torch.bfloat16)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, fused=True)  # the Trainer's default
    ids_BT = torch.randint(STEP_VOCABULARY, (STEP_BATCH, STEP_LENGTH)).to(device)
    autocast = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mixed)
    kl = our_kl if side == "ours" else trl_kl
    loss = kl(student, target, ids_BT, autocast)

    def run() -> Tensor:
        optimizer.zero_grad()
        value = _backward(loss())
        optimizer.step()
        return value

    return run


def our_kl(student: Any, target: Any, ids_BT: Tensor, autocast: torch.autocast) -> Callable[[], Tensor]:
    module, signal = DistillStep(StandaloneDraft(student), Divergence()), InProcessTarget(target)
    batch = Batch(
        input_ids_BT=ids_BT,
        loss_mask_BT=torch.ones_like(ids_BT, dtype=torch.bool),
        document_BT=torch.zeros_like(ids_BT),
        position_ids_BT=torch.arange(STEP_LENGTH, device=ids_BT.device).expand_as(ids_BT),
    )
    scale = 1 / (STEP_BATCH * (STEP_LENGTH - 1))

    def loss() -> Tensor:
        target_signal = signal(batch)
        with autocast:
            value: Tensor = module(batch, target_signal, scale=scale).loss
        return value

    return loss


def trl_kl(student: Any, target: Any, ids_BT: Tensor, autocast: torch.autocast) -> Callable[[], Tensor]:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer  # a development dependency

    def logits(model: Any) -> Tensor:
        with autocast:
            logits_BTV: Tensor = model(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).logits[:, :-1]
        mixed = autocast._enabled
        return logits_BTV.float() if mixed else logits_BTV  # accelerate widens what a prepared model returns

    def loss() -> Tensor:
        student_logits_BTV = logits(student)
        with torch.no_grad():
            target_logits_BTV = logits(target)
        value: Tensor = GKDTrainer.generalized_jsd_loss(  # beta 0 is its forward KL
            student_logits_BTV, target_logits_BTV, labels=ids_BT[:, 1:], beta=0
        )
        return value

    return loss


SECTIONS: tuple[Callable[[], list[Case]], ...] = (fused_loss_cases, kl_step_cases)


def _normal(generator: torch.Generator, device: str, dtype: DtypeName, *shape: int, scale: float) -> Tensor:
    return (scale * torch.randn(*shape, generator=generator)).to(device, getattr(torch, dtype))


def _backward(loss: Tensor) -> Tensor:
    torch.autograd.backward(loss)
    return loss.detach()


# ------------------------------------------------------------------------------------------------------------ measuring


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Every round's seconds by the clock and of CPU time, and the loss of the first, on which both must agree."""

    ours_s: list[tuple[float, float]]
    theirs_s: list[tuple[float, float]]
    matmul_s: list[tuple[float, float]]
    matmul_flops: float
    ours_loss: float
    theirs_loss: float
    threads: int


def time_case(case: Case, cfg: Config) -> Timing:
    """Both sides and a matmul in turn, `rounds` times."""
    ours, theirs = case.build("ours", cfg.device), case.build("theirs", cfg.device)
    matmul, flops = reference_matmul(getattr(torch, case.dtype), cfg.device)
    ours_loss, theirs_loss = float(ours()), float(theirs())  # warms up too
    matmul()
    rounds = [[_seconds(run, cfg.device) for run in (matmul, ours, theirs)] for _ in range(cfg.rounds)]
    matmul_s, ours_s, theirs_s = (list(column) for column in zip(*rounds, strict=True))
    return Timing(
        ours_s=ours_s,
        theirs_s=theirs_s,
        matmul_s=matmul_s,
        matmul_flops=flops,
        ours_loss=ours_loss,
        theirs_loss=theirs_loss,
        threads=torch.get_num_threads(),
    )


def reference_matmul(dtype: torch.dtype, device: str) -> tuple[Callable[[], Tensor], float]:
    """A matmul of a head's shape into memory it owns, and its flops: what the machine can give at this moment."""
    rows, hidden, vocabulary = 256, 512, 32_768
    hidden_ND = torch.randn(rows, hidden, device=device, dtype=dtype)
    head_VD = torch.randn(vocabulary, hidden, device=device, dtype=dtype)
    logits_NV = torch.empty(rows, vocabulary, device=device, dtype=dtype)
    return lambda: torch.mm(hidden_ND, head_VD.T, out=logits_NV), 2.0 * rows * hidden * vocabulary


def _seconds(run: Callable[[], Tensor], device: str) -> tuple[float, float]:
    started = time.perf_counter(), time.process_time()
    run()
    if device != "cpu":
        torch.cuda.synchronize()  # kernels run on after their launch returns
    return time.perf_counter() - started[0], time.process_time() - started[1]


def peak_bytes(case: Case, side: Side, cfg: Config) -> int:
    """Most memory that one run of `side` holds above weights and inputs; in a process that ran nothing before."""
    run = case.build(side, cfg.device)
    tiny = torch.ones(8, 8, device=cfg.device, dtype=getattr(torch, case.dtype), requires_grad=True)
    _backward((tiny @ tiny).sum())  # libraries allocate at their first call
    if cfg.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the process's peak of resident memory
    before = _resident_peak_bytes()
    run()
    return _resident_peak_bytes() - before


def _resident_peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


Result = TypeVar("Result")


def in_fresh_process(function: Callable[..., Result], *args: Any, threads: int) -> Result:
    """`function(*args)` in a new interpreter, so that no other measurement's memory or caches are in it."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=_set_threads, initargs=(threads,)) as pool:
        return pool.submit(function, *args).result()


def _set_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)


# ------------------------------------------------------------------------------------------------------------ the table


@dataclass(frozen=True, kw_only=True)
class Measurement:
    case: str
    theirs: str
    tokens_per_s: float
    theirs_tokens_per_s: float
    speed_ratio: float
    """Median of the rounds' ratios of tokens/s, ours to theirs."""
    cpu_time_ratio: float
    """The same by CPU time, theirs to ours: steadier on a busy machine, where threads wait for each other."""
    required_speed: float | None
    peak_mib: float
    theirs_peak_mib: float
    memory_ratio: float
    required_memory: float | None
    share_of_matmul_floor: float
    """Time that our matmuls alone would take at the reference matmul's rate, divided by our time."""
    loss_difference: float
    timing: Timing = field(repr=False)


def measure(case: Case, cfg: Config) -> Measurement:
    fresh = functools.partial(in_fresh_process, threads=cfg.threads)
    timing = fresh(time_case, case, cfg)
    peaks = [fresh(peak_bytes, case, side, cfg) / 2**20 for side in ("ours", "theirs")]
    ours_s, theirs_s, matmul_s = (
        statistics.median(wall_s for wall_s, _ in rounds)
        for rounds in (timing.ours_s, timing.theirs_s, timing.matmul_s)
    )
    ratios = [
        (theirs[0] / ours[0], theirs[1] / ours[1]) for ours, theirs in zip(timing.ours_s, timing.theirs_s, strict=True)
    ]
    return Measurement(
        case=case.name,
        theirs=case.theirs,
        tokens_per_s=case.tokens / ours_s,
        theirs_tokens_per_s=case.tokens / theirs_s,
        speed_ratio=statistics.median(wall for wall, _ in ratios),
        cpu_time_ratio=statistics.median(cpu for _, cpu in ratios),
        required_speed=case.required_speed,
        peak_mib=peaks[0],
        theirs_peak_mib=peaks[1],
        memory_ratio=peaks[0] / peaks[1],
        required_memory=case.required_memory,
        share_of_matmul_floor=case.matmul_flops / timing.matmul_flops * matmul_s / ours_s,
        loss_difference=abs(timing.ours_loss - timing.theirs_loss) / abs(timing.theirs_loss),
        timing=timing,
    )


def lines(result: Measurement) -> Iterator[str]:
    speed = _verdict(result.speed_ratio, result.required_speed, at_least=True)
    memory = _verdict(result.memory_ratio, result.required_memory, at_least=False)
    yield f"{result.case}  (against {result.theirs}; losses differ by {result.loss_difference:.1e})"
    yield (
        f"    speed   {result.tokens_per_s:8,.0f} against {result.theirs_tokens_per_s:8,.0f} tokens/s"
        f"   {result.speed_ratio:5.2f}x  {speed}  [by CPU time {result.cpu_time_ratio:.2f}x]"
    )
    yield (
        f"    memory  {result.peak_mib:8,.0f} against {result.theirs_peak_mib:8,.0f} MiB     "
        f"   {result.memory_ratio:5.2f}x  {memory}"
    )
    yield f"    share of matmul floor {result.share_of_matmul_floor:.2f}"


def _verdict(ratio: float, required: float | None, *, at_least: bool) -> str:
    if required is None:
        return ""
    passed = ratio >= required if at_least else ratio <= required
    return f"{'PASS' if passed else 'BELOW TARGET'} (at {'least' if at_least else 'most'} {required:g})"


def main(cfg: Config) -> None:
    machine = {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(),
        "device": torch.cuda.get_device_name() if cfg.device != "cpu" else "cpu",
        "torch": torch.__version__,
    }
    print("  ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    cases = [case for section in SECTIONS for case in section() if cfg.cases in case.name]
    if not cases:
        raise ValueError(f"no case's name contains {cfg.cases!r}")
    results = []
    for case in cases:
        results.append(measure(case, cfg))
        print(*lines(results[-1]), sep="\n", flush=True)
    print(f"threads {results[0].timing.threads}, {cfg.rounds} interleaved rounds")
    cfg.output.parent.mkdir(parents=True, exist_ok=True)
    cfg.output.write_text(json.dumps({"machine": machine, "results": [asdict(r) for r in results]}, indent=2) + "\n")
    print(f"written to {cfg.output}")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
