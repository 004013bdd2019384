from __future__ import annotations

import json
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
    signal_of_prefix,
)
from reference_decoder import propose
from torch.nn.functional import silu

from redraft.heads.families.medusa import Config, Medusa
from redraft.heads.target import Target


def make_head(**options: object) -> tuple[Medusa, object]:
    model = make_target()
    return make_random(Medusa(Config(**options), Target.from_model(model))), model


def test_an_untrained_head_repeats_the_target() -> None:
    model = make_target()
    head = Medusa(Config(), Target.from_model(model))
    prefix = make_ids(6)
    signal = signal_of_prefix(head, model, prefix)
    own = int((signal.distribution.head_VD @ signal.distribution.hidden_BTD[0, -1]).argmax())
    assert [token for token, _ in propose(head, prefix, signal, 3)] == [own] * 3


def test_heads_compute_the_published_formula() -> None:
    head, model = make_head(num_layers=2, num_heads=2)
    batch = make_batch([[make_ids(5)]])
    signal = make_signal(model, batch)
    h = signal.distribution.hidden_BTD
    for layer in head.blocks[1].layers:
        h = h + silu(h @ layer.weight.T + layer.bias)
    step = head.draft_steps(batch, signal)[1]
    torch.testing.assert_close(step.hidden_BTD, h)
    assert step.head_WD is head.lm_heads[1].weight
    # five tokens, head 1 predicts x[t+3]: rows 0 and 1
    assert step.mask_BT.tolist() == [[True, True, False, False, False]]


@pytest.mark.parametrize("bias", [True, False])
def test_an_export_loads_equal_and_says_whether_it_has_biases(bias: bool, tmp_path: Path) -> None:
    assert_round_trip(*make_head(bias=bias), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["medusa_fc_bias"] is bias


def test_a_checkpoint_whose_config_denies_its_biases_is_refused(tmp_path: Path) -> None:
    head, model = make_head(bias=True)
    head.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["medusa_fc_bias"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"blocks\.0\.layers\.0\.bias"):
        Medusa.load(tmp_path, Target.from_model(model))
