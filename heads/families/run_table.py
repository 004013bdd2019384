"""Runs of tokens and the token that followed each run, in little memory.

`Entries` are the runs in a folder, which no longer change. `RunTable` has the runs of live counts,
16 bytes each, in a table of bounded size:

    hash of (owner, run) ─► a bucket of eight slots ─► epoch | votes | owner | token

A lookup on the GPU uses a copy of the slots (`redraft/engine/device_runs.py`).

A full bucket drops the run that was confirmed least recently; among equally old runs, it drops the
one with the fewest votes. A run is valid if its token was confirmed within the window, which spans
two epochs and is counted in answers. The hash is the same in all processes, so the ranks of a
server have the same counts.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

WAYS = 8
"""Number of slots in a bucket. The hashes of a bucket take 64 bytes."""

HASH_BYTES = 8
BUCKET_BYTES = WAYS * HASH_BYTES
TOKEN_BITS, OWNER_BITS, VOTE_BITS = 26, 16, 5
"""Number of bits in each field of a row, in this order from the lowest bit. The bits above them
contain the epoch.
"""

VOTES_AT, EPOCH_AT = TOKEN_BITS + OWNER_BITS, TOKEN_BITS + OWNER_BITS + VOTE_BITS
TOKENS, OWNERS, VOTES = (1 << TOKEN_BITS) - 1, (1 << OWNER_BITS) - 1, (1 << VOTE_BITS) - 1
MOST_EPOCHS = 1 << (64 - EPOCH_AT)
# Maximum number of votes, so that a new token outvotes an old one within 17 occurrences.
MOST_VOTES = 16
BIN_BITS = 16
FACTOR, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
NOBODY = 0xD1B54A32D192ED03
"""Start value of a hash without an owner. With 0, all runs of token 0 would have the same hash."""

ANYONE = -1
"""Replaces an owner's number if runs of all owners may be found."""


@dataclass(frozen=True)
class Found:
    """A run of the table: its length in tokens, the votes for its token, and that token."""

    length: int
    votes: int
    token: int


