"""Simulate the decisions that rest on noisy counts.

They count how often a decision is wrong, since the truth is known.

    $ python -m benchmarks.decisions

    canary      an equal draft and one 0.2 worse, with short and long requests, and with two domains spread evenly,
                40:60 or 20:80: how often is it rolled back or passed?
    adaptive    canary and alarm under adaptive verification, at equal and unequal load (`benchmarks/adaptive.py`): how
                often does the load alone return an equal draft or raise the alarm? How often is a worse draft found?
    gate        ten candidates in a row with a true gain of exactly `min_gain`: how often is one promoted?
    baseline    `redraft eval --baseline` on two equal drafts: how often does it fail?
    sleep       a learner that sleeps: how often does it wake although nothing changed, and how soon after a drift?
    intervals   how often does a 95% interval over 16, 32 or 64 prompts contain the truth?
    doctor      how many faults planted into an intact head does `redraft doctor` name? (`benchmarks/planted.py`)
    served      by how much do forecasts miss a real vLLM that filters as the target's generation_config.json says?

Requests differ as on the demo's target: the standard deviation of tau is 0.46 between requests with
28 drafts each, and 0.41 between arbitrarily long requests. Seeds are fixed, so the same code prints
the same numbers. After a kill, run the same command again: it keeps the finished parts.

T = trials, N = prompts or requests, P = polls.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.adaptive import simulate_adaptive
from benchmarks.planted import measure_doctor
from benchmarks.results import write_results
from benchmarks.served import ServedCase, measure_served
from redraft.engine.counts import AcceptanceCounts
from redraft.eval.intervals import estimate_gain, estimate_ratio
from redraft.eval.report.regression import Counted, Draft, PromptId, Report, Target, compare_reports
from redraft.files.kept import compute_once
from redraft.online.fleet.rollout import (
    MIN_POLLS,
    Finding,
    RolloutPolicy,
    decide,
    estimate_loss_by_domain,
)
from redraft.online.learning.config import BufferConfig, Judging, Training
from redraft.online.learning.gate import Decision, Policy, judge
from redraft.online.learning.staleness import Row, SleepPolicy, compare
from redraft.recipes.cli.run import run_recipe

Array = NDArray[np.float64]

BETWEEN_REQUESTS = 0.41
"""Standard deviation of tau between long requests."""

WITHIN_REQUEST = 1.1
"""Standard deviation of accepted tokens between the drafts of a request; over 28 drafts, both
spreads together give 0.46.
"""

TAU = 2.0

DOMAIN_GAP = 0.22
"""Difference of tau between two domains. On the demo's target, code has 2.16 and prose 1.94."""

MIXES = {
    "like_traffic": (0.5, 0.5),
    "unlike_traffic": (0.4, 0.6),
    "very_unlike_traffic": (0.2, 0.8),
}
"""Share of the easier domain in the worse-off and in the better-off group: evenly spread, 40:60, or
20:80.
"""

DRAFTS_PER_POLL = 125
"""Number of drafts that one running request gets per poll interval of 5 s."""

NUM_TOKENS = 3
"""Maximum number of draft tokens. With this number, tau varies by about 1.1 between the drafts of a
request.
"""

LOSS_OF_ONE = 0.5
"""Loss of tau, at one draft token, of a draft that is 0.2 worse."""

NUM_LOOKS = 10


@dataclass(frozen=True, kw_only=True)
class Config:
    output: Path = Path("outputs/bench-decisions")
    """Folder for report.json."""
    trials: int = 400
    """Number of simulations per case. With 400, an estimated rate of 2% is accurate to within 1.4
    percentage points.
    """
    seed: int = 0
    """Random seed for all simulations."""
    engine: bool = True
    """Also compare the forecasts with a real vLLM, which takes a few minutes more."""


