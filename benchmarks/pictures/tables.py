"""Reads the figures of charts from docs/measurements.md, so that chart and page cannot differ."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MEASUREMENTS = Path(__file__).parents[2] / "docs/measurements.md"
FIGURE = re.compile(r"([\d.]+)x?(?:\s*\[([\d.]+), ([\d.]+)\])?")


@dataclass(frozen=True, kw_only=True)
class Figure:
    value: float
    interval: tuple[float, float] | None
    """The 95% interval; None if the table has none."""


def read_cells(text: str, label: str) -> list[str]:
    """Return the cells after `label` in the only row of the page that begins with it.

    Raises:
        ValueError: no row, or more than one, begins with the label.
    """
    rows = [line for line in text.splitlines() if line.startswith(f"| {label}")]
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} rows of {MEASUREMENTS.name} begin with {label!r}, not 1")
    return [cell.strip() for cell in rows[0].strip().strip("|").split("|")][1:]


def read_figures(cell: str) -> list[Figure]:
    """Return the figures of a cell, in their order, e.g. "**1.62x** [1.49, 2.16]".

    Raises:
        ValueError: the cell has other text.
    """
    plain = cell.replace("*", "")
    if FIGURE.sub("", plain).strip(" ,"):
        raise ValueError(f"{cell!r} is not a list of figures")
    return [
        Figure(value=float(value), interval=(float(low), float(high)) if low else None)
        for value, low, high in FIGURE.findall(plain)
    ]
