"""Wrappers around vLLM's classes: scheduler, engine core, and a worker's start.

A scheduler's step passes these wrappers, in the order of `engine.hooks`:

    schedule ─► sampled requests with a seed lose their draft tokens, if the number of tokens varies
             ─► the pacer records the start
    update_from_output ─► requests whose drafts do not count ─► the pacer records the result
    post_step ─► draft tokens are fetched if there are any ─► the pacer records the end
    make_spec_decoding_stats ─► counts by domain
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from redraft.engine.hooks import SchedulerState, after_start, find_state
from redraft.engine.lookup_first import SECTION
from redraft.engine.settings import read_settings
from redraft.heads.families.retrieval import FOLDER
from redraft.online.engine import domains, pace, target_watch, worker
from redraft.online.engine.config import check_pace

VARYING = (FOLDER, "head_requests")
"""Settings with which a lookup or a head drafts fewer tokens if there are more requests."""


def drafts_vary(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the draft tokens of a request depend on other requests."""
    settings = read_settings(environment)
    lookup = settings.get(SECTION, {})
    return settings.get("pace", "off") != "off" or any(lookup.get(key) for key in VARYING)


def without_seeded_drafts(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a scheduler's `schedule` to give sampled requests with a seed no draft tokens.

    vLLM's rejection sampler uses a request's random generator, and the number of draws depends on
    the draft tokens. As long as a request always gets the same drafts, its answer is reproducible.
    With `--pace`, live counts, or lookups that depend on the load, the drafts depend on other
    requests and on timing. Greedy answers do not depend on the draft.
    """

    @wraps(schedule)
    def schedule_seeded(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler.dynamic_sd_lookup is None:
            # With a table, vLLM does not add padding draft tokens to a request whose prompt is
            # cached.
            size = scheduler.scheduler_config.max_num_seqs + 1
            scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * size
        for request in scheduler.running:
            params = request.sampling_params  # None for a pooling request
            if params is not None and params.seed is not None and params.temperature > 0:
                request.spec_token_ids = []
        return schedule(scheduler, *args, **kwargs)

    return schedule_seeded


def pace_scheduler(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a scheduler's `__init__` to create a `Pacer`, if the environment enables one."""
    asked = check_pace(read_settings().get("pace", "off"))

    def init_and_pace(scheduler: Any, *args: Any, **kwargs: Any) -> None:
        init(scheduler, *args, **kwargs)
        pace.install_pacer(scheduler, asked)

    return init_and_pace


def begin_steps(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a scheduler's `schedule` to report the beginning of each step to the pacer."""

    def schedule_and_begin(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(scheduler, *args, **kwargs)
        if (pacer := scheduler.redraft.pacer) is not None:
            pacer.begin(output, time.perf_counter())
        return output

    return schedule_and_begin


def end_steps(update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a scheduler's `update_from_output` to report each step's result to the pacer first."""

    def end_and_update(scheduler: Any, output: Any, result: Any) -> Any:
        if (pacer := scheduler.redraft.pacer) is not None:
            pacer.end(output, result, scheduler.requests)
        return update(scheduler, output, result)

    return end_and_update


install_runner = after_start(lambda each: pace.install(each.model_runner))
"""Wrapper around a worker's start-up that makes its runner skip the draft in steps with 0 draft
tokens.
"""


def take_drafts(call: Any) -> Any:
    """Wrap an engine core's `post_step` to fetch no draft tokens if the draft computed none.

    Afterwards, the pacer records the end of the step.
    """

    @wraps(call)
    def call_or_not(engine: Any, model_executed: bool) -> None:
        pacer = pace.find_pacer(engine)
        if pacer is None or pacer.drafts:
            call(engine, model_executed)
        if pacer is not None:
            pacer.finish(time.perf_counter())

    return call_or_not


def note_swaps(call: Any) -> Any:
    """Wrap an engine core's `collective_rpc` to notify the pacer when draft or target changes."""

    @wraps(call)  # vLLM converts a utility call's arguments according to the signature
    def call_and_note(engine: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(engine, method, *args, **kwargs)
        pacer = pace.find_pacer(engine)
        if method in pace.CHANGING and pacer is not None:
            given = kwargs.get("args") or (args[1] if len(args) > 1 else ())
            pacer.swapped(given[0] if method == "redraft_commit" and given else "")
        return result

    return call_and_note


def note_foreign(update: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a scheduler's `update_from_output` to note the requests whose drafts do not count."""

    def update_and_note(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        notes: domains.StepNotes = getattr(model_runner_output, "redraft", domains.StepNotes())
        state = find_state(scheduler, SchedulerState)
        state.foreign = notes.foreign | domains.find_padded(scheduler_output)
        state.admitted = domains.leave_out(scheduler_output, notes.admitted)
        state.load = domains.find_load(len(scheduler_output.num_scheduled_tokens))
        return update(scheduler, scheduler_output, model_runner_output)

    return update_and_note


def count_drafts(observe: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a scheduler's `make_spec_decoding_stats` to count each verified draft by domain."""

    def observe_and_count(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        # vLLM passes all arguments by name. Count here, because `observe` returns at once if
        # statistics are off.
        request_id, num_tokens = kwargs["request_id"], kwargs["num_draft_tokens"]
        num_accepted, state = kwargs["num_accepted_tokens"], find_state(scheduler, SchedulerState)
        num_admitted = num_tokens
        if state.admitted is not None:
            num_admitted = state.admitted.get(request_id, 0)
        if num_tokens and domains.is_counted(scheduler, request_id):
            arguments = scheduler.requests[request_id].sampling_params.extra_args
            domain = domains.find_domain(state.domains, arguments)
            if num_admitted:
                domains.add_draft(state.domains, domain, num_admitted, num_accepted)
            if state.admitted is not None:
                loads = state.loads.setdefault(domain, {})
                domains.add_load(loads.setdefault(state.load, [0]), num_tokens, num_accepted)
        return observe(scheduler, *args, **kwargs)

    return observe_and_count


def compare_ranks(call: Any) -> Any:
    """Wrap an engine core's `collective_rpc` so that it compares the ranks afterwards.

    If a load failed on only some ranks, all ranks reset the name of their weights.

    vLLM's own method stops at the first rank that fails, and would return the results from later
    ranks as results of the next call.
    """

    @wraps(call)  # vLLM converts a utility call's arguments according to the signature
    def call_and_compare(
        engine: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        if method not in target_watch.LOADS or engine.vllm_config.parallel_config.world_size == 1:
            return call(engine, method, timeout, args, kwargs)
        ranks = call(engine, "redraft_update_rank", timeout, (method, args, kwargs or {}))
        if len({state for _, _, state in ranks}) > 1:
            call(engine, "redraft_doubt_target")
        if errors := [error for _, error, _ in ranks if error]:
            raise RuntimeError(
                f"{method} failed on {len(errors)} of {len(ranks)} ranks: {errors[0]}"
            )
        return [result for result, _, _ in ranks]

    return call_and_compare


def pass_labels(set_version: Callable[[Any, str], None]) -> Callable[[Any, str], None]:
    """Wrap an engine core's `set_weight_version` to pass a trainer's label on to the workers."""

    def set_and_pass(engine: Any, weight_version: str) -> None:
        set_version(engine, weight_version)
        engine.collective_rpc("redraft_name_target", args=(weight_version,))

    return set_and_pass


# Rereading needs the attention groups that vLLM's method creates.
install_worker = after_start(worker.install)
"""Wrapper around a worker's start-up that makes the worker record traffic and swap drafts."""
