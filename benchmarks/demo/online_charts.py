"""The charts of the online demo, as Vega-Lite specifications."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt

from redraft.eval.report.charts import PANEL_HEIGHT, Spec, to_spec

OUTCOMES = {"swapped": "swapped in", "rolled_back": "rolled back"}
"""The outcomes of a swap shown in the chart, with the names they have in the legend."""

TAU = "tokens per target step"


def build_charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """The online demo's charts, by element id on the page."""
    return {"live": to_spec(_live(report["timeline"])), "versions": to_spec(_versions(report))}


def _live(timeline: Mapping[str, Any]) -> alt.LayerChart:
    """Acceptance of each server over time, smoothed, with a vertical line at every swap."""
    accepted = (
        alt.Chart(alt.Data(values=timeline["acceptance"]))
        .transform_window(smooth="mean(tau)", frame=[-3, 3], groupby=["server"])
        .encode(
            x=alt.X("s:Q", title="seconds since the traffic changed", axis=alt.Axis(grid=False)),
            color=alt.Color("server:N", title=None, legend=alt.Legend(orient="top")),
        )
    )
    points = accepted.mark_point(size=8, filled=True, opacity=0.35).encode(y=alt.Y("tau:Q"))
    lines = accepted.mark_line(strokeWidth=2.5, interpolate="monotone").encode(
        y=alt.Y("smooth:Q", title=TAU, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    )
    swaps = [
        {**swap, "event": OUTCOMES[swap["outcome"]]}
        for swap in timeline["swaps"]
        if swap["outcome"] in OUTCOMES
    ]
    rules = (
        alt.Chart(alt.Data(values=swaps))
        .mark_rule(strokeWidth=1.5, color="currentColor", opacity=0.5)
        .encode(
            x="s:Q",
            strokeDash=alt.StrokeDash(
                "event:N", title=None, sort=list(OUTCOMES.values()), legend=alt.Legend(orient="top")
            ),
            tooltip=[alt.Tooltip("version:N"), alt.Tooltip("server:N"), alt.Tooltip("event:N")],
        )
    )
    return (points + lines + rules).properties(width="container", height=PANEL_HEIGHT)


def _versions(report: Mapping[str, Any]) -> alt.LayerChart:
    """tau of every learned version on test prompts of the new domain.

    The draft distilled offline is the ceiling.
    """
    learned = [row for row in report["versions"] if row["origin"] in ("offline on A", "learned")]
    base = alt.Chart(alt.Data(values=learned)).encode(
        x=alt.X(
            "records:Q",
            title=f"records of {report['domains'][1]} learned from",
            axis=alt.Axis(grid=False),
        ),
        y=alt.Y("tau:Q", title=TAU, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5)),
        tooltip=[
            alt.Tooltip("version:N"),
            alt.Tooltip("tau:Q", title=TAU, format=".3f"),
            alt.Tooltip("records:Q", title="records learned from"),
        ],
    )
    labels = base.mark_text(baseline="bottom", dy=-10, color="currentColor").encode(
        text=alt.Text("tau:Q", format=".2f")
    )
    ceiling = [{"tau": report["tau"]["b_offline"], "label": "trained offline on the same answers"}]
    rule = alt.Chart(alt.Data(values=ceiling)).encode(y="tau:Q")
    return (
        base.mark_line(strokeWidth=2.5, color="var(--ours)")
        + base.mark_point(size=90, filled=True, opacity=1, color="var(--ours)")
        + labels
        + rule.mark_rule(strokeDash=[5, 4], color="currentColor", opacity=0.6)
        + rule.mark_text(align="left", dy=-8, dx=6, color="currentColor", opacity=0.8).encode(
            x=alt.value(0), text="label:N"
        )
    ).properties(width="container", height=PANEL_HEIGHT)
