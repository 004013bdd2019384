"""Calculate the memory and compute of a training run on H100, H200, B200 and MI300X.

The command trains nothing and needs no GPU.

$ redraft plan --target llama-3.1-8b --family eagle3        # does it fit?
$ redraft plan --target llama-3.3-70b --signal endpoint --devices 8 --tokens 1e9   # steps on 8 GPUs
$ redraft plan fleet --help; redraft plan capture --help    # learning from traffic

It counts every operation and byte, on tensors that have the real sizes but take no memory. It does
not estimate time. For the built-in model names, nothing is downloaded. Some flags of `redraft
train` have shorter names here: --batch-size is --loop.batch-size, --signal is --signal.kind, and
--optim is --optim.name.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from redraft.distill.plan.choices import ShardingKind, SignalKind
from redraft.engine.target_dtype import TargetDtype
from redraft.files.artifact import write_whole
from redraft.files.replaced import require_apart
from redraft.files.setting_error import require_least
from redraft.heads.catalog import FamilyName, find_family


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    target: str | None = None
    """Target whose sizes are used: a folder, a config.json, a hub name, or one of llama-3.2-1b,
    llama-3.2-3b, llama-3.1-8b, llama-3.3-70b, qwen3-0.6b, qwen3-8b, qwen3-32b, qwen3-30b-a3b,
    mimo-7b. Default: llama-3.1-8b; for MTP, mimo-7b, because Llama models have no MTP layer.
    """
    family: FamilyName = "eagle3"
    """Draft family to train. Options, divergence and batch size default to the values in the
    family's command.
    """
    checkpoint: str = "llama-3.2-3b"
    """Standalone draft whose sizes are used (--draft.checkpoint), named as for --target."""
    optim: Literal["adamw", "muon"] | None = None
    """The draft's optimizer. Default: the one in the family's command."""
    target_dtype: TargetDtype = "bfloat16"
    """Dtype of the target's weights and hidden states."""
    signal: SignalKind = "model"
    """Location of the target: `model` in the training process, `endpoint` on other GPUs, or `cache`
    for states that are written to disk before training.
    """
    batch_size: int | None = None
    """Rows per step on each device. Default: the number in the family's command."""
    sequence_length: int | None = None
    """Tokens per row. Default: the number in the family's command."""
    exact: bool = False
    """For a standalone draft with --signal endpoint or cache: use hidden states, which give the
    exact distribution, instead of top-k probabilities.
    """
    documents: int = 2
    """Conversations packed into each row. Attention stays within a conversation."""
    num_steps: int | None = None
    """Number of draft tokens trained at once: steps, heads, stages or block slots. Default: the
    number in the family's command.
    """
    draft_vocab_size: int | None = None
    """Size of the draft's vocabulary, for families that can reduce it; 0 keeps the target's whole
    vocabulary. Default: 32,000, or the whole vocabulary if that is smaller.
    """
    mixed_precision: Literal["bf16", "no"] = "bf16"
    """Mixed precision for training. The draft's weights are in float32 in both cases."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, like the flag of `redraft train`."""
    devices: int = 1
    """Total number of GPUs."""
    sharding: ShardingKind = "none"
    """State to shard over the devices: zero2 shards the optimizer state and gradients; fsdp2 also
    shards the weights.
    """
    shard: bool = False
    """Also shard the layers of a target in the training process."""
    tokens: float | None = None
    """Total number of training tokens, e.g. 1e9. If given, the number of steps is printed."""
    json: Path | None = None
    """File to write the numbers to, as JSON."""

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
                "--exact applies only to a standalone draft with --signal endpoint or cache, because all "
                "other signals are exact: remove --exact"
            )
        if self.shard and (self.devices == 1 or self.signal != "model"):
            raise ValueError(
                "--shard needs several devices and --signal model: set --devices, or remove --shard"
            )

    @property
    def target_name(self) -> str:
        return self.target or ("mimo-7b" if self.family == "mtp" else "llama-3.1-8b")


def main(cfg: PlanConfig) -> None:
    from redraft.recipes.plan.count import report  # imported here, because it imports torch

    print_report(cfg, report)


def print_report(cfg: Any, report: Callable[[Any], tuple[Sequence[str], object]]) -> None:
    """Print the lines of a report, and write its numbers to `cfg.json` if that is set."""
    require_apart(cfg.json, cfg)
    lines, numbers = report(cfg)
    print(*lines, sep="\n")
    if cfg.json is not None:
        write_whole(cfg.json, json.dumps(numbers, indent=2) + "\n")
