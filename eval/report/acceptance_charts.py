"""The charts of an acceptance report: drafts side by side, every forecast with a 95% interval."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from redraft.eval.report.charts import (
    PANEL_HEIGHT,
    Rows,
    Spec,
    bars_with_forecast,
    color,
    panel,
    shape,
    tips,
    to_spec,
)
from redraft.eval.report.results import choose_common_k, find_entry, read_tau

ROW_HEIGHT = 22  # height per domain and draft in the first chart, in pixels
COLUMNS = 4  # Of a legend.


def build_charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """Return chart specifications by element id, without charts that have nothing to compare."""
    first = report["settings"]["temperatures"][0]
    at_first = [row for row in report["results"] if row["temperature"] == first]
    overall = [row for row in at_first if row["domain"] is None]
    names = [draft["name"] for draft in report["drafts"]]
    charts = {
        "taus": _taus(at_first, names, choose_common_k(report["results"])),
        "by-k": _by_k(overall, names),
        "accepted": _accepted(overall, names),
        "temperatures": _by_temperature(report, names),
        "engine": _engine(overall),
    }
    return {name: to_spec(chart) for name, chart in charts.items() if chart is not None}


def _taus(rows: Rows, names: Sequence[str], k: int) -> alt.LayerChart:
    points = []
    for row in rows:
        if entry := find_entry(row, k):
            points.append({"draft": row["draft"], "domain": row["domain"] or "all", **_tau(entry)})
    shown = list(dict.fromkeys(point["domain"] for point in points))
    best_first = [point["draft"] for point in sorted(points, key=lambda p: -p["value"])]
    height = max(PANEL_HEIGHT, ROW_HEIGHT * len(names) * len(shown))
    base = panel(points, height).encode(
        y=alt.Y(
            "draft:N",
            title=None,
            sort=list(dict.fromkeys(best_first)),
            axis=alt.Axis(domain=False, ticks=False, labelPadding=10),
        ),
        yOffset=alt.YOffset("domain:N", sort=None),
        color=color(shown, "domain", is_shown=len(shown) > 1, columns=COLUMNS, sort=None),
        tooltip=[
            alt.Tooltip("draft:N"),
            alt.Tooltip("domain:N"),
            *_interval_tooltip("tokens per target step"),
        ],
    )
    # The padding leaves room for the number to the right of the longest interval.
    x = alt.X(
        "value:Q", title=f"tokens per target step, k = {k}", scale=alt.Scale(zero=False, padding=28)
    )
    rule = base.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q")
    dot = base.mark_point(size=80, filled=True, opacity=1).encode(x=x)
    label = base.mark_text(align="left", dx=12, fontSize=12).encode(
        x=alt.X("high:Q"), text=alt.Text("value:Q", format=".2f"), color=alt.value("currentColor")
    )
    return rule + dot + label


def _by_k(rows: Rows, names: Sequence[str]) -> alt.LayerChart | None:
    points = []
    for row in rows:
        for entry in row["by_num_speculative_tokens"]:
            points.append(
                {"series": row["draft"], "x": entry["num_speculative_tokens"], **_tau(entry)}
            )
    return (
        _lines(points, names, "number of draft tokens, k", "tokens per target step")
        if _varies(points)
        else None
    )


def _accepted(rows: Rows, names: Sequence[str]) -> alt.LayerChart | None:
    points = []
    for row in rows:
        for position, rate in enumerate(_read_rates(row), 1):
            points.append({"series": row["draft"], "x": position, **rate})
    return (
        _lines(points, names, "draft token", "share of steps that accept up to this position")
        if points
        else None
    )


def _read_rates(row: Mapping[str, Any]) -> Sequence[Mapping[str, float]]:
    """Return the forecast acceptance by position; empty if the draft has no forecast."""
    entries = row["by_num_speculative_tokens"]
    if not entries or not entries[-1]["forecast"]:
        return []
    rates: Sequence[Mapping[str, float]] = entries[-1]["forecast"]["acceptance_per_position"]
    return rates


def _by_temperature(report: Mapping[str, Any], names: Sequence[str]) -> alt.LayerChart | None:
    k = choose_common_k(report["results"])
    points = []
    for row in report["results"]:
        entry = find_entry(row, k)
        if row["domain"] is None and entry:
            points.append({"series": row["draft"], "x": row["temperature"], **_tau(entry)})
    return (
        _lines(points, names, "temperature", f"tokens per target step, k = {k}")
        if _varies(points)
        else None
    )


def _engine(rows: Rows) -> alt.LayerChart | None:
    points = []
    for row in rows:
        for entry in row["by_num_speculative_tokens"]:
            if entry["engine"] and entry["forecast"]:
                label = f"{row['draft']}, k = {entry['num_speculative_tokens']}"
                points.append({"label": label, "series": "engine", "value": entry["engine"]["tau"]})
                points.append(
                    {
                        "label": label,
                        "series": "forecast",
                        "value": entry["forecast"]["tau_per_draft"],
                    }
                )
    if not points:
        return None
    x = alt.X("label:N", title=None, sort=None, axis=alt.Axis(labelAngle=0, labelLimit=110))
    return bars_with_forecast(points, x, "1 + accepted / drafts")


def _lines(points: Rows, names: Sequence[str], x_title: str, y_title: str) -> alt.LayerChart:
    base = panel(points).encode(
        x=alt.X("x:O", title=x_title, axis=alt.Axis(labelAngle=0)),
        color=color(names, is_shown=len(names) > 1, columns=COLUMNS, sort=None),
        tooltip=[*tips(("series:N", "draft"), ("x:O", x_title)), *_interval_tooltip(y_title)],
    )
    y = alt.Y("value:Q", title=y_title, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    interval = base.mark_rule(strokeWidth=1.5, opacity=0.6).encode(y="low:Q", y2="high:Q")
    line = base.mark_line(strokeWidth=2.5).encode(y=y)
    point = base.mark_point(filled=True, size=70, opacity=1).encode(
        y=y, shape=shape(names, is_shown=len(names) > 1, columns=COLUMNS)
    )
    return interval + line + point


def _tau(entry: Mapping[str, Any]) -> dict[str, float]:
    """tau and the limits of its interval.

    The engine's tau has no interval, so both limits equal tau.
    """
    tau = read_tau(entry)
    ends = entry["forecast"]["tau"] if entry["forecast"] else {"low": tau, "high": tau}
    return {"value": tau, "low": ends["low"], "high": ends["high"]}


def _varies(points: Rows) -> bool:
    return len({point["x"] for point in points}) > 1


def _interval_tooltip(title: str) -> list[alt.Tooltip]:
    titles = {"value": title, "low": "95% interval from", "high": "95% interval to"}
    return tips(*((f"{field}:Q", shown, ".3f") for field, shown in titles.items()))
