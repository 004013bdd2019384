"""Cases of `benchmarks.training`.

They measure the fused divergence alone, and a whole step of a standalone draft.

N = tokens, D = hidden, V = vocabulary, B = batch, T = tokens of a row.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.training.measure import (
    DTYPES,
    OURS_COMPILED,
    Against,
    Case,
    DtypeName,
    Matmul,
    Required,
    Run,
    Step,
    adamw,
)
from benchmarks.training.peers import ON_EPYC, Peer, both_forms, describe_absent, list_sides
from redraft.distill.loss.choice import Divergence
from redraft.distill.loss.fused import DraftRows, ExactRows, fused_linear_divergence
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.step import DistillStep, compile_layers
from redraft.heads.draft import Batch
from redraft.heads.families.standalone import StandaloneDraft

NAIVE = "naive"

# ----------------------------------------------------------------------------- loss alone: fused
# against logits in full

NUM_TOKENS = 1024
HIDDEN = 512

GPU_TOKENS, GPU_HIDDEN = 4096, 4096
"""Sizes of an 8B target, for a GPU. With smaller sizes, kernel launches would take most of the
time.
"""


def fused_loss_cases(device: str) -> list[Case]:
    return [
        fused_loss_case(thousands, dtype, device) for thousands in (32, 128) for dtype in DTYPES
    ]


def loss_sizes(device: str) -> tuple[int, int]:
    """Return (N, D) of the case."""
    return (NUM_TOKENS, HIDDEN) if device == "cpu" else (GPU_TOKENS, GPU_HIDDEN)


def fused_loss_case(thousands: int, dtype: DtypeName, device: str) -> Case:
    """Make the case for the KL of two linear heads, with gradients for draft states and head."""
    vocabulary, (rows, hidden) = 1024 * thousands, loss_sizes(device)
    matmuls = (
        # The products are the logits of target and draft, the gradients of the draft's hidden
        # states, and the gradient of the draft's head.
        Matmul(count=2, rows=rows, inner=hidden, columns=vocabulary),
        Matmul(count=1, rows=rows, inner=vocabulary, columns=hidden),
        Matmul(count=1, rows=vocabulary, inner=rows, columns=hidden),
    )
    return Case(
        name=f"fused loss, vocabulary {thousands}k, {dtype}",
        family="fused_kl",
        against={
            NAIVE: Against(
                description="both logits in full, log_softmax, KL, autograd", peer=NAIVE
            ),
            **list_sides(FUSED_LOSSES, device),
        },
        tokens=rows,
        dtype=dtype,
        matmuls=matmuls,
        build=functools.partial(build_fused_loss, vocabulary, dtype),
        required={
            NAIVE: Required(speed=2.0, memory=0.5),
            LIGER: Required(memory=0.5),
            LIGER_COMPILED: Required(speed=1.4, memory=0.5),
        }
        if dtype == "bfloat16"
        else {},
        note=describe_absent(FUSED_LOSSES, device),
        compiles=device == "cpu",  # on a GPU a kernel compares the rows
    )


def build_fused_loss(vocabulary: int, dtype: DtypeName, side: str, device: str) -> Run:
    make = functools.partial(_normal, torch.Generator().manual_seed(0), device, dtype)
    num_rows, hidden = loss_sizes(device)
    head_VD, target_head_VD = (make(vocabulary, hidden, scale=hidden**-0.5) for _ in range(2))
    hidden_ND, target_hidden_ND = (make(num_rows, hidden, scale=2.0) for _ in range(2))
    # The target's tensors get no gradient on either side.
    leaves = [hidden_ND.requires_grad_(), head_VD.requires_grad_()]
    if side in FUSED_LOSSES:
        labels_N = torch.zeros(num_rows, dtype=torch.long, device=device)
        build = FUSED_LOSSES[side].build
        return Step(build(hidden_ND, head_VD, target_hidden_ND, target_head_VD, labels_N), leaves)

    divergence = Divergence(form="compiled" if side == OURS_COMPILED else "auto")

    def ours() -> Tensor:
        rows_N = torch.arange(num_rows, device=device)
        weight_N = torch.ones(num_rows, device=device)
        draft = DraftRows(
            hidden_MD=hidden_ND, head_WD=head_VD, target_row_M=rows_N, weight_M=weight_N
        )
        target = ExactRows(hidden_ND=target_hidden_ND, head_VD=target_head_VD)
        return fused_linear_divergence([draft], target, divergence, normaliser=num_rows).loss

    def naive() -> Tensor:
        with torch.no_grad():
            log_p_NV = torch.log_softmax(
                target_hidden_ND @ target_head_VD.T, -1, dtype=torch.float32
            )
        log_q_NV = torch.log_softmax(hidden_ND @ head_VD.T, -1, dtype=torch.float32)
        return F.kl_div(log_q_NV, log_p_NV, reduction="batchmean", log_target=True)

    return Step(naive if side == NAIVE else ours, leaves)


def liger_kl(
    hidden_ND: Tensor,
    head_VD: Tensor,
    target_hidden_NE: Tensor,
    target_head_VE: Tensor,
    labels_N: Tensor,
    *,
    is_compiled: bool,
) -> Run:
    """Compute Liger's chunked forward KL, the mean over rows.

    It reads the labels only to find padding.
    """
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    # With beta 0, this is its forward KL.
    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=is_compiled
    )
    return functools.partial(loss, hidden_ND, head_VD, target_hidden_NE, target_head_VE, labels_N)


LIGER, LIGER_COMPILED = "Liger", "Liger, compiled"

LIGER_LOSSES = both_forms(
    LIGER,
    liger_kl,
    package="liger_kernel",
    descriptions=("Liger's chunked loss", "the same compiled, its default"),
    recorded=("Liger's loss alone: not measured", "Liger's loss alone, compiled: not measured"),
)

SPECULATORS = "speculators"


def speculators_kl(
    hidden_ND: Tensor,
    head_VD: Tensor,
    target_hidden_NE: Tensor,
    target_head_VE: Tensor,
    labels_N: Tensor,
) -> Run:
    """Compute the forward KL with speculators' Triton kernels, which take both sides' full logits."""
    from speculators.losses.fused import fused_kl_div_loss

    def loss() -> Tensor:
        with torch.no_grad():
            target_1NV = (target_hidden_NE @ target_head_VE.T)[None]
        found: Tensor = fused_kl_div_loss((hidden_ND @ head_VD.T)[None], target_1NV).mean()
        return found

    return loss


FUSED_LOSSES = LIGER_LOSSES | {
    SPECULATORS: Peer(
        package="speculators",
        name="speculators",
        description="both logits in full, the Triton kernels of speculators",
        recorded="the loss of speculators alone: not measured",
        build=speculators_kl,
        needs_gpu=True,
    )
}


# ------------------------------------------------------------------------- a whole step: against
# TRL's GKD, and Liger's

STEP_BATCH, STEP_LENGTH = 2, 512
TRL, TRL_COMPILED = "TRL", "TRL, compiled"

Precision = Literal["mixed", "weights"]
"""mixed: float32 weights under autocast, the default of TRL and of redraft; weights: all weights in
bfloat16.
"""


def kl_step_cases(device: str) -> list[Case]:
    steps: list[tuple[int, Precision]] = [(32, "mixed"), (32, "weights"), (128, "mixed")]
    return [kl_step_case(thousands, precision, device) for thousands, precision in steps]


def kl_step_case(thousands: int, precision: Precision, device: str) -> Case:
    """Make the case in which a small Llama learns the distribution of a larger one.

    A step runs both models, the loss, the backward pass and AdamW.
    """
    vocabulary = 1024 * thousands
    # One pass of the target. The student has one forward pass, and a backward pass at twice its
    # cost. Attention scores are not counted.
    target, student = (
        _linears(target_config(vocabulary), passes=1),
        _linears(student_config(vocabulary), passes=3),
    )
    return Case(
        name=f"KL step, vocabulary {thousands}k, bfloat16 {precision}",
        family="kl",
        against=list_sides(KL_PEERS, device),
        tokens=STEP_BATCH * STEP_LENGTH,
        dtype="bfloat16",
        matmuls=(*target, *student),
        build=functools.partial(build_kl_step, vocabulary, precision),
        required={
            TRL: Required(memory=0.5),
            TRL_COMPILED: Required(speed=2.0, memory=0.5),
            LIGER: Required(memory=0.5),
            LIGER_COMPILED: Required(speed=1.4, memory=0.5),
        },
        note=describe_absent(KL_PEERS, device),
        compiles=True,
    )


def student_config(vocabulary: int) -> LlamaConfig:
    return _llama(vocabulary, layers=2, hidden=256)


def target_config(vocabulary: int) -> LlamaConfig:
    return _llama(vocabulary, layers=6, hidden=512)


def _llama(vocabulary: int, layers: int, hidden: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        max_position_embeddings=STEP_LENGTH,
        tie_word_embeddings=False,
    )


def _linears(config: LlamaConfig, passes: int) -> Iterator[Matmul]:
    """Count every linear layer of a model, `passes` times over a batch."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            rows = STEP_BATCH * STEP_LENGTH
            yield Matmul(
                count=passes, rows=rows, inner=module.in_features, columns=module.out_features
            )


