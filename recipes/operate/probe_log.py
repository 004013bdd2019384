"""Publish an empty message to the ingest log.

The exit status is 0 if the message was stored, otherwise 2.

    $ redraft fleet probe nats://127.0.0.1:4222

Use this command as the liveness probe of a NATS server with an ingest log. After its disk was full,
NATS may refuse to store messages even when space is free again, while its health page reports ok.
Only publishing reveals this state, and only a restart ends it.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from redraft.online.records.nats_config import Nats


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    ingest: Annotated[str, tyro.conf.Positional]
    """Address of the log, as in the learner's settings."""
    nats: Nats = field(default_factory=Nats)
    timeout_s: float = 5.0
    """Time to wait for the broker's answer, in seconds."""


def main(cfg: ProbeConfig) -> None:
    from redraft.online.records.nats_link import probe  # nats-py is an extra

    asyncio.run(probe(cfg.ingest, cfg.nats, cfg.timeout_s))
