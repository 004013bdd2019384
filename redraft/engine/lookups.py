"""Proposers that look tokens up, for both model runners of vLLM (`engine.lookup_hooks`).

They search counted answers without a head, and counted answers or n-grams before a head. On V2,
they also look up n-grams without a head, because vLLM's kernel uses the last occurrence, and pads
its drafts with tokens that it did not find.

On V1, vLLM's `custom_class` would be enough for counted answers without a head. But one
implementation for both runners keeps vLLM's own statistics for n-grams.

B = requests in a step, T = tokens of the longest request.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redraft.engine import lookup_first
from redraft.engine.answer_counter import AnswerCounter
from redraft.engine.live_file import LiveConfig
from redraft.engine.lookup_first import SECTION
from redraft.engine.settings import read_settings, write_settings
from redraft.files.settings import convert, require_known
from redraft.heads.families.retrieval import (
    FOLDER,
    LIVE,
    VERIFY_COST,
    Config,
    Live,
    Retrieval,
)

KEYS = (FOLDER, VERIFY_COST)
"""Keys in a config with counted answers that vLLM must not read, but that the engine needs."""

ON_DEVICE = "ngram_gpu"
"""vLLM's method for a lookup without a head if steps are scheduled ahead."""


def read_counted(environment: Mapping[str, str] = os.environ) -> Retrieval | None:
    """Read the counted answers that `lookup_env` specifies. None if it specifies none.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: the folder contains a different kind of draft, or a number is out of range.
    """
    asked = read_settings(environment).get(SECTION, {})
    folder = asked.get(FOLDER)
    changes: dict[str, Any] = (
        {VERIFY_COST: float(asked[VERIFY_COST])} if VERIFY_COST in asked else {}
    )
    if folder == LIVE:
        live = read_live(environment)
        return Live(Config(**changes), window=live.window, shares=live.shared)
    return Retrieval.read(Path(folder), **changes) if folder else None


def read_live(environment: Mapping[str, str] = os.environ) -> LiveConfig:
    """Read the settings for live counts.

    Raises:
        ValueError: a setting is unknown or invalid.
    """
    values = read_settings(environment).get(LIVE, {})
    require_known(values, LiveConfig, f"{LIVE}: ")
    config: LiveConfig = convert(values, LiveConfig, LIVE, Path)
    return config


class Counted:
    def __init__(self, runner: Any, draft: Retrieval) -> None:
        """Store `runner`: a V1 runner, or `HostTexts`, which has the same attributes."""
        self.runner, self.draft = runner, draft
        self.counter = AnswerCounter(runner.requests, draft) if isinstance(draft, Live) else None

    def skip(self) -> None:
        """Process a step without proposing tokens."""
        if self.counter:
            self.counter.learn()

    def propose(self, scheduled: Any, sampled: Sequence[Sequence[int]], *_: Any) -> list[list[int]]:
        """Return the draft tokens for a step, in vLLM's interface."""
        self.skip()
        return self.look_up(scheduled, sampled)

    def look_up(self, scheduled: Any, sampled: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return at most the scheduled number of draft tokens for each request, [B] lists.

        `sampled` contains each request's new tokens in this step. The list is empty for a request
        whose prompt has not been read completely.
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
        # A draft must not exceed the maximum length of a request.
        most = min(most, len(ids_T) - num_tokens)
        return self.draft.propose(ids_T[:num_tokens], most, num_requests, owner)


def vllm_part(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in lookup_first.vllm_part(config).items() if key not in KEYS}


def lookup_env(
    config: Mapping[str, Any] | None, settings: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Return environment variables that make vLLM look tokens up as in the forecast.

    The plugin's other `settings` are kept.
    """
    config = config or {}
    has_ngrams = lookup_first.is_mixed(config) or (
        config.get("method") == "ngram" and FOLDER not in config
    )
    keys = KEYS + (lookup_first.KEYS if has_ngrams else ())
    asked = {key: config[key] for key in keys if key in config}
    return write_settings(settings or {}, {SECTION: asked} if asked else {})


def on_device(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config for V2 to schedule ahead while redraft looks tokens up on the GPU.

    Raises:
        ValueError: this lookup runs only on the host.
    """
    if FOLDER not in config:
        raise ValueError(
            "--async-scheduling works with counted answers and live counts, which can be looked up on "
            "the GPU, but not with n-grams and suffix decoding: remove the flag"
        )
    kept = {key: value for key, value in config.items() if key != lookup_first.UNPADDED}
    return kept | ({"method": ON_DEVICE} if kept["method"] == "ngram" else {})


def needs_plugin(config: Mapping[str, Any]) -> bool:
    """Whether the lookup in this config requires redraft's plugin."""
    return FOLDER in config or lookup_first.is_mixed(config)


def depends_on_load(config: Mapping[str, Any]) -> bool:
    """Whether a draft with this config proposes fewer tokens in steps with more requests."""
    return FOLDER in config or "head_requests" in config
