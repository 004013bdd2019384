"""Bring a version of the registry onto the fleet: past the gate, but not past the canary.

    $ redraft swap v000007 --config learner.toml

One server takes it first and is compared with the others; if it accepts less, all go back. A running learner does it,
when it has ended what it is at; without one this command does.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from online import control
from online.config import LearnerConfig, load_config
from online.discovery import discover
from online.fleet import connected
from online.registry import Registry
from online.rollout import Outcome, roll_waves, try_canary
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    version: Annotated[str, tyro.conf.Positional]
    """Such as v000007: `redraft versions` lists them."""
    config: Path = Path("learner.toml")
    """The learner's TOML file."""


def main(cfg: Config) -> None:
    learner = load_config(cfg.config)
    policy = learner.rollout
    longest_s = policy.warm_up_s + policy.window_timeout_s + len(policy.waves) * policy.watch_s
    print(f"{cfg.version}: one server first, compared over {policy.min_drafts} drafts (at most {longest_s:.0f} s)")
    outcome = asyncio.run(roll_out(learner, cfg.version))
    if not outcome.passed:
        raise ValueError(f"the fleet serves {outcome.version}: {outcome.reason}")
    print(f"the fleet serves {outcome.version}: {outcome.reason}")


async def roll_out(cfg: LearnerConfig, version: str) -> Outcome:
    """How it ended, by the learner that runs or else by this process.

    Raises: FileNotFoundError for a version that is not there; AlreadyOwnedError.
    """
    try:
        return Outcome(**await control.ask(cfg.folder, do="swap", version=version))
    except control.NoLearnerError:
        pass
    registry = Registry(cfg.registry)
    registry.path(version)
    with registry.owned():
        incumbent = registry.current()
        if incumbent is None:
            raise FileNotFoundError(f"{cfg.registry} has no current version to go back to: start the learner once")
        async with connected(await discover(cfg.fleet, cfg.domain)) as servers:
            outcome = await try_canary(servers, version, incumbent, cfg.rollout)
            if outcome.passed:
                outcome = await roll_waves(servers, version, incumbent, cfg.rollout)
        if outcome.passed:
            registry.promote(version)
    return outcome


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
