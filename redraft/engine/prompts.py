"""The prompts for a measurement."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Prompt:
    token_ids: list[int]
    domain: str = "all"


def domains(prompts: Iterable[Prompt]) -> list[str]:
    """Return the prompts' domains, in alphabetical order."""
    return sorted({prompt.domain for prompt in prompts})
