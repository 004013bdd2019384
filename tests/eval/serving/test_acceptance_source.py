"""Reading acceptance from every kind of report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from redraft.engine.sampling import GREEDY, Sampling
from redraft.eval.serving.acceptance_source import list_drafts, read_acceptance


def write(folder: Path, report: Any) -> Path:
    path = folder / "report.json"
    path.write_text(json.dumps(report))
    return path


def make_result(
    draft: str, temperature: float, domain: str | None, *rates: float, forecast: bool = True
) -> Any:
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
    return {
        "draft": draft,
        "temperature": temperature,
        "domain": domain,
        "by_num_speculative_tokens": entries,
    }


NUCLEUS = Sampling(temperature=0.7, top_p=0.8)


def read(path: Path, draft: str = "", served: Sampling = GREEDY) -> list[float]:
    return read_acceptance(path, draft or list_drafts(path)[0], served).per_position


def test_an_acceptance_report_gives_its_forecast_over_all_domains_at_the_served_temperature(
    tmp_path: Path,
) -> None:
    results = [
        make_result("v1", 0.0, None, 0.6, 0.4),
        make_result("v1", 0.0, "code", 0.9, 0.8),
        make_result("v1", 0.7, None, 0.5, 0.3),
        make_result("suffix", 0.0, None, 0.4, 0.2, forecast=False),
    ]
    drafts = [{"name": "v1", "is_sampled": True}, {"name": "suffix", "is_sampled": False}]
    settings = {"top_p": 0.8, "top_k": 0, "min_p": 0.0, "max_tokens": 30}
    path = write(tmp_path, {"results": results, "drafts": drafts, "settings": settings})
    assert read(path, "v1") == [0.6, 0.4]
    assert read(path, "v1", NUCLEUS) == [0.5, 0.3]
    assert read_acceptance(path, "v1", NUCLEUS).is_sampled
    assert not read_acceptance(path, "suffix", GREEDY).is_sampled
    assert read(path, "suffix") == [0.2, 0.1], "the engine's, because nothing forecasts it"
    assert list_drafts(path) == ["v1", "suffix"]
    measured = r"temperature 0 and temperature 0\.7, top_p 0\.8,"
    for other in (
        Sampling(temperature=0.7),
        Sampling(temperature=0.7, top_p=0.8, top_k=20),
        Sampling(top_p=0.8),
    ):
        with pytest.raises(ValueError, match=rf"{measured} .* {other.words}: .*--temperature"):
            read(path, "v1", other)


def test_filters_count_for_nothing_at_temperature_0(tmp_path: Path) -> None:
    path = write(
        tmp_path, {"results": [make_result("v1", 0.0, None, 0.6)], "settings": {"top_k": 20}}
    )
    assert read(path, "v1", Sampling(temperature=0.0, top_p=0.5)) == [0.6]


def test_a_training_report_gives_the_engines_counts_or_else_the_forecast(tmp_path: Path) -> None:
    report = {
        "draft": "d",
        "offline": {"forecast_per_position": [0.5]},
        "engine": {"acceptance_per_position": [0.6]},
    }
    assert read(write(tmp_path, report)) == [0.6]
    with pytest.raises(ValueError, match=r"0.*0\.7"):
        read(write(tmp_path, report), served=NUCLEUS)
    del report["engine"]
    assert read(write(tmp_path, report)) == [0.5]


@pytest.mark.parametrize("report", [{}, {"results": []}])
def test_a_report_without_acceptance_is_refused(tmp_path: Path, report: Any) -> None:
    with pytest.raises(ValueError, match=r"\.json .*acceptance.*redraft eval"):
        read(write(tmp_path, report))


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "report.json").write_text(text)
    with pytest.raises(ValueError, match=r"report\.json .*redraft"):
        read(tmp_path / "report.json")
