"""Publish an empty message to the ingest log.

The exit status is 0 if it was stored, 2 if not.

    $ redraft fleet probe nats://127.0.0.1:4222

Use it as the liveness probe of a NATS server with an ingest log. After a full disk, NATS may stop
storing messages, even with free space again, while the server's health page says ok. Only
publishing shows it, and only a restart helps.
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
    """How long to wait for the broker's answer, in seconds."""


def main(cfg: ProbeConfig) -> None:
    from redraft.online.records.nats_link import probe  # nats-py is an extra

    asyncio.run(probe(cfg.ingest, cfg.nats, cfg.timeout_s))
