"""Cases of `benchmarks.training`.

Each case is a whole training step of a head (forward, backward, AdamW) on given target features.

B = batch, T = tokens, D = hidden, V = vocabulary, L = aux layers, M = labelled rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen2Config

from benchmarks.training.losses import NAIVE
from benchmarks.training.measure import (
    DTYPES,
    OURS,
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
from benchmarks.training.peers import PEERS, Sizes, describe_absent, list_sides
from redraft.distill.loss.choice import Divergence
from redraft.distill.train.step import DistillStep, compile_layers
from redraft.heads import catalog
from redraft.heads.draft import Batch, ExactTarget, TargetSignal
from redraft.heads.families import dflash, dspark, eagle3, medusa, mtp, peagle
from redraft.heads.target import Target

SIZES = Sizes(
    batch=2,
    length=512,
    hidden=512,
    intermediate=1408,
    vocabulary=32_768,
    heads=8,
    key_heads=4,
    steps=3,
)
TOKENS = SIZES.batch * SIZES.length

BLOCK_SIZES = dataclasses.replace(SIZES, layers=2, anchors=128)
"""Sizes of DFlash and DSpark, without the number of draft steps. Blocks have eight slots."""

MARKOV_RANK = 256


def sizes_of(family: str) -> Sizes:
    return FAMILIES[family].sizes


def head_cases(device: str) -> list[Case]:
    return [head_case(family, dtype, device) for family in FAMILIES for dtype in DTYPES] + [
        lk_hybrid_case()
    ]


def head_case(family: str, dtype: DtypeName, device: str) -> Case:
    """Make the case of one family, with all weights in `dtype`."""
    naive = Against(description="the same head, each step's logits in full, autograd", peer=NAIVE)
    against = {NAIVE: naive, **list_sides(PEERS[family], device)}
    speeds = FAMILIES[family].aims
    return Case(
        name=f"{family}, {sizes_of(family).steps} steps, vocabulary 32k, {dtype}",
        family=next(row.name for row in catalog.FAMILIES if row.title == family),
        against=against,
        tokens=TOKENS,
        dtype=dtype,
        matmuls=FAMILIES[family].matmuls(),
        build=functools.partial(build_head, family, dtype),
        required={name: Required(speed=speeds.get(name), memory=0.5) for name in against},
        note=describe_absent(PEERS[family], device),
        compiles=True,
    )


def build_head(family: str, dtype: DtypeName, side: str, device: str) -> Run:
    """Build a training step on random features: ours, the naive one, or a peer's."""
    if side in PEERS[family]:
        return PEERS[family][side].build(sizes_of(family), getattr(torch, dtype), device)
    options = {"is_naive": side == NAIVE, "is_compiled": side == OURS_COMPILED}
    return build_ours(family, dtype, device, Divergence(), **options)


def build_ours(
    family: str,
    dtype: DtypeName,
    device: str,
    divergence: Divergence,
    *,
    is_naive: bool = False,
    is_compiled: bool = False,
) -> Run:
    """Build a training step of redraft's head, compiled as with `--loop.compile` if asked."""
    head, batch, signal = make_step(family, getattr(torch, dtype), device)
    module = DistillStep(head, divergence)
    if is_compiled:
        compile_layers(head)
        module.compile_loss()
    sizes = sizes_of(family)
    # The scale is about one over the number of labels. It only has to be the same for both sides,
    # so that their losses can be compared.
    scale = 1 / (sizes.batch * (sizes.anchors * sizes.steps or sizes.length - 1))

    def loss() -> Tensor:
        return (
            naive_loss(head, batch, signal, scale)
            if is_naive
            else module(batch, signal, scale=scale)[0]
        )

    return Step(loss, (p for p in head.parameters() if p.requires_grad), adamw)


FORWARD_KL, FORWARD_KL_COMPILED = "forward KL", "forward KL, compiled"


def lk_hybrid_case() -> Case:
    """Make the case of an EAGLE-3 step with lk_hybrid, compared with one with forward KL."""
    description = "the same step, which learns another divergence"
    return Case(
        name=f"lk_hybrid, EAGLE-3, {SIZES.steps} steps, vocabulary 32k, bfloat16",
        family="lk_hybrid",
        against={
            name: Against(
                description=description, peer="forward_kl", is_compiled=name == FORWARD_KL_COMPILED
            )
            for name in (FORWARD_KL, FORWARD_KL_COMPILED)
        },
        tokens=TOKENS,
        dtype="bfloat16",
        matmuls=FAMILIES["EAGLE-3"].matmuls(),
        build=build_divergence,
        required=dict.fromkeys((FORWARD_KL, FORWARD_KL_COMPILED), Required(speed=0.9)),
        compiles=True,
    )


def build_divergence(side: str, device: str) -> Run:
    divergence = Divergence(name="lk_hybrid" if side in (OURS, OURS_COMPILED) else "forward_kl")
    is_compiled = side in (OURS_COMPILED, FORWARD_KL_COMPILED)
    return build_ours("EAGLE-3", "bfloat16", device, divergence, is_compiled=is_compiled)


