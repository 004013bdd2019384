"""Counted answers in the engine: the config, the proposer, and refusals.

`test_evaluate` has a real engine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from redraft.engine import answer_counter
from redraft.engine.answer_counter import MOST_TOKENS, MOST_WAITING, cut_answer
from redraft.engine.lookup_first import HeadLimits, LookupFirst, mix
from redraft.engine.lookup_hooks import install
from redraft.engine.lookups import Counted, lookup_env, needs_plugin
from redraft.engine.server import vllm_keys
from redraft.engine.settings import VARIABLE, write_settings
from redraft.eval.forecast.draft_source import DraftSource
from redraft.eval.forecast.ngram import Ngram
from redraft.heads.families.retrieval import Config, Live, Retrieval

DRAFT = Retrieval(
    Config(max_run=1, verify_cost=0.2),
    {(5,): (6, 0.9), (6,): (7, 0.49), (7,): (8, 0.95)},
    [0.0, 0.1],
)


def make_runner(*rows: list[int], length: int = 8) -> Any:
    """A runner with these requests, in a batch of rows of `length` tokens."""
    ids = np.zeros((len(rows), length), np.int32)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    batch = SimpleNamespace(
        req_ids=[str(number) for number in range(len(rows))],
        token_ids_cpu=ids,
        num_tokens_no_spec=np.array([len(row) for row in rows]),
    )
    requests = {name: SimpleNamespace(tenant=b"acme") for name in batch.req_ids}
    return SimpleNamespace(
        input_batch=batch, requests=requests, drafter=None, propose_draft_token_ids=None
    )


def test_vllm_gets_its_ngrams_and_the_plugin_the_folder(tmp_path: Path) -> None:
    config = {**Retrieval.speculative_config(tmp_path), "num_speculative_tokens": 6}
    assert "retrieval" not in vllm_keys(config)
    assert vllm_keys(config)["method"] == "ngram"
    told = {"retrieval": str(tmp_path)}
    assert lookup_env(config) == write_settings({"lookup": told})
    dear = Retrieval.speculative_config(tmp_path, verify_cost=0.5)
    assert "verify_cost" not in vllm_keys(dear)
    assert lookup_env(dear) == write_settings({"lookup": told | {"verify_cost": 0.5}})
    assert needs_plugin(config)
    assert not needs_plugin(Ngram().speculative_config)


def test_each_request_gets_tokens_worth_verifying_in_its_step() -> None:
    scheduled = SimpleNamespace(num_spec_tokens_to_schedule=6)
    alone = Counted(make_runner([1, 5]), DRAFT)
    assert alone.propose(scheduled, [[5]], "the rest") == [[6, 7, 8]]
    busy = Counted(make_runner([1, 5], [2, 7], [5]), DRAFT)
    assert busy.propose(scheduled, [[5], [7], []]) == [[6], [8], []], (
        "one whose prompt is not read gets none"
    )
    full = Counted(make_runner([1, 5], length=3), DRAFT)
    assert full.propose(scheduled, [[5]]) == [[6]], "no draft reaches beyond the longest request"
    assert alone.propose(SimpleNamespace(num_spec_tokens_to_schedule=0), [[5]]) == [[]]


class Head:
    """A head that proposes 9 as often as it is asked, and notes how often that is."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def propose(self, scheduled: Any, sampled: list[list[int]], *_: Any) -> Any:
        self.asked.append(scheduled.num_spec_tokens_to_schedule)
        return np.full((len(sampled), self.asked[-1]), 9)


@dataclass
class Scheduled:
    num_spec_tokens_to_schedule: int = 6


