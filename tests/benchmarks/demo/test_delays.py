"""Where a record's time goes before it is used, on a made journal and by hand."""

from __future__ import annotations

import pytest
from make_delays import A, make_delays, make_entries

from benchmarks.demo.delays import PARTS, account
from benchmarks.demo.online_report import count_minutes_to_adapt, find_minutes
from redraft.online.journal import StateEntry, SwapEntry, TrainingEntry


def test_every_second_between_arrival_and_first_use_is_accounted_for() -> None:
    (row,) = make_delays()["versions"]
    # Arrivals at 5, 17 and 39 s; the first swap ends at 47 s.
    assert row["version"] == "v000002"
    assert row["records"] == 12
    assert row["first_use"] == pytest.approx((42 + 30 + 8) / 3)
    assert row["first_use"] == pytest.approx(sum(row[part] for part in PARTS))
    assert row["waiting"] == pytest.approx((5 + 3 + 1) / 3)
    # After their steps: 12, 2 and 0 s to the first verdict, and 11, 11 and 1 s in the second part.
    assert row["training"] == pytest.approx((12 + 11 + 2 + 11 + 1) / 3)
    assert row["judging"] == pytest.approx((5 + 3 + 5 + 3 + 3) / 3)
    assert row["idle"] == pytest.approx((3 + 3) / 3)
    assert row["publishing"] == pytest.approx(1.0)
    assert row["canary"] == pytest.approx(1.5)
    assert row["swap"] == pytest.approx(0.5)
    assert row["rollout"] == pytest.approx(25.0)


def test_records_of_a_draft_that_was_given_up_are_never_served() -> None:
    delays = make_delays()
    assert delays["never_served"] == 4
    assert delays["not_yet_served"] == 4


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
    step = TrainingEntry(time_s=95, step=1, loss=1.0, records_seen=3, waited_s=2.0)
    assert account([*make_entries(), step])["not_yet_served"] == 4 + 3


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
