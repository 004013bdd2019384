"""Update the copies of weights that vLLM makes and reads in place of a draft's weights.

vLLM's loaders do not update these copies, so after a swap the new draft would still use parts of
the old one. Each copy is updated in place, because captured CUDA graphs contain its address. The
values come from the checkpoint if the CPU build has packed the weights.

- DFlash and DSpark compute the context's keys and values for all layers in one product. This
  product uses `_fused_kv_weight`, which holds the key and value projections of all layers. The
  norms of the keys are in `_k_norm_weights`.
- DSpark with a reduced vocabulary and sampled drafts: the column of every draft id in the target's
  vocabulary.
- P-EAGLE: the state in the slots to fill. The load itself writes this state to a tensor without
  memory.
- On a CPU, a head tied to the embeddings: vLLM packs the head at start. A load has no weights for
  the head, so vLLM does not pack it again, not even after its own reload of the target.

I = layers, G = key heads of this rank, E = head size, D = hidden, V = target vocabulary, W = draft
vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from redraft.engine.patches import BUILD, without_fused_buffers


@contextmanager
def without_build(draft: Any) -> Iterator[None]:
    """Prevent `load_weights` from making the copies.

    During a reload, the draft's layers have no values yet, and afterwards they are packed.
    """
    block = _find_block(draft)
    if block is None:
        yield
        return
    with without_fused_buffers(block):
        yield


def refill(
    runner: Any, draft: Any, tensors: Mapping[str, Tensor], rank: int, num_ranks: int
) -> None:
    """Update all copies of a loaded draft from the checkpoint's `tensors`.

    `runner` is vLLM's model runner, V1 or V2.

    Raises:
        ValueError: a copy is not made as assumed here, e.g. in a different version of vLLM.
    """
    if (block := _find_block(draft)) is not None:
        refill_projections(block, tensors, rank, num_ranks)
    if (
        columns_W := getattr(getattr(runner, "speculator", None), "_d2t_scatter_index", None)
    ) is not None:
        refill_columns(columns_W, draft.draft_id_to_target_id, runner.speculator._draft_scatter_buf)
    state_D = getattr(
        getattr(runner, "drafter", None), "parallel_drafting_hidden_state_tensor", None
    )
    if state_D is not None:
        # As in vLLM's proposer at start: the mask state covers all layers, and `fc` combines it
        # into one state.
        draft.mask_hidden.copy_(
            next(value for name, value in tensors.items() if "mask_hidden" in name).view(1, -1)
        )
        state_D.copy_(draft.combine_hidden_states(draft.mask_hidden.view(-1)))
    repack_tied_heads(draft)


def repack_tied_heads(model: Any) -> None:
    """Repack the weights of tied heads, as vLLM's CPU build does at startup."""
    for module in model.modules():
        # The weight of a layer that the load itself has packed is empty.
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def refill_projections(
    block: Any, tensors: Mapping[str, Tensor], rank: int, num_ranks: int
) -> None:
    """Write a checkpoint's keys and values into the copies on one tensor-parallel rank.

    Raises the same errors as `refill`.
    """
    for kind, buffer in (("weight", block._fused_kv_weight), ("bias", block._fused_kv_bias)):
        if (
            buffer is not None
            # There is no bias, or the layers are quantised, and vLLM projects with the layers
            # themselves.
        ):
            values = torch.cat(list(_list_projections(block, tensors, kind, rank, num_ranks)))
            _write(buffer, values, f"_fused_kv_{kind}")
    norms_IE = torch.stack(
        [tensors[f"layers.{i}.self_attn.k_norm.weight"] for i in range(len(block.layers))]
    )
    _write(block._k_norm_weights, norms_IE, "_k_norm_weights")
    # In vLLM 0.32, this is an alias of the norm's weight, which the load has already updated.
    if block._hidden_norm_weight.data_ptr() != block.hidden_norm.weight.data_ptr():
        _write(block._hidden_norm_weight, tensors["hidden_norm.weight"], "_hidden_norm_weight")


def refill_columns(columns_W: Tensor, offsets_W: Tensor, logits_BV: Tensor) -> None:
    """Write the vocabulary columns of the draft's ids, and reset the logits buffer.

    All other columns stay at minus infinity.
    """
    columns_W.copy_(torch.arange(len(offsets_W), device=offsets_W.device) + offsets_W)
    logits_BV.fill_(
        float("-inf")
    )  # otherwise, the old ids' columns would keep the old draft's last logits


def has_copies(draft: Any) -> bool:
    """Whether `refill` must read the checkpoint for this draft's copies."""
    return _find_block(draft) is not None or hasattr(draft, "mask_hidden")


def _find_block(draft: Any) -> Any:
    return next((module for module in draft.modules() if hasattr(module, BUILD)), None)


def _list_projections(
    block: Any, tensors: Mapping[str, Tensor], kind: str, rank: int, num_ranks: int
) -> Iterator[Tensor]:
    """Yield this rank's key and value heads of all layers, each [G * E, D] or [G * E].

    Several ranks may have the same heads.
    """
    for i, layer in enumerate(block.layers):
        size, count = layer.self_attn.head_dim, layer.self_attn.num_kv_heads
        for name in ("k_proj", "v_proj"):
            whole = tensors[f"layers.{i}.self_attn.{name}.{kind}"]
            # E.g. with two heads on four ranks, ranks 0 and 1 have head 0, and ranks 2 and 3 have
            # head 1.
            first = rank * (len(whole) // size) // num_ranks
            yield whole[first * size : (first + count) * size]


def _write(buffer: Tensor, values: Tensor, name: str) -> None:
    if buffer.shape != values.shape:
        raise ValueError(
            f"vLLM's {name} has the shape {tuple(buffer.shape)}, not {tuple(values.shape)}: "
            "restart the "
            "server with the draft"
        )
    buffer.copy_(values)