def test_a_head_drafts_if_nothing_probable_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DRAFT.write(tmp_path)
    answers = Retrieval.speculative_config(tmp_path)
    for name, value in lookup_env(mix(answers, {"method": "eagle3"}, HeadLimits(tokens=2))).items():
        monkeypatch.setenv(name, value)

    def propose(*rows: list[int]) -> tuple[list[list[int]], list[int], frozenset[str]]:
        runner, head = make_runner(*rows), Head()
        runner.propose_draft_token_ids = head.propose
        settings = {"method": "eagle3", "disable_padded_drafter_batch": True}
        runner.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(**settings))
        install(runner)
        proposer = runner.propose_draft_token_ids
        drafts = proposer(Scheduled(), [[row[-1]] for row in rows], "the rest")
        return drafts, head.asked, proposer.__self__.looked_up

    assert propose([1, 5]) == ([[6, 7, 8]], [0], {"0"}), (
        "the head reads the step, and drafts nothing"
    )
    assert propose([1, 6]) == ([[9, 9]], [2], set()), "7 follows 6 with a probability of 0.49 only"
    assert propose([1, 5], [1, 6]) == ([[6], [9, 9]], [2], {"0"}), (
        "the head drafts for both, one takes it; of two requests, 0.9 pays, 0.9 * 0.49 does not"
    )
    assert propose([1, 5], [1, 5], [1, 6]) == ([[6], [6], [9, 9]], [2], {"0", "1"})


def make_live(
    monkeypatch: pytest.MonkeyPatch,
    *rows: list[int],
    head: Head | None = None,
    limits: HeadLimits | None = None,
) -> Any:
    """A runner with live counts, before a head if one is given."""
    config = DraftSource.parse("live").speculative()
    monkeypatch.setattr(answer_counter, "COUNTED_AT_ONCE", 5)
    runner, ended = make_runner(*rows), []
    runner.ended, runner._on_request_state_removed = ended, lambda name, request: ended.append(name)
    if head:
        config = mix(config, {"method": "eagle3"}, limits or HeadLimits())
        runner.propose_draft_token_ids = head.propose
        settings = {"method": "eagle3", "disable_padded_drafter_batch": True}
        runner.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(**settings))
    for name, value in lookup_env(config).items():
        monkeypatch.setenv(name, value)
    install(runner)
    runner.redraft.counter.find_owner = lambda request: request.tenant
    return runner


def make_request(
    prompt: list[int] | None, answer: list[int], tenant: bytes | None = b"acme"
) -> Any:
    params = SimpleNamespace(stop_token_ids=[0], eos_token_id=None, max_tokens=len(answer))
    return SimpleNamespace(
        prompt_token_ids=prompt,
        output_token_ids=answer,
        sampling_params=params,
        tenant=tenant,
    )


def test_answers_that_end_are_counted_a_little_in_each_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_live(monkeypatch, [2, 3])

    def propose() -> list[list[int]]:
        return runner.propose_draft_token_ids(Scheduled(), [[3]])

    assert propose() == [[]], "nothing has been answered"
    runner._on_request_state_removed("a", make_request([1, 2], [3, 4, 5, 6]))
    assert propose() == [[]], "five of eight steps: four to measure, one to count"
    runner.redraft.lookup.skip()  # with the pace at 0 nothing is proposed
    assert propose() == [[4, 5, 6]]
    runner._on_request_state_removed("embeddings", make_request(None, [3, 9]))
    runner._on_request_state_removed("unknown", None)
    for _ in range(20):
        runner._on_request_state_removed("opted out", make_request([2], [3, 9], None))
        assert propose() == [[4, 5, 6]]
    assert runner.ended == ["a", "embeddings", "unknown", *["opted out"] * 20], (
        "the wrapped hook is called"
    )
    assert runner.redraft.counter.counts == {"counted": 1, "not_allowed": 20}


def test_answers_of_one_token_displace_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_live(monkeypatch, [2, 3])
    counter = runner.redraft.counter
    counter.draft.runs.window = 4
    runner._on_request_state_removed("a", make_request([1, 2], [3, 4, 5]))
    for step in range(20):
        runner._on_request_state_removed(f"beam {step}", make_request([8], [9]))
        counter.learn()
    assert runner.propose_draft_token_ids(Scheduled(), [[3]]) == [[4, 5]]
    assert counter.counts == {"counted": 1, "too_short": 20}


