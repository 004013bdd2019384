"""A patch of vLLM's CPU build, for EAGLE drafts in a compiled server.

A draft that takes the target's embedding or output head drops its own, with a handle of oneDNN. Python may collect the
handle while torch traces the draft. Its finaliser reads a tensor, torch formats that tensor for an error message, and
the formatting reads it again, until the stack overflows and the engine dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes


def patch_gemm_release() -> None:
    from vllm._custom_ops import CPUDNNLGEMMHandler

    CPUDNNLGEMMHandler.__del__ = release_outside_traces(CPUDNNLGEMMHandler.__del__)


def release_outside_traces(release: Callable[[Any], None]) -> Callable[[Any], None]:
    """`release`, run on real tensors even if torch is tracing."""

    def outside(handler: Any) -> None:
        with no_python_dispatcher(), _disable_current_modes(), torch._C.DisableTorchFunction():
            release(handler)

    return outside
