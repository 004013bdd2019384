"""Delete all records of a tenant from the learner's buffer and the spool.

    $ redraft forget acme --config learner.toml

A tenant is the name sent by clients in X-Redraft-Tenant. The bytes in the buffer are overwritten. Records still on
their way, in a server, a spool or the ingest log, are dropped on arrival. If each domain has a learner, run this for
every learner. A draft's weights keep what they have learned: `redraft rollback` takes versions back.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from redraft.online.daemon import control
from redraft.online.daemon.config import LearnerConfig, load_config
from redraft.recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    tenant: Annotated[str, tyro.conf.Positional]
    """The tenant's name, as sent by clients."""
    config: Path = Path("learner.toml")
    """The learner's TOML file."""


def main(cfg: Config) -> None:
    num_records = asyncio.run(delete_records(load_config(cfg.config), cfg.tenant))
    print(f"{num_records} records of {cfg.tenant} were deleted; records still on their way are dropped on arrival")


async def delete_records(cfg: LearnerConfig, tenant: str) -> int:
    """Delete a tenant's records, through the running learner if there is one, and return how many there were.

    Raises:
        BufferFullError: if the buffer's disk is full.
        AlreadyOwnedError: if a learner that does not answer owns the buffer.
    """
    try:
        return int((await control.ask(cfg.folder, do="forget", tenant=tenant))["records"])
    except control.NoLearnerError:
        pass
    from redraft.heads.files.artifact import fingerprint  # these load torch: a learner that runs answers without
    from redraft.online.daemon.learner import read_vocab_size
    from redraft.online.learning.buffer import Buffer
    from redraft.online.learning.intake import Spool

    with Buffer(cfg.buffer_config, fingerprint(cfg.target)) as buffer:
        num_records = buffer.delete_tenant(tenant, time.time())
        there_is_one = cfg.spool is not None and cfg.spool.is_dir()
        spool = Spool(cfg.spool, buffer, read_vocab_size(cfg.target)) if cfg.spool and there_is_one else None
        while spool and (taken := spool.take(time.time())).num_files:
            num_records += taken.counts["forgotten"]
        return num_records


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
