"""Cases of `bench-training`: a whole training step of a head (forward, backward, AdamW) on given target features.

B = batch, T = tokens, D = hidden, V = vocabulary, L = aux layers, M = labelled rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen2Config

from redraft.distill.loss.divergences import Divergence, forward_kl, log_probs
from redraft.distill.train.step import DistillStep
from redraft.heads.draft import Batch, ExactTarget, TargetSignal
from redraft.heads.families import dflash, dspark, eagle3, medusa, mtp, peagle
from redraft.heads.target import Target
from redraft.recipes.bench.losses import NAIVE
from redraft.recipes.bench.measure import DTYPES, OURS, Case, DtypeName, Matmul, Required, Run
from redraft.recipes.bench.peers import PEERS, Sizes

SIZES = Sizes(batch=2, length=512, hidden=512, intermediate=1408, vocabulary=32_768, heads=8, key_heads=4, steps=3)
TOKENS = SIZES.batch * SIZES.length

FURTHER_SIZES = {
    "DFlash": {"steps": 7, "layers": 2, "anchors": 128},
    "DSpark": {"steps": 8, "layers": 2, "anchors": 128},
    "P-EAGLE": {"steps": 8, "layers": 2},
}
"""Sizes of drafts that propose all tokens in one pass. Blocks have eight slots."""

MARKOV_RANK = 256

AIM = {
    "EAGLE-3": ("ModelOpt", 1.97),
    "Medusa": ("ModelOpt", 2.5),
    "MTP": ("speculators", 2.5),
    "DFlash": ("speculators", 2.0),
    "DSpark": ("speculators", 2.0),
    "P-EAGLE": ("speculators", 2.0),
}
"""By family: the fastest other trainer, and the required ratio of our speed to its speed."""


def sizes_of(family: str) -> Sizes:
    return dataclasses.replace(SIZES, **FURTHER_SIZES.get(family, {}))


def head_cases() -> list[Case]:
    return [head_case(family, dtype) for family in FAMILIES for dtype in DTYPES]


def head_case(family: str, dtype: DtypeName) -> Case:
    """The case of one family, with all weights in `dtype`."""
    peers = PEERS[family]
    absent = [peer for peer in peers.values() if not peer.is_installed]
    measured = {name: peer for name, peer in peers.items() if peer.can_run}
    best, ratio = AIM[family]
    return Case(
        name=f"{family}, {sizes_of(family).steps} steps, vocabulary 32k, {dtype}",
        against={
            NAIVE: "the same head, each step's logits in full, autograd",
            **{name: peer.description for name, peer in measured.items()},
        },
        tokens=TOKENS,
        dtype=dtype,
        matmuls=head_matmuls(family),
        build=functools.partial(build_head, family, dtype),
        required={NAIVE: Required(memory=0.5), best: Required(speed=ratio, memory=0.5)},
        compiled=frozenset(name for name, peer in peers.items() if peer.is_compiled),
        note="; ".join(f"not installed here, recorded: {peer.recorded}" for peer in absent),
    )


def build_head(family: str, dtype: DtypeName, side: str, device: str) -> Run:
    """A training step on random features: ours, the naive one, or another trainer's."""
    if side in PEERS[family]:
        return PEERS[family][side].build(sizes_of(family), getattr(torch, dtype), device)
    head, batch, signal = make_step(family, getattr(torch, dtype), device)
    module = DistillStep(head, Divergence())
    trained = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    sizes = sizes_of(family)
    # About one over the labels. It only has to be the same for both sides, for the losses to compare.
    scale = 1 / (sizes.batch * (sizes.anchors * sizes.steps or sizes.length - 1))

    def run() -> Tensor:
        optimizer.zero_grad()
        loss = module(batch, signal, scale=scale)[0] if side == OURS else naive_loss(head, batch, signal, scale)
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return run


def naive_loss(head: Any, batch: Batch, signal: TargetSignal, scale: float) -> Tensor:
    """The same loss as `distill_loss`, but holding the [tokens, vocabulary] logits of the target and every step."""
    distribution = signal.distribution
    assert isinstance(distribution, ExactTarget)
    p_logits_NV = (distribution.hidden_BTD @ distribution.head_VD.T).flatten(0, 1)
    loss = p_logits_NV.new_zeros((), dtype=torch.float32)
    for step in head.draft_steps(batch, signal):
        rows_M = step.mask_BT.flatten().nonzero().squeeze(1)
        log_p_MV, log_q_MV = log_probs(p_logits_NV[rows_M + step.shift]), log_probs(step.logits(rows_M))
        loss = loss + step.weight * forward_kl(log_p_MV, log_q_MV).sum()
        if step.confidence_BT is not None:
            alpha_M = torch.minimum(log_p_MV, log_q_MV).detach().exp().sum(-1).clamp(max=1)
            sure_M = step.confidence_BT.flatten()[rows_M]
            loss = loss + step.weight * F.binary_cross_entropy_with_logits(sure_M, alpha_M, reduction="sum")
    return scale * loss


def make_step(family: str, dtype: torch.dtype, device: str) -> tuple[nn.Module, Batch, TargetSignal]:
    """A head, a batch with one document per row, and the target's features."""
    torch.manual_seed(0)
    config = target_config(family)
    target = Target(
        config=config,
        embed_VD=torch.randn(SIZES.vocabulary, SIZES.hidden).to(device, dtype),
        head_VD=(torch.randn(SIZES.vocabulary, SIZES.hidden) * SIZES.hidden**-0.5).to(device, dtype),
    )
    head = FAMILIES[family](target).to(device, dtype)
    ids_BT = torch.randint(SIZES.vocabulary, (SIZES.batch, SIZES.length), device=device)
    batch = Batch.padded(list(ids_BT), device=device)
    hidden_BTD = (2 * torch.randn(*ids_BT.shape, SIZES.hidden)).to(device, dtype)
    aux_BTLD = torch.randn(*ids_BT.shape, len(head.aux_layer_ids), SIZES.hidden).to(device, dtype)
    distribution = ExactTarget(hidden_BTD=hidden_BTD, head_VD=target.head_VD)
    return head, batch, TargetSignal(distribution=distribution, aux_BTLD=aux_BTLD)


