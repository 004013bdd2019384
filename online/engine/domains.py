"""Drafts and accepted tokens by the domain of the request, counted in the engine where vLLM counts all of them.

    scheduler: a verified draft ─► counts by domain ─► utility call ─► GET /redraft/status ─► the learner's canary

vLLM's own counters name no domain. A canary with more of an easy domain than the other servers would look better than
it is.
"""

from __future__ import annotations

from typing import Any

from redraft.online.records.origin import read_origin_arguments

MAX_DOMAINS = 32
"""Domains with separate counts. Clients choose the names, so all beyond these are counted together."""

OTHER = "(other)"
"""Name of those."""

Counts = dict[str, list[int]]
"""[drafts, accepted tokens] by domain, since the server started."""


def count_domains() -> None:
    """Make vLLM's scheduler count by domain, and let the engine answer `redraft_domains`. Safe to call again."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    if are_counted():
        return
    observe = Scheduler.make_spec_decoding_stats

    def observe_and_count(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        # vLLM passes everything by name. Counted here, because `observe` returns at once if statistics are off.
        if kwargs["num_draft_tokens"]:
            request = scheduler.requests[kwargs["request_id"]]
            add_draft(get_counts(scheduler), request.sampling_params.extra_args, kwargs["num_accepted_tokens"])
        return observe(scheduler, *args, **kwargs)

    Scheduler.make_spec_decoding_stats = observe_and_count
    # vLLM finds a utility call's method by name on the engine core.
    EngineCore.redraft_domains = lambda engine: get_counts(engine.scheduler)


def are_counted() -> bool:
    """Whether `count_domains` has been called in this process, and succeeded. vLLM calls it in all of them."""
    from vllm.v1.engine.core import EngineCore

    return hasattr(EngineCore, "redraft_domains")


def get_counts(scheduler: Any) -> Counts:
    """The scheduler's counts, which begin empty."""
    counts: Counts = scheduler.__dict__.setdefault("redraft_domains", {})
    return counts


def add_draft(counts: Counts, extra_args: dict[str, Any] | None, num_accepted: int) -> None:
    """Count one verified draft of a request with these extra arguments."""
    origin = read_origin_arguments(extra_args)
    domain = "" if origin is None else origin.domain
    if domain not in counts and len(counts) >= MAX_DOMAINS:
        domain = OTHER
    of_domain = counts.setdefault(domain, [0, 0])
    of_domain[0] += 1
    of_domain[1] += num_accepted


def sum_counts(replicas: list[Counts]) -> Counts:
    """The counts of all replicas together."""
    total: Counts = {}
    for counts in replicas:
        for domain, (num_drafts, num_accepted) in counts.items():
            drafts, accepted = total.get(domain, [0, 0])
            total[domain] = [drafts + num_drafts, accepted + num_accepted]
    return total
