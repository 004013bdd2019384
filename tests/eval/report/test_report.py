"""The training report for programs, and its page in a browser."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from chromium import browser, open_in_chromium

from redraft.engine.counts import AcceptanceCounts, describe_contexts
from redraft.engine.lossless import Difference, Lossless
from redraft.engine.machine import environment
from redraft.engine.measure import Measurement, Output
from redraft.engine.prompts import Prompt
from redraft.eval.forecast.greedy import Forecast, PromptForecast
from redraft.eval.report.page import (
    domain_section,
    engine_section,
    offline_section,
    write_report,
)


def make_forecast(accepted: int) -> Forecast:
    """Two prompts of 20 tokens, 10 blocks of 4 each.

    `accepted` tokens of every block on code, one less on prose.
    """
    return Forecast(
        per_prompt=[
            PromptForecast(
                domain=domain,
                num_output_tokens=20,
                alpha_sum=4.0 * accepted + 1,
                alpha_greedy_sum=4.0 * accepted,
                num_rows=20,
                counts=AcceptanceCounts.from_blocks([blocks] * 10, 4),
                by_context={512: AcceptanceCounts.from_blocks([blocks] * 10, 4)},
            )
            for domain, blocks in (("code", accepted), ("prose", accepted - 1))
        ]
    )


def make_measurement(accepted: int | None, full_s: float) -> Measurement:
    prompts = [Prompt(token_ids=[1], domain=domain) for domain in ("code", "prose")]
    counts = [
        AcceptanceCounts.from_blocks([accepted] * 10, 4) if accepted is not None else None
    ] * 2
    return Measurement(
        prompts=prompts,
        outputs=[Output(token_ids=[5] * 20, counts=c) for c in counts],
        full_s=full_s,
        full_tokens=40,
        dtype="float32",
        counts=AcceptanceCounts.from_blocks([accepted] * 20, 4) if accepted is not None else None,
    )


TIE = Difference(
    prompt=1, domain="prose", position=7, token_with=3, token_without=4, logit_gap=1e-6, is_tie=True
)
ERROR = Difference(
    prompt=0,
    domain="code",
    position=2,
    token_with=3,
    token_without=None,
    logit_gap=None,
    is_tie=False,
)


def make_report(*differences: Difference, **changes: Any) -> dict[str, Any]:
    after = make_forecast(3)
    with_draft = make_measurement(2, 1.0)
    return {
        "target": "a target",
        "draft": "a <b>draft</b>",
        "command": "python recipes/distill.py --loop.steps 20",
        "offline": offline_section(before=make_forecast(1), after=after),
        "engine": engine_section(
            with_draft,
            Lossless(num_prompts=2, differences=list(differences)),
            after.overall.tau,
        ),
        "by_domain": domain_section(after, with_draft),
        "by_context": describe_contexts(after.by_context),
        "data": {"labels": 900, "labels_beyond": 100, "share_beyond": 0.1},
        "train": {"tokens_per_s": 1234.5, "peak_rss_mib": 678.0},
        "curves": [
            *({"step": step, "loss": 1 / step, "alpha": [0.5]} for step in (5, 10, 15, 20)),
            *(
                {"step": step, "held_out_alpha": step / 40, "held_out_alpha_greedy": step / 50}
                for step in (10, 20)
            ),
        ],
        "environment": {"date": "2026-01-02", "processor": "an abacus"},
        "duration_s": 300.0,
        **changes,
    }


def test_the_json_holds_the_numbers_by_name(tmp_path: Path):
    write_report(tmp_path, make_report(TIE))
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["offline"]["alpha_greedy_before"] == pytest.approx(4 / 20)
    assert report["offline"]["alpha_greedy_after"] == pytest.approx(12 / 20)
    assert report["offline"]["tau_forecast"] == 3.5
    assert report["engine"]["tau"] == 3.0
    assert report["engine"]["acceptance_per_position"] == [1.0, 1.0, 0.0, 0.0]
    assert report["engine"]["forecast_error"] == pytest.approx(0.5 / 3)
    assert report["engine"]["lossless"] is True
    assert [tie["position"] for tie in report["engine"]["ties"]] == [7]
    assert report["by_domain"]["code"]["tau_forecast"] == 4.0
    assert report["by_domain"]["prose"]["tau"] == 3.0
    assert (report["train"]["tokens_per_s"], report["train"]["peak_rss_mib"]) == (1234.5, 678.0)
    assert report["duration_s"] == 300.0
    assert report["by_context"] == [
        {"from_tokens": 512, "to_tokens": 1023, "num_drafts": 20, "tau": 3.5}
    ]
    html = (tmp_path / "report.html").read_text()
    assert "512 to 1,023" in html
    assert "10.0% of all labels" in html


def test_a_difference_other_than_a_tie_is_not_lossless():
    section = make_report(TIE, ERROR)["engine"]
    assert (section["lossless"], len(section["ties"]), len(section["differences"])) == (False, 1, 1)


def test_equal_reports_give_equal_bytes(tmp_path: Path):
    report = make_report(TIE)
    write_report(tmp_path / "one", report)
    write_report(tmp_path / "other", deepcopy(dict(reversed(report.items()))))
    for name in ("report.json", "report.html"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


@pytest.mark.parametrize(
    ("section", "key"), [("engine", "tau"), ("train", "peak_rss_mib"), ("offline", "tau_forecast")]
)
def test_a_missing_key_is_named(tmp_path: Path, section: str, key: str):
    report = make_report()
    del report[section][key]
    with pytest.raises(ValueError, match=rf"\b{section}\.{key}\b"):
        write_report(tmp_path, report)


def test_a_number_that_json_cannot_hold_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="JSON"):
        write_report(tmp_path, make_report(duration_s=float("nan")))


def test_the_page_is_small_and_refers_to_nothing_outside(tmp_path: Path):
    html = write_report(tmp_path, make_report()).read_text()
    assert len(html.encode()) < 3e6
    page = html.split("<script>")[0]
    assert re.findall(r"(?:src|href)=\"(?!data:|#)[^\"]*\"|url\(|@import|https?:", page) == []
    assert "&lt;b&gt;draft" in page, "names are text, not markup"


def test_the_page_begins_with_the_answer(tmp_path: Path):
    html = write_report(tmp_path, make_report()).read_text()
    heading = re.sub(r"<[^>]+>", "", html.split("<h1>")[1].split("</h1>")[0])
    assert heading == "With this draft, each target step emits 3.00 tokens."


def test_a_page_of_wrong_outputs_warns(tmp_path: Path):
    html = write_report(tmp_path, make_report(ERROR)).read_text()
    assert "1 output differs from the target's own: do not serve this draft." in html
    assert "Where outputs differ" in html


def test_a_report_without_engine_and_baseline_has_a_complete_page(tmp_path: Path):
    report = make_report(
        offline=offline_section(before=make_forecast(1), after=make_forecast(3)),
        by_domain=domain_section(make_forecast(3)),
        curves=[],
    )
    del report["engine"]
    html = write_report(tmp_path, report).read_text()
    assert "should emit <em>3.50 tokens</em>" in html
    assert 'id="gain"' in html
    assert 'id="loss"' not in html


def test_the_environment_names_hardware_and_versions():
    values = environment()
    assert {"date", "processor", "cores", "memory", "gpu", "python", "torch"} <= set(values)
    assert all(values.values())


@browser
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_chart_renders_without_an_error_or_a_request(tmp_path: Path, dark: bool):
    page = write_report(tmp_path, make_report(TIE, ERROR))
    flags = ["--blink-settings=preferredColorScheme=0"] if dark else []
    dom, console, asked = open_in_chromium(page, tmp_path, *flags)
    for chart in ("positions", "domains", "gain", "loss", "alpha"):
        drawn = re.search(rf'id="{chart}".*?</svg>', dom, re.DOTALL)
        assert drawn, f"{chart} is not drawn"
        assert len(re.findall("<path", drawn[0])) >= 2, f"{chart} is empty"
    assert ("#6b9bff" in dom.split("<svg", 1)[1]) == dark, "the charts use the page's colours"
    assert console == []
    assert asked == []


@browser
def test_the_browser_test_sees_errors_and_requests(tmp_path: Path):
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>console.error("no")</script>')
    _, console, asked = open_in_chromium(page, tmp_path)
    assert len(console) >= 1
    assert asked == ["http://127.0.0.1:9/x.png"]
