from __future__ import annotations

import math
import re

import numpy as np
import pytest
from scipy import stats

from redraft.engine.counts import AcceptanceCounts
from redraft.online.learning.evidence import OTHER
from redraft.online.learning.gate import Decision, Policy, find_loss, judge, spent_confidence

LENIENT = Policy(min_requests=10, min_domain_requests=10)

Scored = list[AcceptanceCounts]


def make_counts(drafts: float, accepted: float) -> AcceptanceCounts:
    return AcceptanceCounts(num_drafts=drafts, num_accepted=accepted)


def make_scored(accepted_per_draft: list[float], drafts: float = 40) -> Scored:
    return [make_counts(drafts, drafts * rate) for rate in accepted_per_draft]


def make_requests(rng: np.random.Generator, num: int, gain: float) -> tuple[Scored, Scored]:
    """Candidate and incumbent on the same requests, of very unequal length and difficulty.

    `gain` is the true gain.
    """
    drafts = np.maximum(1, rng.lognormal(3, 0.8, num).round())
    difficulty = 3 * rng.beta(6, 4, num)

    def scored(shift: float) -> Scored:
        accepted = drafts * (difficulty + shift + rng.normal(0, 0.3, num)) + rng.normal(
            0, 1.2, num
        ) * np.sqrt(drafts)
        return [make_counts(d, a) for d, a in zip(drafts, np.maximum(accepted, 0), strict=True)]

    return scored(gain), scored(0)


def promotion_rate(policy: Policy, gain: float, num_requests: int, trials: int) -> float:
    rng = np.random.default_rng(7)
    promoted = 0
    for _ in range(trials):
        candidate, incumbent = make_requests(rng, num_requests, gain)
        promoted += (
            judge(candidate, incumbent, ["chat"] * num_requests, policy).decision
            is Decision.PROMOTE
        )
    return promoted / trials


def test_tau_counts_the_bonus_token_and_weighs_requests_by_their_drafts() -> None:
    candidate = [
        make_counts(10, 20),
        make_counts(90, 90),
    ] * 10
    incumbent = [
        make_counts(10, 10),
        make_counts(90, 45),
    ] * 10
    overall = judge(candidate, incumbent, ["chat"] * 20, LENIENT).overall
    assert overall is not None
    assert overall.tau_candidate == pytest.approx(1 + 110 / 100)
    assert overall.tau_incumbent == pytest.approx(1 + 55 / 100)


def test_bounds_agree_with_scipys_paired_bootstrap_on_many_requests() -> None:
    candidate, incumbent = make_requests(np.random.default_rng(3), 600, 0.1)
    overall = judge(candidate, incumbent, ["chat"] * 600, Policy()).overall
    assert overall is not None

    def gain(ca, cd, ia, id_, axis):
        return ca.sum(axis) / cd.sum(axis) - ia.sum(axis) / id_.sum(axis)

    columns = [[s.num_accepted for s in candidate], [s.num_drafts for s in candidate]]
    columns += [[s.num_accepted for s in incumbent], [s.num_drafts for s in incumbent]]
    expected = stats.bootstrap(
        columns, gain, paired=True, vectorized=True, method="percentile", confidence_level=1 - 2 * 0.05 / 3,
        n_resamples=20_000, batch=1000, random_state=1,
    ).confidence_interval  # fmt: skip
    assert overall.lower == pytest.approx(expected.low, abs=0.003)


def test_an_equal_candidate_is_promoted_no_more_often_than_the_confidence_allows() -> None:
    trials = 300
    rate = promotion_rate(Policy(), gain=0.0, num_requests=60, trials=trials)
    assert stats.binomtest(round(rate * trials), trials, 0.05, alternative="greater").pvalue > 0.001


def test_a_gain_right_at_the_bar_passes_at_the_first_look_about_one_time_in_sixty() -> None:
    trials = 300
    policy = Policy(min_gain=0.05, max_domain_loss=9)
    rate = promotion_rate(policy, gain=0.05, num_requests=100, trials=trials)
    assert stats.binomtest(round(rate * trials), trials, 0.02, alternative="greater").pvalue > 0.001


def test_the_errors_of_all_looks_sum_to_the_policys() -> None:
    assert spent_confidence(0.95, 1) == pytest.approx(1 - 0.05 / 3)
    assert spent_confidence(0.95, 2) == pytest.approx(1 - 0.05 / 6)
    assert sum(1 - spent_confidence(0.95, look) for look in range(1, 10_000)) == pytest.approx(
        0.05, abs=2e-5
    )


