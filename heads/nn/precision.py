"""The dtype of matrix products under autocast."""

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with `x`: autocast's if enabled, otherwise that of `x`."""
    # Autocast casts only the operators in its list. Our attention is not in it, so callers ask here
    # and cast.
    kind = autocast_kind(x.device)
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def autocast_kind(device: torch.device) -> str:
    # torch has no autocast for tensors without memory, and raises an error. They follow the CPU's
    # setting.
    return "cpu" if device.type == "meta" else device.type