def naive_loss(head: Any, batch: Batch, signal: TargetSignal, scale: float) -> Tensor:
    """Compute the loss of `distill_loss` with materialised logits.

    The [tokens, vocabulary] logits of the target and of every draft step are in memory.
    """
    distribution = signal.distribution
    assert isinstance(distribution, ExactTarget)
    p_logits_NV = (distribution.hidden_BTD @ distribution.head_VD.T).flatten(0, 1)
    loss = p_logits_NV.new_zeros((), dtype=torch.float32)
    for step in head.draft_steps(batch, signal):
        rows_M = step.mask_BT.flatten().nonzero().squeeze(1)
        of_target_MV, of_draft_MV = p_logits_NV[rows_M + step.shift], step.logits(rows_M)
        log_p_MV, log_q_MV = (
            logits_MV.float().log_softmax(-1) for logits_MV in (of_target_MV, of_draft_MV)
        )
        loss = loss + step.weight * F.kl_div(log_q_MV, log_p_MV, reduction="sum", log_target=True)
        if step.confidence_BT is not None:
            alpha_M = torch.minimum(log_p_MV, log_q_MV).detach().exp().sum(-1).clamp(max=1)
            sure_M = step.confidence_BT.flatten()[step.places(rows_M)]
            loss = loss + step.weight * F.binary_cross_entropy_with_logits(
                sure_M, alpha_M, reduction="sum"
            )
    return scale * loss


def make_step(
    family: str, dtype: torch.dtype, device: str
) -> tuple[nn.Module, Batch, TargetSignal]:
    """Make a head, a batch with one document per row, and the target's features."""
    torch.manual_seed(0)
    config = FAMILIES[family].target()
    target = Target(
        config=config,
        embed_VD=torch.randn(SIZES.vocabulary, SIZES.hidden).to(device, dtype),
        head_VD=(torch.randn(SIZES.vocabulary, SIZES.hidden) * SIZES.hidden**-0.5).to(
            device, dtype
        ),
    )
    head = FAMILIES[family].make(target).to(device, dtype)
    ids_BT = torch.randint(SIZES.vocabulary, (SIZES.batch, SIZES.length), device=device)
    batch = Batch.padded(list(ids_BT), device=device)
    hidden_BTD = (2 * torch.randn(*ids_BT.shape, SIZES.hidden)).to(device, dtype)
    aux_BTLD = torch.randn(*ids_BT.shape, len(head.aux_layer_ids), SIZES.hidden).to(device, dtype)
    distribution = ExactTarget(hidden_BTD=hidden_BTD, head_VD=target.head_VD)
    return head, batch, TargetSignal(distribution=distribution, aux_BTLD=aux_BTLD)


def make_llama() -> Any:
    """Make the config of a target with 8 layers. Of the layers, only the number is used."""
    config = SIZES.config(LlamaConfig)
    config.num_hidden_layers = 8
    return config


def make_mimo() -> Any:
    """Make the same config for an architecture with an MTP layer."""
    config = SIZES.config(Qwen2Config)
    config.num_hidden_layers = 8
    config.architectures = ["MiMoForCausalLM"]
    return config


# ------------------------------------------------------------------------------------------------------
# matrix products


def count_medusa() -> tuple[Matmul, ...]:
    """Count the logits, and a trained head and a block for each step."""
    hidden, steps = SIZES.hidden, SIZES.steps
    weights = Matmul(count=steps, rows=SIZES.vocabulary, inner=TOKENS, columns=hidden)
    return (*_count_logits(), weights, _product(count=3 * steps, inner=hidden, columns=hidden))


def count_recurrent(attention_input: int, mix: Matmul) -> tuple[Matmul, ...]:
    """Count the logits, the mix of features and embeddings, and one layer in every step."""
    hidden = SIZES.hidden
    # q has D columns, and k and v have D / 2 each, because 8 query heads share 4 KV heads.
    layer = [(attention_input, 2 * hidden), (hidden, hidden), (hidden, 2 * SIZES.intermediate)]
    layer += [(SIZES.intermediate, hidden)]
    # There are 3 products for each matrix of a layer: forward, and the gradients of input and
    # weights.
    return (
        *_count_logits(),
        mix,
        *(_product(count=3 * SIZES.steps, inner=i, columns=o) for i, o in layer),
    )


def count_peagle() -> tuple[Matmul, ...]:
    sizes = sizes_of("P-EAGLE")
    # Draft step k is trained on a share of 0.7^k of the rows, but at least 0.2.
    shares = [max(peagle.Config.keep_ratio**k, peagle.Config.min_share) for k in range(sizes.steps)]
    rows = round(TOKENS * sum(shares))
    # The first layer reads the embedding together with the feature.
    first = Matmul(
        count=3, rows=rows, inner=sizes.hidden, columns=sizes.hidden + _count_key_columns(sizes)
    )
    return _count_parallel(sizes, rows, rows, first)


def count_blocks(family: str) -> tuple[Matmul, ...]:
    """Count the products for DFlash or DSpark. DFlash proposes nothing in the anchor's slot."""
    sizes = sizes_of(family)
    blocks = sizes.batch * sizes.anchors
    keys = _product(
        count=3 * sizes.layers, inner=sizes.hidden, columns=_count_key_columns(sizes)
    )  # of the context
    return _count_parallel(sizes, blocks * sizes.steps, blocks * 8, keys)


