"""The norm of the heads, against its formula in float64, and the sizes of their layers.

B = batch, T = tokens, D = hidden.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from make_families import SIZES, VARIANTS, make_variant
from make_heads import make_target
from torch import Tensor
from transformers import LlamaConfig

from redraft.files.folder import read_config
from redraft.heads.nn.layers import RMSNorm, Rotary, rotate
from redraft.heads.options import Eagle3
from redraft.heads.shape import LlamaShape, llama_rope

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
        # On a GPU autocast would make both float32, and two types would keep PyTorch from its one
        # kernel.
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


@pytest.mark.parametrize(
    "name", [name for name, variants in VARIANTS.items() if "sizes of its own" in variants]
)
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
    assert (written["hidden_size"], written["vocab_size"]) == (
        model.config.hidden_size,
        model.config.vocab_size,
    )


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


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.25] * 16,
    "long_factor": [4.0] * 16,
    "rope_theta": 1e4,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "a part": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "Fourier": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "use_fope": True,
        "num_key_value_heads": 2,
    },
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": YARN,
    "yarn, DeepSeek V2": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn, gpt-oss": {**YARN, "truncate": False},
    "longrope, Phi-3": {**LONG, "original_max_position_embeddings": 8192},
    "longrope, Phi-3.5-MoE": {
        **LONG,
        "original_max_position_embeddings": 8192,
        "short_mscale": 1.25,
    },
    "dynamic": {**DYNAMIC, "factor": 2.0},
    "dynamic, Hunyuan": {**DYNAMIC, "factor": 1.0, "alpha": 1000.0},
    "dynamic, of a shorter training": {**DYNAMIC, "factor": 2.0, "max_trained_positions": 1024},
}

PART = {"partial_rotary_factor": 0.5}
OWN_ROPES = {
    name: {**ROPES[name], **PART}
    for name in ("default", "linear", "llama3", "yarn", "yarn, gpt-oss")
} | {
    "longrope, Phi-4-mini": {
        **ROPES["longrope, Phi-3"],
        **PART,
        **{key: LONG[key][:8] for key in ("short_factor", "long_factor")},
    }
}
"""Of a head by another trainer that rotates half of each attention head."""


@pytest.mark.parametrize(
    ("name", "is_own"),
    [*((name, False) for name in ROPES), *((name, True) for name in OWN_ROPES)],
)
def test_vllm_rotates_a_head_as_training_does(name: str, is_own: bool) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    sizes = {
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    rope = llama_rope(OWN_ROPES[name], is_own=True) if is_own else llama_rope(ROPES[name])
    shape = LlamaShape(
        **sizes,
        head_dim=32,
        rms_norm_eps=EPS,
        vocab_size=8,
        max_position_embeddings=8192,
        rope_parameters=rope,
    )
    cos_BTE, sin_BTE = Rotary.from_shape(shape)(torch.arange(512)[None], torch.zeros(1))
    served = VllmConfig()
    served.model_config = SimpleNamespace(max_model_len=8192)
    with set_current_vllm_config(served):
        rotary = get_rope(
            32, 8192, rope_parameters=shape.hf_config()["rope_parameters"], dtype=torch.float32
        )
    table = getattr(rotary, "long_short_cos_sin_cache", None)
    table = rotary._compute_cos_sin_cache() if table is None else table
    half = 8 if is_own else 16
    torch.testing.assert_close(
        torch.cat([cos_BTE[0, :, :half], sin_BTE[0, :, :half]], dim=-1), table[:512]
    )


@pytest.mark.parametrize("is_nested", [True, False])
def test_a_head_by_another_trainer_rotates_what_vllm_rotates(is_nested: bool) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    rope = {"partial_rotary_factor": 0.25, "rope_theta": 1e4}
    nested = {"rope_parameters": {"rope_type": "default", **rope}}
    own = {"head_dim": 32, "num_attention_heads": 4, **(nested if is_nested else rope)}
    shape = LlamaShape.from_head_config(own, make_target().config, Path(), qk_norm=False)
    assert (
        LlamaShape.from_head_config(shape.hf_config(), make_target().config, Path(), qk_norm=False)
        == shape
    )
    x_BHTE, positions_T = torch.randn(1, 4, 9, 32), torch.arange(9)
    ours_BHTE = rotate(x_BHTE, Rotary.from_shape(shape)(positions_T[None], x_BHTE))
    parameters = LlamaConfig(**own).rope_parameters
    with set_current_vllm_config(VllmConfig()):
        served = get_rope(32, 512, rope_parameters=parameters, dtype=torch.float32)
    x_TD = x_BHTE[0].transpose(0, 1).flatten(1)
    theirs_TD, _ = served.forward_native(positions_T, x_TD.clone(), x_TD.clone())
    torch.testing.assert_close(ours_BHTE[0].transpose(0, 1).flatten(1), theirs_TD)
    assert torch.equal(ours_BHTE[..., 8:], x_BHTE[..., 8:])
    assert not torch.equal(ours_BHTE[..., 1:, :8], x_BHTE[..., 1:, :8])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0},  # Hunyuan's
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "partial_rotary_factor": 0.5},
    ],
)
def test_a_dynamic_rotation_of_another_trainers_head_is_vllms(rope: dict[str, Any]) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    own = {"head_dim": 32, "num_attention_heads": 4, "rope_parameters": {"rope_theta": 1e4, **rope}}
    shape = LlamaShape.from_head_config(own, make_target().config, Path(), qk_norm=False)
    with set_current_vllm_config(VllmConfig()):
        served = get_rope(
            32, 128, rope_parameters=LlamaConfig(**own).rope_parameters, dtype=torch.float32
        )
    cos_BTR, sin_BTR = Rotary.from_shape(shape)(torch.arange(128)[None], torch.zeros(1))
    ours = torch.cat([part[0].chunk(2, dim=-1)[0] for part in (cos_BTR, sin_BTR)], dim=-1)
    torch.testing.assert_close(ours, served._compute_cos_sin_cache())
    again = LlamaShape.from_head_config(
        shape.hf_config(), make_target().config, Path(), qk_norm=False
    )
    assert again == shape


def test_the_rotation_of_a_head_for_qwen_vl_is_the_plain_one() -> None:
    own = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    shape = LlamaShape.from_head_config(own, make_target().config, Path(), qk_norm=False)
    assert shape.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, r"\bntk\b"),
        ({"hidden_act": "gelu"}, r"\bgelu\b.*\bsilu\b"),
        ({"hidden_size": 40, "num_attention_heads": 3}, r"hidden size \(40\)"),
        ({"num_attention_heads": "four"}, r"\bnum_attention_heads\b"),
    ],
)
def test_a_config_that_cannot_be_computed_is_refused_in_one_line(
    own: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        LlamaShape.from_head_config(own, make_target().config, Path("head"), qk_norm=False)
    assert re.match(r"head: .*$", str(refused.value))
    assert "\n" not in str(refused.value)


def test_of_the_keys_that_scale_logits_a_head_has_one_as_in_vllm() -> None:
    def scale(**own: float) -> float:
        config = {"model_type": "llama", **own}
        target = make_target().config
        return LlamaShape.from_head_config(config, target, Path(), qk_norm=False).logit_scale

    assert scale(logits_scaling=8.0, lm_head_multiplier=3.0, dim_model_base=4) == 1
    assert scale(logit_scale=0.25) == 0.25
