"""The report's pictures as Vega-Lite specifications. Colours and fonts are the page's, which is dark or light."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

Spec = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]

BAR_HEIGHT = 34
PANEL_HEIGHT = 220


def charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """Specifications by the id of the place in the page that shows them; only those there are numbers for."""
    found = {
        "loss": _curve(report["curves"], {"loss": "loss"}, "nats per token"),
        "alpha": _curve(
            report["curves"],
            {"held_out_alpha": "alpha", "held_out_alpha_greedy": "alpha greedy"},
            "acceptance on held-out text",
        ),
        "positions": _positions(report),
        "gain": _gain(report["offline"]),
        "speed": _speed(report["engine"]) if "engine" in report else None,
        "domains": _domains(report["by_domain"]) if len(report["by_domain"]) > 1 else None,
    }
    return {name: plain(chart) for name, chart in found.items() if chart is not None}


def heads_charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """The same for the report that sets families of heads side by side."""
    families = sorted(report["families"].values(), key=lambda entry: -entry["tau_engine"])
    ablation = [{**entry, "title": name.replace("_", " ")} for name, entry in report["ablation"].items()]
    found = {
        "tau": _tau(families),
        "families-positions": _positions_by_family(families),
        "families-gain": _gain_by_family(families),
        "ablation": _tau(ablation) if ablation else None,
    }
    return {name: plain(chart) for name, chart in found.items() if chart is not None}


def _tau(entries: Rows) -> alt.LayerChart:
    rows = [
        {"label": entry["title"], "value": entry[key], "what": what}
        for entry in entries
        for key, what in (("tau_engine", "engine"), ("tau_forecast", "forecast"))
    ]
    highest = max(row["value"] for row in rows)
    x = alt.X("label:N", title=None, sort=None, axis=alt.Axis(labelAngle=0))
    return _beside(rows, x, "tokens per target step", [0, highest * 1.1])


def _positions_by_family(families: Rows) -> alt.Chart:
    rows = [
        {"position": position, "value": rate, "what": entry["title"]}
        for entry in families
        for position, rate in enumerate(entry["acceptance_per_position"], 1)
    ]
    return (
        alt.Chart(alt.Data(values=rows), width="container", height=PANEL_HEIGHT)
        .mark_line(strokeWidth=2.5, point={"filled": True, "size": 60})
        .encode(
            x=alt.X("position:O", title="draft token", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("value:Q", title="share of drafts accepted up to it", scale=alt.Scale(zero=True)),
            color=alt.Color(
                "what:N",
                scale=alt.Scale(domain=[entry["title"] for entry in families]),
                legend=alt.Legend(title=None, orient="top", columns=3),
            ),
            tooltip=["what:N", "position:O", alt.Tooltip("value:Q", format=".3f")],
        )
    )


def _gain_by_family(families: Rows) -> alt.LayerChart:
    """A line from the untrained head to the trained one."""
    rows = [
        {"what": e["title"], "value": e["alpha_greedy_after"], "before": e["alpha_greedy_before"]} for e in families
    ]
    base = alt.Chart(alt.Data(values=rows), width="container", height=PANEL_HEIGHT).encode(
        y=alt.Y("what:N", title=None, sort=None, axis=alt.Axis(domain=False, ticks=False, labelPadding=10)),
        tooltip=["what:N", alt.Tooltip("before:Q", format=".3f"), alt.Tooltip("value:Q", format=".3f")],
    )
    x = alt.X("before:Q", title="alpha greedy, before and after training", scale=alt.Scale(domainMin=0))
    line = base.mark_rule(strokeWidth=3, color="var(--line)").encode(x=x, x2="value:Q")
    before = base.mark_point(size=90, filled=True, opacity=1, color="var(--plain)").encode(x=x)
    after = base.mark_point(size=120, filled=True, opacity=1, color="var(--ours)").encode(x="value:Q")
    label = base.mark_text(align="left", dx=12, fontWeight=600).encode(
        x="value:Q", text=alt.Text("value:Q", format=".3f"), color=alt.value("currentColor")
    )
    return line + before + after + label


def plain(chart: alt.TopLevelMixin) -> Spec:
    """A chart as the page draws it."""
    spec: Spec = chart.to_dict()
    del spec["$schema"], spec["config"]  # an address that nothing needs, and colours that are the page's to choose
    return spec


def _curve(entries: Rows, names: Mapping[str, str], title: str) -> alt.Chart | None:
    rows = [
        {"step": entry["step"], "value": entry[key], "what": name}
        for entry in entries
        for key, name in names.items()
        if key in entry
    ]
    if len({row["step"] for row in rows}) < 2:
        return None
    return (
        alt.Chart(alt.Data(values=rows), width="container", height=PANEL_HEIGHT)
        .mark_line(strokeWidth=2.5, interpolate="monotone")
        .encode(
            x=alt.X("step:Q", title="optimizer step", axis=alt.Axis(grid=False, tickCount=6)),
            y=alt.Y("value:Q", title=title, scale=alt.Scale(zero=False, nice=5), axis=alt.Axis(tickCount=5)),
            color=_color("what", list(names.values()), legend=len(names) > 1),
            tooltip=["step:Q", "what:N", alt.Tooltip("value:Q", format=".4f")],
        )
    )


def _color(field: str, domain: Sequence[str], *, legend: bool) -> alt.Color:
    """The page's colours in the order of `domain`: ours, then what it is set beside."""
    return alt.Color(
        f"{field}:N",
        scale=alt.Scale(domain=list(domain)),
        legend=alt.Legend(title=None, orient="top", direction="horizontal") if legend else None,
    )


