"""Plain files in folders to which others may write."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: str | Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        FileNotFoundError: if it was removed in the meantime.
        OSError: if it cannot be read, or is a link, a folder, a pipe or a device: reading one might
            never return.
    """
    # Without O_NONBLOCK, opening a pipe without a writer waits forever. The check follows on the
    # open file, so nobody can swap it in between.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    # Before `fdopen`, which refuses a folder and leaves its descriptor open.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
