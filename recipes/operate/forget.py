"""Delete all records of a tenant, and list the drafts that may have learned from them.

    $ redraft fleet forget acme --dry-run --config learner.toml
    $ redraft fleet forget acme --config learner.toml

A tenant is the name that clients send in X-Redraft-Tenant. The command deletes from the learner's
buffer and its quarantine, the spool, and the ingest log with the broker's files.
Deleted bytes are overwritten. Records that are still on their way are dropped on arrival. Run the
command for every learner that received the tenant's requests.

Servers that draft from live counts (`--draft live`) keep text in memory, and in the folder
--live.folder if one is set. Each server is asked to delete the tenant's text from both. Servers
that failed to do so are listed. Such a server keeps the text until it is stopped and that folder is
deleted.

A draft's weights retain what they have learned. The command prints how to return to an earlier
version. The exit status is 1 if no records of the tenant were found.
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
    "and a server with --draft live keeps it until it is stopped and its --live.folder is deleted"
)


@dataclass(frozen=True, kw_only=True)
class ForgetConfig:
    tenant: Annotated[str, tyro.conf.Positional]
    """The tenant's name, as sent by clients."""
    config: Path = Path("learner.toml")
    """The learner's TOML file."""
    dry_run: bool = False
    """Only count what would be deleted, except in the ingest log and the servers' memory."""


def main(cfg: ForgetConfig) -> None:
    learner = load_config(cfg.config)
    forgotten = asyncio.run(delete_records(learner, cfg.tenant, is_dry=cfg.dry_run))
    print(*describe(forgotten, cfg), sep="\n")
    is_held = False
    if not cfg.dry_run:
        lines, is_held = asyncio.run(forget_live(learner, cfg.tenant))
        print(*lines, sep="\n")
    if not forgotten.num_records and not is_held:
        print(
            "nothing of this tenant was found: check the spelling, and the fleet's other learners"
        )
        sys.exit(1)


async def forget_live(cfg: LearnerConfig, tenant: str) -> tuple[list[str], bool]:
    """Return (lines about the deletion from live counts, whether a server had tenant text)."""
    from redraft.online.fleet.discovery import discover
    from redraft.online.fleet.server import RefusedError, UnreachableError, connected

    try:
        tokens = await discover(cfg.fleet)
    except (OSError, ValueError) as error:
        return [f"no server was asked to delete the text, {UNTIL_IT_ENDS}: {error}"], False
    async with connected(tokens) as servers:
        answers = await asyncio.gather(
            *(server.forget(tenant) for server in servers), return_exceptions=True
        )
    lines, num_runs = [], 0
    for server, answer in zip(servers, answers, strict=True):
        if isinstance(answer, UnreachableError | RefusedError):
            lines.append(f"{server.url} did not delete the text, {UNTIL_IT_ENDS}: {answer}")
        elif isinstance(answer, BaseException):
            raise answer
        elif answer:
            num_runs += answer
            lines.append(
                f"{server.url} deleted {answer} token runs of the tenant from its live counts"
            )
    return lines or ["no server had text of the tenant in its live counts"], bool(num_runs)


def describe(forgotten: Forgotten, cfg: ForgetConfig) -> list[str]:
    """Describe the result, with the command that undoes the training."""
    deleted = "would be deleted" if cfg.dry_run else "were deleted"
    places = [
        (forgotten.buffer, "in the buffer"),
        (forgotten.arriving, "in the spool or the log"),
    ]
    found = ", ".join(f"{number} {place}" for number, place in places if number)
    lines = [
        f"{forgotten.num_records} records of {cfg.tenant} {deleted}{f': {found}' if found else ''}"
    ]
    if forgotten.unattributed:
        lines.append(
            f"{forgotten.unattributed} unreadable files and messages {deleted} too: they may "
            "belong to any tenant"
        )
    if not cfg.dry_run:
        lines.append(
            "records that are still on their way or made within the next hour are dropped on "
            "arrival"
        )
    return lines + _describe_learned(forgotten, cfg)


def _describe_learned(forgotten: Forgotten, cfg: ForgetConfig) -> list[str]:
    learned = [*forgotten.learned, *(["the draft in training"] if forgotten.is_in_training else [])]
    if not learned:
        return []
    lines = [f"drafts that may have learned from the records: {', '.join(learned)}"]
    if forgotten.clean is None:
        return [*lines, "no version is older: start a new registry from draft.initial"]
    command = (
        f"redraft fleet rollback --to {forgotten.clean} --config {shlex.quote(str(cfg.config))}"
    )
    if forgotten.clean != forgotten.current:
        return [*lines, f"to serve {forgotten.clean} and continue training from it: {command}"]
    lines.append(f"the current version, {forgotten.clean}, has not learned from them")
    if forgotten.is_in_training:
        lines.append(f"to start training again from it: {command}")
    return lines


async def delete_records(cfg: LearnerConfig, tenant: str, *, is_dry: bool = False) -> Forgotten:
    """Delete a tenant's records, through the learner if it is running.

    Return the counts of what was found.

    Raises:
        BufferFullError, BrokerError: the buffer or the ingest log cannot be changed.
        AlreadyOwnedError: the learner is running but does not answer.
    """
    from redraft.online.learning.forget import Forgotten, Reach

    try:
        return await control.ask(cfg.folder, Forgotten, do="forget", tenant=tenant, dry_run=is_dry)
    except control.NoLearnerError:
        pass
    # These import torch, which is not needed if a learner is running.
    from redraft.files.target_folder import TargetFolder
    from redraft.online.daemon.opening import (
        open_buffer,
        open_stream,
        read_headers,
        read_vocab_size,
    )
    from redraft.online.fleet.registry import Registry
    from redraft.online.learning.intake import Spool
    from redraft.online.records.spool import emptying

    registry = Registry(cfg.registry)
    # No learner answers, so this command takes the buffer's lock, or raises AlreadyOwnedError. The
    # buffer must be the learner's: it also stores the records of other tenants that are arriving.
    target = TargetFolder.open(cfg.target)
    headers = read_headers(target)
    with (
        emptying(cfg.spool),
        open_buffer(cfg, registry, target.fingerprint, headers) as buffer,
    ):
        vocab_size = read_vocab_size(cfg.target)
        stream = open_stream(cfg, buffer, vocab_size) if cfg.ingest else None
        reach = Reach(
            buffer=buffer,
            registry=registry,
            spool=Spool(cfg.spool, buffer, vocab_size) if cfg.spool else None,
            stream=stream,
            # The newest comes first. A draft trained up to this record may have learned from
            # earlier ones.
            through=buffer.commits()[0].through if buffer.commits() else 0,
        )
        try:
            return reach.preview(tenant) if is_dry else await reach.forget(tenant)
        finally:
            if stream is not None:
                await stream.close()
