"""Open plain files in folders to which other users may write."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_file(path: str | Path) -> BinaryIO:
    """Open a file for reading.

    Raises:
        FileNotFoundError: it was removed in the meantime.
        OSError: it cannot be read, or it is a link, a folder, a pipe or a device: reading one might
            never return.
    """
    # Without O_NONBLOCK, opening a pipe without a writer would wait forever. The check uses the
    # open file, so that it cannot be replaced in between.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    # Check before `fdopen`, because that fails for a folder and leaves its descriptor open.
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")
