"""The acceptance report's pictures: drafts beside each other, every number with its 95% interval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import altair as alt

from eval.acceptance_results import compared_k, entry_of, tau_of
from eval.charts import PANEL_HEIGHT, Rows, Spec, plain

ROW_HEIGHT = 22
"""Of one domain of one draft."""


COLORS = 5
"""That the page has; drafts beyond them have the same again with another shape."""

SHAPES = ("circle", "square", "triangle-up", "diamond")


def charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """Specifications by the id of their place in the page; only those there is something to compare in."""
    first = report["settings"]["temperatures"][0]
    at_first = [row for row in report["results"] if row["temperature"] == first]
    overall = [row for row in at_first if row["domain"] is None]
    names = [draft["name"] for draft in report["drafts"]]
    found = {
        "taus": _taus(at_first, names, compared_k(report["results"])),
        "by-k": _by_k(overall, names),
        "accepted": _accepted(overall, names),
        "temperatures": _by_temperature(report, names),
        "engine": _engine(overall),
    }
    return {name: plain(chart) for name, chart in found.items() if chart is not None}


def _taus(rows: Rows, names: Sequence[str], k: int) -> alt.LayerChart:
    """A dot and its interval for every draft and domain."""
    points = [
        {"draft": row["draft"], "domain": row["domain"] or "all", "value": tau_of(entry), **_interval(entry)}
        for row in rows
        if (entry := entry_of(row, k))
    ]
    shown = list(dict.fromkeys(point["domain"] for point in points))
    best_first = [point["draft"] for point in sorted(points, key=lambda p: -p["value"])]
    height = max(PANEL_HEIGHT, ROW_HEIGHT * len(names) * len(shown))
    base = alt.Chart(alt.Data(values=points), width="container", height=height).encode(
        y=alt.Y(
            "draft:N",
            title=None,
            sort=list(dict.fromkeys(best_first)),
            axis=alt.Axis(domain=False, ticks=False, labelPadding=10),
        ),
        yOffset=alt.YOffset("domain:N", sort=None),
        color=_color("domain", shown, legend=len(shown) > 1),
        tooltip=["draft:N", "domain:N", *_tooltip("value", "low", "high")],
    )
    # the padding leaves room for the number behind the longest interval
    x = alt.X("value:Q", title=f"tokens per target step, k = {k}", scale=alt.Scale(zero=False, padding=28))
    rule = base.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q")
    dot = base.mark_point(size=80, filled=True, opacity=1).encode(x=x)
    label = base.mark_text(align="left", dx=12, fontSize=12).encode(
        x=alt.X("high:Q"), text=alt.Text("value:Q", format=".2f"), color=alt.value("currentColor")
    )
    return rule + dot + label


def _by_k(rows: Rows, names: Sequence[str]) -> alt.LayerChart | None:
    points = [
        {
            "what": row["draft"],
            "k": entry["num_speculative_tokens"],
            "value": tau_of(entry),
            **_interval(entry),
        }
        for row in rows
        for entry in row["by_num_speculative_tokens"]
    ]
    return _lines(points, names, "k:O", "draft tokens", "tokens per target step") if _varies(points, "k") else None


def _accepted(rows: Rows, names: Sequence[str]) -> alt.LayerChart | None:
    """Of every draft's largest number of draft tokens."""
    points = [
        {"what": row["draft"], "position": position, **rate}
        for row in rows
        for position, rate in enumerate(_rates(row), 1)
    ]
    return _lines(points, names, "position:O", "draft token", "share of steps that accept up to it") if points else None


def _rates(row: Mapping[str, Any]) -> Sequence[Mapping[str, float]]:
    entry = row["by_num_speculative_tokens"][-1] if row["by_num_speculative_tokens"] else None
    rates: Sequence[Mapping[str, float]] = (
        entry["forecast"]["acceptance_per_position"] if entry and entry["forecast"] else []
    )
    return rates


