"""The charts of a training report as Vega-Lite specifications.

The page sets colours and fonts, dark or light.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

Spec = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]

BAR_HEIGHT = 34  # Height of one horizontal bar and the gap below, in pixels.
PANEL_HEIGHT = 220  # Height of the plot of every other chart, in pixels.
COLORS = 5  # of the page; series beyond them reuse the colours with a different shape
SHAPES = ("circle", "square", "triangle-up", "diamond")
HEADROOM = 1.15  # a bar chart's scale over the highest bar: room for the number above


def build_charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """Return chart specifications by element id on the page, without charts that lack numbers."""
    charts = {
        "loss": _curve(report["curves"], {"loss": "loss"}, "nats per token"),
        "alpha": _curve(
            report["curves"],
            {"held_out_alpha": "alpha", "held_out_alpha_greedy": "alpha greedy"},
            "acceptance on held-out text",
        ),
        "positions": _positions(report),
        "gain": _gain(report["offline"]),
        "domains": _domains(report["by_domain"]) if len(report["by_domain"]) > 1 else None,
    }
    return {name: to_spec(chart) for name, chart in charts.items() if chart is not None}


def to_spec(chart: alt.TopLevelMixin) -> Spec:
    """The specification of a chart, without the parts that the page sets."""
    spec: Spec = chart.to_dict()
    # `$schema` is a URL, which the page must not contain. `config` contains colours, which the page
    # sets.
    del spec["$schema"], spec["config"]
    return spec


def _curve(entries: Rows, names: Mapping[str, str], title: str) -> alt.Chart | None:
    """Return a chart with one line per key of `names`, over the logged steps.

    Return None if fewer than two steps were logged.
    """
    rows = []
    for entry in entries:
        for key, name in names.items():
            if key in entry:
                rows.append({"step": entry["step"], "value": entry[key], "series": name})
    if len({row["step"] for row in rows}) < 2:
        return None
    line = panel(rows).mark_line(strokeWidth=2.5, interpolate="monotone")
    return line.encode(
        x=alt.X("step:Q", title="optimizer step", axis=alt.Axis(grid=False, tickCount=6)),
        y=alt.Y(
            "value:Q", title=title, scale=alt.Scale(zero=False, nice=5), axis=alt.Axis(tickCount=5)
        ),
        color=color(list(names.values()), is_shown=len(names) > 1),
        tooltip=tips(
            ("step:Q", "optimizer step"), ("series:N", "curve"), ("value:Q", title, ".4f")
        ),
    )


def panel(rows: Rows, height: float = PANEL_HEIGHT) -> alt.Chart:
    return alt.Chart(alt.Data(values=list(rows)), width="container", height=height)


def tips(*fields: tuple[str, ...]) -> list[alt.Tooltip]:
    """Tooltips from (field, title) or (field, title, number format) tuples."""
    return [
        alt.Tooltip(name, title=title, format=number[0] if number else alt.Undefined)
        for name, title, *number in fields
    ]


def legend(columns: int | None = None, **options: Any) -> alt.Legend:
    return alt.Legend(
        title=None,
        orient="top",
        direction="horizontal",
        columns=columns or alt.Undefined,
        **options,
    )


def color(
    names: Sequence[str],
    field: str = "series",
    *,
    is_shown: bool = True,
    columns: int | None = None,
    **options: Any,
) -> alt.Color:
    """The page's colours for `names`, in this order, with a legend if `is_shown`."""
    shown = legend(columns) if is_shown else None
    return alt.Color(f"{field}:N", scale=alt.Scale(domain=list(names)), legend=shown, **options)


