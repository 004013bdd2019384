"""Return the whole fleet to the previous version at once.

    $ redraft fleet rollback --config learner.toml
    $ redraft fleet rollback --to v000003 --config learner.toml

During a rollout, the candidate is taken back. Training begins again from the version then served. A
running learner does the work; without one, this command does it.
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
    """Version to return to, instead of the previous one. It must have been current. With the
    current version, only training begins again.
    """


def main(cfg: RollbackConfig) -> None:
    print(f"the fleet serves {asyncio.run(roll_back(load_config(cfg.config), cfg.to))}")


async def roll_back(cfg: LearnerConfig, to: str = "") -> str:
    """Roll the fleet back; returns the version that it then serves.

    Raises:
        FileNotFoundError: there is no such version, or `to` was never current.
        ConnectionError: some servers do not serve the version.
    """
    registry = Registry(cfg.registry)
    previous = registry.previous()
    try:
        back = await control.ask(cfg.folder, control.WentBack, do="rollback", to=to)
        if back.behind:
            print(
                f"some servers are not there yet, and the learner keeps asking them: {back.behind}"
            )
        return back.version
    except control.NoLearnerError:
        pass
    # A learner or a swap started meanwhile is refused: two of them would push different versions.
    with registry.owned():
        current, state = registry.current(), _load_state(cfg)
        # The candidate in a canary is not current, or is rolled back already: no further.
        is_candidate_out = state.is_rolling_out and state.candidate != current
        if current and not to and (is_candidate_out or current == previous):
            to = current
        # The registry first: a restarted server takes `current`, and a kill leaves one answer.
        version = registry.rollback(to)
        leave_training(cfg)
        async with connected(await discover(cfg.fleet), registry) as servers:
            result = await converge(servers, version, cfg.rollout.rollback_timeout_s)
    if not result.is_complete:
        raise ConnectionError(f"{version} is current, but: {result}")
    return version


def leave_training(cfg: LearnerConfig) -> None:
    """Let the next learner begin at the current version.

    It then abandons the candidate of a learner that was killed.
    """
    if (state := _load_state(cfg)).candidate:
        state = replace(
            state,
            phase=Phase.IDLE,
            candidate=None,
            reason="a person chose a version without a learner",
        )
        save(state, cfg.folder / "state.json")
    begin_training_again(cfg.buffer_config.folder)


def _load_state(cfg: LearnerConfig) -> State:
    try:
        return load(cfg.folder / "state.json")
    except DamagedError:  # the next learner tells it
        return State()
