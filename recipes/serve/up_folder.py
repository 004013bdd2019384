"""The folder of `redraft up`: its files, the list of servers, and printed lines about records.

learner.toml    settings of the learner
token           bearer token for the swap routes
fleet.toml      the learner's servers
registry/       versions of the draft
spool/          records that the learner has not read yet
learner/        buffer of records, state, checkpoints
logs/           one file for each part
*.lock          one for each running command
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from redraft.engine.process import deferring_exit
from redraft.files.artifact import is_full, write_whole
from redraft.files.folder import read_config
from redraft.files.lock import AlreadyOwnedError, own
from redraft.files.settings import render_value
from redraft.heads.catalog import find_family
from redraft.online.daemon.config import LearnerConfig
from redraft.online.engine.config import ServerSample
from redraft.online.fleet.discovery import ListedServer, list_servers
from redraft.online.records.states import state_bytes

SETTINGS, FLEET, TOKEN, LOCK = "learner.toml", "fleet.toml", "token", "up.lock"


def read_fleet(folder: Path) -> list[ListedServer]:
    path = folder / FLEET
    return list_servers(path) if path.is_file() else []


@contextlib.contextmanager
def listed(folder: Path, url: str) -> Iterator[None]:
    """List this server in fleet.toml, and hold its lock so that other commands keep the entry.

    On exit, the entry is removed and the lock is released.
    """
    lock = _lock_of(folder, url)
    with contextlib.ExitStack() as stack:
        with _changing(folder):
            stack.enter_context(own(lock, f"a redraft up at {url}"))
        try:
            try:
                list_server(folder, url)
            except OSError as error:
                if not is_full(error):  # otherwise, `up.watch` lists it once there is space
                    raise
            yield
        finally:
            stack.close()
            # The next command that lists a server removes the entry.
            with contextlib.suppress(OSError, ValueError):
                list_server(folder, "")


def list_server(folder: Path, url: str) -> None:
    """Add a server to the list, and remove servers whose command has exited for any reason.

    A server that was added to the file by hand has no lock and is kept.

    Raises:
        ValueError, OSError: the file is being edited and cannot be read.
    """
    with _changing(folder):
        found = read_fleet(folder)
        servers = [one for one in found if one.url == url or not _has_gone(folder, one.url)]
        if url and url not in (one.url for one in servers):
            servers.append(ListedServer(url=url))
        if servers != found or not (folder / FLEET).is_file():
            write_whole(folder / FLEET, render_fleet(servers))


def render_fleet(servers: Sequence[ListedServer]) -> str:
    lines: list[str] = []
    for one in servers:
        fields = msgspec.structs.asdict(one).items()
        lines += ["[[servers]]", *(f"{key} = {render_value(at)}" for key, at in fields if at)]
    return "\n".join(lines or ["servers = []"]) + "\n"


@contextlib.contextmanager
def _changing(folder: Path) -> Iterator[None]:
    """Lock fleet.toml for reading and writing, and for trying the servers' locks."""
    with deferring_exit(), own(folder / "fleet.lock", "a change of its fleet", waits=True):
        yield


def _lock_of(folder: Path, url: str) -> Path:
    return folder / f"server-{re.sub(r'[^0-9A-Za-z]+', '-', url)}.lock"


def _has_gone(folder: Path, url: str) -> bool:
    """Whether the `redraft up` that started this server on the folder has exited."""
    lock = _lock_of(folder, url)
    if not lock.exists():
        return False
    try:
        with own(lock, "a redraft up"):
            # No process waits for this lock, because each one acquires it within `_changing`.
            lock.unlink()
    except AlreadyOwnedError:
        return False
    return True


def describe_records(cfg: LearnerConfig, capture: ServerSample) -> list[str]:
    """Describe the records: share of requests, location, size, age, and how to change the share."""
    family, buffer = find_family(cfg.draft.family), cfg.buffer_config
    if capture.fraction == 0:
        return ["records nothing, because --capture.fraction is 0"]
    parts, size = "text as token ids and log-probabilities", "about 0.3 kB per generated token"
    if family.is_head and cfg.draft.initial is not None:
        count, width = family.states_shape(read_config(cfg.draft.initial))
        parts = "text as token ids, log-probabilities and hidden states"
        num_bytes = count * state_bytes(capture.hidden_format, width)
        size = f"{num_bytes / 1e3:.1f} kB per token of prompt and answer"
    most = (
        f"{capture.spool_bytes / 1e9:.1f} GB per server in the spool and "
        f"{buffer.max_bytes / 1e9:.1f} GB in the buffer"
    )
    return [
        f"records {capture.share} ({parts}) to train the draft",
        f"  in {cfg.spool}, then in {buffer.folder}, readable only by this user (mode 0700)",
        f"  {size}; at most {most}; deleted after {buffer.max_age_s / 86400:.3g} days",
        "  never records a request with the header X-Redraft-Opt-Out: 1; --capture.fraction 0 "
        "records nothing; `redraft fleet forget TENANT` deletes a tenant's records",
    ]
