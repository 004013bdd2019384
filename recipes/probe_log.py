"""Publish an empty message into the ingest log: exit status 0 where it was stored, 2 where not.

    $ redraft probe-log nats://127.0.0.1:4222

The liveness probe of a NATS server that holds such a log. A full disk can silence it while its own health page says ok,
and it stays silent when there is space again: only a publish tells, and only a restart helps.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from online.nats_config import Nats
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    ingest: Annotated[str, tyro.conf.Positional]
    """The log's address, as the learner has it."""
    nats: Nats = field(default_factory=Nats)
    timeout_s: float = 5.0


def main(cfg: Config) -> None:
    from online.log_probe import probe  # nats-py is an extra

    asyncio.run(probe(cfg.ingest, cfg.nats, cfg.timeout_s))


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
