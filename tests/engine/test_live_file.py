"""Live counts that survive a restart, and what is in their file."""

from __future__ import annotations

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from redraft.engine import live_file
from redraft.engine.answer_counter import AnswerCounter
from redraft.engine.live_file import LiveConfig, LiveFile, open_file
from redraft.engine.lookups import read_counted, read_live
from redraft.engine.settings import write_settings
from redraft.heads.families.retrieval import Config, Live, Text

ACME, INITECH = b"acmesalt", b"initsalt"


def learn(draft: Live, *tokens: int, owner: bytes = ACME) -> None:
    is_label = np.arange(len(tokens)) > 0
    for _ in draft.learn(Text(ids=np.array(tokens, np.int32), is_label=is_label, owner=owner)):
        pass


def draft_after(draft: Live, *tokens: int, owner: bytes = ACME) -> list[int]:
    return draft.propose(np.array(tokens, np.int32), 3, owner=owner)


def open_again(path: Path, target: str = "target", **settings: Any) -> Live:
    draft = Live(Config(), **settings)
    LiveFile(path, draft, target, writes=False)
    return draft


def test_a_server_drafts_what_the_one_before_has_counted(tmp_path: Path) -> None:
    path, draft = tmp_path / "live-0.safetensors", Live(Config())
    file = LiveFile(path, draft, "target", writes=False)
    for _ in range(4):
        learn(draft, 1, 2, 3, 4)
        learn(draft, 1, 7, 8, owner=INITECH)
    file.write()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = open_again(path)
    for owner in (ACME, INITECH, b"nobodyXX"):
        assert draft_after(again, 1, owner=owner) == draft_after(draft, 1, owner=owner)
    assert again.run_probability == draft.run_probability
    assert again.counts.hits == draft.counts.hits
    for other in ({"target": "another"}, {"window": 9}, {"shares": True}):
        assert draft_after(open_again(path, **other), 1) == [], other
    path.write_bytes(path.read_bytes()[:200])
    assert draft_after(open_again(path), 1) == [], "a broken file does not stop the engine"


def test_what_is_forgotten_is_in_no_file_any_more(tmp_path: Path) -> None:
    path, draft = tmp_path / "live-0.safetensors", Live(Config())
    counter = AnswerCounter({}, draft)
    counter.file = LiveFile(path, draft, "target")
    for token in (70_001, 70_002, 70_003):
        learn(draft, 1, token, token + 1)
    learn(draft, 5, 6, 7, owner=INITECH)
    counter.file.write()
    assert ACME.hex().encode() in path.read_bytes()
    assert counter.forget(ACME[:4]) > 5
    assert ACME.hex().encode() not in path.read_bytes()
    again = open_again(path)
    assert draft_after(again, 1) == []
    assert draft_after(again, 5, owner=INITECH) == [6, 7]
    written = path.stat().st_mtime_ns
    counter.file.is_written = False
    counter.forget(ACME[:4])
    assert path.stat().st_mtime_ns == written, "the other ranks have the same counts"
    counter.file.close()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_thread_writes_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_file, "WRITTEN_EVERY_S", 0.01)
    path, draft = tmp_path / "live-0.safetensors", Live(Config())
    file = LiveFile(path, draft, "target")
    learn(draft, 1, 2, 3)
    while file.written != draft.runs.num_texts or not path.exists():
        pass
    file.close()
    with file.lock:
        assert draft_after(open_again(path), 1) == [2, 3]


@pytest.mark.parametrize("changes", [{"nnodes": 2}, {"distributed_executor_backend": "ray"}])
def test_ranks_of_several_machines_keep_no_file(tmp_path: Path, changes: dict[str, Any]) -> None:
    settings = {"nnodes": 1, "distributed_executor_backend": "mp", "data_parallel_rank": 0}
    config = SimpleNamespace(parallel_config=SimpleNamespace(**settings | changes))
    with pytest.raises(ValueError, match=r"--live\.folder"):
        open_file(tmp_path, SimpleNamespace(vllm_config=config), Live(Config()))


def test_the_settings_reach_the_engine_by_the_environment(tmp_path: Path) -> None:
    told = {"folder": str(tmp_path), "window": 40, "shared": True}
    settings = write_settings({"live": told, "lookup": {"retrieval": "live"}})
    assert read_live(settings) == LiveConfig(folder=tmp_path, window=40, shared=True)
    assert read_live({}) == LiveConfig()
    draft = read_counted(settings)
    assert isinstance(draft, Live)
    assert (draft.runs.window, draft.runs.shares) == (40, True)
    for wrong in ({"window": 1}, {"window": "many"}, {"windows": 3}):
        with pytest.raises(ValueError, match=r"window"):
            read_live(write_settings({"live": wrong}))
