"""The training config and date in a draft's provenance."""

from __future__ import annotations

import datetime
from typing import Any

from redraft.heads.doctor.pair import Pair


def read_section(pair: Pair, section: str) -> dict[str, Any]:
    """A section of the training config; empty if it is not known."""
    return dict((pair.provenance or {}).get("config", {}).get(section) or {})


def day_of_training(pair: Pair) -> datetime.date | None:
    """The date that the template wrote in training, so a template with today's date is no difference on another day."""
    recorded = (pair.provenance or {}).get("date")
    return datetime.date.fromisoformat(recorded) if recorded else None
