"""The workloads of a fleet: their sizes, and what their prompts share."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks.workloads import Session, Workload, extend, list_workloads
from redraft.engine.prompts import Prompt
from redraft.files.target_folder import TargetFolder

LONGEST = 1024


def make(tiny_target: Path, seed: int = 0) -> dict[str, Workload]:
    """All workloads for a server of 1,024 tokens, with 60 single questions."""
    questions = [Prompt(token_ids=[number], domain="code") for number in range(60)]
    tokenizer = TargetFolder.open(tiny_target).tokenizer
    return {one.name: one for one in list_workloads(tokenizer, questions, LONGEST, seed)}


def count_shared(one: Session, other: Session) -> int:
    pairs = zip(one.prompt.token_ids, other.prompt.token_ids, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_agents_share_a_prefix_and_have_four_turns(tiny_target: Path) -> None:
    workloads = make(tiny_target)
    sessions = list(itertools.islice(workloads["agents"].sessions, 6))
    assert {len(session.results) for session in sessions} == {3}
    for one, other in itertools.combinations(sessions, 2):
        assert 200 < count_shared(one, other) < 300, "a quarter of the longest text"
        assert not set(map(tuple, one.results)) & set(map(tuple, other.results))
    for session in sessions:
        answers = 4 * workloads["agents"].max_tokens
        whole = len(session.prompt.token_ids) + sum(map(len, session.results))
        assert whole + answers <= LONGEST


def test_prompts_with_documents_are_long_and_share_nothing(tiny_target: Path) -> None:
    sessions = list(itertools.islice(make(tiny_target)["retrieval"].sessions, 6))
    for session in sessions:
        assert 500 < len(session.prompt.token_ids) <= 760
        assert not session.results
    for one, other in itertools.combinations(sessions, 2):
        assert count_shared(one, other) < 16


def test_nothing_is_asked_twice_and_a_seed_gives_the_same_texts(tiny_target: Path) -> None:
    seen: list[tuple[int, ...]] = []
    workloads = make(tiny_target)
    for workload in workloads.values():
        for session in itertools.islice(workload.sessions, workload.block):
            seen.append(tuple(session.prompt.token_ids))
    assert [one.clients for one in workloads.values()] == [1, 1, 1, 8, 16]
    assert len(set(seen)) == len(seen) == 2 + 1 + 1 + 8 + 16
    again, other = (next(make(tiny_target, seed)["agents"].sessions) for seed in (0, 1))
    assert again == next(make(tiny_target)["agents"].sessions) != other


@pytest.mark.parametrize("answer", [[5, 6], [5, 6, 9]])
def test_a_turn_goes_on_after_the_answer_which_ends_once(answer: list[int]) -> None:
    """9 ends a message."""
    assert extend(Prompt(token_ids=[1, 2]), answer, [9, 3]).token_ids == [1, 2, 5, 6, 9, 3]
