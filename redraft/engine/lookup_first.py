"""A proposer for vLLM's model runners that tries a lookup first, and a head if it finds nothing.

The lookup searches for n-grams in the request, or in counted answers. vLLM has no method that
combines a lookup and a head, and `custom_class` receives no hidden states. This proposer therefore
runs before the head's own proposer in every step:

    look up ─┬─► found for all requests: the head reads the step's tokens and drafts nothing
             └─► not for some: the head drafts for all, and tokens that were looked up replace its own

B = requests in a step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from redraft.engine.answer_counter import FirstTokens
from redraft.engine.settings import read_settings
from redraft.heads.catalog import FAMILIES, find_speculative
from redraft.heads.families.retrieval import Live

# Lengths of the n-grams. vLLM sets them to 0 for a head.
LOOKUP = ("prompt_lookup_min", "prompt_lookup_max")

KEYS = (*LOOKUP, "head_tokens", "head_requests")
"""Keys of a mixed config that must reach the engine without passing through vLLM."""

UNPADDED = "disable_padded_drafter_batch"
"""Key of a speculative config. With it, the drafter receives the accepted tokens on the host."""

SECTION = "lookup"
"""Section of the plugin's settings for lookups."""


@dataclass(frozen=True, kw_only=True)
class HeadLimits:
    """Limits on the head's drafts, whose tokens cost compute and may be accepted less often."""

    tokens: int | None = None
    """Maximum number of the head's tokens per step. If None, it is the same as for the lookup."""
    requests: int | None = None
    """Maximum number of requests in a step for which the head drafts. In a larger step, only the
    lookup drafts.
    """

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 0:
                raise ValueError(f"--head-{name} is {value}: it must be at least 0")

    def choose(self, num_tokens: int, num_requests: int) -> int:
        """Return the number of tokens that the head drafts per request, at most `num_tokens`."""
        if self.requests is not None and num_requests > self.requests:
            return 0
        return num_tokens if self.tokens is None else min(num_tokens, self.tokens)


def mix(lookup: Mapping[str, Any], head: Mapping[str, Any], limits: HeadLimits) -> dict[str, Any]:
    """Return the speculative config for a head with a lookup before it.

    `lookup` and `head` are the configs for each of them alone.

    Raises:
        ValueError: this draft does not support a preceding lookup.
    """
    family = find_speculative(head)
    if family is None or not family.takes_lookup:
        titles = ", ".join(family.title for family in FAMILIES if family.takes_lookup)
        raise ValueError(
            f"a lookup can run before {titles}, but not before a draft with vLLM's method "
            f"{head.get('method')}"
        )
    if head.get("draft_sample_method") == "probabilistic":
        raise ValueError(
            "a lookup can run only before greedy drafts: remove --draft-sample-method probabilistic"
        )
    if head.get("enable_adaptive_verification"):
        raise ValueError(
            "a lookup chooses the tokens to verify by its own probabilities, so vLLM's adaptive "
            "verification cannot be combined with it: remove one of the two"
        )
    limited = {f"head_{name}": value for name, value in vars(limits).items() if value is not None}
    # With UNPADDED, vLLM passes the accepted tokens as lists on the host, which a lookup can read.
    # By default, a head receives a padded tensor on the device.
    keys = {key: value for key, value in lookup.items() if key != "method"}
    return {**head, **keys, UNPADDED: True, **limited}


def is_mixed(config: Mapping[str, Any]) -> bool:
    return bool(config.get(LOOKUP[1])) and config.get("method") not in ("ngram", "ngram_gpu")


