"""The learner's optimizer: AdamW or Muon, also changed between two starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recorded_heads import make_head, make_record, with_states

from redraft.distill.train.muon import Muon
from redraft.online.learning.candidate import DRAFT, Candidate
from redraft.online.learning.config import Training


@pytest.mark.parametrize("then", ["muon", "adamw"])
def test_a_candidate_continues_also_if_the_settings_name_another_optimizer(
    then: str, random_target: Path, tmp_path: Path
) -> None:
    records = [with_states(make_record(), random_target, "eagle3")] * 3
    version = make_head("eagle3", random_target, tmp_path / "v000001")
    candidate = Candidate(
        Training(sequence_length=64, optimizer="muon", lr=1e-2), "eagle3", random_target
    )
    candidate.begin(version)
    first, *_ = losses = [candidate.step(records, seed).loss for seed in range(4)]
    assert losses[-1] < first
    assert any(isinstance(each.optimizer, Muon) for each in candidate.distillation.optimizers)
    (tmp_path / "checkpoint").mkdir()
    candidate.write(tmp_path / "checkpoint")
    candidate.distillation.close()

    again = Candidate(Training(sequence_length=64, optimizer=then), "eagle3", random_target)
    again.resume(version, tmp_path / "checkpoint")
    # The state of the same optimizer goes on. Another one begins with the draft, which is stored in
    # bfloat16 here.
    assert again.distillation.step_index == (4 if then == "muon" else 0)
    kept = again.load(tmp_path / "checkpoint" / DRAFT).state_dict()
    for name, tensor in again.distillation.weights().items():
        torch.testing.assert_close(tensor, kept[name].float(), rtol=1e-2, atol=1e-2)
    assert again.step(records, 4).loss < first
    again.distillation.close()
