"""Attention of every row over a range of keys and a few keys of its own.

No mask of rows by keys is ever built.

    row n of the batch     sees the keys `start[n] <= t < end[n]`, e.g. its document up to itself,
                           and its own keys: from the same row at other draft steps, or from
                           its block
    total                  one softmax over both: the parts are merged by log sum exp

The range has one form for CPUs (PyTorch's flash kernel, document by document or in blocks of rows)
and one for GPUs (FlexAttention). The form for CPUs is a PyTorch operation, so `redraft plan` can
count it by size.

B = batch, H = query heads, G = key heads, N = rows, T = keys, E = head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from redraft.heads.nn.precision import autocast_kind

# Number of rows per block on a CPU, if rows are not whole documents; the mask has as many.
ROWS_A_BLOCK = 256
FLEX_BLOCK = 128

MAX_GRAPHS = 256
"""Maximum number of compiled graphs per function and process (PyTorch's recompile limit, whose
default is 8). The forward pass, the backward pass, each dtype, each head size, a batch of one row,
a single block of rows or keys, and each number of a row's own keys (see `attend`) need separate
graphs: about twenty in one training run.
"""


@dataclass(frozen=True)
class Prefixes:
    """The range of keys that each row attends to."""

    start_BN: Tensor
    """int64, the first key of each row."""
    end_BN: Tensor
    """int64, the position after the last key. Every row has at least one key."""
    is_whole: bool
    """Whether row n and key n belong to the same position, and the row attends to its document up
    to itself, so that causal kernels can be used.
    """
    uses_flex: bool
    """Whether to use FlexAttention, the form for GPUs."""
    order_BN: Tensor | None = None
    """int64. Entry n of the ranges belongs to query row `order_BN[n]`, or to row n if it is None.
    Rows that are neighbours in the text share blocks of keys, and a kernel computes a block for all
    of its rows.
    """
    _blocks: dict[int, BlockMask] = field(default_factory=dict, repr=False, compare=False)
    _within: dict[tuple[int, int], Prefixes] = field(
        default_factory=dict, repr=False, compare=False
    )

    @staticmethod
    def of(document_BT: Tensor) -> Prefixes:
        """Return the prefixes for every row of packed documents, concatenated.

        Padding counts as one more document.
        """
        at_T = torch.arange(document_BT.shape[1], device=document_BT.device)
        begins_BT = torch.nn.functional.pad(document_BT.diff(dim=1) != 0, (1, 0), value=True)
        # Documents [0, 0, 1, 1, -1]: start [0, 0, 2, 2, 4], end [1, 2, 3, 4, 5].
        start_BT = torch.where(begins_BT, at_T, 0).cummax(1).values
        # A stride of 0 over the rows of the batch would need separate compiled graphs.
        return Prefixes(
            start_BT,
            (at_T + 1).expand_as(start_BT).contiguous(),
            is_whole=True,
            uses_flex=at_T.is_cuda,
        )

    def rows(self, rows_BN: Tensor, *, ascending: bool) -> Prefixes:
        """Return the prefixes of some rows, in any order. If they ascend, no sorting is needed."""
        order_BN = None if ascending else rows_BN.argsort(1)
        sorted_BN = rows_BN if order_BN is None else rows_BN.gather(1, order_BN)
        start_BN, end_BN = (x.gather(1, sorted_BN) for x in (self.start_BN, self.end_BN))
        # `is_whole` is false even for all rows in order, because only `of` ensures that row n is
        # key n's row.
        return Prefixes(
            start_BN, end_BN, is_whole=False, uses_flex=self.uses_flex, order_BN=order_BN
        )

    def within(self, window: int | None, ahead: int | Tensor = 0) -> Prefixes:
        """Narrow the ranges to what rows with a window attend to. Unchanged without a window.

        These are the keys less than `window` positions before the row's query, which is `ahead`
        positions after its last key. `ahead` is one number for all rows, or one per row, [N].

        Raises:
            ValueError: no key is left, because the window is not longer than `ahead`.
        """
        if window is None:
            return self
        if isinstance(ahead, Tensor):
            return self._narrowed(window, ahead)
        if window <= ahead:
            raise ValueError(f"a window of {window} positions does not cover {ahead} draft tokens")
        # The length of the rows is available on the host, but not the length of their documents.
        if self.is_whole and window >= self.start_BN.shape[1] + ahead:
            return self
        # Computed once for all layers with this window.
        if (window, ahead) not in self._within:
            self._within[window, ahead] = self._narrowed(window, ahead)
        return self._within[window, ahead]

    def _narrowed(self, window: int, ahead: int | Tensor) -> Prefixes:
        # `end` is the position after the last key, so the query is at end - 1 + ahead.
        start_BN = torch.maximum(self.start_BN, self.end_BN + ahead - window)
        return replace(self, start_BN=start_BN, is_whole=False, _blocks={}, _within={})

    def blocks(self, num_keys: int) -> BlockMask:
        """Return the blocks of keys that FlexAttention visits.

        They are computed once, for all layers and for both passes.
        """
        if num_keys not in self._blocks:
            self._blocks[num_keys] = block_mask(self.start_BN, self.end_BN, num_keys)
        return self._blocks[num_keys]


def attend(
    q_BHNE: Tensor,
    context: tuple[Tensor, Tensor],
    prefixes: Prefixes,
    scale: float,
    own: Sequence[tuple[Tensor, Tensor]] = (),
    num_slots: int = 1,
    *,
    is_causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Compute softmax(scale * q k) v over the keys of each row, [B, H, N, E].

    `context` has the keys and values for the range, each [B, G, T, E], with equal head sizes. `own`
    has pairs of keys and values, each [B, G, N, E]. There, row n attends to all rows in the same
    block of `num_slots` rows, or, with `is_causal`, to those up to itself. A `window` narrows the
    range.
    """
    prefixes = prefixes.within(window)
    keys, values = ([pair[i] for pair in (context, *own)] for i in (0, 1))
    # Switch autocast off, because it would cast the products of blocks to a narrower dtype. The
    # backward pass, which runs without autocast, must compute the same scores.
    with torch.autocast(autocast_kind(q_BHNE.device), enabled=False):
        out: Tensor = _Attention.apply(
            q_BHNE, prefixes, scale, (num_slots, is_causal), *keys, *values
        )  # type: ignore[no-untyped-call]
    return out


