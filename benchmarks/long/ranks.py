"""Compare ranks that share rows with a single process, in float64 over gloo.

    python -m benchmarks.long.ranks 4 eagle3 dflash

For each case, the module prints as JSON the largest relative difference among the loss, every
gradient and the metrics. `eagle3+again` recomputes activations in the backward pass.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from transformers import LlamaConfig, LlamaForCausalLM

from redraft.distill.loss.choice import Divergence
from redraft.distill.signal.sources import InProcessTarget
from redraft.distill.train.step import DistillStep
from redraft.engine.process import free_port
from redraft.heads.draft import Batch
from redraft.heads.families import dflash, dspark, eagle1, eagle3, medusa
from redraft.heads.nn.shares import share_rows
from redraft.heads.target import Target

VOCABULARY, NUM_TOKENS = 96, 3
AUX, WINDOW = (1, 2, 4), 7
DRAFT_IDS = torch.arange(0, VOCABULARY, 3)
BLOCKS: dict[str, Any] = {
    "aux_layer_ids": AUX,
    "num_layers": 3,
    "block_size": 4,
    "mask_token_id": VOCABULARY - 1,
}

CASES: dict[str, Callable[[Target], nn.Module]] = {
    "eagle3": lambda target: eagle3.Eagle3(
        eagle3.Config(aux_layer_ids=AUX, num_steps=3), target, DRAFT_IDS
    ),
    "eagle3-window": lambda target: eagle3.Eagle3(
        eagle3.Config(
            aux_layer_ids=AUX, num_steps=3, num_layers=2, window=WINDOW, full_layers=(1,)
        ),
        target,
    ),
    "dflash": lambda target: dflash.DFlash(
        dflash.Config(**BLOCKS, num_anchors=512), target, DRAFT_IDS
    ),
    "dflash-window": lambda target: dflash.DFlash(
        dflash.Config(**BLOCKS, num_anchors=9, window=WINDOW, full_layers=(1,)), target
    ),
    "dspark": lambda target: dspark.DSpark(
        dspark.Config(**BLOCKS, num_anchors=9, markov_rank=8), target, DRAFT_IDS
    ),
    "eagle1": lambda target: eagle1.Eagle1(eagle1.Config(num_steps=3), target),
    "medusa": lambda target: medusa.Medusa(medusa.Config(num_heads=3), target),
}

DOCUMENTS = ((41, 5, 18), (9, 30, 11))
"""Document lengths in tokens, for each of two rows. The second row ends with padding."""
WIDTH = 64


def make_target() -> LlamaForCausalLM:
    """Make a random target in float64, with weights large enough that its tokens differ."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.15,
    )
    return LlamaForCausalLM(config).double().eval()


def make_draft(case: str, target: Target) -> Any:
    """Make an untrained draft whose parameters are all nonzero and differ from the target's."""
    name, _, again = case.partition("+")
    draft: Any = CASES[name](target).double()
    for parameter in draft.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    if again:
        draft.recomputes = True
    return draft


def make_rows() -> Batch:
    rows = [
        [(torch.randint(0, VOCABULARY, (n,)), torch.arange(n) >= 3) for n in row]
        for row in DOCUMENTS
    ]
    return Batch.packed(rows, width=WIDTH)


def compute(draft: Any, target: InProcessTarget, batch: Batch) -> dict[str, Tensor]:
    """Compute the loss, the gradients and the metrics of the rows on this rank."""
    step = DistillStep(draft, Divergence(name="forward_kl"))
    signal = target(batch)
    draft.zero_grad()
    loss, sums_S3 = step(batch, signal, scale=torch.tensor(0.01, dtype=torch.float64))
    loss.backward()
    found = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    with torch.no_grad():
        (metrics,) = step(batch, signal, num_speculative_tokens=NUM_TOKENS)
    return {**found, "loss": loss.detach(), "sums": sums_S3, "metrics": metrics}


def compare(case: str) -> float:
    """Return the largest relative difference, or 0 on all ranks but the first.

    All ranks must call this function.
    """
    torch.manual_seed(0)
    model = make_target()
    draft, batch = make_draft(case, Target.from_model(model)), make_rows()
    target = InProcessTarget(model, draft.aux_layer_ids)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    here = share_rows(batch, rank, ranks, draft.config.num_tokens + 1, dist.group.WORLD)
    ours = compute(draft, target, here)
    for value in ours.values():
        dist.all_reduce(value)
    if rank:
        return 0.0
    one = compute(draft, target, batch)
    assert one.keys() == ours.keys()
    assert all(bool(value.any()) for value in one.values()), "every number matters"
    differences = [
        (ours[key] - value).abs().max() / value.abs().max() for key, value in one.items()
    ]
    return float(torch.stack(differences).max())


def run(rank: int, ranks: int, port: int, cases: list[str]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found = {case: compare(case) for case in cases}
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    count, *names = sys.argv[1:]
    torch.set_num_threads(1)
    # Ranks are forked, so that they need not import PyTorch again.
    start_processes(  # type: ignore[no-untyped-call]
        run, (int(count), free_port(), names), int(count), start_method="fork"
    )
