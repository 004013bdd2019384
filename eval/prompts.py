"""What every measurement is made on: a prompt as token ids, and the domain it belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prompt:
    token_ids: list[int]
    domain: str = "all"


def domains(prompts: Iterable[Prompt]) -> list[str]:
    """The domains that occur, in alphabetical order."""
    return sorted({prompt.domain for prompt in prompts})