class _Attention(torch.autograd.Function):
    """One softmax over the range and the row's own keys, with O(N) memory per head and step.

    In the backward pass, with p = exp(score - total) and delta = sum(grad * out) of the *joint*
    softmax, the gradient of each score is p * (grad v - delta). So a flash kernel's backward is
    exact for the range if it gets the joint `out` and `total`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        prefixes: Prefixes,
        scale: float,
        block: tuple[int, bool],
        *keys_values: Tensor,
    ) -> Tensor:
        keys, values = keys_values[: len(keys_values) // 2], keys_values[len(keys_values) // 2 :]
        order_BN, (forward, _) = prefixes.order_BN, _operations(prefixes)
        # 1. Compute the range alone: output and log sum exp of each row.
        found = forward(_sorted(q, order_BN), keys[0], values[0], prefixes, scale)
        out, total_BHN = (_put_back(x, order_BN) for x in found)
        # 2. Compute one softmax over the range and the few own keys.
        if len(keys) > 1:
            merge = as_kernel(add_own, q.device.type)
            out, total_BHN = merge(q, out, total_BHN, keys[1:], values[1:], scale, *block)
        # No scores or probabilities are kept: the backward pass computes them again from these
        # tensors.
        ctx.save_for_backward(q, out, total_BHN, *keys_values)
        ctx.prefixes, ctx.scale, ctx.block = prefixes, scale, block
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, total_BHN, *keys_values = ctx.saved_tensors
        keys, values = keys_values[: len(keys_values) // 2], keys_values[len(keys_values) // 2 :]
        # FlashAttention-2's backward (Dao, arXiv 2307.08691, algorithm 2) reads the softmax only
        # from `out` and `total`, so with the joint values, it returns the range's part.
        order_BN, (_, backward) = ctx.prefixes.order_BN, _operations(ctx.prefixes)
        sorted_grad, sorted_q, *joint = (
            _sorted(x, order_BN) for x in (grad.contiguous(), q, out, total_BHN)
        )
        grad_q, grad_k, grad_v = backward(
            sorted_grad, sorted_q, keys[0], values[0], *joint, ctx.prefixes, ctx.scale
        )
        grad_q, grad_keys, grad_values = _put_back(grad_q, order_BN), [grad_k], [grad_v]
        if len(keys) > 1:
            merge = as_kernel(add_own_gradients, q.device.type)
            grad_q, own_keys, own_values = merge(
                grad, q, out, total_BHN, grad_q, keys[1:], values[1:], ctx.scale, *ctx.block
            )
            grad_keys, grad_values = [grad_k, *own_keys], [grad_v, *own_values]
        return grad_q, None, None, None, *grad_keys, *grad_values


def add_own(
    q: Tensor,
    out: Tensor,
    range_BHN: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scale: float,
    num_slots: int,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return (output, log sum exp) of one softmax over the range and each row's own keys.

    The inputs `out` and `range_BHN` are those of the range alone.
    """
    # 1. Compute the few own scores, in float32 or wider: [B, G, R, A, S, S] for each pair. A
    # recurrent head has S = 1.
    blocks = _Blocks(keys[0].shape[1], num_slots)
    wide_q = blocks.queries(q).to(range_BHN.dtype)
    scores = [_hide(blocks.products(wide_q, blocks.keys(k)) * scale, is_causal) for k in keys]
    sums = [blocks.flat(score.logsumexp(-1, keepdim=True))[..., 0] for score in scores]
    # 2. Compute one softmax over both parts. Its log sum exp is taken over the log sum exps of the
    # parts.
    total_BHN = torch.stack([range_BHN, *sums]).logsumexp(0)
    # The range's output is scaled to its share of the total.
    wide, total = (
        out * (range_BHN - total_BHN).exp()[..., None],
        blocks.queries(total_BHN[..., None]),
    )
    for score, v in zip(scores, values, strict=True):
        wide = wide + blocks.flat(blocks.mix((score - total).exp(), blocks.keys(v)))
    return wide.to(q.dtype), total_BHN


