"""The charts of the comparison of head families, as Vega-Lite specifications."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt

from redraft.eval.report.charts import (
    PANEL_HEIGHT,
    Rows,
    Spec,
    bars_with_forecast,
    color,
    shape,
    to_spec,
)


def build_charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """Build the specifications, by element id on the page."""
    families = sorted(
        report["families"].values(),
        key=lambda entry: -(entry["tau_engine"] or entry["tau_forecast"]),
    )
    ablation = [
        {**entry, "title": title_divergence(name, entry)}
        for name, entry in report["ablation"].items()
    ]
    charts = {
        "tau": _tau(families),
        "families-positions": _positions_by_family(families),
        "families-gain": _gain_by_family(families),
        "ablation": _tau(ablation) if ablation else None,
    }
    return {name: to_spec(chart) for name, chart in charts.items() if chart is not None}


def title_divergence(name: str, entry: Mapping[str, Any]) -> str:
    """Return the label of a bar, with a mark if the interval cannot tell it from the best."""
    words = name.replace("_", " ")
    return words if entry["is_best"] or not entry["equals_best"] else f"{words} (equal)"


def _tau(entries: Rows) -> alt.LayerChart:
    rows = []
    for entry in entries:
        if entry["tau_engine"] is not None:
            rows.append({"label": entry["title"], "value": entry["tau_engine"], "series": "engine"})
        rows.append({"label": entry["title"], "value": entry["tau_forecast"], "series": "forecast"})
    x = alt.X("label:N", title=None, sort=None, axis=alt.Axis(labelAngle=-30))
    return bars_with_forecast(rows, x, "tokens per target step")


def _positions_by_family(families: Rows) -> alt.LayerChart:
    rows, names = [], [entry["title"] for entry in families]
    for entry in families:
        for position, rate in enumerate(entry["acceptance_per_position"], 1):
            rows.append({"position": position, "value": rate, "series": entry["title"]})
    title = "share of drafts accepted this far"
    base = alt.Chart(alt.Data(values=rows), width="container", height=PANEL_HEIGHT).encode(
        x=alt.X("position:O", title="draft token", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("value:Q", title=title, scale=alt.Scale(zero=True)),
        color=color(names, columns=3),
        tooltip=[
            alt.Tooltip("series:N", title="head"),
            alt.Tooltip("position:O", title="draft token"),
            alt.Tooltip("value:Q", title=title, format=".3f"),
        ],
    )
    points = base.mark_point(filled=True, size=70, opacity=1)
    return base.mark_line(strokeWidth=2.5) + points.encode(shape=shape(names, columns=3))


def _gain_by_family(families: Rows) -> alt.LayerChart:
    """Draw a line for every family, from the untrained head to the trained one."""
    rows = []
    for entry in families:
        before, after = entry["alpha_greedy_before"], entry["alpha_greedy_after"]
        rows.append({"head": entry["title"], "before": before, "after": after})
    base = alt.Chart(alt.Data(values=rows), width="container", height=PANEL_HEIGHT).encode(
        y=alt.Y(
            "head:N",
            title=None,
            sort=None,
            axis=alt.Axis(domain=False, ticks=False, labelPadding=10),
        ),
        tooltip=[
            alt.Tooltip("head:N"),
            alt.Tooltip("before:Q", title="alpha greedy before training", format=".3f"),
            alt.Tooltip("after:Q", title="alpha greedy after training", format=".3f"),
        ],
    )
    x = alt.X(
        "before:Q", title="alpha greedy, before and after training", scale=alt.Scale(domainMin=0)
    )
    line = base.mark_rule(strokeWidth=3, color="var(--line)").encode(x=x, x2="after:Q")
    before = base.mark_point(size=90, filled=True, opacity=1, color="var(--plain)").encode(x=x)
    after = base.mark_point(size=120, filled=True, opacity=1, color="var(--ours)").encode(
        x="after:Q"
    )
    label = base.mark_text(align="left", dx=12, fontWeight=600).encode(
        x="after:Q", text=alt.Text("after:Q", format=".3f"), color=alt.value("currentColor")
    )
    return line + before + after + label
