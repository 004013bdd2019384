"""Records are replayed in many steps: each step trains other rows of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recorded_heads import make_head, make_record, with_states

from redraft.engine.counts import AcceptanceCounts
from redraft.online.daemon import judging
from redraft.online.daemon.judging import Judge
from redraft.online.learning.buffer import Stored
from redraft.online.learning.candidate import Candidate
from redraft.online.learning.config import Judging, Training
from redraft.online.learning.replay import RecordedBatch, make_batches, select_texts
from redraft.online.learning.scoring import Request, RequestScore


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


def test_the_window_of_a_target_ends_no_text_of_a_head(
    random_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head computes that window itself, in a step and for the gate."""
    target = Path(shutil.copytree(random_target, tmp_path / "target"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(
        json.dumps({**config, "model_type": "mistral", "sliding_window": 4})
    )
    record = with_states(make_record(), random_target, "eagle3")
    longest: list[int] = []
    lengths: list[int] = []

    def score(*_: Any, sequence_length: int, **__: Any) -> tuple[Request, RequestScore]:
        lengths.append(sequence_length)
        return ("", ""), RequestScore("", AcceptanceCounts.zero())

    monkeypatch.setattr(judging, "score_segment", score)
    for folder, window in ((random_target, None), (target, 4)):
        candidate = Candidate(Training(sequence_length=64), "eagle3", folder)
        candidate.begin(
            head := make_head("eagle3", random_target, tmp_path / folder.name / "v000001")
        )
        assert [view.window for view in candidate.load(head).views] == [window]
        steps: list[list[RecordedBatch]] = []
        monkeypatch.setattr(candidate.distillation, "step", steps.append)
        candidate.step([record], 0)
        buffer = SimpleNamespace(read=lambda seqs: [Stored(seq=seq, record=record) for seq in seqs])
        judge = Judge(SimpleNamespace(judging=Judging()), None, buffer, candidate)
        judge.score(head, [1])
        assert lengths.pop() == 64
        candidate.distillation.close()
        longest.append(max(int((batch.document_BT >= 0).sum()) for batch in steps[0]))
    assert longest[0] == longest[1] > 4
    assert Candidate(Training(sequence_length=64), "standalone", target).cfg.sequence_length == 4


def test_the_gate_compares_drafts_without_a_salt(random_target: Path) -> None:
    record = with_states(make_record(), random_target, "eagle3")
    texts = select_texts([record])
    (batch,) = make_batches(texts, num_batches=1, sequence_length=64, seed=9, reads="layers")
    assert batch.salt == 0