def add_own_gradients(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    total_BHN: Tensor,
    grad_q: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    scale: float,
    num_slots: int,
    is_causal: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Compute the gradients of q, of each row's own keys and of their values.

    The input `grad_q` is the range's part of the gradient of q.
    """
    blocks, wide = _Blocks(keys[0].shape[1], num_slots), total_BHN.dtype
    # delta = sum over E of grad * out, which is the same for every key of a row.
    delta_BHN1 = (grad.to(wide) * out).sum(-1, keepdim=True)
    wide_q, wide_grad, total, delta = map(
        blocks.queries, (q.to(wide), grad.to(wide), total_BHN[..., None], delta_BHN1)
    )
    wide_grad_q, grad_keys, grad_values = grad_q.to(wide), [], []
    for k, v in zip(keys, values, strict=True):
        p = (_hide(blocks.products(wide_q, blocks.keys(k)) * scale, is_causal) - total).exp()
        grad_score = p * (blocks.products(wide_grad, blocks.keys(v)) - delta) * scale
        wide_grad_q = wide_grad_q + blocks.flat(blocks.mix(grad_score, blocks.keys(k)))
        grad_keys.append(blocks.flat_keys(blocks.mix(grad_score.mT, wide_q)).to(k.dtype))
        grad_values.append(blocks.flat_keys(blocks.mix(p.mT, wide_grad)).to(v.dtype))
    return wide_grad_q.to(q.dtype), grad_keys, grad_values


def _hide(score: Tensor, is_causal: bool) -> Tensor:
    """If attention is causal, mask the scores of later slots in blocks, [..., S, S]."""
    later_SS = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device).triu(1)
    return score.masked_fill(later_SS, -torch.inf) if is_causal else score


def _sorted(x: Tensor, order_BN: Tensor | None) -> Tensor:
    """Sort rows of [B, H, N] or [B, H, N, E] into the order of the ranges."""
    return x if order_BN is None else x.gather(2, _places(x, order_BN))


def _put_back(x: Tensor, order_BN: Tensor | None) -> Tensor:
    return x if order_BN is None else torch.empty_like(x).scatter_(2, _places(x, order_BN), x)


def _places(x: Tensor, order_BN: Tensor) -> Tensor:
    return (order_BN[:, None] if x.dim() == 3 else order_BN[:, None, :, None]).expand_as(x)


@dataclass(frozen=True)
class _Blocks:
    """Rows in blocks of S, with query heads grouped by key head: R = H / G, A = N / S."""

    key_heads: int
    num_slots: int

    def queries(self, x_BHNE: Tensor) -> Tensor:
        """Reshape to [B, G, R, A, S, E]."""
        batch, _, rows, size = x_BHNE.shape
        return x_BHNE.reshape(
            batch, self.key_heads, -1, rows // self.num_slots, self.num_slots, size
        )

    def keys(self, x_BGNE: Tensor) -> Tensor:
        """Reshape to [B, G, 1, A, S, E]."""
        batch, heads, rows, size = x_BGNE.shape
        return x_BGNE.reshape(batch, heads, 1, rows // self.num_slots, self.num_slots, size)

    def products(self, left: Tensor, right: Tensor) -> Tensor:
        """left @ right.T in each block, [B, G, R, A, S, S]."""
        if (
            self.num_slots == 1
        ):  # a product of a row and a column, in one pass instead of a matmul for each row
            return (left * right).sum(-1, keepdim=True)
        return left @ right.mT.to(left.dtype)

    def mix(self, weights: Tensor, values: Tensor) -> Tensor:
        """weights @ values in each block, [B, G, R, A, S, E]."""
        return weights * values if self.num_slots == 1 else weights @ values.to(weights.dtype)

    def flat(self, x: Tensor) -> Tensor:
        """Reshape back to [B, H, N, E]."""
        return x.flatten(3, 4).flatten(1, 2)

    def flat_keys(self, x: Tensor) -> Tensor:
        """Reshape to [B, G, N, E], summing over the query heads that share a key head."""
        return x.sum(2).flatten(2, 3)


# ------------------------------------------------------------------------------------------------------
# the operations


def _operations(prefixes: Prefixes) -> tuple[Any, Any]:
    """The (forward, backward) operations for the range."""
    # On a GPU, this is not a PyTorch operation, because autograd, which FlexAttention needs, would
    # record nothing inside an operation.
    return (_flex, _flex_backward) if prefixes.uses_flex else (_flash, _flash_backward)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, prefixes: Prefixes, scale: float
) -> tuple[Tensor, Tensor]:
    out, total_BHN = prefix_attention(
        q, k, v, prefixes.start_BN, prefixes.end_BN, prefixes.is_whole, scale
    )
    return out, total_BHN


def _flash_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, prefixes, scale = args
    ranges = prefixes.start_BN, prefixes.end_BN, prefixes.is_whole
    grad_q, grad_k, grad_v = prefix_attention_backward(*tensors, *ranges, scale)
    return grad_q, grad_k, grad_v


# There is one operation in each direction, because the loops inside depend on data. A compiler, or
# the counter of `benchmarks.training`, then records one call with the shapes of the fake
# implementation.
@torch.library.custom_op("redraft::prefix_attention", mutates_args=(), device_types="cpu")
def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, start_BN: Tensor, end_BN: Tensor, is_whole: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (softmax over the range [B, H, N, E], log sum exp of the scores [B, H, N])."""
    out, total = _results(q)
    k, v = _repeated(q, k), _repeated(q, v)
    for piece in _pieces(start_BN, end_BN, is_whole, q.dtype):
        out[piece.at], total[piece.at] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[piece.at],
            k[piece.seen],
            v[piece.seen],
            is_causal=is_whole,
            attn_mask=piece.mask,
            scale=scale,
        )
    return out, total


