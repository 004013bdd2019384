"""Freed memory goes back to the system."""

import ctypes
import os
import subprocess
import sys

import psutil
import pytest
import torch

from redraft.online.daemon.memory import CACHES, bound_caches, release_memory

KEPT = 64 << 10
"""Bytes of a block: small enough for glibc to take it from the heap, where it stays after it was
freed.
"""


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc has malloc_trim"
)
def test_freed_memory_is_given_back_though_a_later_block_is_in_use():
    process = psutil.Process()
    blocks = [bytearray(b"x" * KEPT) for _ in range(4000)]
    last = blocks.pop()
    blocks.clear()
    kept = process.memory_info().rss
    release_memory()
    assert kept - process.memory_info().rss > 3000 * KEPT
    assert len(last) == KEPT


MANY_SHAPES = """
import psutil, torch
weight = torch.randn(512, 512, dtype=torch.bfloat16)
for rows in range(200, 800):
    torch.nn.functional.linear(torch.randn(rows, 512, dtype=torch.bfloat16), weight)
print(psutil.Process().memory_info().rss >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN multiplies nothing here"
)
def test_a_learner_keeps_few_compiled_operations_of_shapes_that_do_not_come_back(monkeypatch):
    def measure_mib():
        done = subprocess.run(
            [sys.executable, "-c", MANY_SHAPES], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    kept = measure_mib()
    bound_caches()
    assert measure_mib() < kept - 100
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    bound_caches()
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
