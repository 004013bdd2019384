"""What the interpreter cannot run, in PyTorch.

And scheduling ahead, which vLLM switches off on a CPU, and adaptive verification, which needs CUDA
graphs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def register() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        _replace_kernels()
    if os.environ.get("KEEP_ASYNC_SCHEDULING") == "1":
        _keep_async_scheduling()
    if mode := os.environ.get("ADAPTIVE_ON_CPU"):
        sys.path.append(str(Path(__file__).parents[2]))
        from adaptive_on_cpu import stub

        stub(mode)


def _replace_kernels() -> None:
    import triton.language as tl
    import triton.language.extra.libdevice as libdevice
    import vllm.v1.sample.ops.topk_topp_sampler as ops

    ops.apply_top_k_top_p_triton = lambda logits, k, p: ops.apply_top_k_top_p_pytorch(logits, k, p)
    libdevice.log1p = lambda x: tl.log(1 + x)


def _keep_async_scheduling() -> None:
    """Schedule asynchronously, as on a GPU.

    The scheduler plans a step before the number of tokens that the last one accepted is known.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_and_keep(cls: type[CpuPlatform], vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_keep)
