"""Settings of the optimizer. The module does not import torch, so settings load fast."""

import math
from dataclasses import dataclass
from typing import Literal

from redraft.files.setting_error import SettingError, require_least

BETAS = (0.9, 0.95)
"""AdamW's decay rates for the running means of the gradient and of its square."""

LEAST_RATE = 0.1
"""Final learning rate of the cosine schedule, as a fraction of the peak."""


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer and its learning rate."""

    name: Literal["adamw", "muon"] = "adamw"
    """Optimizer. `muon` updates the draft's matrices with Muon (kellerjordan.github.io/posts/muon),
    and embeddings, output heads and norms with AdamW. It learns more from each label at slightly
    more compute per step. Every process must hold whole matrices: one process or DDP.
    """
    lr: float = 1e-4
    """Peak learning rate, reached after the warm-up. A weight changes by roughly this
    amount per step.
    """
    weight_decay: float = 0.0
    """Weight decay: each step shrinks the weights by this value times the learning rate."""
    momentum: float = 0.9
    """Muon's momentum, the decay rate of the sum of gradients. Use 0.8 for runs of a few dozen
    steps.
    """
    schedule: Literal["cosine", "constant"] = "cosine"
    """Learning rate schedule after the warm-up: cosine decay to a tenth of `lr`, or constant."""
    warmup_fraction: float = 0.03
    """Fraction of the steps in which the learning rate rises linearly from zero, e.g. 0.03 for 3%.
    """
    max_grad_norm: float = 1.0
    """Maximum gradient norm. Larger gradients are scaled down to it before the optimizer step."""
    accumulation: int = 1
    """Number of micro-batches per optimizer step. Raise it for batches that do not fit into memory.
    """

    def __post_init__(self) -> None:
        if not (self.lr > 0 and self.max_grad_norm > 0):
            raise SettingError(
                f"{{lr}} is {self.lr} and {{max_grad_norm}} is {self.max_grad_norm}: both must be "
                "above 0"
            )
        if not 0 <= self.warmup_fraction <= 1:
            raise SettingError(
                f"{{warmup_fraction}} is {self.warmup_fraction}: it must be between 0 and 1"
            )
        require_least(self, accumulation=1)

    def rate(self, step: int, num_steps: int) -> float:
        """Return the learning rate at `step`, as a share of `lr`."""
        warmup = max(1, round(self.warmup_fraction * num_steps))
        if step < warmup:
            # Step 0 has 1 / warmup of the rate. With a rate of 0, it would change nothing.
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(math.pi * progress)) / 2
