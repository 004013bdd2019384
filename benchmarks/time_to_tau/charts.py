"""The learning curves as a Vega-Lite chart, and as an SVG that the README shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from redraft.eval.report.charts import Rows, legend, panel

COLORS = ("#2b63e3", "#14876c", "#e58a1f", "#a23b8f", "#7a8494")
"""Of the reports' pages in daylight, which are legible on a dark page too."""
INK = "#6b7585"
WIDTH, HEIGHT = 760, 320


def draw_curves(
    points: Rows, names: Sequence[str], x_title: str = "minutes of training"
) -> alt.LayerChart:
    """tau over `x`, with a line and a band (`low` to `high`) for each `series`."""
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


def to_svg(chart: alt.LayerChart) -> str:
    """The chart by itself, on a transparent ground, legible on a light and a dark page."""
    import vl_convert  # in the `report` extra

    spec: dict[str, Any] = chart.to_dict()
    spec["width"] = WIDTH
    for layer in spec["layer"]:
        layer.pop("width", None)
    spec["config"] = style()
    svg: str = vl_convert.vegalite_to_svg(spec)
    return svg


def style() -> Mapping[str, Any]:
    return {
        "background": "transparent",
        "font": "sans-serif",
        "view": {"stroke": None},
        "range": {"category": list(COLORS)},
        "axis": {
            "labelColor": INK,
            "titleColor": INK,
            "gridColor": "#8884",
            "domainColor": "#8888",
            "tickColor": "#8888",
            "labelFontSize": 13,
            "titleFontSize": 13,
            "titleFontWeight": "normal",
        },
        "legend": {"labelColor": INK, "labelFontSize": 13, "symbolSize": 110},
    }
