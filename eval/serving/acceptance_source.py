"""Acceptance by position, from any report about a draft.

It must have been measured with the served sampling.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redraft.engine.sampling import GREEDY, Sampling
from redraft.eval.serving.cost import AdaptivePoint
from redraft.files.folder import read_as

REPORTS = "give a report of `redraft eval` or of a training run"
FILTERS = ("top_p", "top_k", "min_p")


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    draft: str
    per_position: list[float]
    """Fraction of the steps that accept all tokens up to each position."""
    sampling: Sampling
    is_sampled: bool
    """Whether drafts were sampled (`draft_sample_method: probabilistic`) instead of greedy."""
    curve: Sequence[AdaptivePoint] = ()
    """Results with adaptive verification. Empty if the report has none."""


def read_acceptance(path: Path, draft: str, served: Sampling) -> Acceptance:
    """Read the acceptance of one of the report's drafts with the served sampling.

    | report of | rates |
    |---|---|
    | `redraft eval` | the forecast over all domains, otherwise the engine's counts |
    | a training run | the engine's counts at temperature 0, otherwise the forecast |

    Raises:
        FileNotFoundError: the report does not exist.
        ValueError: the file is neither kind of report, or was measured only with different
            sampling.
    """
    found = _list_acceptances(read_as(path, dict[str, Any], REPORTS))
    measured = [one for one in found if one.draft == draft]
    # `at` drops the filters at temperature 0, because they do not change greedy requests.
    fitting = (
        one
        for one in measured
        if one.sampling.at(one.sampling.temperature) == served.at(served.temperature)
    )
    if (chosen := next(fitting, None)) is None:
        words = " and ".join(one.sampling.words for one in measured)
        raise ValueError(
            f"{path} was measured at {words}, but the served requests are sampled at "
            f"{served.words}: measure the draft with this sampling (`redraft eval`), or "
            f"benchmark different requests with --temperature"
        )
    return chosen


def require_target(path: Path, fingerprint: str) -> None:
    """Raise ValueError if a report names a target with a different fingerprint.

    The report of a training run does not contain a fingerprint.
    """
    target = read_as(path, dict[str, Any], REPORTS).get("target")
    if isinstance(target, dict) and target.get("fingerprint", fingerprint) != fingerprint:
        raise ValueError(
            f"{path} was measured with a different target, {target.get('name')}: measure the draft "
            "with this target (`redraft eval`)"
        )


def list_drafts(path: Path) -> list[str]:
    """The drafts whose acceptance a report contains.

    Raises the same errors as `read_acceptance`.
    """
    found = _list_acceptances(read_as(path, dict[str, Any], REPORTS))
    if names := list(dict.fromkeys(one.draft for one in found)):
        return names
    raise ValueError(f"{path} has no acceptance by position: {REPORTS}")


def _list_acceptances(report: Mapping[str, Any]) -> Iterator[Acceptance]:
    if "results" in report:
        yield from _list_evaluated(report)
    elif "offline" in report:
        engine = report.get("engine", {}).get("acceptance_per_position")
        rates = engine or report["offline"]["forecast_per_position"]
        yield Acceptance(
            draft=str(report["draft"]), per_position=rates, sampling=GREEDY, is_sampled=False
        )


def _list_evaluated(report: Mapping[str, Any]) -> Iterator[Acceptance]:
    # A report without filters in its settings sampled from the whole vocabulary.
    filters = {name: value for name, value in report.get("settings", {}).items() if name in FILTERS}
    sampled = {about["name"]: about["is_sampled"] for about in report.get("drafts", ())}
    for row in report["results"]:
        entry = max(
            row["by_num_speculative_tokens"],
            key=lambda e: e["num_speculative_tokens"],
            default=None,
        )
        if row["domain"] is not None or not entry:
            continue
        if entry["forecast"]:
            rates = [float(rate["value"]) for rate in entry["forecast"]["acceptance_per_position"]]
        else:
            rates = list(entry["engine"]["acceptance_per_position"])
        yield Acceptance(
            draft=row["draft"],
            per_position=rates,
            sampling=Sampling(temperature=row["temperature"], **filters),
            is_sampled=sampled.get(row["draft"], False),
            curve=[AdaptivePoint(**point) for point in entry.get("adaptive", ())],
        )
