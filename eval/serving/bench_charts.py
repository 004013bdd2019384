"""The charts of `redraft bench` as Vega-Lite specifications, in the colours of the page."""

from collections.abc import Mapping
from typing import Any

import altair as alt

from redraft.eval.report.charts import PANEL_HEIGHT, Rows, Spec, color, panel, shape, tips, to_spec

TALL = 1.6 * PANEL_HEIGHT


def build_charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """Chart specifications by element id on the page."""
    charts = {}
    for load in report["plain"]:
        charts[f"pays-{load}"] = to_spec(_pays(report, load))
        charts[f"tokens-{load}"] = to_spec(_tokens(report, load))
    return charts


def _pays(report: Mapping[str, Any], load: str) -> alt.LayerChart:
    """Plot tau against the cost of a step. A draft above the diagonal pays off."""
    rows = [
        {
            "series": draft["title"],
            # ratio = tau / step, with the step in units of a plain step.
            "step": (entry := draft["measured"][load])["tau"] / entry["ratio"],
            "tau": entry["tau"],
            "speed": entry["ratio"],
        }
        for draft in report["drafts"]
    ]
    most = 1.05 * max(max(row["step"], row["tau"]) for row in rows)
    ends = [{"step": 0.95, "tau": 0.95}, {"step": most, "tau": most}]
    x = alt.X(
        "step:Q", title="step time, relative to a plain step", scale=alt.Scale(domain=[0.95, most])
    )
    y = alt.Y("tau:Q", title="tau, tokens per step", scale=alt.Scale(domain=[0.95, most]))
    line = (
        alt.Chart(alt.Data(values=ends))
        .mark_line(strokeDash=[4, 4], color="var(--faint)")
        .encode(x=x, y=y)
    )
    shown = [alt.Tooltip(f"{name}:Q", format=".2f") for name in ("tau", "step", "speed")]
    points = panel(rows, TALL).mark_point(filled=True, size=110, opacity=1)
    return (
        points.encode(x=x, y=y, **_series(rows), tooltip=[*tips(("series:N", "draft")), *shown])
        + line
    )


def _tokens(report: Mapping[str, Any], load: str) -> alt.LayerChart:
    """Expected speed by number of draft tokens, relative to the speed without a draft.

    A lookup has a single number of draft tokens.
    """
    rows = [
        {"series": draft["title"], "k": row["num_speculative_tokens"], "value": row["speedup"]}
        for draft in report["drafts"]
        for row in draft["by_tokens"][load]
        if row["num_speculative_tokens"] or not draft["chooses_length"]
    ]
    base = panel(rows, TALL).encode(
        x=alt.X("k:O", title="draft tokens", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("value:Q", title="tokens/s, relative to no draft", scale=alt.Scale(zero=False)),
        **_series(rows),
        tooltip=tips(("series:N", "draft"), ("k:O", "draft tokens"), ("value:Q", "speed", ".2f")),
    )
    return base.mark_line(strokeWidth=2) + base.mark_point(filled=True, size=70, opacity=1)


def _series(rows: Rows) -> dict[str, Any]:
    """The colour and shape of each draft.

    Colours repeat after a few drafts, with a different shape.
    """
    names = list(dict.fromkeys(row["series"] for row in rows))
    return {"color": color(names, columns=2), "shape": shape(names, columns=2)}
