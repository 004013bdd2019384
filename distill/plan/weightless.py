"""Count the work of PyTorch code.

The module counts floating-point operations, bytes and live memory, with or without weights.

    with Count(weightless=True) as count:        tensors made here have a shape but no memory
        count.begin("forward")                   the name of the next part
        ...                                      any code, autograd and autocast included
    count.operations                             how often each operation ran, FLOPs and bytes
    count.memory                                 live bytes at the peak, by owner

The mode intercepts operations below autograd and autocast, i.e. as kernels. Floating-point tensors
are weightless. Small integer tensors keep their values, so code may branch on the ids, masks and
documents of a batch.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

import redraft.heads.nn.prefix  # noqa: F401  registers the operations of ATTENTION
from redraft.distill.plan.operations import Operation

# Tensors with at most this many elements keep their values; a long batch's mask [B, T, T] is
# larger, and its values are not read.
MAX_VALUES = 1 << 22
META = torch.device("meta")
VALUE_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Weightless(Tensor):
    """A tensor without memory.

    To PyTorch, it is on the CPU, so the CPU's autocast and autograd apply. Python code sees
    `shown_on` as its `device`, and takes the branches for an accelerator or for the CPU
    accordingly.
    """

    shown_on = META
    plain: Tensor  # the same tensor on `meta`; views share a storage, which is counted once

    # There is no Python code above autograd: operations are intercepted once, in
    # __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, plain: Tensor) -> Weightless:
        # No device is given, so autograd and autocast treat the wrapper as a CPU tensor.
        made: Weightless = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            plain.size(),
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
        )
        made.plain = plain
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return Weightless.shown_on

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Weightless({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run_weightless(func, args, kwargs or {})


def run_weightless(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute the result of an operation as weightless tensors.

    A tensor that was changed in place is returned as the same object that was passed in.

    Raises:
        ValueError: the result depends on values.
    """
    # Compare by id: the arguments live until the results are made, so no id is reused.
    given: dict[int, Tensor] = {}

    # The meta kernel of a grouped product accepts only bfloat16, but the devices' kernels also
    # accept float32.
    widened = func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16

    def strip(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return META if isinstance(x, torch.device) else x
        plain = _strip(x)
        given[id(plain)] = x
        return plain.bfloat16() if widened and x.is_floating_point() else plain

    def dress(x: Any) -> Any:
        if id(x) in given or not isinstance(x, Tensor):
            return given.get(id(x), x)
        return Weightless(x.to(args[0].dtype) if widened else x)

    try:
        # PyTorch's meta kernels determine shapes and strides, and compute nothing.
        made = func(*_map(strip, args), **_map(strip, kwargs))
        return dress(made) if isinstance(made, Tensor) else tree_map(dress, made)
    except (NotImplementedError, RuntimeError) as error:
        if not VALUE_TAGS.intersection(func.tags):
            raise
        raise ValueError(
            f"{func} cannot be counted without weights, because its result depends on their values"
        ) from error


def _strip(x: Tensor) -> Tensor:
    if isinstance(x, Weightless):
        return x.plain
    return x if x.is_meta else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=META)


