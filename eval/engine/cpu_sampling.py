"""Fixes for sampling in vLLM's CPU build: above temperature 0 with speculation, and with top-k alone.

`expand_kernel` repeats each request's temperature, top-p and top-k for its draft tokens. The replacement for machines
without Triton hands the C++ kernel an int64 *copy* of any other output tensor and never copies it back. The float
outputs stay uninitialised memory, so a copy of the target as draft is accepted at random, and the text is wrong too.

`apply_top_k_only` takes the largest top-k of no rows in a step that verifies nothing, and the exception ends the
engine: one request with `top_k` and without `top_p` is enough."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def fix_cpu_sampling() -> None:
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand_kernel
    from vllm.v1.sample.ops import topk_topp_sampler

    apply = topk_topp_sampler.apply_top_k_only
    topk_topp_sampler.apply_top_k_only = lambda logits, k: apply(logits, k) if len(logits) else logits


def expand_kernel(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: Any,
    replace_to: Any,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """Write `input_val[r]` into `output` once per token of request r, or `replace_to` if it equals `replace_from`."""
    values_B = torch.where(input_val == replace_from, torch.as_tensor(replace_to, dtype=input_val.dtype), input_val)
    # `cu_num_tokens` includes the request itself: [2, 5, 6] means 2 tokens, then 3, then 1.
    counts_B = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    output.copy_(values_B.repeat_interleave(counts_B))
