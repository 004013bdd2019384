"""Return the whole fleet to the version that was current before, at once.

    $ redraft rollback --config learner.toml

While a candidate is being rolled out, it is that candidate that is taken back. A running learner does it, and begins
its training again from what is served then; without one this command does.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from online import control
from online.config import LearnerConfig, load_config
from online.discovery import discover
from online.fleet import connected, converge
from online.registry import Registry
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    config: Path = Path("learner.toml")
    """The learner's TOML file."""


def main(cfg: Config) -> None:
    print(f"the fleet serves {asyncio.run(go_back(load_config(cfg.config)))}")


async def go_back(cfg: LearnerConfig) -> str:
    """What the fleet serves then.

    Raises: FileNotFoundError where there is nothing to go back to; ConnectionError naming servers that stayed behind.
    """
    try:
        return str((await control.ask(cfg.folder, do="rollback"))["version"])
    except control.NoLearnerError:
        pass
    registry = Registry(cfg.registry)
    with registry.owned():
        version = registry.rollback()
        async with connected(await discover(cfg.fleet, cfg.domain)) as servers:
            back = await converge(servers, version, cfg.rollout.rollback_timeout_s)
    if not back.is_complete:
        raise ConnectionError(f"{version} is current, but: {back}")
    return version


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