class RunTable:
    """The runs in the answers of the window, by owner.

    All owner names have the same length, and their first half is the tenant's name. With `shares`,
    all tenants look up the same runs. A run still belongs to the owner who confirmed it last,
    because it is that owner's text.
    """

    def __init__(self, *, max_entries: int, window: int, shares: bool = False) -> None:
        """Create an empty table. `window` is a number of answers."""
        self.window, self.shares = window, shares
        self.num_texts = 0
        self._epoch = 0
        self._num_buckets = max(1, max_entries // WAYS)
        size = self._num_buckets * WAYS
        # Store bytes and integers in two blocks, so that the garbage collector has no objects to
        # traverse.
        self._hashes = bytearray(HASH_BYTES * size)
        self._rows = array("Q", bytes(8 * size))
        self._owners: dict[bytes, tuple[int, int]] = {}
        """Number and hash of the owners in the table."""
        self._free = array("H", range(OWNERS, -1, -1))
        self._changed: set[int] | None = None
        """Slots that a copy of the table lacks; None if it lacks all of them, or if there is no
        copy.
        """

    @property
    def num_bytes(self) -> int:
        """Memory used by the runs, in bytes."""
        return len(self._hashes) + self._rows.itemsize * len(self._rows)

    @property
    def num_runs(self) -> int:
        return int(self._is_valid().sum())

    @property
    def oldest(self) -> int:
        """The first epoch whose runs are valid."""
        return self._epoch - 1

    def take_changes(self) -> NDArray[np.int64] | None:
        """Return the slots that changed since the last call, in any order.

        None if all may have changed.
        """
        changed, self._changed = self._changed, set()
        return None if changed is None else np.fromiter(changed, np.int64, len(changed))

    def view(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """The rows and hashes of all slots, in the memory of the table."""
        return np.frombuffer(self._rows, np.uint64), np.frombuffer(self._hashes, np.uint64)

    def begin_text(self) -> None:
        """Count one more answer."""
        self.num_texts += 1
        self._epoch = self.num_texts // max(1, self.window // 2)
        if self._epoch >= MOST_EPOCHS:
            self.clear()

    def clear(self) -> None:
        self.__init__(  # type: ignore[misc]  # as at the start
            max_entries=self._num_buckets * WAYS, window=self.window, shares=self.shares
        )

    def find(self, last: bytes, owner: bytes) -> Found | None:
        """Find the longest run at the end of `last` that the owner may use."""
        if (known := self.find_owner(owner)) is None:
            return None
        number, start = known
        hashes, oldest = _hash_runs(last, start), self.oldest
        for length in range(len(hashes), 0, -1):
            if (place := self._find_slot(hashes[length - 1])) < 0:
                continue
            row = self._rows[place]
            is_own = number == ANYONE or row >> TOKEN_BITS & OWNERS == number
            if is_own and row >> EPOCH_AT >= oldest:
                return Found(length, row >> VOTES_AT & VOTES, row & TOKENS)
        return None

    def find_owner(self, owner: bytes) -> tuple[int, int] | None:
        """Return an owner's number in the rows, and the hash of its empty run.

        Return None for an unknown owner.
        """
        known = self._owners.get(owner)
        if self.shares:
            return ANYONE, self._hash_owner(owner) if known is None else known[1]
        return known

    def add(self, last: bytes, token: int, owner: bytes) -> None:
        """Count `token` after every run at the end of `last`.

        The count is the majority vote of Boyer and Moore (1981): each run keeps one token, and new
        text displaces old text.
        """
        if not 0 <= token <= TOKENS:
            return
        number, start = self._owners.get(owner) or self._add_owner(owner)
        confirmed = self._epoch << EPOCH_AT | number << TOKEN_BITS | token
        for hashed in _hash_runs(last, start):
            place = self._find_slot(hashed)
            row = -1 if place < 0 else self._rows[place]
            is_valid = row >= 0 and row >> EPOCH_AT >= self._epoch - 1
            if is_valid and not self.shares:
                is_valid = row >> TOKEN_BITS & OWNERS == number
            place = self._take_slot(hashed) if place < 0 else place
            votes = row >> VOTES_AT & VOTES if is_valid else 0
            if votes and row & TOKENS != token:
                self._rows[place] = row - (1 << VOTES_AT)
            else:
                self._rows[place] = confirmed | min(votes + 1, MOST_VOTES) << VOTES_AT
            if self._changed is not None:
                self._changed.add(place)

    def forget(self, beginning: bytes) -> int:
        """Drop the runs of all owners whose names start with `beginning`.

        Returns how many of these runs were valid.
        """
        gone = [number for name, (number, _) in self._owners.items() if name.startswith(beginning)]
        if not gone:
            return 0
        rows, hashes = self.view()
        is_gone = np.isin(_owners_of(rows), gone) & (hashes != 0)
        num_valid = int((is_gone & self._is_valid()).sum())
        rows[is_gone], hashes[is_gone] = 0, 0
        self._changed = None
        self._keep_owners(
            {name: known for name, known in self._owners.items() if known[0] not in gone}
        )
        return num_valid

    def read(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return tensors and numbers for the valid runs, as `restore` accepts them."""
        places = np.flatnonzero(self._is_valid()).astype(np.int32)
        rows, hashes = self.view()
        tensors: dict[str, NDArray[Any]] = {
            "places": places,
            "rows": rows[places],
            "hashes": hashes[places],
        }
        # A thread reads while the engine counts, so copy the list at once.
        names = {name.hex(): number for name, (number, _) in list(self._owners.items())}
        return tensors, {**self._shape(), "num_texts": self.num_texts, "owners": names}

    def restore(self, tensors: Mapping[str, NDArray[Any]], numbers: Mapping[str, Any]) -> bool:
        """Restore the result of `read`. Return False if the table now has a different shape."""
        if {name: numbers[name] for name in self._shape()} != self._shape():
            return False
        places = tensors["places"]
        if len(places) and not 0 <= places.min() <= places.max() < len(self._rows):
            return False
        rows, hashes = self.view()
        rows[places], hashes[places] = tensors["rows"], tensors["hashes"]
        self._changed = None
        self.num_texts = int(numbers["num_texts"])
        self._epoch = self.num_texts // max(1, self.window // 2)
        names = {bytes.fromhex(text): number for text, number in numbers["owners"].items()}
        self._keep_owners(
            {name: (number, self._hash_owner(name)) for name, number in names.items()}
        )
        return True

    def _shape(self) -> dict[str, Any]:
        return {"num_buckets": self._num_buckets, "window": self.window, "shares": self.shares}

    def _is_valid(self) -> NDArray[np.bool_]:
        rows, hashes = self.view()
        is_valid: NDArray[np.bool_] = hashes != 0
        is_valid &= rows >> np.uint64(EPOCH_AT) >= max(0, self._epoch - 1)
        return is_valid

    def _hash_owner(self, owner: bytes) -> int:
        seen = owner[len(owner) // 2 :] if self.shares else owner
        return int.from_bytes(hashlib.sha256(seen).digest()[:HASH_BYTES], "little")

    def _add_owner(self, owner: bytes) -> tuple[int, int]:
        if not self._free:
            self._drop_idle_owners()
        self._owners[owner] = self._free.pop(), self._hash_owner(owner)
        return self._owners[owner]

    def _drop_idle_owners(self) -> None:
        rows, hashes = self.view()
        is_valid = self._is_valid()
        kept = {*_owners_of(rows[is_valid]).tolist()}
        if len(kept) > OWNERS // 2:  # clients may send a new name with each request, so start again
            self.clear()
            return
        rows[~is_valid], hashes[~is_valid] = 0, 0
        self._changed = None
        self._keep_owners({name: k for name, k in self._owners.items() if k[0] in kept})

    def _keep_owners(self, owners: dict[bytes, tuple[int, int]]) -> None:
        self._owners = owners
        taken = {number for number, _ in owners.values()}
        self._free = array("H", (n for n in range(OWNERS, -1, -1) if n not in taken))

    def _find_slot(self, hashed: int) -> int:
        """Return the slot of a run, or -1 if it has none."""
        wanted = hashed.to_bytes(HASH_BYTES, "little")
        return self._find_aligned(wanted, hashed % self._num_buckets * BUCKET_BYTES)

    def _find_aligned(self, wanted: bytes, begin: int) -> int:
        """Return the slot with `wanted` in the bucket that starts at byte `begin`, or -1."""
        at = self._hashes.find(wanted, begin, begin + BUCKET_BYTES)
        while at % HASH_BYTES and at >= 0:
            at = self._hashes.find(wanted, at + 1, begin + BUCKET_BYTES)
        return at // HASH_BYTES  # -1 stays -1

    def _take_slot(self, hashed: int) -> int:
        """Return a slot for a new run. If no slot is free, replace the least recent run."""
        first = hashed % self._num_buckets * WAYS
        place = self._find_aligned(bytes(HASH_BYTES), first * HASH_BYTES)
        if place < 0:
            rows = self._rows[first : first + WAYS]
            place = first + rows.index(min(rows))
        self._hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES] = hashed.to_bytes(
            HASH_BYTES, "little"
        )
        return place


class Entries(Mapping[tuple[int, ...], tuple[int, float]]):
    """Runs, each with its next token and that token's probability, in arrays sorted by hash.

    Each run takes 20 bytes, plus 4 bytes per token of the longest run. A dictionary takes about 400
    bytes per run.
    """

    def __init__(
        self, runs_RN: NDArray[np.int32], token_R: NDArray[Any], probability_R: NDArray[Any]
    ) -> None:
        """Sort the runs by hash. `runs_RN` is padded in front with -1."""
        hashes_R = _hash_rows(runs_RN)
        order_R = np.argsort(hashes_R, kind="stable")
        self._runs_RN = np.ascontiguousarray(runs_RN[order_R], np.int32)
        self._hashes = array("Q", hashes_R[order_R].tobytes())
        self._tokens = array("i", token_R[order_R].astype(np.int32).tobytes())
        self._probabilities = array("d", probability_R[order_R].astype(np.float64).tobytes())
        bins = np.arange((1 << BIN_BITS) + 1, dtype=np.uint64)
        firsts = np.searchsorted(hashes_R[order_R] >> np.uint64(64 - BIN_BITS), bins)
        self._firsts = array("I", firsts.astype(np.uint32).tobytes())
        """The first position of each hash prefix in the sorted hashes."""

    @staticmethod
    def of(entries: Mapping[tuple[int, ...], tuple[int, float]], most: int) -> Entries:
        """Create entries from a mapping whose runs have at most `most` tokens."""
        runs_RN = np.full((len(entries), most), -1, np.int32)
        for row, run in zip(runs_RN, entries, strict=True):
            row[most - len(run) :] = run
        found = np.array([*entries.values()], np.float64).reshape(-1, 2)
        return Entries(runs_RN, found[:, 0], found[:, 1])

    def spread(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.float64], int]:
        """Return a half-full hash table: its slots' rows and hashes, probabilities, maximum probes.

        A row contains the token and, from bit `VOTES_AT` on, the index of its probability. A full
        bucket of `WAYS` slots overflows into the next one.
        """
        probabilities, kinds_R = np.unique(self._probabilities, return_inverse=True)
        rows_R = kinds_R.astype(np.uint64) << np.uint64(VOTES_AT) | np.array(
            self._tokens, np.uint64
        )
        hashes_R = np.array(self._hashes, np.uint64)
        num_buckets = len(self) * 2 // WAYS + 1
        rows, hashes = (np.zeros(num_buckets * WAYS, np.uint64) for _ in range(2))
        taken = np.zeros(num_buckets, np.int64)
        left, num_probes = np.arange(len(self)), 0
        while len(left):
            buckets = (hashes_R[left] % np.uint64(num_buckets)).astype(np.int64)
            buckets = (buckets + num_probes) % num_buckets
            order = np.argsort(buckets, kind="stable")
            left, buckets = left[order], buckets[order]
            ways = taken[buckets] + np.arange(len(left)) - np.searchsorted(buckets, buckets)
            fits = ways < WAYS
            places = buckets[fits] * WAYS + ways[fits]
            rows[places], hashes[places] = rows_R[left[fits]], hashes_R[left[fits]]
            taken = np.minimum(taken + np.bincount(buckets, minlength=num_buckets), WAYS)
            left, num_probes = left[~fits], num_probes + 1
        return rows, hashes, probabilities, max(1, num_probes)

    @property
    def num_bytes(self) -> int:
        arrays = (self._hashes, self._tokens, self._probabilities, self._firsts)
        return self._runs_RN.nbytes + sum(each.itemsize * len(each) for each in arrays)

    def find(self, last: bytes) -> tuple[int, float] | None:
        """Return the entry for the longest run at the end of `last`, or None."""
        for hashed in reversed(_hash_runs(last, NOBODY)):
            if (place := self._find_place(hashed)) >= 0:
                return self._tokens[place], self._probabilities[place]
        return None

    def read(self) -> dict[str, NDArray[Any]]:
        """Return the runs, padded in front with -1, and their tokens and probabilities."""
        return {
            "runs": self._runs_RN,
            "token": np.frombuffer(self._tokens, np.int32),
            "probability": np.frombuffer(self._probabilities, np.float64).astype(np.float32),
        }

    def __getitem__(self, run: tuple[int, ...]) -> tuple[int, float]:
        hashes = _hash_runs(np.array(run, np.int32).tobytes(), NOBODY)
        if not hashes or (place := self._find_place(hashes[-1])) < 0:
            raise KeyError(run)
        return self._tokens[place], self._probabilities[place]

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        for row_N in self._runs_RN:
            yield tuple(row_N[row_N >= 0].tolist())

    def __len__(self) -> int:
        return len(self._hashes)

    def _find_place(self, hashed: int) -> int:
        bin_ = hashed >> 64 - BIN_BITS
        end = self._firsts[bin_ + 1]
        place = bisect_left(self._hashes, hashed, self._firsts[bin_], end)
        return place if place < end and self._hashes[place] == hashed else -1


def _hash_rows(runs_RN: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Compute the `_hash_runs` hash of each row's whole run, starting from NOBODY."""
    hashes_R = np.full(len(runs_RN), NOBODY, np.uint64)
    for tokens_R in runs_RN.T[::-1]:
        mixed_R = (hashes_R ^ tokens_R.astype(np.uint32)) * np.uint64(FACTOR)
        mixed_R ^= mixed_R >> np.uint64(29)
        hashes_R = np.where(tokens_R >= 0, mixed_R, hashes_R)
    return np.maximum(hashes_R, np.uint64(1))


def _hash_runs(last: bytes, start: int) -> list[int]:
    """Compute a hash for each run at the end of `last`, the shortest first. Hashes are never 0."""
    found, hashed = [], start
    for token in reversed(memoryview(last).cast("I").tolist()):
        hashed = (hashed ^ token) * FACTOR & MASK
        hashed ^= hashed >> 29
        found.append(hashed or 1)
    return found


def _owners_of(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    return rows >> np.uint64(TOKEN_BITS) & np.uint64(OWNERS)
