from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from make_heads import (
    assert_round_trip,
    make_batch,
    make_ids,
    make_random,
    make_signal,
    make_target,
)
from safetensors.torch import load_file
from torch import Tensor

from redraft.heads.families.mlp_speculator import Config, MLPSpeculator
from redraft.heads.target import Target

VARIANTS = [
    {},
    {"inner_dim": 24},
    {"tie_weights": True, "scale_input": True, "inner_dim": 24},
]


def make_head(**options: object) -> tuple[MLPSpeculator, object]:
    model = make_target()
    torch.manual_seed(0)
    return make_random(MLPSpeculator(Config(**options), Target.from_model(model))), model


def test_tied_stages_are_exported_once_each_and_stay_tied(tmp_path: Path) -> None:
    head, model = make_head(**VARIANTS[2])
    loaded = assert_round_trip(head, model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(tensors) == 3 * 5
    assert torch.equal(tensors["speculator.emb.0.weight"], tensors["speculator.emb.2.weight"])
    assert loaded.emb[2].weight is loaded.emb[0].weight
    assert loaded.proj[2].weight is loaded.proj[1].weight
    assert loaded.proj[1].weight is not loaded.proj[0].weight


@pytest.mark.parametrize("options", VARIANTS)
def test_stages_compute_the_published_formula_in_float64(options: dict[str, object]) -> None:
    head, model = make_head(**options)
    ids = make_ids(8)
    batch = make_batch([[ids]])
    signal = make_signal(model, batch)
    steps = head.draft_steps(batch, signal)
    inner = options.get("inner_dim", 32)
    state_weight = 0.5 ** (0.5 / 3)
    emb_weight = math.sqrt((1 - state_weight**2) * inner / 2)
    state = signal.distribution.hidden_BTD[0, 2].double()
    if head.config.scale_input:
        state = state / math.sqrt(float(state.pow(2).mean()) + 1e-6) / math.sqrt(2)
    for i, step in enumerate(steps):
        mixed = head.proj[i].weight.double() @ state
        mixed = mixed + emb_weight / state_weight * head.emb[i].weight[ids[3 + i]].double()
        state = gelu(norm(mixed) * head.ln[i].weight.double() + head.ln[i].bias.double())
        torch.testing.assert_close(step.hidden_BTD[0, 2].double(), state, atol=1e-5, rtol=1e-5)
        assert step.shift == i + 1


def norm(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean() + 1e-6).sqrt()


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2