def test_a_later_look_needs_more_evidence_to_promote_and_no_more_to_reject() -> None:
    candidate, incumbent = make_requests(np.random.default_rng(0), 80, 0.25)
    gains = [
        judge(candidate, incumbent, ["chat"] * 80, Policy(), look).overall for look in (1, 2, 10)
    ]
    first, second, tenth = (gain for gain in gains if gain is not None)
    assert first.lower > second.lower > tenth.lower
    assert first.upper == second.upper == tenth.upper
    with pytest.raises(ValueError, match=r"\b1\b.*\b0$"):
        judge(candidate, incumbent, ["chat"] * 80, Policy(), 0)


def test_a_real_gain_is_found() -> None:
    assert promotion_rate(Policy(), gain=0.3, num_requests=100, trials=60) > 0.9


def test_a_worse_candidate_is_rejected_with_its_numbers() -> None:
    candidate, incumbent = make_requests(np.random.default_rng(0), 80, -0.5)
    verdict = judge(candidate, incumbent, ["chat"] * 80, Policy())
    assert verdict.decision is Decision.REJECT
    assert verdict.overall is not None
    assert (
        f"tau {verdict.overall.tau_incumbent:.3f} -> {verdict.overall.tau_candidate:.3f}"
        in verdict.reason
    )
    assert "over 80 requests" in verdict.reason


def test_a_small_noisy_gain_is_inconclusive_not_a_pass() -> None:
    incumbent = make_scored([1.0] * 30)
    candidate = make_scored([0.5, 1.6] * 15)  # mean gain 0.05, spread 0.55
    verdict = judge(candidate, incumbent, ["chat"] * 30, LENIENT)
    assert verdict.decision is Decision.INCONCLUSIVE
    assert "not proven" in verdict.reason


def test_few_requests_are_inconclusive_however_large_the_gain() -> None:
    verdict = judge(make_scored([3.0] * 23), make_scored([0.0] * 23), ["chat"] * 23, Policy())
    assert verdict.decision is Decision.INCONCLUSIVE
    assert re.search(r"\b23\b.*\b24\b", verdict.reason)
    assert judge([], [], [], Policy()).decision is Decision.INCONCLUSIVE


def test_requests_without_drafts_are_no_evidence() -> None:
    idle = [make_counts(0, 0)] * 40
    verdict = judge(
        [*make_scored([2.0] * 12), *idle], [*make_scored([1.0] * 12), *idle], ["chat"] * 52, LENIENT
    )
    assert verdict.overall is not None
    assert verdict.overall.num_requests == 12


def test_a_gain_on_average_does_not_excuse_a_domain_that_loses() -> None:
    domains = ["code"] * 90 + ["prose"] * 30
    candidate = make_scored([2.0] * 90 + [0.5] * 30)
    verdict = judge(candidate, make_scored([1.0] * 120), domains, LENIENT)
    assert verdict.decision is Decision.REJECT
    assert re.search(r"\bprose loses\b.*\b0\.1\b", verdict.reason)
    assert verdict.overall is not None
    assert verdict.overall.lower > 0.02


def test_a_domain_that_may_lose_is_inconclusive() -> None:
    domains = ["code"] * 90 + ["prose"] * 30
    candidate = make_scored([2.0] * 90 + [0.4, 1.6] * 15)
    verdict = judge(candidate, make_scored([1.0] * 120), domains, LENIENT)
    assert verdict.decision is Decision.INCONCLUSIVE
    assert "prose may lose" in verdict.reason


def test_a_domain_without_new_requests_does_not_block_for_good() -> None:
    # Forty requests of a domain whose traffic has ended: true change 0, spread 0.25, so +-0.067 at
    # 95% at every look.
    domains = ["prose"] * 90 + ["code"] * 40
    candidate = make_scored([1.3] * 90 + [0.75, 1.25] * 20)
    verdicts = [
        judge(candidate, make_scored([1.0] * 130), domains, LENIENT, look) for look in (1, 15)
    ]
    assert [verdict.decision for verdict in verdicts] == [Decision.PROMOTE, Decision.PROMOTE]
    first, late = (verdict.domains["code"] for verdict in verdicts)
    assert (
        first.lower
        == late.lower
        == pytest.approx(
            -stats.t.ppf(0.95, 39) * 0.25 * math.sqrt(40 / 39) / math.sqrt(40), rel=0.02
        )
    )


def test_a_rare_domain_does_not_block_but_is_named() -> None:
    candidate = make_scored([2.0] * 90 + [0.0] * 5)
    verdict = judge(candidate, make_scored([1.0] * 95), ["code"] * 90 + ["legal"] * 5, LENIENT)
    assert verdict.decision is Decision.PROMOTE
    assert "legal (5)" in verdict.reason
    assert set(verdict.domains) == {"code"}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_a_candidate_that_computes_nonsense_is_rejected(bad: float) -> None:
    verdict = judge(
        [*make_scored([2.0] * 59), make_counts(1, bad)],
        make_scored([1.0] * 60),
        ["a"] * 60,
        LENIENT,
    )
    assert verdict.decision is Decision.REJECT


