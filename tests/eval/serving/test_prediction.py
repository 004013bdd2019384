"""Which draft pays: predictions from rounds, against numbers worked out by hand; and the page."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from redraft.engine import adaptive
from redraft.engine.counts import AcceptanceCounts
from redraft.engine.measure import Measurement, Output, find_full_load
from redraft.engine.prompts import Prompt
from redraft.eval.serving.bench_report import (
    choose_served,
    describe_adaptive,
    describe_draft,
)
from redraft.eval.serving.cost import AdaptivePoint, StepCosts, predict_adaptive
from redraft.eval.serving.prediction import Candidate, choose, predict
from redraft.eval.serving.rounds import PLAIN

LOADS = (1, 8)
HEAD = Candidate("head", "a head", {"method": "eagle3", "model": "x"}, 3, 10_000_000)
NGRAM = Candidate("ngram", "n-grams", {"method": "ngram"}, 4)
MIX = Candidate(
    "mix",
    "n-grams before a head",
    {"method": "eagle3", "model": "x", "prompt_lookup_max": 4},
    4,
    10_000_000,
)
LAYERS = Candidate(
    "layers-2", "2 of the target's layers", {"method": "draft_model", "model": "y"}, 3, 35_000_000
)


def make_run(
    load: int, step_ms: float, accepted: tuple[int, ...], prefill_s: float = 0.0
) -> Measurement:
    """`load` requests of 100 target steps after the prefill.

    These positions were accepted so often in them.

    All requests wait for each prefill.
    """
    steps, total = 100, sum(accepted)
    counts = AcceptanceCounts(num_drafts=steps, num_accepted=total, accepted_per_position=accepted)
    output = Output(token_ids=[7] * (steps + total + 1), counts=counts if accepted else None)
    decode_s = steps * step_ms / 1000
    return Measurement(
        prompts=[Prompt(token_ids=[number]) for number in range(load)],
        outputs=[output] * load,
        full_s=decode_s + load * prefill_s,
        full_tokens=load * len(output.token_ids),
        dtype="bfloat16",
        counts=None,
        decode_s=decode_s if load == 1 else None,
    )


def make_rounds(
    name: str,
    steps_ms: dict[int, float],
    accepted: tuple[int, ...],
    prefills_s: tuple[float, float] = (0.0, 0.0),
) -> dict[Any, Any]:
    """Plain steps of 10 ms up to four rows, 12 ms at eight requests, and 30 ms for 32 rows."""
    plain = {1: 10.0, 4: 10.0, 8: 12.0, 32: 30.0}
    found: dict[Any, Any] = {
        (PLAIN, load): [make_run(load, ms, (), prefills_s[0])] * 2 for load, ms in plain.items()
    }
    return found | {
        (name, load): [make_run(load, ms, accepted, prefills_s[1])] * 2
        for load, ms in steps_ms.items()
    }


def test_the_speed_with_fewer_tokens_follows_from_acceptance_by_position_and_the_cost_of_a_step() -> (
    None
):
    choice = predict(HEAD, make_rounds("head", {1: 16.0, 8: 36.0}, (60, 30, 6)), LOADS)
    # verifying 4 rows takes 10 ms as one does, so 3 draft tokens take 6 ms; of 36 ms at eight, 30
    # verify 32 rows
    assert choice.costs.draft_s == pytest.approx({1: 0.002, 8: 0.002})
    one = {row.num_speculative_tokens: row for row in choice.by_tokens[1]}
    assert [row.tau for row in one.values()] == pytest.approx([1.0, 1.6, 1.9, 1.96])
    assert one[3].speedup == pytest.approx(1.96 * 10 / 16)
    assert one[3].speedup == pytest.approx(choice.measured[1].ratio, rel=0.01), (
        "but for the prefill's token"
    )
    assert one[1].speedup == pytest.approx(1.6 * 10 / 12)
    assert choice.best[1].num_speculative_tokens == 2
    assert choice.speedups[1] == pytest.approx(1.9 * 10 / 14)
    # at eight requests, 3 tokens yield 1.96 times the tokens in 3 times the time; none is best
    assert choice.best[8].num_speculative_tokens == 0
    assert choice.speedups[8] == 1.0


def test_prefills_pass_neither_for_verification_nor_for_drafting() -> None:
    """Prefills change no cost.

    With prefills of 0.2 s, and 0.3 s with the draft, costs and the best number of tokens are the
    same as without.
    """
    without = predict(HEAD, make_rounds("head", {1: 16.0, 8: 36.0}, (60, 30, 6)), LOADS)
    choice = predict(HEAD, make_rounds("head", {1: 16.0, 8: 36.0}, (60, 30, 6), (0.2, 0.3)), LOADS)
    assert choice.costs.draft_s == pytest.approx(without.costs.draft_s)
    assert choice.speculative_config == without.speculative_config
    # an answer of 197 tokens: 0.3 s and 100.5 steps of 16 ms; alone 0.2 s and 197 steps of 10 ms
    three = choice.by_tokens[1][3]
    assert three.speedup == pytest.approx((0.2 + 1.97) / (0.3 + 197 / 1.96 * 0.016))
    assert three.tokens_per_s == pytest.approx(197 / (0.3 + 197 / 1.96 * 0.016))
    # eight answers at once wait for eight prefills
    assert choice.by_tokens[8][3].tokens_per_s == pytest.approx(
        8 * 197 / (8 * 0.3 + 197 / 1.96 * 0.036)
    )


PREFILL_S, DRAFT_S, ACCEPTED = 0.02, 0.0008, 0.7
"""Of the engine below: a prefill, for which all wait; a draft token of all requests; the chance of
the next token.
"""


def verify_s(rows: int) -> float:
    return 0.010 + 0.0008 * rows


def serve(load: int, k: int, number: int, rng: np.random.Generator) -> Measurement:
    """`number` answers of 4 to 64 tokens, `load` at a time, in an engine of known costs."""
    wanted = [int(np.clip(rng.exponential(35), 4, 64)) for _ in range(number)]
    arrivals: list[list[tuple[float, int]]] = [[] for _ in wanted]
    accepted: list[list[int]] = [[] for _ in wanted]
    now_s, decode_s, waiting, running = 0.0, 0.0, list(range(number)), list[int]()
    while waiting or running:
        begun = [waiting.pop(0) for _ in range(min(load - len(running), len(waiting)))]
        for answer in begun:
            arrivals[answer].append((now_s, 0))
        now_s += PREFILL_S * len(begun)
        for answer in begun:
            arrivals[answer].append((now_s, 1))
        running += begun
        step_s = verify_s(len(running) * (k + 1)) + k * DRAFT_S
        now_s, decode_s = now_s + step_s, decode_s + step_s * len(running)
        for answer in tuple(running):
            hits = int(np.cumprod(rng.random(k) < ACCEPTED).sum())
            accepted[answer].append(hits)
            left = wanted[answer] - sum(count for _, count in arrivals[answer])
            arrivals[answer].append((now_s, min(hits + 1, left)))
            if left <= hits + 1:
                running.remove(answer)
    full_s, full_tokens = find_full_load(arrivals)
    return Measurement(
        prompts=[Prompt(token_ids=[answer]) for answer in range(number)],
        outputs=[
            Output(
                token_ids=[7] * count, counts=AcceptanceCounts.from_blocks(hits, k) if k else None
            )
            for count, hits in zip(wanted, accepted, strict=True)
        ],
        full_s=full_s,
        full_tokens=full_tokens,
        dtype="bfloat16",
        counts=None,
        decode_s=decode_s if load == 1 else None,
    )


def test_answers_that_end_early_leave_no_slot_empty_in_a_speed() -> None:
    """Requests become fewer over the load.

    The draft is 1.18x as fast at eight, and a step takes 25 ms.
    """
    rng, loads = np.random.default_rng(0), {1: 2, 4: 8, 8: 16, 32: 64}
    rounds: dict[Any, Any] = {}
    for server, k in ((PLAIN, 0), ("head", 3)):
        for load in loads if server == PLAIN else LOADS:
            rounds[server, load] = [serve(load, k, loads[load], rng) for _ in range(30)]
    choice = predict(HEAD, rounds, LOADS)
    # A sustained load pays a prefill for every answer, here of 29 tokens.
    mean = choice.measured[8].tokens_per_request
    token_s = {
        k: PREFILL_S / mean + (verify_s(8 * (k + 1)) + k * DRAFT_S) / (8 * tau)
        for k, tau in ((0, 1), (3, 2.533))
    }
    assert choice.measured[8].ratio == pytest.approx(token_s[0] / token_s[3], rel=0.05)
    assert choice.costs.target_s[8][0] == pytest.approx(verify_s(8), rel=1e-3)
    assert choice.costs.draft_s[8] == pytest.approx(DRAFT_S, rel=0.25)
    for row in choice.by_tokens[8][1:]:
        k, tau = (
            row.num_speculative_tokens,
            1 + sum(ACCEPTED**j for j in range(1, row.num_speculative_tokens + 1)),
        )
        its_s = PREFILL_S / mean + (verify_s(8 * (k + 1)) + k * DRAFT_S) / (8 * tau)
        assert row.speedup == pytest.approx(token_s[0] / its_s, rel=0.05)


def test_a_head_is_served_with_the_best_number_of_tokens_for_each_batch_size() -> None:
    choice = predict(HEAD, make_rounds("head", {1: 16.0, 8: 36.0}, (60, 30, 6)), LOADS)
    config = choice.speculative_config
    assert config["num_speculative_tokens"] == 2
    assert config["num_speculative_tokens_per_batch_size"][0][::2] == [1, 2]
    assert config["num_speculative_tokens_per_batch_size"][-1][1:] == [8, 0]


@pytest.mark.parametrize("candidate", [NGRAM, MIX])
def test_a_draft_that_chooses_its_length_keeps_its_measured_speed(candidate: Candidate) -> None:
    choice = predict(
        candidate, make_rounds(candidate.name, {1: 11.0, 8: 14.0}, (30, 20, 10, 0)), LOADS
    )
    assert {row.num_speculative_tokens for row in choice.by_tokens[1]} == {0, 4}
    for load in LOADS:
        assert choice.speedups[load] == pytest.approx(choice.measured[load].ratio, rel=0.01)
    assert choice.speculative_config == candidate.speculative_config


def test_the_acceptance_of_a_block_says_nothing_of_shorter_blocks() -> None:
    rounds = make_rounds("dflash", {1: 16.0, 8: 36.0}, (60, 30, 6))
    block = predict(
        Candidate("dflash", "a block", {"method": "dflash", "model": "x"}, 3, 10_000_000),
        rounds,
        LOADS,
    )
    assert {row.num_speculative_tokens for row in block.by_tokens[1]} == {0, 3}
    assert block.speedups[1] == pytest.approx(1.96 * 10 / 16), "as measured"
    assert block.speculative_config["num_speculative_tokens"] == 3


@pytest.mark.parametrize(
    ("method", "numbers", "served", "speeds", "is_advised"),
    [
        # A block is measured with 3 tokens only.
        ("dflash", {0, 3}, 3, (1.96 * 10 / 16, 1.96 * 12 / 36), False),
        # Of the numbers for Medusa, 1 is the best on average: 2 is faster at one request only.
        ("medusa", {0, 1, 2, 3}, 1, (1.6 * 10 / 12, 1.6 * 12 / 20), True),
    ],
)
def test_a_draft_whose_number_vllm_cannot_change_is_predicted_with_it_at_every_load(
    method: str, numbers: set[int], served: int, speeds: tuple[float, float], is_advised: bool
) -> None:
    draft = Candidate(method, "a draft", {"method": method, "model": "x"}, 3, 10_000_000)
    choice = predict(draft, make_rounds(method, {1: 16.0, 8: 36.0}, (60, 30, 6)), LOADS)
    assert {row.num_speculative_tokens for row in choice.by_tokens[1]} == numbers
    assert "num_speculative_tokens_per_batch_size" not in choice.speculative_config
    assert choice.speculative_config["num_speculative_tokens"] == served
    assert [choice.best[load].num_speculative_tokens for load in LOADS] == [served] * 2
    assert list(choice.speedups.values()) == pytest.approx(speeds)
    assert choice.advice == f"k = {served} at every load: vLLM cannot change it"
    # At eight requests, the block is expected to lose a third of the speed.
    assert choose_served([choice]) == (method if is_advised else None)


def test_acceptance_that_is_given_replaces_the_counted_one() -> None:
    """A draft accepted half as often takes as long, and pays less."""
    rounds = make_rounds("head", {1: 16.0, 8: 36.0}, (60, 30, 6))
    given = predict(replace(HEAD, given=(0.3, 0.1)), rounds, LOADS)
    one = {row.num_speculative_tokens: row for row in given.by_tokens[1]}
    assert one.keys() == {0, 1, 2}
    assert one[1].speedup == pytest.approx(1.3 * 10 / 12)
    assert given.best[1].num_speculative_tokens == 1
    assert given.advice.startswith("best k = 1 up to 2 requests, off above")
    for draft in (NGRAM, MIX, replace(HEAD, config={"method": "dflash", "model": "x"})):
        with pytest.raises(ValueError, match=f"{draft.title} changes .*--acceptance"):
            replace(draft, given=(0.3,))


CURVE = [
    AdaptivePoint(threshold=0.0, tau=2.0, rows=4.0),
    AdaptivePoint(threshold=0.5, tau=1.8, rows=2.0),
    AdaptivePoint(threshold=1.1, tau=1.0, rows=1.0),
]


def test_adaptive_verification_takes_the_threshold_that_pays_at_each_load() -> None:
    """A step of 4 rows takes 10 ms at one request. At eight, 8 rows take 12 ms and 32 take 30."""
    costs = StepCosts(target_s={1: {0: 0.010, 3: 0.010}, 8: {0: 0.012, 3: 0.030}},
                      draft_s={1: 0.001, 8: 0.002})  # fmt: skip
    one, eight = (
        predict_adaptive(CURVE, costs, batch_size=load, num_speculative_tokens=3) for load in (1, 8)
    )
    assert (one.threshold, one.tokens_per_s) == (0.0, pytest.approx(2.0 / 0.013))
    assert one.rows_per_token == pytest.approx(2.0)
    # All three tokens are drafted in 6 ms. Verified are 2 rows a request, in 12 + 18 / 3 ms.
    assert (eight.threshold, eight.step_s) == (0.5, pytest.approx(0.024))
    assert eight.tokens_per_s == pytest.approx(8 * 1.8 / 0.024)
    assert eight.speedup == pytest.approx(1.8 * 0.012 / 0.024)
    free = replace(costs, draft_s={1: 0.0, 8: 0.0})
    none = predict_adaptive(CURVE[2:], free, batch_size=8, num_speculative_tokens=3)
    assert (none.speedup, none.rows_per_token) == (1.0, 1.0)


def test_adaptive_verification_is_predicted_beside_the_fixed_numbers_and_advised_if_it_pays() -> (
    None
):
    rounds = make_rounds("head", {1: 13.0, 8: 36.0}, (60, 30, 10))
    plain = predict(HEAD, rounds, LOADS)
    assert plain.adaptive == {}
    curve = [
        replace(point, tau=point.tau * 1.3 if point.rows == 2 else point.tau) for point in CURVE
    ]
    found = predict(replace(HEAD, given=[0.6, 0.3, 0.1], curve=curve), rounds, LOADS)
    assert set(found.adaptive) == {1, 8}
    report = describe_draft(found, None, "")
    said = list(describe_adaptive(report))
    wins = [load for load in LOADS if found.adaptive[load].speedup > 1.02 * found.speedups[load]]
    assert 8 in wins
    assert len(said) == len(wins)
    assert all("--pace adaptive" in line and "verified rows per token" in line for line in said)


def test_adaptive_verification_is_measured_by_the_rows_that_vllm_verified() -> None:
    """100 steps with 50 accepted of 120 verified tokens, where 300 were drafted, of 12 ms."""
    rounds = make_rounds("head", {1: 12.0, 8: 12.0}, (40, 8, 2))
    for load in LOADS:
        for number, run in enumerate(rounds["head", load]):
            outputs = [
                replace(one, counts=replace(one.counts, num_draft_tokens=120))
                for one in run.outputs
            ]
            rounds["head", load][number] = replace(run, outputs=outputs)
    candidate = replace(HEAD, config={**HEAD.config, adaptive.KEY: True})
    choice = predict(candidate, rounds, LOADS)
    for load in LOADS:
        found = choice.measured[load]
        assert (found.tau, found.rows_per_token) == pytest.approx((1.5, 2.2 / 1.5))
        assert found.accepted_per_s == pytest.approx(found.tokens_per_s / 3)
        assert [row.num_speculative_tokens for row in choice.by_tokens[load]] == [0, 3]
    assert choice.advice == "3 tokens; vLLM chooses which of them to verify"
    assert choice.speculative_config[adaptive.KEY]
    assert choice.speculative_config["num_speculative_tokens"] == 3


def test_the_drafts_that_pay_are_confirmed_in_the_order_of_their_speed_at_one_request() -> None:
    head = predict(HEAD, make_rounds("head", {1: 16.0, 8: 36.0}, (60, 30, 6)), LOADS)
    ngram = predict(NGRAM, make_rounds("ngram", {1: 11.0, 8: 14.0}, (30, 20, 10, 0)), LOADS)
    slow = predict(LAYERS, make_rounds("layers-2", {1: 40.0, 8: 90.0}, (60, 30, 6)), LOADS)
    assert slow.speedups == {1: 1.0, 8: 1.0}
    assert [choice.candidate.name for choice in choose([slow, head, ngram], 3)] == ["ngram", "head"]
    assert [choice.candidate.name for choice in choose([slow, head, ngram], 1)] == ["ngram"]
    assert choose([slow], 3) == []
