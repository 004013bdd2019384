"""The choices of a plan by name. The module does not import torch, so commands read it quickly."""

from typing import Literal

SignalKind = Literal["model", "endpoint", "cache"]
"""Whether the target runs in the training process, on other GPUs, or before training with its
states written to disk.
"""

ShardingKind = Literal["none", "zero2", "fsdp2"]
"""State that is sharded across the devices: with zero2, the optimizer's state and the gradients;
with fsdp2, the weights as well.
"""
