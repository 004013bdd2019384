"""Is the served draft still as good as at its promotion, and when does the learner sleep and wake?"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from redraft.files.sealed import DamagedError
from redraft.online.daemon.sleep import load_sleep, save_sleep
from redraft.online.learning.gate import Policy
from redraft.online.learning.staleness import Row, Sleep, SleepPolicy, compare, find_past

POLICY, GATE = SleepPolicy(), Policy()


def make_rows(tau: float, count: int, seed: int, domain: str = "code") -> list[Row]:
    """Requests as on a real target: tau varies by 0.4 between them."""
    rng = np.random.default_rng(seed)
    drafts_N = np.maximum(rng.lognormal(np.log(24), 0.6, count).round(), 2.0)
    rate_N = np.maximum(tau - 1 + 0.4 * rng.standard_normal(count), 0)
    return [
        (domain, n, n * rate) for n, rate in zip(drafts_N.tolist(), rate_N.tolist(), strict=True)
    ]


def test_unchanged_traffic_is_not_stale_and_the_loss_has_an_interval_around_zero() -> None:
    found = compare(make_rows(2.0, 100, 0), make_rows(2.0, 100, 1), POLICY, GATE)
    assert found is not None
    assert found.reason == ""
    assert found.low < 0 < found.high
    assert found.tau_then - found.tau_now == pytest.approx(found.loss)


def test_the_interval_of_the_loss_holds_the_truth() -> None:
    held = []
    for seed in range(400):
        found = compare(
            make_rows(2.0, 60, 2 * seed), make_rows(1.8, 60, 2 * seed + 1), POLICY, GATE
        )
        assert found is not None
        held.append(found.low <= 0.2 <= found.high)
    assert np.mean(held) >= 0.92


def make_equal_rows(count: int, drafts: float, seed: int, domain: str) -> list[Row]:
    rate_N = 1 + 0.4 * np.random.default_rng(seed).standard_normal(count)
    return [(domain, drafts, drafts * rate) for rate in rate_N.tolist()]


def test_the_interval_holds_the_truth_where_three_requests_of_a_domain_carry_most_of_it() -> None:
    held, alarms = [], []
    for seed in range(0, 2000, 4):
        then = make_equal_rows(60, 20, seed, "code") + make_equal_rows(3, 2000, seed + 1, "prose")
        now = make_equal_rows(60, 20, seed + 2, "code") + make_equal_rows(
            3, 2000, seed + 3, "prose"
        )
        found = compare(then, now, POLICY, GATE)
        assert found is not None
        held.append(found.low <= 0 <= found.high)
        alarms.append(found.reason != "")
    assert np.mean(held) >= 0.93, "with the degrees of freedom of the larger domain it is 87%"
    assert np.mean(alarms) <= 0.02


def test_a_fall_is_found_in_the_domain_where_it_happened() -> None:
    then = make_rows(2.0, 100, 0) + make_rows(1.8, 100, 1, "prose")
    now = make_rows(2.0, 100, 2) + make_rows(1.3, 25, 3, "prose")
    found = compare(then, now, POLICY, GATE)
    assert found is not None
    assert re.search(r"\bprose\b.*\bfallen\b", found.reason)


def test_another_mix_of_the_same_domains_is_no_loss() -> None:
    then = make_rows(2.5, 150, 0) + make_rows(1.5, 50, 1, "prose")
    now = make_rows(2.5, 20, 2) + make_rows(1.5, 150, 3, "prose")
    found = compare(then, now, POLICY, GATE)
    assert found is not None
    assert found.reason == ""
    assert abs(found.loss) < 0.15, "the mix alone changes tau by 0.6"


def test_a_rare_domain_neither_blinds_the_comparison_nor_wakes_the_learner() -> None:
    then, rare = make_rows(2.0, 100, 0), [("poem", 10.0, 0.0)]
    found = compare(then + rare, make_rows(1.4, 100, 1) + rare, POLICY, GATE)
    assert found is not None
    assert found.low > 0
    quiet = compare(then, make_rows(2.0, 100, 2) + rare, POLICY, GATE)
    assert quiet is not None
    assert quiet.reason == ""


def test_requests_from_before_a_fine_tune_are_past_and_those_from_before_small_moves_are_not() -> (
    None
):
    moves = {f"t{i}": make_rows(1.72 - 0.01 * i, 100, i) for i in range(4)}
    assert find_past(moves, POLICY, GATE) == []
    before = {f"base{i}": make_rows(2.2, 100, 10 + i) for i in range(2)}
    assert find_past(moves | before, POLICY, GATE) == ["base0", "base1"]
    easier = {"base": make_rows(1.3, 100, 20)}
    assert find_past(moves | easier, POLICY, GATE) == ["base"], (
        "a draft looked worse on them: no evidence either"
    )


def test_targets_with_few_requests_are_taken_together() -> None:
    size = GATE.min_requests // 5
    many = {f"t{i}": make_rows(1.7, size, i) for i in range(60)}
    assert find_past(many, POLICY, GATE) == []
    before = {f"base{i}": make_rows(2.4, size, 100 + i) for i in range(60)}
    past = find_past(many | before, POLICY, GATE)
    assert set(past) >= set(list(before)[5:]), "all but those compared together with later ones"
    assert len(past) <= 60 + 5
    assert (
        find_past({"t": make_rows(1.7, 100, 0), "base": make_rows(2.4, 3, 1)}, POLICY, GATE) == []
    ), "too few to tell"


def test_weights_are_rarely_left_behind_for_nothing() -> None:
    found = [
        find_past({f"t{i}": make_rows(1.7, 60, 10 * seed + i) for i in range(2)}, POLICY, GATE)
        for seed in range(400)
    ]
    assert sum(map(bool, found)) <= 400 * 0.03


def test_another_mix_of_domains_or_a_new_one_leaves_no_weights_behind() -> None:
    now = make_rows(2.5, 20, 2) + make_rows(1.5, 150, 3, "prose")
    before = make_rows(2.5, 150, 0) + make_rows(1.5, 50, 1, "prose")
    assert find_past({"now": now, "before": before}, POLICY, GATE) == []
    assert find_past({"now": make_rows(2.5, 100, 4, "poem"), "before": before}, POLICY, GATE) == []


def test_a_new_domain_is_something_to_learn() -> None:
    found = compare(
        make_rows(2.0, 100, 0), make_rows(2.0, 60, 1) + make_rows(1.2, 30, 2, "prose"), POLICY, GATE
    )
    assert found is not None
    assert re.search(r"\bprose\b.*\bnew\b", found.reason)
    alone = compare(make_rows(2.0, 100, 0), make_rows(1.2, 30, 2, "prose"), POLICY, GATE)
    assert alone is not None
    assert re.search(r"\bprose\b.*\bnew\b", alone.reason)


def test_too_few_requests_say_nothing() -> None:
    assert compare(make_rows(2.0, 100, 0), make_rows(1.0, 10, 1), POLICY, GATE) is None


def test_the_learner_sleeps_until_acceptance_falls() -> None:
    rows = make_rows(2.0, 100, 0)
    sleep = Sleep().refer("v000002", 500, rows).fall_asleep(rows)
    assert sleep.is_asleep_at("v000002")
    assert not sleep.is_asleep_at("v000003"), "another version wakes it"
    same, fallen = (compare(rows, make_rows(tau, 100, 1), POLICY, GATE) for tau in (2.0, 1.5))
    assert sleep.find_reason_to_wake(same, 128, POLICY, 128) == ""
    assert sleep.find_reason_to_wake(fallen, 128, POLICY, 128) == "acceptance has fallen"
    passed = sleep.pass_over(128).pass_over(128)
    assert passed.num_saved == 256
    assert passed.wake().num_saved == 256, "the account goes on"


def test_the_pauses_grow_while_training_leads_nowhere_and_end_at_the_longest() -> None:
    rows = make_rows(2.0, 100, 0)
    fallen = compare(rows, make_rows(1.5, 100, 1), POLICY, GATE)
    sleep, quiet, stale = Sleep().refer("v1", 0, rows), [], []
    for _ in range(7):
        sleep = sleep.fall_asleep(rows)
        for found, pauses in ((None, quiet), (fallen, stale)):
            pauses.append(
                next(
                    n
                    for n in range(1, 99)
                    if replace(sleep, num_passed=n - 1).find_reason_to_wake(found, 1, POLICY, 1)
                )
            )
        sleep = sleep.wake()
    assert quiet == [4, 8, 16, 16, 16, 16, 16]
    assert stale == [1, 2, 4, 8, 16, 16, 16]
    assert sleep.refer("v2", 9, rows).num_attempts == 0, "a promotion starts afresh"


def test_a_reference_for_another_number_of_draft_tokens_wakes_nobody() -> None:
    rows = make_rows(2.0, 100, 0)
    sleep = Sleep().refer("v1", 500, rows, "3 greedy").fall_asleep(rows).pass_over(64)
    other = sleep.refer("v1", 900, rows[:50], "5 greedy")
    assert (other.through, other.then, other.drafting) == (900, tuple(rows[:50]), "5 greedy")
    assert (other.is_asleep_at("v1"), other.num_attempts, other.num_passed, other.num_saved) == (
        True,
        1,
        64,
        64,
    )


def test_a_domain_that_training_has_seen_is_new_no_longer() -> None:
    then, now = make_rows(2.0, 100, 0), make_rows(2.0, 60, 1) + make_rows(1.2, 30, 2, "prose")
    sleep = Sleep().refer("v1", 0, then).fall_asleep(now)
    found = compare(
        sleep.then, make_rows(2.0, 60, 3) + make_rows(1.2, 30, 4, "prose"), POLICY, GATE
    )
    assert found is not None
    assert found.reason == ""


def test_a_kill_does_not_wake_the_learner(tmp_path: Path) -> None:
    rows, path = make_rows(2.0, 30, 0), tmp_path / "sleep.json"
    assert load_sleep(path) == Sleep(), "there is none yet"
    sleep = Sleep().refer("v000002", 500, rows).fall_asleep(rows).pass_over(64)
    save_sleep(sleep, path)
    assert load_sleep(path) == sleep
    path.write_text(json.dumps(asdict(sleep)))
    assert load_sleep(path) == sleep, "as an earlier release wrote it"


def test_a_damaged_sleep_is_told(tmp_path: Path) -> None:
    path = tmp_path / "sleep.json"
    save_sleep(Sleep().refer("v000002", 500, make_rows(2.0, 30, 0)), path)
    whole = path.read_text()
    for damaged in (
        whole[: len(whole) // 2],
        "",
        "[]",
        '{"version": 2}',
        whole.replace("500", "501"),
    ):
        path.write_text(damaged)
        with pytest.raises(DamagedError, match=r"sleep\.json"):
            load_sleep(path)
