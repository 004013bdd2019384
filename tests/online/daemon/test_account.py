"""The learner's account: a fault that lasts, and its reasons."""

from __future__ import annotations

from pathlib import Path

from redraft.online.daemon import account as account_module
from redraft.online.daemon.account import Account
from redraft.online.journal import FaultEntry, Journal

PAUSE_S = account_module.OTHER_REASON_S


def make_account(folder: Path, times: list[float]) -> Account:
    return Account(Journal(folder), now_s=lambda: times[-1])


def reasons(account: Account) -> list[str]:
    entries = account.journal.read().entries
    return [entry.reason for entry in entries if isinstance(entry, FaultEntry)]


def test_a_fault_that_lasts_is_written_with_its_present_reason(tmp_path: Path) -> None:
    times = [0.0]
    account = make_account(tmp_path, times)
    for now_s, reason in (
        (0.0, "nothing listens"),
        (PAUSE_S - 1, "nothing listens"),
        (PAUSE_S + 1, "answers with 401"),
        (PAUSE_S + 2, "answers with 401, request 1"),
        (PAUSE_S + 3, "answers with 401, request 2"),
        (3 * PAUSE_S, "answers with 401, request 3"),
        (4 * PAUSE_S, "answers with 401, request 3"),
    ):
        times.append(now_s)
        account.begin_fault("server_refuses", "http://a:1", reason)
    assert reasons(account) == [
        "nothing listens",
        "answers with 401",
        "answers with 401, request 3",
    ]


def test_a_fault_that_has_ended_is_written_when_it_begins_again(tmp_path: Path) -> None:
    account = make_account(tmp_path, [0.0])
    for server in ("http://a:1", "http://b:1"):
        account.begin_fault("server_unreachable", server, server)
    account.end_faults("server_unreachable", detail="http://a:1")
    for server in ("http://a:1", "http://b:1"):
        account.begin_fault("server_unreachable", server, server)
    account.end_faults("server_unreachable")
    account.begin_fault("server_unreachable", "http://b:1", "again")
    assert reasons(account) == ["http://a:1", "http://b:1", "http://a:1", "again"]


def test_a_fault_that_lasts_for_days_is_written_again_and_counts_until_it_ends(
    tmp_path: Path,
) -> None:
    times = [0.0]
    account = make_account(tmp_path, times)
    account.begin_fault("log_may_lose_records", "log", "an old broker")  # reported only once
    account.begin_fault("capture_off", "http://a:1", "no room")
    account.begin_fault("capture_off", "http://b:1", "no room")
    assert current(account) == {"log_may_lose_records": 1, "capture_off": 2}
    account.end_faults("capture_off", detail="http://b:1")
    for hours in (1, 7, 8, 14):
        times.append(3600.0 * hours)
        account.remind()
    assert reasons(account).count("an old broker") == 3
    account.end_faults("log_may_lose_records")
    assert current(account) == {"capture_off": 1}
    account.end_faults("capture_off")
    assert current(account) == {}


def current(account: Account) -> dict[str, float]:
    return {
        sample.labels["what"]: sample.value
        for metric in account.collect()
        for sample in metric.samples
    }