def target_config(family: str) -> Any:
    """Configuration of a target with 8 layers. Only their number is used."""
    config = SIZES.config(Qwen2Config if family == "MTP" else LlamaConfig)
    config.num_hidden_layers = 8
    if family == "MTP":
        config.architectures = ["MiMoForCausalLM"]
    return config


FAMILIES: dict[str, Callable[[Target], Any]] = {
    "EAGLE-3": lambda target: eagle3.Eagle3(eagle3.Config(num_steps=SIZES.steps, own_head=False), target),
    "DFlash": lambda target: dflash.DFlash(dflash.Config(**_block_options("DFlash"), block_size=8), target),
    "DSpark": lambda target: dspark.DSpark(
        dspark.Config(**_block_options("DSpark"), block_size=8, markov_rank=MARKOV_RANK), target
    ),
    "P-EAGLE": lambda target: peagle.PEagle(
        peagle.Config(num_layers=sizes_of("P-EAGLE").layers, num_steps=sizes_of("P-EAGLE").steps, own_head=False),
        target,
    ),
    "Medusa": lambda target: medusa.Medusa(medusa.Config(num_heads=SIZES.steps), target),
    "MTP": lambda target: mtp.Mtp(mtp.Config(num_steps=SIZES.steps), target),
}


def _block_options(family: str) -> dict[str, Any]:
    sizes = sizes_of(family)
    return {"num_layers": sizes.layers, "num_anchors": sizes.anchors, "gamma": 4.0}


def head_matmuls(family: str) -> tuple[Matmul, ...]:
    """The matmuls of a step: the target's logits, every step's logits and gradients, and the head's layers."""
    if family in FURTHER_SIZES:
        return _parallel_matmuls(family)
    product, hidden, steps = functools.partial(Matmul, rows=TOKENS), SIZES.hidden, SIZES.steps
    logits = (
        # Logits: the target's once, the draft's in every step.
        product(count=1 + steps, inner=hidden, columns=SIZES.vocabulary),
        # The gradient of each step's hidden states: [T, V] @ [V, D].
        product(count=steps, inner=SIZES.vocabulary, columns=hidden),
    )
    if family == "Medusa":  # each step has a trained head, whose gradient is another product
        weights = Matmul(count=steps, rows=SIZES.vocabulary, inner=TOKENS, columns=hidden)
        return (*logits, weights, product(count=3 * steps, inner=hidden, columns=hidden))
    attention_input = 2 * hidden if family == "EAGLE-3" else hidden
    # q has D columns, k and v have D / 2 each: 8 heads share 4 pairs of keys and values.
    layer = [(attention_input, 2 * hidden), (hidden, hidden), (hidden, 2 * SIZES.intermediate)]
    layer += [(SIZES.intermediate, hidden)]
    # The target's features need no gradient: forward, and the gradient of the weights.
    mixes = product(count=2, inner=3 * hidden, columns=hidden)
    if family == "MTP":
        mixes = product(count=3 * steps, inner=2 * hidden, columns=hidden)
    # 3 products for each matrix of a layer: forward, and the gradients of input and weights.
    return (*logits, mixes, *(product(count=3 * steps, inner=i, columns=o) for i, o in layer))


def _parallel_matmuls(family: str) -> tuple[Matmul, ...]:
    """`head_matmuls` of a draft that proposes all tokens in one pass."""
    sizes, product = sizes_of(family), functools.partial(Matmul, rows=TOKENS)
    hidden, keys = sizes.hidden, 2 * sizes.hidden * sizes.key_heads // sizes.heads
    blocks = sizes.batch * sizes.anchors
    if family == "P-EAGLE":
        # Draft step k is trained on a share of the rows: 0.7^k, and 0.2 at least.
        shares = [max(peagle.Config.keep_ratio**k, peagle.Config.min_share) for k in range(sizes.steps)]
        proposed = rows = round(TOKENS * sum(shares))
    else:
        # DFlash proposes nothing in the anchor's slot
        proposed, rows = blocks * sizes.steps, blocks * 8
    own = functools.partial(Matmul, count=3 * sizes.layers, rows=rows)
    layers = [own(inner=hidden, columns=2 * hidden), own(inner=hidden, columns=2 * sizes.intermediate)]
    layers += [own(inner=hidden, columns=keys), own(inner=sizes.intermediate, columns=hidden)]
    if family == "P-EAGLE":  # the first layer reads the embedding beside the feature
        layers.append(Matmul(count=3, rows=rows, inner=hidden, columns=hidden + keys))
    else:  # keys and values of the context
        layers.append(product(count=3 * sizes.layers, inner=hidden, columns=keys))
    if family == "DSpark":  # the bias, whose head is trained
        layers.append(Matmul(count=3, rows=proposed, inner=MARKOV_RANK, columns=sizes.vocabulary))
    return (
        product(count=1, inner=hidden, columns=sizes.vocabulary),
        Matmul(count=2, rows=proposed, inner=hidden, columns=sizes.vocabulary),
        product(count=2, inner=3 * hidden, columns=hidden),
        *layers,
    )
