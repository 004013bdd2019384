"""Delete all records of a tenant, and name the drafts that may have learned from them.

    $ redraft fleet forget acme --dry-run --config learner.toml
    $ redraft fleet forget acme --config learner.toml

A tenant is the name sent by clients in X-Redraft-Tenant. The command reaches the learner's buffer
and its quarantine, the spool, the ingest log with the broker's files, and anchors. Deleted bytes
are overwritten. Records still on their way are dropped on arrival. Run it for every learner
that had the tenant's requests.

Servers that draft from live counts (`--draft live`) hold text in their memory, and in the folder
--live.folder if they have one. Each server is asked to drop the tenant's from both, and named if it
did not: it then holds the text until it ends and that folder is deleted.

A draft's weights keep what they have learned: the command that returns to the version before is
printed. Exit status 1 if nothing of the tenant was found.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from redraft.online.daemon import control
from redraft.online.daemon.config import LearnerConfig, load_config

if TYPE_CHECKING:
    from redraft.online.learning.forget import Forgotten


UNTIL_IT_ENDS = (
    "and a server with --draft live holds it until it ends and its --live.folder is deleted"
)


@dataclass(frozen=True, kw_only=True)
class ForgetConfig:
    tenant: Annotated[str, tyro.conf.Positional]
    """The tenant's name, as sent by clients."""
    config: Path = Path("learner.toml")
    """The learner's TOML file."""
    dry_run: bool = False
    """Only count what would be deleted. The log and the servers' memory are not counted."""


def main(cfg: ForgetConfig) -> None:
    learner = load_config(cfg.config)
    forgotten = asyncio.run(delete_records(learner, cfg.tenant, is_dry=cfg.dry_run))
    print(*describe(forgotten, cfg), sep="\n")
    is_held = False
    if not cfg.dry_run:
        lines, is_held = asyncio.run(forget_live(learner, cfg.tenant))
        print(*lines, sep="\n")
    if not forgotten.num_records and not is_held:
        sys.exit(1)


async def forget_live(cfg: LearnerConfig, tenant: str) -> tuple[list[str], bool]:
    """(lines about the deletion from the servers' live counts, whether any server held text)."""
    from redraft.online.fleet.discovery import discover
    from redraft.online.fleet.server import RefusedError, UnreachableError, connected

    try:
        tokens = await discover(cfg.fleet)
    except (OSError, ValueError) as error:
        return [f"no server was asked, {UNTIL_IT_ENDS}: {error}"], False
    async with connected(tokens) as servers:
        answers = await asyncio.gather(
            *(server.forget(tenant) for server in servers), return_exceptions=True
        )
    lines, num_runs = [], 0
    for server, answer in zip(servers, answers, strict=True):
        if isinstance(answer, UnreachableError | RefusedError):
            lines.append(f"{server.url} did not drop its text, {UNTIL_IT_ENDS}: {answer}")
        elif isinstance(answer, BaseException):
            raise answer
        elif answer:
            num_runs += answer
            lines.append(f"{server.url} dropped {answer} runs of it from its live counts")
    return lines or ["the live counts of no server held anything of it"], bool(num_runs)


def describe(forgotten: Forgotten, cfg: ForgetConfig) -> list[str]:
    """Lines that describe the result, with the command that undoes the training."""
    deleted = "would be deleted" if cfg.dry_run else "were deleted"
    places = [
        (forgotten.buffer, "in the buffer"),
        (forgotten.arriving, "in the spool or the log"),
        (forgotten.anchors, "in the anchors"),
    ]
    found = ", ".join(f"{number} {place}" for number, place in places if number)
    lines = [
        f"{forgotten.num_records} records of {cfg.tenant} {deleted}{f': {found}' if found else ''}"
    ]
    if not forgotten.num_records:
        lines.append(
            "nothing of this name was found: check the spelling, and the other learners of the "
            "fleet"
        )
    if forgotten.unattributed:
        lines.append(
            f"{forgotten.unattributed} unreadable files and messages {deleted} too: they may be "
            "anybody's"
        )
    if not cfg.dry_run:
        lines.append(
            "records still on their way, and those made within the next hour, are dropped on "
            "arrival"
        )
    return lines + _describe_learned(forgotten, cfg)


def _describe_learned(forgotten: Forgotten, cfg: ForgetConfig) -> list[str]:
    learned = [*forgotten.learned, *(["the draft in training"] if forgotten.is_in_training else [])]
    if not learned:
        return []
    lines = [f"these may have learned from the records, and cannot forget: {', '.join(learned)}"]
    if forgotten.clean is None:
        return [*lines, "no version is from before: start a new registry from draft.initial"]
    command = (
        f"redraft fleet rollback --to {forgotten.clean} --config {shlex.quote(str(cfg.config))}"
    )
    return [*lines, f"to serve the version before and train on from it: {command}"]


async def delete_records(cfg: LearnerConfig, tenant: str, *, is_dry: bool = False) -> Forgotten:
    """Delete a tenant's records, through the learner if it is running; returns what was found.

    Raises:
        BufferFullError, BrokerError
        AlreadyOwnedError: the learner is running but does not answer.
    """
    from redraft.online.learning.forget import Forgotten, Reach

    try:
        return await control.ask(cfg.folder, Forgotten, do="forget", tenant=tenant, dry_run=is_dry)
    except control.NoLearnerError:
        pass
    from redraft.files.folder import (
        fingerprint,
    )  # these load torch: a learner that runs answers without
    from redraft.online.daemon.opening import open_stream, read_vocab_size
    from redraft.online.fleet.registry import Registry
    from redraft.online.learning.buffer import Buffer
    from redraft.online.learning.intake import Spool

    # Nobody answers, so this takes the buffer's lock; AlreadyOwnedError if a learner has it.
    with Buffer(cfg.buffer_config, fingerprint(cfg.target)) as buffer:
        vocab_size = read_vocab_size(cfg.target)
        stream = open_stream(cfg, buffer, vocab_size) if cfg.ingest else None
        reach = Reach(
            buffer=buffer,
            registry=Registry(cfg.registry),
            anchors=cfg.anchors,
            spool=Spool(cfg.spool, buffer, vocab_size) if cfg.spool else None,
            stream=stream,
            # Newest first. Trained up to this record: a tenant's before it counts as learned.
            through=buffer.commits()[0].through if buffer.commits() else 0,
        )
        try:
            return reach.preview(tenant) if is_dry else await reach.forget(tenant)
        finally:
            if stream is not None:
                await stream.close()
