"""A target that no process holds completely.

Its layers are sharded over the ranks, and gathered one by one (FSDP2).

    rank 0   reads the files, once         every rank  whole embeddings, final norm and head, 1/ranks of each layer
             └─ one tensor at a time ────►             a pass gathers a layer, computes, and frees it

With several machines, each machine holds all layers if they leave enough memory. They are then
gathered within the machine instead of over the network.

All ranks make a pass together. In training, they all make the same number of passes. A forecast,
and everything else that rank 0 does by itself, runs in `leading`: the other ranks then make a pass
whenever rank 0 makes one.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from redraft.files.checkpoint import load_causal_lm, new_model
from redraft.files.target_folder import TargetFolder
from redraft.files.target_sizes import TargetSizes
from redraft.heads.nn.causal_lm import decoder_layers, language_model


def processes_here(processes: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", processes))


def device_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU in bytes, or None for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def load_sharded(target: TargetFolder, device: torch.device) -> Any:
    """Load the target, frozen, with its layers sharded over the ranks.

    All ranks must call this function.

    Raises:
        FileNotFoundError, ValueError: the errors of `load_causal_lm`, on the first rank.
    """
    # 1. Rank 0 reads the files. The dtype may come from the files, which only this rank has read.
    whole = load_causal_lm(target, target.torch_dtype) if dist.get_rank() == 0 else None
    chosen = [None if whole is None else whole.dtype]
    dist.broadcast_object_list(chosen, 0)
    # 2. Build the same architecture on every rank, without memory.
    with torch.device("meta"):
        model = new_model(target.config, chosen[0])
    model.requires_grad_(False).eval()
    # 3. Each layer is gathered by itself. The root is wrapped too, so that the layers share one
    # root, and one layer is gathered while another computes. The root shards nothing: embeddings,
    # norm and head stay whole, because they are also read outside of a pass.
    mesh = _make_mesh(model, device)
    decoder = language_model(model)
    layers = list(decoder_layers(model))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    inside = {id(p) for layer in layers for p in layer.parameters()}
    others = {p for p in model.parameters() if id(p) not in inside}
    fully_shard(decoder, mesh=mesh, ignored_params=others)
    # 4. Allocate memory for the shards. `to_empty` makes two tensors of tied weights, so they are
    # tied again.
    model.to_empty(device=device)
    model.tie_weights()
    # 5. Send the values, one tensor at a time.
    _fill(model, None if whole is None else _tensors(whole), device)
    return model


def _make_mesh(model: Any, device: torch.device) -> DeviceMesh:
    processes = dist.get_world_size()
    ranks = [
        TargetSizes.of(model).choose_ranks(
            processes, processes_here(processes), device_bytes(device)
        )
    ]
    # All ranks must make the same choice, whatever their memory.
    dist.broadcast_object_list(ranks, 0)
    shape = (processes // ranks[0], ranks[0])
    return init_device_mesh(device.type, shape, mesh_dim_names=("machines", "shares"))["shares"]


def _tensors(model: Any) -> dict[str, Tensor]:
    # Send buffers too: the rotary frequencies are not in any state dict, and `to_empty` leaves them
    # undefined.
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def _fill(model: Any, whole: dict[str, Tensor] | None, device: torch.device) -> None:
    """Give every rank its part of each tensor on rank 0."""
    for name, place in _tensors(model).items():
        # The full shape on every rank. Only rank 0 has values until they are sent.
        full = torch.empty(place.shape, dtype=place.dtype, device=device)
        if whole is not None:
            full.copy_(whole[name])
        dist.broadcast(full, 0)
        if isinstance(place, DTensor):
            # Without a source, each rank selects its own part.
            part = distribute_tensor(full, place.device_mesh, place.placements, src_data_rank=None)
            place.to_local().copy_(part.to_local())
        else:
            place.copy_(full)


def is_sharded(model: Any) -> bool:
    return hasattr(model, "get_decoder") and isinstance(language_model(model), FSDPModule)


def most_of_ranks(model: Any, number: int) -> int:
    """Return the largest `number` among the ranks that make this pass of a model together."""
    if not is_sharded(model) or id(model) in _led:
        return number
    largest = torch.tensor(number, device=model.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


_led: set[int] = set()  # Models whose passes the first rank currently leads.


@contextmanager
def leading(model: Any) -> Iterator[bool]:
    """Let the first rank work on a target while the other ranks make the same passes.

    Yields True on the first rank, and False on the others after these passes. All ranks must enter;
    the first one may enter again inside.
    """
    if not is_sharded(model):
        yield not dist.is_initialized() or dist.get_rank() == 0
    elif id(model) in _led:
        # Rank 0 has entered again, so the hook is already there.
        yield True
    elif dist.get_rank() == 0:
        # Run this before FSDP's hook: the other ranks must learn of the pass before rank 0 waits in
        # a gather.
        hook = language_model(model).register_forward_pre_hook(
            lambda *_: _tell(model, goes_on=True), prepend=True
        )
        _led.add(id(model))
        try:
            yield True
        finally:
            _led.remove(id(model))
            hook.remove()
            # Send it after an error too, because the other ranks wait for this signal.
            _tell(model, goes_on=False)
    else:
        # One token is enough: rank 0 needs only the shards from this rank.
        ids_11 = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        while _is_told(model):
            with torch.no_grad():
                language_model(model)(input_ids=ids_11, use_cache=False)
        yield False


def _tell(model: Any, *, goes_on: bool) -> None:
    dist.broadcast(torch.tensor(int(goes_on), device=model.device), 0)


def _is_told(model: Any) -> bool:
    told = torch.zeros((), dtype=torch.int64, device=model.device)
    dist.broadcast(told, 0)
    return bool(told)
