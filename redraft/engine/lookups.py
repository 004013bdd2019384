"""Proposers that look tokens up, installed in vLLM's V1 model runner.

Counted answers, and either lookup before a head.

vLLM's `custom_class` would do for the first alone. One way for both leaves vLLM's own account of
n-grams in place. B = requests of a step, T = tokens of the longest request.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from redraft.engine import lookup_first
from redraft.engine.answer_counter import AnswerCounter
from redraft.engine.hooks import RunnerState, around, find_state, hook
from redraft.engine.lookup_first import SECTION
from redraft.engine.settings import read_settings, write_settings
from redraft.heads.families.retrieval import BEFORE_HEAD, FOLDER, VERIFY_COST, Live, Retrieval

KEYS = (FOLDER, VERIFY_COST)
"""Keys of a config with counted answers, which reach the engine past vLLM."""


def read_counted(environment: Mapping[str, str] = os.environ) -> Retrieval | None:
    """The answers that `lookup_env` names; None if it names none.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds another draft, or a number is out of bounds.
    """
    asked = read_settings(environment).get(SECTION, {})
    folder = asked.get(FOLDER)
    changes = {VERIFY_COST: float(asked[VERIFY_COST])} if VERIFY_COST in asked else {}
    return Retrieval.read(Path(folder), **changes) if folder else None


class Counted:
    def __init__(self, runner: Any, draft: Retrieval) -> None:
        self.runner, self.draft = runner, draft
        self.counter = AnswerCounter(runner, draft) if isinstance(draft, Live) else None

    def skip(self) -> None:
        """Handle a step, except its proposals."""
        if self.counter:
            self.counter.learn()

    def propose(self, scheduled: Any, sampled: Sequence[Sequence[int]], *_: Any) -> list[list[int]]:
        """The draft tokens of a step; vLLM's interface."""
        self.skip()
        return self.look_up(scheduled, sampled)

    def look_up(self, scheduled: Any, sampled: Sequence[Sequence[int]]) -> list[list[int]]:
        """At most the scheduled number of draft tokens for each request, [B] lists.

        `sampled` has the step's new tokens of each request, none of one whose prompt is not read
        whole.
        """
        most = scheduled.num_spec_tokens_to_schedule
        return [
            self._propose(row, most, len(sampled)) if tokens else []
            for row, tokens in enumerate(sampled)
        ]

    def _propose(self, row: int, most: int, num_requests: int) -> list[int]:
        batch = self.runner.input_batch
        ids_T, num_tokens = batch.token_ids_cpu[row], int(batch.num_tokens_no_spec[row])
        owner: bytes | None = None
        if self.counter:
            name = batch.req_ids[row]
            owner = self.counter.owner(name, self.runner.requests[name])
        # a draft does not reach beyond the longest request
        most = min(most, len(ids_T) - num_tokens)
        return self.draft.propose(ids_T[:num_tokens], most, num_requests, owner)


def vllm_part(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in lookup_first.vllm_part(config).items() if key not in KEYS}


def lookup_env(
    config: Mapping[str, Any] | None, settings: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Environment variables with which vLLM looks tokens up as forecast, by its first runner.

    The second takes the last occurrence. `settings` of the plugin stay beside the lookup's.
    """
    config, settings = config or {}, settings or {}
    # Any other draft runs on the model runner of vLLM's choice.
    if config.get("method") != "ngram" and not needs_plugin(config):
        return write_settings(settings)
    keys = KEYS + (lookup_first.KEYS if lookup_first.is_mixed(config) else ())
    asked = {key: config[key] for key in keys if key in config}
    lookup = {SECTION: asked} if asked else {}
    return {"VLLM_USE_V2_MODEL_RUNNER": "0", **write_settings(settings, lookup)}


def needs_plugin(config: Mapping[str, Any]) -> bool:
    """Whether only redraft's plugin looks up as this config says."""
    return FOLDER in config or lookup_first.is_mixed(config)


def depends_on_load(config: Mapping[str, Any]) -> bool:
    """Whether a draft of this config proposes less in a step of more requests."""
    return FOLDER in config or "head_requests" in config


def install_lookups(initialize: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Let workers look tokens up if the environment says so."""

    # vLLM calls this on every worker, after the target and the draft are loaded
    def initialize_and_install(wrapper: Any, kv_cache_configs: list[Any]) -> None:
        initialize(wrapper, kv_cache_configs)
        # Does nothing without these settings, or with the proposer in place.
        install(wrapper.worker.model_runner)

    return initialize_and_install


def install(runner: Any) -> None:
    """Look tokens up from now on, if the environment says so.

    Raises ValueError: a setting is wrong, no lookup goes before this draft, or this is not the V1
    model runner. vLLM does not start then.

    Raises:
        FileNotFoundError: there is no folder of the name given for counted answers.
    """
    state = find_state(runner, RunnerState)
    if state.lookup is not None:
        return
    answers, mixed = read_counted(), lookup_first.read_mix()
    if not (answers or mixed):
        return
    # V2 calls it `speculator`.
    if not hasattr(runner, "drafter"):
        raise ValueError(
            "only vLLM's V1 model runner looks tokens up as redraft does: set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )
    if answers and mixed:
        answers.least_first = BEFORE_HEAD
    alone = Counted(runner, answers) if answers else None
    state.lookup = lookup = lookup_first.make_proposer(runner, mixed, alone) if mixed else alone
    assert lookup is not None
    propose = around(lookup, "propose_by_head", lookup.propose)
    hook(runner, "lookups", propose_draft_token_ids=propose)
