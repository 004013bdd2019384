"""The matrix products of the fused divergence.

The module chooses their dtype, splits heads into tiles, and sums gradients.

M = draft rows, D = hidden, W = vocabulary.

On many CPUs a product in bfloat16 takes longer than one in float32, because only some CPUs have
bfloat16 units. On such CPUs, the products run in float32. A bfloat16 head is then converted tile by
tile within each product, because a copy of the whole head would take twice the head's memory.
"""

import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from redraft.distill.loss.blocks import Scratch, blocks
from redraft.heads.nn.precision import product_dtype

TILE_ELEMENTS = 1 << 21  # Weights of a tile: 8 MiB in float32.

MUCH_FASTER = 1.2
"""Minimum speed-up for float32 to replace a narrower dtype. With a value near 1, the choice would
depend on noise, and runs would not be reproducible.
"""


def time_product(left_MD: Tensor, right_WD: Tensor) -> float:
    started = time.perf_counter()
    torch.mm(left_MD, right_WD.T)
    return time.perf_counter() - started


def matmul_dtype(
    x: Tensor, seconds: Callable[[Tensor, Tensor], float] = time_product
) -> torch.dtype:
    """Return the matmul dtype for `x`.

    The result is the dtype of `x` or of autocast, or float32 on a CPU if float32 is faster.
    `seconds` measures one matmul.
    """
    dtype = product_dtype(x)
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    if (
        is_narrow
        and x.device.type == "cpu"
        and _prefers_float32(dtype, seconds, torch.get_num_threads())
    ):
        return torch.float32
    return dtype


@functools.cache
def _prefers_float32(
    dtype: torch.dtype, seconds: Callable[[Tensor, Tensor], float], num_threads: int
) -> bool:
    """Whether products in float32 are faster than products in `dtype` on this machine.

    This is timed once for each number of threads.
    """

    def fastest(dtype: torch.dtype) -> float:
        left_MD, right_WD = torch.ones(256, 512, dtype=dtype), torch.ones(2048, 512, dtype=dtype)
        # The first run allocates memory. Of the others, the fastest is the least disturbed.
        return min([seconds(left_MD, right_WD) for _ in range(6)][1:])

    # A separate thread is outside autocast, and no torch mode counts or records its operations.
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(lambda: MUCH_FASTER * fastest(torch.float32) < fastest(dtype)).result()


# -------------------------------------------------------------------------------------------------
# products with a head


def as_operand(head_WD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the head in the dtype of the products.

    On a CPU, a head in a narrower dtype is returned unchanged, because the products convert it.
    """
    is_widened = head_WD.device.type == "cpu" and head_WD.dtype.itemsize < dtype.itemsize
    return head_WD if is_widened else head_WD.to(dtype)


def add_logits(
    scratch: Scratch, logits_MW: Tensor, left_MD: Tensor, head_WD: Tensor, *, is_begun: bool
) -> Tensor:
    """Compute logits += left @ head.T in place. The old values are ignored unless `is_begun`."""
    for columns, tile_TD in _tiles(scratch, head_WD, left_MD.dtype):
        _multiply_into(logits_MW[:, columns], left_MD, tile_TD.T, is_begun=is_begun)
    return logits_MW


def gradient_of_left(scratch: Scratch, dz_MW: Tensor, head_WD: Tensor) -> Tensor:
    """Return dz @ head, [M, D]."""
    d_left_MD = dz_MW.new_empty(len(dz_MW), head_WD.shape[1])
    for columns, tile_TD in _tiles(scratch, head_WD, dz_MW.dtype):
        _multiply_into(d_left_MD, dz_MW[:, columns], tile_TD, is_begun=columns.start != 0)
    return d_left_MD


def _tiles(scratch: Scratch, head_WD: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield (rows, their weights in `dtype`): one tile if the head already has `dtype`."""
    if head_WD.dtype == dtype:
        yield slice(0, len(head_WD)), head_WD
        return
    rows = max(1, TILE_ELEMENTS // head_WD.shape[1])
    for first in range(0, len(head_WD), rows):
        part_TD = head_WD[first : first + rows]
        tile_TD = scratch("tile of a head", part_TD.shape, dtype, head_WD.device)
        yield slice(first, first + rows), tile_TD.copy_(part_TD)


def _multiply_into(out: Tensor, left: Tensor, right: Tensor, *, is_begun: bool) -> None:
    """Compute out += left @ right. Unless `is_begun`, the old contents are ignored, even NaN."""
    torch.addmm(out, left, right, beta=int(is_begun), out=out)


# ----------------------------------------------------------------------------------------------------
# sums of gradients


class Gradient:
    """The sum of a leaf's gradients, in the leaf's dtype: float32 for a float32 master head."""

    def __init__(self, leaf: Tensor) -> None:
        # The memory is not zeroed: a head's first product overwrites it, which saves a pass.
        self.total = torch.empty_like(leaf)
        self.is_begun = False

    def set_rows(self, rows: slice, value_MD: Tensor) -> None:
        """Set the gradient of these rows; each row is set at most once."""
        if not self.is_begun:
            self.total.zero_()
        self.is_begun = True
        self.total[rows] = value_MD.to(self.total.dtype)

    def add_product(self, scratch: Scratch, dz_WM: Tensor, hidden_MD: Tensor) -> None:
        """Compute total += dz @ hidden. The total's dtype may be wider or narrower than theirs."""
        total, dtype = self.total, dz_WM.dtype
        if total.dtype == dtype:
            _multiply_into(total, dz_WM, hidden_MD, is_begun=self.is_begun)
        elif total.device.type != "cpu" and total.dtype == torch.float32:
            # The product adds directly to the float32 total, so no bfloat16 product is rounded,
            # written and read.
            torch.addmm(
                total, dz_WM, hidden_MD, out_dtype=torch.float32, beta=int(self.is_begun), out=total
            )
        elif total.dtype.itemsize < dtype.itemsize:
            for rows, wide_TD in _tiles(scratch, total, dtype):
                _multiply_into(wide_TD, dz_WM[rows], hidden_MD, is_begun=self.is_begun)
                total[rows].copy_(wide_TD)
        else:
            # A sum of two dtypes copies one operand, so it is computed block by block.
            for rows in blocks(total):
                product = dz_WM[rows] @ hidden_MD
                if self.is_begun:
                    total[rows].add_(product)
                else:
                    total[rows].copy_(product)
        self.is_begun = True

    def finish(self) -> Tensor:
        return self.total if self.is_begun else self.total.zero_()
