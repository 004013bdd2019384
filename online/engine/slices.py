"""Find the part of each checkpoint tensor that a tensor-parallel rank loads, and read only it.

    at start   vLLM's own loaders run on a copy of the draft without memory ─► trace_slices: which rows or columns
               of each tensor they copy on this rank
    staging    reads these rows or columns only
    load       `Sliced`, a tensor of the whole shape: the loaders cut their part out of it as they would of any other

A tensor that is not cut by rows or columns is read as a whole. If a loader does not run
on a draft without memory, all tensors are read as a whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from redraft.online.engine.copies import has_copies

logger = logging.getLogger("vllm.redraft")


@dataclass(frozen=True)
class Slice:
    """`size` rows, columns, ... of a tensor from `first` on, along one dimension."""

    dim: int
    first: int
    size: int

    def shape(self, whole: Sequence[int]) -> list[int]:
        return [self.size if dim == self.dim else size for dim, size in enumerate(whole)]

    def join(self, other: Slice) -> Slice | None:
        """Return the smallest slice that contains both. None if their dimensions differ."""
        if self.dim != other.dim:
            return None
        first = min(self.first, other.first)
        return Slice(self.dim, first, max(self.first + self.size, other.first + other.size) - first)


# Keyed by the checkpoint's tensor names; a tensor without an entry is read whole.
Slices = Mapping[str, Slice]


def trace_slices(draft: nn.Module, target: nn.Module, tensors: Mapping[str, Tensor]) -> Slices:
    """Find the slice of each of these tensors that this rank's loaders read.

    The tensors need no memory. The result is empty if the loaders do not run on a draft without
    memory. The draft itself stays unchanged.
    """
    if has_copies(draft):  # vLLM reads these tensors through its own loaders
        return {}
    taken: dict[str, list[Slice | None]] = {name: [] for name in tensors}
    shared = {id(module) for module in target.modules()}
    try:
        with torch.no_grad():
            copy = _without_memory(draft, shared)
            copy.load_weights(
                (name, Sliced.of(tensor.to("meta"), _note(taken[name]), tensor.shape))
                for name, tensor in tensors.items()
            )
    except Exception as error:  # a loader may use unsupported operations; whole tensors always load
        logger.info(
            "redraft: a swap reads the whole draft on each rank (%s: %s)",
            type(error).__name__,
            error,
        )
        return {}
    found = {name: _join(slices) for name, slices in taken.items()}
    return {name: one for name, one in found.items() if one is not None}


def _note(taken: list[Slice | None]) -> Callable[[Tensor, Slice | None], Tensor]:
    def read(view: Tensor, part: Slice | None) -> Tensor:
        taken.append(part)
        return torch.empty_like(view)

    return read


def _join(slices: Iterable[Slice | None]) -> Slice | None:
    """Return the smallest slice that contains all.

    None means the whole tensor, or that nothing was read.
    """
    joined: Slice | None = None
    for one in slices:
        if one is None:
            return None
        joined = one if joined is None else joined.join(one)
        if joined is None:
            return None
    return joined


def _without_memory(module: nn.Module, shared: set[int]) -> Any:
    """Copy a module to the meta device, without the modules whose ids are in `shared`."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    copy = object.__new__(type(module))
    vars(copy).update(vars(module))
    # Before vLLM packs or transposes a weight for its kernels, it stores the layout that the
    # loaders expect.
    noted_parameters, noted_buffers = get_layerwise_info(module).restore_metadata
    for kind, noted in (("_parameters", noted_parameters), ("_buffers", noted_buffers)):
        own = {
            name: to_meta_tensor(x) for name, x in getattr(module, kind).items() if x is not None
        }
        # No loader in the stored layout is bound to a layer, so every load can use the layout
        # again.
        own |= {name: restore_layer_refs(to_meta_tensor(x), module) for name, x in noted.items()}
        vars(copy)[kind] = own
    vars(copy)["_modules"] = {
        name: None if child is None or id(child) in shared else _without_memory(child, shared)
        for name, child in module._modules.items()
    }
    return copy


class Sliced(Tensor):
    """A tensor of which only a slice has memory.

    View operations return views of the tensor; all other operations read the slice.
    """

    _view: Tensor
    _read: Callable[[Tensor, Slice | None], Tensor]
    _whole: Sequence[int]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(
        view: Tensor, read: Callable[[Tensor, Slice | None], Tensor], whole: Sequence[int]
    ) -> Sliced:
        """Return a view of a contiguous tensor of shape `whole`; `view` is on the meta device.

        `read` returns the values of a view. Its arguments are the view and the slice that the view
        covers, or None for any other kind of view.
        """
        made: Sliced = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Sliced,
            view.shape,
            view.stride(),
            view.storage_offset(),
            dtype=view.dtype,
            device=torch.device("cpu"),
        )
        made._view, made._read, made._whole = view, read, whole
        return made

    @staticmethod
    def holding(values: Tensor, part: Slice, whole: Sequence[int]) -> Sliced:
        """Return a tensor of shape `whole` with values only in this part."""

        def read(view: Tensor, wanted: Slice | None) -> Tensor:
            if wanted is None or wanted.dim != part.dim:
                raise ValueError(
                    f"a loader reads {wanted or 'all'} of a tensor, but only {part} was staged"
                )
            begin = wanted.first - part.first
            if begin < 0 or begin + wanted.size > part.size:
                raise ValueError(f"a loader reads {wanted} of a tensor, but only {part} was staged")
            return values.narrow(part.dim, begin, wanted.size).view(view.shape)

        return Sliced.of(torch.empty(*whole, dtype=values.dtype, device="meta"), read, whole)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Sliced({list(self.shape)} of {list(self._whole)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, (first, *others) = kwargs or {}, args
        returns = func._schema.returns
        is_view = (
            len(returns) == 1
            and returns[0].alias_info is not None
            and not returns[0].alias_info.is_write
        )
        if is_view and isinstance(first, Sliced):
            return Sliced.of(func(first._view, *others, **kwargs), first._read, first._whole)
        args, kwargs = tree_map_only(Sliced, Sliced._values, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    def _values(self) -> Tensor:
        return self._read(self._view, find_slice(self._view, self._whole))


def find_slice(view: Tensor, whole: Sequence[int]) -> Slice | None:
    """Return the slice that a view covers in a contiguous tensor of shape `whole`.

    Return None if the view is the whole tensor, or no such slice.
    """
    strides = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    if view.dim() != len(whole):
        return None
    offset, found = int(view.storage_offset()), []
    for dim, (size, stride) in enumerate(zip(view.shape, strides, strict=True)):
        first, offset = divmod(offset, stride)
        if size > 1 and view.stride(dim) != stride:
            return None
        if size != whole[dim]:
            found.append(Slice(dim, first, size))
    return found[0] if len(found) == 1 else None
