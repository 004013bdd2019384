"""Acceptance in the engine, judged against the published forecast, against training, and by itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from redraft.engine.counts import AcceptanceCounts
from redraft.engine.prompts import Prompt
from redraft.eval.forecast.greedy import Forecast, PromptForecast
from redraft.eval.forecast.stored import StoredForecast, digest_prompt, store_forecast
from redraft.eval.parity.acceptance import (
    find_dead,
    find_lost_acceptance,
    find_missed_forecast,
    find_too_good,
)


def make_counts(*accepted: int) -> AcceptanceCounts:
    return AcceptanceCounts.from_blocks(accepted, 3)


def make_prompts(rng: np.random.Generator, loss: float, num_prompts: int = 16) -> tuple[list, list]:
    """(served, expected) counts of prompts of unequal length and difficulty.

    `loss` of the accepted tokens is lost.
    """
    served, expected = [], []
    for _ in range(num_prompts):
        drafts, rate = int(rng.integers(15, 60)), rng.uniform(0.2, 0.6)
        accepted = rng.binomial(drafts, rate)
        lost = rng.binomial(accepted, loss)
        expected.append(AcceptanceCounts(num_drafts=drafts, num_accepted=int(accepted)))
        served.append(
            AcceptanceCounts(num_drafts=drafts + int(lost), num_accepted=int(accepted - lost))
        )
    return served, expected


def test_serving_that_counts_as_forecast_has_no_finding() -> None:
    _, expected = make_prompts(np.random.default_rng(0), 0.0)
    assert list(find_missed_forecast(expected, expected, is_exact=True)) == []


@pytest.mark.parametrize("loss", [0.1, 0.3])
def test_a_loss_against_the_forecast_is_found_although_prompts_differ_more_than_that(
    loss: float,
) -> None:
    served, expected = make_prompts(np.random.default_rng(1), loss)
    (finding,) = find_missed_forecast(served, expected, is_exact=False)
    tau = sum(expected, AcceptanceCounts.zero()).tau
    assert re.search(rf"tau {tau:.3f}\b.*\b16 prompts", finding.problem)
    assert finding.cure
    (gained,) = find_missed_forecast(expected, served, is_exact=False)
    assert "+" in gained.problem.split("difference")[1], "more than forecast is another draft too"


def test_ties_broken_on_either_side_are_no_finding() -> None:
    """In another dtype some answers part from the forecast's, for better and for worse."""
    rng, missed = np.random.default_rng(2), 0
    for _ in range(200):
        _, expected = make_prompts(rng, 0.0)
        served = [
            AcceptanceCounts(
                num_drafts=e.num_drafts,
                num_accepted=max(e.num_accepted + int(rng.integers(-3, 4)), 0),
            )
            if rng.random() < 0.25
            else e
            for e in expected
        ]
        missed += len(list(find_missed_forecast(served, expected, is_exact=False)))
    assert missed <= 10, "5% of 200"


def test_in_float32_a_fault_shows_by_the_prompts_that_count_otherwise() -> None:
    _, expected = make_prompts(np.random.default_rng(3), 0.0)
    one_tie = [make_counts(*[1] * 20), *expected[1:]]
    assert not list(find_missed_forecast(one_tie, expected, is_exact=True))
    assert not list(find_missed_forecast(one_tie[:2], expected[:2], is_exact=True))
    up_and_down = [
        AcceptanceCounts(
            num_drafts=e.num_drafts, num_accepted=e.num_accepted + (1 if i % 2 else -1)
        )
        for i, e in enumerate(expected)
    ]
    (finding,) = find_missed_forecast(up_and_down, expected, is_exact=True)
    assert "16 prompts" in finding.problem
    assert not list(find_missed_forecast(up_and_down, expected, is_exact=False)), (
        "in bfloat16 these may be ties"
    )


def test_the_stored_forecast_is_read_back_and_knows_its_prompts() -> None:
    prompts = [Prompt(token_ids=[1, 2, 3]), Prompt(token_ids=[4])]
    forecast = Forecast(
        per_prompt=[
            PromptForecast(
                domain="all",
                num_output_tokens=9,
                alpha_sum=1,
                alpha_greedy_sum=1,
                num_rows=8,
                counts=make_counts(*c),
            )
            for c in ([1, 0, 2], [3, 3])
        ]
    )
    stored = store_forecast(
        forecast, prompts, num_speculative_tokens=3, max_tokens=64, end_ids=[2], dtype="bfloat16"
    )
    again = StoredForecast.from_json(json.loads(json.dumps(stored.to_json())))
    assert again == stored
    assert again.tau == forecast.overall.tau == 1 + 9 / 5
    assert again.expected([[4], [9, 9]]) == [AcceptanceCounts(num_drafts=2, num_accepted=6), None]
    assert "1, 2, 3" not in json.dumps(stored.to_json()), "the users' text stays at home"
    assert StoredForecast.from_json(None) is None
    older = {key: value for key, value in stored.to_json().items() if key != "dtype"}
    assert StoredForecast.from_json(older) == replace(stored, dtype=None)
    assert digest_prompt([1, 2]) != digest_prompt([12]) != digest_prompt([])


def test_acceptance_far_below_what_training_measured_is_a_finding() -> None:
    low = make_counts(*[0, 0, 0, 1] * 100)
    (finding,) = find_lost_acceptance(low, trained_tau=2.2)
    assert re.search(r"tau 2\.20\b.*\b1\.25 \(400 drafts\).*\b21%", finding.problem)
    assert not list(find_lost_acceptance(low, trained_tau=1.3))
    assert not list(find_lost_acceptance(make_counts(*[1, 2, 0, 3] * 100), trained_tau=2.2))


def test_a_finding_needs_enough_drafts() -> None:
    # a mean of 1 accepted token with standard deviation 1: 3 standard errors are 1.5 at 4 drafts,
    # 0.15 at 400
    assert not list(find_lost_acceptance(make_counts(0, 0, 2, 2), trained_tau=3.0))
    assert list(find_lost_acceptance(make_counts(*[0, 0, 2, 2] * 100), trained_tau=3.0))
    # At an acceptance of 0.4, none of 8 drafts has an accepted token in 2% of the cases.
    assert not list(find_lost_acceptance(make_counts(*[0] * 8), trained_tau=1.6))
    assert list(find_lost_acceptance(make_counts(*[0] * 100), trained_tau=1.6))


def test_a_draft_that_accepts_nothing_or_everything_is_found_without_a_reference() -> None:
    (dead,) = find_dead(make_counts(*[0] * 95, *[1] * 5))
    assert re.search(r"tau is 1\.05 over 100 drafts", dead.problem)
    (copied,) = find_too_good(make_counts(*[3] * 99, 1))
    assert re.search(r"99\.3%.*\bcopy\b", copied.problem)
    sound = make_counts(*[0, 1] * 100)
    assert [*find_dead(sound), *find_too_good(sound)] == []
    assert not list(find_dead(make_counts(*[0] * 50))), "too few drafts to say so"
    assert not list(find_too_good(make_counts(*[3] * 20)))
