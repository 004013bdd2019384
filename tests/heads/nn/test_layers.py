"""The norm of the heads, against its formula in float64, and the sizes of their layers.

B = batch, T = tokens, D = hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from make_families import SIZES, VARIANTS, make_variant
from make_heads import make_target
from torch import Tensor

from redraft.heads.files.folder import read_config
from redraft.heads.nn.layers import LlamaShape, RMSNorm
from redraft.heads.options import Eagle3

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


@pytest.mark.parametrize("name", [name for name, variants in VARIANTS.items() if "sizes of its own" in variants])
def test_the_sizes_of_a_head_are_those_of_the_options(name: str, tmp_path: Path) -> None:
    head, model = make_variant(name, "sizes of its own")
    ends = {".".join(each.split(".")[-2:]): tuple(p.shape) for each, p in head.named_parameters()}
    assert ends["q_proj.weight"][0] == 8 * 16
    assert ends["k_proj.weight"][0] == ends["v_proj.weight"][0] == 4 * 16
    assert ends["o_proj.weight"] == (32, 8 * 16)
    assert ends["gate_proj.weight"] == (40, 32)
    head.export(tmp_path)
    written = read_config(tmp_path)
    assert {key: written[key] for key in SIZES} == SIZES
    assert (written["hidden_size"], written["vocab_size"]) == (model.config.hidden_size, model.config.vocab_size)


@pytest.mark.parametrize("name", SIZES)
def test_one_size_is_chosen_and_the_others_stay_the_targets(name: str) -> None:
    config = make_target().config
    of_target = LlamaShape.from_config(config)
    chosen = LlamaShape.of_head(Eagle3(**{name: 2 * getattr(of_target, name)}), config)
    changed = {key for key in SIZES if getattr(chosen, key) != getattr(of_target, key)}
    assert changed == {name}
    assert LlamaShape.of_head(Eagle3(), config) == of_target


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"num_key_value_heads": 3}, r"4 query heads .* 3 key heads .*--head\.num-key-value-heads"),
        ({"num_attention_heads": 6}, r"6 query heads .* 32: .*--head\.num-attention-heads"),
    ],
)
def test_heads_that_do_not_divide_are_refused(chosen: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaShape.of_head(Eagle3(**chosen), make_target().config)