def _needs_no_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation can run without memory.

    This is true if the operation reads or makes a weightless tensor, or makes a large tensor.
    """
    tensors = _tensors((args, kwargs))
    if kwargs.get("device") == META or any(isinstance(x, Weightless) or x.is_meta for x in tensors):
        return True
    try:
        # This is a dry run on `meta`, only to learn the size of the result.
        made = func(*_map(_try_strip, args), **_map(_try_strip, kwargs))
    except (RuntimeError, NotImplementedError):  # e.g. `nonzero`, whose size depends on values
        return False
    sizes = _tensors([made])
    # For tensors created from nothing: floating-point tensors are weights, which need no values.
    # Integers are ids or masks, which do.
    return any(x.numel() > MAX_VALUES or (not tensors and x.is_floating_point()) for x in sizes)


def _try_strip(x: Any) -> Any:
    return _strip(x) if isinstance(x, Tensor) else META if isinstance(x, torch.device) else x


# -------------------------------------------------------------------------------------------------------------
# the mode


class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that runs and counts every operation inside its `with` block."""

    def __init__(self, *, weightless: bool) -> None:
        """Without `weightless`, operations run on real tensors, but are counted in the same way."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._weightless, self.part = weightless, ""
        self.operations: Counter[Operation] = Counter()
        self.memory = Memory()

    def begin(self, part: str) -> None:
        """Count the following operations under this name. An empty name stops the counting."""
        self.part = part

    def whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, to be counted as one kernel.

        The kernel reads the arguments once and writes the results once.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            part, self.part = self.part, ""
            made = function(*args, **kwargs)
            self.part = part
            if part:
                num_bytes = sum(map(size_bytes, _tensors((args, kwargs, made))))
                self.operations[Operation(part, "other", 0, num_bytes)] += 1
            return made

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        without_values = self._weightless and _needs_no_values(func, args, kwargs)
        made = run_weightless(func, args, kwargs) if without_values else func(*args, **kwargs)
        self.memory.see(_tensors([made]))
        if self.part:
            self.operations[describe(self.part, func, args, kwargs, made)] += 1
        return made


def describe(
    part: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any
) -> Operation:
    packet, num_bytes = func._overloadpacket, count_bytes(func, args, kwargs, made)
    if packet in ATTENTION:
        return Operation(part, "attention", ATTENTION[packet](*args, **kwargs), num_bytes)
    if packet in PRODUCTS:
        return Operation(part, "product", PRODUCTS[packet](*args, **kwargs), num_bytes)
    if packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=made)
        return Operation(part, "product", flops, num_bytes)
    return Operation(part, "other", 0, num_bytes)


# ----------------------------------------------------------------------------------------------------------------
# FLOPs


def attention_flops(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, backward: bool) -> int:
    """Return the FLOPs of attention: two products forward, and five backward.

    The backward products are the scores again, and the gradients of v, p, q and k. A causal kernel
    computes scores only up to the diagonal.
    """
    (batch, heads, queries, size), keys = q.shape, k.shape[2]
    # With causal attention, row i of T attends to i + 1 keys, i.e. T (T + 1) / 2 pairs, and to all
    # earlier keys if there are any.
    pairs = (
        queries * (queries + 1) // 2 + queries * (keys - queries) if is_causal else queries * keys
    )
    # Backward, the scores and the gradients of q and k depend on the key size, and the gradients of
    # p and v on the value size.
    factors = 3 * size + 2 * v.shape[3] if backward else size + v.shape[3]
    return 2 * batch * heads * pairs * factors


def _forward(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, is_causal: bool = False, **_: Any
) -> int:
    return attention_flops(q, k, v, is_causal=is_causal, backward=False)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    dropout: float,
    is_causal: bool,
    **_: Any,
) -> int:
    return attention_flops(q, k, v, is_causal=is_causal, backward=True)


def _range_pairs(q: Tensor, start_BN: Tensor, end_BN: Tensor) -> int:
    # Each of the H heads has the same pairs. The ranges are small integer tensors, so they have
    # values.
    return q.shape[1] * int((end_BN - start_BN).sum())


def _range(q: Tensor, k: Tensor, v: Tensor, start_BN: Tensor, end_BN: Tensor, *_: Any) -> int:
    return 2 * _range_pairs(q, start_BN, end_BN) * (q.shape[3] + v.shape[3])


def _range_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    start: Tensor,
    end: Tensor,
    *_: Any,
) -> int:
    again = (
        0 if q.device.type == "cpu" else _range(q, k, v, start, end)
    )  # a GPU computes the output again
    return 2 * _range_pairs(q, start, end) * (3 * q.shape[3] + 2 * v.shape[3]) + again


def _grouped_mm(x: Tensor, weights: Tensor, *_: Any, **__: Any) -> int:
    """Return the FLOPs of a grouped product: each row of x is multiplied by one expert's matrix."""
    return 2 * x.shape[0] * x.shape[1] * weights.shape[-1]


def _addmm(_: Tensor, left: Tensor, right: Tensor, *__: Any, **___: Any) -> int:
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]


aten = torch.ops.aten
ATTENTION: dict[Any, Callable[..., int]] = {
    # A CPU's fused kernel stands for GPU kernels, which compute and move the same amounts.
    aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
    # Each row attends to a range of keys. These are the operations of `heads.nn.prefix`.
    torch.ops.redraft.prefix_attention: _range,
    torch.ops.redraft.prefix_attention_backward: _range_backward,
}
PRODUCTS: dict[Any, Callable[..., int]] = {aten._grouped_mm: _grouped_mm, aten.addmm: _addmm}
"""Formulas that are missing or wrong in PyTorch's table. Its formula for `addmm` fails if the
result's dtype is given.
"""


# ----------------------------------------------------------------------------------------------------------------
# bytes

# Operations that read only as much as they return.
GATHERS = {"embedding", "index", "gather", "index_select"}

