"""Attention of a recurrent head.

It is exact for all draft steps at once, without a mask of rows by keys in memory.

Step 0 is a pass over the target's features, causal within each document. At step k, row t is at
position t + k of a continuation that starts at row t. It attends to the step-0 rows up to t, and to
the keys of row t at steps 1..k, i.e. the diagonal of each step. Serving does the same with a KV
cache: first the prefix, then token by token.

B = batch, H = query heads, G = key heads, T = tokens, E = head size, J = steps after step 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from redraft.heads.draft import Batch
from redraft.heads.nn.precision import product_dtype
from redraft.heads.nn.prefix import Prefixes, attend
from redraft.heads.nn.shares import gather_keys, prefixes_of


class Memory(Protocol):
    """The keys and values computed so far. Every call first adds new ones."""

    def attend(self, q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, scale: float) -> Tensor:
        """Return softmax(scale * q k) v over each query's visible keys, [B, H, T, size of v]."""


class StepMemory:
    """A memory for training. Call j, counted from 0, is draft step j for every row of the batch.

    With `rows_BN`, distinct rows of the batch, the calls after the first may have fewer rows: a
    call with n rows continues the first n of `rows_BN`. No call may have more rows than the
    previous one. With a `window`, a row attends only to keys less than `window` positions before
    its own.
    """

    def __init__(
        self, batch: Batch, rows_BN: Tensor | None = None, window: int | None = None
    ) -> None:
        assert rows_BN is None or batch.shared is None, "ranks choose no rows of a shared batch"
        self._prefixes, self._rows_BN, self._shared = prefixes_of(batch), rows_BN, batch.shared
        self._window = window
        # Prefixes of the first n rows, sorted once for all calls of `after`.
        self._of_first: dict[int, Prefixes] = {}
        self.pairs: list[tuple[Tensor, Tensor]] = []  # Keys and values of each call, [B, G, T, E].

    def after(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> StepMemory:
        """Return a memory for the same rows, with these pairs as its earlier calls."""
        # A shallow copy shares prefixes and rows. The list is new, so a call adds to only one
        # memory.
        other = copy(self)
        other.pairs = list(pairs)
        return other

    def attend(self, q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, scale: float) -> Tensor:
        q, k, v = _prepare(q_BHTE, k_BGTE, v_BGTE)
        if not self.pairs:  # in later calls, a row attends to no new keys but its own
            k, v = gather_keys(self._shared, k, v)
        self.pairs.append((k, v))
        # The first pair contains the keys and values of all rows, [B, G, T, E]. Each later pair
        # contains one key and one value for each row of that call.
        context, *own = self.pairs
        if self._rows_BN is not None and own:
            # Rows keep the order of `rows_BN`, so this step's rows are the first n of every earlier
            # step too.
            n = q.shape[2]
            own = [(key[:, :, :n], value[:, :, :n]) for key, value in own]
        prefixes = self._seen(len(own), q.shape[2])
        return attend(q, context, prefixes, scale, own)[..., : v_BGTE.shape[-1]]

    def _seen(self, step: int, n: int) -> Prefixes:
        """The keys of step 0 that the first n rows of a step attend to.

        Row t is then at position t + step, so its window has moved by `step`. The row's own keys
        from earlier steps are closer, and always within the window.
        """
        prefixes = self._prefixes
        if self._rows_BN is not None and step:
            if n not in self._of_first:
                self._of_first[n] = prefixes.rows(self._rows_BN[:, :n], ascending=False)
            prefixes = self._of_first[n]
        return prefixes.within(self._window, step)


def compute_again(
    run: Callable[..., tuple[Tensor, ...]], memories: Sequence[StepMemory], *inputs: Tensor
) -> tuple[Tensor, ...]:
    """Call run(*inputs, *memories), and call it again in the backward pass.

    Only the inputs, the outputs, and the keys and values from its single call to each memory are
    kept. All memories must have had the same number of calls before.
    """
    num_tensors = 2 * len(memories[0].pairs)  # of each memory

    def once(*flat: Tensor) -> tuple[Tensor, ...]:
        # The second run must not add its keys to the memory of later steps.
        before = []
        for i, memory in enumerate(memories):
            keys = flat[len(inputs) + i * num_tensors :][:num_tensors]
            before.append(memory.after(list(zip(keys[::2], keys[1::2], strict=True))))
        out = run(*flat[: len(inputs)], *before)
        return *out, *(x for memory in before for x in memory.pairs[-1])

    # The list is [key 0, value 0, key 1, value 1, ...] for each memory. `once` pairs them again.
    flat = [x for memory in memories for pair in memory.pairs for x in pair]
    found = checkpoint(once, *inputs, *flat, use_reentrant=False)
    new = found[-2 * len(memories) :]
    for memory, key, value in zip(memories, new[::2], new[1::2], strict=True):
        memory.pairs.append((key, value))
    return tuple(found[: -2 * len(memories)])


def _prepare(q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert q, k and v to one dtype, and pad v with zeros to the size of k."""
    dtype = product_dtype(v_BGTE)
    # DeepSeek's values are smaller than its keys, but the kernels accept only one size. The callers
    # remove the zeros from the output.
    v_BGTE = F.pad(v_BGTE, (0, k_BGTE.shape[-1] - v_BGTE.shape[-1]))
    return q_BHTE.to(dtype), k_BGTE.to(dtype), v_BGTE.to(dtype)