def test_an_incumbent_that_computes_nonsense_is_an_error() -> None:
    with pytest.raises(ValueError, match="incumbent"):
        judge(make_scored([1.0]), make_scored([math.nan]), ["a"], LENIENT)


def test_sequences_must_pair_up() -> None:
    with pytest.raises(ValueError, match="same length"):
        judge(make_scored([1.0] * 2), make_scored([1.0]), ["a"], LENIENT)


def test_the_same_numbers_give_the_same_verdict() -> None:
    candidate, incumbent = make_requests(np.random.default_rng(5), 60, 0.05)
    assert judge(candidate, incumbent, ["a"] * 60, Policy()) == judge(
        candidate, incumbent, ["a"] * 60, Policy()
    )


# --- a promoted version against the one before


def test_a_version_that_lost_acceptance_is_found_and_an_equal_one_is_not() -> None:
    rng = np.random.default_rng(3)
    for gain, is_worse in ((-0.6, True), (0.0, False), (0.6, False)):
        current, previous = make_requests(rng, 200, gain)
        assert find_loss(current, previous, Policy())[0] is is_worse


def test_equal_versions_are_hardly_ever_found_worse_however_often_one_looks() -> None:
    """Bounded by 5% over all looks of a campaign."""
    rng = np.random.default_rng(4)
    campaigns = [
        any(find_loss(*make_requests(rng, 60, 0.0), Policy(), look)[0] for look in range(1, 11))
        for _ in range(200)
    ]
    assert np.mean(campaigns) <= 0.08  # 0.05 and two standard errors


def test_too_few_requests_find_nothing_and_numbers_that_are_not_finite_do() -> None:
    bad, good = make_scored([0.0] * 23), make_scored([1.0] * 23)
    is_worse, reason = find_loss(bad, good, Policy())
    assert not is_worse
    assert re.search(r"\b23\b.*\b24\b", reason)
    assert find_loss([], [], Policy())[0] is False
    assert find_loss([make_counts(math.nan, 1)], [make_counts(1, 1)], Policy())[0]
    with pytest.raises(ValueError, match=r"look must be at least 1\b"):
        find_loss(bad, good, Policy(), look=0)


def test_domains_that_nobody_vouches_for_block_no_candidate() -> None:
    candidate = make_scored([1.0] * 100 + [0.1] * 40)
    incumbent = make_scored([0.5] * 100 + [0.5] * 40)
    domains = ["code"] * 100 + ["invented"] * 40
    assert judge(candidate, incumbent, domains, Policy()).decision is Decision.REJECT
    verdict = judge(
        candidate, incumbent, [name.replace("invented", OTHER) for name in domains], Policy()
    )
    assert verdict.decision is Decision.PROMOTE
    assert set(verdict.domains) == {"code"}
    assert verdict.reason.endswith(": other (40)")


def test_a_proven_loss_at_long_contexts_rejects_a_candidate_that_gains() -> None:
    candidate, incumbent = make_scored([1.0] * 90), make_scored([0.5] * 90)
    domains = ["chat"] * 90
    worse, better = make_scored([0.2] * 30), make_scored([0.6] * 30)
    contexts = {8192: (worse, better), 1024: (candidate, incumbent)}
    verdict = judge(candidate, incumbent, domains, LENIENT, contexts=contexts)
    assert verdict.decision is Decision.REJECT
    assert "in contexts of 8,192 to 16,383 tokens, it loses more than 0.1" in verdict.reason
    assert list(verdict.contexts) == ["1,024 to 2,047 tokens", "8,192 to 16,383 tokens"]
    assert verdict.contexts["8,192 to 16,383 tokens"].value == pytest.approx(-0.4)
    assert verdict.domains.keys() == {"chat"}


@pytest.mark.parametrize("long", [[0.2] * 9, [0.2, 1.4] * 8], ids=["few", "not proven"])
def test_a_loss_at_long_contexts_that_is_not_proven_holds_no_candidate_up(
    long: list[float],
) -> None:
    candidate, incumbent = make_scored([1.0] * 90), make_scored([0.5] * 90)
    contexts = {
        1024: (candidate, incumbent),
        8192: (make_scored(long), make_scored([0.85] * len(long))),
    }
    verdict = judge(candidate, incumbent, ["chat"] * 90, LENIENT, contexts=contexts)
    assert verdict.decision is Decision.PROMOTE
    assert ("8,192 to 16,383 tokens" in verdict.contexts) == (len(long) > 10)


def test_one_range_of_contexts_is_no_group_of_its_own() -> None:
    candidate, incumbent = make_scored([1.0] * 90), make_scored([0.5] * 90)
    contexts = {1024: (candidate, incumbent)}
    verdict = judge(candidate, incumbent, ["chat"] * 90, LENIENT, contexts=contexts)
    assert verdict.decision is Decision.PROMOTE
    assert verdict.contexts == {}
