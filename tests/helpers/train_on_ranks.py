"""Trains a small draft of each family on the ranks of this launch and writes what came of it.

python train_on_ranks.py OUTPUT FAMILY... [--steps 8] [--optimizer adamw|sgd] [--save-at N]
[--resume] [--poison-at N]

Four rows of unequal length a step, one of them without a label, dealt to the ranks in turn.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
from make_heads import VOCAB, make_batch, make_ids, make_signal, make_target, take_rows
from make_native import make_native_target
from steady import SteadyAdamW
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from redraft.distill.launch.ranks import describe_layout, leave
from redraft.distill.loss.choice import Divergence
from redraft.distill.train.loop import make_accelerator
from redraft.distill.train.muon import Muon
from redraft.distill.train.optim import Optim
from redraft.distill.train.step import Distillation
from redraft.heads.draft import Batch, ExactTarget, TargetSignal
from redraft.heads.families import (
    dflash,
    dspark,
    eagle1,
    eagle3,
    medusa,
    mtp,
    peagle,
)
from redraft.heads.families.standalone import StandaloneDraft
from redraft.heads.target import Target

torch.set_num_threads(1)

EVERY_THIRD = torch.arange(0, VOCAB, 3)


def make_standalone(target: Any, **options: Any) -> nn.Module:
    return StandaloneDraft(make_target(seed=5, num_hidden_layers=2, **options))


FAMILIES: dict[str, Callable[[Any], nn.Module]] = {
    "standalone": make_standalone,
    "tied": lambda target: make_standalone(target, tie_word_embeddings=True),
    "eagle1": lambda target: eagle1.Eagle1(eagle1.Config(num_steps=2), Target.from_model(target)),
    "eagle3": lambda target: eagle3.Eagle3(
        eagle3.Config(aux_layer_ids=(1, 2, 4), num_steps=3), Target.from_model(target), EVERY_THIRD
    ),
    "dflash": lambda target: dflash.DFlash(
        dflash.Config(
            aux_layer_ids=(1, 2, 4),
            num_layers=2,
            block_size=4,
            num_anchors=8,
            mask_token_id=VOCAB - 1,
        ),
        Target.from_model(target),
    ),
    "dspark": lambda target: dspark.DSpark(
        dspark.Config(
            aux_layer_ids=(1, 2, 4),
            num_layers=2,
            block_size=3,
            num_anchors=8,
            mask_token_id=VOCAB - 1,
            markov_rank=8,
        ),
        Target.from_model(target),
        EVERY_THIRD,
    ),
    "peagle": lambda target: peagle.PEagle(
        peagle.Config(aux_layer_ids=(1, 2, 4), num_layers=2, num_steps=3, mask_token_id=VOCAB - 1),
        Target.from_model(target),
        EVERY_THIRD,
    ),
    "medusa": lambda target: medusa.Medusa(medusa.Config(), Target.from_model(target)),
    "mtp": lambda target: mtp.Mtp(mtp.Config(), Target.from_model(target)),
    "mtp-moe": lambda target: mtp.Mtp(mtp.Config(), Target.from_model(target)),
}


def make_family_target(name: str) -> Any:
    if not name.startswith("mtp"):
        return make_target()
    with tempfile.TemporaryDirectory() as folder:
        return make_native_target("qwen3_next" if name == "mtp-moe" else "mimo", Path(folder))


class Descent(torch.optim.SGD):
    """The gradient itself, which AdamW would hide by its size."""

    def __init__(self, parameters: Any, lr: float, **_: Any) -> None:
        super().__init__(parameters, lr=lr)


def rows_of(step: int, times: int = 1) -> Batch:
    lengths = (
        24,
        1 + step % 3 * 5,
        15,
        2 + step % 3 * 4,
    ) * times  # at step 0 the second of two ranks has no label
    return make_batch(
        [[make_ids(length, seed=10 * step + row)] for row, length in enumerate(lengths)],
        loss_from=3,
    )


def micro_batches(
    step: int, rank: int, ranks: int, accumulation: int, times: int = 1
) -> list[Batch]:
    whole, parts = rows_of(step, times), ranks * accumulation
    return [take_rows(whole, slice(part, None, parts)) for part in range(rank, parts, ranks)]


def train_family(name: str, target: Any, cfg: argparse.Namespace) -> dict[str, Any]:
    accelerator = make_accelerator(cfg.accumulation, None, None)
    if (
        accelerator.distributed_type == DistributedType.DEEPSPEED
    ):  # or ZeRO-3 would let go of no parameter this small
        zero = accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
        zero["stage3_param_persistence_threshold"] = 0
    torch.manual_seed(1)
    draft: Any = FAMILIES[name](target)
    aux = getattr(draft, "aux_layer_ids", ())
    poisoned: list[Batch] = []
    distillation = Distillation(
        draft,
        lambda batch: poison(
            make_signal(target, batch, aux), is_wanted=any(batch is one for one in poisoned)
        ),
        Divergence(name="forward_kl"),
        Optim(
            name="muon" if cfg.optimizer == "muon" else "adamw",
            lr=cfg.lr,
            accumulation=cfg.accumulation,
            warmup_fraction=0.0,
        ),
        8,
        accelerator,
    )
    for optimizer in distillation.optimizers:
        muon = getattr(optimizer, "optimizer", None)
        if isinstance(muon, Muon):
            muon.dtype = torch.float32  # its default is bfloat16 on some processors
    checkpoint = cfg.output / f"{name}.checkpoint"
    if cfg.resume:
        distillation.resume(checkpoint)
    stats = []
    for step in range(distillation.step_index, cfg.steps):
        rank, ranks = accelerator.process_index, accelerator.num_processes
        batches = micro_batches(step, rank, ranks, cfg.accumulation)
        if step == cfg.poison_at and rank == 0:
            poisoned.append(batches[-1])
        stats.append(distillation.step(batches))
        if step + 1 == cfg.save_at:
            distillation.save(checkpoint)
    judged = micro_batches(99, accelerator.process_index, accelerator.num_processes, 1, cfg.judged)
    metrics = distillation.evaluate(judged, 2)
    weights = {key: tensor.clone() for key, tensor in distillation.weights().items()}
    distillation.close()
    return {
        "weights": weights,
        "loss": [s.loss for s in stats],
        "labels": [s.labels for s in stats],
        "grad_norm": [s.grad_norm for s in stats],
        "skipped": [s.skipped for s in stats],
        "tau": metrics.tau,
        "num_rows": metrics.num_rows,
        "layout": describe_layout(accelerator),
        "offloads": offloads(accelerator),
    }


def poison(signal: TargetSignal, *, is_wanted: bool) -> TargetSignal:
    """The signal, if it is wanted with a distribution that is not a number."""
    if not is_wanted:
        return signal
    assert isinstance(signal.distribution, ExactTarget)
    hidden_BTD = torch.full_like(signal.distribution.hidden_BTD, torch.nan)
    return replace(signal, distribution=replace(signal.distribution, hidden_BTD=hidden_BTD))


def offloads(accelerator: Accelerator) -> bool:
    """Optimizer, and what of the parameters is sharded, wait in the memory of the CPU."""
    if accelerator.distributed_type == DistributedType.FSDP:
        return isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        zero = accelerator.deepspeed_plugin.deepspeed_config["zero_optimization"]
        parts = ["offload_optimizer", *["offload_param"] * (zero["stage"] == 3)]
        return all(zero.get(part, {}).get("device") == "cpu" for part in parts)
    return False


def parse(args: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("families", nargs="+")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--optimizer", choices=["adamw", "muon", "sgd"], default="adamw")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--save-at", type=int)
    parser.add_argument(
        "--poison-at", type=int, help="step whose last micro-batch has a loss that is not a number"
    )
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--judged", type=int, default=1, help="held-out rows, in fours")
    return parser.parse_args(args)


def main(cfg: argparse.Namespace) -> None:
    cfg.output.mkdir(exist_ok=True)
    torch.optim.AdamW = Descent if cfg.optimizer == "sgd" else SteadyAdamW
    targets = {
        name: make_family_target(name) for name in cfg.families
    }  # before there are ranks, of which one saves
    for name, target in targets.items():
        result = train_family(name, target, cfg)
        if PartialState().is_main_process:
            torch.save(result, cfg.output / f"{name}.pt")
    leave(make_accelerator(cfg.accumulation, None, None))


if __name__ == "__main__":
    main(parse())
