"""The study of replay: as many records a step in every setting, and gains paired by request."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learner_world import World, make_draft, make_records

from benchmarks.studies import replay
from benchmarks.studies.replay import Config, Setting, list_settings, make_table
from redraft.engine.counts import AcceptanceCounts
from redraft.online.daemon.opening import opened
from redraft.online.learning.candidate import Candidate
from redraft.online.learning.scoring import RequestScore
from redraft.online.records.record import encode_record, read_frames


def score(domain: str, drafts: int, accepted: int) -> RequestScore:
    return RequestScore(domain, AcceptanceCounts(num_drafts=drafts, num_accepted=accepted))


def test_the_settings_have_as_many_records_a_step_as_the_learners_own(world: World) -> None:
    settings = list_settings(world.config())
    assert settings[0] == Setting(4, 12)
    assert {setting.new + setting.replayed for setting in settings} == {16}
    assert settings == [Setting(4, 12), Setting(16, 0), Setting(12, 4), Setting(8, 8)]


def test_a_gain_is_of_the_same_requests_and_by_domain() -> None:
    own, other = Setting(4, 4), Setting(8, 0)
    scores = {
        own: [{("s", str(i)): score("code", 20, 10) for i in range(8)}],
        other: [{("s", str(i)): score("code", 20, 12) for i in range(8)}],
    }
    for found in scores.values():
        found[0]["s", "prose"] = score("prose", 10, 1)
        found[0]["s", "more prose"] = score("prose", 10, 3)
    mine, others = make_table(scores, own)
    assert mine["tau"]["code"]["value"] == pytest.approx(1.5)
    assert mine["tau"]["prose"]["value"] == pytest.approx(1.2)
    assert mine["gain"] == {}
    # Every request of code gains as much.
    assert others["gain"]["code"] == {
        "value": pytest.approx(0.1),
        "low": pytest.approx(0.1),
        "high": pytest.approx(0.1),
    }
    assert others["gain"]["prose"]["value"] == 0.0
    assert others["gain"]["all"]["value"] == pytest.approx(16 / 180)


@pytest.fixture
def world(random_target: Path, tmp_path: Path) -> World:
    return World.make(tmp_path, random_target, make_draft(random_target, tmp_path / "noisy"))


def test_a_short_study_of_a_stopped_learner(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    learner = replace(world.config(), gate=replace(world.config().gate, min_requests=5))
    monkeypatch.setattr(replay, "load_config", lambda _: learner)
    with opened(learner) as (_, _, buffer):
        records = make_records(world.target, 60)
        buffer.append(read_frames(b"".join(map(encode_record, records))), time.time())
    taken: list[int] = []
    take_step = Candidate.step

    def note(candidate: Candidate, records: Sequence[Any], seed: int) -> Any:
        taken.append(len(records))
        return take_step(candidate, records, seed)

    monkeypatch.setattr(Candidate, "step", note)
    replay.main(Config(folder=tmp_path, steps=2, seeds=1, output=tmp_path / "out"))
    # The first step of a setting has nothing to replay.
    assert taken == [4, 8, 16, 16, 12, 16, 8, 16]
    table = json.loads((tmp_path / "out" / "table.json").read_text())
    assert [row["setting"] for row in table["rows"]] == [
        "4 new, 12 replayed", "16 new, 0 replayed", "12 new, 4 replayed", "8 new, 8 replayed",
    ]  # fmt: skip
    assert all(row["tau"]["code"]["value"] >= 1 for row in table["rows"])
    assert "16 new, 0 replayed" in capsys.readouterr().out
    taken.clear()
    replay.main(Config(folder=tmp_path, steps=2, seeds=1, output=tmp_path / "out"))
    assert taken == [], "finished trainings are kept"
    assert json.loads((tmp_path / "out" / "table.json").read_text())["rows"] == table["rows"]
    replay.main(Config(folder=tmp_path, steps=1, seeds=1, output=tmp_path / "out"))
    assert len(taken) == 4, "with other steps they are repeated"
    with pytest.raises(ValueError, match="--steps"):
        replay.main(Config(folder=tmp_path, steps=30, seeds=1, output=tmp_path / "out"))
