"""Kernels compiled for a GPU on a machine without one.

Triton's, and those that PyTorch's compiler makes of a function.

Nothing runs. Import it only in a process of `model_runners.triton_compiler`.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

REGISTERS, THREADS = 65_536, 2_048
"""Of a multiprocessor."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU."""

    name: str
    capability: int
    """Compute capability times ten."""
    processors: int
    shared_bytes: int
    """That a program may have."""
    cache_bytes: int
    arch: str = ""
    """AMD's name of the architecture, such as gfx942; empty for NVIDIA."""

    @property
    def target(self) -> GPUTarget:
        if self.arch:
            return GPUTarget("hip", self.arch, 64)
        return GPUTarget("cuda", self.capability, 32)


A100 = Gpu("A100", 80, 108, 166_912, 40 << 20)
H100 = Gpu("H100", 90, 132, 232_448, 50 << 20)
B200 = Gpu("B200", 100, 148, 232_448, 126 << 20)
MI300X = Gpu("MI300X", 942, 304, 65_536, 256 << 20, "gfx942")
GPUS = (A100, H100, B200)


class Driver:
    """Names the GPU to compile for."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def get_current_target(self) -> GPUTarget:
        return self._gpu.target

    def get_current_device(self) -> int:
        return self._gpu.capability  # Triton asks a device's target once

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda")


class Kernel:
    """A kernel in machine code."""

    def __init__(self, name: str, compiled: Any) -> None:
        self.name = name
        target = compiled.metadata.target
        self.threads, self.shared_bytes = (
            target.warp_size * int(compiled.metadata.num_warps),
            int(compiled.metadata.shared),
        )
        if target.backend == "hip":
            self.amdgcn, self.arch = str(compiled.asm["amdgcn"]), target.arch
            self.registers, self.stack_bytes = (
                int(re.search(rf"\.{key}:\s+(\d+)", self.amdgcn)[1])  # type: ignore[index]
                for key in ("vgpr_count", "private_segment_fixed_size")
            )
            return
        self.ptx, self.capability = str(compiled.asm["ptx"]), int(target.arch)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run(
                [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
            )
        found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout + usage.stderr)
        assert found, usage
        self.registers, self.stack_bytes = int(found[1]), int(found[2])
        """`stack_bytes` of each thread: registers that had to go to memory."""

    @property
    def programs(self) -> int:
        """Programs that run at once on a multiprocessor, by registers and threads."""
        allocated = -(-self.registers // 8) * 8 * self.threads
        return min(REGISTERS // allocated, THREADS // self.threads)


class Launches:
    """A module of Triton kernels of which a launch only compiles for the GPU."""

    def __init__(self, module: Any, gpu: Gpu) -> None:
        self.kernels: list[Kernel] = []
        self._module = module
        driver.set_active(Driver(gpu))

    def __getattr__(self, name: str) -> Any:
        module, kernels = self._module, self.kernels

        class Grid:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                def launch(*args: Any, **options: Any) -> None:
                    kernels.append(
                        Kernel(name, getattr(module, name).warmup(*args, grid=grid, **options))
                    )

                return launch

        return Grid()


def compile_function(function: Callable[..., Any], args: Sequence[Any], gpu: Gpu) -> list[Kernel]:
    """The kernels of this function by PyTorch's compiler.

    Those of its gradients are included if an argument requires one.

    The function is traced on the CPU. Its graphs are then compiled as if their tensors were on the
    GPU.
    """
    graphs: list[tuple[GraphModule, Sequence[Any]]] = []

    def keep(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append((graph, inputs))
        return graph.forward

    torch._dynamo.reset()
    kernels: list[Kernel] = []
    with _patched(gpu, kernels):
        backend = aot_autograd(
            fw_compiler=keep, bw_compiler=keep, decompositions=select_decomp_table()
        )
        # Otherwise the gradient's graph would come with the first backward pass.
        with functorch_config.patch(force_non_lazy_backward_lowering=True):
            torch.compile(function, backend=backend, fullgraph=True)(*args)
        for (graph, inputs), is_backward in zip(graphs, (False, True), strict=False):
            mode = FakeTensorMode()
            moved = tree_map(lambda x, mode=mode: _moved(x, mode), list(inputs))
            _move(graph, mode)
            with tracing(TracingContext(mode)), mode:
                compile_fx_inner(graph, moved, is_backward=is_backward, cudagraphs=False)
    return kernels


def _moved(x: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(x, Tensor):
        return x
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


def _move(graph: GraphModule, mode: FakeTensorMode) -> None:
    for part in graph.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
            if "val" in node.meta:
                node.meta["val"] = tree_map(lambda x: _moved(x, mode), node.meta["val"])


@contextmanager
def _patched(gpu: Gpu, kernels: list[Kernel]) -> Iterator[None]:
    """PyTorch takes this machine to have the GPU, and each compiled kernel is put into the list."""
    compile_one = triton_heuristics.CachingAutotuner._precompile_config

    def compile_and_keep(self: Any, settings: Any) -> Any:
        made = compile_one(self, settings)
        kernels.append(Kernel(self.fn.__name__, made.kernel))
        return made

    properties = SimpleNamespace(
        name=gpu.name, major=gpu.capability // 10, minor=gpu.capability % 10, multi_processor_count=gpu.processors,
        warp_size=32, regs_per_multiprocessor=REGISTERS, max_threads_per_multi_processor=THREADS,
        total_memory=80 << 30, shared_memory_per_block_optin=gpu.shared_bytes, L2_cache_size=gpu.cache_bytes,
    )  # fmt: skip
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_, **__: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }
    # `torch._higher_order_ops.flex_attention` is an operation, which hides its module.
    flex = importlib.import_module("torch._higher_order_ops.flex_attention")
    settings = {
        "force_disable_caches": True,
        "compile_threads": 1,
        "use_static_cuda_launcher": False,
    }
    with pytest.MonkeyPatch.context() as patch, config.patch(settings):
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
            # It has copies of some of these, some without an underscore.
            patch.setattr(CudaInterface, name.lstrip("_"), staticmethod(value), raising=False)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        patch.setattr(torch.version, "cuda", "13.0")
        DeviceProperties.create.__func__.cache_clear()
        driver.set_active(Driver(gpu))
        # These make tensors on the GPU.
        patch.setattr(joint_graph, "lazy_init", lambda *_: None)
        patch.setattr(post_grad, "lazy_init", lambda *_: None)
        patch.setattr(flex, "_permute_strides", lambda out, strides: out)
        # FlexAttention has no gradient on a CPU.
        patch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
        patch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
        patch.setattr(triton_heuristics.CachingAutotuner, "_precompile_config", compile_and_keep)
        patch.setattr(triton_heuristics.CachingAutotuner, "_make_launchers", lambda _: None)
        yield
