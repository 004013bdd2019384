"""The plan of a serving benchmark.

Its questions, the cells that answer them, and the tables of the results.

Sweep ──► plan: question -> cells ──► (a server for every variant, a load for every cell) ──►
Results ──► tables

The first question compares the drafts at the first values of the sweep. The second varies the
number of draft tokens and the concurrency. One cell often answers both. Each finished cell is
written to a separate file, so an interrupted run continues with the missing cells. A cell is only
compared with the target alone in the same pass, whose run is written beside it.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from redraft.eval.engine.draft_source import DraftSource
from redraft.eval.engine.sampling import Sampling
from redraft.eval.intervals import paired_ratio_interval
from redraft.eval.serving.cost import StepCosts
from redraft.eval.serving.load import Load, LoadResult, median_run
from redraft.heads.files.artifact import write_whole
from redraft.heads.files.kept import fingerprint_path, hash_key

QUESTIONS = {"draft": "By draft", "tokens": "By number of draft tokens and concurrency"}


@dataclass(frozen=True, kw_only=True)
class Variant:
    draft: str | None = None
    num_speculative_tokens: int = 0
    is_ideal: bool = False
    """The engine is told to accept every draft token: the upper limit for any draft of this speed.
    The benchmark can do without it if the engine refuses.
    """


ALONE = Variant()


@dataclass(frozen=True, kw_only=True)
class Cell:
    variant: Variant
    load: Load

    def alone(self) -> Cell:
        return replace(self, variant=ALONE)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The values to measure. The first of each is the base, used when the other is varied."""

    drafts: tuple[str, ...]
    num_speculative_tokens: tuple[int, ...]
    concurrency: tuple[int, ...]
    input_tokens: int
    data: str
    output_tokens: int
    prompts_per_client: int
    sampling: Sampling  # How every request is sampled.
    engine_has_ideal: bool  # The engine can be told to accept every draft token.

    def __post_init__(self) -> None:
        for name in ("drafts", "num_speculative_tokens", "concurrency"):
            if not getattr(self, name):
                flag = {"drafts": "--draft"}.get(name, f"--{name.replace('_', '-')}")
                raise ValueError(f"there is nothing to measure: give at least one {flag}")
        if (
            min(self.num_speculative_tokens) < 1
            or min(self.concurrency) < 1
            or self.prompts_per_client < 1
        ):
            raise ValueError("draft tokens, concurrency and prompts per client must be at least 1")
        if self.input_tokens < 1 or self.output_tokens < 2:
            raise ValueError("inputs must be at least 1 token, outputs at least 2")

    def load(self, concurrency: int | None = None) -> Load:
        concurrency = concurrency or self.concurrency[0]
        load = Load(
            data=self.data,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            num_prompts=self.prompts_per_client * concurrency,
            sampling=self.sampling,
            concurrency=concurrency,
        )
        return replace(load, input_tokens=None) if load.has_fixed_lengths else load

    def variant(self, **changes: Any) -> Variant:
        first = Variant(draft=self.drafts[0], num_speculative_tokens=self.num_speculative_tokens[0])
        return replace(first, **changes)


def plan(sweep: Sweep) -> dict[str, list[Cell]]:
    """The cells of both questions; cells without a draft first."""
    variant = sweep.variant()
    ideal = [variant, replace(variant, is_ideal=True)] if sweep.engine_has_ideal else [variant]
    by_k = [
        replace(v, num_speculative_tokens=k)
        for k in sorted(sweep.num_speculative_tokens)
        for v in ideal
    ]
    drafts = [sweep.variant(draft=draft) for draft in sweep.drafts]
    # Cells of both questions are equal, and `group_by_variant` measures them once.
    return {
        "draft": _cross([ALONE, *drafts, *ideal[1:]], [sweep.load()]),
        # the other drafts with the first number of tokens: costs at every batch size, to choose
        # between drafts
        "tokens": _cross(
            [ALONE, *by_k, *drafts[1:]], [sweep.load(c) for c in sorted(sweep.concurrency)]
        ),
    }


def _cross(variants: Sequence[Variant], loads: Sequence[Load]) -> list[Cell]:
    return [Cell(variant=variant, load=load) for variant in variants for load in loads]


def group_by_variant(cells: Iterable[Cell]) -> dict[Variant, list[Cell]]:
    """Every cell once, grouped by variant: each server then starts only once."""
    groups: dict[Variant, list[Cell]] = {}
    for cell in dict.fromkeys(cells):
        groups.setdefault(cell.variant, []).append(cell)
    return groups


