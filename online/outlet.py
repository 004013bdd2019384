"""Where a server's records leave it: a folder, or the ingest log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from online.plugin_config import CaptureConfig
from online.records import Frame
from online.spool import SpoolWriter


class Outlet(Protocol):
    def write(self, frames: Sequence[Frame]) -> None:
        """Raises: OSError where these are lost."""

    def status(self) -> dict[str, Any]:
        """Counters, and what went wrong last. Nothing of any text."""

    def close(self) -> None:
        """Send what waits."""


def open_outlet(config: CaptureConfig, server_id: str) -> Outlet:
    if config.ingest:
        from online.publisher import Publisher  # nats-py is an extra

        return Publisher(config.ingest, config.nats)
    assert config.spool is not None
    return SpoolWriter(config.spool, server_id, config.spool_bytes)
