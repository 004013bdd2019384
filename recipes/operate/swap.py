"""Roll out a version from the registry, with a canary but without the gate.

    $ redraft fleet swap v000007 --config learner.toml

One server receives the version first and is compared with the others. If its acceptance is lower,
all servers return to the current version. A running learner does the work after its current task;
without one, this command does it, and Ctrl-C returns all servers to the current version.
"""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from redraft.online.daemon import control
from redraft.online.daemon.config import LearnerConfig, load_config
from redraft.online.fleet.discovery import discover
from redraft.online.fleet.registry import Registry
from redraft.online.fleet.rollout import Outcome, roll_waves, try_canary
from redraft.online.fleet.server import connected, converge
from redraft.recipes.operate.rollback import leave_training


@dataclass(frozen=True, kw_only=True)
class SwapCommandConfig:
    version: Annotated[str, tyro.conf.Positional]
    """Version to roll out, e.g. v000007. `redraft fleet versions` lists them."""
    config: Path = Path("learner.toml")
    """The learner's TOML file."""


def main(cfg: SwapCommandConfig) -> None:
    learner = load_config(cfg.config)
    policy = learner.rollout
    longest_s = policy.warm_up_s + policy.window_timeout_s + len(policy.waves) * policy.watch_s
    print(
        f"{cfg.version}: one server tries the version first, over at least {policy.min_drafts} drafts "
        f"(at most {longest_s:.0f} s)"
    )
    outcome = asyncio.run(roll_out(learner, cfg.version))
    if not outcome.passed:
        raise ValueError(f"the fleet serves {outcome.version}: {outcome.reason}")
    print(f"the fleet serves {outcome.version}: {outcome.reason}")


async def roll_out(cfg: LearnerConfig, version: str) -> Outcome:
    """Roll out a version, through the learner if it is running. Return the outcome.

    Raises:
        FileNotFoundError: there is no registry, no such version, or no current version.
        AlreadyOwnedError: the learner is running but does not answer.
    """
    try:
        return await control.ask(cfg.folder, Outcome, do="swap", version=version)
    except control.NoLearnerError:
        pass
    registry = Registry.open(cfg.registry)
    # A misspelt version is refused before the lock is taken and any server is changed.
    registry.path(version)
    with registry.owned():
        incumbent = registry.current()
        if incumbent is None:
            raise FileNotFoundError(
                f"{cfg.registry} has no current version to return to: start the learner once"
            )
        async with connected(await discover(cfg.fleet), registry) as servers:
            try:
                outcome = await try_canary(servers, version, incumbent, cfg.rollout)
                if outcome.passed:
                    outcome = await roll_waves(servers, version, incumbent, cfg.rollout)
                if outcome.passed:
                    # The draft in training does not descend from this version.
                    leave_training(cfg)
                    # Do this last: if this process is killed before, the incumbent is still
                    # current, and the learner restores it everywhere.
                    registry.promote(version)
            except BaseException:  # e.g. Ctrl-C: without a learner, nothing else reverts the swaps
                current = registry.current() or incumbent
                print(f"all servers return to {current}", file=sys.stderr)
                back = await converge(servers, current, cfg.rollout.rollback_timeout_s)
                print(back, file=sys.stderr)  # names the servers that do not serve it
                raise
    return outcome
