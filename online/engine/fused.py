"""Copies of weights that vLLM makes when a draft is loaded, and reads instead of them. A swap must fill them again.

DFlash's fused buffers. A block drafter computes the context keys of all layers in one product. The product reads
`_fused_kv_weight`, which holds the key and value projections of all layers, and `_k_norm_weights`. Both are filled in
place: captured CUDA graphs hold their addresses. The values come from the checkpoint: the CPU build packs weights away.

P-EAGLE's mask. The proposer holds the feature of every masked row, `fc(mask_hidden)`. `mask_hidden` itself is a buffer,
which vLLM's reload leaves at its old value.

I = layers, G = key heads of this rank, E = head size, D = hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

BUILD = "_build_fused_kv_buffers"
"""The method of vLLM's model that builds them at the end of `load_weights`."""


def find_fused(draft: nn.Module) -> Any:
    """The part of the draft with fused buffers; None if it has none."""
    return next((module for module in draft.modules() if hasattr(module, BUILD)), None)


@contextmanager
def without_build(fused: Any) -> Iterator[None]:
    """Let `load_weights` build no buffers: during a reload its layers hold no values, and are packed afterwards."""
    if fused is None:
        yield
        return
    setattr(fused, BUILD, lambda: None)
    try:
        yield
    finally:
        delattr(fused, BUILD)


def refill(fused: Any, tensors: Mapping[str, Tensor], rank: int, num_ranks: int) -> None:
    """Write a checkpoint's tensors into the buffers of one tensor-parallel rank.

    Raises:
        ValueError: a buffer is not made as assumed here, e.g. in another version of vLLM.
    """
    parts: list[Tensor] = []
    norms: list[Tensor] = []
    for i, layer in enumerate(fused.layers):
        attention = layer.self_attn
        for name in ("k_proj", "v_proj"):
            weight = tensors[f"layers.{i}.self_attn.{name}.weight"]
            parts.append(_take_heads(weight, attention.num_kv_heads, attention.head_dim, rank, num_ranks))
        norms.append(tensors[f"layers.{i}.self_attn.k_norm.weight"])
    _write(fused._fused_kv_weight, torch.cat(parts), "_fused_kv_weight")
    _write(fused._k_norm_weights, torch.stack(norms), "_k_norm_weights")
    # in vLLM 0.32 an alias of the norm's weight, which the load has written already
    if fused._hidden_norm_weight.data_ptr() != fused.hidden_norm.weight.data_ptr():
        _write(fused._hidden_norm_weight, tensors["hidden_norm.weight"], "_hidden_norm_weight")


def refill_mask(proposer: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Compute the feature of masked rows from a checkpoint's tensors, if the runner's proposer holds one."""
    feature_D = getattr(proposer, "parallel_drafting_hidden_state_tensor", None)
    if feature_D is None:
        return
    draft = proposer.model
    draft.mask_hidden.copy_(next(tensor for name, tensor in tensors if "mask_hidden" in name).view(1, -1))
    feature_D.copy_(draft.combine_hidden_states(draft.mask_hidden.view(-1)))


def _take_heads(weight: Tensor, num_heads: int, head_dim: int, rank: int, num_ranks: int) -> Tensor:
    """The rows of this rank's key heads, [G * E, D]. With fewer heads than ranks, several ranks hold the same head."""
    # e.g. two heads on four ranks: ranks 0 and 1 hold head 0, ranks 2 and 3 head 1
    first = rank * (len(weight) // head_dim) // num_ranks
    return weight[first * head_dim : (first + num_heads) * head_dim]


def _write(buffer: Tensor | None, values: Tensor, name: str) -> None:
    if buffer is None or buffer.shape != values.shape:
        shape = None if buffer is None else tuple(buffer.shape)
        raise ValueError(
            f"vLLM's {name} is {shape} instead of {tuple(values.shape)}: restart the server with the draft"
        )
    buffer.copy_(values)
