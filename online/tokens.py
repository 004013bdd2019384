"""Files with a bearer token, for one server or for all servers of a learner.

Other users must not be able to read them.
"""

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

_TOKEN = re.compile(r"[!-~]([ -~]*[!-~])?")
MIN_TOKEN_CHARS = 16
"""Minimum length of a token, because a shorter one could be guessed. `write_token` writes 64
characters.
"""


def read_token(path: Path) -> str:
    """Read the token in `path`.

    Raises:
        ValueError: the file contains no token, or other users can read it.
        OSError: the file cannot be read.
    """
    return check_token(_read_private(path), str(path))


def find_token(file: Path | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the token in `file`, or else the one in REDRAFT_TOKEN; None if neither is given.

    Raises the same errors as `read_token`.
    """
    if file:
        return read_token(file)
    token = environment.get("REDRAFT_TOKEN")
    return check_token(token, "REDRAFT_TOKEN") if token else None


def read_key(path: Path) -> str:
    """Read a server's key from `path`. The key may be short, because redraft did not create it.

    Raises:
        ValueError: the file contains no key, or other users can read it.
        OSError: the file cannot be read.
    """
    key = _read_private(path)
    if not _TOKEN.fullmatch(key):
        raise ValueError(f"{path} contains no key: it must be one line of ASCII")
    return key


def _read_private(path: Path) -> str:
    with path.open() as file:
        # Check the open file, because the path could name a different file by the time it is read.
        _require_private(path, os.fstat(file.fileno()).st_mode)
        return file.read().strip()


def check_token(token: str, source: str) -> str:
    """Return the token, which comes from `source`, if it is valid.

    Raises:
        ValueError: it is not a token, or it is too short.
    """
    if not token.strip():
        raise ValueError(f"{source} is empty: create a token with `redraft fleet token FILE`")
    if not _TOKEN.fullmatch(token):  # it could not be sent as a header
        raise ValueError(f"{source} contains no token: it must be one line of ASCII")
    if len(token) < MIN_TOKEN_CHARS:
        raise ValueError(
            f"{source} contains a token of {len(token)} characters, which is easy to guess: it "
            f"needs "
            f"{MIN_TOKEN_CHARS} or more; `redraft fleet token FILE` creates one"
        )
    return token


def require_private(path: Path) -> None:
    """Refuse a file that its group can change, or that users outside its group can access.

    The group may read it: with an fsGroup, Kubernetes mounts secrets with mode 0440.

    Raises:
        ValueError: the mode is more permissive.
    """
    _require_private(path, path.stat().st_mode)


def _require_private(path: Path, mode: int) -> None:
    if mode & 0o027:
        raise ValueError(
            f"{path} is a secret, and its mode {mode & 0o777:04o} lets others read or change it: "
            f"chmod 600 {path} (a Kubernetes secret: defaultMode 0440)"
        )


def write_token(path: Path) -> None:
    """Write a new token of 256 bits to `path`, readable by this user only.

    Raises:
        FileExistsError: the file exists.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise FileExistsError(
            f"{path} exists: servers and the learner may be using it. Delete it first if you want "
            "to replace it"
        ) from None
    with os.fdopen(descriptor, "w") as file:
        # `open` applies the umask, which may leave less than 0600.
        os.fchmod(descriptor, 0o600)
        file.write(secrets.token_hex(32) + "\n")
