"""Acceptance by position out of whatever report there is of a draft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_acceptance(path: Path, draft: str | None = None) -> list[float]:
    """Share of the target steps that accept a draft's tokens up to each position, at the lowest temperature there is.

    From a report of `redraft eval` (its forecast over all domains, or the engine's counts where nothing forecasts the
    draft), of a training run (the engine's, or the forecast where it was not run), or of `redraft bench`.

    Raises: ValueError where it is none of them, or holds several drafts and none was chosen; FileNotFoundError.
    """
    try:
        report = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no report: {error}") from error
    found = _by_draft(report) if isinstance(report, dict) else {}
    if not found:
        raise ValueError(f"{path} holds no acceptance by position: give a report of `redraft eval`, bench or distill")
    if draft is None and len(found) > 1:
        raise ValueError(f"{path} holds several drafts: choose one of {', '.join(found)}")
    if draft is not None and draft not in found:
        raise ValueError(f"{path} has no draft {draft!r}: there is {', '.join(found)}")
    return found[draft] if draft is not None else next(iter(found.values()))


def _by_draft(report: Mapping[str, Any]) -> dict[str, list[float]]:
    if "results" in report:
        return _evaluated(report["results"])
    if "tables" in report:
        rates = {name: entry["acceptance_per_position"] for name, entry in report["drafts"].items()}
        return {name: some for name, some in rates.items() if some}
    if "offline" in report:
        engine = report.get("engine", {}).get("acceptance_per_position")
        return {str(report["draft"]): engine or report["offline"]["forecast_per_position"]}
    return {}


def _evaluated(results: list[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Of an acceptance report: all domains, the lowest temperature, the most draft tokens."""
    whole = sorted((r for r in results if r["domain"] is None), key=lambda r: -float(r["temperature"]))
    found = {}
    for result in whole:  # the lowest temperature comes last and stays
        entry = max(result["by_num_speculative_tokens"], key=lambda e: e["num_speculative_tokens"], default=None)
        if entry and entry["forecast"]:
            found[result["draft"]] = [float(rate["value"]) for rate in entry["forecast"]["acceptance_per_position"]]
        elif entry:
            found[result["draft"]] = list(entry["engine"]["acceptance_per_position"])
    return found
