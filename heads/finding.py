"""What a check reports. Standard library only: it also tells that torch itself is broken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something that does not fit, and what to do about it; a line each."""

    problem: str
    cure: str
