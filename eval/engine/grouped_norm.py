"""A patch of vLLM's CPU build, for DFlash drafts.

vLLM norms the context keys of all layers in one call, with a row of weights for each layer. The kernel for GPUs takes
the row by the layer. The one for CPUs takes the first row for all, so every later layer silently reads wrong keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RmsNorm = Callable[[Tensor, Tensor, Tensor | None, float], None]


def patch_grouped_norm() -> None:
    from vllm import _custom_ops

    # vLLM's DFlash model calls `ops.rms_norm` through the module, so it sees this even if imported earlier.
    _custom_ops.rms_norm = with_groups(_custom_ops.rms_norm)


def with_groups(rms_norm: RmsNorm) -> RmsNorm:
    """`rms_norm(out, input, weight, epsilon)`, for one row of weights or for one per index of the first dimension."""

    def grouped(out: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
        if weight is None or weight.dim() == 1:
            rms_norm(out, input, weight, epsilon)
            return
        # [L, context, heads, head_dim] meets weights [L, 1, 1, head_dim].
        wide = input.to(torch.float32)
        shape = [len(weight), *[1] * (input.dim() - 2), weight.shape[1]]
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        out.copy_(normed.to(input.dtype) * weight.view(shape))

    return grouped