def build_kl_step(vocabulary: int, precision: Precision, side: str, device: str) -> Run:
    torch.manual_seed(0)
    mixed = precision == "mixed"
    target = (
        LlamaForCausalLM(target_config(vocabulary))
        .to(device, torch.bfloat16)
        .eval()
        .requires_grad_(False)
    )
    student = LlamaForCausalLM(student_config(vocabulary)).to(
        device, torch.float32 if mixed else torch.bfloat16
    )
    ids_BT = torch.randint(vocabulary, (STEP_BATCH, STEP_LENGTH)).to(device)
    autocast = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mixed)
    build = (
        KL_PEERS[side].build
        if side in KL_PEERS
        else functools.partial(our_kl, is_compiled=side == OURS_COMPILED)
    )
    return Step(build(student, target, ids_BT, autocast), student.parameters(), adamw)


def our_kl(
    student: Any, target: Any, ids_BT: Tensor, autocast: torch.autocast, *, is_compiled: bool
) -> Run:
    draft, signal = StandaloneDraft(student), InProcessTarget(target)
    module = DistillStep(draft, Divergence())
    if is_compiled:
        compile_layers(draft, signal)
        module.compile_loss()
    batch = Batch.padded(list(ids_BT), device=ids_BT.device)
    # A row's first token is no label, because nothing predicts it.
    scale = 1 / (STEP_BATCH * (STEP_LENGTH - 1))

    def loss() -> Tensor:
        target_signal = signal(batch)
        with autocast:
            value: Tensor = module(batch, target_signal, scale=scale)[0]
        return value

    return loss