def order_pass(missing: Mapping[Variant, Sequence[Cell]]) -> dict[Variant, list[Cell]]:
    """The cells to measure in a pass by variant, in order, given those that the pass does not have
    yet. The target alone is among them at every load of a missing cell. It comes first; or last
    if the engine may refuse all the others, so nothing is measured in vain.
    """
    drafts = {variant: list(cells) for variant, cells in missing.items() if variant != ALONE}
    alone = {
        ALONE: list(dict.fromkeys(cell.alone() for cells in missing.values() for cell in cells))
    }
    if ALONE in missing or not all(variant.is_ideal for variant in drafts):
        return alone | drafts
    return drafts | alone if drafts else {}


@dataclass(frozen=True, kw_only=True)
class Ratios:
    """A cell relative to the target alone at the same load.

    Medians over passes of the ratios within a pass.
    """

    speed: float  # Ratio of output tokens/s.
    e2e: float  # Ratio of mean end-to-end latencies, of the target alone to the cell's.
    step: float | None  # Ratio of the durations of a step; None if a step was not timed.
    interval: tuple[float, float] | None  # 95% interval of `speed`; None with a single pass.

    @staticmethod
    def from_passes(runs: Sequence[LoadResult], alone: Sequence[LoadResult]) -> Ratios:
        pairs = list(zip(runs, alone, strict=True))
        steps = [run.step_s / plain.step_s for run, plain in pairs if run.step_s and plain.step_s]
        return Ratios(
            speed=statistics.median(run.tokens_per_s / plain.tokens_per_s for run, plain in pairs),
            e2e=statistics.median(plain.e2e_ms.mean / run.e2e_ms.mean for run, plain in pairs),
            step=statistics.median(steps) if steps else None,
            interval=paired_ratio_interval(
                [r.tokens_per_s for r in runs], [r.tokens_per_s for r in alone]
            ),
        )


ITSELF = Ratios(speed=1.0, e2e=1.0, step=1.0, interval=None)  # The ratios of the target alone.
FORMAT = 2  # of the files of cells; the first had no run of the target alone beside


@dataclass(frozen=True, kw_only=True)
class Pass:
    """The content of a finished cell's file, without its settings."""

    served: LoadResult
    alone: LoadResult  # the target alone at this load, in the same pass


class Results:
    """The finished cells of a folder, one file each: cells/<hash>.json."""

    def __init__(self, folder: Path, served: Mapping[str, object]) -> None:
        """`served` are the settings common to all cells (target, engine).

        Cells measured with others are ignored.
        """
        self.folder, self._served = folder / "cells", dict(served)

    def path(self, cell: Cell, repeat: int) -> Path:
        # `ngram+HEAD` is no path: the files of its parts tell whether the draft has changed.
        draft = DraftSource.parse(cell.variant.draft or "")
        files = [
            fingerprint_path(name) for name in (draft.lookup, draft.source, cell.load.file) if name
        ]
        named = {
            "cell": asdict(cell),
            "served": self._served,
            "files": files,
            "repeat": repeat,
            "format": FORMAT,
        }
        return self.folder / f"{hash_key(named)[:16]}.json"

    def has(self, cell: Cell, repeat: int) -> bool:
        return self.path(cell, repeat).is_file()

    def add(self, cell: Cell, repeat: int, result: LoadResult, alone: LoadResult) -> None:
        """Write a finished cell atomically. `alone` is `result` itself without a draft."""
        content = {"cell": asdict(cell), "repeat": repeat}
        content |= asdict(Pass(served=result, alone=alone))
        write_whole(self.path(cell, repeat), json.dumps(content, indent=1))

    def runs(self, cell: Cell, num_repeats: int) -> list[LoadResult]:
        return [one.served for one in self._read(cell, num_repeats)]

    def median(self, cell: Cell, num_repeats: int) -> LoadResult | None:
        runs = self.runs(cell, num_repeats)
        return median_run(runs) if runs else None

    def ratios(self, cell: Cell, num_repeats: int) -> Ratios | None:
        passes = self._read(cell, num_repeats)
        served, alone = [one.served for one in passes], [one.alone for one in passes]
        return Ratios.from_passes(served, alone) if passes else None

    def _read(self, cell: Cell, num_repeats: int) -> list[Pass]:
        files = [self.path(cell, r) for r in range(num_repeats) if self.has(cell, r)]
        return [msgspec.json.decode(file.read_bytes(), type=Pass) for file in files]


