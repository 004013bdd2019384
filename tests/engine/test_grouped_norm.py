"""One row of norm weights for each layer, where vLLM's CPU kernel takes the first for all."""

from __future__ import annotations

import torch

from redraft.engine.patches import with_groups


def test_every_group_has_its_weights():
    calls = []
    rms_norm = with_groups(lambda *args: calls.append(args))
    keys = torch.randn(3, 5, 2, 8)
    weights = torch.rand(3, 8) + 0.5
    out = torch.empty_like(keys)
    rms_norm(out, keys, weights, 1e-6)
    for layer in range(3):
        wanted = torch.nn.functional.rms_norm(keys[layer], (8,), weights[layer], 1e-6)
        torch.testing.assert_close(out[layer], wanted, atol=1e-6, rtol=1e-5)
    assert not calls


def test_one_row_of_weights_stays_with_vllms_kernel():
    calls = []
    out, x, weight = torch.empty(4, 8), torch.randn(4, 8), torch.ones(8)
    with_groups(lambda *args: calls.append(args))(out, x, weight, 1e-5)
    assert [tuple(map(id, call[:3])) for call in calls] == [(id(out), id(x), id(weight))]