def test_a_request_is_drafted_its_tenants_text_and_nobody_elses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_live(monkeypatch, [2, 3], [2, 3], [2, 3])
    for name, tenant in (("0", b"victim"), ("1", b"other!"), ("2", None)):
        runner.requests[name].tenant = tenant
    for number in range(3):
        secret = make_request([1, 2], [3, 7, 8], b"victim")
        runner._on_request_state_removed(f"secret {number}", secret)
    for _ in range(10):
        drafts = runner.propose_draft_token_ids(Scheduled(), [[3], [3], [3]])
    assert drafts == [[7, 8], [], []]
    runner._on_request_state_removed("own", make_request([1, 2], [3, 9], b"other!"))
    for _ in range(10):
        drafts = runner.propose_draft_token_ids(Scheduled(), [[3], [3], [3]])
    assert drafts == [[7, 8], [9], []]


def test_a_forgotten_tenant_is_forgotten_in_all_that_waits_and_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_live(monkeypatch, [2, 3], [2, 3])
    counter = runner.redraft.counter
    for name, tenant in (("0", b"acme"), ("1", b"acm2")):
        runner.requests[name].tenant = tenant

    def end(*names: str, answer: list[int]) -> None:
        for name in names:
            for tenant in (b"acme", b"acm2"):
                runner._on_request_state_removed(
                    f"{name} {tenant!r}", make_request([1, 2], answer, tenant)
                )

    end("counted", answer=[3, 4])
    for _ in range(10):
        counter.learn()
    end("being counted", answer=[3, 5, 5, 5, 5, 5, 5])
    counter.learn()
    end("ended", answer=[3, 6])
    assert counter.forget(b"acme") >= 2
    # one that ran
    runner._on_request_state_removed("0", make_request([1, 2], [3, 7], b"acme"))
    for _ in range(20):
        drafts = runner.propose_draft_token_ids(Scheduled(), [[3], [3]])
    assert drafts == [[], [6]], "the other's, of whom all was counted"
    runs = counter.draft.runs
    assert runs.forget(b"acme") == 0
    assert runs.forget(b"acm2") > 0
    assert counter.counts["not_allowed"] == 1


def test_nobody_is_counted_before_the_plugin_has_said_who_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = DraftSource.parse("live").speculative()
    for name, value in lookup_env(config).items():
        monkeypatch.setenv(name, value)
    runner = make_runner([2, 3])
    runner._on_request_state_removed = lambda name, request: None
    install(runner)
    runner._on_request_state_removed("a", make_request([1, 2], [3, 4]))
    assert runner.redraft.counter.counts == {"not_allowed": 1}


def test_ranks_count_alike_whatever_the_order_in_which_requests_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = [make_live(monkeypatch, [2, 3]) for _ in range(2)]
    texts = {
        str(number): make_request([7], [3, 4 + number % 3, 5 + number % 2]) for number in range(8)
    }
    for rank, names in zip(ranks, (sorted(texts), sorted(texts, reverse=True)), strict=True):
        for name in names:
            rank._on_request_state_removed(name, texts[name])
        for _ in range(40):
            rank.redraft.counter.learn()
    rows = [rank.redraft.counter.draft.runs.read()[0] for rank in ranks]
    assert len(rows[0]["rows"]) > 10
    for name, values in rows[0].items():
        np.testing.assert_array_equal(values, rows[1][name])


def test_an_error_of_counting_costs_an_answer_and_not_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, text = make_live(monkeypatch, [2, 3]), make_request([1, 2], [3, 4])
    counter, count = runner.redraft.counter, runner.redraft.counter.draft.learn

    def fail_in_the_second_step(text: Any) -> Any:
        yield
        raise RuntimeError("secret")

    counter.draft.learn = fail_in_the_second_step
    runner._on_request_state_removed("a", text)
    assert runner.propose_draft_token_ids(Scheduled(), [[3]]) == [[]]
    counter.draft.learn = count
    runner._on_request_state_removed(
        "no parameters", SimpleNamespace(prompt_token_ids=[1], output_token_ids=[3], tenant=b"acme")
    )
    runner._on_request_state_removed("no token", make_request([1, 2], [3, 2**40]))
    runner._on_request_state_removed("b", text)
    assert runner.propose_draft_token_ids(Scheduled(), [[3]]) == [[4]]
    failed = {"failed_RuntimeError": 1, "failed_AttributeError": 1, "failed_OverflowError": 1}
    assert counter.counts == {"counted": 2, **failed}
    assert runner.ended == ["a", "no parameters", "no token", "b"]


