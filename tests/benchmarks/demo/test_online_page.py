"""The page of the online demo, in a browser."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chromium import browser, open_in_chromium, words
from make_delays import make_delays

from benchmarks.demo import online
from benchmarks.demo.online import TEMPLATE, draw_charts
from benchmarks.demo.online_config import Config
from benchmarks.demo.online_replay import FIRST
from benchmarks.demo.online_report import estimate_speed, summarise_report
from redraft.eval.report.page import write_page


def make_outputs(**changes: Any) -> dict[str, Any]:
    return {
        "answers": 1300,
        "parted": 0,
        "widest_gap": 0.0,
        "target_alone": {"parted": 0, "widest_gap": 0.0},
        "tie_gap": 1e-3,
        "lossless": True,
        **changes,
    }


def make_online_report(**changes: Any) -> dict[str, Any]:
    return {
        "target": "a target",
        "dtype": "float32",
        "runner": "V1 model runner: chosen by vLLM",
        "domains": ["code", "prose"],
        "about": {"code": "functions to write", "prose": "questions about documentation"},
        "command": "make demo-online",
        "tau": {
            "a_before": 1.9,
            "b_before": 1.2,
            "b_adapted": 1.8,
            "b_offline": 2.0,
            "a_after": 1.88,
        },
        "records_to_adapt": 300,
        "minutes_to_adapt": 4.5,
        "delays": make_delays(),
        "requests": 1234,
        "failed_requests": 0,
        "lossless": True,
        "outputs": make_outputs(),
        "tokens_per_s": {
            "a_before": 101.25,
            "b_before": 80.5,
            "b_adapted": 110.75,
            "a_after": 99.5,
        },
        "speed": {
            **estimate_speed(
                {
                    "before": [80.0, 40.0, 82.0, 79.0, 81.0, 80.0],
                    "adapted": [104.0, 52.0, 100.0, 102.0, 104.0, 108.0],
                }
            ),
            "concurrency": 4,
            "mode": "compiled",
            "step_ms": {"before": 20.0, "adapted": 16.0},
        },
        "swap": {
            "count": 2,
            "pause_ms_max": 200.0,
            "pause_ms_max_before": 300.0,
            "target_checksum_equal": True,
        },
        "bad_candidate": {"rejected_by_gate": True, "reason": "reject: tau 2.0 -> 1.5"},
        "bad_draft": {
            "rolled_back": True,
            "rollback_s": 4.5,
            "reason": "its draft is hardly accepted",
        },
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
        "settings": [
            {"setting": "training.lr", "default": 1e-4, "value": 1e-3, "reason": "a small model"}
        ],
        "capture": {
            "overhead": 0.03,
            "overhead_interval": [0.01, 0.05],
            "overhead_at_10_percent": -0.01,
            "overhead_at_10_percent_interval": [-0.03, 0.01],
            "tokens_per_s": {"0.0": [1.0], "1.0": [0.97]},
        },
        "versions": [
            {
                "version": "v000001",
                "origin": "offline on A",
                "records": 0,
                "tau": 1.2,
                "minutes": None,
            },
            {"version": "v000002", "origin": "learned", "records": 300, "tau": 1.8, "minutes": 4.5},
            {
                "version": "v000003",
                "origin": "offline on B",
                "records": 0,
                "tau": 2.0,
                "minutes": None,
            },
        ],
        "timeline": {
            "acceptance": [
                {"s": float(s), "server": f"server {s % 2}", "tau": 1.5} for s in range(-4, 20)
            ],
            "swaps": [{"s": 9.0, "server": "server 0", "version": "v000002", "outcome": "swapped"}],
        },
        "environment": {"date": "2026-01-02", "processor": "an abacus"},
        "duration_s": 900.0,
        **changes,
    }


def write(folder: Path, report: dict[str, Any]) -> Path:
    return write_page(folder, report, TEMPLATE, draw_charts)


def test_the_page_begins_with_what_the_draft_gained(tmp_path: Path) -> None:
    html = write(tmp_path, make_online_report()).read_text()
    assert (
        words(html, "h1")
        == "Traffic moved to prose, and the draft followed: from 1.20 to 1.80 tokens per target "
        "step."
    )
    assert (
        "Learning closes 75% of that gap (95% interval 66% to 84%, over 3 seeds and 48 prompts)"
        in html
    )
    assert "every token is the target's own" in html


def test_the_page_hides_no_failure(tmp_path: Path) -> None:
    bad = {"rolled_back": False, "rollback_s": None, "reason": "it stayed"}
    html = write(
        tmp_path,
        make_online_report(failed_requests=3, lossless=False, records_to_adapt=None, bad_draft=bad),
    )
    text = html.read_text()
    assert '<span class="bad">3 failed</span>' in text
    assert "not every token is the target's own" in text
    assert '<span class="badge bad">stayed</span>' in text
    assert "70% after" not in text


def test_the_page_of_a_real_model_names_its_domains_its_speed_and_its_rounding(
    tmp_path: Path,
) -> None:
    alone = {"parted": 6, "widest_gap": 0.31}
    outputs = make_outputs(answers=80, parted=7, widest_gap=0.27, target_alone=alone, tie_gap=0.31)
    changes = {
        "target": "smollm2-135m-instruct",
        "dtype": "bfloat16",
        "domains": ["prose", "code"],
        "about": {"prose": "questions about documentation", "code": "functions to complete"},
        "outputs": outputs,
    }
    report = make_online_report(**changes)
    html = " ".join(write(tmp_path, report).read_text().split())
    assert words(html, "h1").startswith("Traffic moved to code, and the draft followed")
    assert "two servers of smollm2-135m-instruct in bfloat16 and a learner" in html
    assert "Every version on test prompts of code" in html
    assert "the adapted draft answers 1.30× as fast (95% interval 1.22× to 1.35×)" in html
    assert '<th scope="row">prose</th><td>101.2</td><td>99.5</td>' in html
    assert "its rows do not compare the drafts, the rounds above do" in html
    assert "up to ties that rounding to bfloat16 decides" in html
    assert (
        "7 of them hold a token that is not the best one there, at most 0.270 below it in logits. "
        "That is rounding:" in html
    )
    assert "prefers another token in 6 of the same answers, at most 0.310 below" in html
    assert "<dt>code</dt><dd>Functions to complete.</dd>" in html
    said = summarise_report(report)
    assert (
        "speed on code: 1.30x the tokens/s of the first draft (95% interval 1.22x to 1.35x)" in said
    )
    assert "7 of 80 answers part from the target in float32, by up to 0.27 in logits" in said

    wrong = outputs | {"widest_gap": 3.5, "lossless": False}
    html = write(tmp_path, report | {"lossless": False, "outputs": wrong}).read_text()
    assert "not every token is the target's own" in html
    assert "That is more than rounding:" in html


def test_the_first_and_the_adapted_draft_take_turns_in_being_measured_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that gets slower with every measurement, with a draft that makes it twice as fast."""
    swaps: list[str] = []

    class Swapped:
        async def swap(self, version: str) -> None:
            swaps.append(version)

    @asynccontextmanager
    async def connect(tokens: dict[str, str]) -> AsyncIterator[list[Swapped]]:
        yield [Swapped()]

    def measure(server: Any, prompts: list[int], **_: Any) -> Any:
        speed = (2.0 if swaps[-1] == "v000004" else 1.0) * 100 / len(swaps)
        return SimpleNamespace(tokens_per_s=speed, step_s=1 / speed, prompts=prompts)

    monkeypatch.setattr(online, "connected", connect)
    monkeypatch.setattr(online, "measure", measure)
    stage = SimpleNamespace(
        token="t",
        registry=SimpleNamespace(current=lambda: "v000004"),
        scene=SimpleNamespace(domains=("prose", "code")),
        test={"code": [1, 2, 3]},
    )
    server = SimpleNamespace(url="http://127.0.0.1:1", measured=lambda _: None, mode="compiled")
    speed = asyncio.run(online.compare_speed(Config(), stage, server))  # type: ignore[arg-type]
    assert swaps[:4] == ["v000004", FIRST, FIRST, "v000004"]
    assert len(speed["tokens_per_s"]["before"]) == len(speed["tokens_per_s"]["adapted"]) == 6
    low, high = speed["interval"]
    assert low < 2 < high, "the drift favours each of them in every other round"
    assert speed["concurrency"] == 4
    assert speed["step_ms"]["before"] == pytest.approx(2 * speed["step_ms"]["adapted"], rel=0.2)


@browser
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_charts_of_the_online_demo_render_without_an_error_or_a_request(
    tmp_path: Path, dark: bool
) -> None:
    page = write(tmp_path, make_online_report())
    flags = ["--blink-settings=preferredColorScheme=0"] if dark else []
    dom, console, asked = open_in_chromium(page, tmp_path, *flags)
    for chart in ("live", "versions", "minutes"):
        drawn = re.search(rf'id="{chart}".*?</svg>', dom, re.DOTALL)
        assert drawn, f"{chart} is not drawn"
        assert len(re.findall("<path", drawn[0])) >= 2, f"{chart} is empty"
    assert console == []
    assert asked == []
