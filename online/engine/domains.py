"""Count the served version's drafts and accepted tokens by domain.

The engine counts them at the point where vLLM counts all drafts.

    scheduler: a verified draft ─► counts by domain ─► utility call ─► GET /redraft/status ─► the learner's canary
    worker: the step's output names the requests whose drafts came from another proposer ─► not counted

vLLM's own counters do not distinguish domains, and include lookups and padding. With them, a canary
that gets more requests from an easy domain, or more lookups, would look better than it is. They are
also off with --disable-log-stats.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

from redraft.engine.hooks import SchedulerState, find_state
from redraft.online.records.origin import read_origin_arguments

# Maximum number of domains counted separately, because clients choose the names; all others are
# counted together.
MAX_DOMAINS = 32
OTHER = "(other)"  # The remaining domains are counted under this name.
LOOKUP_METHODS = ("ngram", "ngram_gpu", "suffix")  # vLLM's methods that use no draft model.

Counts = dict[str, list[int]]
"""Counts by domain since the server started: [draft tokens; then, for each position, the number of
drafts that had a token at that position and whose preceding tokens were all accepted, and the
number of those drafts whose token at that position was accepted]. Tokens that adaptive verification
left out are not counted.
"""

Loads = dict[str, dict[str, list[int]]]
"""Counts by domain and load, with adaptive verification: [number of drafts; then, for each
position, the number of drafts whose token at that position was accepted]. Every scheduled draft
counts, even if none of its tokens was verified. Tokens per step fall as the load rises, so only
drafts at the same load are comparable.
"""


class StepNotes(NamedTuple):
    """A worker's notes for the scheduler, pickled together with a step's output."""

    foreign: frozenset[str] = frozenset()
    """Requests whose draft tokens were not proposed by the served version."""
    admitted: Mapping[str, int] | None = None
    """Number of verified draft tokens by request. None if all were verified."""


def leave_out(scheduler_output: Any, admitted: Mapping[str, int] | None) -> dict[str, int] | None:
    """Return the number of verified draft tokens of each request, or None if all were verified.

    A token that was left out is reported to vLLM as invalid under a grammar, so that vLLM's
    counters do not count it as rejected. A draft of 0 tokens counts too, because its step emits one
    token.
    """
    if admitted is None:
        return None
    drafts = scheduler_output.scheduled_spec_decode_tokens
    invalid = scheduler_output.num_invalid_spec_tokens or {}
    verified = {
        name: min(admitted.get(name, 0), len(tokens) - invalid.get(name, 0))
        for name, tokens in drafts.items()
    }
    scheduler_output.num_invalid_spec_tokens = {
        name: len(tokens) - verified[name] for name, tokens in drafts.items()
    }
    return verified


def answer_domains(engine: Any) -> Counts:
    """An engine core's counts by domain."""
    return find_state(engine.scheduler, SchedulerState).domains


def answer_loads(engine: Any) -> Loads:
    """An engine core's counts by domain and load."""
    return find_state(engine.scheduler, SchedulerState).loads


def is_counted(scheduler: Any, request_id: str) -> bool:
    """Whether the served version made the draft after processing the context (`Pacer`)."""
    state: SchedulerState = scheduler.redraft
    pacer, request = state.pacer, scheduler.requests[request_id]
    is_read = pacer is None or pacer.has_read(request_id, request)
    return is_read and request_id not in state.foreign


def mark_step(
    output: Any, *, foreign: Collection[str] = (), admitted: Mapping[str, int] | None = None
) -> None:
    """Attach notes to a step's output."""
    output.redraft = StepNotes(frozenset(foreign), admitted)


def find_padded(scheduled: Any) -> frozenset[str]:
    """Return the requests of a step whose draft tokens are only padding.

    vLLM pads a request that joins with one token to read, e.g. the last token of a cached prompt,
    so that all requests in the batch have the same length.
    """
    joined = {request.req_id for request in scheduled.scheduled_new_reqs}
    joined |= scheduled.scheduled_cached_reqs.resumed_req_ids
    return frozenset(joined & scheduled.scheduled_spec_decode_tokens.keys())


def find_load(num_requests: int) -> str:
    """Return the load bucket for a number of requests: two per octave, single values below four."""
    return str(int(2 * math.log2(max(1, num_requests))))


def find_domain(counts: Counts, extra_args: dict[str, Any] | None) -> str:
    """Return the name under which a request's drafts are counted."""
    origin = read_origin_arguments(extra_args)
    domain = "" if origin is None else origin.domain
    # Keep the name, even if no token has been verified. Additional names are counted together.
    if domain not in counts and len(counts) >= MAX_DOMAINS:
        domain = OTHER
    counts.setdefault(domain, [0])
    return domain


def add_load(of_load: list[int], num_tokens: int, num_accepted: int) -> None:
    """Count a draft of `num_tokens` tokens. All other tokens were rejected or not verified."""
    of_load += [0] * (1 + num_tokens - len(of_load))
    of_load[0] += 1
    for position in range(num_accepted):
        of_load[1 + position] += 1


def add_draft(counts: Counts, domain: str, num_tokens: int, num_accepted: int) -> None:
    of_domain = counts.setdefault(domain, [0])
    of_domain += [0] * (1 + 2 * num_tokens - len(of_domain))
    of_domain[0] += num_tokens
    for position in range(min(num_accepted + 1, num_tokens)):
        of_domain[1 + 2 * position] += 1
        of_domain[2 + 2 * position] += position < num_accepted


def sum_loads(replicas: Sequence[Loads]) -> Loads:
    domains = dict.fromkeys(chain.from_iterable(replicas))
    return {
        domain: sum_counts([replica[domain] for replica in replicas if domain in replica])
        for domain in domains
    }


def sum_counts(replicas: Sequence[Counts]) -> Counts:
    domains = dict.fromkeys(chain.from_iterable(replicas))
    return {
        domain: add_up(replica[domain] for replica in replicas if domain in replica)
        for domain in domains
    }


def add_up(counts: Iterable[Sequence[int]]) -> list[int]:
    """Sum lists position by position, as if shorter lists were padded with zeros."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]
