"""The training config, date and forecast in a draft's provenance."""

from __future__ import annotations

import datetime
from typing import Any

from redraft.distill.data.day import choose_day
from redraft.eval.forecast.stored import StoredForecast
from redraft.heads.doctor.pair import Pair


def read_section(pair: Pair, section: str) -> dict[str, Any]:
    return dict((pair.provenance or {}).get("config", {}).get(section) or {})


def day_of_training(pair: Pair) -> datetime.date:
    """The date that the template wrote in training, so a template with today's date is no
    difference on another day. Today, if the provenance does not hold it."""
    return choose_day((pair.provenance or {}).get("date"), "the date in the draft's provenance")


def arguments_of_training(pair: Pair) -> dict[str, Any]:
    """The arguments of the chat template with which most answers of the training began; empty if not known."""
    return dict((pair.provenance or {}).get("template_arguments") or {})


def read_forecast(pair: Pair) -> StoredForecast | None:
    return StoredForecast.from_json((pair.provenance or {}).get("forecast"))
