"""The tau of each version of `redraft up`, next to a head trained offline on the same records."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner_world import World, make_draft, make_records

from benchmarks.demo.up_versions import compare_versions, find_tau
from redraft.files.folder import fingerprint
from redraft.online.daemon.config import LearnerConfig
from redraft.online.daemon.opening import opened
from redraft.online.journal import SwapEntry
from redraft.online.learning.buffer import Buffer
from redraft.online.learning.candidate import Candidate
from redraft.online.records.record import encode_record, read_frames


@pytest.fixture
def world(random_target: Path, tmp_path: Path) -> World:
    """A registry with a noisy draft, and then the target itself as the learned draft."""
    noisy = make_draft(random_target, tmp_path / "noisy")
    world = World.make(tmp_path, random_target, noisy)
    learned = {"records": 10, "trained_through": 20}
    for draft, provenance in ((noisy, {}), (random_target, learned)):
        version = world.registry.publish(
            lambda folder, draft=draft: shutil.copytree(draft, folder, dirs_exist_ok=True),
            target_fingerprint=fingerprint(random_target),
            provenance=provenance,
            evaluation={},
        )
        world.registry.promote(version)
    return world


@pytest.fixture
def cfg(world: World) -> LearnerConfig:
    cfg = world.config()
    with opened(cfg) as (_, _, buffer):
        records = make_records(world.target, 80)
        buffer.append(read_frames(b"".join(map(encode_record, records))), time.time())
    return cfg


def test_every_version_has_its_tau_its_records_and_its_minutes(
    cfg: LearnerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[list[Any]] = []
    take_step = Candidate.step

    def note(candidate: Candidate, records: Any, seed: int) -> Any:
        steps.append(records)
        return take_step(candidate, records, seed)

    monkeypatch.setattr(Candidate, "step", note)
    through: list[int] = []
    draw = Buffer.replay

    def replay(buffer: Buffer, *args: Any, **options: Any) -> Any:
        through.append(options["through"])
        return draw(buffer, *args, **options)

    monkeypatch.setattr(Buffer, "replay", replay)
    swap = SwapEntry(time_s=1300.0, server="http://a:1", version="v000002", outcome="swapped")
    found = compare_versions(cfg, [swap], ready_s=1000.0)
    first, learned = found["versions"]
    assert (first["records"], first["minutes"], first["origin"]) == (0, 0.0, "first")
    assert (learned["records"], learned["minutes"]) == (10, 5.0)
    assert learned["tau"] == pytest.approx(4.0), "all three tokens of the target itself"
    assert 1 <= first["tau"] < 4
    # Ten new records in steps of four, each with twelve replayed ones, up to record 20.
    assert found["steps"] == len(steps) == 3
    assert set(through) == {20}
    assert all(0 < len(records) <= 16 for records in steps)
    low, high = found["gain_offline"]
    assert low <= found["tau_offline"] - learned["tau"] <= high
    assert found["minutes_to_adapt"] == 5.0


def test_without_a_learned_version_or_evidence_nothing_is_trained(
    cfg: LearnerConfig, world: World
) -> None:
    strict = replace(cfg, gate=replace(cfg.gate, min_requests=1000))
    found = compare_versions(strict, [], ready_s=0.0)
    assert [row["tau"] for row in found["versions"]] == [None, None]
    assert found["tau_offline"] is found["minutes_to_adapt"] is None
    world.registry.rollback()
    found = compare_versions(cfg, [], ready_s=0.0)
    assert [row["origin"] for row in found["versions"]] == ["first"]
    assert found["tau_offline"] is None


def test_tau_is_of_all_requests_together() -> None:
    rng = np.random.default_rng(0)
    drafts, accepted = rng.integers(1, 50, 9), rng.integers(0, 40, 9)
    pairs = list(zip(drafts.tolist(), accepted.tolist(), strict=True))
    assert find_tau(pairs) == pytest.approx(1 + accepted.sum() / drafts.sum())
    assert find_tau([]) is None