def _by_temperature(report: Mapping[str, Any], names: Sequence[str]) -> alt.LayerChart | None:
    k = compared_k(report["results"])
    points = [
        {"what": row["draft"], "temperature": row["temperature"], "value": tau_of(entry), **_interval(entry)}
        for row in report["results"]
        if row["domain"] is None and (entry := entry_of(row, k))
    ]
    if not _varies(points, "temperature"):
        return None
    return _lines(points, names, "temperature:O", "temperature", f"tokens per target step, k = {k}")


def _engine(rows: Rows) -> alt.LayerChart | None:
    """Bars for what the engine counted, a diamond on each for the forecast of it."""
    points = [
        {"label": f"{row['draft']}, k = {entry['num_speculative_tokens']}", "what": what, "value": value}
        for row in rows
        for entry in row["by_num_speculative_tokens"]
        if entry["engine"] and entry["forecast"]
        for what, value in (("engine", entry["engine"]["tau"]), ("forecast", entry["forecast"]["tau_per_draft"]))
    ]
    if not points:
        return None
    base = alt.Chart(alt.Data(values=points), width="container", height=PANEL_HEIGHT).encode(
        x=alt.X("label:N", title=None, sort=None, axis=alt.Axis(labelAngle=0, labelLimit=110)),
        y=alt.Y("value:Q", title="1 + accepted / drafts", axis=alt.Axis(tickCount=5)),
        color=_color("what", ["engine", "forecast"], legend=True),
        tooltip=["label:N", "what:N", *_tooltip("value")],
    )
    bars = base.transform_filter("datum.what == 'engine'").mark_bar(width={"band": 0.55}, cornerRadiusEnd=4)
    diamonds = base.transform_filter("datum.what == 'forecast'").mark_point(
        shape="diamond", size=130, filled=True, opacity=1
    )
    return bars + diamonds


def _lines(points: Rows, names: Sequence[str], x: str, x_title: str, y_title: str) -> alt.LayerChart:
    """A line a draft through its values, with their intervals."""
    base = alt.Chart(alt.Data(values=list(points)), width="container", height=PANEL_HEIGHT).encode(
        x=alt.X(x, title=x_title, axis=alt.Axis(labelAngle=0)),
        color=_color("what", names, legend=len(names) > 1),
        tooltip=["what:N", x, *_tooltip("value", "low", "high")],
    )
    y = alt.Y("value:Q", title=y_title, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    shapes = alt.Scale(domain=list(names), range=[SHAPES[i // COLORS % len(SHAPES)] for i in range(len(names))])
    shape = alt.Shape("what:N", scale=shapes, legend=_legend() if len(names) > 1 else None)
    interval = base.mark_rule(strokeWidth=1.5, opacity=0.6).encode(y="low:Q", y2="high:Q")
    line = base.mark_line(strokeWidth=2.5).encode(y=y)
    return interval + line + base.mark_point(filled=True, size=70, opacity=1).encode(y=y, shape=shape)


def _interval(entry: Mapping[str, Any]) -> dict[str, float]:
    """Its ends; the value itself where only the engine counted it."""
    tau = entry["forecast"]["tau"] if entry["forecast"] else {"low": tau_of(entry), "high": tau_of(entry)}
    return {"low": tau["low"], "high": tau["high"]}


def _varies(points: Rows, key: str) -> bool:
    return len({point[key] for point in points}) > 1


def _color(field: str, domain: Sequence[str], *, legend: bool) -> alt.Color:
    return alt.Color(
        f"{field}:N",
        sort=None,
        scale=alt.Scale(domain=list(domain)),
        legend=_legend() if legend else None,
    )


def _legend() -> alt.Legend:
    return alt.Legend(title=None, orient="top", direction="horizontal", columns=4)


def _tooltip(*fields: str) -> Iterator[alt.Tooltip]:
    return (alt.Tooltip(f"{field}:Q", format=".3f") for field in fields)