def count_dspark() -> tuple[Matmul, ...]:
    """Count the products as for DFlash, and the products for the bias."""
    sizes = sizes_of("DSpark")
    proposed = sizes.batch * sizes.anchors * sizes.steps
    bias = Matmul(count=3, rows=proposed, inner=MARKOV_RANK, columns=sizes.vocabulary)
    return (*count_blocks("DSpark"), bias)


def _product(*, count: int, inner: int, columns: int) -> Matmul:
    return Matmul(count=count, rows=TOKENS, inner=inner, columns=columns)


def _count_logits() -> tuple[Matmul, ...]:
    """Count the target's logits once and the draft's in every step.

    The gradients of the hidden states, [T, V] @ [V, D], follow.
    """
    steps, hidden, vocabulary = SIZES.steps, SIZES.hidden, SIZES.vocabulary
    return (
        _product(count=1 + steps, inner=hidden, columns=vocabulary),
        _product(count=steps, inner=vocabulary, columns=hidden),
    )


def _count_key_columns(sizes: Sizes) -> int:
    return 2 * sizes.hidden * sizes.key_heads // sizes.heads


def _count_parallel(sizes: Sizes, proposed: int, rows: int, more: Matmul) -> tuple[Matmul, ...]:
    """Count the products of a draft that proposes all tokens in one pass."""
    hidden, of_rows = sizes.hidden, functools.partial(Matmul, count=3 * sizes.layers, rows=rows)
    return (
        _product(count=1, inner=hidden, columns=sizes.vocabulary),
        Matmul(count=2, rows=proposed, inner=hidden, columns=sizes.vocabulary),
        # The target's features need no gradient, so there is only the forward product and the
        # gradient of the weights.
        _product(count=2, inner=3 * hidden, columns=hidden),
        of_rows(inner=hidden, columns=2 * hidden),
        of_rows(inner=hidden, columns=2 * sizes.intermediate),
        of_rows(inner=hidden, columns=_count_key_columns(sizes)),
        of_rows(inner=sizes.intermediate, columns=hidden),
        more,
    )


# -------------------------------------------------------------------------------------------------------------
# families


@dataclass(frozen=True, kw_only=True)
class Benched:
    """A family whose whole step is timed."""

    make: Callable[[Target], Any]
    matmuls: Callable[[], tuple[Matmul, ...]]
    """Matrix products of a training step: the target's logits, every draft step's logits and
    gradients, and the head's layers.
    """
    aims: Mapping[str, float]
    """Required speed of redraft relative to each other side."""
    sizes: Sizes = SIZES
    target: Callable[[], Any] = make_llama


def _make_blocks(sizes: Sizes) -> dict[str, Any]:
    return {"num_layers": sizes.layers, "num_anchors": sizes.anchors, "gamma": 4.0, "block_size": 8}


FAMILIES = {
    "EAGLE-3": Benched(
        make=lambda target: eagle3.Eagle3(
            eagle3.Config(num_steps=SIZES.steps, own_head=False), target
        ),
        matmuls=lambda: count_recurrent(
            2 * SIZES.hidden, _product(count=2, inner=3 * SIZES.hidden, columns=SIZES.hidden)
        ),
        aims={"speculators, compiled": 2.5, "ModelOpt, compiled": 2.0},
    ),
    "DFlash": Benched(
        make=lambda target: dflash.DFlash(dflash.Config(**_make_blocks(BLOCK_SIZES)), target),
        matmuls=lambda: count_blocks("DFlash"),
        aims={"speculators": 2.0},
        sizes=dataclasses.replace(BLOCK_SIZES, steps=7),
    ),
    "DSpark": Benched(
        make=lambda target: dspark.DSpark(
            dspark.Config(**_make_blocks(BLOCK_SIZES), markov_rank=MARKOV_RANK), target
        ),
        matmuls=count_dspark,
        aims={"speculators": 2.0},
        sizes=dataclasses.replace(BLOCK_SIZES, steps=8),
    ),
    "P-EAGLE": Benched(
        make=lambda target: peagle.PEagle(
            peagle.Config(num_layers=2, num_steps=8, own_head=False), target
        ),
        matmuls=count_peagle,
        aims={"speculators": 2.0},
        sizes=dataclasses.replace(SIZES, layers=2, steps=8),
    ),
    "Medusa": Benched(
        make=lambda target: medusa.Medusa(medusa.Config(num_heads=SIZES.steps), target),
        matmuls=count_medusa,
        aims={"ModelOpt, compiled": 2.0},
    ),
    "MTP": Benched(
        make=lambda target: mtp.Mtp(mtp.Config(num_steps=SIZES.steps), target),
        matmuls=lambda: count_recurrent(
            SIZES.hidden,
            _product(count=3 * SIZES.steps, inner=2 * SIZES.hidden, columns=SIZES.hidden),
        ),
        aims={"speculators, compiled": 2.0},
        target=make_mimo,
    ),
}
