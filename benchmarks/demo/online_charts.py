"""The charts of the online demo, as Vega-Lite specifications."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import altair as alt

from redraft.eval.report.charts import PANEL_HEIGHT, Spec, to_spec

OUTCOMES = {"swapped": "swapped in", "rolled_back": "rolled back"}
"""The outcomes of a swap shown in the chart, with their names in the legend."""

TAU = "tokens per target step"


def build_charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """Build the online demo's charts, by element id on the page."""
    learned = [row for row in report["versions"] if row["origin"] in ("offline on A", "learned")]
    # The first version has been served since the traffic changed.
    served = [
        {**row, "minutes": row["minutes"] or 0.0}
        for row in learned
        if row["minutes"] is not None or row["origin"] != "learned"
    ]
    ceiling = report["tau"]["b_offline"]
    about = f"records of {report['domains'][1]} learned from"
    return {
        "live": to_spec(_live(report["timeline"])),
        "versions": to_spec(draw_versions(learned, "records", about, ceiling)),
        "minutes": to_spec(
            draw_versions(served, "minutes", "minutes since the traffic changed", ceiling)
        ),
    }


def _live(timeline: Mapping[str, Any]) -> alt.LayerChart:
    """Draw each server's acceptance over time, smoothed, with a vertical line at every swap."""
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


def draw_versions(
    versions: Sequence[Mapping[str, Any]],
    x: Literal["records", "minutes"],
    title: str,
    ceiling: float | None,
) -> alt.LayerChart:
    """Draw tau of every version by records or minutes; the draft trained offline is the ceiling."""
    base = alt.Chart(alt.Data(values=list(versions))).encode(
        x=alt.X(f"{x}:Q", title=title, axis=alt.Axis(grid=False)),
        y=alt.Y("tau:Q", title=TAU, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5)),
        tooltip=[
            alt.Tooltip("version:N"),
            alt.Tooltip("tau:Q", title=TAU, format=".3f"),
            alt.Tooltip("records:Q", title="records learned from"),
            alt.Tooltip("minutes:Q", title="minutes until served", format=".1f"),
        ],
    )
    labels = base.mark_text(baseline="bottom", dy=-10, color="currentColor").encode(
        text=alt.Text("tau:Q", format=".2f")
    )
    label = "trained offline on the same answers"
    offline = [] if ceiling is None else [{"tau": ceiling, "label": label}]
    rule = alt.Chart(alt.Data(values=offline)).encode(y="tau:Q")
    return (
        base.mark_line(strokeWidth=2.5, color="var(--ours)")
        + base.mark_point(size=90, filled=True, opacity=1, color="var(--ours)")
        + labels
        + rule.mark_rule(strokeDash=[5, 4], color="currentColor", opacity=0.6)
        + rule.mark_text(align="left", dy=-8, dx=6, color="currentColor", opacity=0.8).encode(
            x=alt.value(0), text="label:N"
        )
    ).properties(width="container", height=PANEL_HEIGHT)
