"""Return the whole fleet to the previous version at once.

    $ redraft fleet rollback --config learner.toml
    $ redraft fleet rollback --to v000003 --config learner.toml

During a rollout, the candidate is withdrawn. Training starts again from the version that is then
served. A running learner does the work; without one, this command does it.
"""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

from redraft.files.sealed import DamagedError
from redraft.online.daemon import control
from redraft.online.daemon.config import LearnerConfig, load_config
from redraft.online.daemon.state import Phase, State, load, save
from redraft.online.fleet.discovery import discover
from redraft.online.fleet.registry import Registry
from redraft.online.fleet.server import connected, converge
from redraft.online.learning.cursor import begin_training_again


@dataclass(frozen=True, kw_only=True)
class RollbackConfig:
    config: Path = Path("learner.toml")
    """The learner's TOML file."""
    to: str = ""
    """Version to return to, instead of the previous one. It must have been current before. If it is
    the current version, servers that do not serve it are swapped, and training starts again.
    """


def main(cfg: RollbackConfig) -> None:
    print(f"the fleet serves {asyncio.run(roll_back(load_config(cfg.config), cfg.to))}")


async def roll_back(cfg: LearnerConfig, to: str = "") -> str:
    """Roll the fleet back. Return the version that it then serves.

    Raises:
        FileNotFoundError: there is no registry or no such version, or `to` was never current.
        ConnectionError: some servers do not serve the version.
    """
    registry = Registry.open(cfg.registry)
    previous = registry.previous()
    try:
        back = await control.ask(cfg.folder, control.WentBack, do="rollback", to=to)
        if back.behind:
            print(
                f"some servers do not serve the version yet; the learner keeps trying: {back.behind}"
            )
        return back.version
    except control.NoLearnerError:
        pass
    # Hold the lock, because a learner or a swap that starts now would push a different version.
    with registry.owned():
        current, state = registry.current(), _load_state(cfg)
        # A candidate in a canary is not current, or has already been rolled back, so change nothing
        # else.
        is_candidate_out = state.is_rolling_out and state.candidate != current
        if current and not to and (is_candidate_out or current == previous):
            to = current
        # Change the registry first: a restarted server serves `current`, even after a kill at this
        # point.
        version = registry.rollback(to)
        leave_training(cfg)
        async with connected(await discover(cfg.fleet), registry) as servers:
            result = await converge(servers, version, cfg.rollout.rollback_timeout_s)
    if not result.is_complete:
        # Without --to, the same command would go back by one more version.
        raise ConnectionError(
            f"{version} is current, but not all servers serve it: {result}. To try again, add "
            f"--to {version} to the command"
        )
    return version


def leave_training(cfg: LearnerConfig) -> None:
    """Let the next learner start from the current version.

    It then abandons any candidate of a killed learner.
    """
    if (state := _load_state(cfg)).candidate:
        state = replace(
            state,
            phase=Phase.IDLE,
            candidate=None,
            reason="a version was chosen manually while no learner was running",
        )
        save(state, cfg.folder / "state.json")
    begin_training_again(cfg.buffer_config.folder)


def _load_state(cfg: LearnerConfig) -> State:
    try:
        return load(cfg.folder / "state.json")
    except DamagedError:  # the next learner reports it
        return State()
