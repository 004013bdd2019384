"""The chart of the study with a draft per domain, as a Vega-Lite specification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt

from benchmarks.demo.online_charts import TAU
from redraft.eval.report.charts import HEADROOM, PANEL_HEIGHT, Spec, to_spec


def build_charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """The chart by element id on the page."""
    return {"specialised": to_spec(_specialised(report["domains"]))}


def _specialised(domains: Mapping[str, Any]) -> alt.LayerChart:
    """tau of the shared drafts and of the domain's draft, for each domain and on average."""
    labels = {**domains["names"], "mean": "mean"}
    drafts = {
        "shared draft": domains["tau_shared"],
        "draft per domain": domains["tau_specialised"],
        "shared draft, trained twice as long": domains["tau_shared_longer"],
    }
    rows = []
    for draft, taus in drafts.items():
        rows += [
            {"domain": label, "draft": draft, "tau": taus[key]} for key, label in labels.items()
        ]
    order = list(drafts)
    top = HEADROOM * max(row["tau"] for row in rows)
    base = alt.Chart(alt.Data(values=rows), width="container", height=PANEL_HEIGHT).encode(
        x=alt.X("domain:N", title=None, sort=list(labels.values()), axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("draft:N", sort=order),
        y=alt.Y("tau:Q", title=TAU, scale=alt.Scale(domain=[0, top]), axis=alt.Axis(tickCount=5)),
        tooltip=[
            alt.Tooltip("domain:N"),
            alt.Tooltip("draft:N"),
            alt.Tooltip("tau:Q", title=TAU, format=".3f"),
        ],
    )
    colors = alt.Scale(domain=order, range=["var(--plain)", "var(--ours)", "var(--fifth)"])
    legend = alt.Legend(title=None, orient="top", labelLimit=300)
    bars = base.mark_bar(cornerRadiusEnd=4, width={"band": 0.9}).encode(
        color=alt.Color("draft:N", scale=colors, sort=order, legend=legend)
    )
    return bars + base.mark_text(
        baseline="bottom", dy=-5, fontWeight=600, color="currentColor"
    ).encode(text=alt.Text("tau:Q", format=".2f"))
