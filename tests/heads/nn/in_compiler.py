"""A draft's attention, compiled for GPUs.

No GPU is needed, and nothing runs.

`test_attention_kernels.py` runs this file in a process that has Triton.

B = batch, H = query heads, G = key heads, N = rows, T = keys, E = head size.
"""

from __future__ import annotations

import pytest
import torch
from gpu_compiler import GPUS, H100, Gpu, compile_function
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from redraft.heads.nn.prefix import Prefixes, add_own, add_own_gradients

H, G, T = 8, 2, 1024
DOCUMENTS = torch.tensor([[0] * 600 + [1] * 400 + [-1] * 24])


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros(1, *shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(
    ("size", "dtype", "num_rows"),
    [
        (64, torch.bfloat16, T),
        (128, torch.bfloat16, T),
        (128, torch.bfloat16, 700),
        (256, torch.bfloat16, T),
        (128, torch.float32, T),
    ],
)
def test_flex_attention_and_its_gradient_fit_on_the_gpu(
    size: int, dtype: torch.dtype, num_rows: int, gpu: Gpu
) -> None:
    prefixes = Prefixes.of(DOCUMENTS)
    if num_rows < T:
        prefixes = prefixes.rows(torch.arange(num_rows)[None], ascending=True)
    q, k, v = (
        x.requires_grad_()
        for x in tensors((H, num_rows, size), (G, T, size), (G, T, size), dtype=dtype)
    )

    blocks = prefixes.blocks(T)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = flex_attention(
            q, k, v, block_mask=blocks, scale=0.1, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        return out, aux.lse

    kernels = compile_function(attend, (q, k, v), gpu)
    names = {kernel.name for kernel in kernels}
    assert any(name.startswith("triton_tem_fused_flex_attention_backward") for name in names), names
    assert "triton_tem_fused_flex_attention_0" in names
    for kernel in kernels:
        assert kernel.capability == gpu.capability
        assert kernel.shared_bytes <= gpu.shared_bytes


@pytest.mark.parametrize(("num_slots", "most"), [(1, (4, 2)), (8, (8, 7))])
def test_a_rows_own_keys_are_merged_by_a_few_kernels(num_slots: int, most: tuple[int, int]) -> None:
    q, out, grad, grad_q = tensors(*[(H, T, 128)] * 4, dtype=torch.bfloat16)
    (total_BHN,) = tensors((H, T), dtype=torch.float32)
    keys, values = (tensors(*[(G, T, 128)] * 3, dtype=torch.bfloat16) for _ in range(2))
    forward = compile_function(add_own, (q, out, total_BHN, keys, values, 0.1, num_slots), H100)
    args = (grad, q, out, total_BHN, grad_q, keys, values, 0.1, num_slots)
    for kernels, at_most in zip(
        (forward, compile_function(add_own_gradients, args, H100)), most, strict=True
    ):
        # a kernel is compiled in several forms, of which a GPU would take the fastest
        assert 1 <= len({kernel.name for kernel in kernels}) <= at_most
