"""List a draft's versions with their origins and the gate's verdicts.

    $ redraft fleet versions --config learner.toml
    $ redraft fleet versions --registry drafts/llama-8b

With --config, the command also shows each server's version and the learner's state.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from redraft.files.folder import read_json
from redraft.heads.provenance import read_provenance
from redraft.online.daemon import control
from redraft.online.daemon.config import LearnerConfig, load_config
from redraft.online.fleet.discovery import discover
from redraft.online.fleet.registry import EVALUATION, Registry
from redraft.online.fleet.server import FleetServer, RefusedError, UnreachableError, connected


@dataclass(frozen=True, kw_only=True)
class VersionsConfig:
    config: Path | None = None
    """The learner's TOML file."""
    registry: Path | None = None
    """Folder with the versions, instead of --config."""


def main(cfg: VersionsConfig) -> None:
    if cfg.config is None and cfg.registry is None:
        raise ValueError(
            "there is no registry to list: set --config learner.toml, or --registry with the folder "
            "of the versions"
        )
    learner = load_config(cfg.config) if cfg.config else None
    folder = cfg.registry or (learner.registry if learner else Path())
    print(*version_lines(Registry.open(folder)), sep="\n")
    if learner is not None:
        print("", *asyncio.run(live_lines(learner)), sep="\n")


def version_lines(registry: Registry) -> list[str]:
    """Return one line per version, newest first; current and previous version are marked."""
    current, previous = registry.current(), registry.previous()
    # The later key wins. Without a previous version, the key is None, which no version has.
    marks = {previous: "previous", current: "current"}
    return [
        f"{version}  {marks.get(version, ''):<9} {_origin(registry.path(version))}"
        for version in reversed(registry.versions())
    ] or ["no versions yet"]


async def live_lines(cfg: LearnerConfig) -> list[str]:
    """Return one line with the learner's state, then one line per server with its version."""
    try:
        status = await control.ask(cfg.folder, control.Standing, do="status")
        about = f" {status.candidate}" if status.candidate else ""
        asleep = (
            ", asleep: training is not worth it until acceptance falls" if status.is_asleep else ""
        )
        lines = [f"learner: {status.phase}{about}{asleep}"]
    except control.NoLearnerError as error:
        lines = [str(error)]
    async with connected(await discover(cfg.fleet)) as servers:
        return lines + list(await asyncio.gather(*map(_server_line, servers)))


async def _server_line(server: FleetServer) -> str:
    try:
        status = await server.status()
    except (UnreachableError, RefusedError) as error:
        return str(error)
    return (
        f"{server.url}: "
        f"{status.draft_version or 'no draft'}{'' if status.is_intact else ', damaged'}"
    )


def _origin(folder: Path) -> str:
    made = read_provenance(folder)
    if made.copied_from:
        return f"copy of {made.copied_from}"
    evaluation = read_json(folder / EVALUATION) if (folder / EVALUATION).is_file() else {}
    return f"from {made.trained_from or '?'}, {evaluation.get('verdict', 'not judged')}"
