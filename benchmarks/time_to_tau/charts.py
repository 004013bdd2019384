"""The learning curves as a Vega-Lite chart."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from redraft.eval.report.charts import Rows, legend, panel

WIDTH, HEIGHT = 760, 320


def draw_curves(
    points: Rows, names: Sequence[str], x_title: str = "minutes of training"
) -> alt.LayerChart:
    """Draw tau over `x`, with a line and a band (`low` to `high`) for each `series`."""
    base = panel(points, HEIGHT).encode(
        x=alt.X("x:Q", title=x_title, axis=alt.Axis(grid=False)),
        color=alt.Color(
            "series:N",
            scale=alt.Scale(domain=list(names)),
            legend=legend(len(names), symbolOpacity=1),
        ),
    )
    y = alt.Y(
        "value:Q",
        title="tau, tokens per target step",
        scale=alt.Scale(zero=False, nice=False, padding=8),
        axis=alt.Axis(tickCount=5),
    )
    band = base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q"), y2="high:Q")
    line = base.mark_line(strokeWidth=2.5).encode(y=y)
    dots = base.mark_point(filled=True, size=50, opacity=1).encode(y=y)
    return band + line + dots
