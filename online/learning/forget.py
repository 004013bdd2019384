"""Delete a tenant's data.

Every record of the tenant that a learner can reach is deleted. Drafts that were trained on the
tenant's records cannot be corrected, and are listed.

buffer, quarantine          overwritten
spool, log                  emptied into the buffer, which drops these records; overwritten
records that arrive later   dropped because of the list of deleted tenants
drafts                      not changed; versions that may have been trained on the records are listed
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from redraft.online.fleet.registry import Registry
from redraft.online.learning.buffer import Buffer, TenantRecords
from redraft.online.learning.intake import Spool, Taken
from redraft.online.records.origin import stored_name

if TYPE_CHECKING:
    from redraft.online.learning.stream import StreamSource

# Maximum time to delete records in flight too; limited, because traffic may never pause.
DRAIN_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Forgotten:
    """The result of one deletion. Numbers count records unless stated otherwise."""

    buffer: int
    arriving: int
    """Number of records in the spool or the log. They are dropped on arrival."""
    unattributed: int
    """Number of unreadable items that may belong to any tenant, i.e. in the quarantine and
    unreadable files.
    """
    learned: tuple[str, ...]
    """Versions that may have been trained on the tenant's records in the buffer."""
    is_in_training: bool
    """Whether the draft that is being trained may also have been trained on these records."""
    clean: str | None
    """Newest published version whose training ended before these records arrived."""
    current: str | None
    """The version that is served."""

    @property
    def num_records(self) -> int:
        return self.buffer + self.arriving


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Everything in one learner that can contain a tenant's text."""

    buffer: Buffer
    registry: Registry
    spool: Spool | None = None
    stream: StreamSource | None = None
    through: int = 0
    """Sequence number that the draft in training has reached."""
    now_s: Callable[[], float] = time.time
    """Clock for arrival times and ages in the buffer."""

    async def forget(self, tenant: str) -> Forgotten:
        """Delete the tenant's records.

        Nothing else may read the spool or the log in the meantime.

        Raises:
            BufferFullError: the buffer's disk is full.
            BrokerError: the log does not answer.
        """
        # This comes before the deletion, because afterwards it is unknown when the first record
        # arrived.
        found = await asyncio.to_thread(self.buffer.find_tenant, tenant)
        num_deleted = await asyncio.to_thread(self.buffer.delete_tenant, tenant, self.now_s())
        # This comes after `delete_tenant`, which has listed the tenant, so that the buffer drops
        # every record of the tenant.
        with self.buffer.dropping(tenant):
            drained = await self._drain()
        await asyncio.to_thread(
            self.buffer.clear_quarantine
        )  # the spool and the log may have held bad records too
        unattributed = found.num_examples + drained.counts["unattributed"]
        return self._tell(
            found, buffer=num_deleted, arriving=drained.counts["forgotten"],
            unattributed=unattributed,
        )  # fmt: skip

    def preview(self, tenant: str) -> Forgotten:
        """Return what `forget` would, without deleting anything or reading the log."""
        name = stored_name(tenant)
        found = self.buffer.find_tenant(tenant)
        return self._tell(
            found,
            buffer=found.num_records,
            arriving=self.spool.count_tenant(name) if self.spool else 0,
            unattributed=found.num_examples,
        )

    async def _drain(self) -> Taken:
        """Empty the spool and the log into the buffer, which drops the tenant's records."""
        drained, until_s = Taken(), time.monotonic() + DRAIN_S
        if self.stream is not None:
            await self.stream.close()
        with suppress(FileNotFoundError):  # no server has created the spool yet
            # Adding counters drops zeros, so a read without records has no counts and ends the
            # loop.
            while (taken := await self.take()).counts and time.monotonic() < until_s:
                drained += taken
        if self.spool is not None:
            drained.counts["unattributed"] = await asyncio.to_thread(self.spool.erase_unattributed)
        return drained

    async def take(self) -> Taken:
        """Ingest the records that wait in the spool or the log."""
        if self.stream is not None:
            return await self.stream.take()
        assert self.spool is not None
        return await asyncio.to_thread(self.spool.take, self.now_s())

    def _tell(self, found: TenantRecords, **numbers: int) -> Forgotten:
        learned: list[str] = []
        clean = current = self.registry.current()
        if found.first_seq is not None:
            ends = self.registry.list_training_ends()
            learned = [version for version, end in ends.items() if end >= found.first_seq]
            promoted = self.registry.promoted()
            clean = next(
                (name for name in reversed(promoted) if name in ends and name not in learned), None
            )
        is_in_training = found.first_seq is not None and found.first_seq <= self.through
        return Forgotten(
            learned=tuple(learned),
            is_in_training=is_in_training,
            clean=clean,
            current=current,
            **numbers,
        )
