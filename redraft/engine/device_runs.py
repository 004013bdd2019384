"""A draft's runs in device memory, and the chains that a step drafts from them.

    counts on the host ─► changed slots ─┐
    owners, costs, probabilities ────────┴─► one asynchronous copy per step ─► table ─► follow_chains

The copy and the kernel run on the same stream, so no chain reads a partly written slot.

B = requests in a step, S = slots of the runner, T = tokens of the longest request, K = maximum
number of draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from redraft.heads.families.retrieval import Live, Retrieval
from redraft.heads.families.run_table import ANYONE, MASK, NOBODY, VOTE_BITS, WAYS

NO_OWNER = -2
"""Replaces an owner's number if no counted run may be drafted."""

BLOCK = 1024
"""Number of positions in a text that are compared at once."""

CHANGE = 3
"""Number of values per changed slot: its index, row and hash."""

NO_CHANGES = np.zeros(0, np.int64)


class Chains(NamedTuple):
    """Draft tokens of a step."""

    tokens_BK: Tensor
    """After the last draft token, the request's newest token is repeated."""
    counts_B: Tensor
    confidences_BK: Tensor
    """Each token's probability given that all earlier tokens are right; 0 after the last token."""


class DeviceRuns:
    """A draft's runs on one device. The draft itself counts on the host."""

    def __init__(self, draft: Retrieval, device: torch.device) -> None:
        self.draft, self.device = draft, device
        self.live = draft.runs if isinstance(draft, Live) else None
        self.num_probes = 1
        if self.live:
            rows, hashes = self.live.view()
            self.num_kinds = (draft.config.max_run + 1) << VOTE_BITS
        else:
            rows, hashes, self._probabilities, self.num_probes = draft.entries.spread()
            self.num_kinds = len(self._probabilities)
        self.num_buckets = len(rows) // WAYS
        self.rows, self.hashes = self._upload(rows), self._upload(hashes)

    @property
    def num_bytes(self) -> int:
        """Memory of the table on the device, in bytes."""
        return self.rows.nbytes + self.hashes.nbytes

    def follow(
        self,
        texts_ST: Tensor,
        lengths_S: Tensor,
        slots_B: Tensor,
        num_sampled_B: Tensor,
        newest_S: Tensor,
        owners: Sequence[bytes | None],
        most: int,
        num_tokens: int,
    ) -> Chains:
        """Draft at most `most` tokens for each request, in `num_tokens` columns.

        A request without a sampled token, i.e. whose prompt has not been read completely, gets
        none.
        """
        from redraft.engine import chain_kernel  # imported only if Triton is installed

        num_requests = len(owners)
        numbers = self.update(num_requests, owners)
        tokens_BK = texts_ST.new_empty(num_requests, num_tokens, dtype=torch.int64)
        confidences_BK = texts_ST.new_empty(num_requests, num_tokens, dtype=torch.float32)
        counts_B = texts_ST.new_empty(num_requests, dtype=torch.int32)
        chain_kernel.follow_chains[(num_requests,)](
            texts_ST,
            texts_ST.stride(0),
            lengths_S,
            slots_B,
            num_sampled_B,
            newest_S,
            numbers,
            self.hashes,
            self.rows,
            tokens_BK,
            counts_B,
            confidences_BK,
            self.num_buckets,
            most,
            texts_ST.shape[1],
            K=num_tokens,
            WIDTH=1 << (num_tokens - 1).bit_length(),
            NUM_RUNS=self.draft.config.max_run,
            NUM_KINDS=self.num_kinds,
            NUM_PROBES=self.num_probes,
            IS_LIVE=self.live is not None,
            BLOCK=BLOCK,
            enable_fp_fusion=False,  # the sums of products must equal the host's to the last bit
        )
        return Chains(tokens_BK, counts_B, confidences_BK)

    def update(self, num_requests: int, owners: Sequence[bytes | None]) -> Tensor:
        """Update the table, and return the step's input numbers, int64, on the device."""
        changes = self._take_changes()
        numbers = self._upload(np.concatenate([self._list_numbers(num_requests, owners), changes]))
        first = len(numbers) - len(changes)
        if len(changes):
            places, rows, hashes = numbers[first:].view(CHANGE, -1)
            self.rows.index_copy_(0, places, rows)
            self.hashes.index_copy_(0, places, hashes)
        return numbers[:first]

    def _list_numbers(self, num_requests: int, owners: Sequence[bytes | None]) -> NDArray[np.int64]:
        draft = self.draft
        limits = [min(1.0, draft.config.verify_cost * num_requests), draft.least_first]
        probabilities = [*draft.run_probability, *self._list_kinds()]
        return np.concatenate(
            [
                np.array(limits, np.float64).view(np.int64),
                np.array([self.live.oldest if self.live else 0]),
                np.array(probabilities, np.float64).view(np.int64),
                np.array([self._find_owner(owner) for owner in owners], np.uint64)
                .ravel()
                .view(np.int64),
            ]
        )

    def _list_kinds(self) -> list[float]:
        """Return each kind of run's probability in the answers; live counts: by length and votes."""
        if not isinstance(self.draft, Live):
            return list(self._probabilities.tolist())
        probability = self.draft.counts.probability
        classes = [
            [probability((length, bits)) for bits in range(VOTE_BITS + 1)]
            for length in range(self.draft.config.max_run + 1)
        ]
        return [of[votes.bit_length()] for of in classes for votes in range(1 << VOTE_BITS)]

    def _find_owner(self, owner: bytes | None) -> tuple[int, int]:
        if self.live is None:
            return ANYONE & MASK, NOBODY
        known = None if owner is None else self.live.find_owner(owner)
        number, start = known or (NO_OWNER, 0)
        return number & MASK, start

    def _take_changes(self) -> NDArray[np.int64]:
        """Return indices, rows and hashes of changed slots.

        If all may have changed, copy the table.
        """
        if self.live is None:
            return NO_CHANGES
        places = self.live.take_changes()
        rows, hashes = self.live.view()
        if places is None:
            self.rows.copy_(self._pin(rows), non_blocking=True)
            self.hashes.copy_(self._pin(hashes), non_blocking=True)
            return NO_CHANGES
        changed = [places, rows[places].view(np.int64), hashes[places].view(np.int64)]
        return np.concatenate(changed)

    def _upload(self, values: NDArray[Any]) -> Tensor:
        return self._pin(values).to(self.device, non_blocking=True)

    def _pin(self, values: NDArray[Any]) -> Tensor:
        """Copy to pinned int64 memory, which the device can read asynchronously."""
        pinned = torch.empty(len(values), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        pinned.numpy()[:] = values.view(np.int64)
        return pinned
