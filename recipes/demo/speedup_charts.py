"""The charts of the demo's page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt

from redraft.eval.report.charts import PANEL_HEIGHT, Spec, to_spec
from redraft.eval.report.charts import build_charts as build_training_charts

TITLE_AXIS = alt.Axis(
    labelAngle=0, labelExpr="split(replace(replace(datum.label, ' answers', '|answers'), ' before', '|before'), '|')"
)
"""Titles of drafts in a row, each in up to three lines."""


def build_charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """Specifications by element id on the page."""
    training = build_training_charts(report)
    kept = {name: spec for name, spec in training.items() if name in ("loss", "positions")}
    return {**kept, "ratios": to_spec(_ratios(report)), "steps": to_spec(_steps(report))}


def _rows(report: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    titles, speed = report["titles"], report["speed"]
    rows = []
    for name, loads in speed["by_draft"].items():
        for load, entry in loads.items():
            requests = "1 request" if load == "1" else f"{load} requests"
            low, high = entry["interval"]
            rows.append({"draft": titles[name], "load": requests, "value": entry[key], "low": low, "high": high})
    return rows


def _ratios(report: Mapping[str, Any]) -> alt.LayerChart:
    rows = [row for row in _rows(report, "ratio") if row["draft"] != report["titles"]["none"]]
    base = alt.Chart(alt.Data(values=rows), width="container", height=PANEL_HEIGHT).encode(
        x=alt.X("draft:N", title=None, axis=TITLE_AXIS, sort=None), xOffset="load:N"
    )
    bars = base.mark_bar(cornerRadiusEnd=4).encode(
        y=alt.Y("value:Q", title="tokens/s, of those without a draft"),
        color=alt.Color("load:N", legend=alt.Legend(title=None, orient="top", direction="horizontal")),
        tooltip=[
            alt.Tooltip("draft:N"),
            alt.Tooltip("load:N"),
            *(alt.Tooltip(f"{name}:Q", format=".2f") for name in ("value", "low", "high")),
        ],
    )
    spread = base.mark_rule(color="currentColor").encode(y="low:Q", y2="high:Q")
    line = alt.Chart(alt.Data(values=[{"y": 1}])).mark_rule(strokeDash=[4, 4]).encode(y="y:Q")
    return bars + spread + line


def _steps(report: Mapping[str, Any]) -> alt.Chart:
    return (
        alt.Chart(alt.Data(values=_rows(report, "step_ms")), width="container", height=PANEL_HEIGHT)
        .mark_bar(cornerRadiusEnd=4)
        .encode(
            x=alt.X("draft:N", title=None, axis=TITLE_AXIS, sort=None),
            xOffset="load:N",
            y=alt.Y("value:Q", title="ms per target step"),
            color=alt.Color("load:N", legend=alt.Legend(title=None, orient="top", direction="horizontal")),
            tooltip=[alt.Tooltip("draft:N"), alt.Tooltip("load:N"), alt.Tooltip("value:Q", format=".1f")],
        )
    )
