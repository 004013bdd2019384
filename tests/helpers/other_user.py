"""Work done by another user of this machine, in a fork: only root can do that."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

USER = 12345
"""An id that no file of this machine belongs to."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextmanager
def reachable_folder() -> Iterator[Path]:
    """A temporary folder that every user may enter. pytest's are for one user."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def call_as_other(work: Callable[[], str], group: int = USER) -> str:
    """The result of `work`, or the error it raised, as a user in `group` and in no other."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(group)
            os.setuid(USER)
            said = work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write_end, said.encode()[:60_000])
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as result:
        said = result.read()
    os.waitpid(child, 0)
    return said
