"""Describe a pace's choices and gain, as a line of text and on /metrics."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Gauge

from redraft.engine.counters import read_samples
from redraft.online.engine.pace_policy import BOUNDS

GAUGES = "redraft_pace_"  # Prefix of the gauges' names.
SHOWN_CELLS = 6  # maximum number of cells in a line: those with the most steps


def describe_pace(found: Mapping[str, Any]) -> str:
    """Describe a pacer's status in one line.

    E.g. `pace auto: 3 tokens at 1, 0 at 8; 1.21x [1.12, 1.30] as fast as without drafts in this
    server, including prompts; 0.5% explored`. Context lengths are named if there are several: `3
    tokens at 1 (1k), 0 at 1 (8k)`.
    """
    name = f"pace {found['pace']}{', adaptive' * bool(found.get('adaptive'))}"
    if not found["cells"]:
        return name
    shown = sorted(found["cells"], key=lambda cell: -cell.get("steps", 0))[:SHOWN_CELLS]
    has_one_length = len({cell["context"] for cell in shown}) == 1
    numbers: list[str] = []
    for cell in sorted(shown, key=lambda cell: (cell["requests"], cell["context"])):
        length = "" if has_one_length else f" ({cell['context'] / 1024:g}k)"
        unit = "" if numbers else " tokens"
        numbers.append(f"{cell['tokens']:g}{unit} at {cell['requests']:g}{length}")
    parts = [", ".join(numbers)]
    if any(cell["tokens"] for cell in shown):
        gain = "{speed:.2f}x [{low:.2f}, {high:.2f}]".format_map(found["gain"])
        parts.append(f"{gain} as fast as without drafts in this server, including prompts")
    return f"{name}: {'; '.join(parts)}; {found['explored']:.1%} explored"


class PaceMetrics:
    """A pacer's status as gauges on vLLM's /metrics page."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def make(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(
                f"{GAUGES}{name}", text, labels, registry=registry, multiprocess_mode="mostrecent"
            )

        cell = ("requests", "context")
        self._tokens = make(
            "tokens",
            "Number of draft tokens chosen, by number of requests and context length",
            *cell,
        )
        self._speed = make(
            "speed_ratio",
            "Speed relative to no draft in steps that read no prompt, with its 95% interval",
            *cell,
            "bound",
        )
        self._gain = make(
            "gain_ratio",
            "Speed relative to no draft, including steps that read prompts, with its 95% interval",
            "bound",
        )
        self._explored = make("explored_ratio", "Fraction of the time lost in probes")
        self._adaptive = make("adaptive", "1 if vLLM chooses how many draft tokens it verifies")
        self._fixed = make(
            "fixed_tokens", "Fixed number of draft tokens per step; -1 if it is chosen in each step"
        )
        self._fixed.set(-1)

    def show(self, found: Mapping[str, Any]) -> None:
        for cell in found["cells"]:
            labels = cell["requests"], cell["context"]
            self._tokens.labels(*labels).set(cell["tokens"])
            for bound in BOUNDS:
                self._speed.labels(*labels, bound).set(cell[bound])
        for bound, value in found.get("gain", {}).items():
            self._gain.labels(bound).set(value)
        self._explored.set(found.get("explored", 0))
        self._adaptive.set(found.get("adaptive", False))
        self._fixed.set(-1 if found["pace"] == "auto" else int(found["pace"]))


def read_gauges(metrics: str) -> dict[str, Any] | None:
    """Read the status from a /metrics page. Return None if the server has no pacer."""
    cells: dict[tuple[int, int], dict[str, float]] = {}
    found: dict[str, Any] = {"pace": "auto", "gain": {}}
    for sample in read_samples(metrics, GAUGES):
        if "requests" in sample.labels:
            key = int(sample.labels["requests"]), int(sample.labels["context"])
            cell = cells.setdefault(key, {"requests": key[0], "context": key[1]})
            cell[sample.labels.get("bound", "tokens")] = sample.value
        elif "bound" in sample.labels:
            found["gain"][sample.labels["bound"]] = sample.value
        elif sample.name == f"{GAUGES}explored_ratio":
            found["explored"] = sample.value
        elif sample.name == f"{GAUGES}adaptive":
            found |= {"adaptive": True} if sample.value else {}
        elif sample.value >= 0:  # the gauges of these cells are outdated
            return found | {"pace": f"{sample.value:g}", "cells": []}
    return found | {"cells": list(cells.values())} if cells else None