def build_tables(
    questions: Mapping[str, Sequence[Cell]],
    measured: Mapping[Cell, LoadResult],
    ratios: Mapping[Cell, Ratios],
) -> dict[str, list[dict[str, Any]]]:
    """The rows of both questions, one for each measured cell.

    `ratios` are those of the cells with a draft; the report states no speed-up in words without an
    interval.
    """
    return {
        question: list(_build_rows(cells, measured, ratios))
        for question, cells in questions.items()
    }


def _build_rows(
    cells: Sequence[Cell], measured: Mapping[Cell, LoadResult], ratios: Mapping[Cell, Ratios]
) -> Iterator[dict[str, Any]]:
    for cell in cells:
        # An ideal cell gives the draft's row a column, `speedup_ideal`, and gets no row.
        if cell in measured and not cell.variant.is_ideal:
            ideal = replace(cell, variant=replace(cell.variant, is_ideal=True))
            yield build_row(cell, measured[cell], ratios.get(cell), ratios.get(ideal))


def build_row(
    cell: Cell, result: LoadResult, ratios: Ratios | None, ideal: Ratios | None = None
) -> dict[str, Any]:
    """The settings of a cell, its result, and ratios to the same load without a draft in the same
    passes.

    `speedup`           ratio of output tokens/s, with `speedup_interval`
    `speedup_e2e`       ratio of mean end-to-end latencies; the one to read if clients, not the server, set the pace
    `speedup_ideal`     ratio of output tokens/s if every draft token were accepted: measured (`ideal`), or computed as
                        k + 1 tokens in each of the measured steps
    `step_ratio`        ratio of the durations of a step
    """
    k = cell.variant.num_speculative_tokens
    if cell.variant == ALONE:
        ratios = ITSELF
    load = asdict(cell.load)
    del load["sampling"]  # the same in all rows: it is one of the report's settings
    speedup_ideal = None
    if ratios and k and ratios.step:
        speedup_ideal = ideal.speed if ideal else (k + 1) / ratios.step
    return {
        "draft": cell.variant.draft,
        "num_speculative_tokens": k,
        **load,
        "measured": asdict(result),
        "speedup": ratios.speed if ratios else None,
        "speedup_interval": ratios.interval if ratios else None,
        "speedup_e2e": ratios.e2e if ratios else None,
        "speedup_ideal": speedup_ideal,
        "step_ratio": ratios.step if ratios else None,
    }


def fit_step_costs(rows: Iterable[Mapping[str, Any]], draft: str) -> StepCosts | None:
    """The costs of a draft's steps, from rows by number of draft tokens and concurrency.

    The batch size is the concurrency: each client sends its next request at once, so every step has
    that many requests. None unless some concurrency was measured with and without the draft.
    """
    steps: dict[int, dict[int, float]] = {}
    rows = [row for row in rows if row["measured"]["step_s"] > 0]
    for row in rows:
        if row["draft"] is None:
            steps[row["concurrency"]] = {0: row["measured"]["step_s"]}
    for row in rows:
        # By the ratio within a pass: the target's step may be of a day on which the machine had
        # less to do.
        if row["draft"] == draft and row["concurrency"] in steps and row["step_ratio"]:
            by_k = steps[row["concurrency"]]
            by_k[row["num_speculative_tokens"]] = by_k[0] * row["step_ratio"]
    whole = {b: by_k for b, by_k in steps.items() if len(by_k) > 1}
    return StepCosts.from_steps(whole) if whole else None


def pool_acceptance(rows: Iterable[Mapping[str, Any]], draft: str) -> list[float]:
    """Acceptance by position over all rows of a draft, as a share of the steps with enough draft
    tokens. Later positions come from fewer rows: by chance one may have a larger share than the
    one before it, and is cut to that. Empty if no row has a share.
    """
    chosen = [
        (row["num_speculative_tokens"], row["measured"]) for row in rows if row["draft"] == draft
    ]
    if not any(measured["acceptance_per_position"] for _, measured in chosen):
        return []
    accepted, steps = np.zeros((2, max(k for k, _ in chosen)))
    for k, measured in chosen:
        # A row without a proposal has no shares, and the steps accepted nothing.
        shares = measured["acceptance_per_position"] or [0.0] * k
        accepted[: len(shares)] += np.multiply(shares, measured["num_steps"])
        steps[: len(shares)] += measured["num_steps"]
    # Weighted by steps: a short run counts for little.
    rates: list[float] = np.minimum.accumulate(accepted / steps).tolist()
    return rates
