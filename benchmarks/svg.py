"""Render Vega-Lite charts as transparent SVG files, legible on light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt

COLORS = ("#2b63e3", "#14876c", "#e58a1f", "#a23b8f", "#7a8494")
"""Colors of the report pages' light theme, which are legible on a dark page too."""
INK, INK_ON_DARK = "#57616f", "#b3bcc8"


def to_svg(chart: alt.LayerChart, width: int) -> str:
    """Return a chart as SVG, with a plot `width` pixels wide.

    In a browser with a dark theme, the text is brighter.
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
