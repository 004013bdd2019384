"""What `redraft advise` prints of a benchmark and a report, and how it refuses others."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from make_serving import ACCEPTED, SAMPLING, make_serving_report, make_sweep, step_s

from benchmarks import advice
from benchmarks.studies import presets
from redraft.eval.engine.lookup_first import HeadLimits, mix
from redraft.eval.forecast.ngram import Ngram
from redraft.eval.serving.cost import StepCosts, advise
from redraft.eval.serving.report import write_serving
from redraft.recipes.cli.run import dispatch, parse_recipe
from redraft.recipes.decide.advise import Config, main


@pytest.fixture
def serving(tmp_path: Path) -> Path:
    """serving.json of a draft and of n-grams, whose target sets no penalty."""
    report = make_serving_report()
    report["settings"]["penalties"] = {}
    write_serving(tmp_path, report)
    return tmp_path / "serving.json"


def make_costs() -> StepCosts:
    return StepCosts.from_json(make_serving_report()["drafts"]["runs/good/draft"]["costs"])


def test_it_prints_table_sentence_and_what_to_paste(
    serving: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(Config(serving=serving))
    shown = capsys.readouterr().out
    advice = advise(ACCEPTED, make_costs())
    assert advice.sentence in shown
    tau = 1 + sum(ACCEPTED[:3])
    assert f"{tau * step_s(4, 0) / step_s(4, 3):.2f}x" in shown, (
        "by hand: tau over how much longer a step takes"
    )
    best = [line.split() for line in shown.splitlines() if re.match(r"\s+(1|4|16) ", line)]
    assert [[i for i, cell in enumerate(cells) if cell.endswith("*")] for cells in best] == [
        [advice.best(b)] if advice.best(b) else [] for b in (1, 4, 16)
    ]
    flag, pasted = shlex.split(shown.splitlines()[-1])
    assert flag == "--speculative-config"
    assert json.loads(pasted) == advice.speculative_config(
        {"method": "draft_model", "model": "runs/good/draft"}
    )


def test_the_draft_that_was_measured_fastest_is_advised_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, mixed = "runs/good/draft", "ngram+runs/good/draft:2"
    speeds = {
        (head, 1): 1.3,
        (mixed, 1): 1.5,
        (head, 4): 1.1,
        (mixed, 4): 1.2,
        (head, 16): 0.9,
        (mixed, 16): 1.05,
    }
    config = mix(
        Ngram().speculative_config, {"method": "eagle3", "model": head}, HeadLimits(tokens=2)
    )
    report = make_serving_report(make_sweep(drafts=(head, mixed)), {mixed: config})
    for row in report["tables"]["tokens"]:
        if row["draft"]:
            row["speedup"] = speeds[row["draft"], row["concurrency"]] - 0.01 * abs(
                row["num_speculative_tokens"] - 3
            )
            row["speedup_interval"] = [row["speedup"] - 0.08, row["speedup"] + 0.08]
    write_serving(tmp_path, report)
    main(Config(serving=tmp_path / "serving.json", output=tmp_path / "advice.json"))
    shown = capsys.readouterr().out
    assert (
        "at 1 request: ngram+good:2 with k = 3, 1.50x as fast (95% interval 1.42x to 1.58x)"
        in shown
    )
    assert "measured fastest at 16 requests: no draft" in shown, "1.05x is not shown to be above 1"
    written = json.loads((tmp_path / "advice.json").read_text())
    assert (written["draft"], written["fastest"]) == (mixed, {"1": mixed, "4": mixed, "16": None})
    *variables, _, pasted = shlex.split(shown.splitlines()[-1])
    told = {"VLLM_USE_V2_MODEL_RUNNER": "0", "REDRAFT_NGRAM_MIN": "2", "REDRAFT_NGRAM_MAX": "4"}
    told |= {"REDRAFT_HEAD_TOKENS": "2", "VLLM_PLUGINS": "redraft"}
    assert dict(variable.split("=") for variable in variables) == told
    assert json.loads(pasted)["disable_padded_drafter_batch"] is True
    main(Config(serving=tmp_path / "serving.json", draft=head, output=tmp_path / "advice.json"))
    assert json.loads((tmp_path / "advice.json").read_text())["draft"] == head


def test_counted_answers_get_no_advice_beside_what_was_measured_fastest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "method": "ngram",
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 1,
        "retrieval": "answers",
    }
    write_serving(
        tmp_path,
        make_serving_report(make_sweep(drafts=("runs/good/draft", "answers")), {"answers": config}),
    )
    assert (
        dispatch(["advise", "--serving", str(tmp_path / "serving.json"), "--draft", "answers"]) == 2
    )
    shown, error = capsys.readouterr()
    assert shown.count("measured fastest at") == 3
    assert "expected speed-up" not in shown
    assert "answers" in error


def test_another_reports_acceptance_takes_the_place_of_the_benchmarks(
    serving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = {"draft": "d", "offline": {"forecast_per_position": [0.05, 0.01]}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    cfg = Config(
        serving=serving, acceptance=tmp_path / "report.json", output=tmp_path / "advice.json"
    )
    with pytest.raises(ValueError, match=r"report\.json .*temperature 0\b.*--temperature"):
        main(cfg)
    main(replace(cfg, temperature=0.0))
    assert (
        "speculation does not pay at any batch size up to 16: leave it off"
        in capsys.readouterr().out
    )
    written = json.loads((tmp_path / "advice.json").read_text())
    assert (written["advice"]["off_from"], written["draft"]) == (1, "runs/good/draft")


def test_acceptance_without_the_penalties_of_the_benchmark_is_refused(
    serving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`redraft eval` leaves a target's penalties out.

    Another benchmark has them, and gives its own rates.
    """
    (tmp_path / "trained.json").write_text(
        json.dumps({"draft": "d", "offline": {"forecast_per_position": [0.9]}})
    )
    for name, penalties in {"same": 1.05, "other": 1.2}.items():
        report = make_serving_report()
        report["settings"]["penalties"] = {"repetition_penalty": penalties}
        report["drafts"]["ngram"]["acceptance_per_position"] = [0.8, 0.7]
        write_serving(tmp_path / name, report)
    same, other = (tmp_path / name / "serving.json" for name in ("same", "other"))
    flags = (
        "--acceptance-draft",
        "ngram",
        "--draft",
        "ngram",
        "--output",
        str(tmp_path / "advice.json"),
    )
    for served, acceptance, status in (
        (same, other, 2),
        (serving, same, 2),
        (other, serving, 2),
        (same, same, 0),
    ):
        assert (
            dispatch(["advise", "--serving", str(served), "--acceptance", str(acceptance), *flags])
            == status
        )
    assert json.loads((tmp_path / "advice.json").read_text())["advice"][
        "acceptance_per_position"
    ] == [0.8, 0.7]
    with pytest.raises(ValueError, match=r"\bpenalties\b"):
        main(Config(serving=same, acceptance=tmp_path / "trained.json", temperature=0.0))


