"""Cases of `bench-training`: the fused divergence alone, and a whole step of a standalone draft.

N = tokens, D = hidden, V = vocabulary, B = batch, T = tokens of a row.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.distill.loss.divergences import Divergence
from redraft.distill.loss.fused import DraftRows, ExactRows, fused_linear_divergence
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.step import DistillStep
from redraft.heads.draft import Batch
from redraft.heads.families.standalone import StandaloneDraft
from redraft.recipes.bench.measure import DTYPES, OURS, Case, DtypeName, Matmul, Required, Run, can_compile

NAIVE = "naive"

# ----------------------------------------------------------------------------- loss alone: fused against logits in full

NUM_TOKENS = 1024
HIDDEN = 512


def fused_loss_cases() -> list[Case]:
    return [fused_loss_case(thousands, dtype) for thousands in (32, 128) for dtype in DTYPES]


def fused_loss_case(thousands: int, dtype: DtypeName) -> Case:
    """KL of two linear heads, with the gradients of the draft's hidden states and head."""
    vocabulary = 1024 * thousands
    matmuls = (
        # Logits of target and draft; gradients of the draft's hidden states; gradient of the draft's head.
        Matmul(count=2, rows=NUM_TOKENS, inner=HIDDEN, columns=vocabulary),
        Matmul(count=1, rows=NUM_TOKENS, inner=vocabulary, columns=HIDDEN),
        Matmul(count=1, rows=vocabulary, inner=NUM_TOKENS, columns=HIDDEN),
    )
    return Case(
        name=f"fused loss, vocabulary {thousands}k, {dtype}",
        against={NAIVE: "both logits in full, log_softmax, KL, autograd"},
        tokens=NUM_TOKENS,
        dtype=dtype,
        matmuls=matmuls,
        build=functools.partial(build_fused_loss, vocabulary, dtype),
        required={NAIVE: Required(speed=2.0, memory=0.5)} if dtype == "bfloat16" else {},
    )


def build_fused_loss(vocabulary: int, dtype: DtypeName, side: str, device: str) -> Run:
    make = functools.partial(_normal, torch.Generator().manual_seed(0), device, dtype)
    head_VD, target_head_VD = (make(vocabulary, HIDDEN, scale=HIDDEN**-0.5) for _ in range(2))
    hidden_ND, target_hidden_ND = (make(NUM_TOKENS, HIDDEN, scale=2.0) for _ in range(2))
    # The target's tensors get no gradient, on either side.
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
        return _backward(ours() if side == OURS else naive())

    return run


# -------------------------------------------------------------------------------------- a whole step: against TRL's GKD

STEP_BATCH, STEP_LENGTH, STEP_VOCABULARY = 2, 512, 32_768
TRL, TRL_COMPILED = "TRL", "TRL, compiled"

Precision = Literal["mixed", "weights"]
"""mixed: float32 weights under autocast, the default of TRL and of redraft; weights: all weights in bfloat16."""


def kl_step_cases() -> list[Case]:
    """A small Llama learns the distribution of a larger one. A step is both models, loss, backward and AdamW."""
    # One pass of the target; for the student one forward, and a backward of twice its cost. Without attention scores.
    matmuls = (*_linears(target_config(), passes=1), *_linears(student_config(), passes=3))
    return [
        Case(
            name=f"KL step, vocabulary 32k, bfloat16 {precision}",
            against={TRL: "GKDTrainer's loss on the same models"}
            | ({TRL_COMPILED: "the same with the loss compiled"} if can_compile() else {}),
            compiled=frozenset({TRL_COMPILED}),
            tokens=STEP_BATCH * STEP_LENGTH,
            dtype="bfloat16",
            matmuls=matmuls,
            build=functools.partial(build_kl_step, precision),
            required={TRL: Required(speed=1.8)} if precision == "mixed" else {},
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


def _linears(config: LlamaConfig, passes: int) -> Iterator[Matmul]:
    """Every linear layer of a model, `passes` times over a batch."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            rows = STEP_BATCH * STEP_LENGTH
            yield Matmul(count=passes, rows=rows, inner=module.in_features, columns=module.out_features)


def build_kl_step(precision: Precision, side: str, device: str) -> Run:
    torch.manual_seed(0)
    mixed = precision == "mixed"
    target = LlamaForCausalLM(target_config()).to(device, torch.bfloat16).eval().requires_grad_(False)
    student = LlamaForCausalLM(student_config()).to(device, torch.float32 if mixed else torch.bfloat16)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, fused=True)  # the Trainer's default
    ids_BT = torch.randint(STEP_VOCABULARY, (STEP_BATCH, STEP_LENGTH)).to(device)
    autocast = torch.autocast(torch.device(device).type, torch.bfloat16, enabled=mixed)
    if side == OURS:
        loss = our_kl(student, target, ids_BT, autocast)
    else:
        loss = trl_kl(student, target, ids_BT, autocast, is_compiled=side == TRL_COMPILED)

    def run() -> Tensor:
        optimizer.zero_grad()
        value = _backward(loss())
        optimizer.step()
        return value

    return run


def our_kl(student: Any, target: Any, ids_BT: Tensor, autocast: torch.autocast) -> Run:
    module, signal = DistillStep(StandaloneDraft(student), Divergence()), InProcessTarget(target)
    batch = Batch.padded(list(ids_BT), device=ids_BT.device)
    # A row's first token is no label: nothing predicts it.
    scale = 1 / (STEP_BATCH * (STEP_LENGTH - 1))

    def loss() -> Tensor:
        target_signal = signal(batch)
        with autocast:
            value: Tensor = module(batch, target_signal, scale=scale)[0]
        return value

    return loss


def trl_kl(student: Any, target: Any, ids_BT: Tensor, autocast: torch.autocast, *, is_compiled: bool) -> Run:
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer  # a development dependency

    divergence = GKDTrainer.generalized_jsd_loss
    if is_compiled:
        divergence = torch.compile(divergence)

    def logits(model: Any) -> Tensor:
        with autocast:
            logits_BTV: Tensor = model(input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT)).logits[:, :-1]
        mixed = autocast._enabled
        return logits_BTV.float() if mixed else logits_BTV  # accelerate converts a prepared model's outputs

    def loss() -> Tensor:
        student_logits_BTV = logits(student)
        with torch.no_grad():
            target_logits_BTV = logits(target)
        # beta 0 is its forward KL
        value: Tensor = divergence(student_logits_BTV, target_logits_BTV, labels=ids_BT[:, 1:], beta=0)
        return value

    return loss


def _normal(generator: torch.Generator, device: str, dtype: DtypeName, *shape: int, scale: float) -> Tensor:
    return (scale * torch.randn(*shape, generator=generator)).to(device, getattr(torch, dtype))


def _backward(loss: Tensor) -> Tensor:
    torch.autograd.backward(loss)
    return loss.detach()