@torch.library.register_fake("redraft::prefix_attention")  # type: ignore[untyped-decorator]
def _results(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    # Whatever q's dtype, the log sum exp is float32 or wider, because parts are merged with its
    # exponential.
    return torch.empty_like(q), q.new_empty(
        q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32)
    )


@torch.library.custom_op("redraft::prefix_attention_backward", mutates_args=(), device_types="cpu")
def prefix_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total_BHN: Tensor,
    start_BN: Tensor,
    end_BN: Tensor,
    is_whole: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v.

    `out` and the log sum exp may come from a softmax over the range and additional keys.
    """
    key_heads, dtype = k.shape[1], k.dtype
    k, v = _repeated(q, k), _repeated(q, v)
    # Blocks of rows share keys, so their gradients are summed in float32.
    wide = dtype if is_whole else torch.promote_types(dtype, torch.float32)
    grad_q, grad_k, grad_v = (
        torch.empty_like(q),
        torch.zeros_like(k, dtype=wide),
        torch.zeros_like(v, dtype=wide),
    )
    for piece in _pieces(start_BN, end_BN, is_whole, q.dtype):
        at, seen = piece.at, piece.seen
        grad_q[at], d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad[at],
            q[at],
            k[seen],
            v[seen],
            out[at],
            total_BHN[at],
            0.0,
            is_whole,
            attn_mask=piece.mask,
            scale=scale,
        )
        grad_k[seen] += d_k
        grad_v[seen] += d_v
    batch, _, num_keys, size = k.shape
    grad_k, grad_v = (
        x.reshape(batch, key_heads, -1, num_keys, size).sum(2).to(dtype).contiguous()
        for x in (grad_k, grad_v)
    )
    return grad_q, grad_k, grad_v


@torch.library.register_fake("redraft::prefix_attention_backward")  # type: ignore[untyped-decorator]
def _gradients(
    _: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), k.new_empty(k.shape), v.new_empty(v.shape)


# -------------------------------------------------------------------------------------------------------------
# on a CPU


@dataclass(frozen=True)
class _Piece:
    at: tuple[Any, ...]
    """The rows, as an index into [B, H, N] that keeps the batch dimension."""
    seen: tuple[slice, ...]
    """The keys, as an index into [B, H, T]."""
    mask: Tensor | None


def _repeated(q: Tensor, x_BGTE: Tensor) -> Tensor:
    groups = q.shape[1] // x_BGTE.shape[1]
    return x_BGTE.repeat_interleave(groups, dim=1) if groups > 1 else x_BGTE


def _pieces(
    start_BN: Tensor, end_BN: Tensor, is_whole: bool, dtype: torch.dtype
) -> Iterator[_Piece]:
    if is_whole:
        yield from _documents(start_BN)
        return
    every = slice(None)
    for b, (start_N, end_N) in enumerate(zip(start_BN, end_BN, strict=True)):
        for first in range(0, len(start_N), ROWS_A_BLOCK):
            rows = slice(first, first + ROWS_A_BLOCK)
            start_n, end_n = start_N[rows, None], end_N[rows, None]
            # `int` would wait for a GPU, but these pieces are only for CPUs.
            low, high = int(start_n.min()), int(end_n.max())
            key = torch.arange(low, high)
            hidden = (key < start_n) | (key >= end_n)
            # Bias that is added to the scores, [1, 1, n, high - low]. Every row has a key, because
            # a row with only -inf would give NaN.
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[
                None, None
            ]
            yield _Piece(
                (slice(b, b + 1), every, rows), (slice(b, b + 1), every, slice(low, high)), mask
            )


def _documents(start_BT: Tensor) -> Iterator[_Piece]:
    """Yield the documents. Rows of the batch with the same bounds form one piece."""
    length = start_BT.shape[1]
    bounds = [[*start_T.unique().tolist(), length] for start_T in start_BT]
    # Rows of the batch with the same packing, e.g. one document each, share the calls.
    if all(each == bounds[0] for each in bounds):
        bounds, batch = bounds[:1], [slice(None)]
    else:
        batch = [slice(b, b + 1) for b in range(len(bounds))]
    for rows, each in zip(batch, bounds, strict=True):
        for low, high in pairwise(each):
            at = (rows, slice(None), slice(low, high))
            yield _Piece(at, at, None)


# -------------------------------------------------------------------------------------------------------------
# on a GPU


def _flex(
    q: Tensor, k: Tensor, v: Tensor, prefixes: Prefixes, scale: float
) -> tuple[Tensor, Tensor]:
    # Detach them, so that training and evaluation share a graph: tensors that require gradients
    # would need a separate one.
    return _kernel(q.detach(), k.detach(), v.detach(), prefixes, scale)


def _flex_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total_BHN: Tensor,
    prefixes: Prefixes,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the range again, because FlexAttention's backward does not accept a joint `out`."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        range_out, range_BHN = _kernel(q, k, v, prefixes, scale)
    wide = total_BHN.dtype
    # out = share * range_out + the own keys' part, with share = exp(range - total).
    share_BHN1 = (range_BHN.detach() - total_BHN).exp()[..., None]
    grad_range = (share_BHN1 * grad.to(wide)).to(q.dtype)
    # `share` is the derivative of total with respect to the range's log sum exp, and also the
    # derivative of out with respect to range_out.
    grad_BHN = (share_BHN1 * grad.to(wide) * (range_out.detach().to(wide) - out.to(wide))).sum(-1)
    return torch.autograd.grad(
        (range_out, range_BHN), (q, k, v), (grad_range, grad_BHN.to(range_BHN.dtype))
    )  # type: ignore[return-value]


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, prefixes: Prefixes, scale: float
) -> tuple[Tensor, Tensor]:
    out, aux = as_kernel(flex_attention, q.device.type)(
        q,
        k,
        v,
        block_mask=prefixes.blocks(k.shape[2]),
        scale=scale,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


@functools.cache
def as_kernel(function: Callable[..., Any], device: str) -> Callable[..., Any]:
    """Return the function unchanged on a CPU, or compiled on a GPU.

    Compilation turns FlexAttention into a kernel.
    """
    if device != "cuda":
        return function
    # Without `fullgraph`, PyTorch would run the function uncompiled if it cannot compile it or has
    # reached its limit.
    compiled = torch.compile(function, fullgraph=True)

    def run(*args: Any, **options: Any) -> Any:
        try:
            with torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS):
                return compiled(*args, **options)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise RuntimeError(
                f"{function.__name__} can be compiled at most {MAX_GRAPHS} times in a process, and "
                "this limit was reached "
                f"before queries of shape {list(args[0].shape)} in {args[0].dtype}: restart the "
                f"process"
            ) from error

    return run


def block_mask(start_BN: Tensor, end_BN: Tensor, num_keys: int) -> BlockMask:
    """Find the blocks of keys that each block of rows attends to, from the ranges.

    No mask of rows by keys is built.
    """
    last = -start_BN.shape[1] % FLEX_BLOCK
    start, end = (  # pad the last block with the last row
        torch.cat([x, x[:, -1:].expand(-1, last)], 1).reshape(len(x), 1, -1, 1, FLEX_BLOCK)
        for x in (start_BN, end_BN)
    )
    # The shape is [B, 1, blocks of rows, blocks of keys] from here on.
    first_key = torch.arange(0, num_keys, FLEX_BLOCK, device=start.device)
    # A block is touched if some row may attend to some of its keys, and full if every row attends
    # to all of its keys. For full blocks, `sees` is not evaluated.
    touched = (first_key < end.amax(-1)) & (first_key + FLEX_BLOCK > start.amin(-1))
    full = (first_key >= start.amax(-1)) & (first_key + FLEX_BLOCK <= end.amin(-1))

    def sees(b: Tensor, _: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key >= start_BN[b, row]) & (key < end_BN[b, row])

    return BlockMask.from_kv_blocks(
        *_listed(touched & ~full), *_listed(full), FLEX_BLOCK, sees, (start_BN.shape[1], num_keys)
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Count the chosen entries in the last dimension, and list all indices, chosen ones first."""
    # E.g. [0, 1, 1] becomes (2, [1, 2, 0]). FlexAttention reads only the first two indices.
    places = chosen.byte().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), places.int()
