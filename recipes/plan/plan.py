"""Count what a training run will cost on H100, H200, B200 and MI300X.

Nothing runs before, and no GPU is needed.

$ redraft plan --target llama-3.1-8b --family eagle3        # does it fit?
$ redraft plan --target llama-3.3-70b --signal endpoint --devices 8 --tokens 1e9     # steps on 8 GPUs
$ redraft plan fleet --help; redraft plan capture --help    # learning from traffic

Every operation and byte is counted, on tensors of real sizes without memory. Nothing is timed.
Nothing is downloaded for the models that are known by name. Flags of `redraft train` lose the group
here: --batch-size is --loop.batch-size; --signal and --optim are --signal.kind and --optim.name.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from redraft.distill.plan.choices import ShardingKind, SignalKind
from redraft.distill.train.run_config import require_least
from redraft.engine.target_dtype import TargetDtype
from redraft.files.artifact import write_whole
from redraft.heads.catalog import FamilyName, find_family


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    target: str | None = None
    """Sizes of the target: a folder, a config.json, a hub name, or one of llama-3.2-1b,
    llama-3.2-3b, llama-3.1-8b, llama-3.3-70b, qwen3-0.6b, qwen3-8b, qwen3-32b, qwen3-30b-a3b,
    mimo-7b. By default llama-3.1-8b, but mimo-7b for MTP, because Llama models have no MTP
    layer.
    """
    family: FamilyName = "eagle3"
    """Draft to train. Options, divergence and batch are the defaults of the command, unless given
    here.
    """
    checkpoint: str = "llama-3.2-3b"
    """Sizes of a standalone draft (--draft.checkpoint), named as --target."""
    optim: Literal["adamw", "muon"] | None = None
    """Optimizer of the draft; by default that of the family's command."""
    target_dtype: TargetDtype = "bfloat16"
    """Type of the target's weights and states."""
    signal: SignalKind = "model"
    """Place of the target: `model` in the training process, `endpoint` on other GPUs, or `cache` on
    disk before training.
    """
    batch_size: int | None = None
    """Rows of a step on each device; by default those of the family's command."""
    sequence_length: int | None = None
    """Tokens of a row; by default those of the family's command."""
    exact: bool = False
    """For a standalone draft with --signal endpoint or cache: hidden states, which give the exact
    distribution, instead of the top k.
    """
    documents: int = 2
    """Conversations packed into each row. Attention stays within each."""
    num_steps: int | None = None
    """Draft steps trained at once: steps, heads, stages, or slots of a block."""
    draft_vocab_size: int | None = None
    """Size of the draft's vocabulary, for families that reduce it; 0 keeps the target's."""
    mixed_precision: Literal["bf16", "no"] = "bf16"
    """Mixed precision of training. The draft's weights are in float32 either way."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, as the flag of `redraft train` does."""
    devices: int = 1
    """GPUs of the whole training."""
    sharding: ShardingKind = "none"
    """Shared out over the devices: zero2 the optimizer's state and the gradients, fsdp2 the weights
    too.
    """
    shard: bool = False
    """Share the layers of a target in this process out too."""
    tokens: float | None = None
    """Total number of training tokens, e.g. 1e9, to print the number of steps."""
    json: Path | None = None
    """File that receives the numbers of the tables as JSON."""

    def __post_init__(self) -> None:
        require_least(
            self, devices=1, batch_size=1, sequence_length=2, num_steps=1, draft_vocab_size=0
        )
        if self.tokens is not None and not 0 < self.tokens < math.inf:
            raise ValueError(
                f"--tokens is {self.tokens:g}: give the number of training tokens, e.g. 1e9"
            )
        if self.sharding != "none" and self.devices == 1:
            raise ValueError(f"--sharding {self.sharding} needs several devices: set --devices")
        if self.exact and (self.signal == "model" or find_family(self.family).is_head):
            raise ValueError(
                "--exact applies only to a standalone draft with --signal endpoint or cache: all others are "
                "exact"
            )
        if self.shard and (self.devices == 1 or self.signal != "model"):
            raise ValueError("--shard needs several devices and --signal model")

    @property
    def target_name(self) -> str:
        return self.target or ("mimo-7b" if self.family == "mtp" else "llama-3.1-8b")


def main(cfg: PlanConfig) -> None:
    from redraft.recipes.plan.count import report  # here, because it imports torch

    lines, numbers = report(cfg)
    print(*lines, sep="\n")
    if cfg.json is not None:
        write_whole(cfg.json, json.dumps(numbers, indent=2) + "\n")
