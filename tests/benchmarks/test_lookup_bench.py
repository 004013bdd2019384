"""The benchmark of lookups: its counts, its verdicts and its questions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks import lookup
from benchmarks.lookup import Config, Round, ask_in_turns, judge, make_answers, measure_counts
from redraft.engine.prompts import Prompt


def test_the_memory_of_live_counts_is_that_of_their_slots_whatever_is_counted() -> None:
    few, more = measure_counts(20, 16), measure_counts(400, 16)
    assert 500 < few["runs"] < more["runs"] < 400 * 16 * 6
    for found in (few, more):
        assert found["bytes"] == pytest.approx(16 * 1_000_000, rel=0.1)
        assert found["count_us_per_token"] > found["draft_us_per_lookup"] / 100 > 0
        device = found["device"]
        assert device["bytes"] == 16 * 1_000_000
        assert device["bytes_up_per_step"] == 8 * (3 + 7 + 7 * 32 + 2)
        assert 0 < device["bytes_up_per_counted_token"] <= 6 * 24
        assert device["table_bytes_per_lookup"] == 6 * 96


def test_made_up_answers_repeat_their_phrases() -> None:
    texts = [text.ids.tolist() for text in make_answers(300, 16)]
    assert {len(text) for text in texts} == {16}
    firsts = [tuple(text[:8]) for text in texts]
    assert len(set(firsts)) < 0.8 * len(firsts)
    assert texts == [text.ids.tolist() for text in make_answers(300, 16)]


def test_speed_and_tau_are_compared_round_by_round() -> None:
    rounds = {
        "live": [Round(30 + number, 2.5) for number in range(8)],
        "suffix": [Round(20 + 2 * number / 3, 2.0) for number in range(8)],
    }
    found = judge(rounds)
    assert found["over_suffix"] == pytest.approx(1.5)
    assert found["over_suffix_interval"] == pytest.approx((1.5, 1.5))
    assert found["tau"] == {"live": 2.5, "suffix": 2.0}
    assert "1.500x" in found["line"]


def test_both_drafts_answer_the_same_questions_once_and_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, tuple[int, ...], int]] = []

    async def ask(url: str, prompts: Any, clients: int, max_tokens: int) -> Round:
        asked.append((url, tuple(prompt.token_ids[0] for prompt in prompts), clients))
        return Round(1.0, 1.0)

    monkeypatch.setattr(lookup, "ask", ask)
    cfg = Config(rounds=6, questions=2, learned=3, clients=(1, 8))
    prompts = [Prompt(token_ids=[number], domain="code") for number in range(3 + 6 * 2 * 2)]
    rounds = asyncio.run(ask_in_turns(cfg, {"live": "one", "suffix": "two"}, prompts))
    assert {len(some) for of_load in rounds.values() for some in of_load.values()} == {6}
    for url in ("one", "two"):
        numbers = [number for each, numbers, _ in asked if each == url for number in numbers]
        assert sorted(numbers) == list(range(len(prompts)))
    firsts = [asked[2 + 4 * number][0] for number in range(6)]
    assert firsts == ["one", "two"] * 3


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="--rounds 5"):
        Config(rounds=5)


def test_the_tests_that_judge_the_runners_exist() -> None:
    assert lookup.TESTS.is_file()
    assert "lookup_on_v2" in Path(lookup.TESTS).read_text()
    assert "lookup_on_the_device" in Path(lookup.DEVICE_TESTS).read_text()
    engine = [
        line for line in Path(lookup.TESTS).read_text().splitlines() if "_in_the_engine(" in line
    ]
    assert len(engine) == 1  # which the short form leaves out
