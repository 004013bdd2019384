"""The page that compares families of heads, in a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies.heads import (
    TEMPLATE,
    Config,
    compare_with_best,
    draw_charts,
    extract_entry,
    main,
)
from redraft.eval.report.page import write_page

TITLES = {"eagle3": "EAGLE-3", "medusa": "Medusa", "mtp": "MTP"}


SEED_TAUS = [1.5, 1.51, 1.49]


def make_entry(tau: float, **changes: Any) -> dict[str, Any]:
    return {
        "title": "EAGLE-3",
        "note": "",
        "runner": "v1",
        "alpha_greedy_before": 0.1,
        "alpha_greedy_after": 0.4,
        "tau_forecast": tau * 1.01,
        "tau_engine": tau,
        "forecast_error": 0.01,
        "acceptance_per_position": [0.5, 0.3, 0.1],
        "lossless": True,
        "ties": 0,
        "num_prompts": 64,
        "train_tokens_per_s": 3000.0,
        "duration_s": 120.0,
        "drafts_by_prompt": [20, 30, 25, 40],
        "accepted_by_prompt": [
            round(20 * (tau - 1)),
            round(30 * (tau - 1)),
            round(25 * (tau - 1)),
            40 * (tau - 1),
        ],
        **changes,
    }


def make_heads_report(**changes: Any) -> dict[str, Any]:
    return {
        "target": "a target",
        "command": "make demo-heads",
        "families": {
            name: make_entry(1.5 + number / 10, title=title)
            for number, (name, title) in enumerate(TITLES.items())
        },
        "ablation": compare_with_best(
            {"forward_kl": make_entry(1.5), "cross_entropy": make_entry(1.3)}, SEED_TAUS
        ),
        "seed_taus": SEED_TAUS,
        "environment": {"date": "2026-01-02", "processor": "an abacus"},
        "duration_s": 900.0,
        **changes,
    }


def write(folder: Path, report: dict[str, Any]) -> Path:
    return write_page(folder, report, TEMPLATE, draw_charts)


def test_the_page_begins_with_the_best_head_and_the_worst_forecast(tmp_path: Path) -> None:
    html = write(tmp_path, make_heads_report()).read_text()
    heading = re.sub(r"<[^>]+>", "", html.split("<h1>")[1].split("</h1>")[0])
    assert (
        heading == "MTP emits 1.70 tokens per target step; no forecast was off by more than 1.0%."
    )
    assert "Every output is the target's own, token for token." in html
    assert (
        json.loads((tmp_path / "report.json").read_text())["families"]["eagle3"]["tau_engine"]
        == 1.5
    )


def test_a_head_that_nothing_here_serves_is_told_by_the_forecast(tmp_path: Path) -> None:
    offline = {
        "alpha_greedy_before": 0.1,
        "alpha_greedy_after": 0.4,
        "tau_before": 1.0,
        "tau_forecast": 1.9,
    }
    offline["forecast_per_position"] = [0.6, 0.3]
    alone = {
        "offline": offline,
        "train": {"tokens_per_s": 9.0, "peak_rss_mib": 1.0},
        "duration_s": 5.0,
    }
    report = make_heads_report()
    report["families"]["dspark"] = {
        **extract_entry(alone),
        "runner": "v2",
        "title": "DSpark",
        "note": "",
    }
    html = write(tmp_path, report).read_text()
    assert "MTP emits <em>1.70 tokens</em>" in html, "the best one is one that was served"
    assert re.search(
        r"DSpark</th><td>v2</td><td>0.100 → 0.400</td><td>1.900</td><td>not served</td>", html
    )
    assert "Every output is the target's own, token for token." in html
    entry = json.loads((tmp_path / "report.json").read_text())["families"]["dspark"]
    assert (entry["tau_engine"], entry["lossless"], entry["acceptance_per_position"]) == (
        None,
        None,
        [0.6, 0.3],
    )


def test_heads_that_nothing_here_serves_are_refused_alone() -> None:
    with pytest.raises(ValueError, match="dspark"):
        main(Config(heads=("dspark",)))


def test_the_page_names_a_head_that_changed_the_output(tmp_path: Path) -> None:
    report = make_heads_report()
    report["families"]["medusa"]["lossless"] = False
    html = write(tmp_path, report).read_text()
    assert "Medusa changed the target's output." in html
    assert "Every output is the target's own" not in html


def test_divergences_that_the_interval_cannot_tell_apart_are_called_equal(tmp_path: Path) -> None:
    entries = {
        "forward_kl": make_entry(1.5),
        "lk_hybrid": make_entry(1.49),
        "cross_entropy": make_entry(1.3),
    }
    found = compare_with_best(entries, SEED_TAUS)
    assert [entry["equals_best"] for entry in found.values()] == [True, True, False]
    assert found["lk_hybrid"]["difference_interval"] is not None
    alone = compare_with_best(entries, [1.5])
    assert all(entry["equals_best"] for entry in alone.values()), "one seed tells nothing apart"
    html = write(tmp_path, make_heads_report(ablation=found)).read_text()
    assert "lk hybrid (equal)" in html, "the chart says so"
    assert re.search(r'<th scope="row">lk hybrid</th>.*?equal \[', html, re.DOTALL), "and the table"


def test_a_page_without_an_ablation_leaves_out_its_chart(tmp_path: Path) -> None:
    assert 'id="ablation"' not in write(tmp_path, make_heads_report(ablation={})).read_text()