def shape(names: Sequence[str], *, is_shown: bool = True, columns: int | None = None) -> alt.Shape:
    """A shape for each of `names`: a colour that repeats comes with a different shape."""
    shapes = [SHAPES[i // COLORS % len(SHAPES)] for i in range(len(names))]
    shown = legend(columns) if is_shown else None
    return alt.Shape("series:N", scale=alt.Scale(domain=list(names), range=shapes), legend=shown)


def numbers(chart: alt.Chart, number: str = ".2f", **mark: Any) -> alt.Chart:
    """Return marks that print the values as text next to a chart's marks."""
    text = alt.Text("value:Q", format=number)
    return chart.mark_text(**mark).encode(text=text, color=alt.value("currentColor"))


def bars_with_forecast(
    rows: Rows, x: alt.X, title: str, *, highest: float | None = None
) -> alt.LayerChart:
    """A bar for every value in the series `engine`, and a diamond for every one in `forecast`.

    Rows have `label`, `value` and `series`. The maximum of the y axis is slightly above `highest`.
    """
    top = HEADROOM * (max(row["value"] for row in rows) if highest is None else highest)
    series = [name for name in ("engine", "forecast") if any(row["series"] == name for row in rows)]
    base = panel(rows).encode(
        x=x,
        y=alt.Y(
            "value:Q", title=title, scale=alt.Scale(domain=[0, top]), axis=alt.Axis(tickCount=5)
        ),
        color=alt.Color(
            "series:N",
            scale=alt.Scale(
                domain=["engine", "forecast"]
            ),  # list both series, so that each keeps its colour if the other is missing
            legend=legend(values=series),
        ),
        tooltip=tips(("label:N", "bar"), ("series:N", "source"), ("value:Q", title, ".3f")),
    )
    bars = base.transform_filter("datum.series == 'engine'").mark_bar(
        width={"band": 0.55}, cornerRadiusEnd=4
    )
    diamonds = base.transform_filter("datum.series == 'forecast'")
    points = diamonds.mark_point(shape="diamond", size=130, filled=True, opacity=1)
    return bars + numbers(bars, baseline="bottom", dy=-9, fontWeight=600) + points


def _positions(report: Mapping[str, Any]) -> alt.LayerChart:
    sources = {"forecast": report["offline"]["forecast_per_position"]}
    if "engine" in report:
        sources["engine"] = report["engine"]["acceptance_per_position"]
    rows = []
    for source, rates in sources.items():
        for position, rate in enumerate(rates, 1):
            rows.append({"label": str(position), "value": rate, "series": source})
    x = alt.X("label:O", title="draft token", axis=alt.Axis(labelAngle=0))
    return bars_with_forecast(rows, x, "share of drafts accepted up to this position", highest=1)


def _domains(by_domain: Mapping[str, Mapping[str, Any]]) -> alt.LayerChart:
    rows = []
    for name, row in by_domain.items():
        for key, source in (("tau", "engine"), ("tau_forecast", "forecast")):
            if row[key] is not None:
                rows.append({"label": name, "value": row[key], "series": source})
    x = alt.X("label:N", title=None, axis=alt.Axis(labelAngle=0))
    return bars_with_forecast(rows, x, "tokens per target step")


def _gain(offline: Mapping[str, Any]) -> alt.LayerChart:
    """A horizontal bar for each draft, with its value at the end. The trained one is highlighted."""
    names = {"before": "before training", "after": "distilled"}
    alphas = {name: offline.get(f"alpha_greedy_{key}") for key, name in names.items()}
    rows = [{"label": name, "value": alpha} for name, alpha in alphas.items() if alpha is not None]
    title = "alpha greedy on held-out prompts"
    highest = max(row["value"] for row in rows)
    base = panel(rows, BAR_HEIGHT * len(rows)).encode(
        x=alt.X(
            "value:Q",
            title=title,
            # Avoids 0, because all bars may be 0.
            scale=alt.Scale(domain=[0, highest * 1.2 or 1], nice=False),
            axis=alt.Axis(grid=False, labels=False, ticks=False, domain=False),
        ),
        y=alt.Y(
            "label:N",
            title=None,
            sort=None,
            axis=alt.Axis(domain=False, ticks=False, labelPadding=10),
        ),
        color=alt.condition(
            alt.datum.label == names["after"], alt.value("var(--ours)"), alt.value("var(--plain)")
        ),
        tooltip=tips(("label:N", "draft"), ("value:Q", title, ".3f")),
    )
    bars = base.mark_bar(height={"band": 0.66}, cornerRadiusEnd=4)
    return bars + numbers(base, ".3f", align="left", dx=8, fontWeight=600)
