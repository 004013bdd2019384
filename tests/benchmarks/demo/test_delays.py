"""Where a record's time goes before it is used, on a made journal and by hand."""

from __future__ import annotations

import pytest
from make_delays import A, make_delays, make_entries

from benchmarks.demo.delays import PARTS, account
from benchmarks.demo.online_report import count_minutes_to_adapt, find_minutes
from redraft.online.journal import StateEntry, SwapEntry, TrainingEntry


def test_every_second_between_arrival_and_first_use_is_accounted_for() -> None:
    (row,) = make_delays()["versions"]
    # Arrivals at 5, 9 and 34 s; the first swap ends at 47 s.
    assert row["version"] == "v000002"
    assert row["records"] == 12
    assert row["first_use"] == pytest.approx((42 + 38 + 13) / 3)
    assert row["first_use"] == pytest.approx(sum(row[part] for part in PARTS))
    assert row["waiting"] == pytest.approx((1 + 3 + 1) / 3)
    # From the begin of their steps: 16, 10 and 0 s to the first verdict, and 11, 11 and 6 s after it.
    assert row["training"] == pytest.approx((16 + 11 + 10 + 11 + 6 - 2 * 4) / 3)
    assert row["judging"] == pytest.approx((5 + 3 + 5 + 3 + 3 - 2 * 2 - 3 * 1.5) / 3)
    assert row["paused"] == pytest.approx((2 * 4 + 2 * 2 + 3 * 1.5) / 3)
    assert row["idle"] == pytest.approx((3 + 3) / 3)
    assert row["publishing"] == pytest.approx(1.0)
    assert row["canary"] == pytest.approx(1.5)
    assert row["swap"] == pytest.approx(0.5)
    assert row["rollout"] == pytest.approx(25.0)


def test_a_wait_is_divided_by_what_the_learner_did_meanwhile() -> None:
    (row,) = make_delays()["versions"]
    assert row["waiting_while"] == {"training": pytest.approx(4 / 3), "idle": pytest.approx(1 / 3)}
    step = TrainingEntry(
        time_s=80, step=4, loss=1.0, records_seen=16, waited_s=40.0, step_s=5.0, paused_s=0.0
    )
    later = [entry for entry in make_entries() if entry.time_s < 80]
    canary = StateEntry(time_s=100, phase="canary", candidate="v000003")
    swap = SwapEntry(time_s=101, server=A, version="v000003", outcome="swapped", duration_ms=0)
    _, second = account([*later, step, canary, swap])["versions"]
    # It arrived at 35 s, while the second version was trained.
    expected = {
        "training": 6.0 + 1.0,
        "judging": 3.0,
        "publishing": 1.0,
        "canary": 28.0,
        "idle": 1.0,
    }
    assert second["waiting_while"] == pytest.approx(expected)
    assert second["first_use"] == pytest.approx(101 - 35)


def test_a_step_repeated_after_a_kill_counts_once() -> None:
    killed = [entry for entry in make_entries() if entry.time_s <= 20]
    again = [
        TrainingEntry(time_s=s, step=2, loss=1.0, records_seen=s - 22, waited_s=9.0, step_s=1.0)
        for s in (30, 34)
    ]
    rest = [entry for entry in make_entries() if 40 < entry.time_s < 73]
    (row,) = account([*killed, *again, *rest])["versions"]
    assert row["records"] == 12
    # Arrivals at 5, 20 and 24 s.
    assert row["first_use"] == pytest.approx((42 + 27 + 23) / 3)


def test_records_of_a_draft_that_was_given_up_are_never_served() -> None:
    delays = make_delays()
    assert delays["never_served"] == 4
    assert delays["not_yet_served"] == 4
    assert delays["passed_over"] == 0
    step = TrainingEntry(time_s=95, step=9, loss=1.0, records_seen=24, waited_s=2.0, skipped=30)
    assert account([*make_entries(), step])["passed_over"] == 30


def test_the_mean_is_over_records() -> None:
    later = [
        StateEntry(time_s=100, phase="canary", candidate="v000003"),
        SwapEntry(time_s=101, server=A, version="v000003", outcome="swapped", duration_ms=0),
    ]
    delays = account([*make_entries(), *later])
    first, second = delays["versions"]
    assert second["records"] == 4
    expected = (12 * first["first_use"] + 4 * second["first_use"]) / 16
    assert delays["mean"]["first_use"] == pytest.approx(expected)


def test_a_swap_to_an_earlier_version_serves_no_new_record() -> None:
    back = SwapEntry(time_s=42, server=A, version="v000001", outcome="swapped", duration_ms=1)
    entries = sorted([*make_entries(), back], key=lambda entry: entry.time_s)
    assert account(entries) == make_delays()


def test_a_restarted_count_begins_at_zero() -> None:
    steps = [
        TrainingEntry(time_s=90 + seen, step=1, loss=1.0, records_seen=seen, waited_s=2.0)
        for seen in (3, 7)
    ]
    assert account([*make_entries(), *steps])["not_yet_served"] == 7


def test_without_a_rollout_there_is_no_mean() -> None:
    assert account([])["mean"] is None


def test_a_version_is_served_from_its_first_swap_after_the_shift() -> None:
    minutes = find_minutes(make_entries(), shifted_s=-13)
    assert minutes == {"v000002": pytest.approx(1.0)}
    versions = [
        {"version": "v000001", "origin": "offline on A", "tau": 3.0, "minutes": None},
        {"version": "v000002", "origin": "learned", "tau": 1.79, "minutes": 1.0},
        {"version": "v000003", "origin": "learned", "tau": 1.80, "minutes": 4.0},
        {"version": "v000004", "origin": "learned", "tau": 1.95, "minutes": 6.0},
    ]
    report = {"tau": {"b_offline": 2.0}, "versions": versions}
    assert count_minutes_to_adapt(report) == 4.0
    assert count_minutes_to_adapt({**report, "versions": versions[:2]}) is None
