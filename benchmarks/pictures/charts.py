"""The charts of README and docs, from the tables of docs/measurements.md."""

from __future__ import annotations

import textwrap
from typing import Any

import altair as alt

from benchmarks.pictures.tables import read_cells, read_figures
from benchmarks.svg import COLORS, INK, to_svg
from benchmarks.time_to_tau.charts import draw_curves

SPEEDS = {
    "counted answers (": "counted answers",
    "counted answers before an EAGLE-3 head": "counted answers before an EAGLE-3 head",
    "n-grams |": "n-grams",
    "EAGLE-3 head, three minutes": "EAGLE-3 head, three minutes of training",
}
"""Drafts of `make demo`, by the beginning of their row in the table."""

LOADS = ("one request", "eight requests")
LEARNED = (
    "tau on prose before, after 48, 176, 304, 688 records",
    "trained offline on the same answers for as many steps",
)
TRAINING = "tau after minutes of training"
SPEED_WIDTH, LEARNING_WIDTH = 300, 430
"""The chart is narrow, so that its text stays legible on a phone."""


def read_speeds(page: str) -> list[dict[str, Any]]:
    """Read tokens/s over plain vLLM, for every draft and load."""
    rows = []
    for beginning, name in SPEEDS.items():
        for load, cell in zip(LOADS, read_cells(page, beginning), strict=False):
            (figure,) = read_figures(cell)
            low, high = figure.interval or (None, None)
            label = "\n".join(textwrap.wrap(name, 22))
            rows.append(
                {"draft": label, "load": load, "value": figure.value, "low": low, "high": high}
            )
    return rows


def draw_speeds(rows: list[dict[str, Any]]) -> str:
    """Draw bars of tokens/s over plain vLLM, with intervals where the table has them."""
    most = 1.1 * max(row["high"] or row["value"] for row in rows)
    scale = alt.Scale(domain=[0, most], nice=False)
    base = alt.Chart(alt.Data(values=rows), height={"step": 22}).encode(
        y=alt.Y(
            "draft:N",
            title=None,
            sort=None,
            axis=alt.Axis(
                labelExpr=r"split(datum.label, '\n')", labelLimit=0, domain=False, ticks=False
            ),
        ),
        yOffset=alt.YOffset("load:N", sort=list(LOADS), scale=alt.Scale(padding=0.1)),
    )
    x = alt.X(
        "value:Q",
        title="tokens/s relative to plain vLLM",
        scale=scale,
        axis=alt.Axis(grid=False, values=[0, 0.5, 1, 1.5, 2], format=".1f"),
    )
    color = alt.Color(
        "load:N",
        scale=alt.Scale(domain=list(LOADS), range=[COLORS[0], COLORS[4]]),
        legend=alt.Legend(title=None, orient="top", direction="horizontal"),
    )
    bars = base.mark_bar(cornerRadiusEnd=3).encode(x=x, color=color)
    numbers = base.mark_text(align="left", dx=6, fontWeight=600, color="#fff").encode(
        x=alt.datum(0), text=alt.Text("value:Q", format=".2f")
    )
    spread = base.transform_filter("datum.low != null").mark_rule(strokeWidth=2, color=INK)
    plain = alt.Chart(alt.Data(values=[{"plain": 1}])).mark_rule(strokeDash=[4, 3], color=INK)
    return to_svg(
        bars + numbers + spread.encode(x="low:Q", x2="high:Q") + plain.encode(x="plain:Q"),
        SPEED_WIDTH,
    )


def read_learning(page: str) -> dict[str, Any]:
    """Read tau on the new traffic by records learned from, and tau of a draft trained offline."""
    rows = page[page.index(f"| {LEARNED[0]}") :].partition("\n\n")[0]
    learned, offline = (read_cells(rows, label)[0] for label in LEARNED)
    records = [0, *map(int, LEARNED[0].partition("after ")[2].partition(" records")[0].split(", "))]
    taus = [figure.value for figure in read_figures(learned)]
    (ceiling,) = read_figures(offline)
    points = [{"records": at, "tau": tau} for at, tau in zip(records, taus, strict=True)]
    return {"points": points, "offline": ceiling.value}


def draw_learning(found: dict[str, Any]) -> str:
    """Draw tau by records, below a line for the draft that was trained offline."""
    base = alt.Chart(alt.Data(values=found["points"]), height=210).encode(
        x=alt.X(
            "records:Q",
            title="answers on the new subject that the draft has learned from",
            axis=alt.Axis(grid=False),
        ),
        y=alt.Y(
            "tau:Q",
            title="tau, tokens per target step",
            scale=alt.Scale(domain=[1, 1.05 * found["offline"]], nice=False),
            axis=alt.Axis(tickCount=5, format=".1f"),
        ),
    )
    label = "trained offline on the same answers"
    rule = alt.Chart(alt.Data(values=[{"tau": found["offline"], "label": label}])).encode(y="tau:Q")
    return to_svg(
        base.mark_line(strokeWidth=2.5, color=COLORS[0])
        + base.mark_point(filled=True, size=70, opacity=1, color=COLORS[0])
        + base.mark_text(align="left", dx=8, dy=15, fontWeight=600).encode(
            text=alt.Text("tau:Q", format=".2f")
        )
        + rule.mark_rule(strokeDash=[5, 4], color=INK)
        + rule.mark_text(align="left", dx=6, dy=-9).encode(x=alt.value(0), text="label:N"),
        LEARNING_WIDTH,
    )


def read_training(page: str) -> list[dict[str, Any]]:
    """Read each trainer's tau over minutes of training."""
    header, _, *rows = page[page.index(f"| {TRAINING}") :].partition("\n\n")[0].splitlines()
    minutes = [float(cell) for cell in read_cells(header, TRAINING)]
    points = []
    for row in rows:
        trainer = row.strip("| ").partition(" |")[0]
        for at, cell in zip(minutes, read_cells(row, trainer), strict=True):
            for figure in read_figures(cell):
                assert figure.interval, f"tau of {trainer} after {at} minutes has no interval"
                low, high = figure.interval
                points.append(
                    {"series": trainer, "x": at, "value": figure.value, "low": low, "high": high}
                )
    return points


def draw_training(points: list[dict[str, Any]]) -> str:
    """Draw tau over minutes of training."""
    trainers = list(dict.fromkeys(point["series"] for point in points))
    return to_svg(draw_curves(points, trainers), LEARNING_WIDTH)
