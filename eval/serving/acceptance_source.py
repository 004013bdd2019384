"""Read acceptance by position from any report about a draft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redraft.eval.report.answer import advise_sample_method


def read_acceptance_by_position(path: Path, draft: str | None = None) -> list[float]:
    """Share of the target steps that accept a draft's tokens up to each position.

    | report of | rates |
    |---|---|
    | `redraft eval` | the forecast over all domains at the lowest temperature; without one, the engine's counts |
    | a training run | the engine's counts; without them, the forecast |
    | `redraft bench` | the counts of the benchmark |

    Raises: FileNotFoundError; ValueError if it is none of these, or has several drafts and `draft` is None.
    """
    try:
        report = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not a report: {error}") from error
    found = _by_draft(report) if isinstance(report, dict) else {}
    if not found:
        raise ValueError(
            f"{path} has no acceptance by position: give a report of `redraft eval`, `redraft bench` or a training run"
        )
    if draft is None and len(found) > 1:
        raise ValueError(f"{path} has several drafts: choose one of {', '.join(found)}")
    if draft is not None and draft not in found:
        raise ValueError(f"{path} has no draft {draft!r}, only {', '.join(found)}")
    return found[draft] if draft is not None else next(iter(found.values()))


def read_sample_method_advice(path: Path, draft: str | None = None) -> list[str]:
    """Sentences on vLLM's draft_sample_method from a report of `redraft eval`, one per temperature above 0.

    Empty for any other report, and for a draft that is greedy in any case.
    """
    report = json.loads(path.read_text())
    sampled = {about["name"]: about["is_sampled"] for about in report.get("drafts", ()) if "is_sampled" in about}
    sentences = []
    for row in report.get("results", ()):
        entry = max(row["by_num_speculative_tokens"], key=lambda e: e["num_speculative_tokens"], default=None)
        is_asked = row["domain"] is None and draft in (None, row["draft"])
        if is_asked and entry and entry.get("other_sample_method"):
            sentences.append(advise_sample_method(entry, row["temperature"], is_sampled=sampled[row["draft"]]))
    return sentences


def _by_draft(report: Mapping[str, Any]) -> dict[str, list[float]]:
    if "results" in report:
        return _read_eval(report["results"])
    if "tables" in report:
        measured = {name: entry["acceptance_per_position"] for name, entry in report["drafts"].items()}
        return {name: rates for name, rates in measured.items() if rates}
    if "offline" in report:
        engine = report.get("engine", {}).get("acceptance_per_position")
        return {str(report["draft"]): engine or report["offline"]["forecast_per_position"]}
    return {}


def _read_eval(results: list[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Rates by draft from an acceptance report: all domains, the lowest temperature, the most draft tokens."""
    whole = sorted((r for r in results if r["domain"] is None), key=lambda r: -float(r["temperature"]))
    found = {}
    for result in whole:  # the lowest temperature comes last and overwrites the others
        entry = max(result["by_num_speculative_tokens"], key=lambda e: e["num_speculative_tokens"], default=None)
        if entry and entry["forecast"]:
            found[result["draft"]] = [float(rate["value"]) for rate in entry["forecast"]["acceptance_per_position"]]
        elif entry:
            found[result["draft"]] = list(entry["engine"]["acceptance_per_position"])
    return found
