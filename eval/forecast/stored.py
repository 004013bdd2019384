"""The forecast that is published with a draft.

It contains the counts expected on each held-out prompt, but not the prompts' text.

A prompt is identified by the SHA-256 of its token ids, so a draft can be published without its
users' text. At temperature 0, an engine has the same counts, so serving is compared with the forecast
prompt by prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from redraft.engine.counts import AcceptanceCounts
from redraft.engine.prompts import Prompt
from redraft.eval.forecast.greedy import Forecast


@dataclass(frozen=True, kw_only=True)
class StoredForecast:
    """A draft's forecast on the prompts held out from its training, at temperature 0."""

    num_speculative_tokens: int
    max_tokens: int
    """Maximum answer length in tokens."""
    end_ids: tuple[int, ...]
    by_prompt: Mapping[str, tuple[int, int]]
    """Number of drafts and accepted tokens, by the prompt's digest."""
    dtype: str | None = None
    """The target's dtype. None if a server does not report it."""

    @property
    def tau(self) -> float:
        counts = self.by_prompt.values()
        return 1 + sum(accepted for _, accepted in counts) / max(
            sum(drafts for drafts, _ in counts), 1
        )

    def to_json(self) -> dict[str, Any]:
        return {"tau": self.tau, **msgspec.to_builtins(self)}

    @staticmethod
    def from_json(stored: Mapping[str, Any] | None) -> StoredForecast | None:
        """Read what `to_json` returns. None if no forecast is stored.

        Raises:
            ValueError: the stored forecast is malformed.
        """
        return msgspec.convert(stored, StoredForecast) if stored else None

    def expected(self, prompts: Sequence[Sequence[int]]) -> list[AcceptanceCounts | None]:
        """Return the expected counts for each of the prompts.

        A prompt that is not in the forecast gets None.
        """
        found = [self.by_prompt.get(digest_prompt(prompt)) for prompt in prompts]
        return [c and AcceptanceCounts(num_drafts=c[0], num_accepted=c[1]) for c in found]


def store_forecast(
    forecast: Forecast,
    prompts: Sequence[Prompt],
    *,
    num_speculative_tokens: int,
    max_tokens: int,
    end_ids: Sequence[int],
    dtype: str | None = None,
) -> StoredForecast:
    """Return the part of a forecast that is stored with the draft.

    `prompts` are the prompts that were forecast, in the same order, and `dtype` is the target's
    dtype.
    """
    counts = [on_prompt.counts for on_prompt in forecast.per_prompt]
    return StoredForecast(
        num_speculative_tokens=num_speculative_tokens,
        max_tokens=max_tokens,
        end_ids=tuple(end_ids),
        dtype=dtype,
        by_prompt={
            digest_prompt(prompt.token_ids): (int(c.num_drafts), int(c.num_accepted))
            for prompt, c in zip(prompts, counts, strict=True)
        },
    )


def digest_prompt(token_ids: Sequence[int]) -> str:
    """The first 16 hex digits of the SHA-256 of token ids."""
    # Little-endian on every machine. 64 bits are enough to distinguish a few hundred prompts.
    return hashlib.sha256(np.asarray(token_ids, "<i8").tobytes()).hexdigest()[:16]
