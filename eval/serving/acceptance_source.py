"""Read acceptance by position from any report about a draft, as far as it was measured with the
served sampling.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redraft.eval.engine.sampling import GREEDY, Sampling
from redraft.eval.report.answer import advise_sample_method
from redraft.eval.serving.report import read_served_sampling
from redraft.heads.files.folder import read_as, read_json

REPORTS = "give a report of `redraft eval`, `redraft bench` or a training run"
FILTERS = ("top_p", "top_k", "min_p")


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    draft: str
    per_position: list[float]  # share of the steps that accept up to each position
    sampling: Sampling
    is_sampled: bool  # drafts were sampled (`draft_sample_method: probabilistic`), not greedy
    penalties: Mapping[str, float] = field(default_factory=dict)  # beside the sampling


def read_acceptance(path: Path, draft: str | None, served: Sampling) -> Acceptance:
    """The acceptance of a draft with the served sampling.

    | report of | rates |
    |---|---|
    | `redraft eval` | the forecast over all domains; without one, the engine's counts |
    | a training run | the engine's counts at temperature 0; without them, the forecast |
    | `redraft bench` | the counts of the benchmark |

    Raises: FileNotFoundError; ValueError if it is none of these, has several drafts and `draft` is
    None, or was measured with other samplings only.
    """
    found = list(_list_acceptances(read_as(path, dict[str, Any], REPORTS)))
    if not found:
        raise ValueError(f"{path} has no acceptance by position: {REPORTS}")
    names = list(dict.fromkeys(one.draft for one in found))
    if draft is None and len(names) > 1:
        raise ValueError(f"{path} has several drafts: choose one of {', '.join(names)}")
    if draft is not None and draft not in names:
        raise ValueError(f"{path} has no draft {draft!r}, only {', '.join(names)}")
    measured = [one for one in found if draft in (None, one.draft)]
    # `at` drops the filters at temperature 0: all greedy requests fit.
    fitting = (
        one
        for one in measured
        if one.sampling.at(one.sampling.temperature) == served.at(served.temperature)
    )
    if (chosen := next(fitting, None)) is None:
        words = " and ".join(one.sampling.words for one in measured)
        raise ValueError(
            f"{path} was measured at {words}, and the served requests are sampled at "
            f"{served.words}: measure the draft "
            "so with `redraft eval`, or advise on other requests with --temperature"
        )
    return chosen


def read_sample_method_advice(path: Path, draft: str | None, temperature: float) -> list[str]:
    """Sentences on vLLM's draft_sample_method at a temperature from a report of `redraft eval`.

    Empty for any other report, and for a draft that is greedy in any case.
    """
    report = read_json(path)
    sampled = {
        about["name"]: about["is_sampled"]
        for about in report.get("drafts", ())
        if "is_sampled" in about
    }
    sentences = []
    for row in report.get("results", ()):
        entry = max(
            row["by_num_speculative_tokens"],
            key=lambda e: e["num_speculative_tokens"],
            default=None,
        )
        is_asked = (
            row["domain"] is None
            and row["temperature"] == temperature
            and draft in (None, row["draft"])
        )
        if is_asked and entry and entry.get("other_sample_method"):
            sentences.append(
                advise_sample_method(entry, row["temperature"], is_sampled=sampled[row["draft"]])
            )
    return sentences


def _list_acceptances(report: Mapping[str, Any]) -> Iterator[Acceptance]:
    if "results" in report:
        yield from _list_evaluated(report)
    elif "tables" in report:
        for name, about in report["drafts"].items():
            if rates := about["acceptance_per_position"]:
                method = about.get("config", {}).get("draft_sample_method", "greedy")
                yield Acceptance(
                    draft=name,
                    per_position=rates,
                    sampling=read_served_sampling(report),
                    is_sampled=method == "probabilistic",
                    penalties=report["settings"].get("penalties", {}),
                )
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
        )
