"""Freed memory goes back to the system."""

import ctypes

import psutil
import pytest

from redraft.online.daemon.memory import release_memory

KEPT = 64 << 10
"""Bytes of a block: small enough for glibc to take it from the heap, where it stays after it was freed."""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc has malloc_trim")
def test_freed_memory_is_given_back_though_a_later_block_is_in_use():
    process = psutil.Process()
    blocks = [bytearray(b"x" * KEPT) for _ in range(4000)]
    last = blocks.pop()
    blocks.clear()
    kept = process.memory_info().rss
    release_memory()
    assert kept - process.memory_info().rss > 3000 * KEPT
    assert len(last) == KEPT