@pytest.mark.parametrize(
    ("tokens", "stops", "most", "expected"),
    [
        ([5, 6, 0, 7], [0], 9, [5, 6, 0]),
        ([5, 6, 2, 7], [], 9, [5, 6, 2]),
        ([5, 6, 7], None, 2, [5, 6]),
        ([5], [], None, [5]),
    ],
)
def test_an_answer_ends_where_the_scheduler_ended_it(tokens, stops, most, expected) -> None:
    params = SimpleNamespace(stop_token_ids=stops, eos_token_id=2, max_tokens=most)
    assert cut_answer(tokens, params) == expected
    assert cut_answer(tokens, None) == tokens


def test_of_a_long_text_the_end_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_live(monkeypatch, [2, 3])
    runner._on_request_state_removed("a", make_request(list(range(100, 9000)), [3, 4, 5]))
    (text,) = runner.redraft.counter._ended.values()
    assert (len(text.ids), text.ids[-4:].tolist(), text.is_label.sum()) == (
        MOST_TOKENS,
        [8999, 3, 4, 5],
        3,
    )
    runner._on_request_state_removed("b", make_request([1], list(range(1, 9000))))
    assert runner.redraft.counter._ended["b"].is_label.all()


def test_a_server_that_answers_more_than_it_counts_counts_some_of_them_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_live(monkeypatch, [2, 3])
    for step in range(100):
        for number in range(10 * step, 10 * step + 10):  # 200 steps of counting, and five are done
            runner._on_request_state_removed(
                str(number), make_request([5000 + number], [*range(10, 19), 4000])
            )
        runner.redraft.counter.learn()
    counts, draft = runner.redraft.counter.counts, runner.redraft.counter.draft
    assert counts["counted"] + counts["passed_over"] == 1000
    assert MOST_WAITING <= counts["counted"] < 100
    assert draft.runs.num_texts >= 500 // 21, "each is counted to its end"
    assert draft.propose(np.array([17, 18], np.int32), 1, owner=b"acme") == [4000]


def test_a_head_above_its_limit_of_requests_costs_no_second_lookup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It never drafts there, so its probability at matches stays unmeasured for good."""
    runner = make_live(monkeypatch, [1, 5], [2, 5], head=Head(), limits=HeadLimits(requests=1))
    looks, look_up = [], runner.redraft.lookup.lookup.look_up
    runner.redraft.lookup.lookup.look_up = lambda *step: looks.append(step) or look_up(*step)
    for sampled, expected in (([[5], [5]], 1), ([[5]], 2)):
        runner.propose_draft_token_ids(Scheduled(), sampled)
        assert len(looks) == expected
        looks.clear()


def test_live_counts_ask_a_head_that_is_accepted_often_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = Head()
    runner = make_live(monkeypatch, [1, 5], head=head)
    lookup = runner.redraft.lookup

    def step(*new: int) -> list[list[int]]:
        return runner.propose_draft_token_ids(Scheduled(), [list(new)])

    for _ in range(63):
        assert step(5) == [[9] * 6], "little is known yet"
    for _ in range(96):
        step(5)  # nothing is ever accepted
    assert sum(asked > 0 for asked in head.asked[63:]) == 3, "tried now and then"
    assert lookup.by_head.probability < 0.2
    for _ in range(1500):
        step(*((9, 5) if head.asked[-1] else (5,)))  # it has become good
    assert all(head.asked[-50:])
    assert lookup.by_head.probability > 0.8
    runner._on_request_state_removed("a", make_request([1], [5, 7]))
    for _ in range(20):
        step(9, 5)
    assert step(9, 5) == [[9] * 6], "7 followed 5 once: the head is more probable"
    assert lookup.live.least_first == lookup.at_matches.probability > 0.8
    drafts = lookup.by_head.drafts
    lookup.skip()  # at pace 0 its draft is not verified
    step(5)
    assert lookup.by_head.drafts == drafts
    lookup.swapped()
    assert (lookup.by_head.drafts, lookup.by_head.is_good) == (1, True), (
        "another head is judged from the beginning"
    )


@dataclass
class Traffic:
    """A request with easy and hard positions, and the runner of its server.

    A lookup finds a token at the easy ones only. It and the head are right with the given
    probabilities.
    """

    lookup: float
    at_easy: float
    """The head's."""
    at_hard: float
    easy: float = 0.6

    def __post_init__(self) -> None:
        self.rng, self.draft = np.random.default_rng(0), Live(Config())
        self.input_batch = SimpleNamespace(req_ids=["r"])
        self.first = LookupFirst(self, self, HeadLimits())
        self.first.propose_by_head = self.propose_draft_token_ids

    def skip(self) -> None: ...

    def look_up(self, *_: Any) -> list[list[int]]:
        return (
            [[self.by_lookup]] if self.is_easy and self.lookup >= self.draft.least_first else [[]]
        )

    def propose_draft_token_ids(self, scheduled: Scheduled, *_: Any) -> Any:
        self.num_asked += scheduled.num_spec_tokens_to_schedule
        return np.full((1, scheduled.num_spec_tokens_to_schedule), self.by_head)

    def run(self, num_steps: int) -> tuple[float, float]:
        """Tokens a step, and steps in which the head drafts."""
        new, num_tokens, self.num_asked = [7], 0, 0
        for _ in range(num_steps):
            self.is_easy = self.rng.random() < self.easy
            self.by_lookup = 7 if self.rng.random() < self.lookup else 1
            self.by_head = (
                7 if self.rng.random() < (self.at_easy if self.is_easy else self.at_hard) else 2
            )
            (draft,) = self.first.propose(Scheduled(1), [new])
            new = [7, 8] if draft == [7] else [7]
            num_tokens += len(new)
        return num_tokens / num_steps, self.num_asked / num_steps


