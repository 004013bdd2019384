"""The page of the online demo, in a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from chromium import browser, open_in_chromium

from redraft.eval.report.page import write_page
from redraft.recipes.demo.online import TEMPLATE, draw_charts


def make_online_report(**changes: Any) -> dict[str, Any]:
    return {
        "target": "a target",
        "domains": ["code", "prose"],
        "command": "make demo-online",
        "tau": {"a_before": 1.9, "b_before": 1.2, "b_adapted": 1.8, "b_offline": 2.0, "a_after": 1.88},
        "records_to_adapt": 300,
        "requests": 1234,
        "failed_requests": 0,
        "lossless": True,
        "swap": {"count": 2, "pause_ms_max": 200.0, "pause_ms_max_before": 300.0, "target_checksum_equal": True},
        "bad_candidate": {"rejected_by_gate": True, "reason": "reject: tau 2.0 -> 1.5"},
        "bad_draft": {"rolled_back": True, "rollback_s": 4.5, "reason": "its draft is hardly accepted"},
        "first_verdict_requests": 187,
        "gap": {
            "seeds": [0, 1, 2],
            "steps": 100,
            "num_prompts": 48,
            "records": 400,
            "tau_before": 1.2,
            "tau_learned": [1.8, 1.81, 1.79],
            "tau_ceiling": [2.0, 2.0, 2.0],
            "shares": [0.75, 0.76, 0.74],
            "share": 0.75,
            "interval": [0.66, 0.84],
        },
        "settings": [{"setting": "training.lr", "default": 1e-4, "value": 1e-3, "reason": "a small model"}],
        "capture": {
            "overhead": 0.03,
            "overhead_interval": [0.01, 0.05],
            "overhead_at_10_percent": -0.01,
            "overhead_at_10_percent_interval": [-0.03, 0.01],
            "tokens_per_s": {"0.0": [1.0], "1.0": [0.97]},
        },
        "versions": [
            {"version": "v000001", "origin": "offline on A", "records": 0, "tau": 1.2},
            {"version": "v000002", "origin": "learned", "records": 300, "tau": 1.8},
            {"version": "v000003", "origin": "offline on B", "records": 0, "tau": 2.0},
        ],
        "timeline": {
            "acceptance": [{"s": float(s), "server": f"server {s % 2}", "tau": 1.5} for s in range(-4, 20)],
            "swaps": [{"s": 9.0, "server": "server 0", "version": "v000002", "outcome": "swapped"}],
        },
        "environment": {"date": "2026-01-02", "processor": "an abacus"},
        "duration_s": 900.0,
        **changes,
    }


def write(folder: Path, report: dict[str, Any]) -> Path:
    return write_page(folder, report, TEMPLATE, draw_charts)


def words(html: str, tag: str) -> str:
    begin, end = re.search(rf"<{tag}[^>]*>", html), html.index(f"</{tag}>")
    assert begin is not None
    return " ".join(re.sub(r"<[^>]+>", "", html[begin.end() : end]).split())


def test_the_page_begins_with_what_the_draft_gained(tmp_path: Path) -> None:
    html = write(tmp_path, make_online_report()).read_text()
    assert (
        words(html, "h1") == "Traffic moved to prose, and the draft followed: from 1.20 to 1.80 tokens per target step."
    )
    assert "Learning closes 75% of that gap (95% interval 66% to 84%, over 3 seeds and 48 prompts)" in html
    assert "every token is the target's own" in html


def test_the_page_hides_no_failure(tmp_path: Path) -> None:
    bad = {"rolled_back": False, "rollback_s": None, "reason": "it stayed"}
    html = write(tmp_path, make_online_report(failed_requests=3, lossless=False, records_to_adapt=None, bad_draft=bad))
    text = html.read_text()
    assert '<span class="bad">3 failed</span>' in text
    assert "not every token is the target's own" in text
    assert '<span class="badge bad">stayed</span>' in text
    assert "70% after" not in text


@browser
@pytest.mark.parametrize("dark", [False, True])
def test_the_charts_of_the_online_demo_render_without_an_error_or_a_request(tmp_path: Path, dark: bool) -> None:
    page = write(tmp_path, make_online_report())
    flags = ["--blink-settings=preferredColorScheme=0"] if dark else []
    dom, console, asked = open_in_chromium(page, tmp_path, *flags)
    for chart in ("live", "versions"):
        drawn = re.search(rf'id="{chart}".*?</svg>', dom, re.DOTALL)
        assert drawn, f"{chart} is not drawn"
        assert len(re.findall("<path", drawn[0])) >= 2, f"{chart} is empty"
    assert console == []
    assert asked == []
