"""One owner for a folder.

A lock, which the kernel releases when the owner ends, however it ends.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class AlreadyOwnedError(OSError):
    """Another live process owns the folder; the message names it."""


def acquire(path: Path, purpose: str) -> int:
    """Take the lock `path`, held until the descriptor is closed or the process ends.

    The file stays.

    Raises:
        AlreadyOwnedError
    """
    # Never unlinked: two processes could then lock two files of one name. A program started by the
    # owner does not inherit the descriptor (PEP 446), so it cannot keep the lock alive.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 200).decode(errors="replace").strip()
        os.close(descriptor)
        raise AlreadyOwnedError(
            f"{path.parent} already has {purpose} ({owner}): stop it first"
        ) from None
    with suppress(OSError):  # on a full disk the owner cannot be noted, but the lock holds
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return descriptor


@contextmanager
def own(path: Path, purpose: str) -> Iterator[None]:
    """Hold the lock `path` while the block runs.

    Raises:
        AlreadyOwnedError
    """
    descriptor = acquire(path, purpose)
    try:
        yield
    finally:
        os.close(descriptor)
