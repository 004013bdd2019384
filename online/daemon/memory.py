"""Memory that the learner no longer needs."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def release_memory() -> None:
    """Give freed memory back to the system.

    glibc keeps it for the process: 400 MiB after each candidate of a draft of 7M parameters, and more after one large
    record. Other C libraries have no such call, and nothing happens.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
