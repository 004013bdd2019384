"""The judge scores a draft on a record once, and keeps no score that it does not use."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recorded_heads import make_head, make_record, with_states

from redraft.heads.catalog import find_family
from redraft.online.daemon import judging
from redraft.online.daemon.judging import Judge
from redraft.online.learning import scoring
from redraft.online.learning.buffer import Stored
from redraft.online.learning.candidate import Candidate
from redraft.online.learning.config import Judging, Training
from redraft.online.learning.scoring import score_segment, sum_segments


@pytest.fixture
def heads(random_target: Path, tmp_path: Path) -> list[Path]:
    return [
        make_head("eagle3", random_target, tmp_path / f"head-{seed}", seed) for seed in range(3)
    ]


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests of the records that were scored, in order."""
    found: list[str] = []
    score = judging.score_segment

    def note(draft: Any, record: Any, **settings: Any) -> Any:
        found.append(record.request_id)
        return score(draft, record, **settings)

    monkeypatch.setattr(judging, "score_segment", note)
    return found


@pytest.fixture
def judge(random_target: Path) -> Judge:
    # Record 3 is a second segment of record 2's request.
    ids = {1: "a", 2: "b", 3: "b", 4: "d", 5: "e"}
    records = {
        seq: with_states(make_record(request_id=name), random_target, "eagle3")
        for seq, name in ids.items()
    }
    cfg: Any = SimpleNamespace(judging=Judging())
    buffer: Any = SimpleNamespace(
        records=records,
        read=lambda seqs: [Stored(seq=seq, record=records[seq]) for seq in seqs if seq in records],
    )
    registry: Any = None
    return Judge(cfg, registry, buffer, Candidate(Training(), "eagle3", random_target))


def test_a_draft_is_scored_once_on_a_record(
    judge: Judge, heads: list[Path], scored: list[str], tmp_path: Path
) -> None:
    found = judge.score(heads[0], [1, 2, 3])
    assert scored == ["a", "b", "b"]
    head = find_family("eagle3").load(heads[0], lambda: judge.candidate._borrowed).float().eval()
    whole = sum_segments(
        score_segment(
            head,
            stored.record,
            num_speculative_tokens=3,
            method="greedy",
            sequence_length=judge.candidate.cfg.sequence_length,
            reads="layers",
        )
        for stored in judge.buffer.read([1, 2, 3])
    )
    assert found == whole
    # As a version of the registry, with the same bytes, and with newer records.
    version = Path(shutil.copytree(heads[0], tmp_path / "v000002"))
    scored.clear()
    newer = judge.score(version, [2, 3, 4])
    assert scored == ["d"]
    assert [request for _, request in newer] == ["b", "d"]
    assert newer["boot", "b"] == found["boot", "b"]
    judge.score(version, [1])
    assert scored == ["d", "a"], "a request whose score was not used last time is scored again"


def test_scores_are_kept_for_two_drafts_and_one_way_to_draft(
    judge: Judge, heads: list[Path], scored: list[str]
) -> None:
    for head in heads:
        judge.score(head, [1])
    scored.clear()
    judge.score(heads[1], [1])
    assert scored == []
    judge.score(heads[0], [1])
    assert scored == ["a"]
    judge.judging = replace(judge.judging, num_speculative_tokens=2)
    scored.clear()
    judge.score(heads[1], [1])
    assert scored == ["a"]


def test_after_a_tenant_is_forgotten_nothing_is_kept(
    judge: Judge, heads: list[Path], scored: list[str]
) -> None:
    judge.score(heads[0], [1, 2, 3])
    judge.forget()
    assert not judge._scores
    del judge.buffer.records[1]
    assert [request for _, request in judge.score(heads[0], [1, 2, 3])] == ["b"]


def test_a_tenant_that_is_forgotten_while_records_are_scored_leaves_no_score(
    judge: Judge, heads: list[Path], scored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    score = judging.score_segment

    def forget_meanwhile(*args: Any, **settings: Any) -> Any:
        judge.forget()
        return score(*args, **settings)

    monkeypatch.setattr(judging, "score_segment", forget_meanwhile)
    judge.score(heads[0], [1])
    assert not judge._scores


def test_scores_are_kept_for_the_settings_with_which_they_were_made(
    judge: Judge, heads: list[Path], scored: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    score, used = judging.score_segment, list[int]()

    def change_meanwhile(*args: Any, **settings: Any) -> Any:
        judge.judging = replace(judge.judging, num_speculative_tokens=2)
        used.append(settings["num_speculative_tokens"])
        return score(*args, **settings)

    monkeypatch.setattr(judging, "score_segment", change_meanwhile)
    judge.score(heads[0], [1, 2])
    assert used == [3, 3]
    judge.score(heads[0], [1, 2])
    assert used == [3, 3, 2, 2]


def test_scores_of_newer_records_leave_those_of_earlier_ones_kept(
    judge: Judge, heads: list[Path], scored: list[str]
) -> None:
    judge.score(heads[0], [1, 2, 3])
    newer = judge.score(heads[0], [1, 2, 3, 4], after=3)
    assert [request for _, request in newer] == ["d"]
    scored.clear()
    judge.score(heads[0], [1, 2, 3, 4])
    assert scored == []


def test_a_record_is_scored_on_the_device_of_the_draft(
    judge: Judge, heads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is on a GPU, for which `meta` stands, and records are in host memory."""
    head = judge.candidate.load(heads[0]).to("meta")
    candidate: Any = judge.candidate
    candidate.accelerator = SimpleNamespace(device=torch.device("meta"))
    monkeypatch.setattr(candidate, "load", lambda _: head)
    found: list[Any] = []

    def note(draft: Any, batch: Any, *_: Any) -> Any:
        target = batch.signal.distribution
        found.extend([draft.fc.weight, batch.input_ids_BT, batch.position_ids_BT])
        found.extend([batch.signal.aux_BTLD, target.ids_BTK, target.log_probs_BTK])
        return np.array([0, 1, 2]), np.ones((3, 3))

    monkeypatch.setattr(scoring, "score_rows", note)
    judge.score(heads[0], [1])
    assert [x.device.type for x in found] == ["meta"] * 6
