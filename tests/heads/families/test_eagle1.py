from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from make_families import make_variant
from make_heads import (
    make_batch,
    make_ids,
    make_random,
    make_signal,
    make_target,
)
from safetensors.torch import load_file, save_file

from redraft.eval.forecast.rows import take_draft_steps
from redraft.heads.draft import TargetSignal, TopKTarget
from redraft.heads.families.eagle1 import Config, Eagle1
from redraft.heads.target import Target


def make_head(**options: Any) -> tuple[Eagle1, Any]:
    return make_variant("eagle1", "plain", **options)


def test_nothing_of_the_target_is_trained_or_saved(tmp_path: Path) -> None:
    head, _ = make_head()
    head.export(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert names == {name for name, _ in head.named_parameters()}
    assert not any("embed" in name or "head" in name for name in names)


def test_steps_shift_mask_and_weigh_as_written_by_hand() -> None:
    head, model = make_head(num_steps=2)
    # tokens 0..3 are the prompt, 4 and 5 the answer; then a document of 3 tokens, all below
    # loss_from, then padding
    batch = make_batch([[[5, 6, 7, 8, 9, 10], [1, 2, 3]], [make_ids(10)]], loss_from=4)
    first, second = head.draft_steps(batch, make_signal(model, batch))
    assert (first.shift, second.shift) == (1, 2)
    assert (first.weight, second.weight) == (1.0, 0.8)
    # row t of the first step learns x[t+2]: labels 4, 5 belong to rows 2, 3; of the second x[t+3]:
    # rows 1, 2
    assert first.mask_BT[0].nonzero().flatten().tolist() == [2, 3]
    assert second.mask_BT[0].nonzero().flatten().tolist() == [1, 2]


def test_regression_is_ten_times_the_smooth_l1_distance_to_the_next_feature() -> None:
    head, model = make_head(num_steps=1)
    batch = make_batch([[make_ids(8)]])
    signal = make_signal(model, batch)
    (step,) = head.draft_steps(batch, signal)
    hidden_BTD = signal.distribution.hidden_BTD
    difference = (step.hidden_BTD[0, 2] - hidden_BTD[0, 3]).abs()
    by_hand = torch.where(difference < 1, 0.5 * difference**2, difference - 0.5).mean() * 10
    torch.testing.assert_close(step.extra_loss_BT[0, 2], by_hand)


def test_more_draft_tokens_are_measured_than_were_trained() -> None:
    """As the learner measures a head on a server with more draft tokens."""
    head, model = make_head(num_steps=1)
    batch = make_batch([[make_ids(12)]])
    signal = make_signal(model, batch)
    steps = take_draft_steps(head, batch, signal, 3)
    assert [step.shift for step in steps] == [1, 2, 3]
    assert torch.equal(steps[0].hidden_BTD, head.draft_steps(batch, signal)[0].hidden_BTD)


def test_a_signal_without_the_last_hidden_state_is_refused() -> None:
    head, _ = make_head()
    ids = torch.zeros(1, 4, 2, dtype=torch.long)
    signal = TargetSignal(distribution=TopKTarget(ids_BTK=ids, log_probs_BTK=ids.float()))
    with pytest.raises(ValueError, match="hidden"):
        head.draft_steps(make_batch([[make_ids(4)]]), signal)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    head, model = make_head()
    head.export(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"1.*fc\.weight"):
        Eagle1.load(tmp_path, Target.from_model(model))


def test_rope_parameters_of_the_target_are_kept(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    model = make_target(rope_parameters={**rope, "original_max_position_embeddings": 16})
    head = make_random(Eagle1(Config(), Target.from_model(model)))
    head.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"] == {**rope, "original_max_position_embeddings": 16}
    plain = make_target().model.rotary_emb.inv_freq
    assert not torch.equal(head._rotary._embedding.inv_freq, plain)
    torch.testing.assert_close(head._rotary._embedding.inv_freq, model.model.rotary_emb.inv_freq)


def test_a_head_cast_to_bfloat16_keeps_its_rotary_frequencies() -> None:
    head, _ = make_head()
    positions, like = torch.tensor([[100]]), torch.zeros(1)
    wanted = head._rotary(positions, like)
    torch.testing.assert_close(
        head.to(torch.bfloat16)._rotary(positions, like), wanted, atol=0, rtol=0
    )
