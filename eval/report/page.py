"""A training report.

report.json is for programs, and report.html for people. The page is a single file that needs no
network.

| key | content |
|---|---|
| `target`, `draft`, `command` | names of the two models, and the command line |
| `offline` | `offline_section`: acceptance before and after training; the forecast |
| `engine` | `engine_section`: the same quantities measured in a real vLLM; missing if no engine was run |
| `by_context` | the forecast by length of the context in which a block begins, and the drafts there |
| `data` | counts of the training data; `share_beyond` is the share of its labels that no row holds |
| `by_domain` | `domain_section`: forecast and engine for every domain |
| `train` | `tokens_per_s`, `peak_rss_mib` (MiB), and other counts of the training run |
| `curves` | one entry per logged step: `step` and any of `loss`, `held_out_alpha`, `held_out_alpha_greedy` |
| `environment` | `environment()`: hardware, versions, date |
| `duration_s` | duration of the whole run, in seconds |
"""

import functools
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import jinja2

from redraft.engine.lossless import Lossless
from redraft.engine.measure import Measurement
from redraft.eval.forecast.greedy import Forecast
from redraft.files.artifact import write_whole

REQUIRED = {
    "": (
        "target",
        "draft",
        "command",
        "offline",
        "by_domain",
        "by_context",
        "data",
        "train",
        "curves",
        "environment",
        "duration_s",
    ),
    "offline": (
        "alpha_greedy_before",
        "alpha_greedy_after",
        "tau_forecast",
        "forecast_per_position",
    ),
    "engine": (
        "tau",
        "acceptance_per_position",
        "forecast_error",
        "lossless",
        "ties",
        "num_prompts",
    ),
    "data": ("labels", "labels_beyond", "share_beyond"),
    "train": ("tokens_per_s", "peak_rss_mib"),
}
"""Required keys of a report and its sections. The section `engine` may be missing."""

# Folder of our templates; templates elsewhere extend page.html.j2.
TEMPLATES = Path(__file__).parent / "templates"

# Charts of a report, by element id. They need altair.
Charts = Callable[[Mapping[str, Any]], dict[str, Any]]


def offline_section(*, before: Forecast, after: Forecast) -> dict[str, Any]:
    """Forecast the untrained and the trained draft on held-out prompts."""
    section: dict[str, Any] = {}
    for name, forecast in (("before", before), ("after", after)):
        section[f"alpha_{name}"] = forecast.overall.alpha
        section[f"alpha_greedy_{name}"] = forecast.overall.alpha_greedy
        section[f"tau_{name}"] = forecast.overall.tau
    section["tau_forecast"] = section.pop("tau_after")
    section["forecast_per_position"] = after.overall.acceptance_per_position
    return section


def engine_section(
    with_draft: Measurement, lossless: Lossless, tau_forecast: float
) -> dict[str, Any]:
    """Measurements from a real engine, and the forecast error, |tau_forecast - tau| / tau."""
    counts = with_draft.counts
    assert counts is not None, "measured with a draft"
    return {
        "tau": counts.tau,
        "acceptance_per_position": counts.acceptance_per_position,
        "draft_acceptance_rate": counts.draft_acceptance_rate,
        "num_drafts": counts.num_drafts,
        "num_speculative_tokens": len(counts.accepted_per_position),
        "forecast_error": abs(tau_forecast - counts.tau) / counts.tau,
        "lossless": lossless.lossless,
        "ties": [asdict(difference) for difference in lossless.differences if difference.is_tie],
        "differences": [
            asdict(difference) for difference in lossless.differences if not difference.is_tie
        ],
        "dtype": with_draft.dtype,
        "num_prompts": len(with_draft.prompts),
        "num_output_tokens": with_draft.num_output_tokens,
        "drafts_by_prompt": [
            output.counts.num_drafts if output.counts else 0 for output in with_draft.outputs
        ],
        "accepted_by_prompt": [
            output.counts.num_accepted if output.counts else 0 for output in with_draft.outputs
        ],
    }


def domain_section(
    forecast: Forecast, with_draft: Measurement | None = None
) -> dict[str, dict[str, Any]]:
    """The forecast for every domain, and the engine's tau.

    The engine's tau is None if the engine did not measure the domain.
    """
    measured = with_draft.counts_by_domain if with_draft else {}
    return {
        name: {
            "num_prompts": summary.num_prompts,
            "alpha": summary.alpha,
            "alpha_greedy": summary.alpha_greedy,
            "tau_forecast": summary.tau,
            "tau": measured[name].tau if name in measured else None,
        }
        for name, summary in forecast.by_domain.items()
    }


def write_report(folder: Path, report: Mapping[str, Any]) -> Path:
    """Write a draft's report.json and report.html to `folder`, and return the page's path.

    Raises:
        ValueError: a key is missing, or a number is not finite.
    """
    _require_keys(report)
    return write_page(
        folder, report, TEMPLATES / "report.html.j2", charts_of("redraft.eval.report.charts")
    )


def charts_of(module: str) -> Charts:
    """Return a module's `build_charts`, imported lazily because altair is in the `report` extra."""
    return lambda report: dict(import_module(module).build_charts(report))


def write_page(
    folder: Path,
    report: Mapping[str, Any],
    template: Path,
    charts: Charts,
    *,
    extras: Mapping[str, Any] | None = None,
) -> Path:
    """Write `report` as report.json and as the page report.html.

    The page is rendered from `template` with the charts from `charts`. `extras` contains additional
    values for the template. Equal reports give equal bytes. Returns the path of the page. Without
    the `report` extra (altair, vl-convert), no page is written, and the path is report.json.

    Raises:
        ValueError: a number is not finite.
    """
    # Sort the keys, for equal bytes. NaN and infinity are not valid JSON.
    text = json.dumps(report, indent=2, sort_keys=True, allow_nan=False)
    write_whole(folder / "report.json", text + "\n")
    if not all(importlib.util.find_spec(package) for package in ("altair", "vl_convert")):
        print("report.html was not written: its charts need `pip install altair vl-convert-python`")
        return folder / "report.json"
    html = folder / "report.html"
    # Read from the JSON, so that page and file cannot differ, not even in the type of a key.
    write_whole(html, _render(json.loads(text), template, charts, extras or {}))
    return html


def _require_keys(report: Mapping[str, Any]) -> None:
    for section, keys in REQUIRED.items():
        values = report.get(section, {}) if section else report
        missing = [key for key in keys if key not in values]
        if missing and (section in report or not section):
            raise ValueError(f"the report has no {section + '.' if section else ''}{missing[0]}")


def render_text(template: Path, **values: Any) -> str:
    templates = _templates(template, autoescape=False, keep_trailing_newline=True)
    return templates.get_template(template.name).render(**values)


def _templates(template: Path, **options: Any) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([template.parent, TEMPLATES]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )


def _render(
    report: dict[str, Any], template: Path, charts: Charts, extras: Mapping[str, Any]
) -> str:
    # Templates test `if engine`, which would fail for a missing name.
    values = {
        "engine": None,
        **report,
        **extras,
        "charts": charts(report),
        "vega": _vega_javascript(),
    }
    return _templates(template, autoescape=True).get_template(template.name).render(**values)


@functools.cache
def _vega_javascript() -> str:
    """Vega, Vega-Lite and vega-embed in a single 0.9 MB script that sets `window.vegaEmbed`."""
    import vl_convert  # imported here, because it takes a second and is part of the `report` extra

    javascript: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    assert "</script" not in javascript, (
        "the script contains a tag that would end it early in a page"
    )
    return javascript