def main(cfg: Config) -> None:
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "canary": lambda: simulate_canary(cfg.trials, cfg.seed),
        "paces": lambda: simulate_paces(cfg.trials, cfg.seed),
        "adaptive": lambda: simulate_adaptive(max(1, cfg.trials // 4), cfg.seed),
        "gate": lambda: simulate_gate(cfg.trials, cfg.seed),
        "baseline": lambda: simulate_baseline(cfg.trials, cfg.seed),
        "sleep": lambda: simulate_sleep(cfg.trials, cfg.seed),
        "intervals": lambda: simulate_intervals(cfg.trials, cfg.seed),
        "doctor": measure_doctor,
    }
    if cfg.engine:
        parts["served"] = lambda: measure_served(ServedCase(seed=cfg.seed), cfg.output / "served")
    kept, report = cfg.output / "kept", {}
    kept.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        began_s = time.monotonic()
        report[name] = compute_once(kept, name, [cfg.trials, cfg.seed], dict[str, Any], part)
        print(f"{name} ({time.monotonic() - began_s:.0f} s): {json.dumps(report[name])}")
    write_results(cfg.output / "report.json", report)
    shutil.rmtree(kept)


# --- canary


@dataclass(frozen=True)
class Pace:
    """How the number of draft tokens changes from poll to poll.

    A server drafts NUM_TOKENS tokens, or one token while it is busy.
    """

    busy: float = 0.0
    """Share of the polls with one draft token."""
    dwell: float = 20
    """Mean number of polls before the number of draft tokens is drawn again."""

    def draw(self, rng: np.random.Generator, trials: int, polls: int) -> Array:
        """Return the number of draft tokens by trial and poll, [T, P]."""
        is_busy_TP = np.empty((trials, polls), bool)
        # After each poll, the number is drawn again with probability 1 / dwell.
        is_drawn_TP = rng.random((trials, polls)) < 1 / self.dwell
        drawn_TP = rng.random((trials, polls)) < self.busy
        is_busy_TP[:, 0] = drawn_TP[:, 0]
        for poll in range(1, polls):
            is_busy_TP[:, poll] = np.where(
                is_drawn_TP[:, poll], drawn_TP[:, poll], is_busy_TP[:, poll - 1]
            )
        return np.where(is_busy_TP, 1, NUM_TOKENS)


PACES = {
    "moved": (Pace(1), Pace(0)),
    "shifted": (Pace(0.8), Pace(0.2)),
    "alike": (Pace(0.5), Pace(0.5)),
}
"""Paces of the two groups. The group with fewer draft tokens comes first."""


def simulate_canary(trials: int, seed: int = 0, polls: int = 180) -> dict[str, Any]:
    """Return the canary's findings by traffic, drafts per request and running requests per server.

    The largest rates come first. Unequal traffic is misleading by design: an equally good draft
    gets more requests from the harder domain, and a worse draft more from the easier one. The
    canary times out after `polls` polls. The default policy applies.
    """
    cases: list[dict[str, Any]] = []
    sizes = itertools.product(MIXES.items(), (28, 100, 200, 400), (1, 8))
    for (traffic, (less, more)), drafts_per_request, running in sizes:
        size = (drafts_per_request, running, polls)
        equal = _count_findings(trials, seed, 0.0, (less, more), *size)
        worse = _count_findings(trials, seed, 0.2, (more, less), *size)
        about = {
            "traffic": traffic,
            "drafts_per_request": drafts_per_request,
            "running_requests": running,
        }
        cases.append(about | _list_rates(equal, worse))
    worst = {
        traffic: {
            name: max(case[name] for case in cases if case["traffic"] == traffic)
            for name in ("equal_rolled_back", "worse_passed")
        }
        for traffic in MIXES
    }
    highest = {
        name: max(rates[name] for rates in worst.values())
        for name in ("equal_rolled_back", "worse_passed")
    }
    return {**highest, **worst, "cases": cases}


def _list_rates(equal: Mapping[Finding, float], worse: Mapping[Finding, float]) -> dict[str, float]:
    """Return the findings about an equal draft and a worse one, as the report lists them."""
    return {
        "equal_rolled_back": equal[Finding.WORSE],
        "equal_inconclusive": equal[Finding.INCONCLUSIVE],
        "worse_passed": worse[Finding.PASSED],
        "worse_inconclusive": worse[Finding.INCONCLUSIVE],
    }


def simulate_paces(trials: int, seed: int = 0, polls: int = 180) -> dict[str, Any]:
    """Return the canary's findings while servers change their number of draft tokens.

    There are two cases: a canary in a fleet, and a single server that is compared with its own
    counts from before the change. The pace always makes the wrong decision more likely.
    """
    cases: list[dict[str, Any]] = []
    sizes = itertools.product(PACES.items(), (True, False), (28, 400), (1, 8))
    for (pace, (busier, idler)), is_paired, drafts_per_request, running in sizes:
        shares, size = (0.5, 0.5), (drafts_per_request, running, polls)
        equal = _count_findings(
            trials, seed, 0.0, shares, *size, paces=(busier, idler), is_paired=is_paired
        )
        worse = _count_findings(
            trials, seed, LOSS_OF_ONE, shares, *size, paces=(idler, busier), is_paired=is_paired
        )
        about = {"pace": pace, "is_alone": not is_paired}
        about |= {"drafts_per_request": drafts_per_request, "running_requests": running}
        cases.append(about | _list_rates(equal, worse))
    highest = {
        name: max(case[name] for case in cases) for name in ("equal_rolled_back", "worse_passed")
    }
    return {**highest, "cases": cases}


def _count_findings(
    trials: int,
    seed: int,
    loss: float,
    easy_shares: tuple[float, float],
    drafts_per_request: int,
    running: int,
    polls: int,
    *,
    paces: tuple[Pace, Pace] = (Pace(), Pace()),
    is_paired: bool = True,
) -> dict[Finding, float]:
    """Return the share of each finding, for a canary whose true tau is `loss` below the control's.

    Both get the same amount of traffic.

    `easy_shares` are the shares of the easier domain on the canary and on the control group, and
    `paces` are their paces.
    """
    rng, policy = np.random.default_rng(seed), RolloutPolicy()
    canary_TDPK2, control_TDPK2 = (
        _simulate_polls(rng, trials, polls, tau, share, drafts_per_request, running, pace)
        for tau, share, pace in zip((TAU - loss, TAU), easy_shares, paces, strict=True)
    )
    # Number of polls until a group has `min_drafts`, rounded up. The canary is not compared before.
    enough = -(-policy.min_drafts // (DRAFTS_PER_POLL * running))
    findings = []
    for canary_DPK2, control_DPK2 in zip(canary_TDPK2, control_TDPK2, strict=True):
        look, finding = max(MIN_POLLS, enough), Finding.INCONCLUSIVE
        while (
            finding is Finding.INCONCLUSIVE and look < 2 * polls
        ):  # the last look is when time is up
            # As in `rollout._compare`, the next look comes when the number of polls has doubled.
            seen = slice(min(look, polls))
            canary, control = (
                {"easy": easy_PK2[seen], "hard": hard_PK2[seen]}
                for easy_PK2, hard_PK2 in (canary_DPK2, control_DPK2)
            )
            finding = decide(estimate_loss_by_domain(canary, control, is_paired=is_paired), policy)
            look *= 2
        findings.append(finding)
    return {finding: findings.count(finding) / trials for finding in Finding}


def _simulate_polls(
    rng: np.random.Generator,
    trials: int,
    polls: int,
    tau: float,
    easy_share: float,
    drafts_per_request: int,
    running: int,
    pace: Pace = Pace(),
) -> Array:
    """Return (tried, accepted) of a server at every poll, [T, 2, P, K, 2].

    They are counted by domain, the easier one first, and by position.

    The server always runs `running` requests. `tau` applies to NUM_TOKENS draft tokens, which are
    all equally likely to be accepted.
    """
    border_P = np.arange(polls + 1) * float(DRAFTS_PER_POLL)
    # This is more than the average number of requests that fit in, so that even a run of short ones
    # lasts until the last poll.
    num_requests = int(1.6 * border_P[-1] / drafts_per_request) + 12
    powers_K = np.arange(NUM_TOKENS + 1)
    # Drafts so far and, by position, the expected number of acceptances.
    expected_TDPK = np.zeros((trials, 2, polls, NUM_TOKENS + 1))
    for _ in range(running):
        # Mean of a log-normal distribution: exp(mu + 0.6**2 / 2).
        drafts_TN = rng.lognormal(np.log(drafts_per_request) - 0.18, 0.6, (trials, num_requests))
        drafts_TN[:, 0] *= rng.random(
            trials
        )  # the first request was running when the window opened
        is_easy_TN = rng.random((trials, num_requests)) < easy_share
        tau_TN = (
            tau
            + DOMAIN_GAP * (is_easy_TN - 0.5)
            + BETWEEN_REQUESTS * rng.standard_normal((trials, num_requests))
        )
        reached_TNK = _find_chance(tau_TN)[..., None] ** powers_K
        # Both running totals begin with 0.
        end_TN = np.pad(drafts_TN.cumsum(1), ((0, 0), (1, 0)))
        for domain, is_of_domain_TN in enumerate((is_easy_TN, ~is_easy_TN)):
            total_TNK = ((drafts_TN * is_of_domain_TN)[..., None] * reached_TNK).cumsum(1)
            total_TNK = np.pad(total_TNK, ((0, 0), (1, 0), (0, 0)))
            for trial, position in itertools.product(range(trials), powers_K):
                # A request's drafts are spread evenly over time. So the running total at a boundary
                # between polls is interpolated between the ends of two requests, and a poll's count
                # is the difference of two totals.
                at_border = np.interp(border_P, end_TN[trial], total_TNK[trial, :, position])
                expected_TDPK[trial, domain, :, position] += np.diff(at_border)
    counts_TDPK2 = np.zeros((trials, 2, polls, NUM_TOKENS, 2))
    accepted_TDP = expected_TDPK[..., 0]
    tokens_TDP = np.broadcast_to(pace.draw(rng, trials, polls)[:, None], accepted_TDP.shape)
    for position in range(NUM_TOKENS):
        tried_TDP = accepted_TDP * (tokens_TDP > position)
        before_TDP, after_TDP = expected_TDPK[..., position], expected_TDPK[..., position + 1]
        rate_TDP = np.divide(
            after_TDP, before_TDP, out=np.zeros_like(after_TDP), where=before_TDP > 0
        )
        rate_TDP = np.clip(rate_TDP, 0, 1)  # differences of totals are inexact
        # Normal approximation of a binomial count.
        spread_TDP = np.sqrt(tried_TDP * rate_TDP * (1 - rate_TDP))
        accepted_TDP = tried_TDP * rate_TDP + spread_TDP * rng.standard_normal(tried_TDP.shape)
        accepted_TDP = np.clip(accepted_TDP, 0, tried_TDP)
        counts_TDPK2[:, :, :, position] = np.stack([tried_TDP, accepted_TDP], -1)
    return counts_TDPK2


def _find_chance(tau_TN: Array) -> Array:
    """Return the acceptance probability per token that gives this tau at NUM_TOKENS tokens."""
    chances = np.linspace(0, 1, 1001)
    return np.interp(tau_TN, 1 + sum(chances**power for power in range(1, NUM_TOKENS + 1)), chances)


# --- gate


def simulate_gate(trials: int, seed: int = 0) -> dict[str, Any]:
    """Return the share of ten-look campaigns that promote a candidate, by true gain.

    A campaign ends when a candidate is promoted.
    """
    policy = Policy()
    gains = {
        "at_bar_promoted": policy.min_gain,
        "equal_promoted": 0.0,
        "gain_0.1_promoted": 0.1,
        "gain_0.2_promoted": 0.2,
        "gain_0.4_promoted": 0.4,
    }
    report: dict[str, Any] = {}
    for num_requests in (policy.min_requests, 50, 100):
        rates = {}
        for name, gain in gains.items():
            # This rate is near its limit, so it takes more trials to show on which side it lies.
            count = 10 * trials if name == "at_bar_promoted" else trials
            promoted, at_first_look = simulate_campaigns(count, seed, policy, gain, num_requests)
            rates[name] = promoted
            rates[name.replace("promoted", "at_first_look")] = at_first_look
        report[f"{num_requests}_requests"] = rates
    worst = max(rates["at_bar_promoted"] for rates in report.values())
    return {
        "at_bar_promoted": worst,
        "num_looks": NUM_LOOKS,
        "first_verdict_requests": simulate_first_verdict(trials, seed, policy),
        **report,
        "domain": _simulate_domain_guard(trials, seed, policy),
    }


def _simulate_domain_guard(trials: int, seed: int, policy: Policy) -> dict[str, dict[str, float]]:
    """Return the share of campaigns that promote a candidate with a gain of 0.3 in one domain.

    In a domain without new traffic, the candidate keeps its tau, loses `max_domain_loss`, or loses
    twice as much.
    """
    changes = {
        "equal": 0.0,
        "at_bar": -policy.max_domain_loss,
        "twice": -2 * policy.max_domain_loss,
    }
    report: dict[str, dict[str, float]] = {}
    for num_requests in (policy.min_domain_requests, 40, 100):
        rates: dict[str, float] = {}
        for name, change in changes.items():
            rates[f"{name}_promoted"], rates[f"{name}_at_first_look"] = simulate_campaigns(
                trials, seed, policy, 0.3, 60, (change, num_requests)
            )
        report[f"{num_requests}_requests"] = rates
    return report


def simulate_campaigns(
    trials: int,
    seed: int,
    policy: Policy,
    gain: float,
    num_requests: int,
    abandoned: tuple[float, int] = (0.0, 0),
) -> tuple[float, float]:
    """Return the shares of campaigns that promote a candidate: at any look, and at the first."""
    rng = np.random.default_rng(seed)
    looks = [_run_campaign(rng, gain, num_requests, policy, abandoned) for _ in range(trials)]
    return sum(look > 0 for look in looks) / trials, looks.count(1) / trials


def simulate_first_verdict(trials: int, seed: int, policy: Policy) -> dict[str, float]:
    """Count the distinct requests until a candidate can be judged, with the learner's defaults.

    Returns the median and the 99th percentile. A verdict needs `records_per_candidate` requests for
    training and `min_requests` held-out ones.
    """
    rng = np.random.default_rng(seed)
    is_held_out_TN = rng.random((max(trials, 1000), 1000)) < BufferConfig().held_out_fraction
    held_out_TN = is_held_out_TN.cumsum(1)
    # Counts after n requests. Each request is either held out or trained on.
    trained_TN = np.arange(1, 1001) - held_out_TN
    enough_TN = (held_out_TN >= policy.min_requests) & (
        trained_TN >= Training().records_per_candidate
    )
    # argmax of booleans is the first True.
    needed_T = 1 + enough_TN.argmax(1)
    return {"median": float(np.median(needed_T)), "p99": float(np.quantile(needed_T, 0.99))}


def _run_campaign(
    rng: np.random.Generator,
    gain: float,
    num_requests: int,
    policy: Policy,
    abandoned: tuple[float, int] = (0.0, 0),
) -> int:
    """Return the look, counted from 1, that promotes a candidate, or 0 if none does.

    From one look to the next, new requests replace a quarter of the held-out ones. Each candidate
    is good at different requests, which explains half of the spread. `abandoned` is (gain, number
    of requests) for a domain that gets no new requests.
    """
    requests = _make_requests(rng, num_requests)
    abandoned_gain, num_abandoned = abandoned
    kept = _make_requests(rng, num_abandoned)
    domains = ["all"] * num_requests + ["abandoned"] * num_abandoned
    for look in range(1, NUM_LOOKS + 1):
        candidate, incumbent = _score_candidate(rng, requests, gain)
        for ours, more in zip(
            (candidate, incumbent), _score_candidate(rng, kept, abandoned_gain), strict=True
        ):
            ours += more
        if judge(candidate, incumbent, domains, policy, look).decision is Decision.PROMOTE:
            return look
        # The oldest quarter is removed. The other requests are judged again, so the looks of a
        # campaign are not independent.
        fresh = _make_requests(rng, num_requests // 4)
        requests = tuple(
            np.concatenate([old[len(new) :], new]) for old, new in zip(requests, fresh, strict=True)
        )  # type: ignore[assignment]
    return 0


def _score_candidate(
    rng: np.random.Generator, requests: tuple[Array, Array, Array], gain: float
) -> tuple[list[AcceptanceCounts], list[AcceptanceCounts]]:
    """Return the new candidate's and the incumbent's counts on the requests."""
    drafts_N, incumbent_N, common_N = requests
    rate_N = incumbent_N + gain + common_N + 0.1 * rng.standard_normal(len(drafts_N))
    return _to_counts(drafts_N, rate_N), _to_counts(drafts_N, incumbent_N)


def _make_requests(rng: np.random.Generator, count: int) -> tuple[Array, Array, Array]:
    """Return drafts, the incumbent's accepted tokens per draft, and the candidates' excess.

    The excess is the number of additional tokens that every candidate has accepted in this request.
    """
    drafts_N = np.maximum(rng.lognormal(np.log(24), 0.6, count).round(), 2.0)
    # A uniform distribution of width 3.4 has a standard deviation of 0.98 and bounds the rates: 1.3
    # - 0.41 * 1.7 = 0.6.
    incumbent_N = 1.3 + BETWEEN_REQUESTS * rng.uniform(-1.7, 1.7, count)
    return drafts_N, incumbent_N, 0.1 * rng.standard_normal(count)


def _to_counts(drafts_N: Array, rate_N: Array) -> list[AcceptanceCounts]:
    pairs = zip(drafts_N.tolist(), (drafts_N * rate_N).tolist(), strict=True)
    return [
        AcceptanceCounts(num_drafts=drafts, num_accepted=accepted) for drafts, accepted in pairs
    ]


# --- sleep


def simulate_sleep(trials: int, seed: int = 0) -> dict[str, Any]:
    """Count the records until a sleeping learner wakes, by the true loss of tau.

    One of two domains loses tau, relative to its tau at the promotion. `unchanged_woken` is the
    share of longest pauses that a false alarm ends. `steps_saved` is the share of optimizer steps
    that a learner saves in the long run while its traffic does not change, although it tries to
    train after every pause.
    """
    policy, gate, training = SleepPolicy(), Policy(), Training()
    delays: dict[float, list[float]] = {loss: [] for loss in (0.0, 0.2, 0.4, 0.8)}
    for loss, found in delays.items():
        rng = np.random.default_rng(seed)
        for _ in range(trials):
            found.append(_count_records_to_alarm(rng, loss, policy, gate, training))
    # In the long run, the learner alternates between skipping `slept` records and training on
    # `trained` ones.
    longest = policy.longest * training.records_per_candidate
    woken = {
        loss: sum(delay < math.inf for delay in found) / trials for loss, found in delays.items()
    }
    slept = [min(delay, longest) for delay in delays[0.0]]
    trained = training.patience * training.records_per_candidate
    return {
        "unchanged_woken": woken[0.0],
        "steps_saved": float(np.mean(slept) / (np.mean(slept) + trained)),
        **{
            f"loss_{loss}_in_one_of_two": {
                "woken": woken[loss],
                "records_median": _or_none(float(np.median(delays[loss]))),
                "records_p90": _or_none(float(np.quantile(delays[loss], 0.9, method="higher"))),
            }
            for loss in delays
            if loss
        },
    }


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _count_records_to_alarm(
    rng: np.random.Generator, loss: float, policy: SleepPolicy, gate: Policy, training: Training
) -> float:
    """Count the training records between the drift and the alarm.

    The count is infinite if the longest pause ends before the alarm.
    """
    fraction = BufferConfig().held_out_fraction
    # With a held-out share f, n training records come with n f / (1 - f) held-out ones.
    per_look = round(training.records_per_candidate * fraction / (1 - fraction))
    then = _make_rows(rng, 100, 0.0)
    now: list[Row] = []
    # After `longest` records, the learner wakes in any case.
    for look in range(1, policy.longest):
        now = (now + _make_rows(rng, per_look, loss))[-2 * Judging().held_out_per_domain :]
        staleness = compare(then, now, policy, gate)
        if staleness and staleness.reason:
            return look * training.records_per_candidate
    return math.inf


def _make_rows(rng: np.random.Generator, count: int, loss: float) -> list[Row]:
    """Return requests of two equally frequent domains; in the second, tau is lower by `loss`."""
    drafts_N, rate_N, _ = _make_requests(rng, count)
    domains = ["code" if is_code else "prose" for is_code in rng.random(count) < 0.5]
    rates = [
        max(0.0, rate - loss * (name == "prose"))
        for rate, name in zip(rate_N.tolist(), domains, strict=True)
    ]
    return [
        (name, n, n * rate) for name, n, rate in zip(domains, drafts_N.tolist(), rates, strict=True)
    ]


# --- baseline


def simulate_baseline(trials: int, seed: int = 0) -> dict[str, Any]:
    """Compare pairs of reports, and return how often they list a fall, by the true loss in tau.

    The reports have 2 domains and 2 numbers of draft tokens.
    """
    rates = {}
    for name, loss in {
        "equal_failed": 0.0,
        "loss_0.05_failed": 0.05,
        "loss_0.1_failed": 0.1,
    }.items():
        rng = np.random.default_rng(seed)
        failed = 0
        for _ in range(trials):
            baseline, report = _make_reports(rng, 64, loss)
            failed += compare_reports(report, baseline, 0.02).num_fell > 0
        rates[name] = failed / trials
    return rates


def _make_reports(rng: np.random.Generator, num_prompts: int, loss: float) -> tuple[Report, Report]:
    """Return two reports on the same prompts.

    The second draft's true tau is lower by the share `loss`.
    """
    steps_N = np.maximum(rng.lognormal(np.log(24), 0.6, num_prompts).round(), 2.0)
    rate_N = 1.0 + BETWEEN_REQUESTS * rng.uniform(-1.7, 1.7, num_prompts)
    # Two drafts that are equal on average differ on each prompt.
    other_N = rate_N - loss * (1 + rate_N) + 0.12 * rng.standard_normal(num_prompts)
    prompts = [PromptId(id=str(i), domain=("code", "prose")[i % 2]) for i in range(num_prompts)]
    reports = []
    for rates_N in (rate_N, other_N):
        # Both numbers of draft tokens use the same prompts, so a fall has two correlated chances to
        # be reported.
        rows = [
            Counted(
                draft="draft",
                temperature=0.0,
                num_speculative_tokens=k,
                steps=steps_N.tolist(),
                accepted=(steps_N * np.maximum(rates_N, 0) * share).tolist(),
            )
            for k, share in ((3, 1.0), (4, 1.1))
        ]
        reports.append(
            Report(
                schema_version=0,
                target=Target(name="target", fingerprint=""),
                drafts=[Draft(name="draft", family="model")],
                settings={},
                domains=["code", "prose"],
                prompts=prompts,
                per_prompt=rows,
            )
        )
    return reports[0], reports[1]


# --- intervals


def simulate_intervals(
    trials: int, seed: int = 0, sizes: Sequence[int] = (16, 32, 64)
) -> dict[str, Any]:
    """Return the share of 95% intervals that contain the truth, by number of prompts.

    There are three distributions of answer lengths. tau is a ratio over prompts; the gain is the
    difference between two drafts on the same prompts.
    """
    lengths = {"equal": 0.15, "unequal": 0.6, "heavy_tailed": 1.0}
    cases: list[dict[str, Any]] = []
    for kind, sigma in lengths.items():
        # The true values, up to the noise of 400,000 prompts.
        _, _, truth_tau, truth_gain = _sum_prompts(np.random.default_rng(99), 400_000, sigma)
        for num_prompts in sizes:
            rng = np.random.default_rng(seed)
            num_trials = 5 * trials  # cheap, and 95% must be distinguishable from 93%
            held = np.zeros(2)
            for _ in range(num_trials):
                accepted_N2, drafts_N2, _, _ = _sum_prompts(rng, num_prompts, sigma)
                tau = estimate_ratio(accepted_N2[:, 0], drafts_N2[:, 0]).interval()
                gain = estimate_gain(accepted_N2, drafts_N2).interval()
                held += [tau[0] <= truth_tau <= tau[1], gain[0] <= truth_gain <= gain[1]]
            tau_share, gain_share = (held / num_trials).tolist()
            cases.append(
                {"lengths": kind, "num_prompts": num_prompts, "tau": tau_share, "gain": gain_share}
            )
    coverage = {}
    for num_prompts in sizes:
        shares = [
            case[name]
            for case in cases
            if case["num_prompts"] == num_prompts
            for name in ("tau", "gain")
        ]
        coverage[str(num_prompts)] = {"lowest": min(shares), "highest": max(shares)}
    return {"coverage": coverage, "cases": cases}


def _sum_prompts(
    rng: np.random.Generator, num_prompts: int, sigma: float
) -> tuple[Array, Array, float, float]:
    """Return (accepted tokens of two drafts [N, 2], their drafts [N, 2], tau - 1, its gain).

    The last two values belong to the first draft.
    """
    drafts_N = np.maximum(rng.lognormal(np.log(24), sigma, num_prompts).round(), 1.0)
    # gamma(4, 0.5) has a mean of 2 and a standard deviation of 1.
    difficulty_N = BETWEEN_REQUESTS * (
        rng.gamma(4.0, 0.5, num_prompts) - 2
    )  # skewed: few prompts are easy
    noise_N = WITHIN_REQUEST / np.sqrt(drafts_N) * rng.standard_normal(num_prompts)
    ours_N = np.maximum(1 + difficulty_N + noise_N, 0)
    theirs_N = np.maximum(ours_N - 0.05 + 0.15 * rng.standard_normal(num_prompts), 0)
    accepted_N2 = np.column_stack([ours_N * drafts_N, theirs_N * drafts_N])
    ours, theirs = (accepted_N2.sum(0) / drafts_N.sum()).tolist()
    return accepted_N2, np.column_stack([drafts_N, drafts_N]), ours, ours - theirs


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
