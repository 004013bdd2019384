"""What a serving benchmark measures: its questions, the cells that answer them, and the numbers of every cell.

Sweep ──► plan: question -> cells ──► (a server for every variant, a load for every cell) ──► Results ──► tables

A question varies one thing and leaves the rest at the sweep's first values, so a cell often answers several. Every
cell is a file of its own, written when it is finished: an interrupted run goes on with what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eval.cost import StepCosts
from eval.kept import file_print, key_hash
from eval.load import Load, Served, median_of
from heads.artifact import write_whole

QUESTIONS = {
    "draft": "By draft",
    "tokens": "By number of draft tokens and concurrency",
    "request_rate": "By request rate",
    "input_tokens": "By input length",
    "data": "By data",
    "quantization": "With a quantised draft",
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What one server serves: the target alone, or with a draft."""

    draft: str | None = None
    num_speculative_tokens: int = 0
    quantization: str | None = None
    """Of the draft."""
    is_ideal: bool = False
    """The engine is told to accept every draft token: the most that any draft of this speed can give."""


ALONE = Variant()


@dataclass(frozen=True, kw_only=True)
class Cell:
    variant: Variant
    load: Load

    def alone(self) -> Cell:
        """The same load without a draft."""
        return replace(self, variant=ALONE)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is varied. The first of each is what the other questions are answered at."""

    drafts: tuple[str, ...]
    num_speculative_tokens: tuple[int, ...]
    concurrency: tuple[int, ...]
    request_rates: tuple[float, ...]
    """Requests per second; empty: not asked."""
    input_tokens: tuple[int, ...]
    data: tuple[str, ...]
    quantizations: tuple[str, ...]
    output_tokens: int
    prompts_per_client: int
    engine_has_ideal: bool
    """The engine can be told to accept everything."""

    def __post_init__(self) -> None:
        for name in ("drafts", "num_speculative_tokens", "concurrency", "input_tokens", "data"):
            if not getattr(self, name):
                flag = {"drafts": "--draft"}.get(name, f"--{name.replace('_', '-')}")
                raise ValueError(f"there is nothing to measure: give at least one {flag}")
        if min(self.num_speculative_tokens) < 1 or min(self.concurrency) < 1 or self.prompts_per_client < 1:
            raise ValueError("draft tokens, concurrency and prompts per client are at least 1")
        if min(self.request_rates, default=1) <= 0 or min(self.input_tokens) < 1 or self.output_tokens < 2:
            raise ValueError("a request rate is above 0, an input at least 1 token, an output at least 2")

    def load(self, **changes: Any) -> Load:
        """The first values of everything, but for the changes."""
        concurrency = changes.get("concurrency", self.concurrency[0])
        load = Load(
            data=changes.get("data", self.data[0]),
            input_tokens=changes.get("input_tokens", self.input_tokens[0]),
            output_tokens=self.output_tokens,
            num_prompts=self.prompts_per_client * (concurrency or self.concurrency[0]),
            concurrency=concurrency,
            request_rate=changes.get("request_rate"),
        )
        return replace(load, input_tokens=None) if load.has_lengths_of_its_own else load

    def variant(self, **changes: Any) -> Variant:
        first = Variant(draft=self.drafts[0], num_speculative_tokens=self.num_speculative_tokens[0])
        return replace(first, **changes)


def plan(sweep: Sweep) -> dict[str, list[Cell]]:
    """The cells of every question that is asked, those without a draft first; in the order of `QUESTIONS`."""
    base, variant = sweep.load(), sweep.variant()
    ideal = [variant, replace(variant, is_ideal=True)] if sweep.engine_has_ideal else [variant]
    by_k = [replace(v, num_speculative_tokens=k) for k in sorted(sweep.num_speculative_tokens) for v in ideal]
    drafts = [sweep.variant(draft=draft) for draft in sweep.drafts]
    quantized = [sweep.variant(quantization=name) for name in sweep.quantizations]
    rates = [sweep.load(request_rate=rate, concurrency=None) for rate in sorted(sweep.request_rates)]
    has_lengths = not base.has_lengths_of_its_own
    lengths = [sweep.load(input_tokens=length) for length in sorted(sweep.input_tokens)] if has_lengths else []
    asked = {
        "draft": _cross([ALONE, *drafts, *ideal[1:]], [base]),
        "tokens": _cross([ALONE, *by_k], [sweep.load(concurrency=c) for c in sorted(sweep.concurrency)]),
        "request_rate": _cross([ALONE, variant], rates),
        "input_tokens": _cross([ALONE, *ideal], lengths) if len(lengths) > 1 else [],
        "data": _cross([ALONE, variant], [sweep.load(data=data) for data in sweep.data]) if sweep.data[1:] else [],
        "quantization": _cross([ALONE, variant, *quantized], [base]) if quantized else [],
    }
    return {question: asked[question] for question in QUESTIONS if asked[question]}


def _cross(variants: Sequence[Variant], loads: Sequence[Load]) -> list[Cell]:
    return [Cell(variant=variant, load=load) for variant in variants for load in loads]


def by_variant(cells: Iterable[Cell]) -> dict[Variant, list[Cell]]:
    """Every cell once, by the server that it needs: the fewest starts."""
    groups: dict[Variant, list[Cell]] = {}
    for cell in dict.fromkeys(cells):
        groups.setdefault(cell.variant, []).append(cell)
    return groups


class Results:
    """The finished cells of a folder, a file each: cells/<hash>.json."""

    def __init__(self, folder: Path, served: Mapping[str, object]) -> None:
        """`served` says what is served beside the cell's own settings (target, engine): other values, other cells."""
        self.folder, self._served = folder / "cells", dict(served)

    def path(self, cell: Cell, repeat: int) -> Path:
        files = [file_print(name) for name in (cell.variant.draft, cell.load.file) if name]
        named = {"cell": asdict(cell), "served": self._served, "files": files, "repeat": repeat}
        return self.folder / f"{key_hash(named)[:16]}.json"

    def has(self, cell: Cell, repeat: int) -> bool:
        return self.path(cell, repeat).is_file()

    def add(self, cell: Cell, repeat: int, served: Served) -> None:
        """Keep a finished cell: whole or not at all, whenever the process is killed."""
        text = json.dumps({"cell": asdict(cell), "repeat": repeat, "served": served.to_json()}, indent=1)
        write_whole(self.path(cell, repeat), text)

    def median(self, cell: Cell, num_repeats: int) -> Served | None:
        """The cell's run of median speed; None where there is none."""
        runs = [json.loads(self.path(cell, r).read_text()) for r in range(num_repeats) if self.has(cell, r)]
        return median_of([Served.from_json(run["served"]) for run in runs]) if runs else None


