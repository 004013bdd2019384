"""`torch.compile` on CPUs that may share a cache of compiled code with a different processor."""

from collections.abc import Callable
from typing import Any

import torch


def compile_here(
    function: Callable[..., Any], *, dynamic: bool | None = None
) -> Callable[..., Any]:
    """Compile the function with code for this processor.

    If two processors share an Inductor cache, one may run vector instructions meant for the other
    and compute nonsense.
    """
    config = torch.compiler.config
    config.cache_key_tag = config.cache_key_tag or torch.backends.cpu.get_cpu_capability()
    return torch.compile(function, dynamic=dynamic)
