"""The command that counts a training's activations: the flags of a run as those of `redraft plan train`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from redraft.distill.run.config import make_config
from redraft.heads.catalog import find_family
from redraft.heads.files.target_folder import TargetFolder

NUM_STEPS = {"dflash": "block_size", "dspark": "block_size", "medusa": "num_heads", "mlp_speculator": "num_stages"}
"""The option of a family that says how many tokens it learns, if not `num_steps`."""


def count_command(family: str, cfg: Any, target: TargetFolder, accelerator: Accelerator) -> str:
    """The command that counts a step of the training with the config `cfg`, of the command that trains `family`."""
    flags = [*_target(target), *_draft(family, cfg), *_launch(family, cfg, accelerator)]
    return shlex.join(["redraft", "plan", "train", *flags])


def _target(target: TargetFolder) -> Iterator[str]:
    yield from ("--target", target.name)
    # None stands for the type of the files. The command counts one of two bytes, unless told of four.
    if (target.torch_dtype or target.config.dtype or torch.float32) == torch.float32:
        yield from ("--target-dtype", "float32")


def _draft(family: str, cfg: Any) -> Iterator[str]:
    """Sizes, loss, optimizer and rows."""
    usual: Any = make_config(find_family(family))
    yield from ("--family", family)
    yield from _sizes_of_standalone(cfg) if family == "standalone" else _sizes_of_head(family, cfg, usual)
    if changed := _changed(cfg.divergence, usual.divergence):
        yield from ("--divergence", json.dumps(changed))
    if cfg.optim.name != "adamw":
        yield from ("--optimizer", cfg.optim.name)
    yield from ("--batch-size", str(cfg.loop.batch_size), "--sequence-length", str(cfg.loop.sequence_length))


def _sizes_of_standalone(cfg: Any) -> Iterator[str]:
    init = cfg.draft
    given = {key: value for key, value in asdict(init).items() if value}
    yield from ("--draft", json.dumps(given) if init.layers or init.num_layers else init.checkpoint)
    if cfg.gradient_checkpointing:
        yield "--gradient-checkpointing"


def _sizes_of_head(family: str, cfg: Any, usual: Any) -> Iterator[str]:
    steps = NUM_STEPS.get(family, "num_steps")
    yield from ("--num-steps", str(getattr(cfg.head, steps)))
    if usual.draft_vocab_size:
        yield from ("--draft-vocab-size", str(cfg.draft_vocab_size))
    if getattr(cfg.head, "recompute", False):
        yield "--gradient-checkpointing"
    if changed := _changed(cfg.head, usual.head, steps, "recompute"):
        yield from ("--head", json.dumps(changed))


def _launch(family: str, cfg: Any, accelerator: Accelerator) -> Iterator[str]:
    """Precision, the place of the target, and what the processes share out."""
    ranks = accelerator.num_processes
    if accelerator.mixed_precision == "no":
        yield from ("--precision", "no")
    if cfg.signal.url:
        # Also for servers: with `served` the command would give some of the devices to the target.
        yield from ("--features", "cached")
        if cfg.signal.exact and family == "standalone":
            yield "--exact"
    if ranks == 1:
        return
    yield from ("--devices", str(ranks))
    if cfg.signal.shard:
        yield "--shard-target"
    if accelerator.distributed_type == DistributedType.FSDP:
        yield from ("--sharding", "fsdp2")
    elif accelerator.distributed_type == DistributedType.DEEPSPEED:
        yield from ("--sharding", "fsdp2" if accelerator.deepspeed_plugin.zero_stage == 3 else "zero2")


def _changed(options: Any, usual: Any, *beside: str) -> dict[str, Any]:
    """The options that differ from the command's, but for those that have a flag of their own."""
    before = asdict(usual)
    return {key: value for key, value in asdict(options).items() if value != before[key] and key not in beside}
