"""The destination of a server's records (`Outlet`): a spool folder or the ingest log."""

import errno
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from redraft.files.setting_error import SettingError, require_least
from redraft.online.records.guard import Guard
from redraft.online.records.nats_config import Nats, parse_addresses
from redraft.online.records.origin import to_label
from redraft.online.records.record import Frame
from redraft.online.records.spool import SpoolWriter


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Settings that determine which part of live traffic is recorded."""

    fraction: float = 1.0
    """Fraction of all requests to record, from 0 to 1."""
    tenants: tuple[str, ...] = ()
    """Record only requests whose X-Redraft-Tenant header is one of these; empty records all
    tenants. A request with X-Redraft-Opt-Out: 1 is never recorded. Both rules also apply to live
    counts.
    """
    logprobs: int = 32
    """Number of token probabilities recorded per position."""
    spool_bytes: int = 1 << 30
    """Maximum size of the spool in bytes (default 1 GiB). Above it, the oldest records are dropped.
    """

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise SettingError(f"{{fraction}} is {self.fraction}: it must be between 0 and 1")
        require_least(self, logprobs=1, spool_bytes=1)

    @property
    def share(self) -> str:
        """The recorded part of the traffic, as text."""
        whose = f" of the tenants {', '.join(self.tenants)}" if self.tenants else ""
        return f"{100 * self.fraction:.3g}% of all requests{whose}"


@dataclass(frozen=True, kw_only=True)
class Recording(Sample):
    """Settings for recording live traffic.

    Nothing is recorded unless `spool` or `ingest` is set.
    """

    spool: Path | None = None
    """Folder to write records to. The learner must be able to read it. Set spool or ingest, not
    both.
    """
    ingest: str = field(default="", repr=False)
    """Address of the NATS server to which records are sent: nats://HOST:4222, or tls://HOST:4222
    for TLS. Separate the servers of a cluster with commas. Set spool or ingest, not both.
    """
    nats: Nats = field(default_factory=Nats)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ingest and self.spool:
            raise SettingError(
                "records go either to a spool or to an ingest log: set {spool} or {ingest}, not "
                "both"
            )
        if self.ingest:
            parse_addresses(self.ingest)

    @property
    def is_on(self) -> bool:
        return bool(self.spool or self.ingest)

    def make_spool(self) -> None:
        """Create the spool at the start, because later write failures would only be counted.

        Raises:
            OSError: the folder cannot be created or written.
        """
        if self.spool is None:
            return
        self.spool.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(self.spool, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.spool))

    def find_skip_reason(self, tenant: str, draw: bytes) -> str:
        """Return why this request is not recorded; empty if it is recorded.

        A request is recorded if the hash of its `draw` is below `fraction`.
        """
        # A request's tenant is already a label, in which a long name is truncated and ends with a
        # hash.
        if self.tenants and tenant not in map(to_label, self.tenants):
            return "tenant"
        # A hash instead of a random number, so that every call makes the same decision.
        return "" if zlib.crc32(draw) < self.fraction * 2**32 else "fraction"


class Outlet(Protocol):
    def write(self, frames: Sequence[Frame]) -> None:
        """Write the frames, or queue them.

        Raises:
            OSError: the frames could not be written and are lost.
        """

    def status(self) -> dict[str, Any]:
        """Counters and the last error. Contains no text of any request."""

    def close(self) -> None:
        """Send all frames that are still waiting."""


def open_outlet(config: Recording, server_id: str, guard: Guard) -> Outlet:
    """Open the configured outlet. Exceptions in its thread are handled by `guard`.

    Raises:
        ValueError: no outlet is configured.
    """
    if config.ingest:
        from redraft.online.records.publisher import Publisher  # nats-py is an extra

        return Publisher(config.ingest, config.nats, guard=guard)
    if config.spool is None:
        raise ValueError(
            "no destination is configured for records: give a spool folder or an ingest log"
        )
    return SpoolWriter(config.spool, server_id, config.spool_bytes)