def _beside(rows: Rows, x: alt.X, title: str, domain: Sequence[float]) -> alt.LayerChart:
    """Bars for what the engine measured, and on each a diamond for what was forecast."""
    base = alt.Chart(alt.Data(values=list(rows)), width="container", height=PANEL_HEIGHT).encode(
        x=x,
        y=alt.Y("value:Q", title=title, scale=alt.Scale(domain=list(domain)), axis=alt.Axis(tickCount=5)),
        color=_color("what", ["engine", "forecast"], legend=True),
        tooltip=["label:N", "what:N", alt.Tooltip("value:Q", format=".3f")],
    )
    bars = base.transform_filter("datum.what == 'engine'").mark_bar(width={"band": 0.55}, cornerRadiusEnd=4)
    labels = bars.mark_text(baseline="bottom", dy=-9, fontWeight=600).encode(
        text=alt.Text("value:Q", format=".2f"), color=alt.value("currentColor")
    )
    points = base.transform_filter("datum.what == 'forecast'").mark_point(
        shape="diamond", size=130, filled=True, opacity=1
    )
    return bars + labels + points


def _positions(report: Mapping[str, Any]) -> alt.LayerChart:
    sources = {"forecast": report["offline"]["forecast_per_position"]}
    if "engine" in report:
        sources["engine"] = report["engine"]["acceptance_per_position"]
    rows = [
        {"label": str(position), "value": rate, "what": what}
        for what, rates in sources.items()
        for position, rate in enumerate(rates, 1)
    ]
    x = alt.X("label:O", title="draft token", axis=alt.Axis(labelAngle=0))
    return _beside(rows, x, "share of drafts accepted up to it", [0, 1])


def _domains(by_domain: Mapping[str, Mapping[str, Any]]) -> alt.LayerChart:
    rows = [
        {"label": name, "value": row[key], "what": what}
        for name, row in by_domain.items()
        for key, what in (("tau", "engine"), ("tau_forecast", "forecast"))
        if row[key] is not None
    ]
    highest = max(row["value"] for row in rows)
    x = alt.X("label:N", title=None, axis=alt.Axis(labelAngle=0))
    return _beside(rows, x, "tokens per target step", [0, highest * 1.1])


def _gain(offline: Mapping[str, Any]) -> alt.LayerChart:
    names = {"before": "before training", "ce_baseline": "cross-entropy on the text", "after": "distilled"}
    rows = [
        {"what": name, "value": offline[f"alpha_greedy_{key}"]}
        for key, name in names.items()
        if f"alpha_greedy_{key}" in offline
    ]
    return _bars(rows, ours=names["after"], title="alpha greedy on held-out prompts", number=".3f")


def _speed(engine: Mapping[str, Any]) -> alt.LayerChart:
    rows = [
        {"what": "without a draft", "value": engine["tokens_per_s_without_draft"]},
        {"what": "with the draft", "value": engine["tokens_per_s"]},
    ]
    return _bars(rows, ours="with the draft", title="output tokens per second", number=",.0f")


def _bars(rows: Rows, *, ours: str, title: str, number: str) -> alt.LayerChart:
    """Bars to the right in the order of `rows`, each with its number at its end; `ours` stands out."""
    highest = max(row["value"] for row in rows)
    base = alt.Chart(alt.Data(values=list(rows)), width="container", height=BAR_HEIGHT * len(rows)).encode(
        x=alt.X(
            "value:Q",
            title=title,
            scale=alt.Scale(domain=[0, highest * 1.2 or 1], nice=False),
            axis=alt.Axis(grid=False, labels=False, ticks=False, domain=False),
        ),
        y=alt.Y("what:N", title=None, sort=None, axis=alt.Axis(domain=False, ticks=False, labelPadding=10)),
        color=alt.condition(alt.datum.what == ours, alt.value("var(--ours)"), alt.value("var(--plain)")),
        tooltip=["what:N", alt.Tooltip("value:Q", format=number)],
    )
    bars = base.mark_bar(height={"band": 0.66}, cornerRadiusEnd=4)
    labels = base.mark_text(align="left", dx=8, fontWeight=600).encode(
        text=alt.Text("value:Q", format=number), color=alt.value("currentColor")
    )
    return bars + labels
