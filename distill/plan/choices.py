"""The choices of a plan by name. Without torch, so a command's config reads them fast."""

from typing import Literal

SignalKind = Literal["model", "endpoint", "cache"]
"""Place of the target: in the training process, on other GPUs, or on disk before training."""

ShardingKind = Literal["none", "zero2", "fsdp2"]
"""Shared out over the devices: zero2 the optimizer's state and the gradients, fsdp2 the weights
too.
"""