def trl_kl(
    student: Any, target: Any, ids_BT: Tensor, autocast: torch.autocast, *, is_compiled: bool
) -> Run:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer  # a development dependency

    divergence = GKDTrainer.generalized_jsd_loss
    if is_compiled:
        divergence = torch.compile(divergence)

    def logits(model: Any) -> Tensor:
        with autocast:
            logits_BTV: Tensor = model(
                input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)
            ).logits[:, :-1]
        mixed = autocast._enabled
        return (
            logits_BTV.float() if mixed else logits_BTV
        )  # accelerate converts a prepared model's outputs

    def loss() -> Tensor:
        student_logits_BTV = logits(student)
        with torch.no_grad():
            target_logits_BTV = logits(target)
        # With beta 0, this is its forward KL.
        value: Tensor = divergence(
            student_logits_BTV, target_logits_BTV, labels=ids_BT[:, 1:], beta=0
        )
        return value

    return loss


def liger_step(
    student: Any, target: Any, ids_BT: Tensor, autocast: torch.autocast, *, is_compiled: bool
) -> Run:
    labels_N = ids_BT[:, 1:].flatten()

    def read(model: Any) -> Tensor:
        hidden_BTD: Tensor = model.model(
            input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)
        ).last_hidden_state
        return hidden_BTD[:, :-1].flatten(0, 1)

    def loss() -> Tensor:
        with autocast:
            hidden_ND = read(student)
            with torch.no_grad():
                target_hidden_NE = read(target)
            heads = student.lm_head.weight, target.lm_head.weight
            return liger_kl(
                hidden_ND, heads[0], target_hidden_NE, heads[1], labels_N, is_compiled=is_compiled
            )()

    return loss


KL_PEERS = {
    **both_forms(
        TRL,
        trl_kl,
        package="trl",
        descriptions=("GKDTrainer's loss on the same models", "the same with the loss compiled"),
        recorded=(
            f"TRL 1.16, vocabulary 32k: 551 {ON_EPYC}",
            f"TRL 1.16, its loss compiled, vocabulary 32k: 655 {ON_EPYC}",
        ),
    ),
    **both_forms(
        LIGER,
        liger_step,
        package="liger_kernel",
        descriptions=(
            "Liger's chunked loss on the same models",
            "the same with the loss compiled, its default",
        ),
        recorded=("Liger: not measured", f"Liger, compiled, vocabulary 32k: 803 {ON_EPYC}"),
    ),
}
"""`build` is called with the two models, the batch's ids and the autocast context, and returns the
loss.
"""


def _normal(
    generator: torch.Generator, device: str, dtype: DtypeName, *shape: int, scale: float
) -> Tensor:
    return (scale * torch.randn(*shape, generator=generator)).to(device, getattr(torch, dtype))
