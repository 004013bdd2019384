"""Reading acceptance from every kind of report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from redraft.eval.serving.acceptance_source import read_acceptance_by_position


def write(folder: Path, report: Any) -> Path:
    path = folder / "report.json"
    path.write_text(json.dumps(report))
    return path


def make_result(draft: str, temperature: float, domain: str | None, *rates: float, forecast: bool = True) -> Any:
    """A row of an acceptance report with 1 and len(rates) draft tokens."""

    def entry(some: tuple[float, ...]) -> dict[str, Any]:
        told = [{"value": rate, "low": rate - 0.1, "high": rate + 0.1} for rate in some]
        counted = {"acceptance_per_position": [rate / 2 for rate in some]}
        return {
            "num_speculative_tokens": len(some),
            "forecast": {"acceptance_per_position": told} if forecast else None,
            "engine": counted,
        }

    entries = [entry(rates), entry(rates[:1])]
    return {"draft": draft, "temperature": temperature, "domain": domain, "by_num_speculative_tokens": entries}


def test_an_acceptance_report_gives_its_forecast_over_all_domains_at_the_lowest_temperature(tmp_path: Path) -> None:
    results = [
        make_result("v1", 0.0, None, 0.6, 0.4),
        make_result("v1", 0.0, "code", 0.9, 0.8),
        make_result("v1", 1.0, None, 0.5, 0.3),
        make_result("suffix", 0.0, None, 0.4, 0.2, forecast=False),
    ]
    path = write(tmp_path, {"results": results})
    assert read_acceptance_by_position(path, "v1") == [0.6, 0.4]
    assert read_acceptance_by_position(path, "suffix") == [0.2, 0.1], "the engine's, because nothing forecasts it"
    with pytest.raises(ValueError, match="several drafts: choose one of v1, suffix"):
        read_acceptance_by_position(path)
    with pytest.raises(ValueError, match="no draft 'v2', only v1, suffix"):
        read_acceptance_by_position(path, "v2")


def test_a_training_report_gives_the_engines_counts_or_else_the_forecast(tmp_path: Path) -> None:
    report = {"draft": "d", "offline": {"forecast_per_position": [0.5]}, "engine": {"acceptance_per_position": [0.6]}}
    assert read_acceptance_by_position(write(tmp_path, report)) == [0.6]
    del report["engine"]
    assert read_acceptance_by_position(write(tmp_path, report)) == [0.5]


def test_a_benchmark_gives_its_counts(tmp_path: Path) -> None:
    drafts = {"a": {"acceptance_per_position": [0.5]}, "b": {"acceptance_per_position": []}}
    assert read_acceptance_by_position(write(tmp_path, {"tables": {}, "drafts": drafts})) == [0.5]


@pytest.mark.parametrize("report", [{}, [], {"results": []}, {"tables": {}, "drafts": {}}])
def test_a_report_without_acceptance_is_refused(tmp_path: Path, report: Any) -> None:
    with pytest.raises(ValueError, match="has no acceptance by position"):
        read_acceptance_by_position(write(tmp_path, report))


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(ValueError, match="is not a report"):
        read_acceptance_by_position(tmp_path / "report.json")
