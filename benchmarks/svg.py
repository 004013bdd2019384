"""A Vega-Lite chart as an SVG by itself: transparent, legible on a light and a dark page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt

COLORS = ("#2b63e3", "#14876c", "#e58a1f", "#a23b8f", "#7a8494")
"""Of the reports' pages in daylight, which are legible on a dark page too."""
INK, INK_ON_DARK = "#57616f", "#b3bcc8"


def to_svg(chart: alt.LayerChart, width: int) -> str:
    """The SVG of a chart whose plot is `width` pixels wide.

    A browser with a dark theme brightens the text.
    """
    import vl_convert  # in the `report` extra

    spec: dict[str, Any] = chart.to_dict()
    spec["width"] = width
    for layer in spec["layer"]:
        layer.pop("width", None)
    spec["config"] = style()
    svg: str = vl_convert.vegalite_to_svg(spec)
    dark = (
        f'<style>@media (prefers-color-scheme: dark) {{ [fill="{INK}"] {{ fill: {INK_ON_DARK} }} '
        f'[stroke="{INK}"] {{ stroke: {INK_ON_DARK} }} }}</style>'
    )
    begin = svg.index(">") + 1
    return f"{svg[:begin]}{dark}{svg[begin:]}\n"


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
        "text": {"color": INK, "fontSize": 13},
    }
