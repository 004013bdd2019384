"""The choices of a plan by name. Without torch, so a command's config reads them fast."""

from typing import TYPE_CHECKING, Literal

from redraft.heads.catalog import list_trained

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(list_trained())]  # as `heads.catalog.Method`

SignalKind = Literal["model", "endpoint", "cache"]
"""Place of the target: in the training process, on other GPUs, or on disk before training."""

ShardingKind = Literal["none", "zero2", "fsdp2"]
"""Shared out over the devices: zero2 the optimizer's state and the gradients, fsdp2 the weights too."""
