"""Counts by domain in the scheduler.

Test_fleet_engine.py compares them with a real engine's own counters.
"""

from redraft.online.engine.domains import MAX_DOMAINS, OTHER, add_draft, sum_counts
from redraft.online.records.origin import EXTRA_ARGS_KEY, Origin


def mark(domain):
    return {EXTRA_ARGS_KEY: Origin(domain=domain)._asdict()}


def test_drafts_are_counted_by_domain_and_those_without_a_mark_have_none():
    counts = {}
    for extra_args, num_tokens, num_accepted in (
        (mark("code"), 3, 3),
        (mark("prose"), 3, 0),
        (mark("code"), 3, 1),
        (mark("code"), 1, 1),
        (None, 2, 2),
        ({"a": 1}, 3, 1),
    ):
        add_draft(counts, extra_args, num_tokens, num_accepted)
    # tokens, then tried and accepted by position
    assert counts == {
        "code": [7, 3, 3, 2, 1, 1, 1],
        "prose": [3, 1, 0, 0, 0, 0, 0],
        "": [5, 2, 2, 2, 1, 0, 0],
    }


def test_invented_domains_take_no_memory():
    counts = {}
    for number in range(1000):
        add_draft(counts, mark(f"d{number}"), 1, 1)
    assert len(counts) == MAX_DOMAINS + 1
    assert counts[OTHER] == [1000 - MAX_DOMAINS] * 3
    assert counts["d0"] == [1, 1, 1]


def test_replicas_are_added_up():
    replicas = [{"code": [2, 2, 1]}, {"code": [2, 1, 1, 1, 0], "prose": [5, 5, 0]}]
    assert sum_counts(replicas) == {"code": [4, 3, 2, 1, 0], "prose": [5, 5, 0]}
