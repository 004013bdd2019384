"""The pictures of a serving benchmark as Vega-Lite specifications, in the page's own colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from eval.charts import PANEL_HEIGHT, Rows, Spec, plain
from eval.serving_report import title

WITH, WITHOUT, IDEAL = "with the draft", "without", "every token accepted"


def charts(report: Mapping[str, Any]) -> dict[str, Spec]:
    """Specifications by the id of the place in the page that shows them; only those there are numbers for."""
    tables = report["tables"]
    first = report["settings"]["draft"]
    grid = [row for row in tables.get("tokens", ()) if row["draft"] in (None, first)]
    advice = report["drafts"][first]["advice"]
    found = {
        "by-draft": _speedups(tables.get("draft", ()), _draft_label),
        "by-tokens": _by_concurrency(grid),
        "ideal": _ideal(grid),
        "by-rate": _latencies(tables.get("request_rate", ())),
        "by-input": _speedups(tables.get("input_tokens", ()), lambda row: f"{row['input_tokens']} tokens"),
        "by-data": _speedups(tables.get("data", ()), lambda row: row["data"].rsplit("/", 1)[-1]),
        "by-quantization": _speedups(tables.get("quantization", ()), _draft_label),
        "advice": _advice(advice) if advice else None,
    }
    return {name: plain(chart) for name, chart in found.items() if chart is not None}


def _draft_label(row: Mapping[str, Any]) -> str:
    return title(row["draft"]) + (f" ({row['quantization']})" if row["quantization"] else "")


def _speedups(entries: Rows, label: Any) -> alt.LayerChart | None:
    """A bar for each row with a draft, and a diamond at what it would be were every token accepted."""
    drafted = [row for row in entries if row["draft"] and row["speedup"] is not None]
    if not drafted:
        return None
    rows = [{"label": label(r), "value": r["speedup"], "what": "measured"} for r in drafted]
    rows += [{"label": label(r), "value": r["speedup_ideal"], "what": IDEAL} for r in drafted if r["speedup_ideal"]]
    base = _base(rows).encode(
        x=alt.X("label:N", title=None, sort=None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("value:Q", title="speed-up", scale=alt.Scale(domainMin=0), axis=alt.Axis(tickCount=5)),
        color=_colors(["measured", IDEAL]),
        tooltip=["label:N", "what:N", alt.Tooltip("value:Q", format=".2f")],
    )
    bars = base.transform_filter("datum.what == 'measured'").mark_bar(width={"band": 0.5}, cornerRadiusEnd=4)
    labels = bars.mark_text(baseline="bottom", dy=-6, fontWeight=600).encode(
        text=alt.Text("value:Q", format=".2f"), color=alt.value("currentColor")
    )
    points = base.transform_filter(f"datum.what == '{IDEAL}'").mark_point(
        shape="diamond", size=130, filled=True, opacity=1
    )
    return bars + labels + points + _even()


def _even() -> alt.Chart:
    """The line at which a draft is worth nothing."""
    return (
        alt.Chart(alt.Data(values=[{"value": 1.0}]))
        .mark_rule(strokeDash=[4, 4], color="var(--faint)")
        .encode(y=alt.Y("value:Q"))
    )


def _by_concurrency(entries: Rows) -> alt.LayerChart | None:
    """Speed-up over concurrency, a line for each k."""
    drafted = [row for row in entries if row["draft"] and row["speedup"] is not None]
    if len({row["concurrency"] for row in drafted}) < 2:
        return None
    rows = [
        {"x": r["concurrency"], "value": r["speedup"], "what": f"k = {r['num_speculative_tokens']}"} for r in drafted
    ]
    return _lines(rows, "speed-up", ".2f") + _even()


def _ideal(entries: Rows) -> alt.LayerChart | None:
    """Output speed over concurrency: alone, with the best measured k, and with the best k were everything accepted."""
    by_concurrency: dict[int, dict[str, float]] = {}
    for row in entries:
        speed = row["measured"]["tokens_per_s"]
        at = by_concurrency.setdefault(row["concurrency"], {})
        if row["draft"] is None:
            at[WITHOUT] = speed
            continue
        at[WITH] = max(at.get(WITH, 0.0), speed)
        if row["speedup"] and row["speedup_ideal"]:
            at[IDEAL] = max(at.get(IDEAL, 0.0), speed / row["speedup"] * row["speedup_ideal"])
    if len(by_concurrency) < 2:
        return None
    rows = [
        {"x": b, "value": at[what], "what": what}
        for b, at in by_concurrency.items()
        for what in (WITH, IDEAL, WITHOUT)
        if what in at
    ]
    return _lines(rows, "output tokens per second", ",.0f", [WITH, IDEAL, WITHOUT])


def _latencies(entries: Rows) -> alt.LayerChart | None:
    """Mean end-to-end latency over the request rate, with the draft and without."""
    if len({row["request_rate"] for row in entries}) < 2:
        return None
    rows = [
        {
            "x": row["request_rate"],
            "value": row["measured"]["e2e_ms"]["mean"],
            "what": WITH if row["draft"] else WITHOUT,
        }
        for row in entries
    ]
    return _lines(rows, "end-to-end latency, ms", ",.0f", [WITH, WITHOUT], x_title="requests per second")


def _lines(
    rows: Rows, y_title: str, number: str, order: Sequence[str] | None = None, x_title: str = "requests at once"
) -> alt.LayerChart:
    order = order or list(dict.fromkeys(row["what"] for row in rows))
    line = _base(rows).encode(
        x=alt.X("x:O", title=x_title, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("value:Q", title=y_title, scale=alt.Scale(domainMin=0), axis=alt.Axis(tickCount=5)),
        color=_colors(order),
        tooltip=["what:N", "x:O", alt.Tooltip("value:Q", format=number)],
    )
    return alt.layer(line.mark_line(strokeWidth=2.5), line.mark_point(filled=True, size=70, opacity=1))


def _advice(advice: Mapping[str, Any]) -> alt.LayerChart:
    """Expected speed-up over batch size and k; the best of each batch size has a frame."""
    rows = [row for row in advice["table"] if row["num_speculative_tokens"]]
    best = {b: max((r for r in rows if r["batch_size"] == b), key=lambda r: r["speedup"]) for b in _batch_sizes(rows)}
    values = [
        {
            "batch": row["batch_size"],
            "k": row["num_speculative_tokens"],
            "value": row["speedup"],
            "best": row is best[row["batch_size"]] and row["speedup"] > 1,
        }
        for row in rows
    ]
    base = _base(values).encode(
        x=alt.X("batch:O", title="requests in a step", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("k:O", title="draft tokens", sort="descending"),
        tooltip=["batch:O", "k:O", alt.Tooltip("value:Q", format=".2f", title="expected speed-up")],
    )
    cells = base.mark_rect(cornerRadius=4, stroke="var(--card)", strokeWidth=3).encode(
        color=alt.condition(alt.datum.value > 1, alt.value("var(--ours)"), alt.value("var(--plain)")),
        opacity=alt.condition(alt.datum.best, alt.value(0.9), alt.value(0.3)),
    )
    labels = base.mark_text(fontWeight=600).encode(
        text=alt.Text("value:Q", format=".2f"), color=alt.value("currentColor")
    )
    return cells + labels


def _batch_sizes(rows: Rows) -> list[int]:
    return sorted({row["batch_size"] for row in rows})


def _base(rows: Rows) -> alt.Chart:
    return alt.Chart(alt.Data(values=list(rows)), width="container", height=PANEL_HEIGHT)


def _colors(order: Sequence[str]) -> alt.Color:
    legend = alt.Legend(title=None, orient="top", direction="horizontal", columns=3)
    return alt.Color("what:N", scale=alt.Scale(domain=list(order)), legend=legend)