SCATTERS = {"index_put_", "scatter_", "scatter_add_", "index_add_", "index_copy_"}
"""Operations that write only the given values into their first argument."""

OVERWRITE = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_"}
"""Operations that do not read their first argument."""

EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


def count_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> int:
    """Return the bytes that an operation reads and writes; 0 for a view."""
    name, arguments = _read_schema(func)
    if name in EMPTY:
        return 0
    given = [
        (a, _tensors([args[place] if place < len(args) else kwargs[a.name]]))
        for place, a in enumerate(arguments)
        if place < len(args) or a.name in kwargs
    ]
    # A result in the storage of an argument is not new: it is a view, or the changed argument.
    held = {_storage(x)._cdata for _, tensors in given for x in tensors}
    fresh = [x for x in _tensors([made]) if _storage(x)._cdata not in held]
    written = [x for a, tensors in given if a.is_written for x in tensors]
    if not fresh and not written:
        return 0  # a view
    # `addmm` with beta = 0 ignores the first argument.
    is_ignored = name in (*GATHERS, *SCATTERS, *OVERWRITE) or kwargs.get("beta") == 0
    read = [
        x
        for i, (a, tensors) in enumerate(given)
        # An `out=` argument is not read, and neither is the table of a gather, scatter or
        # overwrite.
        if not (a.is_out or (i == 0 and is_ignored))
        for x in tensors
    ]
    if name in GATHERS:
        read += fresh
    if name in SCATTERS:
        # The values are the last argument, as in index_add_(self, dim, index, source). As many
        # elements are written as there are values.
        written = read[-1:]
    return sum(map(size_bytes, (*fresh, *written, *read)))


class _Argument(NamedTuple):
    name: str
    is_written: bool
    is_out: bool


@functools.cache
def _read_schema(func: Any) -> tuple[str, list[_Argument]]:
    """Return (name, arguments) of an operation. PyTorch makes a new schema for each access."""
    # The schema shows which arguments are written: `copy_(Tensor(a!) self, ...)` writes the first.
    return func._schema.name.removeprefix("aten::"), [
        _Argument(a.name, bool(a.alias_info and a.alias_info.is_write), getattr(a, "is_out", False))
        for a in func._schema.arguments
    ]


def size_bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's elements. Elements repeated by a stride of 0 count once."""
    return x.element_size() * math.prod(
        n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or not n
    )


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts, in less time than `tree_leaves`."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
        elif isinstance(value, dict):
            found += _tensors(value.values())
    return found


def _map(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to everything in nested lists, tuples and dicts."""
    if type(x) is tuple or type(x) is list:
        return type(x)(_map(function, each) for each in x)
    if type(x) is dict:
        return {key: _map(function, each) for key, each in x.items()}
    return function(x)


def _storage(x: Tensor) -> Any:
    return (x.plain if isinstance(x, Weightless) else x).untyped_storage()


# ---------------------------------------------------------------------------------------------------------------
# memory

ACTIVATIONS = "activations"


class Memory:
    """Bytes of all live storages by owner, now and at the peak."""

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        # Owner and bytes of each storage, by address.
        self._holders: dict[int, tuple[str, int]] = {}
        self._watched: dict[int, weakref.ref[Any]] = {}

    def see(self, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            storage = _storage(x)
            if storage._cdata not in self._holders:
                self._watch(storage)
        # Measure after each operation, when arguments and results are both alive, as on a device.
        if self.live.total() > self.peak.total():
            self.peak = self.live.copy()

    def hold(self, holder: str, tensors: Iterable[Tensor]) -> None:
        for x in tensors:
            storage = _storage(x)
            if storage._cdata not in self._holders:
                self._watch(storage)
            before, num_bytes = self._holders[storage._cdata]
            self._holders[storage._cdata] = holder, num_bytes
            self.live[before] -= num_bytes
            self.live[holder] += num_bytes

    def restart(self) -> None:
        self.peak = self.live.copy()

    def _watch(self, storage: Any) -> None:
        address, num_bytes = storage._cdata, storage.nbytes()
        self._holders[address] = ACTIVATIONS, num_bytes
        self.live[ACTIVATIONS] += num_bytes
        # PyTorch keeps the Python object of a storage as long as the storage exists.
        self._watched[address] = weakref.ref(storage, lambda _: self._end(address))

    def _end(self, address: int) -> None:
        holder, num_bytes = self._holders.pop(address)
        del self._watched[address]
        self.live[holder] -= num_bytes
