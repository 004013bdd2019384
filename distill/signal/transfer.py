"""Asynchronous copies from pinned host memory to a device."""

from dataclasses import is_dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

T = TypeVar("T")


def host_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor in host memory that `device` can copy asynchronously: pinned for a GPU."""
    return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(value: T, device: torch.device) -> T:
    """Move a tensor, or a dataclass with tensors at any depth, to `device`.

    The copy to a GPU may still be in progress, but work on the GPU's current stream sees complete
    tensors. The host may change its own tensors.
    """
    if is_dataclass(value):
        moved: dict[str, Any] = {
            name: to_device(part, device) for name, part in vars(value).items()
        }
        return cast(T, type(value)(**moved))  # type: ignore[misc]  # to mypy, it may be a class
    return cast(T, _copy(value, device)) if isinstance(value, Tensor) else value


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    # Nothing else refers to the pinned copy, and PyTorch keeps its memory until the device has read
    # it.
    return tensor.pin_memory().to(device, non_blocking=True)
