"""The charts of a serving benchmark as Vega-Lite specifications, in the colours of the page."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from redraft.eval.engine.draft_source import shorten_name
from redraft.eval.report.charts import (
    Rows,
    Spec,
    bars_and_diamonds,
    color,
    numbers,
    panel,
    tips,
    to_spec,
)

WITH, WITHOUT, IDEAL = "with the draft", "no draft", "every token accepted"


def build_charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """Specifications by element id on the page. A chart without numbers is left out."""
    tables = report["tables"]
    first = report["settings"]["draft"]
    grid = [row for row in tables.get("tokens", ()) if row["draft"] in (None, first)]
    advice = report["drafts"][first]["advice"]
    charts = {
        "by-draft": _speedups(tables.get("draft", ())),
        "by-tokens": _by_concurrency(grid),
        "ideal": _ideal(grid),
        "advice": _advice(advice) if advice else None,
    }
    return {name: to_spec(chart) for name, chart in charts.items() if chart is not None}


def _speedups(entries: Rows) -> alt.LayerChart | None:
    """A bar for the speed-up of each draft, and a diamond for the speed-up if every token were
    accepted.
    """
    drafted = [row for row in entries if row["draft"] and row["speedup"] is not None]
    if not drafted:
        return None
    rows = [
        {"label": shorten_name(r["draft"]), "value": r["speedup"], "series": "measured"}
        for r in drafted
    ]
    rows += [
        {"label": shorten_name(r["draft"]), "value": r["speedup_ideal"], "series": IDEAL}
        for r in drafted
        if r["speedup_ideal"]
    ]
    base = panel(rows).encode(
        x=alt.X("label:N", title=None, sort=None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y(
            "value:Q", title="speed-up", scale=alt.Scale(domainMin=0), axis=alt.Axis(tickCount=5)
        ),
        color=color(["measured", IDEAL], columns=3),
        tooltip=tips(("label:N", "bar"), ("series:N", "source"), ("value:Q", "speed-up", ".2f")),
    )
    return bars_and_diamonds(base, "measured", IDEAL) + _break_even()


def _break_even() -> alt.Chart:
    return (
        alt.Chart(alt.Data(values=[{"value": 1.0}]))
        .mark_rule(strokeDash=[4, 4], color="var(--faint)")
        .encode(y=alt.Y("value:Q"))
    )


def _by_concurrency(entries: Rows) -> alt.LayerChart | None:
    rows = []
    for row in entries:
        if row["draft"] and row["speedup"] is not None:
            series = f"k = {row['num_speculative_tokens']}"
            rows.append({"x": row["concurrency"], "value": row["speedup"], "series": series})
    if len({row["x"] for row in rows}) < 2:
        return None
    return _lines(rows, "speed-up", ".2f") + _break_even()


def _ideal(entries: Rows) -> alt.LayerChart | None:
    """Output speed over concurrency.

    Without a draft, with the best k, and with the best k if all were accepted.
    """
    by_concurrency: dict[int, dict[str, float]] = {}
    for row in entries:
        speed = row["measured"]["tokens_per_s"]
        speeds = by_concurrency.setdefault(row["concurrency"], {})
        if row["draft"] is None:
            speeds[WITHOUT] = speed
            continue
        speeds[WITH] = max(speeds.get(WITH, 0.0), speed)
        if row["speedup"] and row["speedup_ideal"]:
            # speed / speedup is the speed without a draft under the same load.
            speeds[IDEAL] = max(
                speeds.get(IDEAL, 0.0), speed / row["speedup"] * row["speedup_ideal"]
            )
    if len(by_concurrency) < 2:
        return None
    rows = []
    for concurrency, speeds in by_concurrency.items():
        for series in (WITH, IDEAL, WITHOUT):
            if series in speeds:
                rows.append({"x": concurrency, "value": speeds[series], "series": series})
    return _lines(rows, "output tokens per second", ",.0f", [WITH, IDEAL, WITHOUT])


def _lines(
    rows: Rows, y_title: str, number: str, order: Sequence[str] | None = None
) -> alt.LayerChart:
    order = order or list(dict.fromkeys(row["series"] for row in rows))
    line = panel(rows).encode(
        x=alt.X("x:O", title="concurrent requests", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("value:Q", title=y_title, scale=alt.Scale(domainMin=0), axis=alt.Axis(tickCount=5)),
        color=color(order, columns=3),
        tooltip=tips(
            ("series:N", "line"), ("x:O", "concurrent requests"), ("value:Q", y_title, number)
        ),
    )
    return alt.layer(
        line.mark_line(strokeWidth=2.5), line.mark_point(filled=True, size=70, opacity=1)
    )


def _advice(advice: Mapping[str, Any]) -> alt.LayerChart:
    """Expected speed-up over batch size and k.

    The best k of each batch size is highlighted if it pays.
    """
    rows = [row for row in advice["table"] if row["num_speculative_tokens"]]
    best: dict[int, Mapping[str, Any]] = {}
    for row in rows:
        batch_size = row["batch_size"]
        if batch_size not in best or row["speedup"] > best[batch_size]["speedup"]:
            best[batch_size] = row
    values = []
    for row in rows:
        is_best = row is best[row["batch_size"]] and row["speedup"] > 1
        k, speedup = row["num_speculative_tokens"], row["speedup"]
        values.append({"batch": row["batch_size"], "k": k, "value": speedup, "best": is_best})
    base = panel(values).encode(
        x=alt.X("batch:O", title="batch size (requests in a step)", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("k:O", title="draft tokens", sort="descending"),
        tooltip=tips(
            ("batch:O", "batch size"),
            ("k:O", "draft tokens"),
            ("value:Q", "expected speed-up", ".2f"),
        ),
    )
    cells = base.mark_rect(cornerRadius=4, stroke="var(--card)", strokeWidth=3).encode(
        color=alt.condition(
            alt.datum.value > 1, alt.value("var(--ours)"), alt.value("var(--plain)")
        ),
        opacity=alt.condition(alt.datum.best, alt.value(0.9), alt.value(0.3)),
    )
    return cells + numbers(base, fontWeight=600)
