"""Files with a bearer token: one for each server, or one for all servers of a learner."""

from __future__ import annotations

import logging
import os
import re
import secrets
from pathlib import Path

logger = logging.getLogger("vllm.redraft")

_TOKEN = re.compile(r"[ -~]+")
_warned: set[Path] = set()


def read_token(path: Path) -> str:
    """The token in `path`. Logs a warning, once, if other users can read the file.

    Raises:
        ValueError: if the file holds no token.
        OSError: if it cannot be read.
    """
    with path.open() as file:
        mode = os.fstat(file.fileno()).st_mode
        token = file.read().strip()
    if not token:
        raise ValueError(f"{path} is empty: `redraft token FILE` makes a token")
    if not _TOKEN.fullmatch(token):  # it could not be sent as a header
        raise ValueError(f"{path} holds no token: it must be one line of ASCII")
    if mode & 0o077 and path not in _warned:
        _warned.add(path)
        logger.warning("other users can read the token in %s: chmod 600 %s", path, path)
    return token


def write_token(path: Path) -> None:
    """Write a new token of 256 bits to `path`, readable by this user only.

    Raises:
        FileExistsError: if the file exists.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise FileExistsError(
            f"{path} exists: servers and learner may use it. Delete it first if it is to be replaced"
        ) from None
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        file.write(secrets.token_hex(32) + "\n")
