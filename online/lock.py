"""One owner for a folder: a lock that the kernel lets go of when its process dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path


class AlreadyOwnedError(OSError):
    """Another live process owns it; the message says which."""


def acquire(path: Path, purpose: str) -> int:
    """Descriptor that holds the lock `path` until it is closed or the process ends. The file stays: only locks count.

    Raises: AlreadyOwnedError where another process holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(descriptor, 200).decode(errors="replace").strip()
        os.close(descriptor)
        raise AlreadyOwnedError(f"{path.parent} already has {purpose} ({owner}): stop it first") from None
    with suppress(OSError):  # a full disk keeps the name out, not the lock
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return descriptor
