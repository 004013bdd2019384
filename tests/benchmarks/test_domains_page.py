"""The page of the demo with a draft per domain, in a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from chromium import browser, open_in_chromium, words

from benchmarks.studies.domains import TEMPLATE, draw_charts
from redraft.eval.report.page import write_page


def make_domains_report(**changes: Any) -> dict[str, Any]:
    found = {
        "names": {"a": "code", "b": "prose"},
        "tau_specialised": {"a": 2.0, "b": 1.8, "mean": 1.9},
        "tau_shared": {"a": 1.7, "b": 1.5, "mean": 1.6},
        "tau_shared_longer": {"a": 1.85, "b": 1.65, "mean": 1.75},
        "routed_right": 0.985,
        "num_routed": 400,
        "num_prompts": 96,
        "steps": 120,
        "router_overhead_ms_p50": 0.7,
        **changes,
    }
    return {
        "domains": found,
        "target": "a target",
        "command": "make demo-domains",
        "environment": {"date": "2026-01-02", "processor": "an abacus"},
        "duration_s": 600.0,
    }


def write(folder: Path, report: dict[str, Any]) -> Path:
    return write_page(folder, report, TEMPLATE, draw_charts)


def test_the_page_begins_with_what_specialists_gain(tmp_path: Path) -> None:
    html = write(tmp_path, make_domains_report()).read_text()
    assert (
        words(html, "h1")
        == "With a draft per domain, each target step emits 1.90 tokens; with one shared draft, "
        "1.60."
    )
    assert '<span class="good">98.5%</span> of 400 unlabelled prompts to the right server' in html
    assert "both specialists together reaches 1.75." in html
    assert "0.70 ms" in html


def test_the_page_says_so_if_nothing_was_gained(tmp_path: Path) -> None:
    equal = {"a": 1.5, "b": 1.5, "mean": 1.5}
    html = write(
        tmp_path, make_domains_report(tau_specialised=equal, tau_shared=equal, routed_right=0.8)
    ).read_text()
    assert "training longer is worth more than a draft per domain" in html
    assert "no more than the 1.50 with one shared draft" in words(html, "h1")
    assert '<span class="bad">80.0%</span>' in html


@browser
def test_the_chart_of_the_domains_renders_without_an_error_or_a_request(tmp_path: Path) -> None:
    dom, console, asked = open_in_chromium(write(tmp_path, make_domains_report()), tmp_path)
    drawn = re.search(r'id="specialised".*?</svg>', dom, re.DOTALL)
    assert drawn
    for text in (
        "shared draft",
        "draft per domain",
        "shared draft, trained twice as long",
        "code",
        "prose",
        "mean",
        "1.90",
        "1.60",
    ):
        assert f">{text}<" in drawn[0], text
    assert console == []
    assert asked == []
