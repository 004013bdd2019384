"""The report of a comparison: which draft is served, where its numbers come from, and its page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from redraft.eval.counts import AcceptanceCounts
from redraft.eval.engine.measure import Measurement, Output
from redraft.eval.prompts import Prompt
from redraft.eval.report.page import TEMPLATES, write_page
from redraft.eval.serving.baseline import Baseline
from redraft.eval.serving.drafts import Candidate, Choice, choose, predict
from redraft.eval.serving.drafts_charts import build_charts
from redraft.eval.serving.rounds import PLAIN
from redraft.recipes.decide.compare_report import (
    LOADS,
    by_load,
    choose_served,
    compose_answer,
    describe_head,
    describe_speed,
    find_head,
)

Speeds = Mapping[str, tuple[float, float]]
"""Ratio to no draft at one and at eight requests, by draft."""

NGRAM = Candidate("ngram", "n-grams", {"method": "ngram"}, 2)
HEAD = Candidate(
    "eagle3-8k", "EAGLE-3, 8k ids", {"method": "eagle3", "model": "x"}, 2, 10_000_000, {"steps": 9}
)
MIX = Candidate(
    "retrieval+eagle3-8k:2",
    "counted answers before EAGLE-3",
    {"method": "eagle3", "model": "x", "prompt_lookup_max": 4},
    2,
)


def make_run(speed: float, accepted: int, *prompts: int) -> Measurement:
    """Answers of 41 tokens, each with 20 draft tokens accepted in 20 steps if `accepted`."""
    counts = AcceptanceCounts(
        num_drafts=20, num_accepted=accepted, accepted_per_position=(accepted, 0)
    )
    return Measurement(
        prompts=[Prompt(token_ids=[prompt]) for prompt in prompts],
        outputs=[Output(token_ids=[7] * 41, counts=counts if accepted else None)] * len(prompts),
        full_s=41 * len(prompts) / speed,
        full_tokens=41 * len(prompts),
        dtype="bfloat16",
        counts=counts if accepted else None,
    )


def make_results(speeds: Speeds) -> dict[Any, Any]:
    """Six rounds on a machine that gets slower and slower."""
    plain = [100.0 / number for number in range(1, 7)]
    return {
        (name, load): [
            # As in a comparison: at eight requests a round has further prompts.
            make_run(speed * ratio, 0 if name == PLAIN else 20, n, *range(100 + n, 99 + n + load))
            for n, speed in enumerate(plain)
        ]
        for name, ratios in {PLAIN: (1.0, 1.0), **speeds}.items()
        for load, ratio in zip(LOADS, ratios, strict=True)
    }


def make_choices(speeds: Speeds, *candidates: Candidate) -> list[Choice]:
    # `predict` also needs the target alone at further loads
    results = make_results(speeds)
    further = {(PLAIN, load): results[PLAIN, 8] for load in (4, 32)}
    return [predict(candidate, {**results, **further}, LOADS) for candidate in candidates]


@pytest.mark.parametrize(
    ("ngram", "mix", "served"),
    [
        ((1.3, 1.1), (0.9, 1.1), "ngram"),
        ((1.3, 1.1), (1.5, 1.1), MIX.name),
        ((1.3, 1.1), (1.5, 0.9), "ngram"),  # the mix costs at eight requests
        ((0.9, 1.1), (0.8, 1.1), PLAIN),
    ],
)
def test_the_fastest_draft_is_served_unless_it_costs_at_eight_requests(
    ngram: tuple[float, float], mix: tuple[float, float], served: str
) -> None:
    choices = make_choices({"ngram": ngram, MIX.name: mix}, NGRAM, MIX)
    assert choose_served(choose(choices, 3)) == served


def make_report(first: Speeds, last: Speeds, target: Path, **baseline: Any) -> dict[str, Any]:
    candidates = [candidate for candidate in (NGRAM, HEAD) if candidate.name in first]
    choices = make_choices(first, *candidates)
    best = choose(choices, 2)
    confirmed = dict.fromkeys(last, make_results(last))
    alone = Baseline(
        mode="compiled",
        tokens_s=70.0,
        threads=1,
        step_ms=14.0,
        limit_share=0.8,
        speeds=1,
        repeated=0,
        modes={"compiled": 70.0},
    )
    rows: list[dict[str, Any]] = [
        {"title": choice.candidate.title, "predicted": choice.speedups}
        | by_load(confirmed[choice.candidate.name], choice.candidate.name)
        for choice in best
    ]
    return {
        "target": "a target",
        "command": "redraft compare",
        "baseline": vars(replace(alone, **baseline)),
        "drafts": [choice.to_json() for choice in choices],
        "confirmed": rows,
        "plain": by_load(make_results(last), PLAIN),
        **describe_speed(str(target), choices, best, confirmed, [make_results(first)]),
        "settings": {"minutes": 2.5, "trained": 1, "rounds": 3, "confirm_rounds": 6},
        "environment": {"date": "2026-01-02", "processor": "an abacus"},
        "duration_s": 800.0,
    }


def test_the_report_names_the_draft_that_pays_as_measured_on_other_prompts(
    random_target: Path, tmp_path: Path
) -> None:
    pytest.importorskip("altair")
    last = {"ngram": (1.36, 1.1), "eagle3-8k": (0.9, 0.9)}
    report = make_report({"ngram": (1.3, 1.1), "eagle3-8k": (0.9, 0.9)}, last, random_target)
    speed = report["speed"]
    assert (speed["served"], speed["rounds"]) == ("ngram", 6)
    assert [
        speed[key] for key in ("ratio_1", "ratio_1_low", "ratio_8", "ngram_ratio_1")
    ] == pytest.approx([1.36, 1.36, 1.1, 1.36])
    assert speed["head_tau"] == pytest.approx(2.0)
    assert speed["pilot"]["ngram"]["1"]["ratio"] == pytest.approx(1.3)
    assert report["served"]["lossless"]
    json.dumps(report, allow_nan=False)
    page = write_page(tmp_path, report, TEMPLATES / "compare.html.j2", build_charts).read_text()
    assert (
        "With n-grams, this model answers <em>1.36×</em> as fast at one request, 1.10× at eight."
        in page
    )
    assert all(f'id="{name}"' in page for name in ("pays-1", "pays-8", "tokens-1", "tokens-8"))
    assert "an abacus" in page
    tie = {
        "prompt": 3,
        "position": 9,
        "token_with": 1,
        "token_without": 2,
        "logit_gap": 0.01,
        "is_tie": True,
    }
    report["served"]["ties"] = [tie]
    assert (
        "5 of 6 outputs equal"
        in write_page(tmp_path, report, TEMPLATES / "compare.html.j2", build_charts).read_text()
    )


def test_no_draft_is_served_that_is_not_proven_faster(random_target: Path, tmp_path: Path) -> None:
    report = make_report({"ngram": (1.3, 1.1)}, {"ngram": (0.98, 1.0)}, random_target)
    assert any(line.startswith("n-grams: not proven faster") for line in compose_answer(report))
    page = write_page(tmp_path, report, TEMPLATES / "compare.html.j2", build_charts).read_text()
    assert "none is proven to make this model faster" in page
    slow = make_report({"ngram": (0.9, 0.8)}, {"ngram": (0.9, 0.8)}, random_target)
    assert slow["speed"]["served"] == PLAIN
    assert (
        "No draft should make this model faster here"
        in write_page(tmp_path, slow, TEMPLATES / "compare.html.j2", build_charts).read_text()
    )


def test_a_baseline_with_two_speeds_is_named_in_every_answer(
    random_target: Path, tmp_path: Path
) -> None:
    report = make_report({"ngram": (1.3, 1.1)}, {"ngram": (1.3, 1.1)}, random_target, speeds=2)
    assert any("2 speeds" in line for line in compose_answer(report))
    assert (
        "2 speeds"
        in write_page(tmp_path, report, TEMPLATES / "compare.html.j2", build_charts).read_text()
    )


def test_a_limit_that_is_not_known_is_left_out(random_target: Path, tmp_path: Path) -> None:
    for share, is_named in ((0.8, True), (None, False)):
        report = make_report(
            {"ngram": (1.3, 1.1)}, {"ngram": (1.3, 1.1)}, random_target, limit_share=share
        )
        page = write_page(tmp_path, report, TEMPLATES / "compare.html.j2", build_charts).read_text()
        assert [
            any("80%" in line for line in compose_answer(report)),
            "80% of the limit" in page,
        ] == [is_named] * 2


def test_a_trained_head_is_reported_as_measured_beside_its_forecast(
    random_target: Path, tmp_path: Path
) -> None:
    speeds = {"ngram": (1.3, 1.1), "eagle3-8k": (0.9, 0.9)}
    choices = make_choices(speeds, NGRAM, HEAD)
    found = find_head(choices)
    assert found is not None
    assert found.candidate.name == "eagle3-8k"
    (tmp_path / "eagle3-8k").mkdir()
    trained = {
        "draft": "outputs/draft",
        "offline": {"tau_forecast": 2.2},
        "train": {"tokens_per_s": 1.0, "exported_step": 9},
        "curves": [],
        "by_domain": {"all": {"tau_forecast": 2.2, "tau": None}},
    }
    (tmp_path / "eagle3-8k" / "report.json").write_text(json.dumps(trained))
    # The last rounds have another number of draft tokens, of which half as many are accepted.
    fewer = AcceptanceCounts(num_drafts=20, num_accepted=10, accepted_per_position=(10,))
    last = make_results(speeds | {"eagle3-8k": (0.8, 0.8)})
    last["eagle3-8k", 1] = [
        replace(run, outputs=[replace(output, counts=fewer) for output in run.outputs])
        for run in last["eagle3-8k", 1]
    ]
    first, confirmed = [make_results(speeds)], {"eagle3-8k": last}
    sections = describe_head(str(random_target), tmp_path, choices, first, confirmed)
    # 20 accepted in 20 steps
    assert sections["engine"]["tau"] == 2.0
    assert sections["engine"]["forecast_error"] == pytest.approx(0.1)
    assert sections["by_domain"]["all"]["tau"] == 2.0
    assert sections["train"]["steps"] == 9
    speed = sections["engine"]["speed"]
    assert (speed["rounds"], speed["tokens_per_s_without_draft"]) == (
        6,
        pytest.approx((100 / 3 + 100 / 4) / 2),
    )
    assert (speed["speedup"], *speed["speedup_interval"]) == pytest.approx((0.8, 0.8, 0.8))
    # 41 tokens are one of the prefill, 20 steps that accept 10, and 10 steps without a draft: tau 4
    # / 3. At 0.8 times the speed such a step takes 5 / 3 steps of the target alone.
    assert speed["draft_token_cost"] == pytest.approx(2 / 3)
    assert (
        describe_head(str(random_target), tmp_path, choices, first, {})["engine"]["speed"] is None
    )
    assert describe_head(str(random_target), tmp_path, choices[:1], [], {}) == {}
