"""A target that no process holds whole: the layers are shared out over the ranks, and gathered one by one (FSDP2).

    rank 0   reads the files, once         every rank  embeddings, final norm and head whole, 1/ranks of each layer
             └─ one tensor at a time ────►             a pass gathers a layer, computes, and lets go of it

All ranks make a pass together. In training all of them make the same number. A forecast, and all else that rank 0 does
by itself, is done in `leading`: the others then make a pass whenever it makes one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM

from redraft.heads.files.checkpoint import load_causal_lm, register_models


def load_sharded(name: str, dtype: torch.dtype | None, device: torch.device) -> Any:
    """The causal LM of a folder or hub name, frozen, with the layers shared out over all ranks. All must call this.

    Raises:
        FileNotFoundError, ValueError: as `load_causal_lm`, on the first rank.
    """
    # 1. Rank 0 reads the files. The dtype may be that of the files, which only this rank knows.
    whole = load_causal_lm(name, dtype) if dist.get_rank() == 0 else None
    chosen = [None if whole is None else whole.dtype]
    dist.broadcast_object_list(chosen, 0)
    register_models()
    # 2. The same architecture on every rank, without memory.
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(name)
        model = AutoModelForCausalLM.from_config(config, dtype=chosen[0], attn_implementation="sdpa")
    model.requires_grad_(False).eval()
    # 3. Each layer is gathered by itself. The root is wrapped too, so the layers share one root, and one is
    # gathered while another computes. It shards nothing: embeddings, norm and head stay whole, because they
    # are read outside of a pass too.
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers = list(model.base_model.layers)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    others = {p for p in model.parameters() if id(p) not in inside}
    fully_shard(model.base_model, mesh=mesh, ignored_params=others)
    # 4. Memory for the shards. `to_empty` makes two tensors of tied ones, so they are tied again.
    model.to_empty(device=device)
    model.tie_weights()
    # 5. The values, one tensor at a time.
    _fill(model, None if whole is None else _tensors(whole), device)
    return model


def _tensors(model: Any) -> dict[str, Tensor]:
    # Buffers too: the rotary frequencies are in no state dict, and `to_empty` leaves them undefined.
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def _fill(model: Any, whole: dict[str, Tensor] | None, device: torch.device) -> None:
    """Give every rank a part of each tensor of rank 0."""
    for name, place in _tensors(model).items():
        # The full shape on every rank; values on rank 0 only, from which `distribute_tensor` and `broadcast`
        # send them.
        full = torch.empty(place.shape, dtype=place.dtype, device=device)
        if whole is not None:
            full.copy_(whole[name])
        if isinstance(place, DTensor):
            place.to_local().copy_(distribute_tensor(full, place.device_mesh, place.placements).to_local())
        else:
            dist.broadcast(full, 0)
            place.copy_(full)


def is_sharded(model: Any) -> bool:
    """Whether a pass of the model is a work of all ranks."""
    return isinstance(getattr(model, "base_model", None), FSDPModule)


_led: set[int] = set()
"""Models that the first rank leads now."""


@contextmanager
def leading(model: Any) -> Iterator[bool]:
    """Work of the first rank on a target, with True; the others get False, after they have made the same passes.

    All ranks must enter; the first may enter again inside. For a model that is not sharded, nothing is waited for.
    """
    if not is_sharded(model):
        yield not dist.is_initialized() or dist.get_rank() == 0
    elif id(model) in _led:
        # Entered again by rank 0: the hook is there already.
        yield True
    elif dist.get_rank() == 0:
        # `prepend` puts it before FSDP's hook: the others must hear of the pass before rank 0 waits for them
        # in a gather.
        hook = model.base_model.register_forward_pre_hook(lambda *_: _tell(model, goes_on=True), prepend=True)
        _led.add(id(model))
        try:
            yield True
        finally:
            _led.remove(id(model))
            hook.remove()
            # After an error too, because the others wait for this word.
            _tell(model, goes_on=False)
    else:
        while _is_told(model):
            _make_pass(model)
        yield False


def _tell(model: Any, *, goes_on: bool) -> None:
    dist.broadcast(torch.tensor(int(goes_on), device=model.device), 0)


def _is_told(model: Any) -> bool:
    told = torch.zeros((), dtype=torch.int64, device=model.device)
    dist.broadcast(told, 0)
    return bool(told)


@torch.no_grad()
def _make_pass(model: Any) -> None:
    """A pass over one token: rank 0 needs no more from this rank than the shards."""
    model.base_model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
