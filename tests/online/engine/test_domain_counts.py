"""Counts by domain in the scheduler.

Test_fleet_engine.py compares them with a real engine's own counters.
"""

from types import SimpleNamespace

from redraft.online.engine.class_hooks import count_drafts, note_foreign
from redraft.online.engine.domains import (
    MAX_DOMAINS,
    OTHER,
    add_draft,
    find_domain,
    find_load,
    mark_step,
    sum_counts,
    sum_loads,
)
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
        add_draft(counts, find_domain(counts, extra_args), num_tokens, num_accepted)
    # tokens, then tried and accepted by position
    assert counts == {
        "code": [7, 3, 3, 2, 1, 1, 1],
        "prose": [3, 1, 0, 0, 0, 0, 0],
        "": [5, 2, 2, 2, 1, 0, 0],
    }


def test_invented_domains_take_no_memory():
    counts = {}
    for number in range(1000):
        add_draft(counts, find_domain(counts, mark(f"d{number}")), 1, 1)
    assert len(counts) == MAX_DOMAINS + 1
    assert counts[OTHER] == [1000 - MAX_DOMAINS] * 3
    assert counts["d0"] == [1, 1, 1]


def test_replicas_are_added_up():
    replicas = [{"code": [2, 2, 1]}, {"code": [2, 1, 1, 1, 0], "prose": [5, 5, 0]}]
    assert sum_counts(replicas) == {"code": [4, 3, 2, 1, 0], "prose": [5, 5, 0]}


class Scheduler:
    """vLLM's scheduler of two requests, and what it observes of a verified draft."""

    def __init__(self):
        self.observed = []
        request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=mark("code")))
        self.requests = {"a": request, "b": request}

    def update(self, drafts, accepted, *, admitted=None, invalid=None, num_requests=2):
        joined = SimpleNamespace(scheduled_new_reqs=(), num_invalid_spec_tokens=invalid)
        joined.scheduled_spec_decode_tokens = {name: [0] * drafts for name in accepted}
        joined.scheduled_cached_reqs = SimpleNamespace(resumed_req_ids=set())
        joined.num_scheduled_tokens = dict.fromkeys(range(num_requests))
        result = SimpleNamespace()
        if admitted is not None:
            mark_step(result, admitted=admitted)
        note_foreign(lambda *_: None)(self, joined, result)
        for name, num_accepted in accepted.items():
            count_drafts(lambda scheduler, **told: self.observed.append(told))(
                self,
                num_draft_tokens=drafts,
                num_accepted_tokens=num_accepted,
                num_invalid_spec_tokens=joined.num_invalid_spec_tokens,
                request_id=name,
            )

    def count_tokens(self):
        """vLLM's draft tokens of each draft."""
        return [
            told["num_draft_tokens"]
            - (told["num_invalid_spec_tokens"] or {}).get(told["request_id"], 0)
            for told in self.observed
        ]


def test_a_token_that_adaptive_verification_leaves_out_is_no_rejected_one():
    scheduler = Scheduler()
    scheduler.update(3, {"a": 2, "b": 0}, admitted={"a": 2, "b": 0})
    scheduler.update(3, {"a": 1}, admitted={"a": 3}, invalid={"a": 1})  # by a grammar
    assert scheduler.redraft.domains == {"code": [4, 2, 2, 2, 1]}
    assert scheduler.count_tokens() == [2, 0, 2], "vLLM's own counters have the verified tokens"
    scheduler.update(3, {"a": 1, "b": 0}, num_requests=64)
    assert scheduler.count_tokens()[3:] == [3, 3]
    assert scheduler.redraft.domains == {"code": [10, 4, 3, 3, 1, 0, 0]}


def test_adaptive_verification_counts_drafts_by_load_even_if_nothing_was_verified():
    scheduler = Scheduler()
    scheduler.update(3, {"a": 2, "b": 0}, admitted={"a": 2, "b": 0}, num_requests=2)
    scheduler.update(3, {"a": 1, "b": 1}, admitted={"a": 1, "b": 2}, num_requests=64)
    scheduler.update(3, {"a": 0, "b": 0}, admitted={"a": 0, "b": 0}, num_requests=70)
    assert scheduler.redraft.loads == {"code": {"2": [2, 1, 1, 0], "12": [4, 2, 0, 0]}}
    replicas = [scheduler.redraft.loads, {"code": {"2": [1, 1, 1, 1]}, "prose": {"0": [1]}}]
    assert sum_loads(replicas) == {
        "code": {"2": [3, 2, 2, 1], "12": [4, 2, 0, 0]},
        "prose": {"0": [1]},
    }
    loads = [find_load(number) for number in (1, 2, 3, 4, 5, 6, 8, 12, 256)]
    assert loads == ["0", "2", "3", "4", "4", "5", "6", "7", "16"]
