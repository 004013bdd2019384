"""Delete everything that was recorded of a tenant: in the learner's buffer, and in the spool on its way there.

    $ redraft forget acme --config learner.toml

In the buffer the bytes are overwritten. What was recorded until now but is still on its way, in a server, a spool or
the ingest log, is dropped when it arrives. Where each domain has a learner of its own, each has to be asked. What a
draft has learned stays in its weights: `redraft rollback` takes versions back. A tenant is what clients name in
X-Redraft-Tenant.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from online import control
from online.config import LearnerConfig, load_config
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    tenant: Annotated[str, tyro.conf.Positional]
    """As clients named it."""
    config: Path = Path("learner.toml")
    """The learner's TOML file."""


def main(cfg: Config) -> None:
    num_records = asyncio.run(forgotten(load_config(cfg.config), cfg.tenant))
    print(f"{num_records} records of {cfg.tenant} were deleted; what is still on its way is dropped when it arrives")


async def forgotten(cfg: LearnerConfig, tenant: str) -> int:
    """How many records were deleted, by the learner that runs or else by this process.

    Raises: BufferFullError; AlreadyOwnedError where a learner has the buffer that does not answer.
    """
    try:
        return int((await control.ask(cfg.folder, do="forget", tenant=tenant))["records"])
    except control.NoLearnerError:
        pass
    from heads.artifact import fingerprint  # these load torch: a learner that runs answers without
    from online.buffer import Buffer
    from online.ingest import take
    from online.learner import vocab_size

    with Buffer(cfg.buffer_config, fingerprint(cfg.target)) as buffer:
        num_records = buffer.delete_tenant(tenant, time.time())
        while cfg.spool and (taken := take(cfg.spool, buffer, vocab_size(cfg.target), time.time())).num_files:
            num_records += taken.counts["forgotten"]
        return num_records


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
