"""The served version's drafts and accepted tokens by domain.

They are counted in the engine where vLLM counts all of them.

    scheduler: a verified draft ─► counts by domain ─► utility call ─► GET /redraft/status ─► the
    learner's canary
    worker: the step's output names the requests whose drafts are another proposer's: these do not
    count

vLLM's own counters name no domain, and count lookups and padding too. A canary with more of an easy
domain than the other servers, or more lookups, would look better than it is. They are also off with
--disable-log-stats.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, zip_longest
from typing import Any

from redraft.engine.hooks import SchedulerState, find_state
from redraft.online.records.origin import read_origin_arguments

MAX_DOMAINS = 32  # counted apart; clients choose names, so further ones count together
OTHER = "(other)"  # Name of those.
LOOKUP_METHODS = ("ngram", "ngram_gpu", "suffix")  # vLLM's methods without a draft model.

Counts = dict[str, list[int]]
"""By domain, since the server started: [draft tokens, then by position the drafts that had a token
and all earlier ones accepted, and those whose token was accepted too]."""


def note_foreign(update: Callable[..., Any]) -> Callable[..., Any]:
    """A scheduler's `update_from_output` that notes the requests whose drafts do not count."""

    def update_and_note(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        foreign: frozenset[str] = getattr(model_runner_output, "redraft", frozenset())
        state = find_state(scheduler, SchedulerState)
        state.foreign = foreign | find_padded(scheduler_output)
        return update(scheduler, scheduler_output, model_runner_output)

    return update_and_note


def count_drafts(observe: Callable[..., Any]) -> Callable[..., Any]:
    """A scheduler's `make_spec_decoding_stats` that counts a verified draft by domain."""

    def observe_and_count(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        # vLLM passes everything by name. Counted here, because `observe` returns at once if
        # statistics are off.
        request_id, num_tokens = kwargs["request_id"], kwargs["num_draft_tokens"]
        if num_tokens and is_counted(scheduler, request_id):
            arguments = scheduler.requests[request_id].sampling_params.extra_args
            add_draft(get_counts(scheduler), arguments, num_tokens, kwargs["num_accepted_tokens"])
        return observe(scheduler, *args, **kwargs)

    return observe_and_count


def answer_domains(engine: Any) -> Counts:
    """The counts of an engine core."""
    return get_counts(engine.scheduler)


def is_counted(scheduler: Any, request_id: str) -> bool:
    """Whether a request's draft is the served version's, and that has read the text (`Pacer`)."""
    state: SchedulerState = scheduler.redraft
    pacer, request = state.pacer, scheduler.requests[request_id]
    is_read = pacer is None or pacer.has_read(request_id, request)
    return is_read and request_id not in state.foreign


def mark_foreign(output: Any, requests: Collection[str]) -> None:
    """Name in a step's output the requests whose draft tokens are not the served version's.

    It is pickled with them.
    """
    output.redraft = frozenset(requests)


def find_padded(scheduled: Any) -> frozenset[str]:
    """Requests of a step with draft tokens that nobody proposed.

    vLLM gives them to a request that joins with one token to read, e.g. the last of a cached
    prompt, so that all requests of the batch have one length.
    """
    joined = {request.req_id for request in scheduled.scheduled_new_reqs}
    joined |= scheduled.scheduled_cached_reqs.resumed_req_ids
    return frozenset(joined & scheduled.scheduled_spec_decode_tokens.keys())


def get_counts(scheduler: Any) -> Counts:
    return find_state(scheduler, SchedulerState).domains


def add_draft(
    counts: Counts, extra_args: dict[str, Any] | None, num_tokens: int, num_accepted: int
) -> None:
    origin = read_origin_arguments(extra_args)
    domain = "" if origin is None else origin.domain
    if domain not in counts and len(counts) >= MAX_DOMAINS:
        domain = OTHER
    of_domain = counts.setdefault(domain, [0])
    of_domain += [0] * (1 + 2 * num_tokens - len(of_domain))
    of_domain[0] += num_tokens
    for position in range(min(num_accepted + 1, num_tokens)):
        of_domain[1 + 2 * position] += 1
        of_domain[2 + 2 * position] += position < num_accepted


def sum_counts(replicas: list[Counts]) -> Counts:
    domains = dict.fromkeys(chain.from_iterable(replicas))
    return {
        domain: add_up(replica[domain] for replica in replicas if domain in replica)
        for domain in domains
    }


def add_up(counts: Iterable[Sequence[int]]) -> list[int]:
    """Sums position by position; a shorter list has zeros there."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]