@pytest.mark.parametrize(
    ("traffic", "tokens", "asked"),
    [
        (Traffic(0.55, 0.9, 0.3), 1 + 0.6 * 0.9 + 0.4 * 0.3, 1),
        (Traffic(0.55, 0.9, 0.1), 1 + 0.6 * 0.9 + 0.4 * 0.1, 1),
        (Traffic(0.8, 0.6, 0.3), 1 + 0.6 * 0.8 + 0.4 * 0.3, 0.4 + 0.6 / 32),
        (Traffic(0.8, 0.6, 0.1), 1 + 0.6 * 0.8 + 0.4 * 0.1 / 32, 1 / 32),
        (Traffic(0.15, 0.05, 0.05), 1 + 0.6 * 0.15, 1 / 32),
    ],
)
def test_the_better_of_lookup_and_head_drafts_also_after_a_swap(
    traffic: Traffic, tokens: float, asked: float
) -> None:
    traffic.run(3000)
    for _ in range(2):
        assert traffic.run(6000) == (
            pytest.approx(tokens, abs=0.03),
            pytest.approx(asked, abs=0.03),
        )
        traffic.first.swapped()  # to a head that is as good


def test_a_runner_takes_the_folder_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(**lookup: Any) -> None:
        monkeypatch.setenv(VARIABLE, json.dumps({"lookup": lookup}))

    runner = make_runner([1, 5])
    install(runner)
    assert runner.propose_draft_token_ids is None, "without the setting it is left alone"
    ask(retrieval=str(tmp_path))
    with pytest.raises(FileNotFoundError):
        install(runner)
    DRAFT.write(tmp_path)
    install(runner)
    proposed = runner.propose_draft_token_ids
    assert proposed(SimpleNamespace(num_spec_tokens_to_schedule=1), [[5]]) == [[6]]
    install(runner)
    assert runner.propose_draft_token_ids == proposed, "once"
    ask(retrieval=str(tmp_path), verify_cost=0.95)
    dear = make_runner([1, 5])
    install(dear)
    assert dear.propose_draft_token_ids(SimpleNamespace(num_spec_tokens_to_schedule=1), [[5]]) == [
        []
    ]
    ask(retrieval=str(tmp_path), verify_cost=2)
    with pytest.raises(ValueError, match=r"2\.0"):
        install(make_runner([1, 5]))
    ask(retrieval=str(tmp_path))
    other = make_runner([1, 5])
    del other.drafter
    with pytest.raises(ValueError, match="V1 and V2"):
        install(other)
