"""Records are replayed in many steps: each step trains other rows of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded_heads import make_head, make_record, with_states

from redraft.online.learning.candidate import Candidate
from redraft.online.learning.config import Training
from redraft.online.learning.replay import RecordedBatch, make_batches, select_texts


def test_every_step_has_a_salt_and_a_repeated_step_has_the_same(
    random_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = with_states(make_record(), random_target, "eagle3")
    candidate = Candidate(Training(sequence_length=64, accumulation=2), "eagle3", random_target)
    candidate.begin(make_head("eagle3", random_target, tmp_path / "v000001"))
    steps: list[list[RecordedBatch]] = []
    monkeypatch.setattr(candidate.distillation, "step", steps.append)
    for seed in (144, 288, 432, 144):
        candidate.step([record] * 3, seed)
    candidate.distillation.close()
    # all micro-batches of a step, and so all ranks, have one
    salts = [{batch.salt for batch in batches} for batches in steps]
    assert [len(found) for found in salts] == [1] * 4
    assert [len(batches) for batches in steps] == [2] * 4
    assert salts[0] == salts[3]
    assert len(set.union(*salts)) == 3


def test_the_gate_compares_drafts_without_a_salt(random_target: Path) -> None:
    record = with_states(make_record(), random_target, "eagle3")
    texts = select_texts([record])
    (batch,) = make_batches(texts, num_batches=1, sequence_length=64, seed=9, reads="layers")
    assert batch.salt == 0
