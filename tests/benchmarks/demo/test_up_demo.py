"""The demo of `redraft up`.

Its estimates and page on made numbers, and a short run in the real engine.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.demo import up
from benchmarks.demo.up import Config, Pair, draw, estimate, find_gain, summarise
from redraft.eval.machine import environment
from redraft.eval.report.page import write_page


def make_pairs(*ratios: float) -> list[Pair]:
    return [
        Pair(s=60.0 * i, clients=1, auto=10 * ratio, undrafted=10, version="v1")
        for i, ratio in enumerate(ratios)
    ]


def test_the_speed_is_the_median_of_the_pairs_with_an_interval_of_six() -> None:
    six = estimate(make_pairs(1.4, 1.0, 1.2, 1.3, 1.1, 0.9))
    assert six == {"ratio": pytest.approx(1.15), "interval": pytest.approx((0.9, 1.4)), "pairs": 6}
    assert estimate(make_pairs(1.4, 1.0)) == {
        "ratio": pytest.approx(1.2),
        "interval": None,
        "pairs": 2,
    }
    assert estimate([])["ratio"] is None


def test_the_gain_begins_where_six_pairs_of_one_client_show_one() -> None:
    assert find_gain(make_pairs(1.0, 0.9, *[1.2] * 6, 0.9)) == 120
    assert find_gain(make_pairs(*[1.2] * 5, 0.9)) is None
    busy = [replace(pair, clients=8, undrafted=20) for pair in make_pairs(*[1.2] * 6)]
    both = [pair for pairs in zip(make_pairs(*[1.2] * 6), busy, strict=True) for pair in pairs]
    assert find_gain(both) == 0, "eight clients are slower, one is not"


def test_fewer_pairs_than_an_interval_needs_are_refused() -> None:
    with pytest.raises(ValueError, match="5"):
        Config(pairs=5)


def test_the_page_shows_the_speeds_and_the_curve(tmp_path: Path) -> None:
    pairs = make_pairs(1.0, 0.98, *[1.3] * 6)
    speeds = {"speed_first": estimate(pairs[:2]), "speed_last": estimate(pairs[2:])}
    clients = {"1": estimate(pairs[2:]), "8": estimate([])}
    seen = {
        "time_to_gain_s": find_gain(pairs),
        "explored_share": 0.004,
        "requests": 900,
        "failed": 0,
        "cut_by_kill": 3,
    }
    report = {
        "target": "smollm2", "dtype": "bfloat16", "command": "python -m benchmarks.demo.up", "started": "redraft up M",
        "environment": environment(), "lossless": True, "kill_s": [200.0, 230.0], "duration_s": 1.0,
        "pairs": [{**vars(pair), "ratio": pair.ratio} for pair in pairs],
        "swaps": [{"s": 130.0, "version": "v000002", "outcome": "swapped"}],
        "up": {**speeds, **seen, "speed_last_by_clients": clients, "restart_s": 30.0, "pace": "pace auto: 3 " "tokens"},
    }  # fmt: skip
    page = write_page(
        tmp_path, report, up.TEMPLATE, lambda report: {"speed": draw(report)}
    ).read_text()
    assert "1.30×" in page
    assert "v000002" in page
    assert "kill -9" in page
    assert "faster from 120 s on" in summarise(report["up"])
    assert "no gain is shown" in summarise({**report["up"], "time_to_gain_s": None})


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_one_command_serves_learns_and_continues_after_a_kill(
    tiny_target: Path, tmp_path: Path
) -> None:
    output = tmp_path / "demo"
    up.main(Config(target=tiny_target, output=output, pairs=6, learn_s=120, checked_answers=20))
    report = json.loads((output / "report.json").read_text())
    assert report["lossless"]
    assert report["up"]["failed"] == 0
    assert report["up"]["requests"] > 300
    assert math.isfinite(report["up"]["speed_last"]["ratio"])
    assert report["up"]["explored_share"] <= 0.02
    assert (output / "report.html").is_file()
