"""The report of a benchmark: which draft is served, what it says of it, its schema and its page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from chromium import browser, open_in_chromium

from redraft.engine.counts import AcceptanceCounts
from redraft.engine.lossless import Difference
from redraft.engine.measure import Measurement, Output
from redraft.engine.prompts import Prompt
from redraft.engine.sampling import GREEDY
from redraft.eval.serving import bench_report
from redraft.eval.serving.baseline import Baseline
from redraft.eval.serving.bench_report import (
    BenchReport,
    LosslessReport,
    Settings,
    by_load,
    choose_served,
    compose_answer,
    describe_draft,
    make_schema,
    write_bench,
)
from redraft.eval.serving.prediction import Candidate, Choice, choose, predict
from redraft.eval.serving.rounds import PLAIN

Speeds = Mapping[str, tuple[float, float]]
"""Ratio to no draft at one and at eight requests, by draft."""

LOADS = (1, 8)
NGRAM = Candidate("ngram", "n-grams", {"method": "ngram"}, 2)
HEAD = Candidate(
    "eagle3-8k", "EAGLE-3, 8k ids", {"method": "eagle3", "model": "x"}, 2, 10_000_000, 2.2
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
        num_drafts=20,
        num_accepted=accepted,
        num_draft_tokens=40,
        accepted_per_position=(accepted, 0),
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
        ((0.9, 1.1), (0.8, 1.1), None),
    ],
)
def test_the_fastest_draft_is_served_unless_it_costs_at_eight_requests(
    ngram: tuple[float, float], mix: tuple[float, float], served: str | None
) -> None:
    choices = make_choices({"ngram": ngram, MIX.name: mix}, NGRAM, MIX)
    assert choose_served(choose(choices, 3)) == served


def make_report(first: Speeds, last: Speeds, **changes: Any) -> BenchReport:
    some = [candidate for candidate in (NGRAM, HEAD) if candidate.name in first]
    choices = make_choices(first, *some)
    confirmed = make_results(last)
    values: dict[str, Any] = {
        "version": bench_report.VERSION,
        "target": "a target",
        "command": "redraft bench",
        "baseline": make_baseline(),
        "plain": by_load(confirmed, PLAIN, LOADS),
        "drafts": [
            describe_draft(
                choice,
                by_load(confirmed, name, LOADS)
                if (name := choice.candidate.name) in last
                else None,
                "--speculative-config '{}'",
            )
            for choice in choices
        ],
        "served": choose_served(choose(choices, 2)),
        "lossless": make_lossless(),
        "settings": Settings(
            loads=LOADS,
            rounds=6,
            num_prompts=96,
            max_tokens=64,
            sampling=GREEDY,
            penalties={"repetition_penalty": 1.05},
            draft_sample_method="greedy",
            minutes=2.5,
            dtype="bfloat16",
        ),
        "environment": {"date": "2026-01-02", "processor": "an abacus"},
        "duration_s": 800.0,
    }
    return BenchReport(**{**values, **changes})


def make_baseline(**changes: Any) -> Baseline:
    values: dict[str, Any] = {
        "mode": "compiled",
        "tokens_s": 70.0,
        "threads": 1,
        "step_ms": 14.0,
        "limit_share": 0.8,
        "speeds": 1,
        "repeated": 0,
        "modes": {"compiled": 70.0},
        "not_default": "'max_model_len': -1",
    }
    return Baseline(**{**values, **changes})


def make_lossless(*differences: Difference) -> LosslessReport:
    return LosslessReport(
        num_prompts=6,
        lossless=all(difference.is_tie for difference in differences),
        differences=differences,
        num_parted_alone=2,
        widest_gap_alone=0.1,
    )


TIE = Difference(
    prompt=3,
    domain="code",
    position=9,
    token_with=1,
    token_without=2,
    logit_gap=0.01,
    is_tie=True,
)
PAYS: Speeds = {"ngram": (1.3, 1.1)}


def read_page(folder: Path, report: BenchReport) -> str:
    pytest.importorskip("altair")
    return write_bench(folder, report).read_text()


def test_the_report_names_the_draft_that_pays_as_measured_on_other_prompts(tmp_path: Path) -> None:
    last = {"ngram": (1.36, 1.1), "eagle3-8k": (0.9, 0.9)}
    report = make_report(PAYS | {"eagle3-8k": (0.9, 0.9)}, last)
    assert report.served == "ngram"
    ngram = report.drafts[0]
    assert ngram.confirmed is not None
    assert [ngram.confirmed[load].ratio for load in LOADS] == pytest.approx([1.36, 1.1])
    assert [ngram.measured[load].ratio for load in LOADS] == pytest.approx([1.3, 1.1])
    # 20 draft tokens accepted in 20 steps of 2: with all of them, 3 tokens in place of 2
    assert ngram.measured[1].ideal == pytest.approx(1.3 * 3 / 2)
    page = read_page(tmp_path, report)
    assert "With n-grams, this model answers <em>1.36×</em> as fast at 1 request," in page
    assert "<em>1.10×</em> at 8 requests." in page
    assert all(f'id="{name}"' in page for name in ("pays-1", "pays-8", "tokens-1", "tokens-8"))
    assert "an abacus" in page
    assert "forecast 2.20" in page
    assert "Every output equals the target" in page
    tied = read_page(tmp_path, replace(report, lossless=make_lossless(TIE)))
    assert "5 of 6 outputs equal" in tied
    wrong = read_page(tmp_path, replace(report, lossless=make_lossless(replace(TIE, is_tie=False))))
    assert "1 of 6 outputs differ" in wrong


def test_with_all_drafted_tokens_accepted_a_step_without_drafts_still_gives_one_token() -> None:
    """At eight requests, the server switches the head off."""
    results = make_results({"eagle3-8k": (1.3, 0.9)})
    off = Output(token_ids=[7] * 41, counts=AcceptanceCounts.zero(2))
    results["eagle3-8k", 8] = [
        replace(run, outputs=[off] * len(run.outputs)) for run in results["eagle3-8k", 8]
    ]
    one, eight = by_load(results, "eagle3-8k", LOADS).values()
    assert (one.rows_per_token, one.ideal) == pytest.approx((3 / 2, 1.3 * 3 / 2))
    assert (eight.rows_per_token, eight.ideal) == pytest.approx((1, 0.9))


def test_each_row_of_a_table_has_a_cell_for_each_column(tmp_path: Path) -> None:
    page = read_page(tmp_path, make_report(PAYS, PAYS, lossless=make_lossless(TIE)))
    tables = re.findall(r"<table>(.*?)</table>", page, re.DOTALL)
    assert len(tables) > 2
    for table in tables:
        widths = [row.count("<t") for row in re.findall(r"<tr>(.*?)</tr>", table)]
        assert len({*widths}) == 1
    # tokens/s, accepted/s, rows per token, first token, tau, step
    (plain, _) = re.findall(r'row">no draft</th>.*?</tr>', page)
    cells = re.findall(r"<td>(.*?)</td>", plain)
    assert (cells[5], cells[6], cells[8]) == ("0.0", "1.00", "1.00")


def test_the_report_follows_its_schema_and_equal_reports_give_equal_bytes(tmp_path: Path) -> None:
    schema = json.loads(Path(bench_report.__file__).with_name("bench.schema.json").read_text())
    assert schema == make_schema(), "write it again: python -m redraft.eval.serving.bench_report"
    jsonschema.Draft202012Validator.check_schema(schema)
    bytes_of = set()
    for _ in range(2):
        write_bench(tmp_path, make_report(PAYS, PAYS, lossless=make_lossless(TIE)))
        jsonschema.validate(json.loads((tmp_path / "report.json").read_text()), schema)
        bytes_of.add((tmp_path / "report.json").read_bytes())
    assert len(bytes_of) == 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"version": 2}, schema)


def test_the_answer_has_each_confirmed_draft_with_its_advice_and_what_to_append() -> None:
    report = make_report(PAYS, PAYS)
    shown = "\n".join(compose_answer(report))
    assert "n-grams: 1.30x as fast [1.30, 1.30] at 1 request, predicted 1.30x; 1.10x as" in shown
    assert "up to 2 tokens, as many as are found" in shown
    assert "serve n-grams: vllm serve a target, with\n  --speculative-config" in shown
    assert "6 of 6 outputs equal the target's own" in shown
    assert "sampled at temperature 0, repetition_penalty 1.05, with greedy drafts" in shown


def test_no_draft_is_served_that_is_not_proven_faster(tmp_path: Path) -> None:
    report = make_report(PAYS, {"ngram": (0.98, 1.0)})
    assert any(line.startswith("n-grams: not proven faster") for line in compose_answer(report))
    page = read_page(tmp_path, report)
    assert "none is proven to make this model faster" in page
    # Expected to gain at eight requests, it loses a fifth there.
    costly = make_report(PAYS, {"ngram": (1.3, 0.8)})
    shown = "\n".join(compose_answer(costly))
    assert "n-grams: not proven faster at 1 request, or slower at a larger load: serve" in shown
    assert "vllm serve" not in shown
    assert "without slowing it at a larger load" in read_page(tmp_path, costly)
    # Rounds differ by more than this loss.
    free = make_report(PAYS, {"ngram": (1.3, 0.96)})
    assert any(line.startswith("serve n-grams") for line in compose_answer(free))
    slow = make_report({"ngram": (0.9, 0.8)}, {"ngram": (0.9, 0.8)}, lossless=None)
    assert slow.served is None
    assert any("serve it without" in line for line in compose_answer(slow))
    assert "No draft should make this model faster here" in read_page(tmp_path, slow)


def test_a_baseline_with_two_speeds_is_named_in_every_answer(tmp_path: Path) -> None:
    report = make_report(PAYS, PAYS, baseline=make_baseline(speeds=2))
    assert any("2 speeds" in line for line in compose_answer(report))
    assert "2 speeds" in read_page(tmp_path, report)


def test_rounds_that_repeat_a_few_prompts_are_named_in_the_answer() -> None:
    report = make_report(PAYS, PAYS)
    for number, is_named in ((3, True), (11, True), (12, False)):
        few = replace(report, settings=replace(report.settings, num_prompts=number))
        shown = [line for line in compose_answer(few) if f"repeat {number} prompts" in line]
        assert len(shown) == is_named, "six rounds have 12 prompts at one request"


def test_a_limit_that_is_not_known_is_left_out(tmp_path: Path) -> None:
    for share, is_named in ((0.8, True), (None, False)):
        report = make_report(PAYS, PAYS, baseline=make_baseline(limit_share=share))
        page = read_page(tmp_path, report)
        assert [
            any("80%" in line for line in compose_answer(report)),
            "80% of the limit" in page,
        ] == [is_named] * 2


@browser
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_chart_renders_without_an_error_or_a_request(tmp_path: Path, dark: bool) -> None:
    pytest.importorskip("altair")
    both = PAYS | {"eagle3-8k": (1.2, 0.9)}
    page = write_bench(tmp_path, make_report(both, both))
    flags = ["--blink-settings=preferredColorScheme=0"] if dark else []
    dom, console, asked = open_in_chromium(page, tmp_path, *flags)
    for chart in ("pays-1", "pays-8", "tokens-1", "tokens-8"):
        drawn = re.search(rf'id="{chart}".*?</svg>', dom, re.DOTALL)
        assert drawn, f"{chart} is not drawn"
        assert len(re.findall("<path", drawn[0])) >= 2, f"{chart} is empty"
    assert (console, asked) == ([], [])
