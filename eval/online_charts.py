"""The pictures of the online demo as Vega-Lite specifications, in the page's own colours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt

from eval.charts import PANEL_HEIGHT, Spec, plain

OUTCOMES = {"swapped": "swapped in", "rolled_back": "rolled back"}


def charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """Specifications by the id of the place in the page that shows them."""
    return {"live": plain(_live(report["timeline"])), "versions": plain(_versions(report))}


def domain_charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """The same for the report of drafts by domain."""
    return {"specialised": plain(_specialised(report["domains"]))}


def _specialised(domains: Mapping[str, Any]) -> alt.LayerChart:
    """Bars for each domain and for the mean: the shared drafts, and the domain's own."""
    labels = {**domains["names"], "mean": "mean"}
    drafts = {
        "shared draft": domains["tau_shared"],
        "draft of its own": domains["tau_specialised"],
        "shared, twice as long": domains["tau_shared_longer"],
    }
    rows = [{"label": labels[key], "what": what, "tau": tau[key]} for what, tau in drafts.items() for key in labels]
    order = list(drafts)
    base = alt.Chart(alt.Data(values=rows), width="container", height=PANEL_HEIGHT).encode(
        x=alt.X("label:N", title=None, sort=list(labels.values()), axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("what:N", sort=order),
        y=alt.Y("tau:Q", title="tokens per target step", axis=alt.Axis(tickCount=5)),
        tooltip=["label:N", "what:N", alt.Tooltip("tau:Q", format=".3f")],
    )
    colors = alt.Scale(domain=order, range=["var(--plain)", "var(--ours)", "var(--fifth)"])
    bars = base.mark_bar(cornerRadiusEnd=4, width={"band": 0.9}).encode(
        color=alt.Color("what:N", scale=colors, sort=order, legend=alt.Legend(title=None, orient="top"))
    )
    return bars + base.mark_text(baseline="bottom", dy=-5, fontWeight=600, color="currentColor").encode(
        text=alt.Text("tau:Q", format=".2f")
    )


def _live(timeline: Mapping[str, Any]) -> alt.LayerChart:
    """Each server's acceptance over time, smoothed, with a rule at every swap."""
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
        y=alt.Y("smooth:Q", title="tokens per target step", scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5))
    )
    swaps = [{**swap, "what": OUTCOMES[swap["outcome"]]} for swap in timeline["swaps"] if swap["outcome"] in OUTCOMES]
    rules = (
        alt.Chart(alt.Data(values=swaps))
        .mark_rule(strokeWidth=1.5, color="currentColor", opacity=0.5)
        .encode(
            x="s:Q",
            strokeDash=alt.StrokeDash(
                "what:N", title=None, sort=list(OUTCOMES.values()), legend=alt.Legend(orient="top")
            ),
            tooltip=["version:N", "server:N", "what:N"],
        )
    )
    return (points + lines + rules).properties(width="container", height=PANEL_HEIGHT)


def _versions(report: Mapping[str, Any]) -> alt.LayerChart:
    """What every version reached on the test prompts of the new domain, and the ceiling."""
    learned = [row for row in report["versions"] if row["origin"] in ("offline on A", "learned")]
    base = alt.Chart(alt.Data(values=learned)).encode(
        x=alt.X("records:Q", title=f"records of {report['domains'][1]} learned from", axis=alt.Axis(grid=False)),
        y=alt.Y("tau:Q", title="tokens per target step", scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=5)),
        tooltip=["version:N", alt.Tooltip("tau:Q", format=".3f"), "records:Q"],
    )
    labels = base.mark_text(baseline="bottom", dy=-10, color="currentColor").encode(
        text=alt.Text("tau:Q", format=".2f")
    )
    ceiling = [{"tau": report["tau"]["b_offline"], "label": "distilled offline on it"}]
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
