"""The norm of the heads, against its formula in float64.

B = batch, T = tokens, D = hidden.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from redraft.heads.nn.layers import RMSNorm

EPS = 1e-5


def make(dtype: torch.dtype) -> tuple[RMSNorm, Tensor]:
    """A norm with weights in float32, and an input [B, T, D]."""
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(64, eps=EPS)
    norm.weight.data.copy_(1 + 0.3 * torch.randn(64, generator=generator))
    return norm, (2 * torch.randn(2, 5, 64, generator=generator)).to(dtype).requires_grad_()


def formula(x: Tensor, weight_D: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight_D


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_a_norm_and_its_gradients_have_the_type_of_the_input_under_autocast(
    dtype: torch.dtype, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = F.rms_norm, []

    def watched(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        # On a GPU autocast would make both float32, and two types would keep PyTorch from its one kernel.
        calls.append((x.dtype, weight.dtype, torch.is_autocast_enabled("cpu")))
        return plain(x, shape, weight, eps)

    monkeypatch.setattr(F, "rms_norm", watched)
    norm, x = make(dtype)
    x_64, weight_64 = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    with torch.autocast("cpu", torch.bfloat16):
        out = norm(x)
    assert calls == [(dtype, dtype, False)]
    assert out.dtype == dtype
    true = formula(x_64, weight_64)
    torch.testing.assert_close(out.double(), true, rtol=within, atol=within)
    up = torch.linspace(-1, 1, out.numel()).view_as(out)
    out.backward(up.to(dtype))
    true.backward(up.to(dtype).double())
    assert x.grad is not None
    assert norm.weight.grad is not None
    assert (x.grad.dtype, norm.weight.grad.dtype) == (dtype, torch.float32)
    for mine, exact in ((x.grad, x_64.grad), (norm.weight.grad, weight_64.grad)):
        assert exact is not None
        assert (mine.double() - exact).norm() <= within * exact.norm()


def test_a_norm_of_float32_is_that_of_pytorch_bit_for_bit() -> None:
    norm, x = make(torch.float32)
    theirs = torch.nn.RMSNorm(64, eps=EPS)
    theirs.load_state_dict(norm.state_dict())
    assert torch.equal(norm(x), theirs(x))
