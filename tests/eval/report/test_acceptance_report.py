"""The acceptance report for programs, pull requests, hubs and browsers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from chromium import browser, open_in_chromium

from redraft.engine.counts import AcceptanceCounts, ExpectedCounts
from redraft.engine.prompts import Prompt
from redraft.eval.forecast.drafts import NamedDraft
from redraft.eval.forecast.ngram import Ngram
from redraft.eval.forecast.teacher_forced import Forecastable, PromptRows
from redraft.eval.report import acceptance as acceptance_report_module
from redraft.eval.report import regression
from redraft.eval.report.acceptance import (
    SCHEMA_VERSION,
    build_acceptance_report,
    write_acceptance_report,
)
from redraft.eval.report.page import TEMPLATES, render_text
from redraft.eval.report.regression import Comparison, describe_change, read_baseline
from redraft.eval.report.results import Measured
from redraft.heads.catalog import FAMILIES

SCHEMA = json.loads(
    Path(acceptance_report_module.__file__).with_name("acceptance.schema.json").read_text()
)
FINGERPRINT = "ab" * 32
STEPS = 20
KS = (1, 3)
RATES = {"one": 0.5, "other": 0.3, "ngram": 0.1}
"""Acceptance of the first token on prose; on code it is 0.2 higher."""


def make_prompts(num_prompts: int = 40, first: int = 0) -> list[Prompt]:
    return [
        Prompt(token_ids=[first + i, 7], domain=("code", "prose")[i % 2])
        for i in range(num_prompts)
    ]


def rate_of(prompt: Prompt, draft: str, temperature: float) -> float:
    return (
        RATES[draft]
        + 0.2 * (prompt.domain == "code")
        - 0.1 * temperature
        + 0.02 * (prompt.token_ids[0] % 5)
    )


def make_rows(prompt: Prompt, draft: str, temperature: float, scale: float) -> PromptRows:
    """Position j is accepted in rate^(j + 1) of the steps; n-grams draft in half of them."""
    rate = scale * rate_of(prompt, draft, temperature)
    drafts = STEPS / 2 if draft == "ngram" else STEPS
    counts = {
        k: ExpectedCounts(
            num_steps=STEPS,
            num_drafts=drafts,
            num_accepted=sum(drafts * rate ** (j + 1) for j in range(k)),
            accepted_per_position=tuple(drafts * rate ** (j + 1) for j in range(k)),
        )
        for k in KS
    }
    return PromptRows(
        num_output_tokens=30,
        num_rows=30,
        alpha_sum=30 * rate,
        alpha_greedy_sum=27 * rate,
        counts=counts,
        by_context={1024: counts[max(KS)]},
    )


def make_measured(
    prompts: list[Prompt] | None = None, scale: float = 1.0, **changes: Any
) -> Measured:
    prompts = prompts or make_prompts()
    forecast = {
        t: [{draft: make_rows(prompt, draft, t, scale) for draft in RATES} for prompt in prompts]
        for t in (0.0, 1.0)
    }
    engine = {("one", 0.0, 3): [make_counts(rows["one"]) for rows in forecast[0.0]]}
    return Measured(
        **{
            "prompts": prompts,
            "drafts": list(RATES),
            "temperatures": (0.0, 1.0),
            "num_speculative_tokens": KS,
            "forecast": forecast,
            "engine": engine,
            **changes,
        }
    )


def make_counts(rows: PromptRows, scale: float = 1.0) -> AcceptanceCounts:
    accepted = tuple(round(scale * a) for a in rows.counts[3].accepted_per_position)
    return AcceptanceCounts(
        num_drafts=STEPS,
        num_accepted=sum(accepted),
        num_draft_tokens=3 * STEPS,
        accepted_per_position=accepted,
    )


def make_draft(name: str, **changes: Any) -> NamedDraft:
    return NamedDraft(
        **{
            "name": name,
            "source": f"drafts/{name}",
            "family": "ngram" if name == "ngram" else "standalone",
            "fingerprint": name,
            "forecast": Forecastable(fingerprint=name, steps=Ngram()),
            "speculative": {"method": "draft_model", "model": f"drafts/{name}"},
            **changes,
        }
    )


def make_report(measured: Measured | None = None, **changes: Any) -> dict[str, Any]:
    return build_acceptance_report(
        measured or make_measured(),
        **{
            "target": {"name": "a/target", "fingerprint": FINGERPRINT},
            "drafts": [make_draft(name) for name in RATES],
            "settings": {"data": "some <b>data</b>", "max_tokens": 30},
            **changes,
        },
    )


def entry(
    report: Mapping[str, Any], draft: str, domain: str | None, k: int, temperature: float = 0.0
) -> Any:
    row = next(
        r
        for r in report["results"]
        if (r["draft"], r["domain"], r["temperature"]) == (draft, domain, temperature)
    )
    return next(e for e in row["by_num_speculative_tokens"] if e["num_speculative_tokens"] == k)


def test_every_number_is_the_ratio_of_sums_over_prompts() -> None:
    report, code = make_report(), [p for p in make_prompts() if p.domain == "code"]
    rates = [rate_of(prompt, "one", 0.0) for prompt in code]
    told = entry(report, "one", "code", 3)["forecast"]
    expected = [float(np.mean([rate ** (j + 1) for rate in rates])) for j in range(3)]
    assert [rate["value"] for rate in told["acceptance_per_position"]] == pytest.approx(
        expected, abs=1e-6
    )
    assert told["tau"]["value"] == pytest.approx(1 + sum(expected), abs=1e-6)
    row = next(r for r in report["results"] if (r["draft"], r["domain"]) == ("one", "code"))
    assert row["alpha"]["value"] == pytest.approx(float(np.mean(rates)), abs=1e-6)
    assert (row["num_prompts"], row["num_output_tokens"]) == (20, 600)


def test_steps_without_a_draft_count_for_an_ngrams_tau_and_not_for_the_engines() -> None:
    told = entry(make_report(), "ngram", None, 1)["forecast"]
    assert told["drafted_share"] == 0.5
    assert told["tau"]["value"] - 1 == pytest.approx((told["tau_per_draft"] - 1) / 2, abs=1e-6)


def test_intervals_contain_the_value_and_shrink_with_the_square_root_of_the_prompts() -> None:
    few, many = (
        entry(make_report(make_measured(make_prompts(n))), "one", None, 3) for n in (10, 160)
    )
    widths = [e["forecast"]["tau"]["high"] - e["forecast"]["tau"]["low"] for e in (few, many)]
    assert (
        few["forecast"]["tau"]["low"]
        < few["forecast"]["tau"]["value"]
        < few["forecast"]["tau"]["high"]
    )
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.35)


def test_a_forecast_more_than_three_percent_off_diverges_from_the_engine() -> None:
    rows = [r["one"] for r in make_measured().forecast[0.0]]
    for scale, diverges in ((1.0, False), (0.8, True)):
        measured = make_measured(
            engine={("one", 0.0, 3): [make_counts(row, scale) for row in rows]}
        )
        engine = entry(make_report(measured), "one", None, 3)["engine"]
        assert engine["diverges"] is diverges
        assert (abs(engine["forecast_error"]) > 0.03) is diverges
    assert any(
        "differ by more than 3% for one (k = 3" in s for s in make_report(measured)["answer"]
    )


def test_above_temperature_zero_chance_alone_is_no_divergence() -> None:
    draws = np.random.default_rng(0)
    prompts = make_prompts(6)
    rows = [r["one"] for r in make_measured(prompts).forecast[1.0]]
    noisy = [
        make_counts(row, scale)
        for row, scale in zip(rows, draws.uniform(0.3, 1.5, len(rows)), strict=True)
    ]
    engine = entry(
        make_report(make_measured(prompts, engine={("one", 1.0, 3): noisy})), "one", None, 3, 1.0
    )["engine"]
    assert abs(engine["forecast_error"]) > 0.03
    assert engine["difference"]["low"] < 0 < engine["difference"]["high"]
    assert engine["diverges"] is False


def test_the_report_begins_with_the_answer() -> None:
    answer = make_report()["answer"]
    assert re.fullmatch(
        r"one emits \d\.\d\d tokens per target step on code, \d\.\d\d on prose \(k = 3 draft "
        r"tokens, temperature 0\)\.",
        answer[0],
    )
    assert answer[1].startswith("Second is other, with 1.74 against 2.34 over all domains")
    assert re.search(r"are \d\.\d\d at temperature 1\.$", answer[2])
    assert answer[3].startswith("A real vLLM agrees: the forecast was ")


@pytest.mark.parametrize(
    ("is_sampled", "other_scale", "said"),
    [
        (
            False,
            1.1,
            'put "draft_sample_method": "probabilistic" into --speculative-config (redraft serve: ',
        ),
        (True, 1.1, 'put "draft_sample_method": "greedy" into --speculative-config'),
        (False, 0.9, ": greedy is right."),
        (False, 1.0, ": no reason to change greedy."),
    ],
)
def test_the_better_way_to_draft_is_told_with_the_flag_to_set(
    is_sampled: bool, other_scale: float, said: str
) -> None:
    measured = make_measured()
    for prompt, rows in zip(measured.prompts, measured.forecast[1.0], strict=True):
        other = make_rows(prompt, "one", 1.0, other_scale).counts
        rows["one"] = replace(rows["one"], other_counts=other)
    forecast = Forecastable(fingerprint="one", steps=Ngram(), is_sampled=is_sampled)
    report = make_report(measured, drafts=[make_draft(name, forecast=forecast) for name in RATES])
    (sentence,) = [sentence for sentence in report["answer"] if "draft_sample_method" in sentence]
    assert said in sentence
    entry = next(
        r
        for r in report["results"]
        if (r["draft"], r["temperature"], r["domain"]) == ("one", 1.0, None)
    )
    told = entry["by_num_speculative_tokens"][-1]
    gain = told["other_sample_method"]["tau"] - told["forecast"]["tau"]["value"]
    assert told["other_sample_method"]["gain"]["value"] == pytest.approx(gain, abs=1e-5)
    assert f"({gain:+.2f}, 95% interval" in sentence
    validate(report)


@pytest.mark.parametrize(("scale", "is_longer"), [(1.1, True), (1.0, False)])
def test_block_verification_is_recommended_where_its_blocks_are_longer(
    scale: float, is_longer: bool
) -> None:
    measured = make_measured()
    for prompt, rows in zip(measured.prompts, measured.forecast[1.0], strict=True):
        blocks = make_rows(prompt, "one", 1.0, scale).counts
        counts = rows["one"].counts
        rows["one"] = replace(rows["one"], other_counts=counts, block_counts=blocks)
    forecast = Forecastable(fingerprint="one", steps=Ngram(), is_sampled=True)
    report = make_report(measured, drafts=[make_draft(name, forecast=forecast) for name in RATES])
    said = [
        sentence for sentence in report["answer"] if "--rejection-sample-method block" in sentence
    ]
    assert len(said) == is_longer
    assert all("At temperature 1, block verification" in sentence for sentence in said)
    validate(report)


def test_two_drafts_within_chance_cannot_be_told_apart() -> None:
    measured = make_measured(make_prompts(4))
    wobble = [0.6, 1.5, 0.7, 1.5]
    rows = [
        {**row, "other": make_rows(prompt, "one", 0.0, scale)}
        for row, prompt, scale in zip(measured.forecast[0.0], measured.prompts, wobble, strict=True)
    ]
    told = make_report(make_measured(make_prompts(4), forecast={**measured.forecast, 0.0: rows}))
    assert any(sentence.startswith("The difference from ") for sentence in told["answer"])
    assert any("There are few prompts for code (2) and prose (2)" in note for note in told["notes"])


def compare_reports(report: object, baseline: object, max_loss: float) -> Comparison:
    now, before = (msgspec.convert(one, regression.Report) for one in (report, baseline))
    return regression.compare_reports(now, before, max_loss)


def validate(report: Mapping[str, Any]) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(report)))


def test_the_report_follows_its_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    report = make_report()
    report["baseline"] = asdict(compare_reports(report, make_report(), 0.02))
    validate(report)
    for path in (("results", 0, "alpha"), ("target",), ("per_prompt", 0, "steps")):
        broken: Any = deepcopy(report)
        at = broken
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = "wrong"
        with pytest.raises(jsonschema.ValidationError):
            validate(broken)


def test_a_draft_without_a_forecast_still_gets_a_report(tmp_path: Path) -> None:
    rows = [row["one"] for row in make_measured().forecast[0.0]]
    suffix = make_draft(
        "suffix", family="suffix", source="suffix", forecast=None, speculative={"method": "suffix"}
    )
    measured = make_measured(
        drafts=["one", "suffix"], engine={("suffix", 0.0, 3): [make_counts(row) for row in rows]}
    )
    report = make_report(measured, drafts=[make_draft("one"), suffix])
    assert entry(report, "suffix", None, 3)["forecast"] is None
    validate(report)
    write_acceptance_report(tmp_path, report)


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_drafts_of_every_family_follow_the_schema(family: str) -> None:
    validate(make_report(make_measured(drafts=["one"]), drafts=[make_draft("one", family=family)]))


def test_equal_measurements_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "other"):
        report = make_report()
        write_acceptance_report(
            tmp_path / name, dict(reversed(report.items())) if name == "other" else report
        )
    for file in ("report.json", "report.html", "report.md"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


def test_a_report_compared_with_itself_lost_nothing() -> None:
    section = compare_reports(make_report(), make_report(), 0.0)
    assert section.num_fell == 0
    assert {(c.loss, c.low, c.high, c.is_paired) for c in section.changes} == {(0, 0, 0, True)}
    # drafts, temperatures, domains and all of them together, k
    assert len(section.changes) == 3 * 2 * 3 * 2


def test_falls_are_listed_by_draft_domain_and_k() -> None:
    worse = make_measured()
    for prompt, row in zip(worse.prompts, worse.forecast[0.0], strict=True):
        if prompt.domain == "code":
            row["one"] = make_rows(prompt, "one", 0.0, 0.8)
    section = compare_reports(make_report(worse), make_report(), 0.02)
    fell = {(c.draft, c.domain, c.num_speculative_tokens) for c in section.changes if c.fell}
    assert fell == {("one", domain, k) for domain in ("code", None) for k in KS}
    assert section.changes[0].fell
    assert describe_change(section.changes[0]).startswith("one on code, k = 3, temperature 0: tau ")
    assert compare_reports(make_report(worse), make_report(), 0.5).num_fell == 0


def test_different_prompts_are_not_paired_and_a_loss_within_chance_is_no_fall() -> None:
    baseline = make_report(make_measured(make_prompts(40, first=1000)))
    same = compare_reports(make_report(make_measured(scale=0.99)), baseline, 0.001)
    assert not any(change.is_paired for change in same.changes)
    assert same.num_fell == 0
    assert compare_reports(make_report(make_measured(scale=0.7)), baseline, 0.02).num_fell > 0


def test_a_single_draft_is_compared_under_any_name() -> None:
    now = make_report(make_measured(drafts=["one"]), drafts=[make_draft("one")])
    renamed = json.loads(json.dumps(now).replace('"one"', '"v11"'))
    assert {change.draft for change in compare_reports(now, renamed, 0.02).changes} == {"one"}


def test_nothing_in_common_is_refused() -> None:
    baseline = json.loads(
        json.dumps(make_report())
        .replace('"one"', '"a"')
        .replace('"other"', '"b"')
        .replace('"ngram"', '"c"')
    )
    with pytest.raises(ValueError, match="--draft NAME=FOLDER"):
        compare_reports(make_report(), baseline, 0.02)


def test_a_renamed_draft_is_compared_even_beside_ngrams() -> None:
    """A version falls under a new name.

    It has half the acceptance, and the n-gram yardstick beside it does not fall.
    """
    names = ("one", "ngram")
    drafts = [make_draft(name) for name in names]
    before = make_report(make_measured(drafts=names), drafts=drafts)
    worse = make_measured(drafts=names)
    for prompt, row in zip(worse.prompts, worse.forecast[0.0], strict=True):
        row["one"] = make_rows(prompt, "one", 0.0, 0.5)
    after = json.loads(json.dumps(make_report(worse, drafts=drafts)).replace('"one"', '"v13"'))
    section = compare_reports(after, before, 0.02)
    assert {change.draft for change in section.changes} == {"v13", "ngram"}
    assert {change.draft for change in section.changes if change.fell} == {"v13"}
    alone = make_report(make_measured(drafts=["one"]), drafts=drafts[:1])
    renamed = json.loads(json.dumps(alone).replace('"one"', '"v13"'))
    assert {change.draft for change in compare_reports(renamed, before, 0.02).changes} == {"v13"}


@pytest.mark.parametrize(
    "changed", [{"max_tokens": 31}, {"top_k": 5}, {"draft_sample_method": "probabilistic"}]
)
def test_a_baseline_with_other_settings_is_refused(changed: dict[str, Any]) -> None:
    baseline = make_report()
    (name,) = changed
    with pytest.raises(ValueError, match=name):
        compare_reports(make_report(settings={**baseline["settings"], **changed}), baseline, 0.02)


def test_a_temperature_that_the_baseline_lacks_is_refused_and_one_that_it_has_beyond_is_not() -> (
    None
):
    """A draft that is useless at temperature 1 would pass, compared at 0 alone."""
    both, one = make_report(), make_report()
    one["per_prompt"] = [row for row in one["per_prompt"] if row["temperature"] == 0]
    one["settings"] = {**one["settings"], "temperatures": [0.0]}
    with pytest.raises(ValueError, match=r"temperature 1\b"):
        compare_reports(both, one, 0.02)
    assert {change.temperature for change in compare_reports(one, both, 0.02).changes} == {0.0}


def test_a_draft_without_a_number_of_tokens_in_common_is_refused() -> None:
    baseline = make_report()
    baseline["per_prompt"] = [row for row in baseline["per_prompt"] if row["draft"] != "other"]
    with pytest.raises(ValueError, match=r"\bother\b"):
        compare_reports(make_report(), baseline, 0.02)


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "report.json"
    path.write_text(json.dumps({**make_report(), **changes}))
    return path


def test_a_baseline_is_an_acceptance_report_of_this_target_and_version(tmp_path: Path) -> None:
    assert read_baseline(written(tmp_path), FINGERPRINT, SCHEMA_VERSION).target.name == "a/target"
    older = read_baseline(
        written(tmp_path, schema_version=2, advice=[]), FINGERPRINT, SCHEMA_VERSION
    )
    assert compare_reports(make_report(), msgspec.to_builtins(older), 0.0).num_fell == 0
    for changes, message in (
        ({"target": {"name": "b", "fingerprint": "cd" * 32}}, r"\bb: "),
        ({"schema_version": SCHEMA_VERSION + 1}, rf"\b{SCHEMA_VERSION + 1}\b"),
        ({"per_prompt": None, "target": 3}, r"report\.json.*redraft eval"),
    ):
        with pytest.raises(ValueError, match=message):
            read_baseline(written(tmp_path, **changes), FINGERPRINT, SCHEMA_VERSION)
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(ValueError, match=r"report\.json.*redraft eval"):
        read_baseline(tmp_path / "report.json", FINGERPRINT, SCHEMA_VERSION)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        read_baseline(tmp_path / "nowhere.json", FINGERPRINT, SCHEMA_VERSION)


def test_the_markdown_has_a_row_for_every_draft_and_domain() -> None:
    report = make_report()
    worse = make_report(make_measured(scale=0.8))
    report["baseline"] = asdict(compare_reports(worse, make_report(), 0.02))
    text = render_text(TEMPLATES / "acceptance.md.j2", **report)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert [len(table.splitlines()) - 2 for table in tables] == [9, 9, 36]
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1, (
            "rows with different numbers of columns"
        )
    assert text.startswith("### one emits ")
    assert "fell by more than 2.0%" in text


def test_the_page_is_small_and_refers_to_nothing_outside(tmp_path: Path) -> None:
    html = write_acceptance_report(tmp_path, make_report()).read_text()
    assert len(html.encode()) < 3e6
    page = html.split("<script>")[0]
    assert re.findall(r"(?:src|href)=\"(?!data:|#)[^\"]*\"|url\(|@import|https?:", page) == []
    assert "some &lt;b&gt;data" in page, "names are text, not markup"
    heading = re.sub(r"<[^>]+>", "", html.split("<h1>")[1].split("</h1>")[0])
    assert heading == make_report()["answer"][0]


@browser
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_chart_of_the_acceptance_report_renders_without_an_error_or_a_request(
    tmp_path: Path, dark: bool
) -> None:
    report = make_report()
    worse = make_report(make_measured(scale=0.8))
    report["baseline"] = asdict(compare_reports(worse, make_report(), 0.02))
    page = write_acceptance_report(tmp_path, report)
    dom, console, asked = open_in_chromium(
        page, tmp_path, *(["--blink-settings=preferredColorScheme=0"] if dark else [])
    )
    for chart in ("taus", "by-k", "accepted", "temperatures", "engine"):
        drawn = re.search(rf'id="{chart}".*?</svg>', dom, re.DOTALL)
        assert drawn, f"{chart} is not drawn"
        assert len(re.findall("<path|<line", drawn[0])) >= 3, f"{chart} is empty"
        assert "NaN" not in drawn[0], f"{chart} draws a NaN"
    assert console == []
    assert asked == []


@browser
def test_a_report_of_one_draft_and_one_number_of_tokens_leaves_out_empty_charts(
    tmp_path: Path,
) -> None:
    measured = make_measured(
        drafts=["one"], temperatures=(0.0,), num_speculative_tokens=(3,), engine={}
    )
    page = write_acceptance_report(tmp_path, make_report(measured, drafts=[make_draft("one")]))
    dom, console, _ = open_in_chromium(page, tmp_path)
    assert re.search(r'id="taus".*?</svg>', dom, re.DOTALL)
    assert 'id="by-k"' not in dom
    assert 'id="engine"' not in dom
    assert console == []
