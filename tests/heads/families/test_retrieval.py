"""Counted answers: the lookup against brute force, the probabilities by hand, and refusals."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from redraft.files.folder import CONFIG
from redraft.heads.families.retrieval import (
    MOST_VOTES,
    Config,
    Live,
    Retrieval,
    Text,
    as_text,
    count_answers,
    find_run,
    is_retrieval,
)


def make_ids(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def make_text(prompt: list[int], answer: list[int]) -> Text:
    return Text(
        ids=make_ids(prompt + answer),
        is_label=np.array([False] * len(prompt) + [True] * len(answer)),
    )


def find_by_hand(tokens: list[int], max_run: int) -> tuple[int, int]:
    """The longest run of last tokens with an earlier place.

    The index of the token after its first place comes with it.
    """
    for length in range(min(max_run, len(tokens) - 1), 0, -1):
        for start in range(len(tokens) - length):
            if tokens[start : start + length] == tokens[-length:]:
                return length, start + length
    return 0, 0


@pytest.mark.parametrize("vocabulary", [(1, 2), (0, 1, 256, 65536), tuple(range(30))])
def test_the_longest_run_is_found_at_its_first_place(vocabulary: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        # tokens such as 256 and 65536 have equal bytes at other offsets
        tokens = rng.choice(vocabulary, rng.integers(1, 40)).tolist()
        assert find_run(as_text(make_ids(tokens)), 5) == find_by_hand(tokens, 5), tokens
        end = rng.integers(0, len(tokens) + 1)
        assert find_run(as_text(make_ids(tokens)), 5, end) == find_by_hand(tokens[:end], 5), tokens


def time_ms(act: Callable[[], object]) -> float:
    """The least CPU time of a call in five."""
    times = []
    for _ in range(5):
        begin_s = time.thread_time()
        act()
        times.append(1e3 * (time.thread_time() - begin_s))
    return min(times)


@pytest.mark.parametrize(
    "ids",
    [
        [*[256] * 16383, 1],  # in bytes, the last token stands across any two
        [*[257, 513, 769, 1025] * 4096, (1 << 16) + 1],  # whose low byte is everybody's
        [*[0xD900] * 16383, 0xDA00],  # no characters of their own in Unicode
        [*[5, 5, 5, 5, 5, 6] * 2730, 5, 5, 5, 6, 5, 5],
    ],
)
def test_no_text_makes_a_lookup_or_counting_much_slower(ids: list[int]) -> None:
    usual = np.random.default_rng(0).integers(2, 30_000, 16_384).astype(np.int32)
    chosen = make_ids(ids)

    def count(ids: np.ndarray) -> None:
        is_label = np.arange(4096) >= 3996
        learn(Live(Config()), Text(ids=ids[-4096:], is_label=is_label))

    draft = Live(Config())
    # a step looks at most 12 tokens up
    most = 12 * time_ms(lambda: draft.propose(usual, 12)) + 1
    assert time_ms(lambda: draft.propose(chosen, 12)) < most
    assert time_ms(lambda: count(chosen)) < 5 * time_ms(lambda: count(usual)) + 1


def test_a_token_of_any_number_is_looked_up() -> None:
    for token in (0, 1, 255, 0xD800, 0xFFFF, 0x10000, 262_143):
        assert Live(Config()).propose(make_ids([5, token, 7, 5]), 1) == [token]
        draft = Retrieval(Config(), {(token,): (0, 0.9)}, [0.0] * 7)
        assert draft.propose(make_ids([3, token]), 1) == [0]
    assert Live(Config()).propose(make_ids([-1, 2**31 - 2]), 3) == [], "no error ends the engine"


def vote_by_hand(tokens: list[int], most: int) -> int:
    """The candidate that the majority vote keeps."""
    kept, votes = tokens[0], 0
    for token in tokens:
        if token == kept or not votes:
            kept, votes = token, min(most, votes + 1 if token == kept else 1)
        else:
            votes -= 1
    return kept


def test_an_entry_is_the_label_that_wins_the_vote_after_its_run() -> None:
    rng = np.random.default_rng(1)
    texts = [
        make_text(rng.integers(0, 6, 5).tolist(), rng.integers(0, 6, 30).tolist())
        for _ in range(12)
    ]
    followers: dict[tuple[int, ...], list[int]] = {}
    for text in texts:
        ids = text.ids.tolist()
        for at in np.flatnonzero(text.is_label):
            for length in range(1, 4):
                followers.setdefault(tuple(ids[at - length : at]), []).append(ids[at])
    draft = count_answers(texts, Config(max_run=3))
    for run, (token, probability) in draft.entries.items():
        assert token == vote_by_hand(followers[run], MOST_VOTES), run
        best, its = Counter(followers[run]).most_common(1)[0]
        if 2 * its > len(followers[run]):
            assert token == best, "a majority always wins"
        assert 0 < probability < 1
    for run in followers.keys() - draft.entries.keys():
        assert len(run) > 1, "left out because a shorter run says the same"


def test_of_too_many_runs_those_without_new_text_go() -> None:
    texts = [
        make_text([1], [2, 3, 4]),
        *(make_text([10 * n], [10 * n + 1, 10 * n + 2]) for n in range(1, 40)),
    ]
    # the first text comes again and again
    draft = count_answers(
        [texts[0], *(text for other in texts for text in (other, texts[0]))], Config(max_entries=24)
    )
    assert len(draft.entries) <= 24
    assert draft.entries[(1,)][0] == 2
    assert draft.entries[(390,)][0] == 391, "the newest"
    assert (10,) not in draft.entries


def test_a_run_of_one_conversation_is_left_out_if_two_are_asked_for() -> None:
    shared, alone = make_text([9], [1, 2, 1, 2]), make_text([9], [5, 6, 5, 6, 5, 6])
    assert count_answers([shared, alone, shared], Config(max_run=2)).entries[(5,)][0] == 6
    entries = count_answers([shared, alone, shared], Config(max_run=2, min_texts=2)).entries
    assert entries[(1,)][0] == 2
    assert not {5, 6} & {token for run, (best, _) in entries.items() for token in (*run, best)}


def test_probabilities_are_measured_before_a_text_is_counted() -> None:
    # after 1 always comes 2; after 3 comes a token that no other text has there
    texts = [make_text([9], [1, 2, 3, 100 + number]) for number in range(200)]
    draft = count_answers(texts, Config(max_run=1))
    assert draft.entries[(1,)] == (2, pytest.approx(1, abs=0.05))
    assert draft.entries[(3,)][1] < 0.05
    assert draft.entries[(9,)][1] == draft.entries[(1,)][1], "equal votes"


def test_a_text_is_no_evidence_for_its_own_runs() -> None:
    # [1, 2] repeats within each text, and no two texts share a token
    texts = [make_text([9], [10 * n + 1, 10 * n + 2] * 8) for n in range(1, 30)]
    draft = count_answers(texts, Config(max_run=1))
    assert draft.run_probability[1] > 0.9, "the request predicts itself"
    others = count_answers([*texts, make_text([9], [7, 8])], Config(max_run=1))
    assert others.entries[(9,)][1] < 0.05, "what follows 9 in the answers never came true"


def learn(draft: Live, text: Text) -> int:
    return sum(1 for _ in draft.learn(text))


def test_live_counts_begin_with_the_request_and_learn_answers() -> None:
    draft = Live(Config(max_run=3))
    assert draft.propose(make_ids([5, 6, 7]), 4) == []
    assert draft.propose(make_ids([5, 6, 7, 8, 5, 6, 7]), 4)[:1] == [8], "as n-grams"
    text = make_text([1, 2], [3, 4, 5, 6])
    assert learn(draft, text) == 8, "steps: four to measure, four to count"
    assert draft.propose(make_ids([2, 3]), 3) == [4, 5, 6]
    assert draft.propose(make_ids([1]), 3) == [], "a prompt is no answer"
    for _ in range(9):
        learn(draft, text)
    before = draft.run_probability[1]
    token, probability = draft.counts.predict(make_ids([2, 3]).tobytes())
    assert (token, probability > 0.8) == (4, True)
    once = count_answers([text] * 10, Config(max_run=3))
    assert once.entries[(3,)] == (
        4,
        pytest.approx(draft.counts.predict(make_ids([3]).tobytes())[1]),
    ), "as if counted at once"
    for _ in range(40):
        learn(draft, make_text([1, 2], [3, 9, 3, 9]))
    assert draft.counts.predict(make_ids([3]).tobytes())[0] == 9, (
        "newer answers displace older ones"
    )
    assert draft.run_probability[1] != before


def test_an_owners_text_is_drafted_for_nobody_else() -> None:
    draft = Live(Config())
    text = make_text([1, 2], [3, 4, 5, 6])
    for _ in range(3):
        learn(draft, replace(text, owner=b"acme"))
    ids = make_ids([1, 2, 3])
    assert draft.propose(ids, 3, owner=b"acme") == [4, 5, 6]
    for owner in (b"acm2", b"", None):
        assert draft.propose(ids, 3, owner=owner) == []
    assert draft.propose(make_ids([3, 9, 3]), 1, owner=None) == [9], "its own words"
    # a text whose tokens are the other owner's name is no way round it
    name = np.frombuffer(b"acme", np.int32).tolist()
    assert draft.propose(make_ids([*name, 3]), 3, owner=b"acm2") == []


def test_a_forgotten_owner_leaves_no_run() -> None:
    draft, alone = Live(Config()), Live(Config())
    for number in range(60):
        text = make_text([1], [10 + number, 2, 3])
        for owner in (b"acme", b"acm2"):
            learn(draft, replace(text, owner=owner))
        learn(alone, replace(text, owner=b"acm2"))
    runs = draft.runs.num_runs
    num_dropped = draft.runs.forget(b"acme")
    assert num_dropped > 100
    assert draft.runs.num_runs == alone.runs.num_runs == runs - num_dropped
    assert draft.propose(make_ids([1, 10]), 2, owner=b"acme") == []
    assert draft.propose(make_ids([1, 10]), 2, owner=b"acm2") == [2, 3]
    assert draft.runs.forget(b"nobody") == 0


def test_counting_leaves_the_garbage_collector_nothing_and_takes_no_more_memory() -> None:
    draft, rng = Live(Config(max_entries=100_000)), np.random.default_rng(0)
    gc.collect()
    before, blocks = len(gc.get_objects()), []
    num_bytes = draft.runs.num_bytes
    assert num_bytes == 16 * 100_000
    for _ in range(60):  # 144,000 runs
        for step, _ in enumerate(draft.learn(make_text([], rng.integers(0, 50_000, 400).tolist()))):
            if step % 20 == 0:
                blocks.append(sys.getallocatedblocks())
    assert max(blocks) - min(blocks) < 5_000, "none for each run"
    assert len(gc.get_objects()) - before < 1_000
    assert draft.runs.num_bytes == num_bytes
    assert 90_000 < draft.runs.num_runs <= 100_000


def test_live_hit_rates_follow_a_change_of_the_traffic() -> None:
    rng = np.random.default_rng(0)
    drafts = Live(Config(max_run=2)), Live(Config(max_run=2))
    phrases = rng.integers(0, 49_000, (50, 40))
    for _ in range(300):
        learn(drafts[0], make_text([], phrases[rng.integers(0, 50, 10)].ravel().tolist()))
    assert drafts[0].run_probability[1] > 0.25
    for _ in range(100):  # no token predicts the next one
        text = make_text([], rng.integers(0, 400, 400).tolist())
        for draft in drafts:
            learn(draft, text)
    in_request = [draft.run_probability[1] for draft in drafts]
    in_answers = [draft.counts.predict(make_ids([7]).tobytes())[1] for draft in drafts]
    assert in_request[0] == pytest.approx(in_request[1], abs=0.005)
    assert in_answers[0] == pytest.approx(in_answers[1], abs=0.005)


def test_the_more_probable_of_request_and_answers_is_drafted_while_it_pays() -> None:
    entries = {(5,): (6, 0.9), (6,): (7, 0.5), (7,): (8, 0.1), (2, 5): (4, 0.95)}
    draft = Retrieval(Config(max_run=2, verify_cost=0.2), entries, [0.0, 0.3, 0.8])
    assert draft.propose(make_ids([1, 5]), 9) == [6, 7], (
        "the third would come with probability 0.045"
    )
    assert draft.propose(make_ids([1, 5]), 1) == [6]
    assert draft.propose(make_ids([1, 5]), 9, num_requests=3) == [6], (
        "each token costs three times as much of a step"
    )
    assert draft.propose(make_ids([1, 5]), 9, num_requests=5) == []
    assert draft.propose(make_ids([2, 5]), 1) == [4], "the longest run of the answers counts"
    assert draft.propose(make_ids([1, 5, 3, 1, 5]), 1) == [6], (
        "0.9 of the answers before 0.8 of the request"
    )
    assert draft.propose(make_ids([1, 9, 3, 1, 9]), 2) == [3, 1], (
        "no answer has 9, the request does"
    )
    assert draft.propose(make_ids([]), 3) == []
    assert list(draft.blocks([1, 5, 6], 2, 2, 1)) == [[6], [7]]


def test_a_draft_has_the_length_of_most_expected_tokens_per_time() -> None:
    rng = np.random.default_rng(0)
    lengths = set()
    for _ in range(200):
        each = rng.uniform(0.2, 1, 8)
        entries = {(token,): (token + 1, float(p)) for token, p in enumerate(each)}
        cost, num_requests = float(rng.uniform(0.01, 0.2)), int(rng.integers(1, 5))
        draft = Retrieval(Config(max_run=1, verify_cost=cost), entries, [0.0, 0.0])
        expected_D = 1 + np.cumsum([0.0, *np.cumprod(each)])
        speed_D = expected_D / (1 + cost * num_requests * np.arange(len(expected_D)))
        drafted = draft.propose(make_ids([0]), len(each), num_requests)
        assert len(drafted) == np.argmax(speed_D)
        lengths.add(len(drafted))
    assert lengths >= set(range(7))


def test_a_folder_gives_the_draft_back(tmp_path: Path) -> None:
    draft = count_answers(
        [make_text([1, 2], [3, 4, 3, 4, 5])] * 3, Config(max_run=4, verify_cost=0.1)
    )
    draft.write(tmp_path)
    assert is_retrieval(tmp_path)
    again = Retrieval.read(tmp_path)
    assert again.config == draft.config
    assert again.entries.keys() == draft.entries.keys()
    for run, (token, probability) in draft.entries.items():
        assert again.entries[run] == (token, pytest.approx(probability))
    assert again.run_probability == pytest.approx(draft.run_probability)


def test_bad_input_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="label"):
        count_answers([make_text([1, 2], [])], Config())
    with pytest.raises(ValueError, match=r"max_run is 0\b.*\b16\b"):
        Config(max_run=0)
    with pytest.raises(ValueError, match=r"min_texts is 0\b"):
        Config(min_texts=0)
    with pytest.raises(ValueError, match=r"verify_cost is 2\b"):
        Config(verify_cost=2)
    (tmp_path / CONFIG).write_text('{"redraft": {"family": "eagle3"}}')
    assert not is_retrieval(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path} .*`redraft data count`"):
        Retrieval.read(tmp_path)
