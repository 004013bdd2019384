"""The account of what each part of redraft costs: its sums, its servers and its resumption."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import overhead
from benchmarks.overhead import PARTS, Block, Config, Servers, make_loads, summarise
from benchmarks.overhead_capture import profile_capture
from redraft.engine.prompts import Prompt

HEAD = Path("tests/assets/tiny-eagle3")
BLOCK = Block(
    speed=10.0, decoding=20.0, prefill=0.2, first_token=0.3, cpu=0.05, hits=100, learner=0.0
)


def test_a_part_is_compared_round_by_round_with_plain_and_with_the_server_without_it():
    """The machine's speed halves in every second round, which says nothing about a part."""

    def rounds(speed: float) -> list[Block]:
        return [replace(BLOCK, speed=speed / (1 + number % 2), hits=7) for number in range(6)]

    found = summarise(
        "states", {"questions": {"plain": rounds(10), "text": rounds(9), "states": rounds(8)}}
    )["questions"]
    assert found["speed"]["plain"]["ratio"] == pytest.approx(0.8)
    assert found["speed"]["plain"]["interval"] == pytest.approx([0.8, 0.8])
    assert found["speed"]["without"]["ratio"] == pytest.approx(8 / 9)
    assert found["prefill"]["plain"]["ratio"] == pytest.approx(1.0)
    assert found["hits"] == {"plain": 42, "without": 42, "with": 42}


def test_a_turn_repeats_the_one_before_and_no_two_blocks_share_a_prompt():
    cfg = Config(rounds=6, questions=2, prefix=40, max_tokens=8)
    questions = [Prompt(token_ids=[number, 1, 2]) for number in range(100)]
    loads = make_loads(cfg, questions, context=64)
    for session in loads["sessions"]:
        for before, after in itertools.pairwise(session):
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
        assert len(session[0].token_ids) == 32 + 3  # half of the context, then the first question
        assert max(len(turn.token_ids) for turn in session) + cfg.max_tokens < 64
    asked = [tuple(one.token_ids) for load in loads.values() for some in load for one in some]
    assert len({*asked}) == len(asked) == 6 * (2 + overhead.TURNS)


def test_several_clients_send_questions_at_the_same_time(monkeypatch):
    questions = [Prompt(token_ids=[number, 1, 2]) for number in range(100)]
    cfg = Config(rounds=6, questions=8, clients=4, max_tokens=8)
    assert {*make_loads(cfg, questions, context=64)} == {"questions"}
    with pytest.raises(ValueError, match="at most --questions 8"):
        replace(cfg, clients=9)
    used = {}

    def measure(_server, prompts, **options):
        used.update(options)
        return SimpleNamespace(
            num_output_tokens=64, decode_s=2.0, prefill_s=1.6, ttft_s=0.5, tokens_per_s=20.0
        )

    monkeypatch.setattr(overhead, "measure", measure)
    monkeypatch.setattr(overhead, "IDLE_S", 0)
    monkeypatch.setattr(overhead, "find_tree", lambda _: None)
    monkeypatch.setattr(overhead, "count_cpu", lambda _: 0.0)
    monkeypatch.setattr(overhead, "read_hits", lambda _: 0)
    block = overhead.measure_block(
        SimpleNamespace(url="http://127.0.0.1:1"), questions[:8], cfg, has_learner=False
    )
    assert used["concurrency"] == 4
    assert (block.decoding, block.prefill) == ((64 - 8) / 2.0, 0.2)


def list_leaves(value: Any, path: str = "") -> dict[str, Any]:
    """The values in lists, objects and JSON texts, by path."""
    with contextlib.suppress(ValueError, TypeError):
        value = json.loads(value)
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {
            name: leaf
            for key, each in items
            for name, leaf in list_leaves(each, f"{path}.{key}").items()
        }
    return {path: value}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("scheduling", {"0.0"}),
        ("last_block", {"0.1.disable_eagle_block_drop"}),
        (
            "states",
            {"1.REDRAFT_SETTINGS.capture.hidden_states", "1.REDRAFT_SETTINGS.capture.spool"},
        ),
        ("lookups", {"1.REDRAFT_SETTINGS.pace", "1.REDRAFT_SETTINGS.lookup.verify_cost"}),
    ],
)
def test_a_server_differs_from_the_one_without_a_part_in_that_part(name, changed, tmp_path):
    servers = Servers(Config(output=tmp_path), Path("t"), HEAD.absolute(), contextlib.ExitStack())
    ours, theirs = (list_leaves(servers.describe(each)) for each in (name, PARTS[name].against))
    found = {path for path in {*ours, *theirs} if ours.get(path) != theirs.get(path)}
    # pace needs vLLM's table of numbers of draft tokens
    found = {path.lstrip(".") for path in found if "per_batch_size" not in path}
    assert found == changed


def test_a_part_that_was_measured_is_not_measured_again(monkeypatch, tmp_path, capsys):
    measured = []

    def measure_part(name, _servers, cfg, loads):
        measured.append(name)
        names = {"plain", PARTS[name].against, name}
        return {load: {each: [BLOCK] * cfg.rounds for each in names} for load in loads}

    questions = [Prompt(token_ids=[number, 1, 2]) for number in range(200)]
    scene = SimpleNamespace(target=Path("tests/assets/tiny-target"), traffic={"code": ()})
    monkeypatch.setattr(overhead, "make_scene", lambda _: scene)
    monkeypatch.setattr(overhead, "held_out_prompts", lambda *_, **__: questions)
    monkeypatch.setattr(overhead, "measure_part", measure_part)
    cfg = Config(
        target=Path("tests/assets/tiny-target"), head=HEAD, output=tmp_path, max_tokens=4, rounds=6
    )
    overhead.main(replace(cfg, parts=("waits",)))
    overhead.main(replace(cfg, parts=("waits", "states")))
    assert measured == ["waits", "states"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert {*report["parts"]} == {"waits", "states"}
    assert report["parts"]["states"]["loads"]["sessions"]["cpu"]["without"]["ratio"] == 1.0
    assert "states: capture of hidden states" in capsys.readouterr().out
    assert "capture of hidden states" in (tmp_path / "report.html").read_text()
    overhead.main(replace(cfg, parts=("waits",), max_tokens=5))
    assert measured == ["waits", "states", "waits"]


def test_the_work_of_capture_is_divided_among_its_stages():
    config = SimpleNamespace(vocab_size=512, hidden_size=32, max_position_embeddings=512)
    found = profile_capture(config, 12)
    assert {*found["ms_per_request"]} == {"hook", "reduction", "assembly", "encoding", "writing"}
    assert min(found["ms_per_request"].values()) > 0
    # three states of 32 random numbers of two bytes for each token of a prompt
    assert found["bytes_per_request"] > 0.7 * 160 * 3 * 32 * 2


@pytest.mark.slow
@pytest.mark.vllm
def test_each_server_of_a_part_answers_every_block(tmp_path):
    parts = ("waits", "states", "learner")
    overhead.main(
        Config(
            target=Path("tests/assets/tiny-target"),
            head=HEAD,
            parts=parts,
            output=tmp_path,
            rounds=6,
            questions=1,
            max_tokens=8,
        )
    )
    report = json.loads((tmp_path / "report.json").read_text())
    for name in parts:
        sessions = report["parts"][name]["loads"]["sessions"]
        assert sessions["hits"]["plain"] > 0
        assert all(sessions[metric]["plain"]["interval"] for metric in overhead.METRICS)
    # its work: the servers of the other parts have no learner
    assert report["parts"]["learner"]["loads"]["questions"]["learner_cpu_s"] > 0
