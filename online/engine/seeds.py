"""A sampled request with a seed has the same answer each time.

Where the number of drafts varies, nothing is drafted for it.

    schedule ─► such requests lose their draft tokens ─► one draw of the request's generator a token

vLLM's rejection sampler takes a number of draws from a request's generator that depends on its
draft tokens, and lets a draft decide between them. With a constant draft that is the same each
time. `--pace`, live counts and lookups that mind the load draft what suits the other requests and
the hour. Greedy answers depend on no draft.
"""

import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from redraft.engine.lookup_first import SECTION
from redraft.engine.settings import read_settings
from redraft.heads.families.retrieval import FOLDER

VARYING = (FOLDER, "head_requests")
"""Settings with which a lookup or a head drafts less beside more requests."""


def drafts_vary(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the draft tokens of a request depend on other requests."""
    settings = read_settings(environment)
    lookup = settings.get(SECTION, {})
    return settings.get("pace", "off") != "off" or any(lookup.get(key) for key in VARYING)


def without_seeded_drafts(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a scheduler's `schedule` to give sampled requests with a seed no draft tokens."""

    @wraps(schedule)
    def schedule_seeded(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler.dynamic_sd_lookup is None:
            # With a table, vLLM invents no draft tokens for a request whose prompt is cached.
            size = scheduler.scheduler_config.max_num_seqs + 1
            scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * size
        for request in scheduler.running:
            if has_seed(request.sampling_params):
                request.spec_token_ids = []
        return schedule(scheduler, *args, **kwargs)

    return schedule_seeded


def has_seed(params: Any) -> bool:
    """Whether a request's answer is sampled with a seed."""
    return params is not None and params.seed is not None and params.temperature > 0