def tables(questions: Mapping[str, Sequence[Cell]], measured: Mapping[Cell, Served]) -> dict[str, list[dict[str, Any]]]:
    """The rows of every question, those that were measured; every row carries what it is compared with.

    A question of which nothing but what it is compared with was measured has none.
    """
    found = {question: list(_rows(cells, measured)) for question, cells in questions.items()}
    if not any(row["quantization"] for row in found.get("quantization", ())):
        found.pop("quantization", None)
    return {question: rows for question, rows in found.items() if rows}


def _rows(cells: Sequence[Cell], measured: Mapping[Cell, Served]) -> Iterator[dict[str, Any]]:
    for cell in cells:
        if cell in measured and not cell.variant.is_ideal:
            ideal = replace(cell, variant=replace(cell.variant, is_ideal=True))
            yield row(cell, measured[cell], measured.get(cell.alone()), measured.get(ideal))


def row(cell: Cell, served: Served, alone: Served | None, ideal: Served | None = None) -> dict[str, Any]:
    """One row: what was asked, what was measured, and over the same load without a draft

    `speedup`           output tokens/s
    `speedup_e2e`       mean end-to-end latency: the one to read where the clients, not the server, set the pace
    `speedup_ideal`     as if every draft token were accepted: measured, or (k + 1) tokens in the very steps that were
    """
    k = cell.variant.num_speculative_tokens
    speedup_ideal = None
    if alone and k and served.step_s:
        in_these_steps = (k + 1) * alone.step_s / served.step_s
        speedup_ideal = ideal.tokens_per_s / alone.tokens_per_s if ideal else in_these_steps
    return {
        "draft": cell.variant.draft,
        "num_speculative_tokens": k,
        "quantization": cell.variant.quantization,
        **asdict(cell.load),
        "measured": served.to_json(),
        "speedup": served.tokens_per_s / alone.tokens_per_s if alone else None,
        "speedup_e2e": alone.e2e_ms.mean / served.e2e_ms.mean if alone else None,
        "speedup_ideal": speedup_ideal,
    }


def step_costs(rows: Iterable[Mapping[str, Any]], draft: str) -> StepCosts | None:
    """The costs of a draft's steps, from the rows by number of draft tokens and concurrency; None where some lack.

    The batch size is the concurrency: clients that ask again at once keep that many requests in every step.
    """
    steps: dict[int, dict[int, float]] = {}
    for entry in rows:
        if entry["draft"] in (None, draft) and entry["concurrency"] and entry["measured"]["step_s"] > 0:
            by_k = steps.setdefault(entry["concurrency"], {})
            by_k[entry["num_speculative_tokens"]] = entry["measured"]["step_s"]
    whole = {b: by_k for b, by_k in steps.items() if 0 in by_k and len(by_k) > 1}
    return StepCosts.from_steps(whole) if whole else None


def acceptance(rows: Iterable[Mapping[str, Any]], draft: str) -> list[float]:
    """Acceptance by position over all rows of a draft, each position over the steps that could have had it.

    Later positions come from fewer rows, so what they have too much of is cut: the share cannot grow by position.
    """
    accepted: list[float] = []
    steps: list[int] = []
    for entry in rows:
        if entry["draft"] == draft and not entry["quantization"]:
            measured = entry["measured"]
            for position, rate in enumerate(measured["acceptance_per_position"]):
                if position == len(accepted):
                    accepted.append(0.0)
                    steps.append(0)
                accepted[position] += rate * measured["num_steps"]
                steps[position] += measured["num_steps"]
    rates = [hits / total for hits, total in zip(accepted, steps, strict=True)]
    return [min(rates[: position + 1]) for position in range(len(rates))]
