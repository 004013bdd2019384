"""`torch.compile` on CPUs whose cache of compiled code may hold another processor's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compile_here(function: Callable[..., Any], *, dynamic: bool | None = None) -> Callable[..., Any]:
    """The compiled function, from code that was generated for this processor's vectors.
    Inductor's cache does not tell processors apart. In a cache that two machines share, AVX2 would
    run code made for the vectors of AVX-512, and compute nonsense without a word."""
    config = torch.compiler.config
    config.cache_key_tag = config.cache_key_tag or torch.backends.cpu.get_cpu_capability()
    return torch.compile(function, dynamic=dynamic)