def vllm_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a speculative config without the settings that bypass vLLM."""
    return {key: value for key, value in config.items() if not is_mixed(config) or key not in KEYS}


def read_mix(environment: Mapping[str, str] = os.environ) -> dict[str, int]:
    """Read the settings of a mixed config, by key; empty if there is no lookup before a head.

    Raises:
        ValueError: a setting is not an integer of at least 0.
    """
    asked = read_settings(environment).get(SECTION, {})
    found = {key: asked[key] for key in KEYS if key in asked}
    for key, value in found.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"{SECTION}.{key} is {value!r}: it must be an integer of at least 0")
    return found if LOOKUP[1] in found else {}


class Lookup(Protocol):
    def skip(self) -> None:
        """Process a step without proposing tokens."""

    def look_up(self, scheduled: Any, sampled: list[list[int]]) -> list[list[int]]:
        """Return at most the scheduled number of draft tokens for each request, [B] lists.

        `sampled` contains each request's new tokens in this step. The list is empty for a request
        whose prompt has not been read completely.
        """
        ...


def make_proposer(runner: Any, mixed: Mapping[str, int], answers: Lookup | None) -> LookupFirst:
    """Create the proposer for a runner, with the settings from `read_mix`.

    Without `answers`, n-grams are looked up.

    Raises:
        ValueError: this draft does not support a preceding lookup.
    """
    speculative = runner.vllm_config.speculative_config
    # Called only for its checks. The result is not used.
    mix(mixed, vars(speculative), HeadLimits())
    if not speculative.disable_padded_drafter_batch:
        raise ValueError(
            'a lookup before a head needs "disable_padded_drafter_batch": true in the speculative '
            "config"
        )
    limits = HeadLimits(tokens=mixed.get("head_tokens"), requests=mixed.get("head_requests"))
    return LookupFirst(runner, answers or Ngrams(runner, mixed), limits)


class Ngrams:
    def skip(self) -> None: ...

    def __init__(self, runner: Any, mixed: Mapping[str, int]) -> None:
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer

        # vLLM's lookup reads the lengths from here. With a head, nothing else reads them.
        speculative = runner.vllm_config.speculative_config
        speculative.prompt_lookup_min, speculative.prompt_lookup_max = (
            mixed[key] for key in LOOKUP
        )
        # This compiles the lookup here, before the first request.
        self.runner, self.ngrams = runner, NgramProposer(runner.vllm_config)

    def propose(self, scheduled: Any, sampled: list[list[int]], *_: Any) -> list[list[int]]:
        return self.look_up(scheduled, sampled)

    def look_up(self, scheduled: Any, sampled: list[list[int]]) -> list[list[int]]:
        batch = self.runner.input_batch
        texts_BT, num_tokens_B = batch.token_ids_cpu, batch.num_tokens_no_spec
        if isinstance(texts_BT, list):  # on V2, a step may contain any slots
            texts_BT = np.stack([text_T[: max(num_tokens_B)] for text_T in texts_BT])
        found: list[list[int]] = self.ngrams.propose(
            scheduled.num_spec_tokens_to_schedule, sampled, num_tokens_B, texts_BT
        )
        return found


class LookupFirst:
    """The proposer for one runner, which runs before the head's proposer.

    With live counts, the head drafts if its first token is more probable than the lookup's. The
    head's probability is measured separately where the lookup finds a match, because such text is
    easier to predict.
    """

    def __init__(self, runner: Any, lookup: Lookup, limits: HeadLimits) -> None:
        self.runner, self.lookup, self.limits = runner, lookup, limits
        draft = getattr(lookup, "draft", None)
        self.live = draft if isinstance(draft, Live) else None
        # The head is measured where it drafts, and in a sample of the matches.
        self.by_head, self.at_matches = FirstTokens(), FirstTokens()
        # Requests whose newest draft came from the lookup.
        self.looked_up: frozenset[str] = frozenset()
        self.propose_by_head: Any
        """The head's original `propose`, with the same arguments; set by the hooks."""

    def skip(self) -> None:
        """Process a step that has no proposals."""
        self.by_head.waiting, self.at_matches.waiting, self.looked_up = {}, {}, frozenset()
        self.lookup.skip()

    def swapped(self) -> None:
        """Restart the measurements after a swap of the head.

        The old head's hit rate is the initial estimate, because the new head is probably similar.
        """
        self.by_head, self.at_matches = (
            FirstTokens(hits=old.probability) for old in (self.by_head, self.at_matches)
        )

    def propose(self, scheduled: Any, sampled: list[list[int]], *rest: Any) -> list[list[int]]:
        names, most, judged = (
            self.runner.input_batch.req_ids,
            scheduled.num_spec_tokens_to_schedule,
            set[str](),
        )
        self.lookup.skip()
        if self.live:
            for head in (self.by_head, self.at_matches):
                head.note(dict(zip(names, sampled, strict=False)))
            if self.limits.choose(most, len(sampled)) and self.at_matches.is_due():
                self.live.least_first = 0.0
                judged = _list_matches(names, self.lookup.look_up(scheduled, sampled))
            self.live.least_first = self.at_matches.probability if self.at_matches.is_good else 0.0
        found = self.lookup.look_up(scheduled, sampled)
        self.looked_up = frozenset(_list_matches(names, found))
        unmatched = _list_matches(names, sampled) - self.looked_up
        is_wanted = bool(unmatched) and (
            self.live is None or self.by_head.is_good or self.by_head.is_due()
        )
        by_head = self.limits.choose(most if is_wanted else min(most, len(judged), 1), len(sampled))
        # With 0 tokens, vLLM's proposer still processes the step's tokens to fill its KV cache, and
        # returns a tensor [B, 0]. `replace` makes a copy, because vLLM uses `scheduled` again
        # afterwards.
        drafted = self.propose_by_head(
            replace(scheduled, num_spec_tokens_to_schedule=by_head), sampled, *rest
        ).tolist()
        firsts = {name: draft[0] for name, draft in zip(names, drafted, strict=False) if draft}
        self.by_head.waiting = {name: token for name, token in firsts.items() if name in unmatched}
        self.at_matches.waiting = {name: token for name, token in firsts.items() if name in judged}
        return [
            match or (draft if tokens else [])
            for tokens, match, draft in zip(sampled, found, drafted, strict=True)
        ]


def _list_matches(names: Sequence[str], found: Sequence[Sequence[int]]) -> set[str]:
    return {name for name, match in zip(names, found, strict=False) if match}