def test_the_draft_of_another_report_is_not_the_benchmarks(
    serving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_text(
        json.dumps({"draft": "d", "offline": {"forecast_per_position": [0.95, 0.9]}})
    )
    main(Config(serving=serving, acceptance=tmp_path / "report.json", temperature=0.0))
    _, pasted = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(pasted)["model"] == "DRAFT"


@pytest.mark.parametrize("is_sampled", [True, False])
def test_the_advice_is_of_the_forecast_that_is_served(
    serving: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_sampled: bool
) -> None:
    """`redraft eval` gives the acceptance at the benchmark's sampling, and the way of drafting to
    paste.
    """

    def row(temperature: float, *rates: float) -> dict[str, Any]:
        told = [{"value": rate} for rate in rates]
        entry = {
            "num_speculative_tokens": len(rates),
            "forecast": {"acceptance_per_position": told},
            "engine": None,
        }
        entries = [entry | {"other_sample_method": None}]
        return {
            "draft": "v2",
            "temperature": temperature,
            "domain": None,
            "by_num_speculative_tokens": entries,
        }

    filters = {name: value for name, value in asdict(SAMPLING).items() if name != "temperature"}
    report = {
        "results": [row(0.0, 0.9, 0.8), row(0.7, 0.7, 0.5)],
        "drafts": [{"name": "v2", "is_sampled": is_sampled}],
        "settings": filters,
    }
    (tmp_path / "report.json").write_text(json.dumps(report))
    main(
        Config(
            serving=serving, acceptance=tmp_path / "report.json", output=tmp_path / "advice.json"
        )
    )
    shown = capsys.readouterr().out
    assert json.loads((tmp_path / "advice.json").read_text())["advice"][
        "acceptance_per_position"
    ] == [0.7, 0.5]
    method = "sampled" if is_sampled else "greedy"
    assert f"for requests at temperature 0.7, top_p 0.8, top_k 20, with {method} drafts" in shown
    assert ("the step times are those of greedy drafts" in shown) == is_sampled
    _, pasted = shlex.split(shown.splitlines()[-1])
    assert json.loads(pasted).get("draft_sample_method") == (
        "probabilistic" if is_sampled else None
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--serving", "nowhere.json"],
            "nowhere.json does not exist: `redraft bench` measures one",
        ),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--draft", "other"], "has no draft 'other': choose one of ngram, runs/good/draft"),
        (["--temperature", "0"], "and the served requests are sampled at temperature 0: measure"),
        (["--acceptance", "pyproject.toml"], "pyproject.toml is corrupt"),
    ],
)
def test_what_cannot_be_advised_on_is_one_line_and_2(
    serving: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    given = [] if "--serving" in flags else ["--serving", str(serving)]
    assert dispatch(["advise", *given, *flags]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_benchmark_without_any_acceptance_is_refused(tmp_path: Path) -> None:
    report: dict[str, Any] = make_serving_report(make_sweep(drafts=("runs/good/draft",)))
    report["drafts"]["runs/good/draft"]["acceptance_per_position"] = []
    report["drafts"]["ngram"] = report["drafts"]["runs/good/draft"]
    write_serving(tmp_path, report)
    with pytest.raises(ValueError, match=r"serving\.json .*--acceptance"):
        main(Config(serving=tmp_path / "serving.json"))


def test_the_short_training_of_the_benchmark_takes_its_flags() -> None:
    cfg = parse_recipe(*presets.choose_recipe(["standalone", *advice.TRAINING], ""))
    assert (cfg.loop.steps, cfg.prove.engine, cfg.prove.ce_baseline) == (60, False, False)
