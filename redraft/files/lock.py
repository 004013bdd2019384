"""Locks that give a folder a single owner.

When the owner exits for any reason, the kernel releases the lock.
"""

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NO_LOCKS = frozenset(
    {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF}
)
"""Errors from file systems without locks: Lustre without `flock`, and some FUSE and NFS mounts."""
OWNER = b"process "
"""Prefix of the line in a lock file that names its owner."""


class AlreadyOwnedError(OSError):
    """Another running process owns the folder; the message names the owner."""


@contextmanager
def own(path: Path, purpose: str, *, waits: bool = False) -> Iterator[None]:
    """Hold the lock `path` while the block runs.

    The file itself is never removed. With `waits`, the function waits for the current owner instead
    of raising an error.

    Raises:
        AlreadyOwnedError: another process holds the lock.
        OSError: the file system has no locks, or a different kind of file has the lock's name; that
            file is left unchanged.
    """
    # The file is never unlinked, because two processes could then lock two files with the same
    # name. A program started by the owner does not inherit the descriptor (PEP 446), so it cannot
    # keep the lock. Do not follow links or wait for pipes, because a different user could have
    # created either in a shared folder.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        _acquire(descriptor, path, purpose, waits=waits)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, purpose: str, *, waits: bool) -> None:
    try:
        found = os.fstat(descriptor)
        owner = os.pread(descriptor, 200, 0) if stat.S_ISREG(found.st_mode) else b"?"
        if found.st_nlink > 1 or (owner and not owner.startswith(OWNER)):
            raise OSError(f"{path} is not a lock of redraft: move it away")
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        # On a full disk, the owner's name cannot be written, but the lock is still held.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            note = f"{os.getpid()} on {socket.gethostname()}\n".encode()
            os.pwrite(descriptor, OWNER + note, 0)
    except BlockingIOError:
        # Read once more, because the owner may have written its name only after the first read.
        named = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        raise AlreadyOwnedError(
            f"{path.parent} already has {purpose} ({named}): stop it first"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        raise OSError(f"{describe_missing(path, error)}: choose a folder on a local disk") from None


def try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed. Return False if another process holds the lock.

    If the file system has no locks, return True.
    """
    with suppress_missing_locks():
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@contextmanager
def suppress_missing_locks() -> Iterator[None]:
    """Suppress the error if the file system does not support locks."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


@contextmanager
def wait_for(path: Path, waiting: str) -> Iterator[None]:
    """Hold the lock `path` while the block runs, after any other process has released it.

    If it has to wait, it prints the line `waiting`. If the file system has no locks, it does not
    wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not try_lock(descriptor):
            print(waiting, flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def describe_missing(path: Path, error: OSError) -> str:
    """Return a clause that names the lock and the file system, for an error in `NO_LOCKS`."""
    mount, kind = find_mount(path)
    return f"{path} cannot be locked, because {mount} ({kind}) has no file locks ({error.strerror})"


def find_mount(path: Path) -> tuple[str, str]:
    """Return (mount point, type) of a path's file system. The path need not exist yet."""
    found = ("/", "unknown file system")
    places = {str(place) for place in (path.resolve(), *path.resolve().parents)}
    with suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split(" ")
            mount = mount.replace("\\040", " ")
            if mount in places and len(mount) >= len(found[0]):
                found = (mount, kind)
    return found
