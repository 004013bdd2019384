"""The optimizer's settings. Without torch, so a config that contains them loads fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer and its learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon` moves the matrices of the draft by Muon (kellerjordan.github.io/posts/muon), and
    embeddings, output heads and norms by AdamW. It learns more from each label, for some more
    work in each step. Every process needs whole matrices: one process or DDP.
    """
    lr: float = 1e-4
    """Peak learning rate, reached after the warm-up: about the change of a weight in a step."""
    weight_decay: float = 0.0
    """Weight decay: each step shrinks the weights by the learning rate times this."""
    beta1: float = 0.9
    """AdamW's decay rate for the running mean of the gradient."""
    beta2: float = 0.95
    """AdamW's decay rate for the running mean of the squared gradient."""
    momentum: float = 0.9
    """Muon's decay rate for the sum of the gradients. For runs of some dozens of steps 0.8 is
    better.
    """
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate after the warm-up: down a cosine to `min_lr_fraction` of `lr`, or constant."""
    warmup_fraction: float = 0.03
    """Share of the steps in which the learning rate rises linearly from zero, e.g. 0.03 for 3%."""
    min_lr_fraction: float = 0.1
    """Learning rate at the end of the cosine, as a share of `lr`."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm are scaled down to this norm before the optimizer's step."""
    accumulation: int = 1
    """Micro-batches per optimizer step. Raise it to train with larger batches than memory holds."""

    def __post_init__(self) -> None:
        if not (self.lr > 0 and self.max_grad_norm > 0):
            raise ValueError(
                f"lr is {self.lr}, max_grad_norm {self.max_grad_norm}: both must be above 0"
            )
        if not (0 <= self.warmup_fraction <= 1 and 0 <= self.min_lr_fraction <= 1):
            raise ValueError(f"warmup_fraction and min_lr_fraction are shares, from 0 to 1: {self}")
        if self.accumulation < 1:
            raise ValueError(
                f"accumulation is {self.accumulation}: a step takes at least 1 micro-batch"
            )

    def rate(self, step: int, num_steps: int) -> float:
        """The learning rate at `step`, as a share of `lr`."""
        warmup = max(1, round(self.warmup_fraction * num_steps))
        if step < warmup:
            # Step 0 has 1 / warmup of the rate. With 0 it would change nothing.
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return (
            self.min_lr_fraction
            + (1 - self.min_lr_fraction) * (1 + math.cos(math.pi * progress)) / 2
        )
