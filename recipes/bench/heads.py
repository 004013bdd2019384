"""Cases of `bench-training`: a whole training step of a head (forward, backward, AdamW) on given target features.

B = batch, T = tokens, D = hidden, V = vocabulary, L = aux layers, M = labelled rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen2Config

from redraft.distill.loss.divergences import Divergence, forward_kl, log_probs
from redraft.distill.train.step import DistillStep
from redraft.heads.draft import Batch, ExactTarget, TargetSignal
from redraft.heads.families import eagle3, medusa, mtp
from redraft.heads.target import Target
from redraft.recipes.bench.losses import NAIVE
from redraft.recipes.bench.measure import DTYPES, OURS, Case, DtypeName, Matmul, Required, Run
from redraft.recipes.bench.peers import PEERS, Sizes

SIZES = Sizes(batch=2, length=512, hidden=512, intermediate=1408, vocabulary=32_768, heads=8, key_heads=4, steps=3)
TOKENS = SIZES.batch * SIZES.length

AIM = {"EAGLE-3": ("ModelOpt", 1.97), "Medusa": ("ModelOpt", 2.5), "MTP": ("speculators", 2.5)}
"""By family: the fastest other trainer, and the required ratio of our speed to its speed."""


def head_cases() -> list[Case]:
    return [head_case(family, dtype) for family in FAMILIES for dtype in DTYPES]


def head_case(family: str, dtype: DtypeName) -> Case:
    """The case of one family, with all weights in `dtype`."""
    peers = PEERS[family]
    absent = [peer for peer in peers.values() if not peer.is_installed]
    measured = {name: peer for name, peer in peers.items() if peer.can_run}
    best, ratio = AIM[family]
    return Case(
        name=f"{family}, {SIZES.steps} steps, vocabulary 32k, {dtype}",
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
        return PEERS[family][side].build(SIZES, getattr(torch, dtype), device)
    head, batch, signal = make_step(family, getattr(torch, dtype), device)
    module = DistillStep(head, Divergence())
    trained = [p for p in head.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    scale = 1 / (SIZES.batch * (SIZES.length - 1))

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
        q_logits_MV = step.logits(rows_M)
        loss = (
            loss + step.weight * forward_kl(log_probs(p_logits_NV[rows_M + step.shift]), log_probs(q_logits_MV)).sum()
        )
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
    "Medusa": lambda target: medusa.Medusa(medusa.Config(num_heads=SIZES.steps), target),
    "MTP": lambda target: mtp.Mtp(mtp.Config(num_steps=SIZES.steps), target),
}


def head_matmuls(family: str) -> tuple[Matmul, ...]:
    """The matmuls of a step: the target's logits, every step's logits and gradients, and the head's layers."""
    product, hidden, steps = functools.partial(Matmul, rows=TOKENS), SIZES.hidden, SIZES.steps
    logits = (
        product(count=1 + steps, inner=hidden, columns=SIZES.vocabulary),
        product(count=steps, inner=SIZES.vocabulary, columns=hidden),
    )
    if family == "Medusa":  # each step has a trained head, whose gradient is another product
        weights = Matmul(count=steps, rows=SIZES.vocabulary, inner=TOKENS, columns=hidden)
        return (*logits, weights, product(count=3 * steps, inner=hidden, columns=hidden))
    attention_input = 2 * hidden if family == "EAGLE-3" else hidden
    layer = [(attention_input, 2 * hidden), (hidden, hidden), (hidden, 2 * SIZES.intermediate)]
    layer += [(SIZES.intermediate, hidden)]
    mixes = product(count=3, inner=3 * hidden, columns=hidden)
    if family == "MTP":
        mixes = product(count=3 * steps, inner=2 * hidden, columns=hidden)
    return (*logits, mixes, *(product(count=3 * steps, inner=i, columns=o) for i, o in layer))
