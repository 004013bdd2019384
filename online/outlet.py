"""Where a server's records leave it: a folder, or the ingest log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from online.plugin_config import Recording
from online.records import Frame
from online.spool import SpoolWriter


class Outlet(Protocol):
    def write(self, frames: Sequence[Frame]) -> None:
        """Raises: OSError where these are lost."""

    def status(self) -> dict[str, Any]:
        """Counters, and what went wrong last. Nothing of any text."""

    def close(self) -> None:
        """Send what waits."""


def open_outlet(config: Recording, server_id: str) -> Outlet:
    """Raises: ValueError without a spool and without a log."""
    if config.ingest:
        from online.publisher import Publisher  # nats-py is an extra

        return Publisher(config.ingest, config.nats)
    if config.spool is None:
        raise ValueError("records go to a spool or to an ingest log: set one of them")
    return SpoolWriter(config.spool, server_id, config.spool_bytes)
